#include "tiling/matmul_tiling.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "tiling/choose.h"
#include "tiling/cost.h"

namespace cubist {
namespace {

std::int64_t Need(const ChipSpec& chip, const MatmulShape& s, const MatmulTiling& t, Buffer buffer) {
  switch (buffer) {
    case Buffer::kL1: {
      const std::int64_t bias = s.bias ? chip.SlotBytes(Buffer::kL1, DType::kF32, 1, t.n) : 0;
      return t.l1_stages * (chip.SlotBytes(Buffer::kL1, s.in, t.m, t.k1) +
                            chip.SlotBytes(Buffer::kL1, s.in, t.k1, t.n)) +
             bias;
    }
    case Buffer::kL0A:
      return t.l0_stages * chip.SlotBytes(Buffer::kL0A, s.in, t.m, t.k0);
    case Buffer::kL0B:
      return t.l0_stages * chip.SlotBytes(Buffer::kL0B, s.in, t.k0, t.n);
    case Buffer::kL0C:
      return t.l0c_stages * chip.SlotBytes(Buffer::kL0C, DType::kF32, t.m, t.n);
    case Buffer::kBT:
      return chip.SlotBytes(Buffer::kBT, DType::kF32, 1, s.bias ? t.n : 1);
    default:
      return 0;
  }
}

// Whether B serves so few rows that its rows are read where they lie. Elements that change their form on the way pay
// for it once per strip of rows, so one strip is the most.
bool ReadOnce(const ChipSpec& chip, const MatmulShape& s) {
  constexpr std::int64_t kMostRows = 64;
  const bool as_stored = s.in == DType::kF32;
  return s.b_row_bytes > 0 && !s.b_packed && s.m <= (as_stored ? kMostRows : chip.mmad.m_step);
}

// Columns that such a tile has at least: memory gives long runs faster than short ones.
constexpr std::int64_t kShortestRun = 256;

// Every tiling that is considered, whether it fits or not.
std::vector<MatmulTiling> AllTilings(const ChipSpec& chip, const MatmulShape& s) {
  const std::int64_t element = chip.OperandBytes(s.in);
  const std::int64_t k_step = std::max(chip.mmad.k_bytes / element, chip.packing.row_multiple);
  std::vector<MatmulTiling> tilings;
  const auto add = [&](MatmulTiling t) {
    // Where a cache stands for the buffers, an L0B panel set or an accumulator
    // beyond its share is not worth pricing.
    if (!chip.pipes_overlap && ((!t.b_once && t.k0 * t.n * element > chip.buffer(Buffer::kL0B).fast) ||
                                t.m * t.n * 4 > 2 * chip.buffer(Buffer::kL0C).fast)) {
      return;
    }
    if (s.b_packed && t.n < s.n && t.n % kWidestPanel != 0) return;
    t.grid = {CeilDiv(s.m, t.m), CeilDiv(s.n, t.n), BlockOrder::kRowMajor, 1};
    tilings.push_back(t);
    if (t.grid.rows > 1 && t.grid.cols > 1) {
      t.grid.order = BlockOrder::kSwizzled, t.grid.width = 4;
      tilings.push_back(t);
      t.grid.order = BlockOrder::kDiagonal, t.grid.width = 8;
      tilings.push_back(t);
    }
  };
  const auto for_each_shape = [&](auto&& visit) {
    for (std::int64_t m : TileSizes({16, 32, 64, 128, 192, 256, 512}, chip.mmad.m_step, s.m)) {
      for (std::int64_t n : TileSizes({16, 32, 64, 128, 192, 256, 512}, chip.mmad.n_step, s.n)) {
        for (std::int64_t k0 : TileSizes({16, 32, 64, 128, 256, 384, 512}, k_step, s.k)) {
          MatmulTiling t;
          t.m = m, t.n = n, t.k0 = t.k1 = k0;
          visit(t);
        }
      }
    }
  };
  // One thread: nothing to buffer, but whole operands may be packed first.
  const auto add_serial = [&](MatmulTiling t) {
    t.l1_stages = t.l0_stages = 1;
    if (t.m >= s.m && ReadOnce(chip, s) && (t.n >= kShortestRun || t.n >= s.n)) {
      MatmulTiling once = t;
      once.b_once = true;
      add(once);
    }
    for (int packing = 0; packing < 4; ++packing) {
      t.pack_a = (packing & 1) != 0, t.pack_b = (packing & 2) != 0;
      if (t.pack_a && (s.a_packed || CeilDiv(s.n, t.n) == 1 || AIsReadInPlace(chip, s))) continue;
      if (t.pack_b && (s.b_packed || CeilDiv(s.m, t.m) == 1)) continue;
      add(t);
    }
  };
  const auto add_overlapped = [&](MatmulTiling t) {
    for (std::int64_t factor : {1, 2, 4, 8}) {
      t.k1 = t.k0 * factor;
      if (factor > 1 && t.k1 >= s.k + t.k0) break;
      for (int stages : {2, 1}) {
        t.l1_stages = t.l0_stages = stages;
        for (int l0c_stages : {1, 2}) {
          t.l0c_stages = l0c_stages;
          for (int pieces : {1, 2, 4}) {
            if (pieces > factor || (pieces > 1 && (s.a_packed || s.b_packed))) break;
            t.pieces = pieces;
            for (bool stagger : {false, true}) {
              if (stagger && (!s.any_order || t.k1 >= s.k)) break;
              t.stagger = stagger;
              add(t);
            }
          }
          t.pieces = 1, t.stagger = false;
        }
      }
    }
  };
  for_each_shape([&](const MatmulTiling& t) { chip.pipes_overlap ? add_overlapped(t) : add_serial(t); });
  return tilings;
}

}  // namespace

bool Fits(const ChipSpec& chip, const MatmulShape& shape, const MatmulTiling& tiling) {
  return FitsBuffers(chip, [&](Buffer buffer) { return Need(chip, shape, tiling, buffer); });
}

std::vector<MatmulTiling> Candidates(const ChipSpec& chip, const MatmulShape& shape) {
  std::vector<MatmulTiling> candidates = AllTilings(chip, shape);
  std::erase_if(candidates, [&](const MatmulTiling& t) { return !Fits(chip, shape, t); });
  return candidates;
}

Status Choose(const ChipSpec& chip, const MatmulShape& shape, MatmulTiling* tiling) {
  return ChooseCheapest(
      chip, shape, "matmul", &AllTilings,
      [&](const MatmulTiling& t, Buffer buffer) { return Need(chip, shape, t, buffer); }, tiling);
}

}  // namespace cubist
