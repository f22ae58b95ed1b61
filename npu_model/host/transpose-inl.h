// Transposes in registers. Included once per Highway target, after foreach_target.h.
#if defined(CUBIST_NPU_MODEL_HOST_TRANSPOSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUBIST_NPU_MODEL_HOST_TRANSPOSE_INL_H_
#undef CUBIST_NPU_MODEL_HOST_TRANSPOSE_INL_H_
#else
#define CUBIST_NPU_MODEL_HOST_TRANSPOSE_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET != HWY_SCALAR

// Transposes each 4 x 4 block of 32-bit lanes that t[0..3] hold side by side.
template <class V>
HWY_INLINE void Transpose4(const V t[4], V out[4]) {
  const hn::DFromV<V> d;
  const hn::Repartition<std::uint64_t, hn::DFromV<V>> d64;
  const auto ab01 = hn::BitCast(d64, hn::InterleaveLower(d, t[0], t[1]));
  const auto cd01 = hn::BitCast(d64, hn::InterleaveLower(d, t[2], t[3]));
  const auto ab23 = hn::BitCast(d64, hn::InterleaveUpper(d, t[0], t[1]));
  const auto cd23 = hn::BitCast(d64, hn::InterleaveUpper(d, t[2], t[3]));
  out[0] = hn::BitCast(d, hn::InterleaveLower(d64, ab01, cd01));
  out[1] = hn::BitCast(d, hn::InterleaveUpper(d64, ab01, cd01));
  out[2] = hn::BitCast(d, hn::InterleaveLower(d64, ab23, cd23));
  out[3] = hn::BitCast(d, hn::InterleaveUpper(d64, ab23, cd23));
}

#if HWY_TARGET <= HWY_AVX3
// Transposes 4 x 4 blocks of 16 bytes.
template <class V>
HWY_INLINE void TransposeBlocks(V a, V b, V c, V e, V out[4]) {
  const hn::DFromV<V> d;
  const V ab02 = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(b), a);
  const V ab13 = hn::OddEvenBlocks(b, hn::SwapAdjacentBlocks(a));
  const V ce02 = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(e), c);
  const V ce13 = hn::OddEvenBlocks(e, hn::SwapAdjacentBlocks(c));
  out[0] = hn::ConcatLowerLower(d, ce02, ab02);
  out[1] = hn::ConcatLowerLower(d, ce13, ab13);
  out[2] = hn::ConcatUpperUpper(d, ce02, ab02);
  out[3] = hn::ConcatUpperUpper(d, ce13, ab13);
}
#endif

// Transposes as many vectors of 32-bit lanes as one has: first blocks of four columns, then inside them.
template <class V>
HWY_INLINE void Transpose(V rows[]) {
  [[maybe_unused]] const hn::DFromV<V> d;
  constexpr int kBlocks = static_cast<int>(hn::MaxLanes(hn::DFromV<V>()) / 4);
  V t[kBlocks][4];  // t[c][q]: block c of rows q, q + 4, q + 8, ..
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
#if HWY_TARGET <= HWY_AVX3
    V blocks[4];
    TransposeBlocks(rows[q], rows[q + 4], rows[q + 8], rows[q + 12], blocks);
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) t[c][q] = blocks[c];
#elif HWY_TARGET <= HWY_AVX2
    t[0][q] = hn::ConcatLowerLower(d, rows[q + 4], rows[q]);
    t[1][q] = hn::ConcatUpperUpper(d, rows[q + 4], rows[q]);
#else
    t[0][q] = rows[q];
#endif
  }
#pragma GCC unroll 4
  for (int c = 0; c < kBlocks; ++c) Transpose4(t[c], rows + 4 * c);
}

#if HWY_TARGET <= HWY_AVX2
// Transposes as many vectors of 64-bit lanes as one has.
template <class V>
HWY_INLINE void TransposeLong(V rows[]) {
  const hn::DFromV<V> d;
  constexpr int kBlocks = static_cast<int>(hn::MaxLanes(hn::DFromV<V>()) / 2);
  V even[kBlocks], odd[kBlocks];  // [c]: block c of rows 0, 2, .. and of rows 1, 3, ..
#if HWY_TARGET <= HWY_AVX3
  TransposeBlocks(rows[0], rows[2], rows[4], rows[6], even);
  TransposeBlocks(rows[1], rows[3], rows[5], rows[7], odd);
#else
  even[0] = hn::ConcatLowerLower(d, rows[2], rows[0]), even[1] = hn::ConcatUpperUpper(d, rows[2], rows[0]);
  odd[0] = hn::ConcatLowerLower(d, rows[3], rows[1]), odd[1] = hn::ConcatUpperUpper(d, rows[3], rows[1]);
#endif
#pragma GCC unroll 4
  for (int c = 0; c < kBlocks; ++c) {
    rows[2 * c] = hn::InterleaveLower(d, even[c], odd[c]);
    rows[2 * c + 1] = hn::InterleaveUpper(d, even[c], odd[c]);
  }
}
#endif

#endif  // HWY_SCALAR

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#endif  // CUBIST_NPU_MODEL_HOST_TRANSPOSE_INL_H_
