// How the movement of MoE tokens, to expert order and back, is cut for a chip.
#ifndef CUBIST_TILING_TOKEN_PERMUTE_TILING_H_
#define CUBIST_TILING_TOKEN_PERMUTE_TILING_H_

#include <compare>
#include <cstdint>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/status.h"

namespace cubist {

struct TokenPermuteShape {
  std::int64_t tokens = 0, hidden = 0, top_k = 0, experts = 0;
  DType dtype = DType::kF32;
  bool wide_ids = false;  // int64

  friend auto operator<=>(const TokenPermuteShape&, const TokenPermuteShape&) = default;
};

// Tokens are cut into `chunks` of `chunk_tokens`, ranked side by side. A chunk's ids are read `piece_tokens`
// tokens at a time, its experts counted in ranges of `experts`, and rows move in parts of `cols`.
struct TokenPermuteTiling {
  std::int64_t chunks = 0, chunk_tokens = 0;
  std::int64_t piece_tokens = 0;
  std::int64_t experts = 0;
  std::int64_t cols = 0;
  int row_stages = 2;
};

bool Fits(const ChipSpec& chip, const TokenPermuteShape& shape, const TokenPermuteTiling& tiling);
std::vector<TokenPermuteTiling> PermuteCandidates(const ChipSpec& chip, const TokenPermuteShape& shape);
double Price(const ChipSpec& chip, const TokenPermuteShape& shape, const TokenPermuteTiling& tiling);
Status Choose(const ChipSpec& chip, const TokenPermuteShape& shape, TokenPermuteTiling* tiling);

// Unpermute: tokens are cut into `chunks`; a token's rows meet in UB in parts of
// `cols`, `rows` of them at a time.
struct TokenUnpermuteTiling {
  std::int64_t chunks = 0, chunk_tokens = 0;
  std::int64_t piece_tokens = 0;
  std::int64_t cols = 0, rows = 0;
  int stages = 2;
};

bool Fits(const ChipSpec& chip, const TokenPermuteShape& shape, const TokenUnpermuteTiling& tiling);
std::vector<TokenUnpermuteTiling> UnpermuteCandidates(const ChipSpec& chip, const TokenPermuteShape& shape);
double Price(const ChipSpec& chip, const TokenPermuteShape& shape, const TokenUnpermuteTiling& tiling);
Status Choose(const ChipSpec& chip, const TokenPermuteShape& shape, TokenUnpermuteTiling* tiling);

}  // namespace cubist

#endif  // CUBIST_TILING_TOKEN_PERMUTE_TILING_H_
