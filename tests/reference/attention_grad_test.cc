// The reference's gradients against finite differences of the reference's forward pass.
#include "reference/attention_grad.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

using reference::AttentionArgs;
using reference::Mask;

// What is done to scores and rows.
struct Features {
  std::vector<std::int64_t> bias = {};  // Sizes; none where empty.
  bool sinks = false;
  double soft_cap = 0;
  std::int64_t turned = 0;
  bool interleaved = false;
  std::vector<std::int64_t> hidden = {};  // Sizes of a mask; none where empty.
  bool slopes = false, root = false;
  double keep = 1;
  std::optional<std::int64_t> left = {}, right = {};
  Mask anchor = Mask::kBottomRight;
  std::vector<std::int64_t> prefix = {};

  std::int64_t Size(std::size_t d) const { return bias.empty() ? 0 : bias[d]; }
  std::int64_t MaskSize(std::size_t d) const { return hidden.empty() ? 0 : hidden[d]; }
};

struct Problem {
  Problem(const AttentionShape& s, Mask mask, bool shared_rope, const Features& f = {})
      : features(f),
        mask(mask),
        dr(s.dr),
        q(DType::kF32, {s.batch, s.q_heads, s.sq, s.dqk}),
        k(DType::kF32, {s.batch, s.kv_heads, s.skv, s.dqk}),
        v(DType::kF32, {s.batch, s.kv_heads, s.skv, s.dv}),
        q_rope(DType::kF32, {s.batch, s.q_heads, s.sq, s.dr}),
        k_rope(DType::kF32, {s.batch, shared_rope ? 1 : s.kv_heads, s.skv, s.dr}),
        dout(DType::kF32, {s.batch, s.q_heads, s.sq, s.dv}),
        bias(DType::kF32, {f.Size(0), f.Size(1), f.Size(2), f.Size(3)}),
        sinks(DType::kF32, {s.q_heads}),
        hidden(DType::kBool, {f.MaskSize(0), f.MaskSize(1), f.MaskSize(2), f.MaskSize(3)}),
        slopes(DType::kF32, {s.batch, s.q_heads}),
        cos(DType::kF32, {s.sq + s.skv, f.turned / 2}),
        sin(DType::kF32, {s.sq + s.skv, f.turned / 2}) {
    for (std::int64_t p = 0; p < s.sq + s.skv; ++p) {
      for (std::int64_t i = 0; i < f.turned / 2; ++i) {
        const auto angle = static_cast<double>(p + 1) / static_cast<double>(i + 1);
        cos.set({p, i}, std::cos(angle)), sin.set({p, i}, std::sin(angle));
      }
    }
  }

  std::vector<Matrix*> inputs() { return {&q, &k, &v, &q_rope, &k_rope, &dout, &bias, &sinks}; }

  AttentionArgs args() {
    AttentionArgs args{.q = q.view(), .k = k.view(), .v = v.view(), .mask = mask};
    if (dr > 0) args.q_rope = q_rope.view(), args.k_rope = k_rope.view();
    if (!features.bias.empty()) args.bias = bias.view();
    if (features.sinks) args.sinks = sinks.view();
    if (features.turned > 0) args.cos = cos.view(), args.sin = sin.view(), args.k_offset = 1;
    args.soft_cap = features.soft_cap, args.interleaved = features.interleaved;
    if (!features.hidden.empty()) args.hidden = hidden.view();
    if (features.slopes) args.slopes = slopes.view(), args.alibi_root = features.root;
    args.left = features.left, args.right = features.right, args.window_anchor = features.anchor;
    args.prefix = features.prefix;
    // As the sequence from row 2 on of a longer call.
    args.kept = std::lround(features.keep * 65536), args.seed = 7, args.dropout_offset = 9;
    args.dropout_sq = q.size(2) + 4, args.dropout_skv = k.size(2) + 9, args.dropout_row = 2;
    return args;
  }
  double Loss() {
    const AttentionArgs x = args();
    const std::vector<double> out = reference::Attention(x, reference::AllRows(x)).out,
                              weights = dout.ToDoubles();
    double loss = 0;
    for (std::size_t i = 0; i < out.size(); ++i) loss += weights[i] * out[i];
    return loss;
  }

  Features features;
  Mask mask;
  std::int64_t dr;
  Matrix q, k, v, q_rope, k_rope, dout, bias, sinks, hidden, slopes, cos, sin;
};

// Steps of 2^-12 both ways: the differences' own error is of the order of the step's square, and of 2^-53 over the step.
void ExpectSlopes(Problem& problem, Matrix& x, const reference::Gradient& gradient) {
  constexpr double kStep = 0x1p-12;
  ASSERT_EQ(gradient.value.size(), static_cast<std::size_t>(x.count()));
  std::size_t at = 0;
  const Tensor view = x.view();
  ForEachElement(view, [&](const auto&, std::int64_t offset) {
    float& element = static_cast<float*>(view.data)[offset];
    const float before = element;
    element = before + static_cast<float>(kStep);
    const double above = problem.Loss();
    element = before - static_cast<float>(kStep);
    const double below = problem.Loss();
    element = before;
    EXPECT_NEAR((above - below) / (2 * kStep), gradient.value[at], 1e-5) << "element " << at;
    ++at;
  });
}

void ExpectGradients(Problem& problem) {
  Random random;
  for (Matrix* x : problem.inputs()) {
    // Multiples of 2^-8, so that a step in fp32 is exact.
    const Tensor view = x->view();
    ForEachElement(view, [&](const auto&, std::int64_t offset) {
      static_cast<float*>(view.data)[offset] = static_cast<float>(random.Integer(-256, 256)) * 0x1p-8f;
    });
  }
  problem.hidden.FillIntegers(random, 0, 1), problem.slopes.FillUniform(random, 0.1, 0.9);
  const auto result = reference::AttentionGrad(problem.args(), problem.dout.view(), DType::kF32);
  ExpectSlopes(problem, problem.q, result.dq);
  ExpectSlopes(problem, problem.k, result.dk);
  ExpectSlopes(problem, problem.v, result.dv);
  if (problem.dr > 0) {
    ExpectSlopes(problem, problem.q_rope, result.dq_rope);
    ExpectSlopes(problem, problem.k_rope, result.dk_rope);
  }
  if (!problem.features.bias.empty()) ExpectSlopes(problem, problem.bias, result.dbias);
  if (problem.features.sinks) ExpectSlopes(problem, problem.sinks, result.dsinks);
}

TEST(AttentionGradReferenceTest, MatchesFiniteDifferences) {
  for (const AttentionShape& shape :
       {AttentionShape{1, 1, 1, 3, 4, 3, 0, 2}, AttentionShape{2, 2, 1, 3, 2, 2, 1, 3},
        AttentionShape{1, 4, 2, 2, 5, 2, 2, 2}, AttentionShape{1, 2, 2, 5, 2, 1, 0, 1}}) {
    for (Mask mask : {Mask::kNone, Mask::kTopLeft, Mask::kBottomRight}) {
      for (const bool shared_rope : {false, true}) {
        SCOPED_TRACE(
            Join(shape.Name(), " mask ", static_cast<int>(mask), shared_rope ? " one rope head" : ""));
        Problem problem(shape, mask, shared_rope);
        ExpectGradients(problem);
      }
    }
  }
}

TEST(AttentionGradReferenceTest, FeaturesMatchFiniteDifferences) {
  const Features all[] = {{.bias = {2, 4, 3, 5}},
                          {.bias = {1, 4, 1, 5}, .soft_cap = 0.8},
                          {.bias = {2, 1, 3, 1}, .sinks = true},
                          {.sinks = true, .soft_cap = 1.5, .turned = 4},
                          {.turned = 2, .interleaved = true},
                          {.bias = {1, 1, 1, 1}, .sinks = true, .turned = 4, .interleaved = true},
                          {.hidden = {2, 4, 3, 5}},
                          {.bias = {1, 4, 3, 5}, .hidden = {1, 1, 3, 5}, .keep = 0.6},
                          {.sinks = true, .hidden = {2, 1, 1, 5}, .slopes = true},
                          {.soft_cap = 1.2, .slopes = true, .root = true},
                          {.sinks = true, .keep = 0.5},
                          {.turned = 4, .keep = 0.8, .left = 1, .right = 0},
                          {.left = 0, .anchor = Mask::kTopLeft, .prefix = {2, 0}},
                          {.bias = {1, 1, 3, 1}, .slopes = true, .right = -2, .prefix = {0, 4}}};
  for (const Features& features : all) {
    for (Mask mask : {Mask::kNone, Mask::kBottomRight}) {
      for (const std::int64_t dr : {std::int64_t{0}, features.turned}) {
        SCOPED_TRACE(Join("bias ", features.bias.size(), " cap ", features.soft_cap, " turned ",
                          features.turned, " of ", dr, " mask ", static_cast<int>(mask), " hidden ",
                          features.hidden.size(), " slopes ", features.slopes, " keep ", features.keep));
        Problem problem({2, 4, 2, 3, 5, 4, dr, 2}, mask, /*shared_rope=*/false, features);
        ExpectGradients(problem);
      }
    }
  }
}

}  // namespace
}  // namespace cubist::testing
