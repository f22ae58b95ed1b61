// MatmulTiling: how a matrix product is cut for a chip.
#ifndef CUBIST_TILING_MATMUL_TILING_H_
#define CUBIST_TILING_MATMUL_TILING_H_

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/status.h"
#include "tiling/block_order.h"

namespace cubist {

struct MatmulShape {
  std::int64_t m = 0, n = 0, k = 0;
  DType in = DType::kF32, out = DType::kF32;
  bool bias = false;
  std::int64_t a_row_bytes = 0;  // Length of A's rows in GM where its columns are adjacent, else 0.

  friend auto operator<=>(const MatmulShape&, const MatmulShape&) = default;
};

// A block of C, (m, n), stays in L0C while k is walked: in steps of k1 from GM to L1, of k0 from L1 to L0.
struct MatmulTiling {
  std::int64_t m = 0, n = 0;
  std::int64_t k1 = 0, k0 = 0;
  int l1_stages = 2, l0_stages = 2, l0c_stages = 1;
  bool pack_a = false, pack_b = false;  // An operand is packed whole, once, by a phase before.
  BlockGrid grid;
};

// Whether every ring fits its buffer.
bool Fits(const ChipSpec& chip, const MatmulShape& shape, const MatmulTiling& tiling);

// All tilings worth pricing; those that do not fit are left out.
std::vector<MatmulTiling> Candidates(const ChipSpec& chip, const MatmulShape& shape);

// Predicted cycles.
double Price(const ChipSpec& chip, const MatmulShape& shape, const MatmulTiling& tiling);

// The cheapest candidate. Remembers its last answers. An error names the buffer that nothing fits.
Status Choose(const ChipSpec& chip, const MatmulShape& shape, MatmulTiling* tiling);

}  // namespace cubist

#endif  // CUBIST_TILING_MATMUL_TILING_H_
