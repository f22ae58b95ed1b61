// A call of FlashAttention with its tensors between guards, and the answer that it has to give.
#ifndef CUBIST_TESTS_KERNELS_ATTENTION_CALL_H_
#define CUBIST_TESTS_KERNELS_ATTENTION_CALL_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/flash_attention.h"
#include "reference/attention.h"
#include "tests/kernels/attention_parts.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {

inline const char* NameOfMask(Causal causal) {
  constexpr const char* kNames[] = {"full", "top-left", "bottom-right"};
  return kNames[static_cast<int>(causal)];
}

// What a call asks for, besides its sizes.
struct AttentionOptions {
  DType in = DType::kF32, out = DType::kF32;
  Causal causal = Causal::kNone;
  std::optional<AttentionWindow> window = {};
  std::vector<std::int64_t> prefix = {};
  bool lse = true;
  bool shared_rope = false;  // One rope head of k serves all.
  bool one_latent = false;   // v shows the first columns of k.
  std::optional<float> scale = {};
  Layout layout = {};

  std::string Name() const {
    return Join(NameOf(in), " to ", NameOf(out), " ", NameOfMask(causal), lse ? " lse" : "", WindowName(),
                prefix.empty() ? "" : Join(" prefix ", prefix.front()), shared_rope ? " one rope head" : "",
                one_latent ? " one latent" : "", scale ? Join(" scale ", *scale) : "");
  }
  std::string WindowName() const {
    if (!window) return "";
    const auto side = [](const std::optional<std::int64_t>& x) { return x ? Join(*x) : std::string("all"); };
    return Join(" window ", side(window->left), " ", side(window->right), " of ", NameOfMask(window->anchor));
  }
};

// Tensors of one call, each between guards.
struct Call {
  Call(const AttentionShape& s, const AttentionOptions& o)
      : options(o),
        shape(s),
        q(o.in, {s.batch, s.q_heads, s.sq, s.dqk}, o.layout),
        k(o.in, {s.batch, s.kv_heads, s.skv, s.dqk}, o.layout),
        v(o.in, {s.batch, s.kv_heads, s.skv, s.dv}, o.layout),
        q_rope(o.in, {s.batch, s.q_heads, s.sq, s.dr}, o.layout),
        k_rope(o.in, {s.batch, o.shared_rope ? 1 : s.kv_heads, s.skv, s.dr}, o.layout),
        out(o.out, {s.batch, s.q_heads, s.sq, s.dv}, o.layout),
        lse(DType::kF32, {s.batch, s.q_heads, s.sq}, o.layout) {}

  void FillNormal(Random& random, double stddev = 1) {
    for (Matrix* x : {&q, &k, &q_rope, &k_rope}) x->FillNormal(random, 0, stddev);
    v.FillNormal(random);
  }
  void CopyInputs(const Call& from) {
    Assign(q.view(), from.q.ToDoubles()), Assign(k.view(), from.k.ToDoubles());
    Assign(v.view(), from.v.ToDoubles());
    Assign(q_rope.view(), from.q_rope.ToDoubles()), Assign(k_rope.view(), from.k_rope.ToDoubles());
  }

  FlashAttentionArgs args() {
    FlashAttentionArgs args{.q = q.view(), .k = k.view(), .v = v.view(), .out = out.view()};
    if (options.one_latent) args.v = k.view(), args.v.sizes[3] = shape.dv;
    if (shape.dr > 0) args.q_rope = q_rope.view(), args.k_rope = k_rope.view();
    if (options.lse) args.lse = lse.view();
    args.scale = options.scale, args.causal = options.causal;
    args.window = options.window, args.prefix = options.prefix;
    return args;
  }
  reference::AttentionArgs reference_args() {
    const FlashAttentionArgs x = args();
    reference::AttentionArgs args{.q = x.q,
                                  .k = x.k,
                                  .v = x.v,
                                  .q_rope = x.q_rope,
                                  .k_rope = x.k_rope,
                                  .scale = x.scale,
                                  .mask = static_cast<reference::Mask>(x.causal)};
    if (x.window) {
      args.left = x.window->left, args.right = x.window->right;
      args.window_anchor = static_cast<reference::Mask>(x.window->anchor);
    }
    args.prefix = options.prefix;
    return args;
  }
  void ExpectGuards() {
    for (const Matrix* x : {&q, &k, &v, &q_rope, &k_rope, &out, &lse}) testing::ExpectGuards(*x);
  }

  AttentionOptions options;
  AttentionShape shape;
  Matrix q, k, v, q_rope, k_rope, out, lse;
};

// The answer to one set of inputs, for every call that has them.
class Answer {
 public:
  explicit Answer(Call& call)
      : args_(call.reference_args()), result_(reference::Attention(args_, reference::AllRows(args_))) {}

  void Expect(Call& call) const {
    ExpectClose(call.out.view(), result_.out, reference::OutBounds(args_, result_, call.options.out));
    if (call.options.lse) ExpectClose(call.lse.view(), result_.lse, reference::LseBounds(args_, result_));
    call.ExpectGuards();
  }
  const reference::AttentionResult& result() const { return result_; }

 private:
  reference::AttentionArgs args_;
  reference::AttentionResult result_;
};

inline void ExpectRight(const Device& device, Call& call) {
  SCOPED_TRACE(call.shape.Name() + " " + call.options.Name());
  ASSERT_TRUE(IsOk(FlashAttention(device, call.args())));
  Answer(call).Expect(call);
}

// Random inputs in every layout, with either output, with lse and without.
inline void ExpectWithinBounds(const Device& device, const AttentionShape& shape, DType in, Causal causal) {
  Random random;
  const AttentionOptions options{.in = in, .out = in, .causal = causal};
  Call first(shape, options);
  first.FillNormal(random);
  const Answer answer(first);
  const auto expect = [&](Call& call) {
    SCOPED_TRACE(shape.Name() + " " + call.options.Name());
    ASSERT_TRUE(IsOk(FlashAttention(device, call.args())));
    answer.Expect(call);
  };
  expect(first);
  for (AttentionOptions other : {AttentionOptions{.out = DType::kF32, .lse = false, .layout = kBsnd},
                                 AttentionOptions{.out = DType::kF32, .lse = true, .layout = kApart}}) {
    other.in = in, other.causal = causal;
    Call call(shape, other);
    call.CopyInputs(first);
    expect(call);
  }
}

// Shapes that cross tiles, small enough for every target and for the model.
inline std::vector<AttentionShape> FewShapes() {
  return {{1, 1, 1, 1, 1, 1, 0, 1},       {1, 1, 1, 33, 37, 16, 0, 24}, {1, 2, 1, 17, 65, 13, 5, 11},
          {2, 3, 1, 17, 31, 20, 0, 12},   {3, 4, 2, 33, 29, 24, 8, 16}, {1, 2, 2, 129, 140, 64, 0, 33},
          {1, 2, 1, 130, 67, 40, 24, 48}, {1, 1, 1, 1, 1030, 64, 0, 64}};
}

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_KERNELS_ATTENTION_CALL_H_
