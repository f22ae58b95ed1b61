// The walks of a Mmad over its register tiles: which strip of A meets which packed panel of B when, and what is asked for
// meanwhile.
// Included once per Highway target by cube_ops.cc, after foreach_target.h.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "npu_model/cache.h"
#include "npu_model/host/cpu.h"
#include "npu_model/host/cube_bf16.h"
#include "npu_model/host/tile_ops.h"

#if defined(CUBIST_NPU_MODEL_HOST_MMAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUBIST_NPU_MODEL_HOST_MMAD_INL_H_
#undef CUBIST_NPU_MODEL_HOST_MMAD_INL_H_
#else
#define CUBIST_NPU_MODEL_HOST_MMAD_INL_H_
#endif

#include "hwy/highway.h"
#include "npu_model/host/in_place-inl.h"
#include "npu_model/host/packing-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

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

// `cols` columns of floats, fewer than a panel has.
HWY_INLINE void CopyColumns(const float* from, std::int64_t from_pitch, float* to, std::int64_t to_pitch,
                            std::int64_t rows, std::int64_t cols) {
#if HWY_TARGET <= HWY_AVX3
  const FloatTag d;
  for (std::int64_t j = 0; j < cols; j += kLanes) {
    const auto mask = hn::FirstN(d, static_cast<std::size_t>(cols - j));
    for (std::int64_t i = 0; i < rows; ++i)
      hn::BlendedStore(hn::MaskedLoad(mask, d, from + i * from_pitch + j), mask, d, to + i * to_pitch + j);
  }
#else
  for (std::int64_t i = 0; i < rows; ++i) CopyRow(from + i * from_pitch, to + i * to_pitch, cols);
#endif
}

// A tile of C of fewer columns than its function writes: the others may be another tile's, or nobody's.
template <int kTileRows, class T>
void MmadEdge(MmadTileFunction<T> function, std::int64_t rows, std::int64_t cols, const MmadTile<T>& tile) {
  alignas(64) float sums[kTileRows * kNr];
  MmadTile<T> own = tile;
  own.c = sums, own.c_pitch = kNr;
  if (tile.start != nullptr) {
    CopyColumns(tile.start, tile.start_pitch, sums, kNr, rows, cols);
    own.start = sums, own.start_pitch = kNr;
  } else if (tile.adds) {
    CopyColumns(tile.c, tile.c_pitch, sums, kNr, rows, cols);
  }
  function(own);
  CopyColumns(sums, kNr, tile.c, tile.c_pitch, rows, cols);
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
  } else if (args.start == MmadStart::kBias && n.size() == kNr) {
    tile->start = args.bias + n.begin, tile->start_pitch = 0;
  } else if (args.start == MmadStart::kBias) {
    std::memcpy(bias, args.bias + n.begin, static_cast<std::size_t>(n.size()) * sizeof(float));
    std::fill(bias + n.size(), bias + kNr, 0.0f);
    tile->start = bias, tile->start_pitch = 0;
  } else {
    tile->start = nullptr;
  }
}

// What multiplies columns of a panel: by the number of rows less one, and how many columns it writes.
template <class T>
struct ColumnsTiles {
  MmadTileFunction<T> OfRows(std::int64_t rows) const { return functions[rows - 1]; }

  const MmadTileFunction<T>* functions;
  std::int64_t width;
};
template <class T>
HWY_INLINE ColumnsTiles<T> TilesOf(const PanelTiles<T>& tiles, Range n) {
  if (n.size() > kLanes || tiles.narrow == nullptr) return {tiles.wide, kNr};
  if (n.size() <= kLanes / 2 && tiles.narrowest != nullptr) return {tiles.narrowest, kLanes / 2};
  return {tiles.narrow, kLanes};
}

// The sums of a tile to their place in C.
template <int kTileRows, class T>
HWY_INLINE void EndTile(const MmadArgs& args, Range m, Range n, const ColumnsTiles<T>& tiles,
                        MmadTile<T>& tile) {
  const MmadTileFunction<T> function = tiles.OfRows(m.size());
  tile.c = args.c + m.begin * args.c_pitch + n.begin, tile.c_pitch = args.c_pitch;
  if (args.exact && n.size() < tiles.width) return MmadEdge<kTileRows>(function, m.size(), n.size(), tile);
  function(tile);
}

// Such a tile from operands that `tile` has. The lines of the tile `fetched` are asked for before it; tiles of floats ask for them
// beside their sums, as a burst waits for the buffers of L1 (on an Emerald Rapids products are 1.0 to 1.015 times as fast so,
// backward attention 1.015). `tile` is one object, written field by field: a copy would wait for the stores of the tile
// before it.
template <int kTileRows, class T>
HWY_INLINE void RunTile(const MmadArgs& args, Range m, Range n, const ColumnsTiles<T>& tiles,
                        const float* fetched, MmadTile<T>& tile) {
  alignas(64) float bias[kNr];
  tile.rows = m.size();
  StartOf(args, m, n, bias, &tile);
  if constexpr (std::is_same_v<T, float>) {
    tile.asks = fetched, tile.asks_pitch = args.c_pitch * 4;
  } else {
    FetchTile(fetched, args.c_pitch, m.size());
  }
  EndTile<kTileRows>(args, m, n, tiles, tile);
}

// The same of a piece of k. Before the last one sums stand in `near`, a panel wide.
template <int kTileRows, class T>
HWY_INLINE void RunPiece(const MmadArgs& args, Range m, Range n, Range k, float* near,
                         const ColumnsTiles<T>& tiles, MmadTile<T>& tile) {
  alignas(64) float bias[kNr];
  tile.rows = m.size();
  tile.start = near, tile.start_pitch = kNr;
  if (k.begin == 0) StartOf(args, m, n, bias, &tile);
  if (k.end == args.k) return EndTile<kTileRows>(args, m, n, tiles, tile);
  tile.c = near, tile.c_pitch = kNr;
  tiles.OfRows(m.size())(tile);
}

// How far ahead of its use B is asked for where one strip of A takes all of it, which is then as fast as memory is. The
// machine's own prefetching is enough for a panel that passes by fewer rows: 0.97 of the read bandwidth for one row, where
// asking would leave 0.89.
constexpr std::int64_t kStreamAhead = 16 << 10, kRowsThatAsk = 4;

// What stands so many elements E after `b`, in panels of a tile's or of narrower elements.
template <class E, class T>
const T* PastElements(const T* b, std::int64_t count) {
  return reinterpret_cast<const T*>(reinterpret_cast<const E*>(b) + count);
}

// Multiplies the panels that pass two at a time, where rows are few enough and as far as panels are whole. Returns how many.
template <class E, class T, int kTileRows>
std::int64_t MmadTwoPanels(const MmadArgs& args, Range m, MmadTile<T>& tile,
                           const MmadTiles<T, kTileRows>& tiles) {
  if (args.m > tiles.most_of_two_panels) return 0;
  const T* const b = tile.b;
  const std::int64_t count = RoundDown(args.n / kNr, std::int64_t{2});
  tile.b_step = args.b_panel_stride, tile.c_pitch = args.c_pitch;
  for (std::int64_t panel = 0; panel < count; panel += 2) {
    tile.b = PastElements<E>(b, panel * args.b_panel_stride);
    StartAt(args, panel * kNr, /*first=*/true, &tile);
    tile.c = args.c + panel * kNr;
    tiles.two_panels[m.size() - 1](tile);
  }
  return count;
}

// One row of tiles, for `tile.words` steps of k: the strip of A stays in L1, the panels of B come from L2. Panels that are
// met for the first time come from L3, a panel ahead of their use, and so do the next rows of A: without that 0.01 to 0.05
// of the peak is lost, the more the busier the neighbours of L3 are. The others are not asked for: two prefetches a word
// take 0.01. Panels have elements E.
template <class E, class T, int kTileRows>
void MmadStrip(const MmadArgs& args, Range m, MmadTile<T>& tile, const NextRows<T>& next,
               const MmadTiles<T, kTileRows>& tiles) {
  const T* b = tile.b;
  const Split panels(args.n, kNr);
  for (std::int64_t panel = MmadTwoPanels<E>(args, m, tile, tiles); panel < panels.count(); ++panel) {
    const Range n = panels[panel];
    tile.b = PastElements<E>(b, panel * args.b_panel_stride);
    if (args.m <= kTileRows) {
      tile.prefetch = reinterpret_cast<const std::byte*>(tile.b) + kStreamAhead;
      tile.prefetch_words = args.m >= kRowsThatAsk ? tile.words : 0;
    } else {
      tile.prefetch = PastElements<E>(tile.b, args.b_panel_stride);
      tile.prefetch_words = m.begin == 0 && panel + 1 < panels.count() ? tile.words : 0;
    }
    next.Fetch(panel);
    const bool last = panel + 1 == panels.count();
    const float* c =
        TileToFetch(args, args.start, m.begin, n.begin, last ? m.end : m.begin, last ? 0 : n.end);
    RunTile<kTileRows>(args, m, n, TilesOf(tiles.panel, n), c, tile);
  }
}

// `words` rows of a panel, as floats.
template <class E>
const float* WidenPanel(const E* from, std::int64_t words, float* to) {
#pragma GCC unroll 4
  for (std::int64_t i = 0; i < words * kNr; i += kLanes) StoreWords(LoadWords(from + i), to + i);
  return to;
}

// Columns of tiles: all of A stays in L2, and a panel of B, which comes from L3 or memory, meets all strips of A before the
// next one. That one is on its way meanwhile, a part of it beside each tile, so that the farther memory is asked for few
// bytes per cycle at any time: with rows of tiles the first one has to wait for all of B. Beside the first panel each strip
// of A comes while the one before it is multiplied. Worth 0.02 to 0.04 of the peak
// where k is long; where it is short, tiles of C that lie far apart cost more.
// Panels have elements E. Where `widened` has room for one, tiles meet what it becomes there.
template <class E, class T, int kTileRows>
void MmadColumns(const MmadArgs& args, MmadTile<T>& tile, const MmadTiles<T, kTileRows>& tiles,
                 T* widened = nullptr) {
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(T));
  const T *a = tile.a, *b = tile.b;
  // Rows of A that are nearly one piece of memory, and how often one is asked for.
  const bool in_one_piece = args.a_pitch <= args.k + args.k / 8;
  const std::int64_t a_words =
      CeilDiv(args.a_pitch * static_cast<std::int64_t>(sizeof(T)), tile.prefetch_step);
  const Split panels(args.n, kNr);
  const Strips<kTileRows> strips(args.m);
  for (std::int64_t panel = 0; panel < panels.count(); ++panel) {
    const Range n = panels[panel];
    const T* const from = PastElements<E>(b, panel * args.b_panel_stride);
    tile.b = from;
    if constexpr (sizeof(E) != sizeof(T)) {
      if (widened != nullptr) tile.b = WidenPanel(reinterpret_cast<const E*>(from), args.k, widened);
    }
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
        tile.prefetch = PastElements<E>(from, args.b_panel_stride + first * kNr * kPerWord);
        tile.prefetch_words = has_next ? end - first : 0;
      }
      const bool last = i + 1 == strips.count();
      const float* c =
          TileToFetch(args, args.start, m.begin, n.begin, last ? 0 : m.end, last ? n.end : n.begin);
      RunTile<kTileRows>(args, m, n, TilesOf(tiles.panel, n), c, tile);
    }
  }
}

// Few strips of A, and a B that comes from memory: a piece of a panel meets all strips while it is in L1, and the one after the
// next is asked for meanwhile, a share of it beside each strip. Strips that meet whole panels wait for memory in the first one
// and leave it idle in the others. Zen 5, packed panels, floats and bf16: 13 and 16 rows pass 1.2 to 1.4 times as fast, 24 to 48
// 1.03 to 1.15 times, and as fast as before where they are in L2. Emerald Rapids, floats: 13 to 24 rows 1.1 to 1.2 times, 32 to 48
// 1.05 to 1.1 times.
constexpr std::int64_t kPieceWords = 64, kWordsAhead = 2 * kPieceWords;

template <class T, int kTileRows>
void MmadPieces(const MmadArgs& args, MmadTile<T>& tile, const MmadTiles<T, kTileRows>& tiles) {
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(T));
  alignas(64) float sums[kFewStrips * kTileRows * kNr];  // Of a panel, until its last piece.
  const T *a = tile.a, *b = tile.b;
  const Split panels(args.n, kNr), pieces = AtLeastOnce(Split(args.k, kPieceWords * kPerWord));
  const Strips<kTileRows> strips(args.m);
  const std::int64_t share = CeilDiv(kPieceWords, strips.count());
  // Behind a panel's end the next one begins, and behind the last what another call often goes on with.
  const auto at = [&](std::int64_t panel, std::int64_t p) {
    const bool behind = p >= args.k && panel + 1 < panels.count();
    return b + (behind ? panel + 1 : panel) * args.b_panel_stride + (behind ? p - args.k : p) * kNr;
  };
  for (std::int64_t panel = 0; panel < panels.count(); ++panel) {
    const Range n = panels[panel];
    for (const Range k : pieces) {
      tile.b = at(panel, k.begin);
      tile.words = k.size() / kPerWord, tile.half = k.size() % kPerWord != 0;
      for (std::int64_t i = 0; i < strips.count(); ++i) {
        const Range m = strips[i];
        tile.a = a + m.begin * args.a_pitch + k.begin;
        tile.prefetch = at(panel, k.begin + (kWordsAhead + i * share) * kPerWord);
        tile.prefetch_words = share;
        RunPiece<kTileRows>(args, m, n, k, sums + m.begin * kNr, TilesOf(tiles.panel, n), tile);
      }
    }
  }
}

// Rows of A a multiple of kWayBytes apart fall into one set of L1, which cannot hold as many lines: the strip is
// copied, a piece of k at a time. Without that the loop runs at 0.90 of the peak. The copy costs as much as
// one panel loses. Not so where one strip meets all panels, each once: they come from farther than A does, and whole ones, one
// after the other, 1.1 to 1.25 times as fast as a piece of each.
constexpr std::int64_t kPieceBytes = 2048;

template <class T, int kTileRows>
void Mmad(const MmadArgs& args, const MmadTiles<T, kTileRows>& tiles) {
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(T)),
                         kPiece = kPieceBytes / 4 * kPerWord;
  constexpr std::int64_t kCopyPitch = kPiece + 16 * kPerWord;
  alignas(64) std::byte storage[kTileRows * kCopyPitch * sizeof(T)];  // Bytes, which nothing initialises.
  T* const copy = reinterpret_cast<T*>(storage);
  const bool conflict = args.a_pitch * static_cast<std::int64_t>(sizeof(T)) % kWayBytes == 0 &&
                        args.m > kTileRows && args.n > 2 * kNr &&
                        !args.adds;  // What is added is one sum over all of k.
  const std::int64_t piece = conflict ? kPiece : args.k;
  const auto tile_at = [&](std::int64_t p, std::int64_t k) {
    return MmadTile<T>{.words = k / kPerWord,
                       .a_pitch = args.a_pitch,
                       .b = static_cast<const T*>(args.b) + p * kNr,
                       .half = k % kPerWord != 0,
                       .prefetch_step = kNr * 4,
                       .prefetch_near = AsksNear(),
                       .adds = args.adds};
  };
  if (args.walk != MmadWalk::kRows && !conflict && args.m > kTileRows) {
    MmadTile<T> tile = tile_at(0, args.k);
    tile.a = static_cast<const T*>(args.a);
    const bool in_pieces = args.walk == MmadWalk::kPieces && !args.adds && args.m <= kFewStrips * kTileRows;
    return in_pieces ? MmadPieces(args, tile, tiles) : MmadColumns<T>(args, tile, tiles);
  }
  const Strips<kTileRows> strips(args.m);
  const auto a_at = [&](std::int64_t row, std::int64_t p) {
    return static_cast<const T*>(args.a) + row * args.a_pitch + p;
  };
  NextRows<T> next{.pitch = args.a_pitch, .lines = CeilDiv(Min(piece, args.k), 16 * kPerWord)};
  next.lines_per_panel = CeilDiv(next.lines, std::max<std::int64_t>(CeilDiv(args.n, kNr), 1));
  MmadArgs rest;  // Of a strip, after its first piece.
  if (piece < args.k) rest = args, rest.sums = nullptr, rest.start = MmadStart::kAdd;
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
      MmadStrip<T>(p == 0 ? args : rest, m, tile, next, tiles);
      p += piece;
    } while (p < args.k);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#endif  // CUBIST_NPU_MODEL_HOST_MMAD_INL_H_
