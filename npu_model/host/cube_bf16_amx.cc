#include <array>
#include <cstdint>

#include "npu_model/host/cube_bf16.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Per function, as in cube_bf16_avx512.cc.
#define CUBIST_AMX __attribute__((target("avx512f,avx512bw,avx512dq,avx512bf16,amx-tile,amx-bf16")))

namespace cubist {
namespace {

constexpr int kSide = 16;               // Rows of a tile register, and its 32-bit columns.
constexpr int kWords = kSide;           // Steps of k, of a pair each, that one instruction multiplies.
constexpr int kNr = 2 * kSide;          // Columns of a panel of B.
constexpr int kMr = 2 * kSide;          // Rows of A.
constexpr std::int64_t kRowBytes = 64;  // Of a tile register.

// The tile registers: sums (i, j) at 2 i + j, A's rows, B's columns. Macros, as GCC's intrinsics paste their text.
#define CUBIST_C00 0
#define CUBIST_C01 1
#define CUBIST_C10 2
#define CUBIST_C11 3
#define CUBIST_A0 4
#define CUBIST_A1 5
#define CUBIST_B0 6
#define CUBIST_B1 7
constexpr int kRegisters = 8;

// What LDTILECFG reads.
struct alignas(64) Palette {
  std::uint8_t palette = 1, start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t bytes[16] = {};
  std::uint8_t rows[16] = {};
};
static_assert(sizeof(Palette) == 64);

// What a tile load reads and a store wrote has to be in memory: the intrinsics of GCC 12 do not say so.
inline void Settle() { asm volatile("" ::: "memory"); }

thread_local std::int64_t configured_rows = 0;

// The registers for `rows` rows of A. Takes a few hundred cycles, so only where they change.
CUBIST_AMX void Configure(std::int64_t rows) {
  if (configured_rows == rows) return;
  configured_rows = rows;
  const auto first = static_cast<std::uint8_t>(rows < kSide ? rows : kSide),
             second = static_cast<std::uint8_t>(rows > kSide ? rows - kSide : first);
  Palette palette;
  for (int i = 0; i < kRegisters; ++i) palette.bytes[i] = kRowBytes, palette.rows[i] = kSide;
  palette.rows[CUBIST_C00] = palette.rows[CUBIST_C01] = palette.rows[CUBIST_A0] = first;
  palette.rows[CUBIST_C10] = palette.rows[CUBIST_C11] = palette.rows[CUBIST_A1] = second;
  Settle();
  _tile_loadconfig(&palette);
}

// A register of B.
#define CUBIST_LOAD_B(tile, from)                  \
  do {                                             \
    if constexpr (kPasses) {                       \
      _tile_stream_loadd(tile, from, kPanelBytes); \
    } else {                                       \
      _tile_loadd(tile, from, kPanelBytes);        \
    }                                              \
  } while (false)

// Adds sixteen words, or fewer that zeros fill up: of A in rows of `a_bytes`, of B in rows of a panel. All loads come first: an
// Emerald Rapids takes 1.00 to 1.05 times as long with each right before its use, 1.05 to 1.15 where another program shares the
// core's L1 and tile unit.
template <bool kTwoRows, bool kTwoColumns, bool kPasses = false>
CUBIST_AMX inline void AddWords(const BF16* a, std::int64_t a_bytes, const BF16* b) {
  constexpr std::int64_t kPanelBytes = kNr * 4;
  CUBIST_LOAD_B(CUBIST_B0, b);
  if constexpr (kTwoColumns) CUBIST_LOAD_B(CUBIST_B1, b + 2 * kSide);
  _tile_loadd(CUBIST_A0, a, a_bytes);
  if constexpr (kTwoRows) _tile_loadd(CUBIST_A1, a + kSide * (a_bytes / 2), a_bytes);
  _tile_dpbf16ps(CUBIST_C00, CUBIST_A0, CUBIST_B0);
  if constexpr (kTwoColumns) _tile_dpbf16ps(CUBIST_C01, CUBIST_A0, CUBIST_B1);
  if constexpr (kTwoRows) _tile_dpbf16ps(CUBIST_C10, CUBIST_A1, CUBIST_B0);
  if constexpr (kTwoRows && kTwoColumns) _tile_dpbf16ps(CUBIST_C11, CUBIST_A1, CUBIST_B1);
}

// The last words, fewer than sixteen: copies that zeros fill up, of A to whole words, of B to whole registers. A's serves all tiles
// of a strip.
class Rest {
 public:
  CUBIST_AMX explicit Rest(const MmadTile<BF16>& tile)
      : words_(tile.words % kWords + (tile.half ? 1 : 0)), first_(tile.words / kWords * kWords) {
    if (words_ == 0) return;
    const auto elements =
        static_cast<__mmask32>((std::uint64_t{1} << (2 * words_ - (tile.half ? 1 : 0))) - 1);
    const BF16* a = tile.a + first_ * 2;
    for (std::int64_t i = 0; i < tile.rows; ++i, a += tile.a_pitch)
      _mm512_store_si512(a_ + i * kRowBytes, _mm512_maskz_loadu_epi16(elements, a));
    for (std::int64_t at = words_ * kPanelBytes; at < kWords * kPanelBytes; at += kRowBytes)
      _mm512_store_si512(b_ + at, _mm512_setzero_si512());
  }

  // Adds them, of the panel at b.
  template <bool kTwoRows, bool kTwoColumns>
  CUBIST_AMX void Add(const BF16* b) {
    if (words_ == 0) return;
    const auto* const from = reinterpret_cast<const std::byte*>(b + first_ * 2 * kNr);
    for (std::int64_t at = 0; at < words_ * kPanelBytes; at += kRowBytes)
      _mm512_store_si512(b_ + at, _mm512_loadu_si512(from + at));
    Settle();
    AddWords<kTwoRows, kTwoColumns>(reinterpret_cast<const BF16*>(a_), kRowBytes,
                                    reinterpret_cast<const BF16*>(b_));
  }

 private:
  static constexpr std::int64_t kPanelBytes = kNr * 4;

  const std::int64_t words_, first_;
  alignas(64) std::byte a_[kMr * kRowBytes], b_[kWords * kPanelBytes];
};

template <bool kTwoRows, bool kTwoColumns>
CUBIST_AMX inline void StartSums(const float* start, std::int64_t pitch) {
  if (start == nullptr) {
    _tile_zero(CUBIST_C00);
    if constexpr (kTwoColumns) _tile_zero(CUBIST_C01);
    if constexpr (kTwoRows) _tile_zero(CUBIST_C10);
    if constexpr (kTwoRows && kTwoColumns) _tile_zero(CUBIST_C11);
    return;
  }
  const std::int64_t bytes = pitch * 4;
  _tile_loadd(CUBIST_C00, start, bytes);
  if constexpr (kTwoColumns) _tile_loadd(CUBIST_C01, start + kSide, bytes);
  if constexpr (kTwoRows) _tile_loadd(CUBIST_C10, start + kSide * pitch, bytes);
  if constexpr (kTwoRows && kTwoColumns) _tile_loadd(CUBIST_C11, start + kSide * pitch + kSide, bytes);
}

template <bool kTwoRows, bool kTwoColumns>
CUBIST_AMX inline void StoreSums(float* c, std::int64_t pitch) {
  const std::int64_t bytes = pitch * 4;
  _tile_stored(CUBIST_C00, c, bytes);
  if constexpr (kTwoColumns) _tile_stored(CUBIST_C01, c + kSide, bytes);
  if constexpr (kTwoRows) _tile_stored(CUBIST_C10, c + kSide * pitch, bytes);
  if constexpr (kTwoRows && kTwoColumns) _tile_stored(CUBIST_C11, c + kSide * pitch + kSide, bytes);
}

// Asks for the lines of some rows of C that are `pitch` bytes apart, to be written. Beside each step of k a few: all at once,
// loads would wait for them.
constexpr std::int64_t kRowsBeside = 4;
inline void AskForRows(const char* row, std::int64_t pitch) {
#pragma GCC unroll 4
  for (int i = 0; i < kRowsBeside; ++i, row += pitch) {
    __builtin_prefetch(row, 1);
    __builtin_prefetch(row + kRowBytes, 1);
  }
}

// What a tile among those side by side has of each.
struct TilePlace {
  explicit TilePlace(const MmadTile<BF16>& tile)
      : a(tile.a),
        b(tile.b),
        c(tile.c),
        start(tile.start),
        asks(static_cast<const char*>(tile.asks)),
        ahead(static_cast<const char*>(tile.prefetch)),
        in_row(tile.prefetch_row) {}
  void Next(const MmadTile<BF16>& tile) {
    b += tile.panel_step, c += tile.c_step;
    if (start != nullptr) start += tile.start_step;
    if (asks != nullptr) asks += kNr * 4;
  }

  const BF16 *a, *b;
  float* c;
  const float* start;
  const char *asks, *ahead;
  std::int64_t in_row;  // Words of `ahead` before the gap.
};

// All whole steps of k, and beside them the lines that are asked for: rows of C, and `beside` of the words ahead each time.
template <bool kTwoRows, bool kTwoColumns, bool kPasses>
CUBIST_AMX inline void AddAll(const MmadTile<BF16>& tile, TilePlace& place, std::int64_t beside) {
  const BF16 *a = place.a, *b = place.b;
  const char *c = place.asks, *ahead = place.ahead;
  const std::int64_t a_bytes = tile.a_pitch * 2, c_bytes = tile.asks_pitch, ahead_bytes = tile.prefetch_step;
  std::int64_t c_rows = c != nullptr ? tile.rows : 0, words_ahead = tile.prefetch_words,
               in_row = place.in_row;
  for (std::int64_t words = tile.words; words >= kWords; words -= kWords) {
    AddWords<kTwoRows, kTwoColumns, kPasses>(a, a_bytes, b);
    a += 2 * kWords, b += kWords * 2 * kNr;
    if (c_rows > 0) AskForRows(c, c_bytes), c += kRowsBeside * c_bytes, c_rows -= kRowsBeside;
    if (words_ahead <= 0) continue;
    for (std::int64_t left = beside; left > 0; --left, ahead += ahead_bytes) {
      __builtin_prefetch(ahead, 0, 2);
      __builtin_prefetch(ahead + kRowBytes, 0, 2);
      if (--in_row == 0) ahead += tile.prefetch_gap, in_row = tile.prefetch_row;
    }
    words_ahead -= beside;
  }
  place.ahead = ahead, place.in_row = in_row;
}

// Sums to C, or added to it.
template <bool kTwoRows, bool kTwoColumns>
CUBIST_AMX inline void EndSums(const MmadTile<BF16>& tile, float* c) {
  if (!tile.adds) {
    StoreSums<kTwoRows, kTwoColumns>(c, tile.c_pitch);
    return Settle();
  }
  alignas(64) float sums[kMr * kNr];
  StoreSums<kTwoRows, kTwoColumns>(sums, kNr);
  Settle();
  for (std::int64_t i = 0; i < tile.rows; ++i, c += tile.c_pitch) {
    for (int j = 0; j < (kTwoColumns ? kNr : kSide); j += kSide)
      _mm512_storeu_ps(c + j, _mm512_add_ps(_mm512_loadu_ps(c + j), _mm512_load_ps(sums + i * kNr + j)));
  }
}

// `tile` is read where it lies, field by field: a copy would wait for what was stored before it, the sums of another tile.
template <bool kTwoRows, bool kTwoColumns, bool kPasses>
CUBIST_AMX inline void SideBySide(const MmadTile<BF16>& tile) {
  const std::int64_t steps = tile.words / kWords, ahead = tile.prefetch_words,
                     beside = steps > 0 && ahead > 0 ? (ahead + steps - 1) / steps : 0;
  TilePlace place(tile);
  Rest rest(tile);
  for (std::int64_t panel = 0; panel < tile.panels; ++panel) {
    if (panel > 0) place.Next(tile);
    StartSums<kTwoRows, kTwoColumns>(place.start, tile.start_pitch);
    AddAll<kTwoRows, kTwoColumns, kPasses>(tile, place, beside);
    rest.Add<kTwoRows, kTwoColumns>(place.b);
    EndSums<kTwoRows, kTwoColumns>(tile, place.c);
  }
}

template <bool kTwoRows, bool kTwoColumns>
CUBIST_AMX void Tile(const MmadTile<BF16>& tile) {
  Configure(tile.rows);
  Settle();
  if (tile.b_passes) {
    SideBySide<kTwoRows, kTwoColumns, true>(tile);
  } else {
    SideBySide<kTwoRows, kTwoColumns, false>(tile);
  }
}

CUBIST_AMX bool ToBF16(const float* sums, std::int64_t rows, std::int64_t cols, BF16* c, std::int64_t c_pitch,
                       bool stream) {
  constexpr int kDenormal = 0x20;
  const auto there = static_cast<__mmask32>((std::uint64_t{1} << cols) - 1);
  __mmask16 denormal = 0;
  for (std::int64_t i = 0; i < rows; ++i, sums += kNr, c += c_pitch) {
    const __m512 left = _mm512_load_ps(sums), right = cols > kSide ? _mm512_load_ps(sums + kSide) : left;
    denormal = static_cast<__mmask16>(denormal | _mm512_fpclass_ps_mask(left, kDenormal) |
                                      _mm512_fpclass_ps_mask(right, kDenormal));
    const auto words = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(right, left));
    if (stream && cols == kNr) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(c), words);
    } else {
      _mm512_mask_storeu_epi16(c, there, words);
    }
  }
  return denormal == 0;
}

// Few rows of A, sixteen at most, and up to 32 rows of B, as long as they are: a line of each at a time, whose pairs are put
// together in L1 and multiplied while the lines that come next are on their way, beside each line the one behind it.
class FewRows {
 public:
  CUBIST_AMX explicit FewRows(const MmadTile<BF16>& tile)
      : tile_(tile), next_rows_(tile.words * tile.b_step), whole_(tile.words == kWords && !tile.half) {
    Configure(tile.rows);
    Settle();
    if (whole_) {
      _tile_loadd(CUBIST_A0, tile.a, tile.a_pitch * 2);
      return;
    }
    alignas(64) std::byte a[kSide * kRowBytes];
    const auto elements =
        static_cast<__mmask32>((std::uint64_t{1} << (2 * tile.words + (tile.half ? 1 : 0))) - 1);
    for (std::int64_t i = 0; i < tile.rows; ++i)
      _mm512_store_si512(a + i * kRowBytes, _mm512_maskz_loadu_epi16(elements, tile.a + i * tile.a_pitch));
    Settle();
    _tile_loadd(CUBIST_A0, a, kRowBytes);
    for (std::int64_t at = tile.words * 2 * kNr; at < kWords * 2 * kNr; at += kNr) {
      for (auto& panel : panels_) _mm512_store_si512(panel + at, _mm512_setzero_si512());
    }
  }

  // Panels are a step behind: a tile register that is loaded waits for what was stored just before.
  CUBIST_AMX void Run() {
    for (std::int64_t col = 0; col < tile_.cols; col += kNr) {
      whole_ ? Pack<true>(col) : Pack<false>(col);
      if (col > 0) Multiply(col - kNr);
    }
    Multiply(tile_.cols - kNr);
  }

 private:
  BF16* PanelOf(std::int64_t col) { return panels_[col / kNr % 2]; }

  template <bool kWhole>
  CUBIST_AMX void Pack(std::int64_t col) {
    BF16* to = PanelOf(col);
    const BF16* from = tile_.b + col;
    const std::int64_t pair = tile_.b_pair, step = tile_.b_step,
                       ahead = col + kNr < tile_.cols ? kNr : kNr - tile_.cols + next_rows_;
    const std::int64_t words = kWhole ? kWords : tile_.words;
#pragma GCC unroll 16
    for (std::int64_t word = 0; word < words; ++word, from += step, to += 2 * kNr) {
      __builtin_prefetch(from + ahead), __builtin_prefetch(from + pair + ahead);
      Interleave(_mm512_loadu_si512(from), _mm512_loadu_si512(from + pair), to);
    }
    if (!kWhole && tile_.half) Interleave(_mm512_loadu_si512(from), _mm512_setzero_si512(), to);
  }
  CUBIST_AMX static void Interleave(__m512i even, __m512i odd, BF16* to) {
    asm("" : "+v"(even), "+v"(odd));  // Each is loaded once.
    const __m512i left = _mm512_load_si512(kPairOrder.data()),
                  right = _mm512_load_si512(kPairOrder.data() + kNr);
    _mm512_store_si512(to, _mm512_permutex2var_epi16(even, left, odd));
    _mm512_store_si512(to + kNr, _mm512_permutex2var_epi16(even, right, odd));
  }

  CUBIST_AMX void Multiply(std::int64_t col) {
    constexpr std::int64_t kPanelBytes = kNr * 4;
    const BF16* const b = PanelOf(col);
    StartSums<false, true>(tile_.start == nullptr ? nullptr : tile_.start + col, tile_.start_pitch);
    Settle();
    _tile_loadd(CUBIST_B0, b, kPanelBytes);
    _tile_dpbf16ps(CUBIST_C00, CUBIST_A0, CUBIST_B0);
    _tile_loadd(CUBIST_B1, b + 2 * kSide, kPanelBytes);
    _tile_dpbf16ps(CUBIST_C01, CUBIST_A0, CUBIST_B1);
    StoreSums<false, true>(tile_.c + col, tile_.c_pitch);
    Settle();
  }

  const MmadTile<BF16> tile_;
  const std::int64_t next_rows_;  // Elements from the first rows of B to those behind them.
  const bool whole_;              // All words.
  alignas(64) BF16 panels_[2][kWords * 2 * kNr];
};
CUBIST_AMX void FewTile(const MmadTile<BF16>& tile) { FewRows(tile).Run(); }
constexpr auto kFew = [] {
  std::array<FewRowTile<BF16>, kSide> tiles{};
  tiles.fill({&FewTile, kNr / kSide, kWords});
  return tiles;
}();

// By the number of rows less one.
template <bool kTwoColumns>
struct ByRows {
  MmadTileFunction<BF16> functions[kMr];
  constexpr ByRows() : functions() {
    for (int i = 0; i < kMr; ++i)
      functions[i] = i < kSide ? &Tile<false, kTwoColumns> : &Tile<true, kTwoColumns>;
  }
};
constexpr ByRows<true> kWide;
constexpr ByRows<false> kNarrow;

CUBIST_AMX void Release() { _tile_release(); }

// Whether the CPU has the tiles, the kernel keeps their registers, and gives them to this process and its threads.
bool AskForTiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  std::uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr std::uint32_t kOsXsave = 1u << 27, kAmxBF16 = 1u << 22, kAmxTile = 1u << 24;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & kOsXsave) == 0) return false;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((edx & kAmxBF16) == 0 || (edx & kAmxTile) == 0) return false;
  std::uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr std::uint32_t kTileState = 3u << 17;
  if ((low & kTileState) != kTileState) return false;
  constexpr long kAskForState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA.
  return syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

bool HasBF16Amx() {
  static const bool has = AskForTiles();
  return has;
}

AmxUse::AmxUse() { configured_rows = 0; }
AmxUse::~AmxUse() { Release(); }

const MmadTiles<BF16, kMr> kBF16TilesAmx{.panel = {kWide.functions, kNarrow.functions}, .to_bf16 = &ToBF16};
const FewRowTiles<BF16> kFewRowsBF16Amx{.in_rows = kFew.data(), .most_in_rows = kSide};

CUBIST_AMX std::int64_t PeakDotBF16Amx(std::int64_t rounds) {
  const AmxUse use;
  Configure(kMr);
  alignas(64) BF16 operand[kSide * 2 * kSide];
  for (int i = 0; i < kSide * 2 * kSide; ++i) operand[i] = BF16(static_cast<float>(i % 15 - 7));
  Settle();
  StartSums<true, true>(nullptr, 0);
  _tile_loadd(CUBIST_A0, operand, kRowBytes);
  _tile_loadd(CUBIST_A1, operand, kRowBytes);
  _tile_loadd(CUBIST_B0, operand, kRowBytes);
  _tile_loadd(CUBIST_B1, operand, kRowBytes);
  for (std::int64_t round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(CUBIST_C00, CUBIST_A0, CUBIST_B0);
    _tile_dpbf16ps(CUBIST_C01, CUBIST_A0, CUBIST_B1);
    _tile_dpbf16ps(CUBIST_C10, CUBIST_A1, CUBIST_B0);
    _tile_dpbf16ps(CUBIST_C11, CUBIST_A1, CUBIST_B1);
  }
  return rounds * (kMr * kNr * 2 * kWords);
}

}  // namespace cubist

#endif  // __x86_64__
