// Products of few rows with a B whose rows lie in runs, where there are 32 registers.
// Included once per Highway target, after foreach_target.h.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <type_traits>

#include "npu_model/host/cube_bf16.h"
#include "npu_model/host/tile_ops.h"

#if defined(CUBIST_NPU_MODEL_HOST_FEW_IN_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUBIST_NPU_MODEL_HOST_FEW_IN_ROWS_INL_H_
#undef CUBIST_NPU_MODEL_HOST_FEW_IN_ROWS_INL_H_
#else
#define CUBIST_NPU_MODEL_HOST_FEW_IN_ROWS_INL_H_
#endif

#include "hwy/highway.h"
#include "npu_model/host/in_place-inl.h"

#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

// Few rows of A, whose sums cost little to keep in C: a few rows of B pass at a time, each as long as it is, a run of it beside
// those of the others. A core follows so many rows that way: on a Zen 4 four or eight give what memory gives, sixteen 0.8 of it,
// and the 32 of a panel half. There the next run is asked for meanwhile. A Zen 5 is quicker at finding it for itself, 1.1 to 1.2
// times, as long as it sees far enough ahead; the products of three rows and more keep it from that, and their sums weigh more.
// Sixteen rows of B pass there, a line of each beside the others', which is asked for as the lines before it are met.
enum class Asks { kNothing, kNextRun, kLinesAhead };
constexpr std::int64_t kMostFewRows = 16;  // Those of AMX.

// Vectors of a run of 256 bytes of floats, as far as the registers hold their sums of so many rows of A.
constexpr int FewVectors(int rows) {
  constexpr int kRun = static_cast<int>(64 / kLanes);
  const int held = rows == 1 ? 16 : rows == 2 ? 8 : 4;
  return kRun < held ? kRun : held;
}

template <class E>
constexpr int kOfLine = static_cast<int>(64 / (kLanes * sizeof(E)));  // Vectors.

template <class E, int kRows, int kVectors, int kWords, Asks kAsks>
void FewTile(const MmadTile<float>& tile) {
  const FloatTag d;
  constexpr int kAhead = (kAsks == Asks::kNextRun ? kVectors : 4 * kOfLine<E>)*kLanes,
                kLevel = kAsks == Asks::kNextRun ? 2 : 3;
  const MmadTile<float> own = tile;  // Which no store to C can change.
  for (std::int64_t col = 0; col < own.cols; col += kVectors * kLanes) {
    hn::Vec<FloatTag> sum[kRows][kVectors];
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) {
        sum[i][j] = own.start == nullptr ? hn::Zero(d)
                                         : hn::LoadU(d, own.start + i * own.start_pitch + col + j * kLanes);
      }
    }
    const float* a = own.a;
    const E* b = SourceOf<E>(own) + col;
    const auto add = [&]() HWY_ATTR {
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) {
        const auto columns = LoadFew(b + j * kLanes);
        if (j % kOfLine<E> == 0 && kAsks != Asks::kNothing)
          __builtin_prefetch(b + kAhead + j * kLanes, 0, kLevel);
#pragma GCC unroll 12
        for (int i = 0; i < kRows; ++i)
          sum[i][j] = hn::MulAdd(hn::Set(d, a[i * own.a_pitch]), columns, sum[i][j]);
      }
      ++a, b += own.b_step;
    };
    if (own.words == kWords) {  // Nearly always: as far as a core looks ahead, less of it is loops.
#pragma GCC unroll 16
      for (std::int64_t word = 0; word < kWords; ++word) add();
    } else {
      for (std::int64_t word = 0; word < own.words; ++word) add();
    }
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) hn::StoreU(sum[i][j], d, own.c + i * own.c_pitch + col + j * kLanes);
    }
  }
}

template <class E, int kRows, Asks kAsks>
constexpr FewRowTile<float> kFewRuns = {&FewTile<E, kRows, FewVectors(kRows), 8, kAsks>, FewVectors(kRows), 8,
                                        kRows > 2 && !std::is_same_v<E, float> ? kShortestRow : 0};
template <class E>
constexpr FewRowTile<float> kFewF32[] = {kFewRuns<E, 1, Asks::kNextRun>, kFewRuns<E, 2, Asks::kNextRun>,
                                         kFewRuns<E, 3, Asks::kNextRun>, kFewRuns<E, 4, Asks::kNextRun>};
// Panels of floats are as quick of three rows and more; elements that are to be widened would be packed.
template <class E>
constexpr std::int64_t kMostInRows = std::is_same_v<E, float> ? 2 : std::size(kFewF32<E>);

#if HWY_TARGET <= HWY_AVX3
// Of rows of four lines, those behind a line are met beside it, so that asking for them comes too late; five and six rows, whose
// sums are more, have to be met by longer ones. Widening twelve rows of B takes as long as meeting sixteen.
template <class E, int kRows>
constexpr int kWordsOfLines = std::is_same_v<E, float> || kRows < 4 ? 16 : 12;
template <class E, int kRows, int kVectors>
constexpr FewRowTile<float> kFewLines = {
    &FewTile<E, kRows, kVectors, kWordsOfLines<E, kRows>, Asks::kLinesAhead>, kVectors,
    kWordsOfLines<E, kRows>,
    !std::is_same_v<E, float> ? kShortestRow
    : kRows > 4               ? 512
                              : 128};
// Zen 5, 7168 columns of 2048 from memory, beside runs or panels, a line at a time: three to six rows of floats 1.1, 1.4, 1.4 and
// 1.35 times as quick, of fp16 1.65, 1.25, 1.7 and 1.5 times.
template <class E>
constexpr FewRowTile<float> kFewF32OfLines[] = {
    kFewRuns<E, 1, Asks::kNothing>, kFewRuns<E, 2, Asks::kNothing>, kFewLines<E, 3, kOfLine<E>>,
    kFewLines<E, 4, kOfLine<E>>,    kFewLines<E, 5, kOfLine<E>>,    kFewLines<E, 6, kOfLine<E>>};
// Emerald Rapids, by two vectors, which are two lines of floats or one of halves: three to six rows of floats 1.35 to 1.5 times as
// quick, seven to ten 1.6 to 1.4 times (where B is in L2 1.0 to .9), of fp16 1.15, 1.1, then 2.6 to 1.6 times.
template <class E>
constexpr FewRowTile<float> kFewF32OfTwoVectors[] = {kFewRuns<E, 1, Asks::kNothing>,
                                                     kFewRuns<E, 2, Asks::kNothing>,
                                                     kFewLines<E, 3, 2>,
                                                     kFewLines<E, 4, 2>,
                                                     kFewLines<E, 5, 2>,
                                                     kFewLines<E, 6, 2>,
                                                     kFewLines<E, 7, 2>,
                                                     kFewLines<E, 8, 2>,
                                                     kFewLines<E, 9, 2>,
                                                     kFewLines<E, 10, 2>,
                                                     kFewLines<E, 11, 2>,
                                                     kFewLines<E, 12, 2>};
template <class E>
constexpr std::int64_t kMostOfTwoVectors = std::is_same_v<E, float> ? 10 : 12;
static_assert(kMostOfTwoVectors<F16> <= kMostFewRows);
#endif

// The columns that whole tiles make; of a B in rows.
template <class T, class E>
void MmadFew(const MmadArgs& args, const FewRowTile<T>& few, std::int64_t cols) {
  constexpr std::int64_t kMostK = 32, kPerWord = static_cast<std::int64_t>(4 / sizeof(T));
  alignas(64) T rows[kMostFewRows * kMostK];
  const auto* const a = static_cast<const T*>(args.a);
  const auto* const b = static_cast<const E*>(args.b_source.data);
  const std::int64_t b_row = args.b_source.row_stride;
  MmadTile<T> tile{.rows = args.m,
                   .a = rows,
                   .a_pitch = kMostK,
                   .b_step = kPerWord * b_row,
                   .b_pair = b_row,
                   .cols = cols,
                   .c = args.c,
                   .c_pitch = args.c_pitch};
  for (const Range k : AtLeastOnce(Split(args.k, few.words * kPerWord))) {
    for (std::int64_t i = 0; i < args.m; ++i)
      std::copy_n(a + i * args.a_pitch + k.begin, k.size(), rows + i * kMostK);
    tile.words = k.size() / kPerWord, tile.half = k.size() % kPerWord != 0;
    tile.b = reinterpret_cast<const T*>(b + k.begin * b_row);
    StartAt(args, 0, k.begin == 0, &tile);
    few.function(tile);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#endif

#endif  // CUBIST_NPU_MODEL_HOST_FEW_IN_ROWS_INL_H_
