// Reading and writing .npy files, NumPy's format for one array.
//
// fp32 is '<f4', fp16 '<f2', int32 '<i4', int64 '<i8'. bf16 has no code in NumPy: it is written as '<V2' (two
// raw bytes), as the ml_dtypes package writes its bfloat16, and read from '<V2', '|V2' or '<u2'. In Python:
//   numpy.load("x.npy").view(ml_dtypes.bfloat16)
#ifndef CUBIST_TOOLS_NPY_H_
#define CUBIST_TOOLS_NPY_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "npu_model/status.h"
#include "npu_model/types.h"
#include "tools/owned_tensor.h"

namespace cubist {

struct NpyHeader {
  DType dtype = DType::kF32;
  bool fortran_order = false;
  Shape shape;                   // 1 to 6 sizes
  std::int64_t data_offset = 0;  // bytes from the beginning of the file
  std::int64_t data_bytes = 0;
};

// Formats 1.0, 2.0 and 3.0. `head` is the beginning of a file of `file_bytes` bytes, as much of it as there
// is up to kMaxNpyHeaderBytes. The file holds the array and nothing else.
inline constexpr std::int64_t kMaxNpyHeaderBytes = 1 << 16;
Status ParseNpyHeader(std::span<const std::byte> head, std::int64_t file_bytes, NpyHeader* header);

// The array in C order, whatever its order in the file. Errors name the file, the value and the limit.
Status ReadNpy(const std::string& path, OwnedTensor* tensor);

// Format 1.0, C order. `tensor` may have any strides.
Status WriteNpy(const std::string& path, const ConstTensor& tensor);

}  // namespace cubist

#endif  // CUBIST_TOOLS_NPY_H_
