// Views of tensors: parts, matrices of a stack, the other way round.
#ifndef CUBIST_TOOLS_VIEWS_H_
#define CUBIST_TOOLS_VIEWS_H_

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "npu_model/types.h"

namespace cubist {

// A part of a tensor that begins `offset` elements in. Null data stays null.
template <class Void>
BasicTensor<Void> From(BasicTensor<Void> tensor, std::int64_t offset) {
  using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
  if (tensor.data != nullptr) tensor.data = static_cast<Byte*>(tensor.data) + offset * SizeOf(tensor.dtype);
  return tensor;
}

// Rows [begin, end) of the first dimension; element `i` of it with the dimension dropped.
template <class Void>
BasicTensor<Void> RowsOf(const BasicTensor<Void>& tensor, Range rows) {
  BasicTensor<Void> part = From(tensor, rows.begin * tensor.stride(0));
  part.sizes[0] = rows.size();
  return part;
}
template <class Void>
BasicTensor<Void> Element(const BasicTensor<Void>& tensor, std::int64_t i) {
  BasicTensor<Void> part = From(tensor, i * tensor.stride(0));
  std::shift_left(part.sizes.begin(), part.sizes.end(), 1);
  std::shift_left(part.strides.begin(), part.strides.end(), 1);
  --part.rank;
  return part;
}
template <class Void>
BasicTensor<Void> ColumnsOf(const BasicTensor<Void>& matrix, Range cols) {
  BasicTensor<Void> part = From(matrix, cols.begin * matrix.stride(1));
  part.sizes[1] = cols.size();
  return part;
}
// A matrix the other way round.
inline ConstTensor Transposed(ConstTensor x) {
  std::swap(x.sizes[0], x.sizes[1]), std::swap(x.strides[0], x.strides[1]);
  return x;
}

}  // namespace cubist

#endif  // CUBIST_TOOLS_VIEWS_H_
