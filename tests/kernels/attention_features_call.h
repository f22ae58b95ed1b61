// A call of FlashAttention with all that it may do to scores, rows and keys, its tensors between guards, and the answer
// that it has to give.
#ifndef CUBIST_TESTS_KERNELS_ATTENTION_FEATURES_CALL_H_
#define CUBIST_TESTS_KERNELS_ATTENTION_FEATURES_CALL_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/attention_arguments.h"
#include "kernels/flash_attention.h"
#include "reference/attention.h"
#include "tests/kernels/attention_parts.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {

// What a call asks for.
struct Features {
  AttentionShape shape;
  DType in = DType::kF32;
  Causal causal = Causal::kNone;
  std::optional<AttentionWindow> window = {};
  std::optional<float> scale = {}, soft_cap = {};
  std::vector<std::int64_t> bias = {};  // Sizes; none where empty.
  bool sinks = false;
  std::int64_t turned = 0;  // Columns; those of the rope parts, or the first of q and k.
  RopeLayout rope_layout = RopeLayout::kHalf;
  std::int64_t q_offset = 0, k_offset = 0;
  std::vector<std::int64_t> q_ends = {}, kv_ends = {};
  Layout layout = {};
  std::vector<std::int64_t> mask = {};  // Sizes; none where empty.
  double masked = 0.3;                  // This share of the mask is true.
  int slopes = 0;                       // 0: no alibi, 1: (Nq), 2: one row for each sequence
  bool root = false;
  std::optional<std::int64_t> alibi_offset = {};
  float keep = 1;
  std::vector<std::int64_t> prefix = {};
  int positions = 0;  // 0: from the offsets on, 1: (S) of int32, 2: (B, S) of int64

  std::string Name() const {
    return Join(shape.Name(), " ", NameOf(in), " causal ", static_cast<int>(causal), window ? " window" : "",
                window && window->left ? Join(" left ", *window->left) : "",
                window && window->right ? Join(" right ", *window->right) : "", " prefixes ", prefix.size(),
                soft_cap ? Join(" cap ", *soft_cap) : "", bias.empty() ? "" : " bias", sinks ? " sinks" : "",
                " turned ", turned, " layout ", static_cast<int>(rope_layout), " sequences ", q_ends.size(),
                mask.empty() ? "" : " mask", " slopes ", slopes, root ? " root" : "", " keep ", keep,
                " positions ", positions);
  }
};

class FeaturesCall {
 public:
  FeaturesCall(const Features& f, Random& random)
      : f_(f),
        q(f.in, {f.shape.batch, f.shape.q_heads, f.shape.sq, f.shape.dqk}, f.layout),
        k(f.in, {f.shape.batch, f.shape.kv_heads, f.shape.skv, f.shape.dqk}, f.layout),
        v(f.in, {f.shape.batch, f.shape.kv_heads, f.shape.skv, f.shape.dv}, f.layout),
        q_rope(f.in, {f.shape.batch, f.shape.q_heads, f.shape.sq, f.shape.dr}, f.layout),
        k_rope(f.in, {f.shape.batch, 1, f.shape.skv, f.shape.dr}, f.layout),
        bias(f.in, {Size(0), Size(1), Size(2), Size(3)}, f.layout),
        sinks(DType::kF32, {f.shape.q_heads}),
        cos(DType::kF32, {Positions(), f.turned / 2}, f.layout),
        sin(DType::kF32, {Positions(), f.turned / 2}, f.layout),
        mask(DType::kBool, {MaskSize(0), MaskSize(1), MaskSize(2), MaskSize(3)}, f.layout),
        slopes(DType::kF32, {Sequences(), f.shape.q_heads}),
        q_positions(f.positions == 1 ? DType::kI32 : DType::kI64, {f.shape.batch, f.shape.sq}),
        k_positions(f.positions == 1 ? DType::kI32 : DType::kI64, {f.shape.batch, f.shape.skv}),
        out(DType::kF32, {f.shape.batch, f.shape.q_heads, f.shape.sq, f.shape.dv}, f.layout),
        lse(DType::kF32, {f.shape.batch, f.shape.q_heads, f.shape.sq}) {
    for (Matrix* x : {&q, &k, &v, &q_rope, &k_rope, &bias, &sinks}) x->FillNormal(random);
    slopes.FillUniform(random, 0.01, 0.4);
    FillMask(mask, random, f.masked);
    FillPositions(random, q_positions), FillPositions(random, k_positions);
    for (std::int64_t p = 0; p < Positions(); ++p) {
      for (std::int64_t i = 0; i < f.turned / 2; ++i) {
        const double angle = static_cast<double>(p) *
                             std::pow(100, -2.0 * static_cast<double>(i) / static_cast<double>(f.turned));
        cos.set({p, i}, std::cos(angle)), sin.set({p, i}, std::sin(angle));
      }
    }
  }

  FlashAttentionArgs args() {
    FlashAttentionArgs args{
        .q = q.view(), .k = k.view(), .v = v.view(), .out = out.view(), .lse = lse.view()};
    if (f_.shape.dr > 0) args.q_rope = q_rope.view(), args.k_rope = k_rope.view();
    args.scale = f_.scale, args.causal = f_.causal, args.window = f_.window, args.soft_cap = f_.soft_cap;
    if (!f_.bias.empty()) args.bias = bias.view();
    if (f_.sinks) args.sinks = sinks.view();
    if (f_.turned > 0) args.rope = {cos.view(), sin.view(), f_.rope_layout, f_.q_offset, f_.k_offset};
    args.lengths = {f_.q_ends, f_.kv_ends}, args.prefix = f_.prefix;
    if (!f_.mask.empty()) args.mask = mask.view();
    if (f_.slopes > 0) args.alibi = {FirstRow(slopes.view(), f_.slopes == 1), f_.alibi_offset, f_.root};
    args.dropout = {f_.keep, kSeed, kOffset};
    if (f_.positions > 0) {
      args.rope.q_positions = FirstRow(q_positions.view(), f_.positions == 1);
      args.rope.k_positions = FirstRow(k_positions.view(), f_.positions == 1);
    }
    return args;
  }

  // Every sequence by itself.
  void ExpectRight() {
    const std::size_t count = std::max<std::size_t>(f_.q_ends.size(), 1);
    Range rows{0, f_.shape.sq}, keys{0, f_.shape.skv};
    for (std::size_t i = 0; i < count; ++i) {
      if (!f_.q_ends.empty()) {
        rows = {i == 0 ? 0 : f_.q_ends[i - 1], f_.q_ends[i]},
        keys = {i == 0 ? 0 : f_.kv_ends[i - 1], f_.kv_ends[i]};
      }
      reference::AttentionArgs args = ReferenceArgs(i, rows, keys);
      const auto result = reference::Attention(args, reference::AllRows(args));
      ExpectClose(RowsOf(out.view(), rows), result.out, reference::OutBounds(args, result, DType::kF32));
      ExpectClose(RowsOf(lse.view(), rows), result.lse, reference::LseBounds(args, result));
    }
    for (const Matrix* x : {&q, &k, &v, &q_rope, &k_rope, &bias, &sinks, &cos, &sin, &mask, &slopes,
                            &q_positions, &k_positions, &out, &lse}) {
      EXPECT_TRUE(x->CheckGuards());
    }
  }

 private:
  std::int64_t Size(std::size_t d) const { return f_.bias.empty() ? 0 : f_.bias[d]; }
  std::int64_t MaskSize(std::size_t d) const { return f_.mask.empty() ? 0 : f_.mask[d]; }
  std::int64_t Sequences() const {
    return f_.q_ends.empty() ? f_.shape.batch : static_cast<std::int64_t>(f_.q_ends.size());
  }
  std::int64_t Positions() const {
    return f_.turned == 0 ? 0 : std::max(f_.shape.sq + f_.q_offset, f_.shape.skv + f_.k_offset);
  }
  // Runs of neighbours, and jumps.
  void FillPositions(Random& random, Matrix& positions) {
    if (Positions() == 0) return;
    for (std::int64_t b = 0; b < positions.view().size(0); ++b) {
      std::int64_t at = 0;
      for (std::int64_t i = 0; i < positions.view().size(1); ++i) {
        at = random.Integer(0, 9) == 0 || at + 1 == Positions() ? random.Integer(0, Positions() - 1) : at + 1;
        positions.set({b, i}, static_cast<double>(at));
      }
    }
  }
  // (s) of (count, s), or all of it.
  static ConstTensor FirstRow(ConstTensor x, bool first) {
    if (!first) return x;
    x.rank = 1, x.sizes = {x.sizes[1]}, x.strides = {x.strides[1]};
    return x;
  }
  reference::AttentionArgs ReferenceArgs(std::size_t sequence, Range rows, Range keys) {
    reference::AttentionArgs args{.q = RowsOf(ConstTensor(q.view()), rows),
                                  .k = RowsOf(ConstTensor(k.view()), keys),
                                  .v = RowsOf(ConstTensor(v.view()), keys)};
    if (f_.shape.dr > 0) {
      args.q_rope = RowsOf(ConstTensor(q_rope.view()), rows),
      args.k_rope = RowsOf(ConstTensor(k_rope.view()), keys);
    }
    args.scale = f_.scale, args.mask = static_cast<reference::Mask>(f_.causal);
    if (f_.window) {
      args.left = f_.window->left, args.right = f_.window->right;
      args.window_anchor = static_cast<reference::Mask>(f_.window->anchor);
    }
    args.soft_cap = f_.soft_cap.value_or(0);
    const bool packed = !f_.q_ends.empty();
    if (!f_.bias.empty()) args.bias = packed ? EntryOf(bias.view(), sequence) : bias.view();
    if (f_.sinks) args.sinks = sinks.view();
    if (f_.turned > 0) {
      args.cos = cos.view(), args.sin = sin.view();
      args.interleaved = f_.rope_layout != RopeLayout::kHalf;
      args.q_offset = f_.q_offset, args.k_offset = f_.k_offset;
    }
    args.prefix = f_.prefix;
    if (packed && !f_.prefix.empty()) args.prefix = {f_.prefix[sequence]};
    if (!f_.mask.empty()) args.hidden = packed ? EntryOf(mask.view(), sequence) : mask.view();
    if (f_.slopes > 0) {
      args.slopes = FirstRow(slopes.view(), f_.slopes == 1);
      if (packed && f_.slopes == 2) args.slopes = EntryOf(args.slopes, sequence);
    }
    args.alibi_offset = f_.alibi_offset, args.alibi_root = f_.root;
    args.kept = std::lround(static_cast<double>(f_.keep) * 65536);
    args.seed = kSeed, args.dropout_offset = kOffset;
    args.dropout_sq = f_.shape.sq, args.dropout_skv = f_.shape.skv, args.dropout_row = rows.begin;
    if (f_.positions > 0) {
      const auto part = [&](const Matrix& positions, Range of) {
        const ConstTensor x = FirstRow(positions.view(), f_.positions == 1);
        return PartOf(x, x.rank - 1, of);
      };
      args.q_positions = part(q_positions, rows), args.k_positions = part(k_positions, keys);
    }
    return args;
  }

  static constexpr std::uint64_t kSeed = 0x123456789abcdef, kOffset = 0xfedcba9876543210;
  Features f_;

 public:
  Matrix q, k, v, q_rope, k_rope, bias, sinks, cos, sin, mask, slopes, q_positions, k_positions, out, lse;
};

inline void ExpectRight(const Device& device, const Features& features) {
  SCOPED_TRACE(features.Name());
  Random random;
  FeaturesCall call(features, random);
  ASSERT_TRUE(IsOk(FlashAttention(device, call.args())));
  call.ExpectRight();
}

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_KERNELS_ATTENTION_FEATURES_CALL_H_
