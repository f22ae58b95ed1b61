// MoeBlock against a plain evaluation in double that follows the routes taken, and its gradients against finite differences
// of that evaluation.
#include "kernels/moe_block.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "reference/route.h"
#include "tests/kernels/block_test.h"
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/moe_block_fixture.h"
#include "tests/kernels/route_call.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

// SwiGlu of gate and up side by side, with a weight, rounded.
NoisyRow Activated(const NoisyRow& both, Noisy weight, double unit) {
  NoisyRow act;
  const std::size_t width = both.size() / 2;
  for (std::size_t f = 0; f < width; ++f) {
    const double gate = both[f].value, sigmoid = 1 / (1 + std::exp(-gate));
    const Noisy silu = Mapped(both[f], gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid)));
    act.push_back(Rounded(weight * Rounded(silu * both[f + width], 8 * kFp32), unit));
  }
  return act;
}

// Scores of a token's logits.
NoisyRow ScoresOf(const RouteOptions& o, const NoisyRow& x) {
  NoisyRow n;
  double sum = 0;
  if (o.score == ScoreFunction::kSoftmax) {
    for (const Noisy& v : x) sum += std::exp(v.value);
  }
  for (std::size_t e = 0; e < x.size(); ++e) {
    const double v = x[e].value;
    if (o.score == ScoreFunction::kSigmoid) {
      const double score = 1 / (1 + std::exp(-v));
      n.push_back(Mapped(x[e], score, score * (1 - score)));
      continue;
    }
    const double score = std::exp(v) / sum;
    Noisy of_softmax{score};
    for (std::size_t other = 0; other < x.size(); ++other) {
      const double slope = score * ((other == e ? 1 : 0) - std::exp(x[other].value) / sum);
      of_softmax.variance += slope * slope * x[other].variance;
    }
    n.push_back(of_softmax);
  }
  for (Noisy& v : n) v = Rounded(v, 16 * kFp32);
  return n;
}

// x / (the sum of `all`, of which it is one)
Noisy PartOfSum(Noisy x, const NoisyRow& all) {
  Noisy sum;
  for (const Noisy& v : all) sum = sum + v;
  const double share = x.value / sum.value;
  const double variance =
      std::pow(1 - share, 2) * x.variance + share * share * std::max(sum.variance - x.variance, 0.0);
  return Rounded({share, variance / (sum.value * sum.value)}, 16 * kFp32);
}

// The block in double, of the routes `ids` and with `repairs` of its logits, and its roundings to `unit`. Returns out, and
// the loss last.
NoisyRow Evaluate(const Block& b, const std::vector<std::int32_t>& ids, const Values& repairs, double unit) {
  const RouteOptions& o = b.what.route;
  const std::int64_t tokens = b.what.tokens, top_k = b.what.top_k;
  NoisyRow result, shares(kExperts);
  double counts[kExperts] = {};
  for (std::int64_t t = 0; t < tokens; ++t) {
    const NoisyRow x = Exactly(b.x, t), h = Norm(x, b.norm, unit);
    NoisyRow logits = Times(h, b.router, kFp32);
    for (std::int64_t e = 0; e < kExperts; ++e) {
      const std::int64_t at = t * kExperts + e;
      Noisy& v = logits[static_cast<std::size_t>(e)];
      v.value += repairs[static_cast<std::size_t>(at)];
      if (o.temperature == 0) continue;
      const double u = reference::UniformNumber(o.seed, 0, static_cast<std::uint64_t>(at));
      v = 1 / o.temperature * Rounded(v + Noisy{-std::log(-std::log(u))}, 64 * kFp32);
    }
    const NoisyRow n = ScoresOf(o, logits);
    for (std::size_t e = 0; e < n.size() && b.IsValid(t); ++e) shares[e] = shares[e] + PartOfSum(n[e], n);

    NoisyRow kept;
    const std::int32_t* const chosen = ids.data() + t * top_k;
    for (std::int64_t j = 0; j < top_k; ++j) {
      if (chosen[j] >= 0) kept.push_back(n[static_cast<std::size_t>(chosen[j])]), ++counts[chosen[j]];
    }
    NoisyRow y(kHidden);
    const auto add = [&](const NoisyRow& rows, Noisy weight) {
      for (std::size_t i = 0; i < y.size(); ++i) y[i] = y[i] + weight * rows[i];
    };
    for (std::int64_t j = 0; j < top_k; ++j) {
      const std::int64_t e = chosen[j];
      if (e < 0) continue;
      const Noisy score = n[static_cast<std::size_t>(e)],
                  weight = static_cast<double>(o.scale) * (o.renormalise ? PartOfSum(score, kept) : score);
      const auto gate_up = [&](std::int64_t i, std::int64_t f) { return b.gate_up.at({e, i, f}); };
      const auto down = [&](std::int64_t f, std::int64_t i) { return b.down.at({e, f, i}); };
      const bool early = b.what.weighs_activation;
      const NoisyRow act = Activated(Times(h, 2 * kWidth, gate_up, unit), early ? weight : Noisy{1}, unit);
      add(Times(act, kHidden, down, unit), early ? Noisy{1} : weight);
    }
    const auto round = [&] {
      for (Noisy& v : y) v = Rounded(v, unit);
    };
    round();
    if (b.what.shared) {
      add(Times(Activated(Times(h, b.shared_gate_up, unit), Noisy{1}, unit), b.shared_down, unit), Noisy{1});
      if (b.what.post_norm) round();
    }
    if (b.what.post_norm) y = Norm(y, b.post_norm, unit);
    add(x, Noisy{1}), round();
    result.insert(result.end(), y.begin(), y.end());
  }
  Noisy loss;
  const std::vector<bool> valid = b.Valid();
  const auto count =
      static_cast<double>(std::max<std::int64_t>(std::count(valid.begin(), valid.end(), true), 1));
  for (std::size_t e = 0; e < shares.size(); ++e) {
    loss = loss + o.aux_coefficient * kExperts / (static_cast<double>(top_k) * count * count) * counts[e] *
                      shares[e];
  }
  result.push_back(Rounded(loss, 16 * kFp32));
  return result;
}

class MoeBlockTest : public ::testing::TestWithParam<BlockCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, MoeBlockTest, ::testing::ValuesIn(Cases()), ShapeName());

TEST_P(MoeBlockTest, IsItsFormula) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (DType dtype : kFloatTypes) {
      SCOPED_TRACE(NameOf(dtype));
      Block b(GetParam(), dtype);
      BlockState state;
      BlockProfile profile;
      ASSERT_TRUE(IsOk(MoeBlock(device, b.args(), &state, &profile)));
      const Left left(b, &state);
      // The routes are those of the logits.
      reference::RouterOptions options = PlainOptions(b.what.route);
      options.valid = b.Valid();
      EXPECT_EQ(left.Ids(), reference::Route(left.logits, b.bias.view(), b.what.top_k, options).ids);
      NoisyRow expected = Evaluate(b, left.Ids(), left.Repairs(b.what.route), UnitRoundoff(dtype));
      ExpectWithinNoise(b.aux_loss, {expected.back()});
      expected.pop_back();
      ExpectWithinNoise(b.out, expected);
      EXPECT_EQ(profile.kernels.empty(), device.kind() == Device::Kind::kHost);
      EXPECT_EQ(profile.time_s() > 0, device.kind() == Device::Kind::kNpu);
    }
  }
}

// Of bad logits, what replaces them takes the gradient: it moves with them.
TEST_P(MoeBlockTest, GradientsAreFiniteDifferences) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    Block b(GetParam(), DType::kF32);
    BlockState state;
    ASSERT_TRUE(IsOk(MoeBlock(device, b.args(), &state)));
    const Left left(b, &state);
    const std::vector<std::int32_t> ids = left.Ids();
    const Values repairs = left.Repairs(b.what.route), weights = b.d_out.ToDoubles();
    Block d(GetParam(), DType::kF32);
    ASSERT_TRUE(IsOk(MoeBlockGrad(device, GradArgs(b, d), &state)));

    const auto value = [&] {
      const NoisyRow out = Evaluate(b, ids, repairs, 0);
      double sum = 2 * out.back().value;
      for (std::size_t i = 0; i < weights.size(); ++i) sum += weights[i] * out[i].value;
      return sum;
    };
    std::vector<std::pair<Matrix*, const Matrix*>> pairs;
    const std::vector<Matrix*> moved = Differentiated(b), gradients = Differentiated(d);
    for (std::size_t i = 0; i < moved.size(); ++i) pairs.emplace_back(moved[i], gradients[i]);
    ExpectFiniteDifferences(pairs, value);
  }
}

// In half precision, against the same call in fp32 on the rounded values: some dozen roundings in a row, each of which errs
// by a third of the unit's square in the mean, are 2 units together.
// Where the rounded logits of a token choose other experts than the exact ones, there is nothing to compare.
TEST_P(MoeBlockTest, GradientsInHalfPrecisionAreClose) {
  int compared = 0;
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (DType dtype : {DType::kBF16, DType::kF16}) {
      SCOPED_TRACE(NameOf(dtype));
      Block half(GetParam(), dtype), exact(GetParam(), DType::kF32);
      const std::vector<Matrix*> from = half.Rounded(), to = exact.Rounded();
      for (std::size_t i = 0; i < from.size(); ++i) Assign(to[i]->view(), from[i]->ToDoubles());
      std::vector<std::vector<std::int32_t>> ids;
      std::vector<Values> gradients;
      for (Block* b : {&exact, &half}) {
        BlockState state;
        ASSERT_TRUE(IsOk(MoeBlock(device, b->args(), &state)));
        ids.push_back(Left(*b, &state).Ids());
        Block d(GetParam(), b->x.view().dtype);
        ASSERT_TRUE(IsOk(MoeBlockGrad(device, GradArgs(*b, d), &state)));
        gradients.emplace_back();
        for (const Matrix* gradient : Differentiated(d)) {
          const Values values = gradient->ToDoubles();
          gradients.back().insert(gradients.back().end(), values.begin(), values.end());
        }
      }
      if (ids[0] != ids[1]) continue;
      ExpectCloseInTheMean(gradients[1], gradients[0], 3 * UnitRoundoff(dtype));
      ++compared;
    }
  }
  EXPECT_GT(compared, 0);
}

TEST_P(MoeBlockTest, HasTheSameBitsForAnyThreadCountAndASecondTime) {
  Block first(GetParam(), DType::kBF16), first_d(GetParam(), DType::kBF16);
  BlockState state;
  ASSERT_TRUE(IsOk(MoeBlock(Host(), first.args(), &state)));
  ASSERT_TRUE(IsOk(MoeBlockGrad(Host(), GradArgs(first, first_d), &state)));
  for (int threads : kThreadCounts) {
    SCOPED_TRACE(threads);
    Block again(GetParam(), DType::kBF16), d(GetParam(), DType::kBF16);
    const Device host = Host({.threads = threads});
    ASSERT_TRUE(IsOk(MoeBlock(host, again.args(), &state)));
    ASSERT_TRUE(IsOk(MoeBlockGrad(host, GradArgs(again, d), &state)));
    ExpectSameBits(again.out.view(), first.out.view());
    ExpectSameBits(again.aux_loss.view(), first.aux_loss.view());
    const std::vector<Matrix*> gradients = Differentiated(d), expected = Differentiated(first_d);
    for (std::size_t i = 0; i < gradients.size(); ++i)
      ExpectSameBits(gradients[i]->view(), expected[i]->view());
  }
}

}  // namespace
}  // namespace cubist::testing
