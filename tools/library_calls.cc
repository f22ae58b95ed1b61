#include "tools/library_calls.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"
#include "kernels/grouped_matmul.h"
#include "kernels/matmul.h"
#include "kernels/reorder_chunks.h"
#include "kernels/rms_norm.h"
#include "kernels/route.h"
#include "kernels/swiglu.h"
#include "kernels/token_permute.h"
#include "kernels/token_permute_grad.h"

namespace cubist {
namespace {

double Product(const Shape& sizes) {
  double product = 1;
  for (const std::int64_t size : sizes) product *= static_cast<double>(size);
  return product;
}

// Pairs of a query and a key that it sees, over all heads.
double Pairs(std::int64_t heads, std::int64_t length, bool causal) {
  const double pairs = Product({heads, length, length});
  return causal ? (pairs + Product({heads, length})) / 2 : pairs;
}

template <class Args>
void SetRun(KernelCall* call, Status (*kernel)(const Device&, const Args&, Profile*), const Args& args) {
  call->set_run([=](const Device& device, Profile* profile) { return kernel(device, args, profile); });
}

void MakeMatmul(const Shape& s, DType dtype, const KernelCallOptions& options, KernelCall* call) {
  MatmulArgs args;
  args.a = call->Input(dtype, {s[0], s[2]});
  args.b = call->Input(dtype, {s[2], s[1]});
  args.c = call->Output(dtype, {s[0], s[1]});
  args.any_order = options.any_order;
  call->set_products(Product(s));
  SetRun(call, &Matmul, args);
}

void MakeMatmulEpilogue(const Shape& s, DType dtype, const KernelCallOptions&, KernelCall* call) {
  MatmulArgs args;
  args.a = call->Input(dtype, {s[0], s[2]});
  args.b = call->Input(dtype, {s[2], s[1]});
  args.bias = call->Input(DType::kF32, {s[1]});
  args.residual = call->Input(dtype, {s[0], s[1]});
  args.c = call->Output(dtype, {s[0], s[1]});
  args.alpha = 0.5f, args.beta = 0.25f;
  args.activation = Activation::kGelu;
  SetRun(call, &Matmul, args);
}

// Rows of each of `groups` experts: the g-th has twice the weight of the one after it in every four, so that groups are
// uneven and known.
std::vector<std::int32_t> UnevenCounts(std::int64_t rows, std::int64_t groups) {
  std::vector<std::int32_t> counts;
  std::int64_t weights = 0, before = 0;
  for (std::int64_t g = 0; g < groups; ++g) weights += 8 >> g % 4;
  for (std::int64_t g = 0, seen = 0; g < groups; ++g) {
    seen += 8 >> g % 4;
    const std::int64_t end = rows * seen / weights;
    counts.push_back(static_cast<std::int32_t>(end - before));
    before = end;
  }
  return counts;
}

void MakeGroupedMatmul(const Shape& s, DType dtype, const KernelCallOptions&, KernelCall* call) {
  const std::int64_t rows = s[0], n = s[1], k = s[2], groups = s[3];
  GroupedMatmulArgs args;
  args.x = call->Input(dtype, {rows, k});
  args.groups = call->Ids(UnevenCounts(rows, groups), {groups});
  args.weights = call->Input(dtype, {groups, k, n});
  args.out = call->Output(dtype, {rows, n});
  call->set_products(Product({rows, n, k}));
  SetRun(call, &GroupedMatmul, args);
}

void MakeGroupedMatmulGrad(const Shape& s, DType dtype, const KernelCallOptions&, KernelCall* call) {
  const std::int64_t rows = s[0], n = s[1], k = s[2], groups = s[3];
  GroupedMatmulGradArgs args;
  args.dy = call->Input(dtype, {rows, n});
  args.groups = call->Ids(UnevenCounts(rows, groups), {groups});
  args.weights = call->Input(dtype, {groups, k, n});
  args.dx = call->Output(dtype, {rows, k});
  args.x = call->Input(dtype, {rows, k});
  args.dw = call->Output(DType::kF32, {groups, k, n});
  call->set_products(2 * Product({rows, n, k}));
  SetRun(call, &GroupedMatmulGrad, args);
}

// What both passes of attention are given: queries, keys and values, and rope parts where there are any.
struct AttentionSizes {
  explicit AttentionSizes(const Shape& s) : heads(s[0]), length(s[1]), d_qk(s[2]), d_v(s[3]), d_rope(s[4]) {}
  // Multiply-adds of so many products over the columns of queries, and over those of values.
  double Products(const KernelCallOptions& options, std::int64_t of_qk, std::int64_t of_v) const {
    return Pairs(heads, length, options.causal) * static_cast<double>(of_qk * (d_qk + d_rope) + of_v * d_v);
  }
  Shape Rows(std::int64_t columns) const { return {1, heads, length, columns}; }

  std::int64_t heads, length, d_qk, d_v, d_rope;
};

template <class Args>
Args AttentionInputs(const AttentionSizes& s, DType dtype, const KernelCallOptions& options,
                     KernelCall* call) {
  Args args;
  args.q = call->Input(dtype, s.Rows(s.d_qk));
  args.k = call->Input(dtype, s.Rows(s.d_qk));
  args.v = call->Input(dtype, s.Rows(s.d_v));
  if (s.d_rope > 0) {
    args.q_rope = call->Input(dtype, s.Rows(s.d_rope));
    args.k_rope = call->Input(dtype, {1, 1, s.length, s.d_rope});
  }
  args.causal = options.causal ? Causal::kBottomRight : Causal::kNone;
  return args;
}

void FinishAttention(const AttentionSizes& s, DType dtype, const KernelCallOptions& options,
                     FlashAttentionArgs args, KernelCall* call) {
  args.out = call->Output(dtype, s.Rows(s.d_v));
  args.lse = call->Output(DType::kF32, {1, s.heads, s.length});
  call->set_products(s.Products(options, 1, 1));
  SetRun(call, &FlashAttention, args);
}

void MakeFlashAttention(const Shape& shape, DType dtype, const KernelCallOptions& options, KernelCall* call) {
  const AttentionSizes s(shape);
  FinishAttention(s, dtype, options, AttentionInputs<FlashAttentionArgs>(s, dtype, options, call), call);
}

// Everything that may be done to scores and weights: a mask, distances, a soft cap, dropout, positions by index.
void MakeMaskedAttention(const Shape& shape, DType dtype, const KernelCallOptions& options,
                         KernelCall* call) {
  const AttentionSizes s(shape);
  auto args = AttentionInputs<FlashAttentionArgs>(s, dtype, options, call);
  args.mask = call->Flags({1, 1, s.length, s.length});
  args.alibi.slopes = call->Input(DType::kF32, {s.heads});
  args.soft_cap = 30.0f;
  args.dropout = {.keep = 0.9f, .seed = 1, .offset = 2};
  if (s.d_rope > 0) {
    args.rope.cos = call->Input(DType::kF32, {s.length, s.d_rope / 2});
    args.rope.sin = call->Input(DType::kF32, {s.length, s.d_rope / 2});
    std::vector<std::int32_t> backwards;
    for (std::int64_t i = s.length; i > 0; --i) backwards.push_back(static_cast<std::int32_t>(i - 1));
    args.rope.q_positions = call->Ids(backwards, {s.length});
  }
  FinishAttention(s, dtype, options, args, call);
}

// One query row of each of several sequences, packed, whose keys are as many as given in the mean, unevenly.
void MakeDecoding(const Shape& s, DType dtype, const KernelCallOptions& options, KernelCall* call) {
  const std::int64_t sequences = s[0], heads = s[1], kv_heads = s[2], keys = s[0] * s[3], d_qk = s[4],
                     d_v = s[5];
  FlashAttentionArgs args;
  args.q = call->Input(dtype, {1, heads, sequences, d_qk});
  args.k = call->Input(dtype, {1, kv_heads, keys, d_qk});
  args.v = call->Input(dtype, {1, kv_heads, keys, d_v});
  args.out = call->Output(dtype, {1, heads, sequences, d_v});
  args.lse = call->Output(DType::kF32, {1, heads, sequences});
  args.causal = options.causal ? Causal::kBottomRight : Causal::kNone;
  std::vector<std::int64_t> q_ends, kv_ends;
  for (const std::int32_t count : UnevenCounts(keys, sequences)) {
    q_ends.push_back(static_cast<std::int64_t>(q_ends.size()) + 1);
    kv_ends.push_back((kv_ends.empty() ? 0 : kv_ends.back()) + count);
  }
  call->set_products(Product({heads, keys, d_qk + d_v}));
  call->set_run([=](const Device& device, Profile* profile) {
    FlashAttentionArgs of_call = args;
    of_call.lengths = {q_ends, kv_ends};
    return FlashAttention(device, of_call, profile);
  });
}

void MakeFlashAttentionGrad(const Shape& shape, DType dtype, const KernelCallOptions& options,
                            KernelCall* call) {
  const AttentionSizes s(shape);
  auto args = AttentionInputs<FlashAttentionGradArgs>(s, dtype, options, call);
  args.out = call->Input(dtype, s.Rows(s.d_v));
  args.dout = call->Input(dtype, s.Rows(s.d_v));
  args.lse = call->Input(DType::kF32, {1, s.heads, s.length});
  args.dq = call->Output(dtype, s.Rows(s.d_qk));
  args.dk = call->Output(dtype, s.Rows(s.d_qk));
  args.dv = call->Output(dtype, s.Rows(s.d_v));
  if (s.d_rope > 0) {
    args.dq_rope = call->Output(dtype, s.Rows(s.d_rope));
    args.dk_rope = call->Output(dtype, {1, 1, s.length, s.d_rope});
  }
  call->set_products(s.Products(options, 3, 2));
  SetRun(call, &FlashAttentionGrad, args);
}

// Every token to top_k neighbouring experts.
std::vector<std::int32_t> NeighbouringExperts(std::int64_t tokens, std::int64_t top_k, std::int64_t experts) {
  std::vector<std::int32_t> ids;
  ids.reserve(static_cast<std::size_t>(tokens * top_k));  // Fails at once where the machine has not so much.
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t j = 0; j < top_k; ++j)
      ids.push_back(static_cast<std::int32_t>((t * 7 + j) % std::max<std::int64_t>(experts, 1)));
  }
  return ids;
}

void MakeTokenPermute(const Shape& s, DType dtype, const KernelCallOptions&, KernelCall* call) {
  const std::int64_t tokens = s[0], hidden = s[1], top_k = s[2], experts = s[3];
  TokenPermuteArgs args;
  args.tokens = call->Input(dtype, {tokens, hidden});
  args.topk_ids = call->Ids(NeighbouringExperts(tokens, top_k, experts), {tokens, top_k});
  args.num_experts = experts;
  args.permuted = call->Output(dtype, {tokens * top_k, hidden});
  args.sorted_indices = call->Output(DType::kI32, {tokens * top_k});
  SetRun(call, &TokenPermute, args);
}

// Slot (t, j) in row t of block j.
std::vector<std::int32_t> PlacesOfSlots(std::int64_t tokens, std::int64_t top_k) {
  std::vector<std::int32_t> places(static_cast<std::size_t>(tokens * top_k));
  for (std::int64_t i = 0; i < tokens * top_k; ++i)
    places[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i % top_k * tokens + i / top_k);
  return places;
}

void MakeTokenUnpermute(const Shape& s, DType dtype, const KernelCallOptions&, KernelCall* call) {
  const std::int64_t tokens = s[0], hidden = s[1], top_k = s[2], slots = tokens * top_k;
  TokenUnpermuteArgs args;
  args.permuted = call->Input(dtype, {slots, hidden});
  args.sorted_indices = call->Ids(PlacesOfSlots(tokens, top_k), {slots});
  args.probs = call->Input(DType::kF32, {tokens, top_k});
  args.out = call->Output(dtype, {tokens, hidden});
  SetRun(call, &TokenUnpermute, args);
}

// With what else aclnnMoeFinalizeRoutingV2 adds.
void MakeTokenFinalize(const Shape& s, DType dtype, const KernelCallOptions&, KernelCall* call) {
  const std::int64_t tokens = s[0], hidden = s[1], top_k = s[2], experts = s[3], slots = tokens * top_k;
  std::vector<std::int32_t> places = PlacesOfSlots(tokens, top_k), ids;
  for (std::int64_t slot = 0; slot < slots; ++slot)
    ids.push_back(static_cast<std::int32_t>(slot % std::max<std::int64_t>(experts, 1)));
  if (!places.empty()) places.back() = -1;
  TokenUnpermuteArgs args;
  args.permuted = call->Input(dtype, {slots, hidden});
  args.sorted_indices = call->Ids(places, {slots});
  args.probs = call->Input(DType::kF32, {tokens, top_k});
  args.bias = call->Input(dtype, {experts, hidden});
  args.topk_ids = call->Ids(ids, {tokens, top_k});
  args.residual = call->Input(dtype, {tokens, hidden});
  args.residual2 = call->Input(dtype, {tokens, hidden});
  args.out = call->Output(dtype, {tokens, hidden});
  call->set_run(
      [args](const Device& device, Profile* profile) { return TokenUnpermute(device, args, profile); });
}

void MakeRmsNorm(const Shape& s, DType dtype, const KernelCallOptions&, KernelCall* call) {
  RmsNormArgs args;
  args.x = call->Input(dtype, {s[0], s[1]});
  args.gamma = call->Input(dtype, {s[1]});
  args.out = call->Output(dtype, {s[0], s[1]});
  args.rstd = call->Output(DType::kF32, {s[0]});
  SetRun(call, &RmsNorm, args);
}

void MakeRmsNormGrad(const Shape& s, DType dtype, const KernelCallOptions&, KernelCall* call) {
  RmsNormGradArgs args;
  args.d_out = call->Input(dtype, {s[0], s[1]});
  args.x = call->Input(dtype, {s[0], s[1]});
  args.rstd = call->Input(DType::kF32, {s[0]});
  args.gamma = call->Input(dtype, {s[1]});
  args.d_sum = call->Input(dtype, {s[0], s[1]});
  args.d_x = call->Output(dtype, {s[0], s[1]});
  args.d_gamma = call->Output(DType::kF32, {s[1]});
  SetRun(call, &RmsNormGrad, args);
}

void MakeSwiGlu(const Shape& s, DType dtype, const KernelCallOptions&, KernelCall* call) {
  SwiGluArgs args;
  args.gate = call->Input(dtype, {s[0], s[1]});
  args.up = call->Input(dtype, {s[0], s[1]});
  args.probs = call->Input(DType::kF32, {s[0]});
  args.out = call->Output(dtype, {s[0], s[1]});
  SetRun(call, &SwiGlu, args);
}

void MakeSwiGluGrad(const Shape& s, DType dtype, const KernelCallOptions&, KernelCall* call) {
  SwiGluGradArgs args;
  args.d_out = call->Input(dtype, {s[0], s[1]});
  args.gate = call->Input(dtype, {s[0], s[1]});
  args.up = call->Input(dtype, {s[0], s[1]});
  args.probs = call->Input(DType::kF32, {s[0]});
  args.d_gate = call->Output(dtype, {s[0], s[1]});
  args.d_up = call->Output(dtype, {s[0], s[1]});
  args.d_probs = call->Output(DType::kF32, {s[0]});
  SetRun(call, &SwiGluGrad, args);
}

void MakeTokenPermuteGrad(const Shape& s, DType dtype, const KernelCallOptions&, KernelCall* call) {
  const std::int64_t tokens = s[0], hidden = s[1], top_k = s[2], slots = tokens * top_k;
  TokenPermuteGradArgs args;
  args.permuted_grad = call->Input(dtype, {slots, hidden});
  args.sorted_indices = call->Ids(PlacesOfSlots(tokens, top_k), {slots});
  args.permuted_probs_grad = call->Input(DType::kF32, {slots});
  args.top_k = top_k;
  args.tokens_grad = call->Output(dtype, {tokens, hidden});
  args.probs_grad = call->Output(DType::kF32, {tokens, top_k});
  SetRun(call, &TokenPermuteGrad, args);
}

template <bool kDropsSlot>
void MakeTokenUnpermuteGrad(const Shape& s, DType dtype, const KernelCallOptions&, KernelCall* call) {
  const std::int64_t tokens = s[0], hidden = s[1], top_k = s[2], slots = tokens * top_k;
  TokenUnpermuteGradArgs args;
  args.out_grad = call->Input(dtype, {tokens, hidden});
  args.permuted = call->Input(dtype, {slots, hidden});
  std::vector<std::int32_t> places = PlacesOfSlots(tokens, top_k);
  if (kDropsSlot && !places.empty()) places.back() = -1;  // Its row belongs to no slot.
  args.sorted_indices = call->Ids(places, {slots});
  args.probs = call->Input(DType::kF32, {tokens, top_k});
  args.permuted_grad = call->Output(dtype, {slots, hidden});
  args.probs_grad = call->Output(DType::kF32, {tokens, top_k});
  SetRun(call, &TokenUnpermuteGrad, args);
}

// Every expert has rows of `capacity` neighbouring tokens, and of no token where there are fewer.
std::vector<std::int32_t> TokensOfRows(std::int64_t tokens, std::int64_t experts, std::int64_t capacity) {
  std::vector<std::int32_t> of_rows(static_cast<std::size_t>(experts * capacity), -1);
  for (std::int64_t e = 0; e < experts; ++e) {
    for (std::int64_t c = 0; c < std::min(capacity, tokens); ++c)
      of_rows[static_cast<std::size_t>(e * capacity + c)] = static_cast<std::int32_t>((e * 7 + c) % tokens);
  }
  return of_rows;
}

void MakeTokenUnpermuteByRow(const Shape& s, DType dtype, const KernelCallOptions&, KernelCall* call) {
  const std::int64_t tokens = s[0], hidden = s[1], experts = s[2], capacity = s[3], rows = experts * capacity;
  TokenUnpermuteArgs args;
  args.permuted = call->Input(dtype, {rows, hidden});
  args.row_tokens = call->Ids(TokensOfRows(tokens, experts, capacity), {rows});
  args.capacity = capacity;
  args.probs = call->Input(DType::kF32, {tokens, experts});
  args.out = call->Output(dtype, {tokens, hidden});
  SetRun(call, &TokenUnpermute, args);
}

void MakeTokenPermuteGradByRow(const Shape& s, DType dtype, const KernelCallOptions&, KernelCall* call) {
  const std::int64_t tokens = s[0], hidden = s[1], experts = s[2], capacity = s[3], rows = experts * capacity;
  TokenPermuteGradArgs args;
  args.permuted_grad = call->Input(dtype, {rows, hidden});
  args.row_tokens = call->Ids(TokensOfRows(tokens, experts, capacity), {rows});
  args.capacity = capacity;
  args.permuted_probs_grad = call->Input(DType::kF32, {rows});
  args.tokens_grad = call->Output(dtype, {tokens, hidden});
  args.probs_grad = call->Output(DType::kF32, {tokens, experts});
  SetRun(call, &TokenPermuteGrad, args);
}

void MakeTokenUnpermuteGradByRow(const Shape& s, DType dtype, const KernelCallOptions&, KernelCall* call) {
  const std::int64_t tokens = s[0], hidden = s[1], experts = s[2], capacity = s[3], rows = experts * capacity;
  TokenUnpermuteGradArgs args;
  args.out_grad = call->Input(dtype, {tokens, hidden});
  args.permuted = call->Input(dtype, {rows, hidden});
  args.row_tokens = call->Ids(TokensOfRows(tokens, experts, capacity), {rows});
  args.capacity = capacity;
  args.probs = call->Input(DType::kF32, {tokens, experts});
  args.permuted_grad = call->Output(dtype, {rows, hidden});
  args.probs_grad = call->Output(DType::kF32, {tokens, experts});
  SetRun(call, &TokenUnpermuteGrad, args);
}

// A token goes to top_k experts or to one less; experts are placed the other way round.
void MakeTokenPermuteByMap(const Shape& s, DType dtype, const KernelCallOptions&, KernelCall* call) {
  const std::int64_t tokens = s[0], hidden = s[1], top_k = s[2], experts = s[3];
  std::vector<std::uint8_t> map(static_cast<std::size_t>(tokens * experts));
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t j = 0; j < std::min(top_k, experts) - t % 2; ++j)
      map[static_cast<std::size_t>(t * experts + (t * 7 + j) % experts)] = 1;
  }
  std::vector<std::int32_t> places;
  for (std::int64_t e = experts; e-- > 0;) places.push_back(static_cast<std::int32_t>(e));
  TokenPermuteArgs args;
  args.tokens = call->Input(dtype, {tokens, hidden});
  args.routing_map = call->Flags(map, {tokens, experts});
  args.valid = call->Flags(std::vector<std::uint8_t>(static_cast<std::size_t>(tokens), 1), {tokens});
  args.probs = call->Input(DType::kF32, {tokens, experts});
  args.expert_places = call->Ids(places, {experts});
  args.top_k = std::min(top_k, experts), args.num_experts = experts;
  const std::int64_t rows = tokens * args.top_k;
  args.permuted = call->Output(dtype, {rows, hidden});
  args.sorted_indices = call->Output(DType::kI32, {rows});
  args.permuted_probs = call->Output(DType::kF32, {rows});
  args.row_tokens = call->Output(DType::kI32, {rows});
  SetRun(call, &TokenPermute, args);
}

void MakeReorderChunks(const Shape& s, DType dtype, const KernelCallOptions&, KernelCall* call) {
  const std::int64_t rows = s[0], hidden = s[1], ranks = s[2], experts = s[3];
  ReorderChunksArgs args;
  args.tokens = call->Input(dtype, {rows, hidden});
  args.chunk_counts = call->Ids(UnevenCounts(rows, ranks * experts), {ranks, experts});
  args.probs = call->Input(DType::kF32, {rows});
  args.out = call->Output(dtype, {rows, hidden});
  args.out_probs = call->Output(DType::kF32, {rows});
  args.row_ids = call->Output(DType::kI32, {rows});
  args.expert_counts = call->Output(DType::kI32, {experts});
  SetRun(call, &ReorderChunks, args);
}

// Sigmoid scores, half of the groups where there are several.
void MakeRoute(const Shape& s, DType dtype, const KernelCallOptions&, KernelCall* call) {
  const std::int64_t tokens = s[0], experts = s[1], top_k = s[2], groups = s[3];
  RouteArgs args;
  args.logits = call->Input(dtype, {tokens, experts});
  args.bias = call->Input(DType::kF32, {experts});
  args.options = {.score = ScoreFunction::kSigmoid,
                  .renormalise = true,
                  .groups = groups,
                  .top_groups = CeilDiv(groups, 2),
                  .bad_logits = BadLogits::kMean,
                  .aux_coefficient = 0.01f};
  args.weights = call->Output(DType::kF32, {tokens, top_k});
  args.ids = call->Output(DType::kI32, {tokens, top_k});
  args.counts = call->Output(DType::kI32, {experts});
  args.aux_loss = call->Output(DType::kF32, {1});
  SetRun(call, &Route, args);
}

// Of a softmax over all experts, with the gradient of the load-balance loss.
void MakeRouteGrad(const Shape& s, DType dtype, const KernelCallOptions&, KernelCall* call) {
  const std::int64_t tokens = s[0], experts = s[1], top_k = s[2];
  RouteGradArgs args;
  args.d_weights = call->Input(DType::kF32, {tokens, top_k});
  args.ids = call->Ids(NeighbouringExperts(tokens, top_k, experts), {tokens, top_k});
  args.scores = call->Input(DType::kF32, {tokens, experts});
  // Scores are above 0; sums of others may be as good as 0, and are divided by.
  auto* const scores = static_cast<float*>(const_cast<void*>(args.scores.data));
  for (std::int64_t i = 0; scores != nullptr && i < tokens * experts; ++i)
    scores[i] = 0.125f + std::abs(scores[i]);
  args.counts = call->Ids(UnevenCounts(tokens * top_k, experts), {experts});
  args.options = {.renormalise = true, .aux_coefficient = 0.01f};
  args.d_aux_loss = 1;
  args.d_logits = call->Output(dtype, {tokens, experts});
  SetRun(call, &RouteGrad, args);
}

}  // namespace

std::vector<NamedKernel> LibraryKernels() {
  return {
      {{"matmul", "MxNxK", "1024x1024x1024", "100x90x70", 3}, &MakeMatmul},
      {{"matmul_epilogue", "MxNxK", "1024x1024x1024", "60x50x70", 3}, &MakeMatmulEpilogue},
      {{"flash_attention", "HEADSxLENGTHxDQKxDVxDROPE", "8x1024x128x128x0", "2x70x40x24x16", 4, true},
       &MakeFlashAttention},
      {{"flash_attention_masked", "HEADSxLENGTHxDQKxDVxDROPE", "2x512x128x128x0", "2x70x40x24x16", 4, true},
       &MakeMaskedAttention},
      {{"flash_attention_decode", "SEQUENCESxHEADSxKVHEADSxKEYSxDQKxDV", "8x32x8x4096x128x128",
        "3x6x2x300x40x24", 6, true},
       &MakeDecoding},
      {{"flash_attention_grad", "HEADSxLENGTHxDQKxDVxDROPE", "8x1024x128x128x0", "2x70x40x24x16", 4, true},
       &MakeFlashAttentionGrad},
      {{"token_permute", "TOKENSxHIDDENxTOPKxEXPERTS", "512x7168x8x256", "50x33x3x8", 4}, &MakeTokenPermute},
      {{"token_permute_by_digits", "TOKENSxHIDDENxTOPKxEXPERTS", "512x7168x8x65536", "20x33x3x70000", 4},
       &MakeTokenPermute},
      {{"token_unpermute", "TOKENSxHIDDENxTOPK", "512x7168x8", "50x33x3", 3}, &MakeTokenUnpermute},
      {{"token_finalize", "TOKENSxHIDDENxTOPKxEXPERTS", "512x7168x8x256", "50x33x3x8", 4},
       &MakeTokenFinalize},
      {{"rms_norm", "ROWSxCOLS", "4096x7168", "50x33", 2}, &MakeRmsNorm},
      {{"rms_norm_grad", "ROWSxCOLS", "4096x7168", "50x33", 2}, &MakeRmsNormGrad},
      {{"route", "TOKENSxEXPERTSxTOPKxGROUPS", "4096x256x8x8", "40x24x3x4", 4}, &MakeRoute},
      {{"route_grad", "TOKENSxEXPERTSxTOPK", "4096x256x8", "40x24x3", 3}, &MakeRouteGrad},
      {{"swiglu", "ROWSxCOLS", "4096x2048", "50x33", 2}, &MakeSwiGlu},
      {{"swiglu_grad", "ROWSxCOLS", "4096x2048", "50x33", 2}, &MakeSwiGluGrad},
      {{"grouped_matmul", "ROWSxNxKxGROUPS", "1024x4096x7168x8", "110x50x70x4", 4}, &MakeGroupedMatmul},
      {{"grouped_matmul_grad", "ROWSxNxKxGROUPS", "1024x4096x7168x8", "70x40x60x3", 4},
       &MakeGroupedMatmulGrad},
      {{"token_permute_grad", "TOKENSxHIDDENxTOPK", "512x7168x8", "50x33x3", 3}, &MakeTokenPermuteGrad},
      {{"token_permute_by_map", "TOKENSxHIDDENxTOPKxEXPERTS", "512x7168x8x256", "50x33x3x8", 4},
       &MakeTokenPermuteByMap},
      {{"reorder_chunks", "ROWSxHIDDENxRANKSxEXPERTS", "4096x7168x32x8", "70x33x3x5", 4}, &MakeReorderChunks},
      {{"token_unpermute_grad", "TOKENSxHIDDENxTOPK", "512x7168x8", "50x33x3", 3},
       &MakeTokenUnpermuteGrad<false>},
      {{"token_unpermute_grad_dropped", "TOKENSxHIDDENxTOPK", "512x7168x8", "50x33x3", 3},
       &MakeTokenUnpermuteGrad<true>},
      {{"token_unpermute_by_row", "TOKENSxHIDDENxEXPERTSxCAPACITY", "512x7168x256x16", "50x33x8x21", 4},
       &MakeTokenUnpermuteByRow},
      {{"token_permute_grad_by_row", "TOKENSxHIDDENxEXPERTSxCAPACITY", "512x7168x256x16", "50x33x8x21", 4},
       &MakeTokenPermuteGradByRow},
      {{"token_unpermute_grad_by_row", "TOKENSxHIDDENxEXPERTSxCAPACITY", "512x7168x256x16", "50x33x8x21", 4},
       &MakeTokenUnpermuteGradByRow},
  };
}

}  // namespace cubist
