// OwnedTensor: a contiguous tensor with its memory, and marks that show which of its elements a kernel wrote.
#ifndef CUBIST_TOOLS_OWNED_TENSOR_H_
#define CUBIST_TOOLS_OWNED_TENSOR_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

using Shape = std::vector<std::int64_t>;

// "(2048, 7168)".
std::string ToString(const Shape& shape);

// Bytes of a tensor, or -1 where a size is negative or the product of the others than 0 does not fit 63 bits.
std::int64_t BytesOf(DType dtype, const Shape& shape);

// What this machine has in all.
double MachineBytes();

// A contiguous view of `data`; at most BasicTensor::kMaxRank sizes.
Tensor ContiguousView(void* data, DType dtype, const Shape& shape);

class OwnedTensor {
 public:
  OwnedTensor() = default;
  // Uninitialised. Throws std::bad_alloc when the machine has no memory left.
  OwnedTensor(DType dtype, Shape shape);

  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  std::int64_t bytes() const { return bytes_; }
  std::int64_t count() const { return bytes_ / SizeOf(dtype_); }
  std::byte* data() { return memory_ ? memory_.get() + kGuardBytes : nullptr; }
  const std::byte* data() const { return memory_ ? memory_.get() + kGuardBytes : nullptr; }

  Tensor view() { return ContiguousView(data(), dtype_, shape_); }
  ConstTensor view() const { return ContiguousView(const_cast<std::byte*>(data()), dtype_, shape_); }

  // Fills every element with the mark and the memory around the tensor with guard bytes. The mark is a NaN
  // with an unusual payload (floats) or a large odd number (integers): no kernel computes it.
  void Mark();
  std::int64_t CountMarked() const;
  bool GuardsIntact() const;

  // FNV-1a over the 64-bit words of the bytes: two runs with the same digest wrote the same bits.
  std::uint64_t Digest() const;

 private:
  static constexpr std::int64_t kGuardBytes = 4096;
  struct AlignedDelete {
    void operator()(std::byte* data) const;
  };

  DType dtype_ = DType::kF32;
  Shape shape_;
  std::int64_t bytes_ = 0;
  std::unique_ptr<std::byte[], AlignedDelete> memory_;  // guard, elements, guard
};

}  // namespace cubist

#endif  // CUBIST_TOOLS_OWNED_TENSOR_H_
