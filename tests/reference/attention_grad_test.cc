// The reference's gradients against finite differences of the reference's forward pass.
#include "reference/attention_grad.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

using reference::AttentionArgs;
using reference::Mask;

struct Problem {
  Problem(const AttentionShape& s, Mask mask, bool shared_rope)
      : mask(mask),
        dr(s.dr),
        q(DType::kF32, {s.batch, s.q_heads, s.sq, s.dqk}),
        k(DType::kF32, {s.batch, s.kv_heads, s.skv, s.dqk}),
        v(DType::kF32, {s.batch, s.kv_heads, s.skv, s.dv}),
        q_rope(DType::kF32, {s.batch, s.q_heads, s.sq, s.dr}),
        k_rope(DType::kF32, {s.batch, shared_rope ? 1 : s.kv_heads, s.skv, s.dr}),
        dout(DType::kF32, {s.batch, s.q_heads, s.sq, s.dv}) {}

  AttentionArgs args() {
    AttentionArgs args{.q = q.view(), .k = k.view(), .v = v.view(), .mask = mask};
    if (dr > 0) args.q_rope = q_rope.view(), args.k_rope = k_rope.view();
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

  Mask mask;
  std::int64_t dr;
  Matrix q, k, v, q_rope, k_rope, dout;
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

TEST(AttentionGradReferenceTest, MatchesFiniteDifferences) {
  for (const AttentionShape& shape :
       {AttentionShape{1, 1, 1, 3, 4, 3, 0, 2}, AttentionShape{2, 2, 1, 3, 2, 2, 1, 3},
        AttentionShape{1, 4, 2, 2, 5, 2, 2, 2}, AttentionShape{1, 2, 2, 5, 2, 1, 0, 1}}) {
    for (Mask mask : {Mask::kNone, Mask::kTopLeft, Mask::kBottomRight}) {
      for (const bool shared_rope : {false, true}) {
        SCOPED_TRACE(
            Join(shape.Name(), " mask ", static_cast<int>(mask), shared_rope ? " one rope head" : ""));
        Problem problem(shape, mask, shared_rope);
        Random random;
        for (Matrix* x :
             {&problem.q, &problem.k, &problem.v, &problem.q_rope, &problem.k_rope, &problem.dout}) {
          // Multiples of 2^-8, so that a step in fp32 is exact.
          const Tensor view = x->view();
          ForEachElement(view, [&](const auto&, std::int64_t offset) {
            static_cast<float*>(view.data)[offset] = static_cast<float>(random.Integer(-256, 256)) * 0x1p-8f;
          });
        }
        const auto result = reference::AttentionGrad(problem.args(), problem.dout.view(), DType::kF32);
        ExpectSlopes(problem, problem.q, result.dq);
        ExpectSlopes(problem, problem.k, result.dk);
        ExpectSlopes(problem, problem.v, result.dv);
        if (shape.dr == 0) continue;
        ExpectSlopes(problem, problem.q_rope, result.dq_rope);
        ExpectSlopes(problem, problem.k_rope, result.dk_rope);
      }
    }
  }
}

}  // namespace
}  // namespace cubist::testing
