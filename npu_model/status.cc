#include "npu_model/status.h"

#include <cstdio>
#include <cstdlib>

namespace cubist {

void CheckFailed(const char* file, int line, const char* condition, const std::string& message) {
  std::fprintf(stderr, "%s:%d: CHECK failed: %s: %s\n", file, line, condition, message.c_str());
  std::abort();
}

}  // namespace cubist
