// MlaBlock against a plain evaluation in double, and its gradients against finite differences of that evaluation.
#include "kernels/mla_block.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/block_test.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

constexpr std::int64_t kTokens = 14, kHidden = 20, kHeads = 3, kNope = 6, kRope = 4, kV = 5;
constexpr std::int64_t kQRank = 9, kKvRank = 8, kPositions = 20;

struct BlockCase {
  std::string name;
  bool q_rank = true, post_norm = false;
  std::int64_t batch = 1, rope = kRope;
  Causal causal = Causal::kTopLeft;
  RopeLayout layout = RopeLayout::kHalf;
  bool turns = true;
  std::vector<std::int64_t> ends = {};
  std::string Name() const { return name; }
  std::int64_t qk() const { return kNope + rope; }
};

std::vector<BlockCase> Cases() {
  return {{"deepseek"},
          {.name = "pangu_sandwich", .post_norm = true, .batch = 2},
          {.name = "interleaved", .layout = RopeLayout::kInterleaved},
          {.name = "without_q_rank", .q_rank = false, .causal = Causal::kNone},
          {.name = "without_positions", .turns = false},
          {.name = "without_rope", .rope = 0, .turns = false},
          {.name = "packed", .ends = {5, 5, 14}}};
}

struct Block {
  Block(const BlockCase& c, DType dtype)
      : what(c),
        x(dtype, {kTokens, kHidden}),
        norm(DType::kF32, {kHidden}),
        q_down(dtype, {kHidden, kQRank}),
        q_norm(DType::kF32, {kQRank}),
        q_up(dtype, {c.q_rank ? kQRank : kHidden, kHeads * c.qk()}),
        kv_down(dtype, {kHidden, kKvRank + c.rope}),
        kv_norm(DType::kF32, {kKvRank}),
        kv_up(dtype, {kKvRank, kHeads * (kNope + kV)}),
        out_weights(dtype, {kHeads * kV, kHidden}),
        post_norm(DType::kF32, {kHidden}),
        cos(DType::kF32, {kPositions, kRope / 2}),
        sin(DType::kF32, {kPositions, kRope / 2}),
        out(dtype, {kTokens, kHidden}),
        d_out(dtype, {kTokens, kHidden}),
        d_x(dtype, {kTokens, kHidden}) {
    Random random;
    x.FillNormal(random), d_out.FillNormal(random);
    for (Matrix* gamma : {&norm, &q_norm, &kv_norm, &post_norm}) gamma->FillUniform(random, 0.5, 1.5);
    for (Matrix* weights : {&q_down, &q_up, &kv_down, &kv_up, &out_weights})
      weights->FillNormal(random, 0, 0.3);
    for (std::int64_t p = 0; p < kPositions; ++p) {
      for (std::int64_t i = 0; i < kRope / 2; ++i) {
        const double angle = static_cast<double>(p) * std::pow(10.0, -static_cast<double>(i));
        cos.set({p, i}, std::cos(angle)), sin.set({p, i}, std::sin(angle));
      }
    }
  }
  MlaBlockArgs args() {
    MlaBlockArgs a;
    a.x = x.view(), a.out = out.view(), a.heads = kHeads, a.batch = what.batch, a.causal = what.causal;
    a.weights = {.norm = norm.view(),
                 .q_up = q_up.view(),
                 .kv_down = kv_down.view(),
                 .kv_norm = kv_norm.view(),
                 .kv_up = kv_up.view(),
                 .out = out_weights.view()};
    if (what.q_rank) a.weights.q_down = q_down.view(), a.weights.q_norm = q_norm.view();
    if (what.post_norm) a.weights.post_norm = post_norm.view();
    if (what.turns) a.rope = {cos.view(), sin.view(), what.layout, kOffset, kOffset};
    if (!what.ends.empty()) a.lengths = {what.ends, what.ends};
    return a;
  }

  static constexpr std::int64_t kOffset = 3;
  BlockCase what;
  Matrix x, norm, q_down, q_norm, q_up, kv_down, kv_norm, kv_up, out_weights, post_norm, cos, sin, out, d_out,
      d_x;
};

NoisyRow Slice(const NoisyRow& x, std::int64_t begin, std::int64_t size) {
  return {x.begin() + begin, x.begin() + begin + size};
}

NoisyRow Turned(const Block& b, const NoisyRow& x, std::int64_t position, double unit) {
  if (!b.what.turns) return x;
  NoisyRow y(x.size());
  for (std::int64_t i = 0; i < kRope / 2; ++i) {
    const bool half = b.what.layout == RopeLayout::kHalf;
    const auto first = static_cast<std::size_t>(half ? i : 2 * i),
               second = static_cast<std::size_t>(half ? i + kRope / 2 : 2 * i + 1);
    const double c = b.cos.at({position, i}), s = b.sin.at({position, i});
    y[first] = Rounded(c * x[first] + -s * x[second], unit);
    y[second] = Rounded(c * x[second] + s * x[first], unit);
  }
  return y;
}

// One row of a sequence, on its way.
struct Row {
  NoisyRow x, q, kv, k_rope;
};

// Attention's output of row i, all heads side by side. Weights meet the values rounded to `unit`; their sum is in fp32.
NoisyRow Attend(const Block& b, const std::vector<Row>& rows, std::size_t i, double unit) {
  const std::int64_t qk = b.what.qk();
  NoisyRow o;
  for (std::int64_t head = 0; head < kHeads; ++head) {
    const auto of_head = [&](const NoisyRow& parts, const NoisyRow& rope, std::int64_t at, std::size_t row) {
      NoisyRow whole = Slice(parts, at, kNope);
      const NoisyRow turned = Turned(b, rope, Block::kOffset + static_cast<std::int64_t>(row), unit);
      whole.insert(whole.end(), turned.begin(), turned.end());
      return whole;
    };
    const NoisyRow q = of_head(rows[i].q, Slice(rows[i].q, head * qk + kNope, b.what.rope), head * qk, i);
    const std::size_t seen = b.what.causal == Causal::kNone ? rows.size() : i + 1;
    NoisyRow weights;
    double sum = 0;
    for (std::size_t j = 0; j < seen; ++j) {
      const NoisyRow k = of_head(rows[j].kv, rows[j].k_rope, head * (kNope + kV), j);
      Noisy s;
      for (std::size_t d = 0; d < k.size(); ++d)
        s = s + Rounded(q[d] * k[d], static_cast<double>(qk) * kFp32);
      s = 1 / std::sqrt(static_cast<double>(qk)) * s;
      weights.push_back({std::exp(s.value), s.variance});
      sum += weights.back().value;
    }
    for (std::int64_t d = 0; d < kV; ++d) {
      const auto value = [&](std::size_t j) {
        return rows[j].kv[static_cast<std::size_t>(head * (kNope + kV) + kNope + d)];
      };
      Noisy mean;
      for (std::size_t j = 0; j < seen; ++j) mean.value += weights[j].value / sum * value(j).value;
      // Its slope in a score is p (v - mean).
      for (std::size_t j = 0; j < seen; ++j) {
        const double p = weights[j].value / sum;
        mean.variance += std::pow(p * (value(j).value - mean.value), 2) * weights[j].variance +
                         Rounded(p * value(j), std::hypot(unit, 16 * kFp32)).variance;
      }
      o.push_back(Rounded(mean, unit));
    }
  }
  return o;
}

// The block in double, and its roundings to `unit`.
NoisyRow Evaluate(const Block& b, double unit) {
  NoisyRow result;
  std::vector<std::int64_t> ends = b.what.ends;
  if (ends.empty()) {
    for (std::int64_t i = 1; i <= b.what.batch; ++i) ends.push_back(kTokens / b.what.batch * i);
  }
  std::int64_t begin = 0;
  for (const std::int64_t end : ends) {
    std::vector<Row> rows;
    for (std::int64_t t = begin; t < end; ++t) {
      Row row;
      row.x = Exactly(b.x, t);
      const NoisyRow h = Norm(row.x, b.norm, unit), latent = Times(h, b.kv_down, unit);
      row.q = Times(b.what.q_rank ? Norm(Times(h, b.q_down, unit), b.q_norm, unit) : h, b.q_up, unit);
      row.kv = Times(Norm(Slice(latent, 0, kKvRank), b.kv_norm, unit), b.kv_up, unit);
      row.k_rope = Slice(latent, kKvRank, b.what.rope);
      rows.push_back(row);
    }
    for (std::size_t i = 0; i < rows.size(); ++i) {
      NoisyRow y = Times(Attend(b, rows, i, unit), b.out_weights, unit);
      if (b.what.post_norm) y = Norm(y, b.post_norm, unit);
      for (std::size_t h = 0; h < y.size(); ++h) result.push_back(Rounded(rows[i].x[h] + y[h], unit));
    }
    begin = end;
  }
  return result;
}

class MlaBlockTest : public ::testing::TestWithParam<BlockCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, MlaBlockTest, ::testing::ValuesIn(Cases()), ShapeName());

TEST_P(MlaBlockTest, IsItsFormula) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (DType dtype : kFloatTypes) {
      SCOPED_TRACE(NameOf(dtype));
      Block b(GetParam(), dtype);
      BlockState state;
      BlockProfile profile;
      ASSERT_TRUE(IsOk(MlaBlock(device, b.args(), &state, &profile)));
      ExpectWithinNoise(b.out, Evaluate(b, UnitRoundoff(dtype)));
      EXPECT_EQ(profile.kernels.empty(), device.kind() == Device::Kind::kHost);
      EXPECT_EQ(profile.time_s() > 0, device.kind() == Device::Kind::kNpu);
    }
  }
}

TEST_P(MlaBlockTest, GradientsAreFiniteDifferences) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    Block b(GetParam(), DType::kF32);
    BlockState state;
    ASSERT_TRUE(IsOk(MlaBlock(device, b.args(), &state)));
    Block d(GetParam(), DType::kF32);  // The gradients, in the weights' places.
    MlaBlockGradArgs args{.forward = b.args(), .d_out = b.d_out.view(), .d_x = d.x.view()};
    args.gradients = {.norm = d.norm.view(),
                      .q_up = d.q_up.view(),
                      .kv_down = d.kv_down.view(),
                      .kv_norm = d.kv_norm.view(),
                      .kv_up = d.kv_up.view(),
                      .out = d.out_weights.view()};
    std::vector<std::pair<Matrix*, const Matrix*>> pairs = {{&b.x, &d.x},
                                                            {&b.norm, &d.norm},
                                                            {&b.q_up, &d.q_up},
                                                            {&b.kv_down, &d.kv_down},
                                                            {&b.kv_norm, &d.kv_norm},
                                                            {&b.kv_up, &d.kv_up},
                                                            {&b.out_weights, &d.out_weights}};
    if (b.what.q_rank) {
      args.gradients.q_down = d.q_down.view(), args.gradients.q_norm = d.q_norm.view();
      pairs.insert(pairs.end(), {{&b.q_down, &d.q_down}, {&b.q_norm, &d.q_norm}});
    }
    if (b.what.post_norm) {
      args.gradients.post_norm = d.post_norm.view();
      pairs.push_back({&b.post_norm, &d.post_norm});
    }
    ASSERT_TRUE(IsOk(MlaBlockGrad(device, args, &state)));

    const Values weights = b.d_out.ToDoubles();
    ExpectFiniteDifferences(pairs, [&] {
      const NoisyRow out = Evaluate(b, 0);
      double sum = 0;
      for (std::size_t i = 0; i < weights.size(); ++i) sum += weights[i] * out[i].value;
      return sum;
    });
  }
}

// In half precision, against the same call in fp32: some thirty roundings in a row, each of which errs by a third of the
// unit's square in the mean, are 3 units together.
TEST_P(MlaBlockTest, GradientsInHalfPrecisionAreClose) {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    SCOPED_TRACE(NameOf(dtype));
    std::vector<Values> gradients;
    for (DType type : {DType::kF32, dtype}) {
      Block exact(GetParam(), DType::kF32), half(GetParam(), dtype), d(GetParam(), DType::kF32);
      // Both compute from the rounded values.
      for (auto [to, from] : {std::pair(&exact.x, &half.x), std::pair(&exact.d_out, &half.d_out),
                              std::pair(&exact.q_down, &half.q_down), std::pair(&exact.q_up, &half.q_up),
                              std::pair(&exact.kv_down, &half.kv_down), std::pair(&exact.kv_up, &half.kv_up),
                              std::pair(&exact.out_weights, &half.out_weights)})
        Assign(to->view(), from->ToDoubles());
      Block& b = type == DType::kF32 ? exact : half;
      Matrix d_x(type, {kTokens, kHidden});
      BlockState state;
      ASSERT_TRUE(IsOk(MlaBlock(Host(), b.args(), &state)));
      MlaBlockGradArgs args{.forward = b.args(), .d_out = b.d_out.view(), .d_x = d_x.view()};
      args.gradients.kv_down = d.kv_down.view();
      ASSERT_TRUE(IsOk(MlaBlockGrad(Host(), args, &state)));
      gradients.push_back(d_x.ToDoubles());
      const Values kv_down = d.kv_down.ToDoubles();
      gradients.back().insert(gradients.back().end(), kv_down.begin(), kv_down.end());
    }
    ExpectCloseInTheMean(gradients[1], gradients[0], 3 * UnitRoundoff(dtype));
  }
}

TEST_P(MlaBlockTest, HasTheSameBitsForAnyThreadCountAndASecondTime) {
  Block first(GetParam(), DType::kBF16), again(GetParam(), DType::kBF16);
  BlockState state;
  ASSERT_TRUE(IsOk(MlaBlock(Host(), first.args(), &state)));
  for (int threads : kThreadCounts) {
    ASSERT_TRUE(IsOk(MlaBlock(Host({.threads = threads}), again.args(), &state)));
    ExpectSameBits(again.out.view(), first.out.view());
    for (auto [b, device] : {std::pair(&first, Host()), std::pair(&again, Host({.threads = threads}))})
      ASSERT_TRUE(IsOk(MlaBlockGrad(
          device, {.forward = b->args(), .d_out = b->d_out.view(), .d_x = b->d_x.view()}, &state)));
    ExpectSameBits(again.d_x.view(), first.d_x.view());
  }
}

TEST_P(MlaBlockTest, IsPricedWithoutData) {
  Block b(GetParam(), DType::kBF16);
  BlockState state;
  BlockProfile with, without;
  ASSERT_TRUE(IsOk(MlaBlock(NpuWithData(Ascend910B2()), b.args(), &state, &with)));
  MlaBlockArgs args = b.args();
  MlaBlockWeights& w = args.weights;
  for (ConstTensor* t : {&args.x, &w.norm, &w.q_down, &w.q_norm, &w.q_up, &w.kv_down, &w.kv_norm, &w.kv_up,
                         &w.out, &w.post_norm, &args.rope.cos, &args.rope.sin})
    t->data = nullptr;
  args.out.data = nullptr;
  ASSERT_TRUE(IsOk(MlaBlock(NpuWithoutData(Ascend910B2()), args, &state, &without)));
  ASSERT_EQ(without.kernels.size(), with.kernels.size());
  for (std::size_t i = 0; i < with.kernels.size(); ++i) {
    EXPECT_EQ(without.kernels[i].first, with.kernels[i].first);
    EXPECT_NEAR(without.kernels[i].second.time_s, with.kernels[i].second.time_s,
                0.02 * with.kernels[i].second.time_s);
  }
}

TEST(MlaBlockArgumentsTest, OfTheGradientAreNamed) {
  BlockState state;
  const auto says = [&](const std::function<void(MlaBlockGradArgs&)>& spoil, const std::string& what) {
    Block b(Cases()[0], DType::kF32);
    MlaBlockGradArgs args{.forward = b.args(), .d_out = b.d_out.view(), .d_x = b.d_x.view()};
    spoil(args);
    const Status status = MlaBlockGrad(Host(), args, &state);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(what), std::string::npos) << status.message();
    EXPECT_TRUE(std::isnan(b.d_x.at({0, 0})));
  };
  says([](auto& a) { a.d_out = {}; }, "mla_block: d_out is not given");
  says(
      [](auto& a) {
        a.gradients.q_up = Tensor(a.d_x.data, DType::kF32, {3, 4});
      },
      "mla_block: gradients.q_up has size 3");
  says([](auto& a) { a.gradients.post_norm = a.d_x; },
       "mla_block: gradients.post_norm is given, and its weight is not");
  says([](auto& a) { a.gradients.norm = Tensor(a.d_x.data, DType::kF32, {kHidden}); },
       "mla_block: d_x overlaps gradients.norm");
  says([](auto& a) { a.forward.heads = 0; }, "mla_block: heads is 0");
}

TEST(MlaBlockArgumentsTest, AreNamed) {
  BlockState state;
  const auto says = [&](const std::function<void(MlaBlockArgs&)>& spoil, const std::string& what) {
    Block b(Cases()[0], DType::kF32);
    MlaBlockArgs args = b.args();
    spoil(args);
    const Status status = MlaBlock(Host(), args, &state);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(what), std::string::npos) << status.message();
    EXPECT_TRUE(std::isnan(b.out.at({0, 0})));
  };
  says([](auto& a) { a.x = {}; }, "mla_block: x is not given");
  says([](auto& a) { a.heads = 0; }, "mla_block: heads is 0, needs at least 1");
  says([](auto& a) { a.heads = 4; }, "mla_block: q_up has size 30 in dimension 1, needs 4 heads");
  says([](auto& a) { a.batch = 3; }, "mla_block: batch is 3, needs a divisor of T, 14");
  says([](auto& a) { a.weights.q_norm = {}; }, "mla_block: q_norm is not given, and its other half is");
  says([](auto& a) { a.weights.kv_norm.sizes[0] = 13; }, "mla_block: kv_down has size 12 in dimension 1");
  says([](auto& a) { a.weights.kv_up.sizes[1] = 32; }, "mla_block: kv_up has size 32");
  says([](auto& a) { a.weights.kv_up.dtype = DType::kBF16; }, "mla_block: kv_up is bf16");
  says([](auto& a) { a.rope.q_offset = 7; }, "mla_block: rope.q_offset is 7, needs 0 to 6");
  const std::vector<std::int64_t> ends = {5, 11};
  says([&](auto& a) { a.lengths = {ends, ends}; }, "mla_block: the last end of lengths is 11, needs T, 14");
  says([](auto& a) { a.scale = std::nanf(""); }, "mla_block: scale is nan");
  says([](auto& a) { a.eps = -1; }, "mla_block: eps is -1");
  says([](auto& a) { a.out.data = const_cast<void*>(a.x.data); }, "mla_block: out overlaps x");
}

}  // namespace
}  // namespace cubist::testing
