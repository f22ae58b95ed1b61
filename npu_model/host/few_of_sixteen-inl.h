// Products of few rows with a B that lies where the caller has it, where there are sixteen registers.
// Included once per Highway target, after foreach_target.h.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <type_traits>
#include <utility>

#include "npu_model/host/cube_bf16.h"
#include "npu_model/host/tile_ops.h"

#if defined(CUBIST_NPU_MODEL_HOST_FEW_OF_SIXTEEN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUBIST_NPU_MODEL_HOST_FEW_OF_SIXTEEN_INL_H_
#undef CUBIST_NPU_MODEL_HOST_FEW_OF_SIXTEEN_INL_H_
#else
#define CUBIST_NPU_MODEL_HOST_FEW_OF_SIXTEEN_INL_H_
#endif

#include "hwy/highway.h"
#include "npu_model/host/in_place-inl.h"
#include "npu_model/host/transpose-inl.h"

#if HWY_TARGET > HWY_AVX3 && !HWY_ARCH_ARM_A64 && HWY_TARGET != HWY_SCALAR

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

// In sixteen registers sums of but a few columns would stay. Instead those of all columns, or columns of B, pass through the
// first-level cache, a few rows or columns of B at a time, each in a long run, which the machine's own prefetching follows; what
// it finds too late are the first lines of the next runs, which are asked for. There is a function for each number of rows of A: a
// loop over rows takes a fifth of its instructions for itself.
// Zen 3, 7168 columns of 2048 from memory, one thread: one row of floats takes 1.0 to 1.1 times as long as reading B. Panels
// would take 1.7 (fp32) and 4.5 (bf16) times as long for one row; for eight rows, of columns, 1.5, for sixteen 1.3 times.
// Rows of A, for a B of rows and of columns.
constexpr std::int64_t kMostOfRows = CUBIST_OLD_CPU ? 2 : 8, kMostOfColumns = CUBIST_OLD_CPU ? 2 : 16;
constexpr std::int64_t kFewSums = 6144;     // Of all rows, which pass through the first-level cache,
constexpr std::int64_t kFewGap = 16;        // and so many floats between rows of them.
constexpr std::int64_t kFewHeld = 1 << 14;  // Elements of A at once.
constexpr int kFewSteps = 4;
constexpr std::int64_t kHeadLines = 8;  // Of a run, which are asked for.

// Adds kSteps rows of B, the first at `b`, times as many columns of A from `a` on to the sums of `cols` columns, a multiple
// of a panel's. Meanwhile asks for what comes next: the first lines of the next rows; all of them where products take longer
// than memory.
template <int kRows, int kSteps, class E>
void AddFewSteps(const MmadArgs& args, const float* a, const E* b, const E* next, std::int64_t cols,
                 float* sums, std::int64_t pitch) {
  const FloatTag d;
  constexpr bool kAsksAll = kRows > 2 || sizeof(E) == 2;
  constexpr std::int64_t kHead = kHeadLines * 64 / static_cast<std::int64_t>(sizeof(E));
  const std::int64_t b_row = args.b_source.row_stride, a_pitch = args.a_pitch,
                     before = kAsksAll ? 0 : std::max<std::int64_t>(cols - kHead, 0);
  for (std::int64_t j = 0; j < cols; j += kNr) {
    if (j >= before) {
#pragma GCC unroll 4
      for (int step = 0; step < kSteps; ++step) __builtin_prefetch(next + step * b_row + j - before, 0, 2);
    }
    hn::Vec<FloatTag> low[kSteps], high[kSteps];
#pragma GCC unroll 4
    for (int step = 0; step < kSteps; ++step)
      low[step] = LoadFew(b + step * b_row + j), high[step] = LoadFew(b + step * b_row + j + kLanes);
    float* sum = sums + j;
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i, sum += pitch) {
      auto s0 = hn::LoadU(d, sum), s1 = hn::LoadU(d, sum + kLanes);
#pragma GCC unroll 4
      for (int step = 0; step < kSteps; ++step) {
        const auto factor = hn::Set(d, a[i * a_pitch + step]);
        s0 = hn::MulAdd(factor, low[step], s0), s1 = hn::MulAdd(factor, high[step], s1);
      }
      hn::StoreU(s0, d, sum), hn::StoreU(s1, d, sum + kLanes);
    }
  }
}

// Of a B whose rows lie in runs: as many columns at a time as have room for their sums, which stand side by side, since rows
// of C a power of two apart would share a set of the cache.
template <int kRows, class E>
void FewInRows(const MmadArgs& args, std::int64_t cols) {
  alignas(64) float sums[kFewSums + kRows * kFewGap];
  const std::int64_t length = RoundDown(kFewSums / kRows, kNr), pitch = length + kFewGap,
                     b_row = args.b_source.row_stride;
  const auto* const a = static_cast<const float*>(args.a);
  for (const Range run : Split(cols, length)) {
    MmadTile<float> tile;  // Its start alone.
    StartAt(args, run.begin, /*first=*/true, &tile);
    for (std::int64_t i = 0; i < kRows; ++i) {
      if (tile.start == nullptr)
        std::fill_n(sums + i * pitch, run.size(), 0.0f);
      else
        CopyRow(tile.start + i * tile.start_pitch, sums + i * pitch, run.size());
    }
    const E* b = static_cast<const E*>(args.b_source.data) + run.begin;
    std::int64_t k = 0;
    for (; k + kFewSteps <= args.k; k += kFewSteps, b += kFewSteps * b_row) {
      const E* const next = k + 2 * kFewSteps <= args.k ? b + kFewSteps * b_row : b;
      AddFewSteps<kRows, kFewSteps>(args, a + k, b, next, run.size(), sums, pitch);
    }
    for (; k < args.k; ++k, b += b_row) AddFewSteps<kRows, 1>(args, a + k, b, b, run.size(), sums, pitch);
    for (std::int64_t i = 0; i < kRows; ++i)
      CopyRow(sums + i * pitch, args.c + i * args.c_pitch + run.begin, run.size());
  }
}

// The kLanes words at p in each of kLanes columns, b_col elements apart: the first of all columns as v[0], the next as v[1].
template <class E>
HWY_INLINE void LoadWordsTurned(const E* p, std::int64_t b_col, hn::Vec<FloatTag> v[kLanes]) {
  const FloatTag d;
#if HWY_TARGET == HWY_AVX2
  const hn::Half<FloatTag> half;  // Halves that are loaded to where they belong need no shuffle.
  const auto four = [&](const E* at) HWY_ATTR { return hn::LoadU(half, reinterpret_cast<const float*>(at)); };
  constexpr std::int64_t kFour = static_cast<std::int64_t>(16 / sizeof(E));
#pragma GCC unroll 2
  for (int block = 0; block < kLanes / 4; ++block, p += kFour) {
    hn::Vec<FloatTag> t[4];
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) t[q] = hn::Combine(d, four(p + (q + 4) * b_col), four(p + q * b_col));
    Transpose4(t, v + 4 * block);
  }
#else
#pragma GCC unroll 8
  for (std::int64_t q = 0; q < kLanes; ++q)
    v[q] = hn::LoadU(d, reinterpret_cast<const float*>(p + q * b_col));
  Transpose(v);
#endif
}

// kLanes times kPerWord elements of kLanes columns, turned: of each column one to a word, widened, or, of bf16, two.
template <int kPerWord, class E>
HWY_INLINE void LoadTurned(const E* p, std::int64_t b_col, hn::Vec<FloatTag> v[kLanes]) {
  if constexpr (kPerWord * sizeof(E) == sizeof(float)) {
    LoadWordsTurned(p, b_col, v);
  } else {
#pragma GCC unroll 8
    for (std::int64_t q = 0; q < kLanes; ++q) v[q] = LoadFew(p + q * b_col);
    Transpose(v);
  }
}
// An element of each of these words, as a float.
template <int kPerWord>
HWY_INLINE hn::Vec<FloatTag> ElementOf(hn::Vec<FloatTag> words, int element) {
  if constexpr (kPerWord == 1) return words;
  const auto bits = hn::BitCast(WordTag(), words);
  return hn::BitCast(FloatTag(),
                     element == 0 ? hn::ShiftLeft<16>(bits) : hn::And(bits, hn::Set(WordTag(), 0xffff0000u)));
}

// Rows of A as kLanes words of each, then the next words; what is behind the last is not read.
template <int kRows>
void WordsOfRows(const float* a, std::int64_t a_pitch, std::int64_t words, float* to) {
  const FloatTag d;
  std::int64_t p = 0;
  for (; p + kLanes <= words; p += kLanes) {
#pragma GCC unroll 16
    for (std::int64_t i = 0; i < kRows; ++i, to += kLanes)
      hn::Store(hn::LoadU(d, a + i * a_pitch + p), d, to);
  }
  for (std::int64_t i = 0; i < kRows && p < words; ++i, to += kLanes)
    std::copy_n(a + i * a_pitch + p, words - p, to);
}

// How columns are taken for kRows of A. Of bf16, whose turning takes longer than the products of few rows, two elements to a word
// (of more rows registers would be short). For one row two blocks of kLanes columns, where a sum waits for itself at each element.
// Zen 3, from memory: 1.05 to 1.17 times as fast for 3 to 6 rows, 1.1 to 1.24 for one.
template <int kRows, class E>
struct ColumnsOf {
  static constexpr int kPerWord = std::is_same_v<E, BF16> && kRows <= 6 ? 2 : 1,
                       kBlocks = sizeof(E) == 2 && kRows == 1 ? 2 : 1;
  static constexpr std::int64_t kLine = static_cast<std::int64_t>(64 / sizeof(E));
};

// Adds kLanes * kPerWord elements of kLanes columns times those of A to sums. They are turned in registers; the sums take turns in
// these, as many rows of A as leave room for what is turned; word by word, or each product would wait for the one before it.
template <int kPerWord, int kRows, class E>
HWY_INLINE void AddTile(const float* a, const E* b, std::int64_t b_col, hn::Vec<FloatTag> (&sums)[kRows]) {
  constexpr int kMostSums = 6, kGroups = (kRows + kMostSums - 1) / kMostSums,
                kGroup = (kRows + kGroups - 1) / kGroups;
  hn::Vec<FloatTag> v[kLanes];
  LoadTurned<kPerWord>(b, b_col, v);
#pragma GCC unroll 4
  for (int group = 0; group < kRows; group += kGroup) {
#pragma GCC unroll 16
    for (int p = 0; p < kLanes * kPerWord; ++p) {
      const auto element = ElementOf<kPerWord>(v[p / kPerWord], p % kPerWord);
      const float* const factors = a + p / kLanes * kRows * kLanes + p % kLanes;
#pragma GCC unroll 8
      for (int i = group; i < std::min(group + kGroup, kRows); ++i)
        sums[i] = hn::MulAdd(hn::Set(FloatTag(), factors[i * kLanes]), element, sums[i]);
    }
  }
}

// Adds to the sums of kBlocks times kLanes columns `words` elements of each, from `b` on, times those of A; where there are two
// blocks a line at a time, as columns a power of two apart share a set of the cache. From element `asks` on lines of the next
// columns are asked for.
template <int kBlocks, int kRows, class E>
HWY_INLINE void AddColumns(const float* a, const E* b, const E* next, std::int64_t b_col, std::int64_t words,
                           std::int64_t asks, hn::Vec<FloatTag> (&sums)[kBlocks][kRows]) {
  const FloatTag d;
  using Columns = ColumnsOf<kRows, E>;
  constexpr std::int64_t kTile = kLanes * Columns::kPerWord, kStep = kBlocks == 1 ? kTile : Columns::kLine;
  std::int64_t p = 0;
  for (; p + kStep <= words; p += kStep, a += kRows * kStep) {
    if (p >= asks && p % Columns::kLine == 0) {
#pragma GCC unroll 16
      for (std::int64_t q = 0; q < kBlocks * kLanes; ++q)
        __builtin_prefetch(next + q * b_col + p - asks, 0, 2);
    }
#pragma GCC unroll 2
    for (int block = 0; block < kBlocks; ++block) {
#pragma GCC unroll 8
      for (std::int64_t at = 0; at < kStep; at += kTile)
        AddTile<Columns::kPerWord>(a + kRows * at, b + block * kLanes * b_col + p + at, b_col, sums[block]);
    }
  }
  if constexpr (kStep > kLanes) {
    for (; p + kLanes <= words; p += kLanes, a += kRows * kLanes) {
#pragma GCC unroll 2
      for (int block = 0; block < kBlocks; ++block)
        AddTile<1>(a, b + block * kLanes * b_col + p, b_col, sums[block]);
    }
  }
  for (; p < words; ++p, ++a) {
#pragma GCC unroll 2
    for (int block = 0; block < kBlocks; ++block) {
      HWY_ALIGN float word[kLanes];
      for (std::int64_t c = 0; c < kLanes; ++c)
        word[c] = static_cast<float>(b[(block * kLanes + c) * b_col + p]);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i)
        sums[block][i] = hn::MulAdd(hn::Set(d, a[i * kLanes]), hn::Load(d, word), sums[block][i]);
    }
  }
}

// The sums of columns `j` on, from where they start to C.
template <int kBlocks, int kRows, class E>
HWY_INLINE void SumColumns(const MmadArgs& args, const MmadTile<float>& tile, const float* a, const E* b,
                           std::int64_t words, std::int64_t asks, std::int64_t j, std::int64_t cols) {
  const FloatTag d;
  const std::int64_t b_col = args.b_source.col_stride, next = kBlocks * kLanes;
  hn::Vec<FloatTag> sums[kBlocks][kRows];
#pragma GCC unroll 2
  for (int block = 0; block < kBlocks; ++block) {
    const std::int64_t column = j + block * kLanes;
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
      sums[block][i] =
          tile.start == nullptr ? hn::Zero(d) : hn::LoadU(d, tile.start + i * tile.start_pitch + column);
  }
  AddColumns(a, b, j + next < cols ? b + next * b_col : b, b_col, words, asks, sums);
#pragma GCC unroll 2
  for (int block = 0; block < kBlocks; ++block) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
      hn::StoreU(sums[block][i], d, args.c + i * args.c_pitch + j + block * kLanes);
  }
}

// Of a B whose columns lie in runs.
template <int kRows, class E>
void FewInColumns(const MmadArgs& args, std::int64_t cols) {
  using Columns = ColumnsOf<kRows, E>;
  constexpr std::int64_t kLength = RoundDown(kFewHeld / kRows, std::int64_t{kLanes}),
                         kHead = kHeadLines * Columns::kLine, kTogether = Columns::kBlocks * kLanes;
  alignas(64) float rows[kLength * kRows];
  const std::int64_t b_col = args.b_source.col_stride;
  const bool near = cols * std::abs(b_col) * static_cast<std::int64_t>(sizeof(E)) <= kNearB;
  MmadTile<float> tile;  // Its start alone.
  for (const Range k : Split(args.k, kLength)) {
    WordsOfRows<kRows>(static_cast<const float*>(args.a) + k.begin, args.a_pitch, k.size(), rows);
    StartAt(args, 0, k.begin == 0, &tile);
    const std::int64_t asks =
        near ? k.size() : std::max<std::int64_t>(RoundDown(k.size() - kHead, Columns::kLine), 0);
    const E* b = static_cast<const E*>(args.b_source.data) + k.begin;
    std::int64_t j = 0;
    for (; j + kTogether <= cols; j += kTogether, b += kTogether * b_col)
      SumColumns<Columns::kBlocks, kRows>(args, tile, rows, b, k.size(), asks, j, cols);
    if (j < cols) SumColumns<1, kRows>(args, tile, rows, b, k.size(), asks, j, cols);
  }
}

using FewFunction = void (*)(const MmadArgs&, std::int64_t cols);
// Of one row of A, of two, and so on.
template <class E>
constexpr auto kInRows = []<int... kLess>(std::integer_sequence<int, kLess...>) {
  return std::array<FewFunction, sizeof...(kLess)>{&FewInRows<kLess + 1, E>...};
}
(std::make_integer_sequence<int, kMostOfRows>());
template <class E>
constexpr auto kInColumns = []<int... kLess>(std::integer_sequence<int, kLess...>) {
  return std::array<FewFunction, sizeof...(kLess)>{&FewInColumns<kLess + 1, E>...};
}
(std::make_integer_sequence<int, kMostOfColumns>());

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#endif

#endif  // CUBIST_NPU_MODEL_HOST_FEW_OF_SIXTEEN_INL_H_
