// Calls of FlashAttentionGrad between guards, and what is expected of them.
#ifndef CUBIST_TESTS_KERNELS_ATTENTION_GRAD_CALL_H_
#define CUBIST_TESTS_KERNELS_ATTENTION_GRAD_CALL_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention_arguments.h"
#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"
#include "reference/attention.h"
#include "reference/attention_grad.h"
#include "tests/kernels/attention_parts.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {

// What a call asks for, besides its sizes.
struct GradOptions {
  DType in = DType::kF32, out = DType::kF32;  // `out` is the dtype of the gradients.
  Causal causal = Causal::kNone;
  bool shared_rope = false;  // One rope head of k serves all.
  std::optional<float> scale = {};
  Layout layout = {};
  DType forward_out = DType::kF32;
  std::optional<AttentionWindow> window = {};
  std::vector<std::int64_t> prefix = {};
  std::vector<std::int64_t> q_ends = {}, kv_ends = {};
  std::int64_t turned = 0;  // Columns; those of the rope parts, or the first of q and k.
  RopeLayout rope_layout = RopeLayout::kHalf;
  std::int64_t q_offset = 0, k_offset = 0;
  std::vector<std::int64_t> bias = {};  // Sizes; none where empty.
  bool sinks = false;
  std::optional<float> soft_cap = {};
  bool wants_bias_gradient = true;
  std::vector<std::int64_t> mask = {};  // Sizes; none where empty.
  bool slopes = false, root = false;
  float keep = 1;
  bool positions = false;  // (B, S) of int64, else from the offsets on.

  std::string Name() const {
    constexpr const char* kNames[] = {"full", "top-left", "bottom-right"};
    std::string name = Join(NameOf(in), " to ", NameOf(out), " ", kNames[static_cast<int>(causal)],
                            shared_rope ? " one rope head" : "", scale ? Join(" scale ", *scale) : "",
                            window ? " window" : "", soft_cap ? Join(" cap ", *soft_cap) : "",
                            sinks ? " sinks" : "", mask.empty() ? "" : " mask", slopes ? " slopes" : "",
                            " keep ", keep, positions ? " positions" : "", " sequences ", q_ends.size());
    if (turned > 0) name += Join(" turned ", turned, " layout ", static_cast<int>(rope_layout));
    for (const std::int64_t size : bias) name += Join(" bias ", size);
    return name;
  }
};

// Tensors of one call, each between guards. `out` and `lse` are the reference's, rounded.
class GradCall {
 public:
  GradCall(const AttentionShape& s, const GradOptions& o)
      : options(o),
        shape(s),
        q(o.in, {s.batch, s.q_heads, s.sq, s.dqk}, o.layout),
        k(o.in, {s.batch, s.kv_heads, s.skv, s.dqk}, o.layout),
        v(o.in, {s.batch, s.kv_heads, s.skv, s.dv}, o.layout),
        q_rope(o.in, {s.batch, s.q_heads, s.sq, s.dr}, o.layout),
        k_rope(o.in, {s.batch, o.shared_rope ? 1 : s.kv_heads, s.skv, s.dr}, o.layout),
        out(o.forward_out, {s.batch, s.q_heads, s.sq, s.dv}, o.layout),
        lse(DType::kF32, {s.batch, s.q_heads, s.sq}, o.layout),
        dout(o.in, {s.batch, s.q_heads, s.sq, s.dv}, o.layout),
        bias(o.in, {Size(0), Size(1), Size(2), Size(3)}, o.layout),
        sinks(DType::kF32, {s.q_heads}),
        mask(DType::kBool, {MaskSize(0), MaskSize(1), MaskSize(2), MaskSize(3)}, o.layout),
        slopes(DType::kF32, {s.q_heads}),
        q_positions(DType::kI64, {s.batch, s.sq}),
        k_positions(DType::kI64, {s.batch, s.skv}),
        cos(DType::kF32, {Positions(), o.turned / 2}, o.layout),
        sin(DType::kF32, {Positions(), o.turned / 2}, o.layout),
        dq(o.out, {s.batch, s.q_heads, s.sq, s.dqk}, o.layout),
        dk(o.out, {s.batch, s.kv_heads, s.skv, s.dqk}, o.layout),
        dv(o.out, {s.batch, s.kv_heads, s.skv, s.dv}, o.layout),
        dq_rope(o.out, {s.batch, s.q_heads, s.sq, s.dr}, o.layout),
        dk_rope(o.out, {s.batch, o.shared_rope ? 1 : s.kv_heads, s.skv, s.dr}, o.layout),
        dbias(o.out, {Size(0), Size(1), Size(2), Size(3)}, o.layout),
        dsinks(DType::kF32, {s.q_heads}) {
    for (std::int64_t p = 0; p < Positions(); ++p) {
      for (std::int64_t i = 0; i < o.turned / 2; ++i) {
        const double angle = static_cast<double>(p) *
                             std::pow(100, -2.0 * static_cast<double>(i) / static_cast<double>(o.turned));
        cos.set({p, i}, std::cos(angle)), sin.set({p, i}, std::sin(angle));
      }
    }
  }

  std::vector<Matrix*> inputs() {
    return {&q, &k, &v, &q_rope, &k_rope, &dout, &bias, &sinks, &mask, &slopes, &q_positions, &k_positions};
  }
  std::vector<Matrix*> outputs() { return {&dq, &dk, &dv, &dq_rope, &dk_rope, &dbias, &dsinks}; }

  void FillNormal(double stddev = 1) {
    Random random;
    FillNormal(random, stddev);
  }
  void FillNormal(Random& random, double stddev = 1) {
    for (Matrix* x : {&q, &k, &q_rope, &k_rope}) x->FillNormal(random, 0, stddev);
    for (Matrix* x : {&v, &dout, &bias, &sinks}) x->FillNormal(random);
    slopes.FillUniform(random);
    FillMask(mask, random, 0.5);
    for (Matrix* x : {&q_positions, &k_positions})
      x->FillIntegers(random, 0, std::max<std::int64_t>(Positions(), 1) - 1);
    Forward();
  }
  void Forward() {
    for (const Sequence& sequence : Sequences()) {
      const auto& [rows, keys, entry] = sequence;
      const reference::AttentionArgs args = ReferenceArgs(sequence);
      const auto result = reference::Attention(args, reference::AllRows(args));
      Assign(RowsOf(out.view(), rows), result.out), Assign(RowsOf(lse.view(), rows), result.lse);
    }
  }
  void CopyInputs(GradCall& from) {
    const auto to = inputs(), of = from.inputs();
    for (std::size_t i = 0; i < to.size(); ++i) Assign(to[i]->view(), of[i]->ToDoubles());
    Assign(out.view(), from.out.ToDoubles()), Assign(lse.view(), from.lse.ToDoubles());
  }

  FlashAttentionGradArgs args() {
    FlashAttentionGradArgs args{.q = q.view(),
                                .k = k.view(),
                                .v = v.view(),
                                .out = out.view(),
                                .lse = lse.view(),
                                .dout = dout.view(),
                                .dq = dq.view(),
                                .dk = dk.view(),
                                .dv = dv.view(),
                                .scale = options.scale,
                                .causal = options.causal,
                                .window = options.window,
                                .prefix = options.prefix,
                                .lengths = {options.q_ends, options.kv_ends},
                                .soft_cap = options.soft_cap};
    if (shape.dr > 0) {
      args.q_rope = q_rope.view(), args.k_rope = k_rope.view();
      args.dq_rope = dq_rope.view(), args.dk_rope = dk_rope.view();
    }
    if (options.turned > 0)
      args.rope = {cos.view(), sin.view(), options.rope_layout, options.q_offset, options.k_offset};
    if (options.turned > 0 && options.positions)
      args.rope.q_positions = q_positions.view(), args.rope.k_positions = k_positions.view();
    if (!options.mask.empty()) args.mask = mask.view();
    if (options.slopes) args.alibi = {slopes.view(), {}, options.root};
    args.dropout = {options.keep, kSeed, kOffset};
    if (!options.bias.empty()) args.bias = bias.view();
    if (!options.bias.empty() && options.wants_bias_gradient) args.dbias = dbias.view();
    if (options.sinks) args.sinks = sinks.view(), args.dsinks = dsinks.view();
    return args;
  }

  // What every sequence gives by itself.
  std::vector<reference::AttentionGradResult> Reference() {
    std::vector<reference::AttentionGradResult> results;
    for (const Sequence& sequence : Sequences()) {
      results.push_back(reference::AttentionGrad(
          ReferenceArgs(sequence), RowsOf(ConstTensor(dout.view()), sequence.rows), options.forward_out));
    }
    return results;
  }
  void ExpectRight() { ExpectRight(Reference()); }
  void ExpectRight(const std::vector<reference::AttentionGradResult>& results) {
    std::vector<double> sink_sum(static_cast<std::size_t>(shape.q_heads)), sink_error(sink_sum);
    const bool wants_bias = args().dbias.given();
    const auto biases = static_cast<std::size_t>(wants_bias ? dbias.view().count() : 0);
    reference::Gradient of_bias{std::vector<double>(biases), std::vector<double>(biases)};
    for (const Sequence& sequence : Sequences()) {
      const auto& [rows, keys, entry] = sequence;
      const reference::AttentionGradResult& result = results[entry];
      Expect(RowsOf(dq.view(), rows), result.dq, "dq"), Expect(RowsOf(dk.view(), keys), result.dk, "dk");
      Expect(RowsOf(dv.view(), keys), result.dv, "dv");
      if (shape.dr > 0) {
        Expect(RowsOf(dq_rope.view(), rows), result.dq_rope, "dq_rope");
        Expect(RowsOf(dk_rope.view(), keys), result.dk_rope, "dk_rope");
      }
      for (std::size_t i = 0; wants_bias && i < result.dbias.value.size();
           ++i) {  // Added up where all share it.
        const std::size_t at = (bias.view().size(0) == 1 ? 0 : entry) * result.dbias.value.size() + i;
        of_bias.value[at] += result.dbias.value[i];
        of_bias.error[at] += result.dbias.error[i] + 0x1p-20 * std::abs(result.dbias.value[i]);
      }
      for (std::size_t i = 0; options.sinks && i < sink_sum.size(); ++i) {
        sink_sum[i] += result.dsinks.value[i];
        sink_error[i] += result.dsinks.error[i] + 0x1p-20 * std::abs(result.dsinks.value[i]);
      }
    }
    if (wants_bias) Expect(dbias.view(), of_bias, "dbias");
    if (options.sinks) ExpectClose(dsinks.view(), sink_sum, sink_error);
    for (const Matrix* x : inputs()) ExpectGuards(*x);
    for (const Matrix* x : outputs()) ExpectGuards(*x);
  }

  // The rows and keys of each sequence, or of the only one.
  struct Sequence {
    Range rows, keys;
    std::size_t index = 0;
  };
  std::vector<Sequence> Sequences() const {
    if (options.q_ends.empty()) return {{{0, shape.sq}, {0, shape.skv}}};
    std::vector<Sequence> sequences;
    Range rows, keys;
    for (std::size_t i = 0; i < options.q_ends.size(); ++i) {
      rows = {rows.end, options.q_ends[i]}, keys = {keys.end, options.kv_ends[i]};
      sequences.push_back({rows, keys, i});
    }
    return sequences;
  }
  reference::AttentionArgs ReferenceArgs(const Sequence& sequence) {
    const auto& [rows, keys, entry] = sequence;
    const FlashAttentionGradArgs x = args();
    reference::AttentionArgs args{
        .q = RowsOf(x.q, rows), .k = RowsOf(x.k, keys), .v = RowsOf(x.v, keys), .scale = x.scale};
    if (shape.dr > 0) args.q_rope = RowsOf(x.q_rope, rows), args.k_rope = RowsOf(x.k_rope, keys);
    args.mask = static_cast<reference::Mask>(x.causal);
    if (x.window) {
      args.left = x.window->left, args.right = x.window->right;
      args.window_anchor = static_cast<reference::Mask>(x.window->anchor);
    }
    const bool packed = !options.q_ends.empty();
    args.prefix = options.prefix;
    if (packed && !options.prefix.empty()) args.prefix = {options.prefix[entry]};
    args.soft_cap = x.soft_cap.value_or(0), args.sinks = x.sinks;
    args.bias = packed ? EntryOf(x.bias, entry) : x.bias;
    if (x.rope.given()) {
      args.cos = x.rope.cos, args.sin = x.rope.sin;
      args.interleaved = x.rope.layout != RopeLayout::kHalf;
      args.q_offset = x.rope.q_offset, args.k_offset = x.rope.k_offset;
    }
    if (x.rope.q_positions.given()) {
      args.q_positions = PartOf(x.rope.q_positions, 1, rows);
      args.k_positions = PartOf(x.rope.k_positions, 1, keys);
    }
    args.hidden = packed ? EntryOf(x.mask, entry) : x.mask;
    args.slopes = x.alibi.slopes, args.alibi_root = x.alibi.root;
    args.kept = std::lround(static_cast<double>(options.keep) * 65536);
    args.seed = kSeed, args.dropout_offset = kOffset;
    args.dropout_sq = shape.sq, args.dropout_skv = shape.skv, args.dropout_row = rows.begin;
    return args;
  }

  GradOptions options;
  AttentionShape shape;

 private:
  static constexpr std::uint64_t kSeed = 0x123456789abcdef, kOffset = 77;
  std::int64_t MaskSize(std::size_t d) const { return options.mask.empty() ? 0 : options.mask[d]; }
  std::int64_t Size(std::size_t d) const { return options.bias.empty() ? 0 : options.bias[d]; }
  std::int64_t Positions() const {
    return options.turned == 0 ? 0 : std::max(shape.sq + options.q_offset, shape.skv + options.k_offset);
  }
  void Expect(const Tensor& actual, const reference::Gradient& gradient, const char* name) const {
    SCOPED_TRACE(name);
    ExpectClose(actual, gradient.value, gradient.Bounds(options.out));
  }

 public:
  Matrix q, k, v, q_rope, k_rope, out, lse, dout, bias, sinks, mask, slopes, q_positions, k_positions, cos,
      sin;
  Matrix dq, dk, dv, dq_rope, dk_rope, dbias, dsinks;
};

// The call whose backward pass `x` is.
inline FlashAttentionArgs ForwardOf(const FlashAttentionGradArgs& x, const Tensor& out, const Tensor& lse) {
  return {.q = x.q,
          .k = x.k,
          .v = x.v,
          .q_rope = x.q_rope,
          .k_rope = x.k_rope,
          .out = out,
          .lse = lse,
          .scale = x.scale,
          .causal = x.causal,
          .window = x.window,
          .prefix = x.prefix,
          .lengths = x.lengths,
          .rope = x.rope,
          .bias = x.bias,
          .sinks = x.sinks,
          .mask = x.mask,
          .alibi = x.alibi,
          .dropout = x.dropout,
          .soft_cap = x.soft_cap};
}

// The call on each of the devices, with one answer of the reference, which takes longer than they do. `args` stand in
// place of the call's own where they come to the same by other means.
inline void ExpectRight(const std::vector<Device>& devices, GradCall& call,
                        const FlashAttentionGradArgs& args) {
  SCOPED_TRACE(call.shape.Name() + " " + call.options.Name());
  const auto results = call.Reference();
  for (const Device& device : devices) {
    SCOPED_TRACE(device.kind() == Device::Kind::kHost ? "host" : "model");
    for (Matrix* x : call.outputs()) x->FillNaN();
    ASSERT_TRUE(IsOk(FlashAttentionGrad(device, args)));
    call.ExpectRight(results);
  }
}
inline void ExpectRight(const std::vector<Device>& devices, GradCall& call) {
  ExpectRight(devices, call, call.args());
}
inline void ExpectRight(const Device& device, GradCall& call) { ExpectRight(std::vector{device}, call); }

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_KERNELS_ATTENTION_GRAD_CALL_H_
