#include "tiling/token_routes_tiling.h"

#include <algorithm>
#include <string>

#include "tiling/token_permute_tiling.h"

namespace cubist {
namespace {

// Bytes of UB of the kernels of token_routes_kernel.h that walk tokens; SelectRoutesKernel takes most.
std::int64_t PieceNeed(const ChipSpec& chip, const TokenRoutesShape& s, const TokenRoutesTiling& t) {
  const auto bytes = [&](DType dtype, std::int64_t rows, std::int64_t cols) {
    return chip.SlotBytes(Buffer::kUB, dtype, rows, cols);
  };
  const std::int64_t piece = t.piece_tokens, map_rows = s.map_cols > 0 ? piece : 1,
                     map_cols = std::max<std::int64_t>(s.map_cols, 1);
  const std::int64_t select = 2 * bytes(DType::kBool, map_rows, map_cols) +
                              2 * bytes(DType::kBool, piece, 1) + bytes(DType::kI32, map_rows, map_cols) +
                              bytes(DType::kI32, piece, 1) + 2 * bytes(DType::kI32, map_rows, s.top_k) +
                              2 * bytes(DType::kF32, map_rows, map_cols) +
                              2 * bytes(DType::kF32, piece, s.top_k) +
                              2 * bytes(DType::kI32, piece, s.top_k) + bytes(DType::kI64, piece, s.top_k) +
                              2 * bytes(DType::kI32, 1, t.table_cols) + bytes(DType::kI32, piece, s.top_k);
  const std::int64_t drop = 4 * bytes(DType::kI32, piece, s.top_k) + bytes(DType::kI64, piece, s.top_k) +
                            3 * bytes(DType::kF32, piece, s.top_k) + StagingBytes(chip);
  return std::max(select, drop);
}

std::int64_t ExpertNeed(const ChipSpec& chip, const TokenRoutesShape& s) {
  const std::int64_t most = std::min(s.capacity, s.expert_slots);
  return 2 * chip.SlotBytes(Buffer::kUB, DType::kI32, 1, 2) +
         2 * chip.SlotBytes(Buffer::kUB, DType::kF32, 1, s.expert_slots) +
         2 * chip.SlotBytes(Buffer::kUB, DType::kF32, 1, most);
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
  if (const std::int64_t need = PieceNeed(chip, s, t); need > room) {
    return DoesNotFit(chip, kernel,
                      "one token of top_k " + std::to_string(s.top_k) + " and a routing map of " +
                          std::to_string(s.map_cols) + " experts",
                      need);
  }
  if (const std::int64_t need = ExpertNeed(chip, s); s.expert_slots > 0 && need > room) {
    return DoesNotFit(chip, kernel,
                      "a capacity of " + std::to_string(s.capacity) + " by probability with " +
                          std::to_string(s.expert_slots) + " routes to one expert",
                      need);
  }
  t.expert_slots = std::max<std::int64_t>(s.expert_slots, 1);
  t.pad_cols = std::clamp<std::int64_t>(s.hidden, 1, t.pad_cols);
  *tiling = t;
  return {};
}

}  // namespace cubist
