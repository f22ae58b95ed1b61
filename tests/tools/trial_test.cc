#include "tools/trial.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "tools/report.h"

namespace cubist {
namespace {

constexpr const char* kToy = R"({
  "name": "toy", "hidden": 24, "layers": 2, "dense_layers": 1,
  "norm_eps": 1e-6, "sandwich_norm": false,
  "attention": {"heads": 2, "q_rank": 9, "kv_rank": 7, "nope_dim": 8, "rope_dim": 4, "v_dim": 6,
                "rope_theta": 100, "rope_layout": "interleaved"},
  "moe": {"experts": 8, "shared_experts": 1, "top_k": 2, "ffn": 10, "dense_ffn": 20, "score": "sigmoid",
          "router_bias": true, "groups": 4, "top_groups": 2, "routed_scale": 2.5},
  "training": {"tensor_parallel": 1, "expert_shards": 2, "sequence": 19, "micro_batch": 2},
  "run": {"token_scale": 1, "head_scale": 1}
})";

ScaledWorkload Toy() {
  Workload workload;
  const Status status = ParseWorkload(kToy, "toy", &workload);
  EXPECT_TRUE(status.ok()) << status.message();
  return Scale(workload, 1, 1);
}

// Other models' blocks: sandwich norm and halves turned; other scores, no bias, all experts in one group.
std::vector<ScaledWorkload> Toys() {
  std::vector<ScaledWorkload> toys(4, Toy());
  toys[1].workload.sandwich_norm = true, toys[1].workload.attention.rope_layout = RopeLayout::kHalf;
  toys[2].workload.moe.score = ScoreFunction::kSoftmax;
  toys[3].workload.moe.score = ScoreFunction::kSqrtSoftplus;
  for (ScaledWorkload* toy : {&toys[1], &toys[3]}) {
    Workload::Moe& moe = toy->workload.moe;
    moe.router_bias = false, moe.groups = 1, moe.top_groups = 1;
  }
  return toys;
}

constexpr Repetitions kTwice = {.least = 2, .most = 2, .seconds = 0};

// out (3, 4) = x, by a kernel that is given.
Case CopyCase(decltype(Case::run) run) {
  Case c{.name = "copy", .kernel = "Copy", .shape = "3x4"};
  c.inputs = {{.name = "x", .shape = {3, 4}, .fill = TensorSpec::Fill::kNormal}};
  c.outputs = {{.name = "out", .shape = {3, 4}}};
  c.run = std::move(run);
  c.check = [](std::span<const ConstTensor> in, std::span<const Tensor> out, double, std::uint64_t) {
    Comparison comparison;
    for (std::int64_t i = 0; i < 12; ++i) {
      comparison.Add(LoadFloat(out[0].data, DType::kF32, i), LoadFloat(in[0].data, DType::kF32, i), 0,
                     DType::kF32, i / 4, i % 4);
    }
    return comparison;
  };
  return c;
}

Trial RunTrial(const Case& c) {
  CaseTensors tensors(c, Inputs(Toy(), 1));
  Trial trial;
  EXPECT_TRUE(ComputeTrial(c, Host(), kTwice, &tensors, &trial).ok());
  CheckTrial(c, 1e6, 1, &tensors, &trial);
  EXPECT_EQ(trial.seconds.size(), 2u);
  return trial;
}

using Inputs1 = std::span<const ConstTensor>;
using Outputs1 = std::span<const Tensor>;

TEST(TrialTest, ARightKernelHasNoProblems) {
  const Trial trial = RunTrial(CopyCase([](const Device&, Inputs1 in, Outputs1 out, Profile*) {
    std::memcpy(out[0].data, in[0].data, 48);
    return Status();
  }));
  EXPECT_TRUE(trial.problems.empty()) << trial.problems.front();
}

TEST(TrialTest, FindsElementsThatAreNotWritten) {
  const Trial trial = RunTrial(CopyCase([](const Device&, Inputs1 in, Outputs1 out, Profile*) {
    std::memcpy(out[0].data, in[0].data, 40);
    return Status();
  }));
  ASSERT_EQ(trial.problems.size(), 2u);
  EXPECT_EQ(trial.problems[0], "2 of 12 elements of out were not written");
  EXPECT_EQ(trial.problems[1].substr(0, 61), "2 of 12 elements are beyond their bounds; element 2 of row 2 ");
}

TEST(TrialTest, FindsWritesBesideTheOutput) {
  for (int at : {-1, 12}) {
    const Trial trial = RunTrial(CopyCase([at](const Device&, Inputs1 in, Outputs1 out, Profile*) {
      std::memcpy(out[0].data, in[0].data, 48);
      static_cast<float*>(out[0].data)[at] = 1;
      return Status();
    }));
    ASSERT_EQ(trial.problems.size(), 1u);
    EXPECT_EQ(trial.problems[0], "memory beside out was overwritten");
  }
}

TEST(TrialTest, FindsResultsThatChangeFromRunToRun) {
  int runs = 0;
  const Trial trial = RunTrial(CopyCase([&](const Device&, Inputs1 in, Outputs1 out, Profile*) {
    std::memcpy(out[0].data, in[0].data, 48);
    if (++runs == 3) static_cast<float*>(out[0].data)[7] = 0.5f;
    return Status();
  }));
  ASSERT_EQ(trial.problems.size(), 2u);
  EXPECT_EQ(trial.problems[0], "two runs gave different bits");
  EXPECT_EQ(trial.problems[1].substr(0, 42), "1 of 12 elements are beyond their bounds; ");
}

TEST(TrialTest, AnErrorOfTheKernelComesBack) {
  const Case c = CopyCase([](const Device&, Inputs1, Outputs1, Profile*) { return InvalidArgument("no"); });
  CaseTensors tensors(c, Inputs(Toy(), 1));
  Trial trial;
  EXPECT_EQ(ComputeTrial(c, Host(), kTwice, &tensors, &trial).message(), "no");
}

// The checks of the real cases can fail: any output, changed in its first or last element, is noticed.
TEST(TrialTest, EveryCaseNoticesOneWrongElementOfAnyOutput) {
  const ScaledWorkload toy = Toy();
  const std::vector<Case> cases = MakeCases(toy, {Skew::kSkewed, Skew::kUniform});
  ASSERT_EQ(cases.size(), 22u);
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    CaseTensors tensors(c, Inputs(toy, 3));
    Trial trial;
    ASSERT_TRUE(ComputeTrial(c, Host(), kTwice, &tensors, &trial).ok());
    CheckTrial(c, 1e9, 1, &tensors, &trial);
    ASSERT_TRUE(trial.problems.empty()) << trial.problems.front();
    EXPECT_EQ(trial.comparison.rows, trial.comparison.all_rows);
    for (OwnedTensor& output : tensors.outputs) {
      for (std::int64_t i : {std::int64_t{0}, output.count() - 1}) {
        std::byte saved[8];
        std::byte* element = output.data() + i * SizeOf(output.dtype());
        std::memcpy(saved, element, static_cast<std::size_t>(SizeOf(output.dtype())));
        if (IsFloat(output.dtype())) {
          const float value = LoadFloat(output.data(), output.dtype(), i);
          StoreFloat(output.data(), output.dtype(), i, value + 0.25f + std::abs(value));
        } else {
          element[0] ^= std::byte{1};
        }
        Trial wrong;
        CheckTrial(c, 1e9, 1, &tensors, &wrong);
        EXPECT_EQ(wrong.comparison.beyond, 1);
        EXPECT_EQ(wrong.problems.size(), 1u);
        std::memcpy(element, saved, static_cast<std::size_t>(SizeOf(output.dtype())));
      }
    }
  }
}

// And they are of all that a block is given: they fail where any of it counts for nothing in them.
TEST(TrialTest, TheBlocksChecksNeedEveryInput) {
  const std::vector<ScaledWorkload> toys = Toys();
  for (const ScaledWorkload& toy : toys) {
    SCOPED_TRACE("toy " + std::to_string(&toy - toys.data()));
    for (const Case& c : MakeCases(toy, {Skew::kSkewed})) {
      if (c.name.find("_block") == std::string::npos) continue;
      for (std::uint64_t seed = 1; seed <= 20; ++seed) {
        CaseTensors tensors(c, Inputs(toy, seed));
        Trial trial;
        ASSERT_TRUE(ComputeTrial(c, Host(), kTwice, &tensors, &trial).ok());
        CheckTrial(c, 1e9, 1, &tensors, &trial);
        EXPECT_TRUE(trial.problems.empty()) << c.name << " seed " << seed << ": " << trial.problems.front();
        for (std::size_t i = 0; i < c.inputs.size() && seed == 1; ++i) {
          SCOPED_TRACE(c.name + ", " + c.inputs[i].name);
          // It selects, and gradients take the routes as they are.
          if (c.name == "moe_block.grad" && c.inputs[i].name == "moe_block.router_bias") continue;
          OwnedTensor& input = tensors.inputs[i];
          const std::vector<std::byte> saved(input.data(), input.data() + input.bytes());
          std::fill_n(input.data(), input.bytes(), std::byte{0});
          Trial wrong;
          CheckTrial(c, 1e9, 1, &tensors, &wrong);
          EXPECT_FALSE(wrong.problems.empty());
          std::copy(saved.begin(), saved.end(), input.data());
        }
      }
    }
  }
}

TEST(TrialTest, SampledRowsAreSaid) {
  const ScaledWorkload toy = Toy();
  for (const Case& c : MakeCases(toy, {Skew::kSkewed})) {
    SCOPED_TRACE(c.name);
    CaseTensors tensors(c, Inputs(toy, 3));
    Trial trial;
    ASSERT_TRUE(ComputeTrial(c, Host(), kTwice, &tensors, &trial).ok());
    CheckTrial(c, 1, 1, &tensors, &trial);
    EXPECT_TRUE(trial.problems.empty());
    const bool experts = c.name.starts_with("expert");
    const std::int64_t least = experts || c.name == "mla_block" ? 4 : 1;
    EXPECT_EQ(trial.comparison.rows, least) << "one at least, and of each expert; a sequence's first few";
    EXPECT_GT(trial.comparison.all_rows, 4);
  }
}

TEST(ReportTest, AFailedRowSaysSoAndWhy) {
  const Case c{.name = "copy", .kernel = "Copy", .shape = "3x4"};
  RunRow good;
  good.kernel_case = &c, good.trial.seconds = {0.001}, good.floor_s = 0.0005;
  RunRow bad = good;
  bad.trial.problems = {"2 of 12 elements of out were not written"};
  EXPECT_NE(RowText(good).find(" ok\n"), std::string::npos);
  EXPECT_NE(RowText(good).find(" 50 % C "), std::string::npos);
  EXPECT_NE(RowText(bad).find(" FAILED\n  FAILED: 2 of 12 elements of out were not written\n"),
            std::string::npos);
  EXPECT_NE(SummaryText({good, bad}, 3).find("1 of 2 cases passed in 3 s; 1 FAILED\n"), std::string::npos);
}

}  // namespace
}  // namespace cubist
