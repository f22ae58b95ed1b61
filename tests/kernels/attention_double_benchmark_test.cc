// Attention and its backward pass under the double benchmark, feature by feature: little worse than a naive computation
// in the same dtype, both measured against the reference in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"
#include "reference/attention.h"
#include "reference/attention_grad.h"
#include "tests/kernels/attention_grad_call.h"
#include "tests/kernels/naive_attention.h"
#include "tests/support/double_benchmark.h"

namespace cubist::testing {
namespace {

constexpr Causal kTopLeft = Causal::kTopLeft, kBottomRight = Causal::kBottomRight;

struct BenchmarkCase {
  std::string name;
  AttentionShape shape;
  GradOptions options = {};
  bool values_in_keys = false;  // V is the first columns of K, in the same memory.
};
std::ostream& operator<<(std::ostream& out, const BenchmarkCase& c) { return out << c.name; }

std::vector<BenchmarkCase> BenchmarkCases() {
  return {
      {"d128", {1, 2, 2, 130, 260, 128, 0, 128}},
      {"d128_causal", {1, 2, 2, 129, 200, 128, 0, 128}, {.causal = kBottomRight}},
      {"long_keys", {1, 2, 2, 33, 515, 128, 0, 128}},
      {"short_keys", {2, 1, 1, 129, 67, 40, 0, 72}, {.causal = kTopLeft}},
      {"rows_without_keys", {2, 1, 1, 129, 67, 40, 0, 72}, {.causal = kBottomRight}},
      {"wide_keys", {1, 2, 2, 130, 260, 64, 0, 32}, {.causal = kTopLeft}},
      {"d72", {2, 2, 2, 100, 200, 72, 0, 72}, {.causal = kTopLeft}},
      {"d177", {1, 2, 2, 70, 150, 177, 0, 177}, {.causal = kBottomRight}},
      {"odd_widths", {2, 1, 1, 70, 140, 33, 0, 17}},
      // Multi-head latent attention: rope parts joined, apart, turned inside; then on the latent vectors themselves.
      {"mla_joined", {1, 2, 2, 96, 160, 192, 0, 128}, {.causal = kBottomRight}},
      {"mla_apart", {1, 2, 2, 129, 200, 128, 64, 128}, {.shared_rope = true}},
      {"mla_apart_causal", {1, 2, 2, 129, 129, 128, 64, 128}, {.causal = kBottomRight, .shared_rope = true}},
      {"mla_turned",
       {1, 2, 2, 100, 180, 128, 64, 128},
       {.causal = kBottomRight, .shared_rope = true, .turned = 64, .q_offset = 80}},
      {"mla_turned_interleaved",
       {1, 2, 2, 100, 180, 128, 64, 128},
       {.shared_rope = true, .turned = 64, .rope_layout = RopeLayout::kInterleaved, .positions = true}},
      {"turned_columns", {1, 2, 1, 90, 130, 128, 0, 128}, {.causal = kTopLeft, .turned = 64}},
      {"latent_joined", {1, 3, 1, 64, 130, 576, 0, 512}, {.causal = kBottomRight}, /*values_in_keys=*/true},
      {"latent_turned",
       {1, 3, 1, 64, 130, 512, 64, 512},
       {.causal = kBottomRight, .shared_rope = true, .turned = 64, .q_offset = 66},
       /*values_in_keys=*/true},
      {"grouped_heads", {2, 6, 2, 80, 160, 64, 0, 64}, {.causal = kBottomRight}},
      {"one_key_head", {1, 8, 1, 70, 140, 64, 0, 64}},
      {"window", {1, 2, 2, 150, 220, 64, 0, 64}, {.window = AttentionWindow{.left = 60, .right = 20}}},
      {"causal_window",
       {1, 2, 2, 150, 150, 128, 0, 128},
       {.causal = kBottomRight, .window = AttentionWindow{.left = 40}}},
      {"prefix", {1, 2, 2, 130, 130, 64, 0, 64}, {.causal = kBottomRight, .prefix = {70}}},
      {"packed",
       {1, 4, 2, 230, 300, 128, 0, 128},
       {.causal = kBottomRight, .q_ends = {64, 64, 165, 230}, .kv_ends = {90, 90, 200, 300}}},
      {"packed_mla",
       {1, 2, 2, 200, 200, 128, 64, 128},
       {.causal = kBottomRight,
        .shared_rope = true,
        .q_ends = {70, 200},
        .kv_ends = {70, 200},
        .turned = 64}},
      {"mask", {2, 2, 2, 100, 170, 64, 0, 64}, {.mask = {2, 1, 100, 170}}},
      {"mask_causal", {1, 2, 1, 100, 170, 128, 0, 128}, {.causal = kBottomRight, .mask = {1, 2, 100, 170}}},
      {"bias", {2, 2, 2, 90, 150, 64, 0, 64}, {.bias = {2, 2, 90, 150}}},
      {"shared_bias", {2, 4, 2, 90, 150, 64, 0, 64}, {.causal = kBottomRight, .bias = {1, 4, 1, 150}}},
      {"alibi", {1, 4, 2, 110, 160, 64, 0, 64}, {.causal = kBottomRight, .slopes = true}},
      {"alibi_root", {1, 4, 2, 110, 160, 64, 0, 64}, {.slopes = true, .root = true}},
      {"soft_cap", {1, 2, 2, 100, 170, 64, 0, 64}, {.scale = 0.5f, .soft_cap = 5.0f}},
      {"large_soft_cap", {1, 2, 2, 100, 170, 64, 0, 64}, {.causal = kBottomRight, .soft_cap = 100.0f}},
      {"sinks", {1, 4, 2, 110, 160, 64, 0, 64}, {.causal = kBottomRight, .sinks = true}},
      {"dropout", {1, 2, 2, 110, 160, 64, 0, 64}, {.keep = 0.9f}},
      {"half_dropped", {1, 2, 2, 110, 160, 128, 0, 128}, {.causal = kBottomRight, .keep = 0.5f}},
      {"all_at_once",
       {2, 4, 2, 90, 140, 64, 16, 48},
       {.causal = kBottomRight,
        .shared_rope = true,
        .window = AttentionWindow{.left = 70},
        .turned = 16,
        .q_offset = 50,
        .bias = {1, 1, 90, 140},
        .sinks = true,
        .soft_cap = 20.0f,
        .mask = {1, 1, 90, 140},
        .slopes = true,
        .keep = 0.8f}},
  };
}

class AttentionDoubleBenchmark : public ::testing::TestWithParam<std::tuple<BenchmarkCase, DType>> {
 protected:
  AttentionDoubleBenchmark() {
    Random random(kTypicalData);
    call_.FillNormal(random);
    if (!values_in_keys_) return;
    Assign(call_.v.view(), ToDoubles(FirstColumns(call_.k.view())));
    call_.Forward();  // With these.
  }

  FlashAttentionGradArgs GradArgs() {
    FlashAttentionGradArgs args = call_.args();
    if (values_in_keys_) args.v = FirstColumns(args.k);
    return args;
  }
  // Of a sequence.
  struct Output {
    std::vector<double> golden, bounds, naive;
  };
  struct Gradients {
    GradCall::Sequence sequence;
    reference::AttentionGradResult golden;
    NaiveAttentionGradients naive;
  };
  std::vector<Gradients> GradientsOfSequences();
  void Expect(const std::vector<Gradients>& all);

  ConstTensor FirstColumns(const ConstTensor& x) const { return PartOf(x, 3, {0, call_.shape.dv}); }
  static GradOptions OptionsOf(const BenchmarkCase& c, DType dtype) {
    GradOptions options = c.options;
    options.in = options.out = options.forward_out = dtype;
    return options;
  }

  const bool values_in_keys_ = std::get<0>(GetParam()).values_in_keys;
  GradCall call_{std::get<0>(GetParam()).shape, OptionsOf(std::get<0>(GetParam()), std::get<1>(GetParam()))};
  Matrix forward_out_{std::get<1>(GetParam()),
                      {call_.out.size(0), call_.out.size(1), call_.out.size(2), call_.out.size(3)}};
};

std::vector<Device> Both() { return {Host(), NpuWithData(Ascend910B2())}; }

void Add(std::vector<double>& sums, const std::vector<double>& terms) {
  sums.resize(terms.size());
  for (std::size_t i = 0; i < terms.size(); ++i) sums[i] += terms[i];
}

// The only key that a row sees has all its weight whatever the score, so the row's gradients are 0: of a kernel, which
// takes delta from `out`, the difference of two sums of equals. Neither its share nor its size says anything beside the
// naive computation's 0, so the benchmark passes over it (as where that is not finite); its bound holds it.
void PassOverLoneKeys(const reference::AttentionArgs& args, std::vector<double>& naive) {
  const std::vector<reference::AttentionRow> rows = reference::AllRows(args);
  const std::size_t cols = rows.empty() ? 0 : naive.size() / rows.size();
  for (std::size_t r = 0; r < rows.size() && !args.sinks.given(); ++r) {
    std::int64_t keys = 0;
    for (std::int64_t j = 0; j < args.k.size(2); ++j) keys += reference::Sees(args, rows[r], j) ? 1 : 0;
    if (keys == 1) std::fill_n(naive.begin() + static_cast<std::ptrdiff_t>(r * cols), cols, kNaN);
  }
}

// The benchmark, behind a check of itself: in fp32, where it rounds nothing more than a kernel does, the naive
// computation keeps to the kernel's bounds.
void ExpectBenchmark(const Tensor& actual, const std::vector<double>& golden,
                     const std::vector<double>& bounds, const std::vector<double>& naive) {
  for (std::size_t i = 0; actual.dtype == DType::kF32 && i < naive.size(); ++i)
    ASSERT_FALSE(std::abs(naive[i] - golden[i]) > bounds[i])
        << i << ": " << naive[i] << ", not " << golden[i];
  EXPECT_TRUE(PassesDoubleBenchmark(actual, golden, naive));
  ExpectClose(actual, golden, bounds);
}
void ExpectGradient(const Tensor& actual, const reference::Gradient& golden, const std::vector<double>& naive,
                    const char* name) {
  SCOPED_TRACE(name);
  ExpectBenchmark(actual, golden.value, golden.Bounds(actual.dtype), naive);
}

std::vector<AttentionDoubleBenchmark::Gradients> AttentionDoubleBenchmark::GradientsOfSequences() {
  std::vector<Gradients> all;
  for (const GradCall::Sequence& sequence : call_.Sequences()) {
    const reference::AttentionArgs args = call_.ReferenceArgs(sequence);
    const ConstTensor out = RowsOf(ConstTensor(call_.out.view()), sequence.rows);
    const ConstTensor dout = RowsOf(ConstTensor(call_.dout.view()), sequence.rows);
    NaiveAttentionGradients naive = NaiveAttentionGrad(args, out, dout);
    PassOverLoneKeys(args, naive.dq), PassOverLoneKeys(args, naive.dq_rope);
    all.push_back(
        {sequence, reference::AttentionGrad(args, dout, call_.options.forward_out), std::move(naive)});
  }
  return all;
}

void AttentionDoubleBenchmark::Expect(const std::vector<Gradients>& all) {
  std::vector<double> golden_sinks, naive_sinks;  // Added up over sequences.
  for (const auto& [sequence, golden, naive] : all) {
    const Range rows = sequence.rows, keys = sequence.keys;
    ExpectGradient(RowsOf(call_.dq.view(), rows), golden.dq, naive.dq, "dq");
    ExpectGradient(RowsOf(call_.dk.view(), keys), golden.dk, naive.dk, "dk");
    ExpectGradient(RowsOf(call_.dv.view(), keys), golden.dv, naive.dv, "dv");
    if (call_.shape.dr > 0) {
      ExpectGradient(RowsOf(call_.dq_rope.view(), rows), golden.dq_rope, naive.dq_rope, "dq_rope");
      ExpectGradient(RowsOf(call_.dk_rope.view(), keys), golden.dk_rope, naive.dk_rope, "dk_rope");
    }
    if (!call_.options.bias.empty()) ExpectGradient(call_.dbias.view(), golden.dbias, naive.dbias, "dbias");
    Add(golden_sinks, golden.dsinks.value), Add(naive_sinks, naive.dsinks);
  }
  if (!call_.options.sinks) return;
  // fp32 sums of what `out` rounds.
  const DoubleBenchmarkLimits limits{.dtype = call_.options.in};
  EXPECT_TRUE(PassesDoubleBenchmark(call_.dsinks.view(), golden_sinks, naive_sinks, limits)) << "dsinks";
}

TEST(NaiveAttentionTest, OutputsByHand) {
  const float zero[] = {0, 0}, v[] = {2, 6};
  const ConstTensor q(zero, {1, 1, 2, 1}), values(v, {1, 1, 2, 1});
  EXPECT_EQ(NaiveAttention({.q = q, .k = q, .v = values}), (std::vector<double>{4, 4}));
  EXPECT_EQ(NaiveAttention({.q = q, .k = q, .v = values, .mask = reference::Mask::kTopLeft}),
            (std::vector<double>{2, 4}));
}

TEST_P(AttentionDoubleBenchmark, Forward) {
  std::vector<Output> expected;
  for (const GradCall::Sequence& sequence : call_.Sequences()) {
    const reference::AttentionArgs args = call_.ReferenceArgs(sequence);
    const auto golden = reference::Attention(args, reference::AllRows(args));
    expected.push_back(
        {golden.out, reference::OutBounds(args, golden, forward_out_.dtype()), NaiveAttention(args)});
  }
  for (const Device& device : Both()) {
    forward_out_.FillNaN();
    ASSERT_TRUE(IsOk(FlashAttention(device, ForwardOf(GradArgs(), forward_out_.view(), {}))));
    for (const auto& [rows, keys, i] : call_.Sequences())
      ExpectBenchmark(RowsOf(forward_out_.view(), rows), expected[i].golden, expected[i].bounds,
                      expected[i].naive);
  }
}

TEST_P(AttentionDoubleBenchmark, Backward) {
  const std::vector<Gradients> expected = GradientsOfSequences();
  for (const Device& device : Both()) {
    for (Matrix* x : call_.outputs()) x->FillNaN();
    ASSERT_TRUE(IsOk(FlashAttentionGrad(device, GradArgs())));
    Expect(expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Features, AttentionDoubleBenchmark,
                         ::testing::Combine(::testing::ValuesIn(BenchmarkCases()),
                                            ::testing::ValuesIn(kFloatTypes)),
                         [](const auto& info) {
                           return Join(std::get<0>(info.param).name, "_", NameOf(std::get<1>(info.param)));
                         });

}  // namespace
}  // namespace cubist::testing
