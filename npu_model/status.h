// Errors: what a caller can get wrong comes back as a Status; a broken invariant of ours aborts.
#ifndef CUBIST_NPU_MODEL_STATUS_H_
#define CUBIST_NPU_MODEL_STATUS_H_

#include <string>
#include <utility>

#include "npu_model/export.h"

namespace cubist {

enum class StatusCode { kOk, kInvalidArgument, kUnsupported, kOutOfMemory };

// The outcome of a public call. The message names the value at fault and the limit it broke.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status InvalidArgument(std::string message) {
  return {StatusCode::kInvalidArgument, std::move(message)};
}

[[noreturn]] CUBIST_EXPORT void CheckFailed(const char* file, int line, const char* condition,
                                            const std::string& message);
[[noreturn]] CUBIST_EXPORT void CheckFailed(const char* file, int line, const char* condition,
                                            const char* message);
[[noreturn]] CUBIST_EXPORT void CheckFailed(const char* file, int line, const char* condition,
                                            const char* owner, const char* message);

}  // namespace cubist

// Invariants of ours, in every build type. The message is evaluated only on failure.
#define CUBIST_CHECK(condition, message) \
  (static_cast<bool>(condition) ? void(0) : ::cubist::CheckFailed(__FILE__, __LINE__, #condition, (message)))

// The same with the name of what is wrong in front of the message. Nothing is put together where it is checked, so that
// the functions of an instruction's issue stay small enough for the compiler to keep tiles in registers.
#define CUBIST_CHECK_OF(owner, condition, message) \
  (static_cast<bool>(condition) ? void(0)          \
                                : ::cubist::CheckFailed(__FILE__, __LINE__, #condition, (owner), (message)))

// The same on hot paths: debug builds only.
#ifdef NDEBUG
#define CUBIST_DCHECK(condition, message) void(0)
#else
#define CUBIST_DCHECK(condition, message) CUBIST_CHECK(condition, message)
#endif

#define CUBIST_RETURN_IF_ERROR(expression)                                                        \
  do {                                                                                            \
    if (::cubist::Status cubist_status = (expression); !cubist_status.ok()) return cubist_status; \
  } while (false)

#endif  // CUBIST_NPU_MODEL_STATUS_H_
