// The Cube's instruction bodies, compiled once per Highway target.
#include <cstdint>
#include <iterator>
#include <type_traits>

#include "npu_model/host/cpu.h"
#include "npu_model/host/cube_bf16.h"
#include "npu_model/host/simd_targets.h"
#include "npu_model/host/tile_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "npu_model/host/cube_ops.cc"  // NOLINT
#include "hwy/foreach_target.h"                          // IWYU pragma: keep
#include "hwy/highway.h"
#include "npu_model/host/few_rows-inl.h"
#include "npu_model/host/mmad-inl.h"
#include "npu_model/host/mmad_in_place-inl.h"
#include "npu_model/host/packing-inl.h"
#include "npu_model/host/tile_registers-inl.h"

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
// With one for every second row those rows' multiply-adds fetch elements of A themselves, one instruction less for each, where
// AVX-512 can: 34 instructions around 24 multiply-adds for 40. Rows at a pointer and a pitch would cost as many as before. On an
// Emerald Rapids .80 of the peak for .74 where another program runs on the core's other thread, as quick elsewhere; of a B in rows
// small products 1.04 to 1.09 times as fast there, 24 and 48 rows of 1024 x 1024 1.02 to 1.03. Loads are 20
// for 14 in as many cycles; AMD's cores, which start eight instructions a cycle or take two cycles for a vector, keep the other.
constexpr int kRowsThatFetch = 2;

// The last steps of k pass row by row, as many as there are registers for what they have of B. So a row's sums go to C while
// the next one is multiplied: all of a tile's stores together hold up the tile that comes next, two cycles each. Of tiles of 64
// steps .976 of the peak is left on a Zen 4 for .949, of 128 .990 for .971.
constexpr int kEnd = kMr >= 12 ? 3 : 1;

// sum += a * b. Free to overwrite a factor instead, the compiler moves sums between registers and memory.
template <class V>
HWY_INLINE void AddProduct(V a, V b, V& sum) {
#if HWY_TARGET == HWY_AVX2
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum.raw) : "x"(a.raw), "x"(b.raw));
#else
  sum = hn::MulAdd(a, b, sum);
#endif
}

// Where a tile has B from: a panel, rows of k, or such rows of which it leaves a panel behind (see MmadTile::keep), whole ones or
// those that end within the last vector.
enum class Source { kPanel, kRows, kKeptRows, kSomeOfRows };
constexpr bool Keeps(Source source) { return source == Source::kKeptRows || source == Source::kSomeOfRows; }

// A vector of B, of a panel's elements.
template <class D>
HWY_INLINE hn::Vec<D> LoadOfB(D d, const float* b) {
  return hn::LoadU(d, b);
}
template <class E>
requires(sizeof(E) == 2) HWY_INLINE Vec LoadOfB(FloatTag, const E* b) { return LoadFew(b); }

// A word's columns; `mask` are those of the last vector that there are.
template <Source kSource, class E, class V, int kVectors, class Mask>
HWY_INLINE void LoadColumns(const E* b, const Mask& mask, V (&columns)[kVectors]) {
  const hn::DFromV<V> d;
  constexpr int kLast = kVectors - 1;
  constexpr std::int64_t kVector = static_cast<std::int64_t>(hn::MaxLanes(d));
#pragma GCC unroll 2
  for (int j = 0; j < kLast; ++j) columns[j] = LoadOfB(d, b + j * kVector);
  if constexpr (kSource == Source::kSomeOfRows)
    columns[kLast] = hn::MaskedLoad(mask, d, b + kLast * kVector);
  else
    columns[kLast] = LoadOfB(d, b + kLast * kVector);
}

// Tiles of so few rows wait for memory, which sees no stream where the compiler moves a line's load before another's: 22 GB/s of
// 42 for two rows.
constexpr int kRowsInOrder = 4;

// Rows of A are reached by bytes, from pointers that stay what they are: the compiler derives one from another, in registers
// and instructions of its own, where it can.
template <int kPointers>
HWY_INLINE void KeepApart(const char* (&row)[kPointers], std::int64_t& a_pitch) {
  asm("" : "+r"(a_pitch));
#pragma GCC unroll 6
  for (int i = 0; i < kPointers; ++i) asm("" : "+r"(row[i]));
}
HWY_INLINE float ElementOfA(const char* row, std::int64_t bytes, int word) {
  return *reinterpret_cast<const float*>(row + bytes + word * 4);
}

// A row's sums, its element fetched for each of them: read once, the compiler would keep it.
template <class V, int kVectors>
HWY_INLINE void AddFetching(const char*& row, int word, const V (&columns)[kVectors], V (&sum)[kVectors]) {
  const hn::DFromV<V> d;
#pragma GCC unroll 2
  for (int j = 0; j < kVectors; ++j) {
    AddProduct(hn::Set(d, ElementOfA(row, 0, word)), columns[j], sum[j]);
    asm("" : "+r"(row));
  }
}

// So many words of k, of rows of A that have a pointer for each kPerPointer of them.
template <int kWords, Source kSource, int kPerPointer, class E, class V, int kRows, int kVectors,
          int kPointers, class Mask>
HWY_INLINE void Steps(V (&sum)[kRows][kVectors], const char* (&row)[kPointers], std::int64_t& a_pitch,
                      const E*& b, std::int64_t b_step, const Mask& mask, float*& keep) {
  const hn::DFromV<V> d;
#pragma GCC unroll 4
  for (int word = 0; word < kWords; ++word) {
    KeepApart(row, a_pitch);
    V columns[kVectors];
    LoadColumns<kSource>(b, mask, columns);
    b += b_step;
    if (kRows <= kRowsInOrder) asm("" : "+r"(b));
    if (Keeps(kSource) && keep != nullptr) {
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) hn::StoreU(columns[j], d, keep + j * kLanes);
      keep += kNr;
    }
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const char*& pointer = row[i / kPerPointer];
      if (kPerPointer == kRowsThatFetch && i % kPerPointer == 0) {
        AddFetching(pointer, word, columns, sum[i]);
        continue;
      }
      const V ai = hn::Set(d, ElementOfA(pointer, i % kPerPointer * a_pitch, word));
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) AddProduct(ai, columns[j], sum[i][j]);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < kPointers; ++i) row[i] += kWords * 4;
}

// kWords words of k row by row, each row's sums going to C at once.
template <int kWords, int kPerPointer, class V, int kRows, int kVectors, int kPointers>
HWY_INLINE void LastSteps(V (&sum)[kRows][kVectors], const char* const (&row)[kPointers],
                          std::int64_t a_pitch, const V (&columns)[kEnd][kVectors], bool adds, float* c,
                          std::int64_t c_pitch) {
  const hn::DFromV<V> d;
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
    asm("" : "+r"(a_pitch));
#pragma GCC unroll 4
    for (int word = 0; word < kWords; ++word) {
      const V ai = hn::Set(d, ElementOfA(row[i / kPerPointer], i % kPerPointer * a_pitch, word));
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) AddProduct(ai, columns[word][j], sum[i][j]);
    }
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      if (adds) sum[i][j] = hn::Add(hn::LoadU(d, c + j * kLanes), sum[i][j]);
      hn::StoreU(sum[i][j], d, c + j * kLanes);
    }
    NextRow(c, c_pitch);
  }
}

// Of a B with elements E, as floats, in panels where they are others.
template <int kRows, int kVectors, Source kSource, class D = FloatTag, class E = float,
          int kPerPointer = kRowsPerPointer>
void Tile(const MmadTile<float>& tile) {
  const D d;
  using V = hn::Vec<D>;
  constexpr int kPointers = (kRows + kPerPointer - 1) / kPerPointer;
  std::int64_t a_pitch = tile.a_pitch * 4;
  const char* row[kPointers];
#pragma GCC unroll 6
  for (int i = 0; i < kPointers; ++i)
    row[i] = reinterpret_cast<const char*>(tile.a) + i * kPerPointer * a_pitch;
  V sum[kRows][kVectors];
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
  const E* b = SourceOf<E>(tile);
  [[maybe_unused]] float* keep = tile.keep;
  const char* prefetch = static_cast<const char*>(tile.prefetch);
  const std::int64_t b_step = kSource == Source::kPanel ? kNr : tile.b_step;
  const std::int64_t prefetch_step = tile.prefetch_step;
  constexpr int kAsked = sizeof(E) == 2 && kSource == Source::kPanel ? 1 : 2;  // Lines.
  constexpr int kRun = Keeps(kSource) ? 1 : kSteps;  // To keep rows, or not, takes more than steps save.
  const auto mask = hn::FirstN(
      d, kSource == Source::kSomeOfRows ? static_cast<std::size_t>(tile.cols - (kVectors - 1) * kLanes) : 1);
  const bool ends = tile.words >= kEnd;
  const std::int64_t words = ends ? tile.words - kEnd : tile.words;
  const std::int64_t runs = words / kRun, asking = Min(runs, (tile.prefetch_words + kRun - 1) / kRun);
  const bool near = kSource == Source::kPanel && tile.prefetch_near;
  static_assert(kTurnWords % kRun == 0);
  constexpr std::int64_t kLastOfTurn = kTurnWords / kRun - 1;  // A mask, too.
  const char* ahead = prefetch;
  for (std::int64_t i = 0; i < asking; ++i) {
    Steps<kRun, kSource, kPerPointer>(sum, row, a_pitch, b, b_step, mask, keep);
#pragma GCC unroll 4
    for (int word = 0; word < kRun; ++word, ahead += prefetch_step) AskFor<kAsked>(ahead, near);
    if (kSource != Source::kPanel && (i & kLastOfTurn) == kLastOfTurn) ahead = prefetch += tile.prefetch_turn;
  }
  for (std::int64_t word = asking * kRun; word < tile.prefetch_words; ++word, ahead += prefetch_step)
    AskFor<kAsked>(ahead, near);
  std::int64_t run = asking;
  if (const auto* asks = static_cast<const char*>(tile.asks)) {
    int asked = 0;
    for (; run < runs && asked < kRows; ++run) {
      Steps<kRun, kSource, kPerPointer>(sum, row, a_pitch, b, b_step, mask, keep);
#pragma GCC unroll 4
      for (int word = 0; word < kRun; ++word, ++asked, asks += tile.asks_pitch)
        AskFor<2>(asks, /*near=*/true);
    }
    for (; asked < kRows; ++asked, asks += tile.asks_pitch) AskFor<2>(asks, /*near=*/true);
  }
  for (; run < runs; ++run) Steps<kRun, kSource, kPerPointer>(sum, row, a_pitch, b, b_step, mask, keep);
  for (std::int64_t word = runs * kRun; word < words; ++word)
    Steps<1, kSource, kPerPointer>(sum, row, a_pitch, b, b_step, mask, keep);
  V columns[kEnd][kVectors];
  if (!ends) return LastSteps<0, kPerPointer>(sum, row, a_pitch, columns, tile.adds, tile.c, tile.c_pitch);
#pragma GCC unroll 4
  for (int word = 0; word < kEnd; ++word) {
    LoadColumns<kSource>(b + word * b_step, mask, columns[word]);
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      if (Keeps(kSource) && keep != nullptr) hn::StoreU(columns[word][j], d, keep + word * kNr + j * kLanes);
    }
  }
  LastSteps<kEnd, kPerPointer>(sum, row, a_pitch, columns, tile.adds, tile.c, tile.c_pitch);
}

#if HWY_TARGET > HWY_AVX3 && !HWY_ARCH_ARM_A64
// Few rows times two panels side by side, which come from memory as two streams, four words of each in turn. A Zen 3 reads one
// at 16 GB/s, two at 24: for one to three rows 1.17 to 1.23 times as fast as panel by panel, and 1.05 to 1.2 times in L2.
template <int kRows, class E>
void TwoPanelsTile(const MmadTile<float>& tile) {
  const FloatTag d;
  constexpr int kVectors = static_cast<int>(2 * kNr / kLanes), kOfPanel = kVectors / 2;
  Vec sum[kRows][kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j)
      sum[i][j] =
          tile.start == nullptr ? hn::Zero(d) : hn::LoadU(d, tile.start + i * tile.start_pitch + j * kLanes);
  }
  const float* a = tile.a;
  const E* b = SourceOf<E>(tile);
  const auto steps = [&](auto words) HWY_ATTR {
    constexpr int kWords = decltype(words)::value;
#pragma GCC unroll 2
    for (int panel = 0; panel < 2; ++panel) {
      const E* const from = b + panel * tile.b_step;
#pragma GCC unroll 4
      for (int word = 0; word < kWords; ++word) {
        Vec columns[kOfPanel];
#pragma GCC unroll 4
        for (int j = 0; j < kOfPanel; ++j) columns[j] = LoadOfB(d, from + word * kNr + j * kLanes);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) {
          const Vec ai = hn::Set(d, a[i * tile.a_pitch + word]);
#pragma GCC unroll 4
          for (int j = 0; j < kOfPanel; ++j) AddProduct(ai, columns[j], sum[i][panel * kOfPanel + j]);
        }
      }
    }
    a += kWords, b += kWords * kNr;
  };
  std::int64_t word = 0;
  for (; word + kSteps <= tile.words; word += kSteps) steps(std::integral_constant<int, kSteps>());
  for (; word < tile.words; ++word) steps(std::integral_constant<int, 1>());
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
    float* const c = tile.c + i * tile.c_pitch;
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      if (tile.adds) sum[i][j] = hn::Add(hn::LoadU(d, c + j * kLanes), sum[i][j]);
      hn::StoreU(sum[i][j], d, c + j * kLanes);
    }
  }
}
template <class E>
constexpr MmadTileFunction<float> kTwoPanels[] = {&TwoPanelsTile<1, E>, &TwoPanelsTile<2, E>,
                                                  &TwoPanelsTile<3, E>};
#endif

template <int kVectors, Source kSource, class D = FloatTag, class E = float,
          int kPerPointer = kRowsPerPointer>
constexpr MmadTileFunction<float> kTiles[kMr] = {&Tile<1, kVectors, kSource, D, E, kPerPointer>,
                                                 &Tile<2, kVectors, kSource, D, E, kPerPointer>,
                                                 &Tile<3, kVectors, kSource, D, E, kPerPointer>,
                                                 &Tile<4, kVectors, kSource, D, E, kPerPointer>,
                                                 &Tile<5, kVectors, kSource, D, E, kPerPointer>,
                                                 &Tile<6, kVectors, kSource, D, E, kPerPointer>,
#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64
                                                 &Tile<7, kVectors, kSource, D, E, kPerPointer>,
                                                 &Tile<8, kVectors, kSource, D, E, kPerPointer>,
                                                 &Tile<9, kVectors, kSource, D, E, kPerPointer>,
                                                 &Tile<10, kVectors, kSource, D, E, kPerPointer>,
                                                 &Tile<11, kVectors, kSource, D, E, kPerPointer>,
                                                 &Tile<12, kVectors, kSource, D, E, kPerPointer>
#endif
};
// For elements E of B.
#if HWY_TARGET <= HWY_AVX3
template <class E>
constexpr FewRowTiles<float> FewRowsOf(const FewRowTile<float>* in_rows, std::int64_t most_in_rows) {
  return {.in_rows = in_rows,
          .most_in_rows = most_in_rows,
          .turned = kTurnedF32<E>,
          .in_columns = &MultiplyColumns<E>};
}
template <class E>
const FewRowTiles<float>& FewRowsF32() {
  static constexpr auto kRuns = FewRowsOf<E>(kFewF32<E>, kMostInRows<E>),
                        kLines = FewRowsOf<E>(kFewF32OfLines<E>, std::size(kFewF32OfLines<E>)),
                        kTwoVectors = FewRowsOf<E>(kFewF32OfTwoVectors<E>, kMostOfTwoVectors<E>);
  return ThisCpu() == Cpu::kIntel ? kTwoVectors : ThisCpu() == Cpu::kZen5 ? kLines : kRuns;
}
#else
template <class E>
const FewRowTiles<float>& FewRowsF32() {
#if HWY_ARCH_ARM_A64
  static constexpr FewRowTiles<float> kTiles{kFewF32<E>, kMostInRows<E>};
#else
  static constexpr FewRowTiles<float> kTiles{};
#endif
  return kTiles;
}
#endif
#if HWY_TARGET <= HWY_AVX3
// Of eight columns vectors of eight: a core that starts one of sixteen a cycle starts two of them.
template <Source kSource>
constexpr PanelTiles<float> kPanelTiles{kTiles<2, kSource>, kTiles<1, kSource>,
                                        kTiles<1, kSource, hn::CappedTag<float, 8>>};
#else
template <Source kSource>
constexpr PanelTiles<float> kPanelTiles{kTiles<2, kSource>, kTiles<1, kSource>, nullptr};
#endif
constexpr MmadTiles<float, kMr> kTilesF32 {
  .panel = kPanelTiles<Source::kPanel>, .in_rows = kTiles<2, Source::kKeptRows>,
#if HWY_TARGET <= HWY_AVX3
  .some_of_rows = kPanelTiles<Source::kSomeOfRows>,
#elif !HWY_ARCH_ARM_A64
  .two_panels = kTwoPanels<float>, .most_of_two_panels = std::size(kTwoPanels<float>),
#endif
  .in_near_rows = kTiles<2, Source::kRows>
};
const MmadTiles<float, kMr>& TilesF32() {
#if HWY_TARGET <= HWY_AVX3
  static constexpr MmadTiles<float, kMr> kFetching = [] {
    MmadTiles<float, kMr> tiles = kTilesF32;
    tiles.panel.wide = kTiles<2, Source::kPanel, FloatTag, float, kRowsThatFetch>;
    tiles.in_rows = kTiles<2, Source::kKeptRows, FloatTag, float, kRowsThatFetch>;
    tiles.in_near_rows = kTiles<2, Source::kRows, FloatTag, float, kRowsThatFetch>;
    return tiles;
  }();
  if (ThisCpu() == Cpu::kIntel) return kFetching;
#endif
  return kTilesF32;
}
// Of panels with elements E of 16 bits.
template <class E>
constexpr MmadTiles<float, kMr> kNarrowTiles {
  .panel = {kTiles<2, Source::kPanel, FloatTag, E>},
#if HWY_TARGET > HWY_AVX3 && !HWY_ARCH_ARM_A64
  .two_panels = kTwoPanels<E>, .most_of_two_panels = std::size(kTwoPanels<E>),
#endif
};

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

// The columns of a product with a B in place that are not done.
template <class T, int kTileRows>
void MmadRest(const MmadArgs& args, std::int64_t done, const MmadTiles<T, kTileRows>& tiles,
              decltype(CubeOps::pack_b) pack) {
  if (done == 0) return MmadInPlace(args, tiles, pack).Run();
  if (done < args.n) MmadInPlace(ColumnsFrom(args, done), tiles, pack).Run();
}

// Panels of 16-bit elements. Tiles widen them as they read them, again for every strip of A: whoever waits for memory has the
// time, and floats would be twice as much to wait for. Short panels that many strips meet are widened before. Zen 3, 7168 columns
// of 2048 words from memory, beside panels of floats: 1 to 5 rows 1.75 to 2.0 times as fast, 8 rows 1.6, 24 rows 1.1 to 1.2, 64 to
// 256 rows the same; products of 64 to 256 in the caches .90 to .95.
template <class E>
void MmadNarrow(const MmadArgs& args) {
  constexpr std::int64_t kWidenedWords = 256, kManyRows = 4 * kMr;
  if (args.m < 1) return;
  MmadTile<float> tile{.words = args.k,
                       .a = static_cast<const float*>(args.a),
                       .a_pitch = args.a_pitch,
                       .b = static_cast<const float*>(args.b_source.data),
                       .prefetch_step = kNr * static_cast<std::int64_t>(sizeof(E)),
                       .prefetch_near = AsksNear()};
  if (args.m <= kMr) return MmadStrip<E>(args, {0, args.m}, tile, NextRows<float>(), kNarrowTiles<E>);
  if (args.m < kManyRows || args.k > kWidenedWords) return MmadColumns<E>(args, tile, kNarrowTiles<E>);
  alignas(64) std::byte panel[kWidenedWords * kNr * 4];  // Bytes, which nothing initialises.
  MmadColumns<E>(args, tile, TilesF32(), reinterpret_cast<float*>(panel));
}

void MmadF32(const MmadArgs& args) {
  if (args.b_source.data == nullptr) return Mmad(args, TilesF32());
  if (InPanels(args)) return args.b_type == DType::kBF16 ? MmadNarrow<BF16>(args) : MmadNarrow<F16>(args);
  std::int64_t done = 0;
  WithWidening(args.b_type, [&]<class E>(Widen<E>) { done = MultiplyFew<float, E>(args, FewRowsF32<E>()); });
  MmadRest(args, done, TilesF32(), &PackB<false>);
}

// ---- Native bf16

#if HWY_TARGET <= HWY_AVX3
void MmadBF16(const MmadArgs& args) {
  if (args.b_source.data == nullptr) return Mmad(args, kBF16TilesAvx512);
  const auto& few = ThisCpu() == Cpu::kZen5 ? kFewRowsBF16Zen5 : kFewRowsBF16Avx512;
  MmadRest(args, MultiplyFew<BF16, BF16>(args, few), kBF16TilesAvx512, &PackBNative<false>);
}

// A few rows take columns as fast as memory gives them, word by word as well. Emerald Rapids, 17 to 24 rows by slabs: 1.0 to 1.15
// times as fast from memory, 1.1 to 1.3 times where B is near; 8 rows .8.
bool TakesSlabs(const MmadArgs& args) {
  constexpr std::int64_t kFewRows = 16;
  return args.b_source.col_stride == 1 || args.m > kFewRows;
}
void MmadAmx(const MmadArgs& args) {
  const AmxUse use;
  if (args.b_source.data == nullptr) return MmadNear(args, kBF16TilesAmx).Run();
  if (!TakesSlabs(args)) return MmadInPlace(args, kBF16TilesAmx, &PackBNative<false>).Run();
  const std::int64_t done = args.cast != nullptr ? 0 : MultiplyFew<BF16, BF16>(args, kFewRowsBF16Amx);
  if (done == args.n) return;
  MmadBySlabs(done == 0 ? args : ColumnsFrom(args, done), kBF16TilesAmx, &PackBNative<false>);
}
bool CastsAmx(const MmadArgs& args) {
  return args.b_source.data == nullptr || (TakesSlabs(args) && args.k <= SlabK(args.b_source));
}
#endif

}  // namespace

const CubeOps& GetCubeOps() {
  static const CubeOps kWidening{.target = hwy::TargetName(HWY_TARGET),
                                 .mr = kMr,
                                 .nr = kNr,
                                 .native_bf16 = false,
                                 .pack_a = &PackA,
                                 .pack_b = &PackB<false>,
                                 .stream_pack_b = &PackB<true>,
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
                               .pack_b = &PackBNative<false>,
                               .stream_pack_b = &PackBNative<true>,
                               .mmad_f32 = &MmadF32,
                               .mmad_bf16 = &MmadBF16,
                               .mmad_bf16_any_cut = &MmadBF16,
                               .peak_fma = &PeakFma,
                               .peak_dot_bf16 = &PeakDotBF16Avx512};
  static const CubeOps kAmx = [] {
    CubeOps ops = kNative;
    ops.amx = true, ops.peak_dot_bf16 = &PeakDotBF16Amx;
    ops.mmad_bf16 = &MmadAmx, ops.casts_bf16 = &CastsAmx;
    return ops;
  }();
  if (HasBF16Avx512() && HasBF16Amx()) return kAmx;
  // Intel's cores start a VDPBF16PS every other cycle, which is no more multiply-adds than of floats (Emerald Rapids: 72 GFLOP/s,
  // floats 110 to 150).
  if (HasBF16Avx512() && ThisCpu() != Cpu::kIntel) return kNative;
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
