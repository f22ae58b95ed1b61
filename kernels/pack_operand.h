// Pre-packed operands: a product's operand stored once in the layout in which the cores multiply it (the NPU calls
// it NZ), in memory of the caller, and used many times.
#ifndef CUBIST_KERNELS_PACK_OPERAND_H_
#define CUBIST_KERNELS_PACK_OPERAND_H_

#include <cstdint>

#include "npu_model/device.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

// Which operand of c = a b.
enum class Side : std::uint8_t { kA, kB };

// What PackOperand wrote: `matrices` matrices, 0 of them too, of (rows, cols), as they are multiplied, transposes applied:
// (M, K) for a, (K, N) for b. A view, as tensors are; its memory may be copied, stored and mapped again, at any address
// that is a multiple of kPackedAlignment, as long as the device lays operands out alike (the chip, or the
// host's SIMD target). A use on another layout is refused.
struct PackedOperand {
  const void* data = nullptr;
  std::int64_t bytes = 0;  // At data.
  Side side = Side::kB;
  DType dtype = DType::kF32;
  std::int64_t matrices = 0;
  std::int64_t rows = 0, cols = 0;

  bool given() const { return matrices > 0 || bytes > 0; }
  ConstTensor memory() const { return given() ? ConstTensor(data, DType::kF32, {bytes / 4}) : ConstTensor(); }
};

inline constexpr std::int64_t kPackedAlignment = 64;

// Bytes that PackOperand writes for such matrices, of B about as many as the matrices have, of 16-bit elements of A twice as many
// where a host multiplies them as floats; 0 where sizes are negative or beyond 2^62 bytes, or the chip is refused.
CUBIST_EXPORT std::int64_t PackedOperandBytes(const Device& device, Side side, DType dtype, std::int64_t rows,
                                              std::int64_t cols, std::int64_t matrices = 1);

//   source     (rows, cols) or (matrices, rows, cols), any strides; fp32, bf16 or fp16
//   transpose  packs the transpose of each matrix: (cols, rows)
//   data       `bytes` bytes, at least PackedOperandBytes of what is packed, at a multiple of kPackedAlignment
struct PackOperandArgs {
  ConstTensor source;
  Side side = Side::kB;
  bool transpose = false;
  void* data = nullptr;
  std::int64_t bytes = 0;
};

// Packs. `packed` describes the result, for the arguments of products. Errors name the argument, its value and
// the limit; nothing is written then.
CUBIST_EXPORT Status PackOperand(const Device& device, const PackOperandArgs& args, PackedOperand* packed,
                                 Profile* profile = nullptr);

}  // namespace cubist

#endif  // CUBIST_KERNELS_PACK_OPERAND_H_
