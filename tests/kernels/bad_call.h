// Calls that a kernel must refuse: with an error that names the argument, its value and the limit, and nothing written.
#ifndef CUBIST_TESTS_KERNELS_BAD_CALL_H_
#define CUBIST_TESTS_KERNELS_BAD_CALL_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "npu_model/device.h"
#include "npu_model/status.h"
#include "npu_model/types.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"

namespace cubist::testing {

inline constexpr std::int64_t kHuge = std::int64_t{1} << 62;

// What a cast can make of a number.
inline constexpr auto kNoDType = static_cast<DType>(77);

// A right call, spoilt; and what the message must say.
template <class Args>
struct BadCall {
  std::string name;
  std::function<void(Args&)> spoil;
  std::vector<std::string> says;
};

inline ::testing::AssertionResult Says(const Status& status, const std::vector<std::string>& fragments) {
  if (status.ok()) return ::testing::AssertionFailure() << "the call was accepted";
  for (const std::string& fragment : fragments) {
    if (status.message().find(fragment) == std::string::npos) {
      return ::testing::AssertionFailure()
             << '"' << status.message() << "\" does not say \"" << fragment << '"';
    }
  }
  return ::testing::AssertionSuccess();
}

template <class T>
const T* Advanced(const void* data, std::int64_t elements) {
  return static_cast<const T*>(data) + elements;
}
template <class T>
T* Advanced(void* data, std::int64_t elements) {
  return static_cast<T*>(data) + elements;
}
template <class AnyTensor>
AnyTensor Misaligned(AnyTensor x) {
  x.data = Advanced<char>(x.data, 1);
  return x;
}
template <class AnyTensor>
AnyTensor WithoutData(AnyTensor x) {
  x.data = nullptr;
  return x;
}

// Runs every bad call on both kinds of devices, and expects the error and untouched tensors. `Fixture` has a
// valid args() and lists its tensors, and Run calls the kernel.
template <class Fixture, class Args, class Run>
void ExpectErrors(const std::vector<BadCall<Args>>& calls, Run run) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    {
      Fixture valid;
      ASSERT_TRUE(IsOk(run(device, valid.args())));
    }
    for (const BadCall<Args>& call : calls) {
      SCOPED_TRACE(call.name + (device.kind() == Device::Kind::kHost ? " on the host" : " on the model"));
      Fixture fixture;
      const Fixture before = fixture;
      Args args = fixture.args();
      call.spoil(args);
      const Status status = run(device, args);
      EXPECT_TRUE(Says(status, call.says));
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      const std::vector<const Matrix*> now = fixture.all(), then = before.all();
      for (std::size_t i = 0; i < now.size(); ++i) {
        ExpectSameBits(now[i]->view(), then[i]->view());
        ExpectGuards(*now[i]);
      }
    }
  }
}

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_KERNELS_BAD_CALL_H_
