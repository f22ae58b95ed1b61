// The register tiles of Mmad, and those of native bf16: AVX512-BF16 and AMX, which Highway 1.0.3 cannot express.
#ifndef CUBIST_NPU_MODEL_HOST_CUBE_BF16_H_
#define CUBIST_NPU_MODEL_HOST_CUBE_BF16_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "npu_model/types.h"

namespace cubist {

// The elements of two rows of 32 in turn, as VPERMT2W takes them: those of columns 0 to 15, then those of 16 to 31.
alignas(64) inline constexpr auto kPairOrder = [] {
  std::array<std::uint16_t, 64> order{};
  for (std::size_t j = 0; j < 32; ++j) {
    order[2 * j] = static_cast<std::uint16_t>(j), order[2 * j + 1] = static_cast<std::uint16_t>(j + 32);
  }
  return order;
}();

constexpr std::int64_t kTurnWords = 8;        // A power of two; see MmadTile::prefetch_turn.
constexpr std::int64_t kAskedBytes = 2 * 64;  // Beside a word of k; see MmadTile::prefetch.

// One register tile of a Mmad, operands in the layouts of MmadArgs. The sums start from row i of `start`, at
// start + i * start_pitch, or from zero where it is null.
template <class T>
struct MmadTile {
  std::int64_t rows = 0;
  std::int64_t words = 0;  // Steps of k: elements of fp32, pairs of bf16.
  const T* a = nullptr;
  std::int64_t a_pitch = 0;
  const T* b = nullptr;
  std::int64_t b_step = 0;  // Elements of b from word to word, where b is in rows (else to the next one),
  std::int64_t b_pair = 0;  // and from a pair's first row to its second.
  bool half = false;        // One more word, of which a and b have the first element alone.
  std::int64_t cols = 0;  // Of b, in columns or met by few rows; in rows of a panel, where not all are there.
  T* keep = nullptr;      // Where b is in rows: what becomes the panel of it, if anything.
  const void* prefetch = nullptr;            // What to bring into L2, or L1, meanwhile: two lines beside each
  std::int64_t prefetch_words = 0;           // of so many words of k,
  std::int64_t prefetch_step = kAskedBytes;  // so many bytes from word to word,
  std::int64_t prefetch_turn = 0;            // and, of floats in rows, from kTurnWords to the next ones.
  bool prefetch_near = false;                // Into L1; of b in a panel or in columns.
  float* c = nullptr;
  std::int64_t c_pitch = 0;
  const float* start = nullptr;
  std::int64_t start_pitch = 0;
  bool adds = false;      // The sums are added to c at the end.
  bool b_passes = false;  // AMX: b comes from L2 once for each tile, and is not to drive a out of L1.
  const void* asks =
      nullptr;  // AMX and floats: where rows begin, two lines each, that are asked for, to be written,
  std::int64_t asks_pitch = 0;  // while the sums are made; bytes.
  // AMX: of the words to bring so many lie together, the next ones behind a gap of so many bytes; each panel goes on where the
  // one before left off.
  std::int64_t prefetch_row = INT64_MAX, prefetch_gap = 0;
  // AMX: so many whole panels, tile beside tile, whose elements of b, c and start are so far apart.
  std::int64_t panels = 1, panel_step = 0, c_step = 0, start_step = 0;
};
template <class T>
using MmadTileFunction = void (*)(const MmadTile<T>&);

// Asks for so many lines from `first` on: into L1, or into L2.
template <int kLines>
[[gnu::always_inline]] inline void AskFor(const void* first, bool near) {
  constexpr std::int64_t kLine = 64;
  const auto* const at = static_cast<const char*>(first);
  if (near) {
#pragma GCC unroll 16
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(at + i * kLine, 0, 3);
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(at + i * kLine, 0, 2);
  }
}

// Asks for columns of B that come next in the order of their addresses: of each as many lines as it has words for, so many at
// a time. What is asked for behind a column's last line is what lies there.
template <class T>
class ColumnsAhead {
 public:
  // Nothing is asked for where no column comes next.
  [[gnu::always_inline]] ColumnsAhead(const void* next, std::int64_t b_col, std::int64_t lines, bool near)
      : next_(static_cast<const T*>(next)), col_(b_col), lines_(lines), near_(near) {}
  template <int kLines>
  [[gnu::always_inline]] void Ask() {
    constexpr std::int64_t kLine = static_cast<std::int64_t>(64 / sizeof(T));
    if (next_ == nullptr) return;
    AskFor<kLines>(next_ + line_ * kLine, near_);
    line_ += kLines;
    if (line_ >= lines_) line_ = 0, next_ += col_;
  }

 private:
  const T* next_;
  std::int64_t col_, lines_, line_ = 0;
  bool near_;
};

// Row by row: addresses of all rows at once would be more than there are registers for, and the detour by way of the vector
// registers costs 1 to 4 % of a tile whose k is short.
template <class Float>
[[gnu::always_inline]] inline void NextRow(Float*& p, std::int64_t pitch) {
  p += pitch;
  asm("" : "+r"(p));
}

// Some columns of B, each of whose words lie one after the other, times rows of A, two vectors of them.
template <class T>
struct ColumnTile {
  static constexpr std::int64_t kColumns = 16, kRows = 32;
  const T* a =
      nullptr;  // Of each word of k all rows, kRows of them, aligned; the half word's pairs end with a zero.
  const T* b = nullptr;
  std::int64_t b_col = 0;  // Elements from column to column.
  std::int64_t words = 0;
  bool half = false;        // As of MmadTile.
  float* sums = nullptr;    // (kColumns, kRows), aligned: added to.
  const T* next = nullptr;  // The first of the columns that come next, to be asked for, or null:
  bool near = false;        // into L1, or into L2.
};

// What multiplies few rows with a B in rows, `cols` columns of them, a multiple of so many vectors of sums. `a` has pitch a_pitch.
template <class T>
struct FewRowTile {
  MmadTileFunction<T> function;
  std::int64_t vectors;
  std::int64_t words;             // Of k at a time.
  std::int64_t shortest_row = 0;  // Of B. Shorter ones pass as quickly by panels.
};
constexpr std::int64_t kShortestRow = 768;  // Of two bytes an element.

// What multiplies few rows with a B that lies where the caller has it; nothing where no such tile pays.
template <class T>
struct FewRowTiles {
  const FewRowTile<T>* in_rows = nullptr;  // The first has one row, the next two.
  std::int64_t most_in_rows = 0;
  // Of a B in columns, `cols` of them, a multiple of a vector's lanes: the first for one row, the last for sixteen.
  const MmadTileFunction<T>* turned = nullptr;
  void (*in_columns)(const ColumnTile<T>&) = nullptr;  // Of more rows.
};

// Tiles of the columns of a panel, of more and more rows: the first has one, the next two.
template <class T>
struct PanelTiles {
  const MmadTileFunction<T>* wide = nullptr;       // All columns.
  const MmadTileFunction<T>* narrow = nullptr;     // The first half of them.
  const MmadTileFunction<T>* narrowest = nullptr;  // The first quarter, or null.
};

// The tiles of one operand type, of up to kTileRows rows.
template <class T, int kTileRows>
struct MmadTiles {
  PanelTiles<T> panel = {};
  const MmadTileFunction<T>* in_rows =
      nullptr;  // All columns, where b lies row after row of k; null: b is packed.
  // Few rows by two panels, b_step apart: the first has one row, the next two. Null: panels pass one by one.
  const MmadTileFunction<T>* two_panels = nullptr;
  std::int64_t most_of_two_panels = 0;
  PanelTiles<T> some_of_rows = {};  // Where columns are missing; null: b is packed.
  // The same, quicker, which keep nothing; null: a kept panel is quicker yet.
  const MmadTileFunction<T>* in_near_rows = nullptr;
  // Of AMX: sums as a tile leaves them, a panel wide, rounded to bf16. False where a denormal is among them, which count as
  // zero here and as what they are in VectorOps::cast.
  bool (*to_bf16)(const float* sums, std::int64_t rows, std::int64_t cols, BF16* c, std::int64_t c_pitch,
                  bool stream) = nullptr;
};

// The tiles of VDPBF16PS, as large as those of fp32 on AVX-512: 12 rows of 32 columns. Each step adds two products per
// lane; denormal operands and results count as zero. Only where HasBF16Avx512().
bool HasBF16Avx512();
extern const MmadTiles<BF16, 12> kBF16TilesAvx512;
extern const FewRowTiles<BF16> kFewRowsBF16Avx512, kFewRowsBF16Zen5;
std::int64_t PeakDotBF16Avx512(std::int64_t rounds);

// The tiles of TDPBF16PS: 32 rows of 32 columns, four accumulators of sixteen by sixteen. Sixteen pairs of k are summed from
// zero, the first products of the pairs and the second ones apart, then both sums are added to the accumulator; denormals count
// as zero as above. So bits depend on where a product's k is cut, unless at multiples of 32. Only where HasBF16Amx(), and
// between the two ends of an AmxUse, of which a thread has one at a time.
bool HasBF16Amx();  // Asks the kernel for the tile registers when called first.
extern const MmadTiles<BF16, 32> kBF16TilesAmx;
extern const FewRowTiles<BF16> kFewRowsBF16Amx;
std::int64_t PeakDotBF16Amx(std::int64_t rounds);
class AmxUse {
 public:
  AmxUse();
  ~AmxUse();
  AmxUse(const AmxUse&) = delete;
  AmxUse& operator=(const AmxUse&) = delete;
};

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_HOST_CUBE_BF16_H_
