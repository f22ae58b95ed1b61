// Products of few rows with a B that lies where the caller has it, row by row. Included once per Highway target by
// cube_ops.cc, after foreach_target.h.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "npu_model/host/cube_bf16_avx512.h"
#include "npu_model/host/tile_ops.h"

#if defined(CUBIST_NPU_MODEL_HOST_FEW_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUBIST_NPU_MODEL_HOST_FEW_ROWS_INL_H_
#undef CUBIST_NPU_MODEL_HOST_FEW_ROWS_INL_H_
#else
#define CUBIST_NPU_MODEL_HOST_FEW_ROWS_INL_H_
#endif

#include "hwy/highway.h"
#include "npu_model/host/packing-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

// Few rows of A, whose sums of many columns fit the registers, so that B's rows are read in longer runs than a panel's,
// which memory gives faster: for one row a kilobyte at a time, at nearly twice the rate.

constexpr std::int64_t kFewWords = 32;  // Of k at a time.

template <int kRows, int kVectors>
void FewTile(const MmadTile<float>& tile) {
  const FloatTag d;
  hn::Vec<FloatTag> sum[kRows][kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) {
      sum[i][j] =
          tile.start == nullptr ? hn::Zero(d) : hn::LoadU(d, tile.start + i * tile.start_pitch + j * kLanes);
    }
  }
  const float *a = tile.a, *b = tile.b;
  const std::int64_t a_pitch = tile.a_pitch, b_step = tile.b_step;
  for (std::int64_t word = tile.words; word > 0; --word, ++a, b += b_step) {
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) {
      const auto columns = hn::LoadU(d, b + j * kLanes);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) sum[i][j] = hn::MulAdd(hn::Set(d, a[i * a_pitch]), columns, sum[i][j]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) hn::StoreU(sum[i][j], d, tile.c + i * tile.c_pitch + j * kLanes);
  }
}

constexpr MmadTiles<float>::Few kFewF32[] = {
#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64
    {&FewTile<1, 16>, 16}, {&FewTile<2, 8>, 8}, {&FewTile<3, 8>, 8}, {&FewTile<4, 6>, 6}
#else
    {&FewTile<1, 8>, 8}, {&FewTile<2, 6>, 6}
#endif
};

// Where the sums of columns from `col` on start: for the first words of k, or for later ones.
template <class T>
void StartAt(const MmadArgs& args, std::int64_t col, bool first, MmadTile<T>* tile) {
  tile->start = args.c + col, tile->start_pitch = args.c_pitch;
  if (!first) return;
  if (args.start == MmadStart::kZero) tile->start = nullptr;
  if (args.start == MmadStart::kBias) tile->start = args.bias + col, tile->start_pitch = 0;
  if (args.start == MmadStart::kAdd && args.sums != nullptr)
    tile->start = args.sums + col, tile->start_pitch = args.sums_pitch;
}

// The columns that whole tiles make; of a B of the operands' type, in rows.
template <class T>
void MmadFew(const MmadArgs& args, const typename MmadTiles<T>::Few& few, std::int64_t cols) {
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(T)), kPitch = kFewWords * kPerWord,
                         kMostRows = 4;
  alignas(64) std::byte storage[kMostRows * kPitch * sizeof(T)];
  T* const rows = reinterpret_cast<T*>(storage);
  const auto* const a = static_cast<const T*>(args.a);
  const auto* const b = static_cast<const T*>(args.b_source.data);
  const std::int64_t b_row = args.b_source.row_stride;
  MmadTile<T> tile{
      .a = rows, .a_pitch = kPitch, .b_step = b_row * kPerWord, .b_pair = b_row, .c_pitch = args.c_pitch};
  for (const Range k : AtLeastOnce(Split(args.k, kPitch))) {
    for (std::int64_t i = 0; i < args.m; ++i) {
      std::memcpy(static_cast<void*>(rows + i * kPitch), a + i * args.a_pitch + k.begin,
                  static_cast<std::size_t>(k.size()) * sizeof(T));
    }
    tile.words = k.size() / kPerWord, tile.half = k.size() % kPerWord != 0;
    for (std::int64_t col = 0; col < cols; col += few.vectors * kLanes) {
      tile.b = b + k.begin * b_row + col, tile.c = args.c + col;
      StartAt(args, col, k.begin == 0, &tile);
      few.function(tile);
    }
  }
}

// The columns of a product from `col` on.
inline MmadArgs ColumnsFrom(MmadArgs args, std::int64_t col) {
  args.n -= col, args.c += col;
  args.b_source.data = static_cast<const std::byte*>(args.b_source.data) +
                       col * args.b_source.col_stride * SizeOf(args.b_type);
  if (args.bias != nullptr) args.bias += col;
  if (args.sums != nullptr) args.sums += col;
  return args;
}

// Does what of a product with B in place few rows are good for, and returns the rest: all, or the last columns.
template <class T>
MmadArgs AfterFew(const MmadArgs& args, const MmadTiles<T>& tiles) {
  const bool in_rows = args.b_source.col_stride == 1 && args.b_type == DTypeOf<T>();
  if (!in_rows || args.m < 1 || args.m > tiles.most_few) return args;
  const auto& few = tiles.few[args.m - 1];
  const std::int64_t cols = RoundDown(args.n, few.vectors * kLanes);
  if (cols > 0) MmadFew<T>(args, few, cols);
  return ColumnsFrom(args, cols);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#endif  // CUBIST_NPU_MODEL_HOST_FEW_ROWS_INL_H_
