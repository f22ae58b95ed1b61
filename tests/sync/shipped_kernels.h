// Records of the shipped kernels on small and awkward shapes.
#ifndef CUBIST_TESTS_SYNC_SHIPPED_KERNELS_H_
#define CUBIST_TESTS_SYNC_SHIPPED_KERNELS_H_

#include <cstdint>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"
#include "kernels/grouped_matmul.h"
#include "kernels/matmul.h"
#include "kernels/rms_norm.h"
#include "kernels/swiglu.h"
#include "kernels/token_permute.h"
#include "npu_model/chip.h"
#include "npu_model/trace/record.h"
#include "tests/npu_model/trace_support.h"

namespace cubist::testing {

struct NamedRecord {
  std::string name;
  trace::Record record;
};

inline Device Recorder(const ChipSpec& chip, trace::Record* record) {
  NpuOptions options;
  options.with_data = false;
  options.record = record;
  return Npu(chip, options);
}

inline NamedRecord RecordMatmul(const ChipSpec& chip, DType dtype, std::int64_t m, std::int64_t n,
                                std::int64_t k, bool transpose_b, bool bias) {
  NamedRecord made;
  made.name = "matmul " + std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k) + " " +
              NameOf(dtype) + (transpose_b ? " transposed b" : "") + (bias ? " bias" : "") + " on " +
              chip.name;
  MatmulArgs args;
  args.a = ConstTensor(nullptr, dtype, {m, k});
  args.b = transpose_b ? ConstTensor(nullptr, dtype, {n, k}) : ConstTensor(nullptr, dtype, {k, n});
  if (bias) args.bias = ConstTensor(nullptr, DType::kF32, {n});
  args.c = Tensor(nullptr, dtype, {m, n});
  args.transpose_b = transpose_b;
  const Status status = Matmul(Recorder(chip, &made.record), args, nullptr);
  CUBIST_CHECK(status.ok(), status.message());
  return made;
}

// With rows of the last group left over, forward or both gradients.
inline NamedRecord RecordGroupedMatmul(const ChipSpec& chip, DType dtype,
                                       const std::vector<std::int64_t>& counts, std::int64_t n,
                                       std::int64_t k, bool grad) {
  NamedRecord made;
  made.name = std::string(grad ? "grouped_matmul_grad " : "grouped_matmul ") + std::to_string(counts.size()) +
              "x" + std::to_string(n) + "x" + std::to_string(k) + " on " + chip.name;
  const auto groups = static_cast<std::int64_t>(counts.size());
  const std::int64_t rows = std::accumulate(counts.begin(), counts.end(), std::int64_t{20});
  const ConstTensor x(nullptr, dtype, {rows, k}), weights(nullptr, dtype, {groups, k, n}),
      list(counts.data(), {groups});
  Status status;
  if (grad) {
    GroupedMatmulGradArgs args;
    args.dy = ConstTensor(nullptr, dtype, {rows, n}), args.groups = list;
    args.weights = weights, args.dx = Tensor(nullptr, dtype, {rows, k});
    args.x = x, args.dw = Tensor(nullptr, DType::kF32, {groups, k, n}), args.accumulate_dw = true;
    status = GroupedMatmulGrad(Recorder(chip, &made.record), args, nullptr);
  } else {
    GroupedMatmulArgs args;
    args.x = x, args.groups = list, args.weights = weights, args.out = Tensor(nullptr, dtype, {rows, n});
    args.bias = ConstTensor(nullptr, DType::kF32, {groups, n});
    status = GroupedMatmul(Recorder(chip, &made.record), args, nullptr);
  }
  CUBIST_CHECK(status.ok(), status.message());
  return made;
}

struct AttentionCase {
  std::int64_t batches = 1, heads = 2, kv_heads = 1, sq = 128, skv = 128, d = 64, d_rope = 0;
  Causal causal = Causal::kNone;
  std::optional<AttentionWindow> window = {};
  bool turned = false;
  RopeLayout layout = RopeLayout::kHalf;
};

inline NamedRecord RecordAttention(const ChipSpec& chip, DType dtype, const AttentionCase& c) {
  NamedRecord made;
  made.name = "flash_attention " + std::to_string(c.heads) + "x" + std::to_string(c.sq) + "x" +
              std::to_string(c.skv) + "x" + std::to_string(c.d) + " rope " + std::to_string(c.d_rope) +
              (c.causal == Causal::kNone ? "" : " causal") + " on " + chip.name;
  FlashAttentionArgs args;
  args.q = ConstTensor(nullptr, dtype, {c.batches, c.heads, c.sq, c.d});
  args.k = ConstTensor(nullptr, dtype, {c.batches, c.kv_heads, c.skv, c.d});
  args.v = ConstTensor(nullptr, dtype, {c.batches, c.kv_heads, c.skv, c.d});
  if (c.d_rope > 0) {
    args.q_rope = ConstTensor(nullptr, dtype, {c.batches, c.heads, c.sq, c.d_rope});
    args.k_rope = ConstTensor(nullptr, dtype, {c.batches, 1, c.skv, c.d_rope});
    if (c.turned) args.rope.cos = args.rope.sin = ConstTensor(nullptr, DType::kF32, {c.skv, c.d_rope / 2});
    args.rope.layout = c.layout;
  }
  args.out = Tensor(nullptr, dtype, {c.batches, c.heads, c.sq, c.d});
  args.lse = Tensor(nullptr, DType::kF32, {c.batches, c.heads, c.sq});
  args.causal = c.causal, args.window = c.window;
  const Status status = FlashAttention(Recorder(chip, &made.record), args, nullptr);
  CUBIST_CHECK(status.ok(), status.message());
  return made;
}

// Decoding: few rows of each of several sequences, some without rows or without keys, heads that share keys, and all that
// may be done to their scores.
inline NamedRecord RecordDecoding(const ChipSpec& chip, DType dtype, std::int64_t positions,
                                  bool with_features, float keep = 1, std::int64_t turned = 16) {
  NamedRecord made;
  made.name = "flash_attention of ragged sequences, " + std::to_string(positions) + " rows each" +
              (with_features ? " with features" : "") + (keep < 1 ? " and dropout" : "") + " on " + chip.name;
  constexpr std::int64_t kHeads = 6, kKvHeads = 2, kKeys = 5000;
  const std::int64_t sq = 4 * positions, longest = 3000;
  const std::int64_t q_ends[] = {positions, positions, 2 * positions, 3 * positions, sq},
                     kv_ends[] = {1100, 1150, 1150 + longest, 1150 + longest, kKeys};
  FlashAttentionArgs args;
  args.q = ConstTensor(nullptr, dtype, {1, kHeads, sq, 40});
  args.k = ConstTensor(nullptr, dtype, {1, kKvHeads, kKeys, 40});
  args.v = ConstTensor(nullptr, dtype, {1, kKvHeads, kKeys, 24});
  args.out = Tensor(nullptr, dtype, {1, kHeads, sq, 24});
  args.lse = Tensor(nullptr, DType::kF32, {1, kHeads, sq});
  args.lengths = {q_ends, kv_ends};
  args.window = AttentionWindow{.left = 2000};
  args.dropout.keep = keep;
  if (with_features) {
    args.rope.cos = args.rope.sin = ConstTensor(nullptr, DType::kF32, {longest, turned / 2});
    args.sinks = ConstTensor(nullptr, DType::kF32, {kHeads});
    args.alibi.slopes = ConstTensor(nullptr, DType::kF32, {kHeads});
    args.bias = ConstTensor(nullptr, dtype, {5, kHeads, 1, longest});
    args.mask = ConstTensor(nullptr, DType::kBool, {1, 1, positions, longest});
  }
  const Status status = FlashAttention(Recorder(chip, &made.record), args, nullptr);
  CUBIST_CHECK(status.ok(), status.message());
  return made;
}

// The backward pass with all that it does to scores and rows: a bias that heads and queries share, a mask, cap,
// ALiBi, sinks and dropout; or with rotary positions and lengths instead of the first two.
inline NamedRecord RecordAttentionGrad(const ChipSpec& chip, DType dtype, const AttentionCase& c) {
  NamedRecord made;
  made.name = "flash_attention_grad " + std::to_string(c.sq) + "x" + std::to_string(c.skv) + " rope " +
              std::to_string(c.d_rope) + " on " + chip.name;
  const auto in = [&](std::int64_t heads, std::int64_t rows, std::int64_t cols) {
    return ConstTensor(nullptr, dtype, {c.batches, heads, rows, cols});
  };
  const auto out = [&](std::int64_t heads, std::int64_t rows, std::int64_t cols) {
    return Tensor(nullptr, dtype, {c.batches, heads, rows, cols});
  };
  FlashAttentionGradArgs args;
  args.q = in(c.heads, c.sq, c.d), args.k = in(c.kv_heads, c.skv, c.d), args.v = in(c.kv_heads, c.skv, c.d);
  args.out = in(c.heads, c.sq, c.d), args.dout = in(c.heads, c.sq, c.d);
  args.lse = ConstTensor(nullptr, DType::kF32, {c.batches, c.heads, c.sq});
  args.dq = out(c.heads, c.sq, c.d), args.dk = out(c.kv_heads, c.skv, c.d),
  args.dv = out(c.kv_heads, c.skv, c.d);
  args.sinks = ConstTensor(nullptr, DType::kF32, {c.heads}),
  args.dsinks = Tensor(nullptr, DType::kF32, {c.heads});
  args.soft_cap = 3.0f;
  args.causal = c.causal, args.window = c.window;
  const std::int64_t q_ends[] = {c.sq / 3, c.sq / 3, c.sq}, kv_ends[] = {c.skv / 2, c.skv - 1, c.skv};
  if (c.d_rope > 0) {
    args.q_rope = in(c.heads, c.sq, c.d_rope), args.k_rope = in(1, c.skv, c.d_rope);
    args.dq_rope = out(c.heads, c.sq, c.d_rope), args.dk_rope = out(1, c.skv, c.d_rope);
    args.rope.cos = args.rope.sin = ConstTensor(nullptr, DType::kF32, {c.sq + c.skv, c.d_rope / 2});
    args.rope.layout = c.layout;
    args.lengths = {q_ends, kv_ends};
  } else {
    args.bias = in(1, 1, c.skv), args.dbias = out(1, 1, c.skv);
    args.mask = ConstTensor(nullptr, DType::kBool, {1, 1, c.sq, c.skv});
  }
  args.alibi.slopes = ConstTensor(nullptr, DType::kF32, {c.heads});
  args.dropout.keep = 0.75f;
  const Status status = FlashAttentionGrad(Recorder(chip, &made.record), args, nullptr);
  CUBIST_CHECK(status.ok(), status.message());
  return made;
}

// Attention with numbers, forward or backward, under a mask of documents, which hides blocks whole, and from the last rows
// all.
inline NamedRecord RecordHiddenBlocks(const ChipSpec& chip, std::int64_t s, std::int64_t document,
                                      bool grad) {
  constexpr std::int64_t kHeads = 2, kD = 16;
  NamedRecord made;
  made.name = std::string(grad ? "flash_attention_grad" : "flash_attention") + " of documents, " +
              std::to_string(s) + " on " + chip.name;
  std::vector<std::uint8_t> mask;
  for (std::int64_t i = 0; i < s; ++i) {
    for (std::int64_t j = 0; j < s; ++j) mask.push_back(i / document != j / document || i + document > s);
  }
  std::vector<float> rows(static_cast<std::size_t>(kHeads * s * kD), 0.5f), d_rows[3] = {rows, rows, rows};
  const ConstTensor in(rows.data(), {1, kHeads, s, kD}), lse(rows.data(), {1, kHeads, s});
  const ConstTensor hidden(mask.data(), DType::kBool, {1, 1, s, s});
  const auto out = [&](int i) { return Tensor(d_rows[i].data(), {1, kHeads, s, kD}); };
  const Device device = Npu(chip, {.record = &made.record});
  Status status;
  if (grad) {
    FlashAttentionGradArgs args;
    args.q = args.k = args.v = args.out = args.dout = in, args.lse = lse, args.mask = hidden;
    args.dq = out(0), args.dk = out(1), args.dv = out(2);
    status = FlashAttentionGrad(device, args);
  } else {
    status = FlashAttention(device, {.q = in, .k = in, .v = in, .out = out(0), .mask = hidden});
  }
  CUBIST_CHECK(status.ok(), status.message());
  return made;
}

inline NamedRecord RecordPermute(const ChipSpec& chip, std::int64_t tokens, std::int64_t hidden,
                                 std::int64_t top_k, std::int64_t experts, DType id_type) {
  NamedRecord made;
  made.name = "token_permute " + std::to_string(tokens) + "x" + std::to_string(hidden) + " top " +
              std::to_string(top_k) + " of " + std::to_string(experts) + " on " + chip.name;
  std::vector<std::int64_t> wide(static_cast<std::size_t>(tokens * top_k));
  std::mt19937 random(7);
  for (auto& id : wide) id = static_cast<std::int64_t>(random() % static_cast<unsigned>(experts));
  const std::vector<std::int32_t> narrow(wide.begin(), wide.end());
  TokenPermuteArgs args;
  args.tokens = ConstTensor(nullptr, DType::kBF16, {tokens, hidden});
  const void* ids = id_type == DType::kI64 ? static_cast<const void*>(wide.data()) : narrow.data();
  args.topk_ids = ConstTensor(ids, id_type, {tokens, top_k});
  args.permuted = Tensor(nullptr, DType::kBF16, {tokens * top_k, hidden});
  args.sorted_indices = Tensor(nullptr, DType::kI32, {tokens * top_k});
  args.expert_counts = Tensor(nullptr, DType::kI32, {experts});
  args.num_experts = experts;
  const Status status = TokenPermute(Recorder(chip, &made.record), args, nullptr);
  CUBIST_CHECK(status.ok(), status.message());
  return made;
}

inline NamedRecord RecordUnpermute(const ChipSpec& chip, std::int64_t tokens, std::int64_t hidden,
                                   std::int64_t top_k) {
  NamedRecord made;
  made.name = "token_unpermute " + std::to_string(tokens) + "x" + std::to_string(hidden) + " top " +
              std::to_string(top_k) + " on " + chip.name;
  std::vector<std::int32_t> places(static_cast<std::size_t>(tokens * top_k));
  for (std::size_t i = 0; i < places.size(); ++i)
    places[i] = static_cast<std::int32_t>(places.size() - 1 - i);
  TokenUnpermuteArgs args;
  args.permuted = ConstTensor(nullptr, DType::kBF16, {tokens * top_k, hidden});
  args.sorted_indices = ConstTensor(places.data(), DType::kI32, {tokens * top_k});
  args.probs = ConstTensor(nullptr, DType::kF32, {tokens, top_k});
  args.out = Tensor(nullptr, DType::kBF16, {tokens, hidden});
  const Status status = TokenUnpermute(Recorder(chip, &made.record), args, nullptr);
  CUBIST_CHECK(status.ok(), status.message());
  return made;
}

// RmsNorm and its gradient, or SwiGlu and its gradient.
inline std::vector<NamedRecord> RecordRowwise(const ChipSpec& chip, DType dtype, std::int64_t rows,
                                              std::int64_t cols) {
  const ConstTensor x(nullptr, dtype, {rows, cols});
  const Tensor out(nullptr, dtype, {rows, cols});
  const Tensor of_rows(nullptr, DType::kF32, {rows}), of_cols(nullptr, DType::kF32, {cols});
  std::vector<NamedRecord> all(4);
  const std::string shape =
      std::to_string(rows) + "x" + std::to_string(cols) + " " + NameOf(dtype) + " on " + chip.name;
  const char* const names[] = {"rms_norm ", "rms_norm_grad ", "swiglu ", "swiglu_grad "};
  const Status statuses[] = {
      RmsNorm(Recorder(chip, &all[0].record),
              {.x = x, .residual = x, .gamma = of_cols, .out = out, .sum = out, .rstd = of_rows}),
      RmsNormGrad(Recorder(chip, &all[1].record), {.d_out = x,
                                                   .x = x,
                                                   .rstd = of_rows,
                                                   .gamma = of_cols,
                                                   .d_sum = x,
                                                   .d_x = out,
                                                   .d_gamma = of_cols}),
      SwiGlu(Recorder(chip, &all[2].record), {.gate = x, .up = x, .probs = of_rows, .out = out}),
      SwiGluGrad(Recorder(chip, &all[3].record), {.d_out = x,
                                                  .gate = x,
                                                  .up = x,
                                                  .probs = of_rows,
                                                  .d_gate = out,
                                                  .d_up = out,
                                                  .d_probs = of_rows})};
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].name = names[i] + shape;
    CUBIST_CHECK(statuses[i].ok(), statuses[i].message());
  }
  return all;
}

// Moves of one pipe, MTE2 and MTE3 of a Vector core, that meet in UB and in GM; or that stand side by side.
inline NamedRecord RecordOverlappingMoves(bool meet) {
  NamedRecord made;
  made.name = meet ? "moves that meet" : "moves side by side";
  made.record.chip = Ascend910B2();
  trace::Phase& phase = made.record.phases.emplace_back();
  phase.vector_only = true;
  Scratch scratch;
  TraceVectorCore core(made.record.chip, scratch, 0, 1, /*with_data=*/false, &phase.cores.emplace_back());
  const GmTensor in = TensorOf(0, DType::kF32, 8, 512), out = TensorOf(1, DType::kF32, 8, 512);
  Ring<Buffer::kUB, float> x(core, "x", 8, 512, 1), y(core, "y", 4, 512, 1);
  const auto tile = x.Next(8, 512), other = y.Next(4, 512);
  const Range again = meet ? Range{2, 6} : Range{4, 8};
  core.Load(tile.Rows({0, 4}), MatrixOf(in).Rows({0, 4}));
  core.Load(tile.Rows(again), MatrixOf(in).Rows({4, 8}));
  core.Load(other, MatrixOf(in).Rows({0, 4}));
  core.Store(MatrixOf(out).Rows({0, 4}), tile.Rows({0, 4}));
  core.Store(MatrixOf(out).Rows(again), other);
  return made;
}

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_SYNC_SHIPPED_KERNELS_H_
