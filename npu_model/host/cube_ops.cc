// The Cube's instruction bodies, compiled once per Highway target.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "npu_model/host/cube_bf16.h"
#include "npu_model/host/simd_targets.h"
#include "npu_model/host/tile_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "npu_model/host/cube_ops.cc"  // NOLINT
#include "hwy/foreach_target.h"                          // IWYU pragma: keep
#include "hwy/highway.h"
#include "npu_model/host/few_rows-inl.h"
#include "npu_model/host/packing-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using Vec = hn::Vec<FloatTag>;

// The register tile: of 32 vector registers 24 hold sums, two B, one A; of 16, 12 hold sums. Four steps of k at once, for
// what goes along with them: a core hands on four to six instructions a cycle, and three where another program runs on its
// other thread. Of the 25 instructions around twelve multiply-adds 21 are left, 0.86 of the peak for 0.72; of the 45 around
// 24 on AVX-512, 40: 0.82 for 0.78 where a core starts two of them a cycle.
constexpr int kSteps = 4;
#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64
constexpr int kMr = 12;
#else
constexpr int kMr = 6;
#endif

// ---- Mmad

// Rows of A are reached from every third one, by one and two pitches. Twelve pointers do not fit the
// registers, and a spilled one comes back through the vector pipes: with them the loop runs at 0.94 of the
// peak, with four at 0.98.
constexpr int kRowsPerPointer = 3;

// sum += a * b. Free to overwrite a factor instead, the compiler moves sums between registers and memory.
HWY_INLINE void AddProduct(Vec a, Vec b, Vec& sum) {
#if HWY_TARGET == HWY_AVX2
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum.raw) : "x"(a.raw), "x"(b.raw));
#else
  sum = hn::MulAdd(a, b, sum);
#endif
}

// So many words of k.
template <int kWords, bool kInRows, int kRows, int kVectors, int kPointers>
HWY_INLINE void Steps(Vec (&sum)[kRows][kVectors], const float* (&row)[kPointers], std::int64_t& a_pitch,
                      const float*& b, std::int64_t b_step, float*& keep) {
  const FloatTag d;
#pragma GCC unroll 4
  for (int word = 0; word < kWords; ++word) {
    asm("" : "+r"(a_pitch));  // Or the compiler keeps a register for every distance from it.
    Vec columns[kVectors];
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) columns[j] = hn::LoadU(d, b + j * kLanes);
    b += b_step;
    if (kInRows && keep != nullptr) {
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) hn::StoreU(columns[j], d, keep + j * kLanes);
      keep += kNr;
    }
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const Vec ai = hn::Set(d, row[i / kRowsPerPointer][i % kRowsPerPointer * a_pitch + word]);
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) AddProduct(ai, columns[j], sum[i][j]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kPointers; ++i) row[i] += kWords;
}

template <int kRows, int kVectors, bool kInRows>
void Tile(const MmadTile<float>& tile) {
  const FloatTag d;
  constexpr int kPointers = (kRows + kRowsPerPointer - 1) / kRowsPerPointer;
  std::int64_t a_pitch = tile.a_pitch;
  const float* row[kPointers];
#pragma GCC unroll 4
  for (int i = 0; i < kPointers; ++i) {
    row[i] = tile.a + i * kRowsPerPointer * a_pitch;
    asm("" : "+r"(row[i]));  // Or the compiler derives all of them from the first again.
  }
  Vec sum[kRows][kVectors];
  const float* start = tile.start;
  if (start == nullptr) {
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::Zero(d);
    }
  } else {
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::LoadU(d, start + j * kLanes);
      NextRow(start, tile.start_pitch);
    }
  }
  const float* b = tile.b;
  [[maybe_unused]] float* keep = tile.keep;
  const char* prefetch = static_cast<const char*>(tile.prefetch);
  const std::int64_t b_step = kInRows ? tile.b_step : kNr;
  const std::int64_t prefetch_step = tile.prefetch_step, prefetch_pair = tile.prefetch_pair;
  constexpr int kRun = kInRows ? 1 : kSteps;  // What is kept of rows, or not, takes more than steps save.
  const std::int64_t runs = tile.words / kRun, asking = Min(runs, (tile.prefetch_words + kRun - 1) / kRun);
  for (std::int64_t run = 0; run < asking; ++run) {
    Steps<kRun, kInRows>(sum, row, a_pitch, b, b_step, keep);
#pragma GCC unroll 4
    for (int word = 0; word < kRun; ++word) {
      __builtin_prefetch(prefetch, 0, 2);
      __builtin_prefetch(prefetch + prefetch_pair, 0, 2);
      prefetch += prefetch_step;
    }
  }
  for (std::int64_t run = asking; run < runs; ++run) Steps<kRun, kInRows>(sum, row, a_pitch, b, b_step, keep);
  for (std::int64_t word = runs * kRun; word < tile.words; ++word)
    Steps<1, kInRows>(sum, row, a_pitch, b, b_step, keep);
  const std::int64_t c_pitch = tile.c_pitch;
  if (tile.adds) {
    const float* c = tile.c;
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::Add(hn::LoadU(d, c + j * kLanes), sum[i][j]);
      NextRow(c, c_pitch);
    }
  }
  float* c = tile.c;
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) hn::StoreU(sum[i][j], d, c + j * kLanes);
    NextRow(c, c_pitch);
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
#if HWY_TARGET <= HWY_AVX3
constexpr FewRowTiles<float> kFewRowsF32{kFewF32, std::size(kFewF32), kColumnTilesF32,
                                         /*least_in_columns=*/2};
#elif HWY_ARCH_ARM_A64
constexpr FewRowTiles<float> kFewRowsF32{kFewF32, std::size(kFewF32)};
#else
constexpr FewRowTiles<float> kFewRowsF32;
#endif
constexpr MmadTiles<float, kMr> kTilesF32{kTiles<2, false>, kTiles<1, false>, kTiles<2, true>, kFewRowsF32};

// Rows in strips of at most kTileRows, as few as there can be and of about one height: a low one costs the reading of B all
// the same. Tiles of sixteen rows and more are whole, but for the last: they take their time by sixteen rows.
template <int kTileRows>
class Strips {
 public:
  explicit Strips(std::int64_t rows)
      : count_(CeilDiv(rows, kTileRows)),
        height_(kTileRows >= 16 ? kTileRows : rows / (count_ > 0 ? count_ : 1)),
        higher_(kTileRows >= 16 ? 0 : rows - count_ * height_),
        rows_(rows) {}
  std::int64_t count() const { return count_; }
  Range operator[](std::int64_t i) const {
    const std::int64_t begin = i * height_ + Min(i, higher_);
    return {begin, Min(begin + height_ + (i < higher_ ? 1 : 0), rows_)};
  }

 private:
  std::int64_t count_, height_, higher_, rows_;
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
template <int kTileRows, class T>
void MmadEdge(MmadTileFunction<T> function, std::int64_t rows, std::int64_t cols, const MmadTile<T>& tile) {
  alignas(64) float sums[kTileRows * kNr];
  const auto bytes = static_cast<std::size_t>(cols) * sizeof(float);
  MmadTile<T> own = tile;
  own.c = sums, own.c_pitch = kNr;
  if (tile.start != nullptr) {
    for (std::int64_t i = 0; i < rows; ++i)
      std::memcpy(sums + i * kNr, tile.start + i * tile.start_pitch, bytes);
    own.start = sums, own.start_pitch = kNr;
  } else if (tile.adds) {
    for (std::int64_t i = 0; i < rows; ++i) std::memcpy(sums + i * kNr, tile.c + i * tile.c_pitch, bytes);
  }
  function(own);
  for (std::int64_t i = 0; i < rows; ++i) std::memcpy(tile.c + i * tile.c_pitch, sums + i * kNr, bytes);
}

// Rows of C that lie within so many bytes are taken to be in L1.
constexpr std::int64_t kNearBytes = 1 << 15;

// Asks for the lines of a whole tile of C, which the stores at its end would wait for; for none where `c` is null.
HWY_INLINE void FetchTile(const float* c, std::int64_t pitch, std::int64_t rows) {
  if (c == nullptr) return;
  for (std::int64_t i = 0; i < rows; ++i) {
    __builtin_prefetch(c + i * pitch, 1);
    __builtin_prefetch(c + i * pitch + kNr - 1, 1);
  }
}

// Whether C is too far to be read or written at once.
HWY_INLINE bool FetchesC(const MmadArgs& args) { return args.c_pitch * args.m * 4 > kNearBytes; }

// The tile of C to ask for beside one at (i, j), whose neighbour at (next_i, next_j) comes after it. Sums that start from C
// would wait at once: it is the neighbour then.
HWY_INLINE const float* TileToFetch(const MmadArgs& args, MmadStart start, std::int64_t i, std::int64_t j,
                                    std::int64_t next_i, std::int64_t next_j) {
  if (!FetchesC(args)) return nullptr;
  return start == MmadStart::kAdd ? args.c + next_i * args.c_pitch + next_j : args.c + i * args.c_pitch + j;
}

// Where the sums of a tile of C, rows `m` and columns `n` of one panel, begin; `bias` has room for those of a panel.
template <class T>
HWY_INLINE void StartOf(const MmadArgs& args, const Range& m, const Range& n, float* bias,
                        MmadTile<T>* tile) {
  if (args.start == MmadStart::kAdd) {
    tile->start = args.sums == nullptr ? args.c + m.begin * args.c_pitch + n.begin
                                       : args.sums + m.begin * args.sums_pitch + n.begin;
    tile->start_pitch = args.sums == nullptr ? args.c_pitch : args.sums_pitch;
  } else if (args.start == MmadStart::kBias) {
    std::memcpy(bias, args.bias + n.begin, static_cast<std::size_t>(n.size()) * sizeof(float));
    std::fill(bias + n.size(), bias + kNr, 0.0f);
    tile->start = bias, tile->start_pitch = 0;
  } else {
    tile->start = nullptr;
  }
}

// Such a tile from operands that `tile` has, and beside it the lines of the tile `fetched`. `tile` is one object, written
// field by field: a copy would wait for the stores of the tile before it.
template <int kTileRows, class T>
HWY_INLINE void RunTile(const MmadArgs& args, Range m, Range n, MmadTileFunction<T> function,
                        const float* fetched, MmadTile<T>& tile) {
  alignas(64) float bias[kNr];
  tile.rows = m.size();
  tile.c = args.c + m.begin * args.c_pitch + n.begin;
  StartOf(args, m, n, bias, &tile);
  if (args.exact && n.size() < kNr) return MmadEdge<kTileRows>(function, m.size(), n.size(), tile);
  FetchTile(fetched, args.c_pitch, m.size());
  function(tile);
}

// The tiles of panels, by the number of rows less one.
template <class T, int kTileRows>
HWY_INLINE const MmadTileFunction<T>* TilesOf(const MmadTiles<T, kTileRows>& tiles, Range n) {
  return n.size() > kLanes ? tiles.wide : tiles.narrow;
}

// How far ahead of its use B is asked for where one strip of A takes all of it, which is then as fast as memory is. The
// machine's own prefetching is enough for a panel that passes by fewer rows: 0.97 of the read bandwidth for one row, where
// asking would leave 0.89.
constexpr std::int64_t kStreamAhead = 16 << 10, kRowsThatAsk = 5;

// One row of tiles, for `tile.words` steps of k: the strip of A stays in L1, the panels of B come from L2. Panels that are
// met for the first time come from L3, a panel ahead of their use, and so do the next rows of A: without that 0.01 to 0.05
// of the peak is lost, the more the busier the neighbours of L3 are. The others are not asked for: two prefetches a word
// take 0.01.
template <class T, int kTileRows>
void MmadStrip(const MmadArgs& args, Range m, MmadTile<T>& tile, const NextRows<T>& next,
               const MmadTiles<T, kTileRows>& tiles) {
  const T* b = tile.b;
  const Split panels(args.n, kNr);
  for (std::int64_t panel = 0; panel < panels.count(); ++panel) {
    const Range n = panels[panel];
    tile.b = b + panel * args.b_panel_stride;
    if (args.m <= kTileRows) {
      tile.prefetch = reinterpret_cast<const std::byte*>(tile.b) + kStreamAhead;
      tile.prefetch_words = args.m >= kRowsThatAsk ? tile.words : 0;
    } else {
      tile.prefetch = tile.b + args.b_panel_stride;
      tile.prefetch_words = m.begin == 0 && panel + 1 < panels.count() ? tile.words : 0;
    }
    next.Fetch(panel);
    const bool last = panel + 1 == panels.count();
    const float* c =
        TileToFetch(args, args.start, m.begin, n.begin, last ? m.end : m.begin, last ? 0 : n.end);
    RunTile<kTileRows>(args, m, n, TilesOf(tiles, n)[m.size() - 1], c, tile);
  }
}

// Columns of tiles: all of A stays in L2, and a panel of B, which comes from L3 or memory, meets all strips of A before the
// next one. That one is on its way meanwhile, a part of it beside each tile, so that the farther memory is asked for few
// bytes per cycle at any time: with rows of tiles the first one has to wait for all of B. Beside the first panel each strip
// of A comes while the one before it is multiplied. Worth 0.02 to 0.04 of the peak
// where k is long; where it is short, tiles of C that lie far apart cost more.
template <class T, int kTileRows>
void MmadColumns(const MmadArgs& args, MmadTile<T>& tile, const MmadTiles<T, kTileRows>& tiles) {
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(T));
  const T *a = tile.a, *b = tile.b;
  // Rows of A that are nearly one piece of memory, and how many words of B take as many bytes as one.
  const bool in_one_piece = args.a_pitch <= args.k + args.k / 8;
  const std::int64_t a_words = CeilDiv(args.a_pitch, kNr * kPerWord);
  const Split panels(args.n, kNr);
  const Strips<kTileRows> strips(args.m);
  for (std::int64_t panel = 0; panel < panels.count(); ++panel) {
    const Range n = panels[panel];
    tile.b = b + panel * args.b_panel_stride;
    // Behind the last panel stands what the next Mmad begins with, where each k is one panel long.
    const bool has_next = panel + 1 < panels.count() || args.b_panel_stride < args.k * kNr + kNr * kPerWord;
    for (std::int64_t i = 0; i < strips.count(); ++i) {
      const Range m = strips[i];
      const bool a_comes = panel == 0 && i + 1 < strips.count();
      tile.a = a + m.begin * args.a_pitch;
      if (a_comes) {
        tile.prefetch = a + m.end * args.a_pitch;
        tile.prefetch_words = in_one_piece ? Min(strips[i + 1].size() * a_words, tile.words) : 0;
      } else {
        const std::int64_t first = panel == 0 ? 0 : tile.words * i / strips.count(),
                           end = tile.words * (i + 1) / strips.count();
        tile.prefetch = tile.b + args.b_panel_stride + first * kNr * kPerWord;
        tile.prefetch_words = has_next ? end - first : 0;
      }
      const bool last = i + 1 == strips.count();
      const float* c =
          TileToFetch(args, args.start, m.begin, n.begin, last ? 0 : m.end, last ? n.end : n.begin);
      RunTile<kTileRows>(args, m, n, TilesOf(tiles, n)[m.size() - 1], c, tile);
    }
  }
}

// Rows of A a multiple of this apart fall into one set of L1, which cannot hold as many lines: the strip is
// copied, a piece of k at a time. Without that the loop runs at 0.90 of the peak. The copy costs as much as
// one panel loses.
constexpr std::int64_t kConflictBytes = 4096;
constexpr std::int64_t kPieceBytes = 2048;

template <class T, int kTileRows>
void Mmad(const MmadArgs& args, const MmadTiles<T, kTileRows>& tiles) {
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(T)),
                         kPiece = kPieceBytes / 4 * kPerWord;
  constexpr std::int64_t kCopyPitch = kPiece + 16 * kPerWord;
  alignas(64) std::byte storage[kTileRows * kCopyPitch * sizeof(T)];  // Bytes, which nothing initialises.
  T* const copy = reinterpret_cast<T*>(storage);
  const bool conflict = args.a_pitch * static_cast<std::int64_t>(sizeof(T)) % kConflictBytes == 0 &&
                        args.n > 2 * kNr && !args.adds;  // What is added is one sum over all of k.
  const std::int64_t piece = conflict ? kPiece : args.k;
  const auto tile_at = [&](std::int64_t p, std::int64_t k) {
    return MmadTile<T>{.words = k / kPerWord,
                       .a_pitch = args.a_pitch,
                       .b = static_cast<const T*>(args.b) + p * kNr,
                       .half = k % kPerWord != 0,
                       .prefetch_step = kNr * 4,
                       .prefetch_pair = kNr * 2,
                       .c_pitch = args.c_pitch,
                       .adds = args.adds};
  };
  if (args.by_columns && !conflict && args.m > kTileRows) {
    MmadTile<T> tile = tile_at(0, args.k);
    tile.a = static_cast<const T*>(args.a);
    return MmadColumns(args, tile, tiles);
  }
  const Strips<kTileRows> strips(args.m);
  const auto a_at = [&](std::int64_t row, std::int64_t p) {
    return static_cast<const T*>(args.a) + row * args.a_pitch + p;
  };
  NextRows<T> next{.pitch = args.a_pitch, .lines = CeilDiv(Min(piece, args.k), 16 * kPerWord)};
  next.lines_per_panel = CeilDiv(next.lines, std::max<std::int64_t>(CeilDiv(args.n, kNr), 1));
  MmadArgs rest = args;  // Of a strip, after its first piece.
  rest.sums = nullptr, rest.start = MmadStart::kAdd;
  for (std::int64_t strip = 0; strip < strips.count(); ++strip) {
    const Range m = strips[strip];
    std::int64_t p = 0;
    do {
      const std::int64_t k = Min(piece, args.k - p);
      MmadTile<T> tile = tile_at(p, k);
      tile.a = a_at(m.begin, p);
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
      MmadStrip(p == 0 ? args : rest, m, tile, next, tiles);
      p += piece;
    } while (p < args.k);
  }
}

// Tiles of sixteen rows and more take as many operands as multiply-adds are quick: at 32 x 32, 64 bytes a cycle, twice what L2
// gives. So k passes by pieces of which a panel of B, read once, stays in L1 while the strips of A go by it, some at a time, as
// many as have room for their sums beside it. What lies behind the piece is asked for meanwhile, a part by each strip: 1.13 times
// as fast where B comes from L3. Rows of A that share sets of L1 cost nothing, as none of their lines is met twice. 256 x 512 x
// 1024 on a Granite Rapids, B in L3: .43 of the peak, .34 with all of k at once.
constexpr std::int64_t kNearWords = 128, kNearRows = 256;

template <class T, int kTileRows>
void MmadByPieces(const MmadArgs& args, const MmadTiles<T, kTileRows>& tiles) {
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(T));
  alignas(64) float sums[kNearRows * kNr], bias[kNr];
  // What is added is one sum over all of k, and a strip alone finds nothing in L1 twice.
  const bool whole = args.adds || args.m <= kTileRows;
  const Split panels(args.n, kNr), groups(args.m, kNearRows),
      pieces = AtLeastOnce(Split(args.k, whole ? args.k : kNearWords * kPerWord));
  MmadTile<T> tile{
      .a_pitch = args.a_pitch, .prefetch_step = kNr * 4, .prefetch_pair = kNr * 2, .adds = args.adds};
  const auto multiply = [&](const Range& m, const Range& n, const Range& k, float* own) {
    tile.rows = m.size(), tile.words = k.size() / kPerWord, tile.half = k.size() % kPerWord != 0;
    tile.a = static_cast<const T*>(args.a) + m.begin * args.a_pitch + k.begin;
    tile.start = own, tile.start_pitch = kNr;
    if (k.begin == 0) StartOf(args, m, n, bias, &tile);
    const auto function = TilesOf(tiles, n)[m.size() - 1];
    if (k.end < args.k) {
      tile.c = own, tile.c_pitch = kNr;
      return function(tile);
    }
    tile.c = args.c + m.begin * args.c_pitch + n.begin, tile.c_pitch = args.c_pitch;
    if (args.exact && n.size() < kNr) return MmadEdge<kTileRows>(function, m.size(), n.size(), tile);
    function(tile);
  };
  for (std::int64_t panel = 0; panel < panels.count(); ++panel) {
    for (const Range group : groups) {
      const Strips<kTileRows> strips(group.size());
      for (const Range k : pieces) {
        tile.b = static_cast<const T*>(args.b) + panel * args.b_panel_stride + k.begin * kNr;
        const std::int64_t words = CeilDiv(k.size(), kPerWord), asks = CeilDiv(words, strips.count());
        for (std::int64_t i = 0; i < strips.count(); ++i) {
          const Range strip = strips[i];
          tile.prefetch = tile.b + (words + i * asks) * kNr * kPerWord, tile.prefetch_words = asks;
          multiply({group.begin + strip.begin, group.begin + strip.end}, panels[panel], k,
                   sums + strip.begin * kNr);
        }
      }
    }
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

// ---- Products whose B lies where the caller has it

// B a panel of a few rows at a time: read where it lies by the first strip of A, which leaves a packed one in the
// first-level cache for the others, or packed there if it must be; multiplied with every row of A, forgotten. Nothing is
// written to farther memory, which is what counts where few rows use B: its bytes come from memory at a few per cycle.
// The panel that comes next is asked for meanwhile, or one some way ahead. Sums go through C from panel to panel of a
// column. Panels follow each other along the source's lines: B's rows, or its columns.
constexpr std::int64_t kInPlaceWords = 128;    // Of k in a panel, at most.
constexpr std::int64_t kMostRowsInPlace = 72;  // Of A that a panel serves.

template <class T, int kTileRows>
void MmadInPlace(const MmadArgs& args, const MmadTiles<T, kTileRows>& tiles, decltype(CubeOps::pack_b) pack) {
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(T)), kElement = sizeof(T);
  constexpr std::int64_t kCopyPitch = (kInPlaceWords + 16) * kPerWord,
                         kRows = RoundDown(kMostRowsInPlace, std::int64_t{kTileRows});  // At a time.
  alignas(64) std::byte panel[kInPlaceWords * kNr * 4];
  alignas(64) std::byte storage[kRows * kCopyPitch * sizeof(T)];
  T* const copy = reinterpret_cast<T*>(storage);
  const bool conflict = args.a_pitch * kElement % kConflictBytes == 0;
  const StridedSource& source = args.b_source;
  const std::int64_t b_bytes = SizeOf(args.b_type);
  const bool in_rows = source.col_stride == 1, as_stored = in_rows && args.b_type == DTypeOf<T>();
  // The fewer strips ask for the next panel the shorter it has to be.
  const std::int64_t words = args.m <= kTileRows ? 32 : args.m <= 3 * kTileRows ? 64 : kInPlaceWords;
  MmadArgs rest = args;  // Of a tile of C, after its first panel.
  rest.sums = nullptr, rest.start = MmadStart::kAdd;
  const auto at = [&](std::int64_t p, std::int64_t j) {
    return static_cast<const std::byte*>(source.data) +
           (p * source.row_stride + j * source.col_stride) * b_bytes;
  };

  // A's rows `m`, all of them with B's panel (k, n). `next` is where the next panel begins.
  const auto multiply = [&](Range m, Range k, Range n, const std::byte* next) {
    bool as_it_lies = as_stored && tiles.in_rows != nullptr &&
                      n.size() == kNr;  // And for further strips, as the first one keeps it.
    MmadTile<T> tile{.words = k.size() / kPerWord,
                     .b = reinterpret_cast<const T*>(panel),
                     .half = k.size() % kPerWord != 0,
                     .c_pitch = args.c_pitch};
    const Strips<kTileRows> strips(m.size());
    if (as_it_lies) {
      tile.b = reinterpret_cast<const T*>(at(k.begin, n.begin));
      tile.b_step = source.row_stride * kPerWord, tile.b_pair = source.row_stride;
      if (strips.count() > 1) tile.keep = reinterpret_cast<T*>(panel);
    } else {
      pack(args.b_type, k.size(), n.size(), {at(k.begin, n.begin), source.row_stride, source.col_stride},
           panel, RoundUp(k.size(), kPerWord) * kNr);
    }
    // Beside a word of k: the kPerWord rows that it has in the next panel, by the first strip; or two lines of one of its
    // columns, by as many strips as it takes.
    constexpr std::int64_t kLine = 64;
    tile.prefetch_step = (in_rows ? source.row_stride * kPerWord : source.col_stride) * b_bytes;
    tile.prefetch_pair = in_rows ? (kPerWord == 2 ? source.row_stride * b_bytes : kLanes * 4) : kLine;
    const std::int64_t fetching = in_rows ? 1 : CeilDiv(words * kPerWord * b_bytes, 2 * kLine);
    const MmadArgs& into = k.begin == 0 ? args : rest;
    for (std::int64_t i = 0; i < strips.count(); ++i) {
      const Range strip{m.begin + strips[i].begin, m.begin + strips[i].end};
      if (conflict) {
        tile.a = copy + (strip.begin - m.begin) * kCopyPitch, tile.a_pitch = kCopyPitch;
      } else {
        tile.a = static_cast<const T*>(args.a) + strip.begin * args.a_pitch + k.begin,
        tile.a_pitch = args.a_pitch;
      }
      tile.prefetch = next + 2 * kLine * i;
      tile.prefetch_words = i < fetching ? Min(tile.words, in_rows ? words : kNr) : 0;
      const auto function = (as_it_lies ? tiles.in_rows : TilesOf(tiles, n))[strip.size() - 1];
      const float* c = TileToFetch(args, MmadStart::kZero, strip.begin, n.begin, strip.begin, n.begin);
      RunTile<kTileRows>(into, strip, n, function, c, tile);
      as_it_lies = false;
      tile.b = reinterpret_cast<const T*>(panel);
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
  // Along the lines of the source: its rows, or its columns.
  const Split pieces = AtLeastOnce(Split(args.k, words * kPerWord)), panels(args.n, kNr);
  const std::int64_t inner = in_rows ? panels.count() : pieces.count(),
                     count = pieces.count() * panels.count();
  const auto k_at = [&](std::int64_t i) { return pieces[in_rows ? i / inner : i % inner]; };
  const auto n_at = [&](std::int64_t i) { return panels[in_rows ? i % inner : i / inner]; };
  const std::int64_t ahead = args.m <= kTileRows ? kStreamAhead / (words * kNr * 4) : 1;
  for (const Range m : Split(args.m, kRows)) {
    for (std::int64_t i = 0; i < count; ++i) {
      const Range k = k_at(i);
      if (!in_rows || i % inner == 0) copy_rows(m, k);
      const std::int64_t next = Min(i + ahead, count - 1);
      multiply(m, k, n_at(i), at(k_at(next).begin, n_at(next).begin));
    }
  }
}

// For tiles whose instructions need so much of B at a time that its lines would come one by one: B a slab at a time, packed into
// L2 in runs that are long enough for the machine's own prefetching, then multiplied. Asked for line by line, 32 x 64 bytes of
// B come at the pace of L1's fill buffers: one row of A at .28 of the read bandwidth.
constexpr std::int64_t kSlabK = 128, kSlabN = 512;          // Where each row of B is one run of memory,
constexpr std::int64_t kTallSlabK = 1024, kTallSlabN = 64;  // and where each column is.

template <class T, int kTileRows>
void MmadBySlabs(const MmadArgs& args, const MmadTiles<T, kTileRows>& tiles, decltype(CubeOps::pack_b) pack) {
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(T));
  constexpr std::int64_t kApart = 4 * kNr * kPerWord;  // Or panels would be written to the same sets of L1.
  constexpr std::int64_t kSpace = kSlabN / kNr * (kSlabK * kNr + kApart);
  static_assert(kTallSlabN / kNr * (kTallSlabK * kNr + kApart) <= kSpace);
  alignas(64) std::byte slab[kSpace * sizeof(T)];
  const StridedSource& source = args.b_source;
  const bool in_rows = source.col_stride == 1;
  MmadArgs part = args;
  part.b = slab, part.b_source = {};
  for (const Range n : Split(args.n, in_rows ? kSlabN : kTallSlabN)) {
    part.n = n.size(), part.c = args.c + n.begin;
    part.start = args.start, part.bias = args.bias == nullptr ? nullptr : args.bias + n.begin;
    part.sums = args.sums == nullptr ? nullptr : args.sums + n.begin;
    for (const Range k : AtLeastOnce(Split(args.k, in_rows ? kSlabK : kTallSlabK))) {
      const std::int64_t first = k.begin * source.row_stride + n.begin * source.col_stride;
      part.k = k.size(), part.a = static_cast<const T*>(args.a) + k.begin;
      part.b_panel_stride = RoundUp(k.size(), kPerWord) * kNr + kApart;
      pack(args.b_type, k.size(), n.size(),
           {static_cast<const std::byte*>(source.data) + first * SizeOf(args.b_type), source.row_stride,
            source.col_stride},
           slab, part.b_panel_stride);
      MmadByPieces(part, tiles);
      part.start = MmadStart::kAdd, part.sums = nullptr;
    }
  }
}

void MmadF32(const MmadArgs& args) {
  if (args.b_source.data == nullptr) return Mmad(args, kTilesF32);
  MmadInPlace(AfterFew(args, kTilesF32.few), kTilesF32, &PackB);
}

// ---- Native bf16

#if HWY_TARGET <= HWY_AVX3
void MmadBF16(const MmadArgs& args) {
  if (args.b_source.data == nullptr) return Mmad(args, kBF16TilesAvx512);
  MmadInPlace(AfterFew(args, kBF16TilesAvx512.few), kBF16TilesAvx512, &PackBNative);
}
#endif
#if HWY_TARGET <= HWY_AVX3_DL
void MmadAmx(const MmadArgs& args) {
  const AmxUse use;
  if (args.b_source.data == nullptr) return MmadByPieces(args, kBF16TilesAmx);
  // A few rows take columns as fast as memory gives them, word by word as well.
  constexpr std::int64_t kFewRows = 24;
  if (args.b_source.col_stride == 1 || args.m > kFewRows)
    return MmadBySlabs(args, kBF16TilesAmx, &PackBNative);
  MmadInPlace(args, kBF16TilesAmx, &PackBNative);
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
                                 .mmad_bf16_any_cut = nullptr,
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
                               .mmad_bf16_any_cut = &MmadBF16,
                               .peak_fma = &PeakFma,
                               .peak_dot_bf16 = &PeakDotBF16Avx512};
#if HWY_TARGET <= HWY_AVX3_DL  // What has AMX has this. The targets below are those without.
  static const CubeOps kAmx = [] {
    CubeOps ops = kNative;
    ops.amx = true, ops.mmad_bf16 = &MmadAmx, ops.peak_dot_bf16 = &PeakDotBF16Amx;
    return ops;
  }();
  if (HasBF16Avx512() && HasBF16Amx()) return kAmx;
#endif
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
