// What the tests of the public kernels share.
#ifndef CUBIST_TESTS_KERNELS_KERNEL_TEST_H_
#define CUBIST_TESTS_KERNELS_KERNEL_TEST_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/device.h"
#include "npu_model/status.h"
#include "npu_model/types.h"
#include "tests/support/matrix.h"

namespace cubist::testing {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr DType kFloatTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
inline constexpr int kThreadCounts[] = {1, 2, 3, 7, 0};

inline ::testing::AssertionResult IsOk(const Status& status) {
  if (status.ok()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "status " << static_cast<int>(status.code()) << ": " << status.message();
}

// Row-major values into a tensor of any strides, rounded to its dtype.
inline void Assign(const Tensor& to, std::span<const double> values) {
  std::size_t i = 0;
  ForEachElement(to, [&](const auto&, std::int64_t offset) {
    const double value = values[i++];
    if (to.dtype == DType::kI64) {
      static_cast<std::int64_t*>(to.data)[offset] = static_cast<std::int64_t>(value);
    } else if (to.dtype == DType::kI32) {
      static_cast<std::int32_t*>(to.data)[offset] = static_cast<std::int32_t>(value);
    } else if (to.dtype == DType::kBool) {
      static_cast<std::uint8_t*>(to.data)[offset] = value != 0;
    } else {
      StoreFloat(to.data, to.dtype, offset, static_cast<float>(value));
    }
  });
}

// Values as the dtype holds them.
inline std::vector<double> RoundTo(DType dtype, std::span<const double> values) {
  std::vector<double> rounded;
  for (double value : values) rounded.push_back(RoundTo(dtype, value));
  return rounded;
}

// The other executor, of one text: it computes as the chip would be tiled.
inline Device NpuWithData(const ChipSpec& chip) { return Npu(chip, {.with_data = true}); }
inline Device NpuWithoutData(const ChipSpec& chip) { return Npu(chip, {.with_data = false}); }

// A 910B2 with less of a buffer.
inline ChipSpec WithCapacity(Buffer buffer, std::int64_t bytes) {
  ChipSpec chip = Ascend910B2();
  BufferSpec& spec = chip.buffers[static_cast<std::size_t>(buffer)];
  spec.capacity = spec.fast = bytes;
  chip.name = "small chip";
  return chip;
}

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_KERNELS_KERNEL_TEST_H_
