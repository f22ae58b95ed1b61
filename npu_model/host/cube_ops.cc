// The Cube's instruction bodies, compiled once per Highway target.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "npu_model/host/cube_bf16_avx512.h"
#include "npu_model/host/tile_ops.h"

// All of Highway's x86 targets; of Arm's, NEON: the register tiles below are arrays, which sizeless vectors
// cannot form.
#define HWY_WANT_AVX3_DL
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE_256 | HWY_SVE2 | HWY_SVE2_128 | HWY_RVV)

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "npu_model/host/cube_ops.cc"  // NOLINT
#include "hwy/foreach_target.h"                          // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = HWY_FULL(float);
using WordTag = hn::Rebind<std::uint32_t, FloatTag>;
using HalfTag = hn::Rebind<std::uint16_t, FloatTag>;  // As many 16-bit lanes as a vector has floats.
using Vec = hn::Vec<FloatTag>;
using Words = hn::Vec<WordTag>;

// The register tile: of 32 vector registers 24 hold sums, two B, one A; of 16, 12 hold sums.
#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64
constexpr int kMr = 12;
#else
constexpr int kMr = 6;
#endif
constexpr std::int64_t kLanes = static_cast<std::int64_t>(hn::MaxLanes(FloatTag()));
constexpr std::int64_t kNr = 2 * kLanes;

constexpr std::int64_t Min(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
constexpr std::int64_t RoundDown(std::int64_t a, std::int64_t b) { return a / b * b; }

// ---- Mmad

// Rows of A are reached from every third one, by one and two pitches. Twelve pointers do not fit the
// registers, and a spilled one comes back through the vector pipes: with them the loop runs at 0.94 of the
// peak, with four at 0.98.
constexpr int kRowsPerPointer = 3;

template <int kRows, int kVectors, bool kInRows>
void Tile(const MmadTile<float>& tile) {
  const FloatTag d;
  constexpr int kPointers = (kRows + kRowsPerPointer - 1) / kRowsPerPointer;
  const std::int64_t a_pitch = tile.a_pitch;
  const float* row[kPointers];
#pragma GCC unroll 4
  for (int i = 0; i < kPointers; ++i) {
    row[i] = tile.a + i * kRowsPerPointer * a_pitch;
    asm("" : "+r"(row[i]));  // Or the compiler derives all of them from the first again.
  }
  Vec sum[kRows][kVectors];
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      sum[i][j] =
          tile.start == nullptr ? hn::Zero(d) : hn::LoadU(d, tile.start + i * tile.start_pitch + j * kLanes);
    }
  }
  const float* b = tile.b;
  [[maybe_unused]] float* keep = tile.keep;
  const char* prefetch = static_cast<const char*>(tile.prefetch);
  const std::int64_t b_step = tile.b_step;
  const std::int64_t prefetch_step = tile.prefetch_step, prefetch_pair = tile.prefetch_pair;
  for (std::int64_t word = tile.words; word > 0; --word) {
    Vec columns[kVectors];
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) columns[j] = hn::LoadU(d, b + j * kLanes);
    if (kInRows && keep != nullptr) {
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) hn::StoreU(columns[j], d, keep + j * kLanes);
      keep += kNr;
    }
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const Vec ai = hn::Set(d, row[i / kRowsPerPointer][i % kRowsPerPointer * a_pitch]);
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::MulAdd(ai, columns[j], sum[i][j]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kPointers; ++i) ++row[i];
    b += b_step;
    if (prefetch == nullptr) continue;
    __builtin_prefetch(prefetch, 0, 2);
    __builtin_prefetch(prefetch + prefetch_pair, 0, 2);
    prefetch += prefetch_step;
  }
  float* c = tile.c;
  const std::int64_t c_pitch = tile.c_pitch;
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) hn::StoreU(sum[i][j], d, c + i * c_pitch + j * kLanes);
  }
}

template <int kVectors, bool kInRows>
constexpr MmadTileFunction<float> kTiles[kMr] = {&Tile<1, kVectors, kInRows>,
                                                 &Tile<2, kVectors, kInRows>,
                                                 &Tile<3, kVectors, kInRows>,
                                                 &Tile<4, kVectors, kInRows>,
                                                 &Tile<5, kVectors, kInRows>,
                                                 &Tile<6, kVectors, kInRows>,
#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64
                                                 &Tile<7, kVectors, kInRows>,
                                                 &Tile<8, kVectors, kInRows>,
                                                 &Tile<9, kVectors, kInRows>,
                                                 &Tile<10, kVectors, kInRows>,
                                                 &Tile<11, kVectors, kInRows>,
                                                 &Tile<12, kVectors, kInRows>
#endif
};
constexpr MmadTiles<float> kTilesF32{kTiles<2, false>, kTiles<1, false>, kTiles<2, true>};

// Rows in strips of at most kMr, as few as there can be and of about one height: a low one costs the reading of B all
// the same.
class Strips {
 public:
  explicit Strips(std::int64_t rows)
      : count_(CeilDiv(rows, kMr)),
        height_(rows / (count_ > 0 ? count_ : 1)),
        higher_(rows - count_ * height_) {}
  std::int64_t count() const { return count_; }
  Range operator[](std::int64_t i) const {
    const std::int64_t begin = i * height_ + Min(i, higher_);
    return {begin, begin + height_ + (i < higher_ ? 1 : 0)};
  }

 private:
  std::int64_t count_, height_, higher_;
};

// Rows of A that come next, to be asked for meanwhile: so many lines of each for every panel.
template <class T>
struct NextRows {
  static constexpr std::int64_t kLineElements = static_cast<std::int64_t>(64 / sizeof(T));

  void Fetch(std::int64_t panel) const {
    const std::int64_t end = Min((panel + 1) * lines_per_panel, lines);
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t line = panel * lines_per_panel; line < end; ++line) {
        __builtin_prefetch(a + i * pitch + line * kLineElements);
      }
    }
  }

  const T* a = nullptr;
  std::int64_t pitch = 0, rows = 0, lines = 0, lines_per_panel = 0;
};

// A tile of C of fewer columns than a panel has: the panel's others may be another's, or nobody's.
template <class T>
void MmadEdge(MmadTileFunction<T> function, std::int64_t rows, std::int64_t cols, const MmadTile<T>& tile) {
  alignas(64) float sums[kMr * kNr];
  const auto bytes = static_cast<std::size_t>(cols) * sizeof(float);
  MmadTile<T> own = tile;
  own.c = sums, own.c_pitch = kNr;
  if (tile.start != nullptr) {
    for (std::int64_t i = 0; i < rows; ++i)
      std::memcpy(sums + i * kNr, tile.start + i * tile.start_pitch, bytes);
    own.start = sums, own.start_pitch = kNr;
  }
  function(own);
  for (std::int64_t i = 0; i < rows; ++i) std::memcpy(tile.c + i * tile.c_pitch, sums + i * kNr, bytes);
}

// Rows of C that lie within so many bytes are taken to be in L2.
constexpr std::int64_t kNearBytes = 1 << 18;

// Asks for the lines of a whole tile of C, which the stores at its end would wait for.
HWY_INLINE void FetchTile(const float* c, std::int64_t pitch, std::int64_t rows) {
  for (std::int64_t i = 0; i < rows; ++i) {
    __builtin_prefetch(c + i * pitch, 1);
    __builtin_prefetch(c + i * pitch + kNr - 1, 1);
  }
}

// One row of tiles, for `tile.words` steps of k: the strip of A stays in L1, the panels of B come from L2. The
// other order, where a panel stays and strips come, loses 0.01 to 0.05 of the peak: its tiles of C lie far
// apart. Panels that are met for the first time come from L3, a panel ahead of their use, and so do the next
// rows of A: without that 0.01 to 0.05 of the peak is lost, the more the busier the neighbours of L3 are. The
// others are not asked for: two prefetches a word take 0.01. `tile` is one object, written field by field: a copy
// would wait for the stores of the tile before it.
template <class T>
void MmadStrip(const MmadArgs& args, Range m, MmadTile<T>& tile, MmadStart start, const NextRows<T>& next,
               const MmadTiles<T>& tiles) {
  const T* b = tile.b;
  const bool fetches_c = args.exact && args.c_pitch * args.m * 4 > kNearBytes;
  const Split panels(args.n, kNr);
  for (std::int64_t panel = 0; panel < panels.count(); ++panel) {
    const Range n = panels[panel];
    alignas(64) float bias[kNr];
    tile.b = b + panel * args.b_panel_stride;
    tile.prefetch = m.begin == 0 && panel + 1 < panels.count() ? tile.b + args.b_panel_stride : nullptr;
    next.Fetch(panel);
    tile.c = args.c + m.begin * args.c_pitch + n.begin;
    if (start == MmadStart::kAdd) {
      tile.start = args.sums == nullptr ? tile.c : args.sums + m.begin * args.sums_pitch + n.begin;
      tile.start_pitch = args.sums == nullptr ? args.c_pitch : args.sums_pitch;
    } else if (start == MmadStart::kBias) {
      std::memcpy(bias, args.bias + n.begin, static_cast<std::size_t>(n.size()) * sizeof(float));
      std::fill(bias + n.size(), bias + kNr, 0.0f);
      tile.start = bias, tile.start_pitch = 0;
    }
    const auto function = (n.size() > kLanes ? tiles.wide : tiles.narrow)[m.size() - 1];
    if (args.exact && n.size() < kNr) {
      MmadEdge(function, m.size(), n.size(), tile);
      continue;
    }
    if (fetches_c) FetchTile(tile.c, args.c_pitch, m.size());
    function(tile);
  }
}

// Rows of A a multiple of this apart fall into one set of L1, which cannot hold kMr lines: the strip is
// copied, a piece of k at a time. Without that the loop runs at 0.90 of the peak. The copy costs as much as
// one panel loses.
constexpr std::int64_t kConflictBytes = 4096;
constexpr std::int64_t kPieceBytes = 2048;

template <class T>
void Mmad(const MmadArgs& args, const MmadTiles<T>& tiles) {
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(T)),
                         kPiece = kPieceBytes / 4 * kPerWord;
  constexpr std::int64_t kCopyPitch = kPiece + 16 * kPerWord;
  alignas(64) std::byte storage[kMr * kCopyPitch * sizeof(T)];  // Bytes, which nothing initialises.
  T* const copy = reinterpret_cast<T*>(storage);
  const bool conflict =
      args.a_pitch * static_cast<std::int64_t>(sizeof(T)) % kConflictBytes == 0 && args.n > 2 * kNr;
  const std::int64_t piece = conflict ? kPiece : args.k;
  const Strips strips(args.m);
  const auto a_at = [&](std::int64_t row, std::int64_t p) {
    return static_cast<const T*>(args.a) + row * args.a_pitch + p;
  };
  NextRows<T> next{.pitch = args.a_pitch, .lines = CeilDiv(Min(piece, args.k), 16 * kPerWord)};
  next.lines_per_panel = CeilDiv(next.lines, std::max<std::int64_t>(CeilDiv(args.n, kNr), 1));
  MmadArgs rest = args;  // Of a strip, after its first piece.
  rest.sums = nullptr;
  for (std::int64_t strip = 0; strip < strips.count(); ++strip) {
    const Range m = strips[strip];
    std::int64_t p = 0;
    do {
      const std::int64_t k = Min(piece, args.k - p);
      MmadTile<T> tile{.words = k / kPerWord,
                       .a = a_at(m.begin, p),
                       .a_pitch = args.a_pitch,
                       .b = static_cast<const T*>(args.b) + p * kNr,
                       .b_step = kNr * kPerWord,
                       .half = k % kPerWord != 0,
                       .prefetch_step = kNr * 4,
                       .prefetch_pair = kNr * 2,
                       .c_pitch = args.c_pitch};
      if (conflict) {
        for (std::int64_t i = 0; i < m.size(); ++i) {
          std::memcpy(static_cast<void*>(copy + i * kCopyPitch), tile.a + i * args.a_pitch,
                      static_cast<std::size_t>(k) * sizeof(T));
        }
        tile.a = copy, tile.a_pitch = kCopyPitch;
      }
      const bool ends = p + piece >= args.k;
      next.rows = !ends ? m.size() : strip + 1 < strips.count() ? strips[strip + 1].size() : 0;
      next.a = ends ? a_at(m.end, 0) : a_at(m.begin, p + piece);
      MmadStrip(p == 0 ? args : rest, m, tile, p == 0 ? args.start : MmadStart::kAdd, next, tiles);
      p += piece;
    } while (p < args.k);
  }
}

std::int64_t PeakFma(std::int64_t rounds) {
  const FloatTag d;
  constexpr int kChains = 2 * kMr;
  volatile float half = 0.5f;  // Volatile, so that the compiler can neither fold nor drop the sums.
  const Vec x = hn::Set(d, half);
  const Vec y = hn::Set(d, half);
  Vec sum[kChains];
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) sum[i] = hn::Set(d, static_cast<float>(i));  // Equal chains would merge.
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) sum[i] = hn::MulAdd(x, y, sum[i]);
  }
  Vec total = sum[0];
#pragma GCC unroll 24
  for (int i = 1; i < kChains; ++i) total = hn::Add(total, sum[i]);
  volatile float sink = hn::GetLane(total);
  (void)sink;
  return rounds * kChains * kLanes;
}

// ---- Packing: elements of the source type to words of the operand type

// How source elements become operand elements, one by one and a vector at a time.
template <class Source>
struct Widen {
  using From = Source;
  using To = float;
  static float One(Source value) { return static_cast<float>(value); }
};
struct KeepBF16 {
  using From = BF16;
  using To = BF16;
  static BF16 One(BF16 value) { return value; }
};

// kLanes elements as floats, in the bits of words.
HWY_INLINE Words LoadWords(const float* p) { return hn::BitCast(WordTag(), hn::LoadU(FloatTag(), p)); }
HWY_INLINE Words LoadHalves(const void* p) {
  return hn::PromoteTo(WordTag(), hn::LoadU(HalfTag(), static_cast<const std::uint16_t*>(p)));
}
HWY_INLINE Words LoadWords(const BF16* p) { return hn::ShiftLeft<16>(LoadHalves(p)); }
HWY_INLINE Words LoadWords(const F16* p) {
#if HWY_TARGET <= HWY_AVX2 && !defined(HWY_DISABLE_F16C)
  const hn::Rebind<hwy::float16_t, FloatTag> d16;
  const auto half = hn::BitCast(d16, hn::LoadU(HalfTag(), reinterpret_cast<const std::uint16_t*>(p)));
  return hn::BitCast(WordTag(), hn::PromoteTo(FloatTag(), half));
#else
  // Exponent and mantissa of the half, read as a float, are its value times 2^-112, subnormals included.
  const FloatTag d;
  const WordTag du;
  const Words h = LoadHalves(p);
  const Words shifted = hn::ShiftLeft<13>(hn::And(h, hn::Set(du, 0x7fffu)));
  const Words finite = hn::BitCast(du, hn::Mul(hn::BitCast(d, shifted), hn::Set(d, 0x1p112f)));
  const Words special = hn::Or(shifted, hn::Set(du, 0x7f800000u));
  const auto is_special = hn::Gt(hn::BitCast(hn::Rebind<std::int32_t, FloatTag>(), shifted),
                                 hn::Set(hn::Rebind<std::int32_t, FloatTag>(), 0x0f7fffff));
  const Words magnitude = hn::IfThenElse(hn::RebindMask(du, is_special), special, finite);
  return hn::Or(magnitude, hn::ShiftLeft<16>(hn::And(h, hn::Set(du, 0x8000u))));
#endif
}
HWY_INLINE void StoreWords(Words words, void* p) {
  hn::StoreU(words, WordTag(), static_cast<std::uint32_t*>(p));
}

// `count` adjacent elements.
template <class Source>
HWY_INLINE void ConvertRow(Widen<Source>, const Source* src, float* dst, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) StoreWords(LoadWords(src + i), dst + i);
  for (; i < count; ++i) dst[i] = static_cast<float>(src[i]);
}
template <class T>
HWY_INLINE void CopyRow(const T* src, T* dst, std::int64_t count) {
  std::memcpy(dst, src, static_cast<std::size_t>(count) * sizeof(T));
}
HWY_INLINE void ConvertRow(Widen<float>, const float* src, float* dst, std::int64_t count) {
  CopyRow(src, dst, count);
}
#if HWY_TARGET <= HWY_AVX3
HWY_INLINE void ConvertRow(KeepBF16, const BF16* src, BF16* dst, std::int64_t count) {
  CopyRow(src, dst, count);
}
#endif

#if HWY_TARGET != HWY_SCALAR
// Transposes each 4 x 4 block of words that t[0..3] hold side by side.
HWY_INLINE void Transpose4(const Words t[4], Words out[4]) {
  const WordTag d;
  const hn::Repartition<std::uint64_t, WordTag> d64;
  const auto ab01 = hn::BitCast(d64, hn::InterleaveLower(d, t[0], t[1]));
  const auto cd01 = hn::BitCast(d64, hn::InterleaveLower(d, t[2], t[3]));
  const auto ab23 = hn::BitCast(d64, hn::InterleaveUpper(d, t[0], t[1]));
  const auto cd23 = hn::BitCast(d64, hn::InterleaveUpper(d, t[2], t[3]));
  out[0] = hn::BitCast(d, hn::InterleaveLower(d64, ab01, cd01));
  out[1] = hn::BitCast(d, hn::InterleaveUpper(d64, ab01, cd01));
  out[2] = hn::BitCast(d, hn::InterleaveLower(d64, ab23, cd23));
  out[3] = hn::BitCast(d, hn::InterleaveUpper(d64, ab23, cd23));
}

// Transposes kLanes x kLanes words in registers: first blocks of four columns, then inside them.
HWY_INLINE void Transpose(Words rows[kLanes]) {
  [[maybe_unused]] const WordTag d;
  constexpr int kBlocks = static_cast<int>(kLanes / 4);
  Words t[kBlocks][4];  // t[c][q]: block c of rows q, q + 4, q + 8, ..
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
#if HWY_TARGET <= HWY_AVX3
    const Words ab02 = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(rows[q + 4]), rows[q]);
    const Words ab13 = hn::OddEvenBlocks(rows[q + 4], hn::SwapAdjacentBlocks(rows[q]));
    const Words cd02 = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(rows[q + 12]), rows[q + 8]);
    const Words cd13 = hn::OddEvenBlocks(rows[q + 12], hn::SwapAdjacentBlocks(rows[q + 8]));
    t[0][q] = hn::ConcatLowerLower(d, cd02, ab02);
    t[1][q] = hn::ConcatLowerLower(d, cd13, ab13);
    t[2][q] = hn::ConcatUpperUpper(d, cd02, ab02);
    t[3][q] = hn::ConcatUpperUpper(d, cd13, ab13);
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
#endif  // HWY_SCALAR

// ---- PackA

// Rows [i.begin, i.end), columns [p.begin, p.end), any strides.
template <class Convert>
void PackAElements(Convert, Range rows, Range columns, const StridedSource& src, typename Convert::To* dst,
                   std::int64_t pitch) {
  const auto* data = static_cast<const typename Convert::From*>(src.data);
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    for (std::int64_t p = columns.begin; p < columns.end; ++p) {
      dst[i * pitch + p] = Convert::One(data[i * src.row_stride + p * src.col_stride]);
    }
  }
}

#if HWY_TARGET != HWY_SCALAR
// One vector of words, of which lane i belongs to row i of A, from the source's columns at `p`, which are
// adjacent in i.
template <class Source>
HWY_INLINE Words LoadColumn(Widen<Source>, const Source* p, std::int64_t) {
  return LoadWords(p);
}
#if HWY_TARGET <= HWY_AVX3
HWY_INLINE Words LoadColumn(KeepBF16, const BF16* p, std::int64_t col_stride) {
  return hn::Or(LoadHalves(p), hn::ShiftLeft<16>(LoadHalves(p + col_stride)));
}
#endif

// The source's columns are adjacent in memory: transposes kLanes rows by kLanes words.
template <class Convert>
void PackATransposed(Convert convert, std::int64_t m, std::int64_t k, const StridedSource& src,
                     typename Convert::To* dst, std::int64_t pitch) {
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(typename Convert::To));
  const auto* data = static_cast<const typename Convert::From*>(src.data);
  const std::int64_t m_full = RoundDown(m, kLanes), k_full = RoundDown(k, kLanes * kPerWord);
  for (std::int64_t p = 0; p < k_full; p += kLanes * kPerWord) {
    for (std::int64_t i = 0; i < m_full; i += kLanes) {
      Words block[kLanes];
      const auto* from = data + p * src.col_stride + i;
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) {
        block[r] = LoadColumn(convert, from + r * kPerWord * src.col_stride, src.col_stride);
      }
      Transpose(block);
      auto* to = dst + i * pitch + p;
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) StoreWords(block[r], to + r * pitch);
    }
  }
  PackAElements(convert, {m_full, m}, {0, k_full}, src, dst, pitch);
  PackAElements(convert, {0, m}, {k_full, k}, src, dst, pitch);
}
#endif

template <class Convert>
void PackAs(Convert convert, std::int64_t m, std::int64_t k, const StridedSource& src, void* dst_data,
            std::int64_t pitch) {
  auto* dst = static_cast<typename Convert::To*>(dst_data);
  if (src.col_stride == 1) {
    const auto* data = static_cast<const typename Convert::From*>(src.data);
    for (std::int64_t i = 0; i < m; ++i) ConvertRow(convert, data + i * src.row_stride, dst + i * pitch, k);
#if HWY_TARGET != HWY_SCALAR
  } else if (src.row_stride == 1) {
    PackATransposed(convert, m, k, src, dst, pitch);
#endif
  } else {
    PackAElements(convert, {0, m}, {0, k}, src, dst, pitch);
  }
}

void PackA(DType dtype, std::int64_t m, std::int64_t k, const StridedSource& src, void* dst,
           std::int64_t pitch) {
  switch (dtype) {
    case DType::kBF16:
      return PackAs(Widen<BF16>(), m, k, src, dst, pitch);
    case DType::kF16:
      return PackAs(Widen<F16>(), m, k, src, dst, pitch);
    default:
      return PackAs(Widen<float>(), m, k, src, dst, pitch);
  }
}

// ---- PackB

// Where element (p, j) stands in the panels.
template <class To>
HWY_INLINE std::int64_t PanelOffset(std::int64_t p, std::int64_t j, std::int64_t panel_stride) {
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(To));
  return j / kNr * panel_stride + (p / kPerWord * kNr + j % kNr) * kPerWord + p % kPerWord;
}

template <class Convert>
void PackBElements(Convert, Range rows, Range columns, const StridedSource& src, typename Convert::To* dst,
                   std::int64_t panel_stride) {
  using To = typename Convert::To;
  const auto* data = static_cast<const typename Convert::From*>(src.data);
  for (std::int64_t p = rows.begin; p < rows.end; ++p) {
    for (std::int64_t j = columns.begin; j < columns.end; ++j) {
      dst[PanelOffset<To>(p, j, panel_stride)] = Convert::One(data[p * src.row_stride + j * src.col_stride]);
    }
  }
}

// Rows of the source are adjacent in memory. A few words of k are packed for one panel after the other: their rows are
// read side by side, and each panel is written a few lines at a time. Word by word the lines that are under way would
// lie a panel apart, in one set of the caches where that is a power of two: a third of the speed.
constexpr std::int64_t kWordsAtATime = 4;
constexpr std::int64_t kBytesAhead = 256;

template <class Source>
void PackBPlain(Widen<Source> convert, std::int64_t k, std::int64_t n, const StridedSource& src, float* dst,
                std::int64_t panel_stride) {
  constexpr std::int64_t kAhead = kBytesAhead / static_cast<std::int64_t>(sizeof(Source));
  const auto* data = static_cast<const Source*>(src.data);
  for (std::int64_t first = 0; first < k; first += kWordsAtATime) {
    for (std::int64_t j = 0; j < n; j += kNr) {
      for (std::int64_t p = first; p < Min(first + kWordsAtATime, k); ++p) {
        const Source* from = data + p * src.row_stride + j;
        float* to = dst + PanelOffset<float>(p, j, panel_stride);
        if (n - j < kNr) {
          ConvertRow(convert, from, to, n - j);
          continue;
        }
        __builtin_prefetch(from + kAhead);
        __builtin_prefetch(from + kAhead + kLanes);
        StoreWords(LoadWords(from), to);
        StoreWords(LoadWords(from + kLanes), to + kLanes);
      }
    }
  }
}
#if HWY_TARGET <= HWY_AVX3
// Two rows at a time, interleaved.
void PackBPlain(KeepBF16 convert, std::int64_t k, std::int64_t n, const StridedSource& src, BF16* dst,
                std::int64_t panel_stride) {
  constexpr std::int64_t kAhead = kBytesAhead / static_cast<std::int64_t>(sizeof(BF16));
  const auto* data = static_cast<const BF16*>(src.data);
  const std::int64_t k_full = RoundDown(k, 2), n_full = RoundDown(n, kLanes), step = 2 * kWordsAtATime;
  for (std::int64_t first = 0; first < k_full; first += step) {
    for (std::int64_t panel = 0; panel < n_full; panel += kNr) {
      for (std::int64_t p = first; p < Min(first + step, k_full); p += 2) {
        const BF16* from = data + p * src.row_stride;
        __builtin_prefetch(from + panel + kAhead);
        __builtin_prefetch(from + src.row_stride + panel + kAhead);
        for (std::int64_t j = panel; j < Min(panel + kNr, n_full); j += kLanes) {
          const Words pairs =
              hn::Or(LoadHalves(from + j), hn::ShiftLeft<16>(LoadHalves(from + src.row_stride + j)));
          StoreWords(pairs, dst + PanelOffset<BF16>(p, j, panel_stride));
        }
      }
    }
  }
  PackBElements(convert, {0, k_full}, {n_full, n}, src, dst, panel_stride);
  PackBElements(convert, {k_full, k}, {0, n}, src, dst, panel_stride);
}
#endif

#if HWY_TARGET != HWY_SCALAR
// One vector of words, adjacent in p.
template <class Source>
HWY_INLINE Words LoadRun(Widen<Source>, const Source* p) {
  return LoadWords(p);
}
#if HWY_TARGET <= HWY_AVX3
HWY_INLINE Words LoadRun(KeepBF16, const BF16* p) {  // Pairs of k are adjacent in the source already.
  return hn::LoadU(WordTag(), reinterpret_cast<const std::uint32_t*>(p));
}
#endif

// The source's columns are adjacent in memory: transposes kLanes columns by kLanes words.
template <class Convert>
void PackBTransposed(Convert convert, std::int64_t k, std::int64_t n, const StridedSource& src,
                     typename Convert::To* dst, std::int64_t panel_stride) {
  using To = typename Convert::To;
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(To));
  const auto* data = static_cast<const typename Convert::From*>(src.data);
  const std::int64_t n_full = RoundDown(n, kLanes), k_full = RoundDown(k, kLanes * kPerWord);
  for (std::int64_t j = 0; j < n_full; j += kLanes) {
    for (std::int64_t p = 0; p < k_full; p += kLanes * kPerWord) {
      Words block[kLanes];
      const auto* from = data + j * src.col_stride + p;
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) block[r] = LoadRun(convert, from + r * src.col_stride);
      Transpose(block);
      To* to = dst + PanelOffset<To>(p, j, panel_stride);
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) StoreWords(block[r], to + r * kNr * kPerWord);
    }
  }
  PackBElements(convert, {0, k_full}, {n_full, n}, src, dst, panel_stride);
  PackBElements(convert, {k_full, k}, {0, n}, src, dst, panel_stride);
}
#endif

// Zeros where the panels reach beyond the block: an odd last k, and the last panel's missing columns.
template <class To>
void ZeroPanelEdges(std::int64_t k, std::int64_t n, To* dst, std::int64_t panel_stride) {
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(To));
  const std::int64_t k_padded = RoundUp(k, kPerWord), n_padded = RoundUp(n, kNr);
  for (std::int64_t p = k; p < k_padded; ++p) {
    for (std::int64_t j = 0; j < n; ++j) dst[PanelOffset<To>(p, j, panel_stride)] = To(0.0f);
  }
  if (n == n_padded) return;
  for (std::int64_t p = 0; p < k_padded; p += kPerWord) {
    To* to = dst + PanelOffset<To>(p, n, panel_stride);
    std::memset(static_cast<void*>(to), 0, static_cast<std::size_t>((n_padded - n) * kPerWord) * sizeof(To));
  }
}

template <class Convert>
void PackBs(Convert convert, std::int64_t k, std::int64_t n, const StridedSource& src, void* dst_data,
            std::int64_t panel_stride) {
  auto* dst = static_cast<typename Convert::To*>(dst_data);
  if (src.col_stride == 1) {
    PackBPlain(convert, k, n, src, dst, panel_stride);
#if HWY_TARGET != HWY_SCALAR
  } else if (src.row_stride == 1) {
    PackBTransposed(convert, k, n, src, dst, panel_stride);
#endif
  } else {
    PackBElements(convert, {0, k}, {0, n}, src, dst, panel_stride);
  }
  ZeroPanelEdges(k, n, dst, panel_stride);
}

void PackB(DType dtype, std::int64_t k, std::int64_t n, const StridedSource& src, void* dst,
           std::int64_t panel_stride) {
  switch (dtype) {
    case DType::kBF16:
      return PackBs(Widen<BF16>(), k, n, src, dst, panel_stride);
    case DType::kF16:
      return PackBs(Widen<F16>(), k, n, src, dst, panel_stride);
    default:
      return PackBs(Widen<float>(), k, n, src, dst, panel_stride);
  }
}

// ---- Products whose B lies where the caller has it

// B a panel of a few rows at a time: read where it lies by the first strip of A, which leaves a packed one in the
// first-level cache for the others, or packed there if it must be; multiplied with every row of A, forgotten. Nothing is
// written to farther memory, which is what counts where few rows use B: its bytes come from memory at a few per cycle.
// The panel that comes next is asked for meanwhile. Sums go through C from panel to panel of a column. Panels follow
// each other along the source's lines: B's rows, or its columns.
constexpr std::int64_t kInPlaceWords = 64;  // Of k in a panel; half as many of columns, or for one strip.
constexpr std::int64_t kStrips = 6;         // Of rows of A that a panel serves.

template <class T>
void MmadInPlace(const MmadArgs& args, const MmadTiles<T>& tiles, decltype(CubeOps::pack_b) pack) {
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(T)), kElement = sizeof(T);
  constexpr std::int64_t kCopyPitch = (kInPlaceWords + 16) * kPerWord;
  alignas(64) std::byte panel[kInPlaceWords * kNr * 4];
  alignas(64) std::byte storage[kStrips * kMr * kCopyPitch * sizeof(T)];
  T* const copy = reinterpret_cast<T*>(storage);
  const bool conflict = args.a_pitch * kElement % kConflictBytes == 0;
  const StridedSource& source = args.b_source;
  const std::int64_t b_bytes = SizeOf(args.b_type);
  const bool in_rows = source.col_stride == 1, as_stored = in_rows && args.b_type == DTypeOf<T>();
  const std::int64_t words = in_rows && args.m > kMr ? kInPlaceWords : kInPlaceWords / 2;
  const bool fetches_c = args.exact && args.c_pitch * args.m * 4 > kNearBytes;
  const auto at = [&](std::int64_t p, std::int64_t j) {
    return static_cast<const std::byte*>(source.data) +
           (p * source.row_stride + j * source.col_stride) * b_bytes;
  };

  // A's rows `m`, all of them with B's panel (k, n). `next` is where the next panel begins.
  const auto multiply = [&](Range m, Range k, Range n, const std::byte* next) {
    bool as_it_lies = as_stored && n.size() == kNr;  // And for further strips, as the first one keeps it.
    float bias[kNr] = {};
    MmadTile<T> tile{.words = k.size() / kPerWord,
                     .b = reinterpret_cast<const T*>(panel),
                     .b_step = kNr * kPerWord,
                     .half = k.size() % kPerWord != 0,
                     .c_pitch = args.c_pitch};
    const Strips strips(m.size());
    if (as_it_lies) {
      tile.b = reinterpret_cast<const T*>(at(k.begin, n.begin));
      tile.b_step = source.row_stride * kPerWord, tile.b_pair = source.row_stride;
      if (strips.count() > 1) tile.keep = reinterpret_cast<T*>(panel);
    } else {
      pack(args.b_type, k.size(), n.size(), {at(k.begin, n.begin), source.row_stride, source.col_stride},
           panel, RoundUp(k.size(), kPerWord) * kNr);
    }
    // A word of k is kPerWord rows of the next panel, or one of its columns.
    tile.prefetch = next;
    tile.prefetch_step = (in_rows ? source.row_stride * kPerWord : source.col_stride) * b_bytes;
    tile.prefetch_pair = in_rows && kPerWord == 2 ? source.row_stride * b_bytes : kLanes * 4;
    const MmadStart start = k.begin == 0 ? args.start : MmadStart::kAdd;
    if (start == MmadStart::kBias) {
      std::memcpy(bias, args.bias + n.begin, static_cast<std::size_t>(n.size()) * sizeof(float));
      tile.start = bias, tile.start_pitch = 0;
    }
    for (std::int64_t i = 0; i < strips.count(); ++i) {
      const Range strip{m.begin + strips[i].begin, m.begin + strips[i].end};
      if (conflict) {
        tile.a = copy + (strip.begin - m.begin) * kCopyPitch, tile.a_pitch = kCopyPitch;
      } else {
        tile.a = static_cast<const T*>(args.a) + strip.begin * args.a_pitch + k.begin,
        tile.a_pitch = args.a_pitch;
      }
      tile.c = args.c + strip.begin * args.c_pitch + n.begin;
      if (start == MmadStart::kAdd) {
        const bool continues = k.begin > 0 || args.sums == nullptr;
        tile.start = continues ? tile.c : args.sums + strip.begin * args.sums_pitch + n.begin;
        tile.start_pitch = continues ? args.c_pitch : args.sums_pitch;
      }
      const auto function = (as_it_lies          ? tiles.in_rows
                             : n.size() > kLanes ? tiles.wide
                                                 : tiles.narrow)[strip.size() - 1];
      if (args.exact && n.size() < kNr) {
        MmadEdge(function, strip.size(), n.size(), tile);
      } else {
        if (fetches_c) FetchTile(tile.c, args.c_pitch, strip.size());
        function(tile);
      }
      as_it_lies = false;
      tile.b = reinterpret_cast<const T*>(panel), tile.b_step = kNr * kPerWord;
      tile.prefetch = nullptr;
    }
  };
  const auto copy_rows = [&](Range m, Range k) {
    if (!conflict) return;
    for (std::int64_t i = m.begin; i < m.end; ++i) {
      std::memcpy(static_cast<void*>(copy + (i - m.begin) * kCopyPitch),
                  static_cast<const T*>(args.a) + i * args.a_pitch + k.begin,
                  static_cast<std::size_t>(k.size()) * sizeof(T));
    }
  };
  const Split pieces = AtLeastOnce(Split(args.k, words * kPerWord)), panels(args.n, kNr);
  for (const Range m : Split(args.m, kStrips * kMr)) {
    const std::int64_t outer = in_rows ? pieces.count() : panels.count(),
                       inner = in_rows ? panels.count() : pieces.count();
    for (std::int64_t i = 0; i < outer; ++i) {
      if (in_rows) copy_rows(m, pieces[i]);
      for (std::int64_t j = 0; j < inner; ++j) {
        const bool last = j + 1 == inner;
        const std::int64_t next_i = last ? Min(i + 1, outer - 1) : i, next_j = last ? 0 : j + 1;
        const Range k = pieces[in_rows ? i : j], n = panels[in_rows ? j : i];
        if (!in_rows) copy_rows(m, k);
        multiply(m, k, n,
                 at(pieces[in_rows ? next_i : next_j].begin, panels[in_rows ? next_j : next_i].begin));
      }
    }
  }
}

void MmadF32(const MmadArgs& args) {
  if (args.b_source.data != nullptr) return MmadInPlace<float>(args, kTilesF32, &PackB);
  Mmad<float>(args, kTilesF32);
}

// ---- Native bf16

#if HWY_TARGET <= HWY_AVX3
void PackANative(DType dtype, std::int64_t m, std::int64_t k, const StridedSource& src, void* dst,
                 std::int64_t pitch) {
  if (dtype != DType::kBF16) return PackA(dtype, m, k, src, dst, pitch);
  PackAs(KeepBF16(), m, k, src, dst, pitch);
}

void PackBNative(DType dtype, std::int64_t k, std::int64_t n, const StridedSource& src, void* dst,
                 std::int64_t panel_stride) {
  if (dtype != DType::kBF16) return PackB(dtype, k, n, src, dst, panel_stride);
  PackBs(KeepBF16(), k, n, src, dst, panel_stride);
}

void MmadBF16(const MmadArgs& args) {
  if (args.b_source.data != nullptr) return MmadInPlace<BF16>(args, kBF16TilesAvx512, &PackBNative);
  Mmad<BF16>(args, kBF16TilesAvx512);
}
#endif

}  // namespace

const CubeOps& GetCubeOps() {
  static const CubeOps kWidening{.target = hwy::TargetName(HWY_TARGET),
                                 .mr = kMr,
                                 .nr = kNr,
                                 .native_bf16 = false,
                                 .pack_a = &PackA,
                                 .pack_b = &PackB,
                                 .mmad_f32 = &MmadF32,
                                 .mmad_bf16 = nullptr,
                                 .peak_fma = &PeakFma,
                                 .peak_dot_bf16 = nullptr};
#if HWY_TARGET <= HWY_AVX3
  static const CubeOps kNative{.target = hwy::TargetName(HWY_TARGET),
                               .mr = kMr,
                               .nr = kNr,
                               .native_bf16 = true,
                               .pack_a = &PackANative,
                               .pack_b = &PackBNative,
                               .mmad_f32 = &MmadF32,
                               .mmad_bf16 = &MmadBF16,
                               .peak_fma = &PeakFma,
                               .peak_dot_bf16 = &PeakDotBF16Avx512};
  if (HasBF16Avx512()) return kNative;
#endif
  return kWidening;
}

}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cubist {

HWY_EXPORT(GetCubeOps);
const CubeOps& BestCubeOps() { return HWY_DYNAMIC_DISPATCH(GetCubeOps)(); }

}  // namespace cubist
#endif  // HWY_ONCE
