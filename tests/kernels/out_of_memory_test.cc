// Every kernel with memory that ends at its first, second, .. allocation: the call says so, and the next one is right.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/device.h"
#include "tests/support/limited_memory.h"
#include "tools/kernel_call.h"

namespace cubist::testing {
namespace {

std::vector<std::byte> BytesOf(const KernelCall& call) {
  std::vector<std::byte> bytes;
  for (const Tensor& out : call.outputs()) {
    std::int64_t count = 1;
    for (int d = 0; d < out.rank; ++d) count *= out.sizes[static_cast<std::size_t>(d)];
    const auto* data = static_cast<const std::byte*>(out.data);
    bytes.insert(bytes.end(), data, data + count * SizeOf(out.dtype));
  }
  return bytes;
}

// Runs with room for 0 allocations, then more, until one succeeds; `grow` is the factor between two limits.
void ExpectErrorsUntilThereIsRoom(const Device& device, const std::string& kernel, double grow) {
  SCOPED_TRACE(kernel + " on " + device.chip().name);
  KernelCallOptions options;
  options.kernel = kernel, options.with_data = true;
  for (const KernelForm& form : KernelForms()) {
    if (kernel == form.name) options.shape = form.small;
  }
  KernelCall call;
  ASSERT_TRUE(MakeKernelCall(options, &call).ok());
  ASSERT_TRUE(call(device).ok());
  const std::vector<std::byte> right = BytesOf(call);

  std::int64_t failures = 0;
  for (std::int64_t room = 0;;
       room = std::max(room + 1, static_cast<std::int64_t>(static_cast<double>(room) * grow))) {
    ASSERT_LT(room, 100'000'000);
    Status status;
    // A thread of its own, which has no memory of earlier calls.
    std::thread([&] {
      const LimitedMemory limited(room);
      status = call(device);
    }).join();
    if (status.ok()) break;
    ++failures;
    ASSERT_EQ(status.code(), StatusCode::kOutOfMemory) << "room for " << room << ": " << status.message();
  }
  EXPECT_GT(failures, 0);
  ASSERT_TRUE(call(device).ok());
  EXPECT_EQ(BytesOf(call), right) << "after " << failures << " calls without memory";
}

TEST(OutOfMemoryTest, HostKernelsSaySo) {
  for (const KernelForm& form : KernelForms()) {
    for (const int threads : {1, 2}) ExpectErrorsUntilThereIsRoom(Host({.threads = threads}), form.name, 1.0);
  }
}

TEST(OutOfMemoryTest, TheModelSaysSo) {
  for (const KernelForm& form : KernelForms())
    ExpectErrorsUntilThereIsRoom(Npu(Ascend910B2(), {}), form.name, 1.3);
}

}  // namespace
}  // namespace cubist::testing
