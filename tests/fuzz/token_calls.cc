// Calls of the router and of what moves tokens.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/reorder_chunks.h"
#include "kernels/route.h"
#include "kernels/token_permute.h"
#include "kernels/token_permute_grad.h"
#include "tests/fuzz/caller.h"

namespace cubist::fuzz {

namespace {

// Where rows go: by ids, (T, K), by a map, (T, E), or, with a capacity, by the tokens of rows.
struct Slots {
  std::int64_t t, h, k, e, rows, capacity;
  bool by_map;
  DType dtype;
  std::int64_t columns() const { return by_map || capacity > 0 ? e : k; }
};
Slots SlotsOf(Caller& in) {
  Slots s{};
  s.t = in.Size(), s.h = in.Size(), s.k = in.choose().Below(4), s.e = 7, s.rows = in.Size();
  s.by_map = !in.choose().Often();
  s.dtype = in.Float();
  return s;
}
// Seldom by the tokens of rows: eight, of which every eight integers name each once.
Slots SlotsOrRowsOf(Caller& in) {
  Slots s = SlotsOf(in);
  if (in.choose().Often()) return s;
  s.t = 8, s.by_map = false, s.capacity = in.Size(), s.rows = s.e * s.capacity;
  return s;
}
template <class Args>
void GiveSlots(Caller& in, const Slots& s, Args* args) {
  if (s.capacity > 0) {
    args->row_tokens = in.Of(DType::kI32, {s.rows}), args->capacity = s.capacity;
  } else {
    args->sorted_indices = in.Of(DType::kI32, {s.t * s.k});
  }
  if (s.by_map) args->routing_map = in.Of(DType::kBool, {s.t, s.e});
  args->top_k = s.k;
  if (in.choose().Seldom()) args->rows = Range{in.Size(), in.Size()};
}

// What experts add to their rows.
template <class Args>
void GiveBias(Caller& in, const Slots& s, Args* args) {
  args->bias = in.Of(s.dtype, {s.e, s.h});
  args->topk_ids = in.Of(in.choose().Of(kInts), {s.t, s.k});
}

// Rows that the arguments ask for, as far as they are right.
std::int64_t RowsOut(const TokenPermuteArgs& args, std::int64_t slots) {
  if (args.rows) return std::max<std::int64_t>(args.rows->size(), 0);
  if (args.capacity > 0) return args.num_experts * args.capacity;
  if (args.num_out_tokens < 0) return std::max<std::int64_t>(slots + args.num_out_tokens, 0);
  return args.num_out_tokens > 0 ? std::min(args.num_out_tokens, slots) : slots;
}

}  // namespace

void CallTokenPermute(Caller& in) {
  const Slots s = SlotsOf(in);
  TokenPermuteArgs args;
  args.tokens = in.Of(s.dtype, {s.t, s.h});
  args.num_experts = in.choose().Seldom() ? in.Size() - 1 : s.e;
  if (s.by_map) {
    args.routing_map = in.Of(DType::kBool, {s.t, s.e}), args.top_k = s.k;
  } else {
    args.topk_ids = in.Of(in.choose().Of(kInts), {s.t, s.k});
  }
  if (in.choose().Seldom()) args.valid = in.Of(DType::kBool, {s.t});
  if (in.choose().Seldom()) args.expert_places = in.Of(DType::kI32, {args.num_experts});
  if (in.choose().Seldom()) args.num_out_tokens = in.Size() - 4;
  if (in.choose().Seldom()) args.capacity = in.Size() - 1;
  args.capacity_keeps = in.choose().Often() ? CapacityKeeps::kFirst : CapacityKeeps::kHighest;
  args.pad_with_tokens = in.choose().Seldom();
  if (in.choose().Seldom()) args.row_multiple = in.Size() - 1;
  if (in.choose().Seldom()) args.rows = Range{in.Size(), in.Size()};
  const std::int64_t rows = RowsOut(args, s.t * s.k);
  args.permuted = in.Of(s.dtype, {rows, s.h});
  args.sorted_indices = in.Of(DType::kI32, {s.t * s.k});
  if (!in.choose().Often()) {
    args.probs = in.Of(DType::kF32, {s.t, s.columns()});
    args.permuted_probs = in.Of(DType::kF32, {rows});
  }
  args.expert_counts = in.Maybe(DType::kI32, {args.num_experts});
  args.expert_offsets = in.Maybe(DType::kI32, {args.num_experts + 1});
  if (in.choose().Seldom()) args.row_tokens = in.Of(DType::kI32, {rows});
  if (in.choose().Seldom()) args.device_counts = in.Of(DType::kI32, {in.choose().Often() ? 7 : in.Size()});
  if (in.choose().Seldom()) args.node_counts = in.Of(DType::kI32, {in.choose().Often() ? 1 : in.Size()});
  in.Run([&](const Device& device) { return TokenPermute(device, args); });
}

void CallTokenUnpermute(Caller& in) {
  const Slots s = SlotsOrRowsOf(in);
  TokenUnpermuteArgs args;
  GiveSlots(in, s, &args);
  args.permuted = in.Of(s.dtype, {s.rows, s.h});
  args.probs = in.Maybe(DType::kF32, {s.t, s.columns()});
  args.out = in.Of(s.dtype, {s.t, s.h});
  if (in.choose().Seldom()) GiveBias(in, s, &args);
  if (in.choose().Seldom()) args.residual = in.Of(s.dtype, {s.t, s.h});
  if (in.choose().Seldom()) args.residual2 = in.Of(s.dtype, {s.t, s.h});
  in.Run([&](const Device& device) { return TokenUnpermute(device, args); });
}

void CallTokenPermuteGrad(Caller& in) {
  const Slots s = SlotsOrRowsOf(in);
  TokenPermuteGradArgs args;
  GiveSlots(in, s, &args);
  args.permuted_grad = in.Of(s.dtype, {s.rows, s.h});
  if (!in.choose().Often()) {
    args.permuted_probs_grad = in.Of(DType::kF32, {s.rows});
    args.probs_grad = in.Of(DType::kF32, {s.t, s.columns()});
  }
  args.tokens_grad = in.Of(s.dtype, {s.t, s.h});
  in.Run([&](const Device& device) { return TokenPermuteGrad(device, args); });
}

void CallTokenUnpermuteGrad(Caller& in) {
  const Slots s = SlotsOrRowsOf(in);
  TokenUnpermuteGradArgs args;
  GiveSlots(in, s, &args);
  args.out_grad = in.Of(s.dtype, {s.t, s.h});
  args.probs = in.Maybe(DType::kF32, {s.t, s.columns()});
  args.permuted = in.Maybe(s.dtype, {s.rows, s.h});
  args.permuted_grad = in.Of(s.dtype, {s.rows, s.h});
  args.probs_grad = in.Maybe(DType::kF32, {s.t, s.columns()});
  if (in.choose().Seldom()) GiveBias(in, s, &args);
  in.Run([&](const Device& device) { return TokenUnpermuteGrad(device, args); });
}

namespace {

// Chunks of 0 to 2 rows, which add up to the rows there are, mostly.

}  // namespace

void CallReorderChunks(Caller& in) {
  const std::int64_t ranks = in.Size(), experts = in.choose().Below(4), h = in.Size();
  const DType dtype = in.Float();
  std::vector<std::int64_t> counts;
  std::int64_t rows = 0;
  for (std::int64_t i = 0; i < ranks * experts; ++i) {
    counts.push_back(in.choose().Seldom() ? -1 : in.choose().Below(3));
    rows += std::max<std::int64_t>(counts.back(), 0);
  }
  if (in.choose().Seldom()) ++rows;
  ReorderChunksArgs args;
  args.tokens = in.Of(dtype, {rows, h});
  args.chunk_counts = in.choose().Seldom() ? in.Of(DType::kI32, {ranks, experts})
                                           : ConstTensor(counts.data(), DType::kI64, {ranks, experts});
  args.inverse = in.choose().Below(2) == 1;
  args.out = in.Of(dtype, {rows, h});
  if (!in.choose().Often())
    args.probs = in.Of(in.Float(), {rows}), args.out_probs = in.Of(in.Float(), {rows});
  args.row_ids = in.Maybe(DType::kI32, {rows});
  args.expert_counts = in.Maybe(DType::kI32, {experts});
  in.Run([&](const Device& device) { return ReorderChunks(device, args); });
}

RouteOptions OptionsOf(Caller& in) {
  RouteOptions o;
  o.score = static_cast<ScoreFunction>(in.choose().Below(3));
  o.renormalise = in.choose().Below(2) == 1;
  if (in.choose().Seldom()) o.scale = in.choose().Number();
  if (in.choose().Seldom()) o.temperature = in.choose().Number();
  if (in.choose().Seldom()) o.dropout = in.choose().Number();
  if (in.choose().Seldom()) o.expert_dropout = in.choose().Number();
  if (in.choose().Seldom()) o.eps = in.choose().Number();
  if (in.choose().Seldom()) o.aux_coefficient = in.choose().Number();
  if (in.choose().Seldom())
    o.groups = in.Size() - 1, o.top_groups = in.Size() - 1, o.group_top = in.Size() - 1;
  o.bad_logits = static_cast<BadLogits>(in.choose().Below(3));
  if (in.choose().Seldom()) o.limit = in.choose().Number();
  return o;
}

void CallRoute(Caller& in) {
  const std::int64_t t = in.Size(), e = in.Size(), k = in.choose().Below(5);
  RouteArgs args;
  args.logits = in.Of(in.Float(), {t, e});
  args.bias = in.Maybe(in.Float(), {e});
  args.options = OptionsOf(in);
  args.weights = in.Of(in.Float(), {t, k});
  args.ids = in.Of(DType::kI32, {t, k});
  args.scores = in.Maybe(DType::kF32, {t, e});
  args.counts = in.Maybe(DType::kI32, {e});
  args.bad = in.Maybe(DType::kF32, {t});
  if (in.choose().Seldom()) args.aux_loss = in.Of(DType::kF32, {1});
  if (in.choose().Seldom()) args.valid = in.Of(DType::kBool, {t});
  in.Run([&](const Device& device) { return Route(device, args); });
}

void CallRouteGrad(Caller& in) {
  const std::int64_t t = in.Size(), e = in.Size(), k = in.choose().Below(5);
  RouteGradArgs args;
  args.d_weights = in.Of(in.Float(), {t, k});
  args.ids = in.Of(DType::kI32, {t, k});
  args.scores = in.Of(DType::kF32, {t, e});
  args.counts = in.Maybe(DType::kI32, {e});
  args.options = OptionsOf(in);
  if (in.choose().Seldom()) args.d_aux_loss = in.choose().Number();
  args.d_logits = in.Of(in.Float(), {t, e});
  if (in.choose().Seldom()) args.valid = in.Of(DType::kBool, {t});
  in.Run([&](const Device& device) { return RouteGrad(device, args); });
}

}  // namespace cubist::fuzz
