#include "tiling/token_routes_tiling.h"

#include <algorithm>
#include <string>

#include "tiling/cost.h"
#include "tiling/token_permute_tiling.h"

namespace cubist {
namespace {

// Bytes of UB of SelectFromPartsKernel; SpreadSlotsKernel takes less.
std::int64_t PartsNeed(const ChipSpec& chip, const TokenRoutesTiling& t) {
  const auto bytes = [&](DType dtype, std::int64_t cols) {
    return chip.SlotBytes(Buffer::kUB, dtype, 1, cols);
  };
  return 2 * bytes(DType::kBool, t.map_cols) + 2 * bytes(DType::kBool, 1) + bytes(DType::kI32, 1) +
         8 * bytes(DType::kI32, t.map_cols) + bytes(DType::kI32, t.map_cols + 1) +
         2 * bytes(DType::kI32, t.table_cols);
}

// Bytes of UB of the kernels of token_routes_kernel.h that walk tokens; SelectRoutesKernel takes most.
std::int64_t PieceNeed(const ChipSpec& chip, const TokenRoutesShape& s, const TokenRoutesTiling& t) {
  const auto bytes = [&](DType dtype, std::int64_t rows, std::int64_t cols) {
    return chip.SlotBytes(Buffer::kUB, dtype, rows, cols);
  };
  const std::int64_t piece = t.piece_tokens, map_rows = s.map_cols > 0 ? piece : 1,
                     map_cols = std::max<std::int64_t>(s.map_cols, 1),
                     routes = s.map_cols > 0 ? s.top_k : std::min(s.top_k, t.routes);
  const std::int64_t select = 2 * bytes(DType::kBool, map_rows, map_cols) +
                              2 * bytes(DType::kBool, piece, 1) + bytes(DType::kI32, map_rows, map_cols) +
                              bytes(DType::kI32, piece, 1) + 2 * bytes(DType::kI32, map_rows, routes) +
                              2 * bytes(DType::kF32, map_rows, map_cols) +
                              2 * bytes(DType::kF32, piece, routes) + 2 * bytes(DType::kI32, piece, routes) +
                              bytes(DType::kI64, piece, routes) + 2 * bytes(DType::kI32, 1, t.table_cols) +
                              bytes(DType::kI32, piece, routes);
  const std::int64_t some = std::min(s.top_k, t.routes);
  const std::int64_t drop = 4 * bytes(DType::kI32, piece, some) + bytes(DType::kI64, piece, some) +
                            3 * bytes(DType::kF32, piece, some) + StagingBytes(chip);
  return std::max(t.map_cols < s.map_cols ? PartsNeed(chip, t) : select, drop);
}

// Bytes of UB of the kernels that read or write row_tokens `pad_tokens` at a time; RowsByExpertKernel takes most.
std::int64_t RowsNeed(const ChipSpec& chip, const TokenRoutesTiling& t) {
  return 3 * chip.SlotBytes(Buffer::kUB, DType::kI32, 1, t.pad_tokens) +
         2 * chip.SlotBytes(Buffer::kUB, DType::kI32, 1, t.pad_tokens + 1) + StagingBytes(chip);
}

// Parts of half the size, of a single token's routes and of its map; false where they are as small as they get.
bool Halve(const TokenRoutesShape& s, TokenRoutesTiling* t) {
  constexpr std::int64_t kLeast = 8;
  const std::int64_t widest =
                         std::max({std::min(s.top_k, t->routes), std::min(s.map_cols, t->map_cols), kLeast}),
                     half = RoundUp(CeilDiv(widest, 2), kLeast);
  if (half >= widest && t->table_cols <= kLeast) return false;
  t->routes = std::min(t->routes, half), t->map_cols = std::min(t->map_cols, half);
  if (half < t->table_cols || half >= widest) t->table_cols = RoundUp(CeilDiv(t->table_cols, 2), kLeast);
  return true;
}

// Bytes of UB of KeepHighestKernel.
std::int64_t ExpertNeed(const ChipSpec& chip, const TokenRoutesTiling& t) {
  const auto words = [&](std::int64_t cols) { return chip.SlotBytes(Buffer::kUB, DType::kF32, 1, cols); };
  return 2 * words(2) + 2 * words(t.expert_slots) + 2 * words(1) + 2 * words(t.kept_slots) +
         4 * words(RoundUp(t.kept_slots, kBlockWords) + std::min(t.kept_slots, t.expert_slots));
}

// All slots of the fullest expert at once, or as many as fit, of which as many are kept at once as can be merged.
void CutExperts(const ChipSpec& chip, const TokenRoutesShape& s, TokenRoutesTiling* t) {
  const std::int64_t room = chip.buffer(Buffer::kUB).capacity;
  t->expert_slots = std::max<std::int64_t>(s.expert_slots, 1);
  t->kept_slots = std::max<std::int64_t>(std::min(s.capacity, s.expert_slots), 1);
  if (ExpertNeed(chip, *t) <= room) return;
  t->kept_slots = std::min(t->kept_slots, kMergedBlocks);
  t->expert_slots = std::min(t->expert_slots, kMergedBlocks);
  while (ExpertNeed(chip, *t) > room && t->expert_slots > kBlockWords) {
    t->expert_slots = RoundUp(t->expert_slots / 2, kBlockWords);
    t->kept_slots = std::min(t->kept_slots, t->expert_slots);
  }
}

Status DoesNotFit(const ChipSpec& chip, const char* kernel, const std::string& what, std::int64_t need) {
  return {StatusCode::kUnsupported, std::string(kernel) + ": " + what + " needs " + std::to_string(need) +
                                        " bytes of UB, " + chip.name + " has " +
                                        std::to_string(chip.buffer(Buffer::kUB).capacity)};
}

}  // namespace

Status ChooseRoutes(const ChipSpec& chip, const char* kernel, const TokenRoutesShape& s,
                    TokenRoutesTiling* tiling) {
  const std::int64_t room = chip.buffer(Buffer::kUB).capacity;
  TokenRoutesTiling t;
  const std::int64_t cores = chip.cube_cores * chip.vector_per_cube;
  t.chunk_tokens = std::max<std::int64_t>(CeilDiv(s.tokens, cores), 1);
  t.chunks = std::max<std::int64_t>(CeilDiv(s.tokens, t.chunk_tokens), 1);
  t.piece_tokens = t.chunk_tokens;
  while (t.piece_tokens > 1 && PieceNeed(chip, s, t) > room) t.piece_tokens = CeilDiv(t.piece_tokens, 2);
  while (PieceNeed(chip, s, t) > room && Halve(s, &t)) {
  }
  if (const std::int64_t need = PieceNeed(chip, s, t); need > room) {
    return DoesNotFit(chip, kernel,
                      "one token of top_k " + std::to_string(s.top_k) + " and a routing map of " +
                          std::to_string(s.map_cols) + " experts",
                      need);
  }
  CutExperts(chip, s, &t);
  while (t.pad_tokens > kBlockWords && RowsNeed(chip, t) > room) t.pad_tokens /= 2;
  t.pad_cols = std::clamp<std::int64_t>(s.hidden, 1, t.pad_cols);
  *tiling = t;
  return {};
}

}  // namespace cubist
