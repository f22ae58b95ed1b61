#include "npu_model/status.h"

#include <cstdio>
#include <cstdlib>

namespace cubist {

void CheckFailed(const char* file, int line, const char* condition, const std::string& message) {
  CheckFailed(file, line, condition, message.c_str());
}
void CheckFailed(const char* file, int line, const char* condition, const char* message) {
  std::fprintf(stderr, "%s:%d: CHECK failed: %s: %s\n", file, line, condition, message);
  std::abort();
}
void CheckFailed(const char* file, int line, const char* condition, const char* owner, const char* message) {
  CheckFailed(file, line, condition, std::string(owner) + ": " + message);
}

}  // namespace cubist
