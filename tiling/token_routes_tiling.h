// How the routes of MoE tokens are made ready for their movement on a chip: a pass over small numbers, so that there is
// nothing to choose but what fits.
#ifndef CUBIST_TILING_TOKEN_ROUTES_TILING_H_
#define CUBIST_TILING_TOKEN_ROUTES_TILING_H_

#include <cstdint>

#include "npu_model/chip.h"
#include "npu_model/status.h"
#include "tiling/token_permute_tiling.h"

namespace cubist {

struct TokenRoutesShape {
  std::int64_t tokens = 0, hidden = 0, top_k = 0;
  std::int64_t map_cols = 0;      // Experts, where there is a routing map.
  std::int64_t expert_slots = 0;  // Of the fullest expert, where a capacity keeps the likeliest; else 0.
  std::int64_t capacity = 0;      // Likewise.
};

// Tokens are cut into `chunks` of `chunk_tokens` and walked `piece_tokens` at a time, or single ones by `routes` and by
// `map_cols` experts of a routing map; a table of experts is read `table_cols` at a time; the routes of one expert are read
// `expert_slots` at a time, and the likeliest of them found `kept_slots` at a time; `pad_tokens` flags of one expert are
// read at once, and rows of padding moved in parts of `pad_cols`; counts are summed in tiles of `sum_rows` by `sum_cols`.
struct TokenRoutesTiling {
  std::int64_t chunks = 0, chunk_tokens = 0, piece_tokens = 0;
  std::int64_t routes = kAllRoutes, map_cols = kAllRoutes;
  std::int64_t table_cols = 2048;
  std::int64_t expert_slots = 1, kept_slots = 1;
  std::int64_t pad_tokens = 1024, pad_cols = 4096;
  std::int64_t sum_rows = 32, sum_cols = 256;
};

// The largest pieces that fit; an error names what does not.
Status ChooseRoutes(const ChipSpec& chip, const char* kernel, const TokenRoutesShape& shape,
                    TokenRoutesTiling* tiling);

}  // namespace cubist

#endif  // CUBIST_TILING_TOKEN_ROUTES_TILING_H_
