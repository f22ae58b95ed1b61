// Products of few rows with a B that lies where the caller has it, its rows or columns in runs.
// Included once per Highway target, after foreach_target.h.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "npu_model/host/cube_bf16.h"
#include "npu_model/host/tile_ops.h"

#if defined(CUBIST_NPU_MODEL_HOST_FEW_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUBIST_NPU_MODEL_HOST_FEW_ROWS_INL_H_
#undef CUBIST_NPU_MODEL_HOST_FEW_ROWS_INL_H_
#else
#define CUBIST_NPU_MODEL_HOST_FEW_ROWS_INL_H_
#endif

#include "hwy/highway.h"
#include "npu_model/host/few_in_columns-inl.h"
#include "npu_model/host/few_in_rows-inl.h"
#include "npu_model/host/few_of_sixteen-inl.h"
#include "npu_model/host/in_place-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64

// Does what few rows are good for of a product whose B, of elements E, is in place. Returns how many columns that are, the first.
template <class T, class E>
std::int64_t MultiplyFew(const MmadArgs& args, const FewRowTiles<T>& tiles) {
#if HWY_TARGET <= HWY_AVX3
  const bool in_columns = args.b_source.row_stride == 1 && args.b_source.col_stride != 1 &&
                          args.b_type == DTypeOf<E>() &&
                          args.k * static_cast<std::int64_t>(sizeof(E)) >= ShortestColumn(args.m);
  if (in_columns && tiles.in_columns != nullptr && args.m >= 1 && args.m <= ColumnParts::kMostRows) {
    const std::int64_t cols = RoundDown(args.n, kLanes);
    if (cols > 0) FewColumns<T, E>(args, tiles, cols);
    if (cols < args.n) LastColumns<T, E>(ColumnsFrom(args, cols), tiles);
    return args.n;
  }
#endif
  const bool in_rows = args.b_source.col_stride == 1 && args.b_type == DTypeOf<E>();
  if (!in_rows || args.m < 1 || args.m > tiles.most_in_rows) return 0;
  const auto& few = tiles.in_rows[args.m - 1];
  if (args.n < few.shortest_row) return 0;
  const std::int64_t cols = RoundDown(args.n, few.vectors * kLanes);
  if (cols > 0) MmadFew<T, E>(args, few, cols);
  return cols;
}

#elif HWY_TARGET == HWY_SCALAR

template <class T, class E>
std::int64_t MultiplyFew(const MmadArgs&, const FewRowTiles<T>&) {
  return 0;
}

#else

// Does what few rows are good for of a product whose B, of elements E, is in place. Returns how many columns that are, the first.
template <class T, class E>
std::int64_t MultiplyFew(const MmadArgs& args, const FewRowTiles<T>&) {
  const bool in_rows = args.b_source.col_stride == 1;
  const std::int64_t cols = RoundDown(args.n, in_rows ? kNr : kLanes);
  if (args.m < 1 || args.m > (in_rows ? kMostOfRows : kMostOfColumns) || args.k < 1 || cols == 0) return 0;
  const auto row = static_cast<std::size_t>(args.m - 1);
  (in_rows ? kInRows<E>[row] : kInColumns<E>[row])(args, cols);
  return cols;
}

#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#endif  // CUBIST_NPU_MODEL_HOST_FEW_ROWS_INL_H_
