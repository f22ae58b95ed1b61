#include "tools/workload.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "tools/cases.h"

namespace cubist {
namespace {

constexpr const char* kGood = R"({
  "name": "toy", "hidden": 64, "layers": 4, "dense_layers": 1,
  "norm_eps": 1e-5, "sandwich_norm": true,
  "attention": {"heads": 8, "q_rank": 32, "kv_rank": 16, "nope_dim": 16, "rope_dim": 8, "v_dim": 24,
                "rope_theta": 500, "rope_layout": "interleaved"},
  "moe": {"experts": 16, "shared_experts": 1, "top_k": 2, "ffn": 40, "dense_ffn": 96, "score": "softmax",
          "router_bias": true, "groups": 4, "top_groups": 2, "routed_scale": 2.5},
  "training": {"tensor_parallel": 2, "expert_shards": 4, "sequence": 100, "micro_batch": 3},
  "run": {"token_scale": 3, "head_scale": 2}
})";

std::string With(const std::string& from, const std::string& to, std::string text = kGood) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

std::string ErrorOf(const std::string& json) {
  Workload workload;
  workload.name = "untouched";
  const Status status = ParseWorkload(json, "toy.json", &workload);
  EXPECT_FALSE(status.ok()) << json;
  EXPECT_EQ(workload.name, "untouched");
  return status.message();
}

TEST(WorkloadTest, ReadsEveryField) {
  Workload w;
  const Status status = ParseWorkload(kGood, "toy.json", &w);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(w.name, "toy");
  EXPECT_EQ(w.hidden, 64);
  EXPECT_EQ(w.layers, 4);
  EXPECT_EQ(w.dense_layers, 1);
  EXPECT_EQ(w.norm_eps, 1e-5);
  EXPECT_TRUE(w.sandwich_norm);
  EXPECT_EQ(w.attention.heads, 8);
  EXPECT_EQ(w.attention.q_rank, 32);
  EXPECT_EQ(w.attention.kv_rank, 16);
  EXPECT_EQ(w.attention.qk_dim(), 24);
  EXPECT_EQ(w.attention.v_dim, 24);
  EXPECT_EQ(w.attention.rope_theta, 500);
  EXPECT_EQ(w.attention.rope_layout, RopeLayout::kInterleaved);
  EXPECT_EQ(w.moe.experts, 16);
  EXPECT_EQ(w.moe.shared_experts, 1);
  EXPECT_EQ(w.moe.top_k, 2);
  EXPECT_EQ(w.moe.ffn, 40);
  EXPECT_EQ(w.moe.dense_ffn, 96);
  EXPECT_EQ(w.moe.score, ScoreFunction::kSoftmax);
  EXPECT_TRUE(w.moe.router_bias);
  EXPECT_EQ(w.moe.groups, 4);
  EXPECT_EQ(w.moe.top_groups, 2);
  EXPECT_EQ(w.moe.routed_scale, 2.5);
  EXPECT_EQ(w.training.tensor_parallel, 2);
  EXPECT_EQ(w.training.expert_shards, 4);
  EXPECT_EQ(w.training.sequence, 100);
  EXPECT_EQ(w.training.micro_batch, 3);
  EXPECT_EQ(w.run.token_scale, 3);
  EXPECT_EQ(w.run.head_scale, 2);
}

TEST(WorkloadTest, NormsAnglesAndRouterMayBeLeftOut) {
  std::string text = With(R"("norm_eps": 1e-5, "sandwich_norm": true,)", "");
  text = With(R"(,
                "rope_theta": 500, "rope_layout": "interleaved")",
              "", text);
  text = With(R"("score": "softmax",
          "router_bias": true, "groups": 4, "top_groups": 2, )",
              "", text);
  Workload w;
  const Status status = ParseWorkload(text, "toy.json", &w);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(w.norm_eps, 1e-6);
  EXPECT_FALSE(w.sandwich_norm);
  EXPECT_EQ(w.attention.rope_theta, 10000);
  EXPECT_EQ(w.attention.rope_layout, RopeLayout::kHalf);
  EXPECT_EQ(w.moe.score, ScoreFunction::kSigmoid);
  EXPECT_FALSE(w.moe.router_bias);
  EXPECT_EQ(w.moe.groups, 1);
  EXPECT_EQ(w.moe.top_groups, 1);
}

TEST(WorkloadTest, ErrorsNameFieldValueAndLimit) {
  struct {
    std::string json, message;
  } const cases[] = {
      {With(R"("hidden": 64)", R"("hidden": 0)"),
       "toy.json: hidden is 0, expected an integer from 1 to 1048576"},
      {With(R"("hidden": 64)", R"("hidden": -5)"),
       "toy.json: hidden is -5, expected an integer from 1 to 1048576"},
      {With(R"("hidden": 64)", R"("hidden": 64.0)"),
       "toy.json: hidden is 64.0, expected an integer from 1 to 1048576"},
      {With(R"("hidden": 64)", R"("hidden": "64")"),
       "toy.json: hidden is \"64\", expected an integer from 1 to 1048576"},
      {With(R"("hidden": 64)", R"("hidden": 18446744073709551615)"),
       "toy.json: hidden is 18446744073709551615, expected an integer from 1 to 1048576"},
      {With(R"("hidden": 64)", R"("hidden": 1e300)"),
       "toy.json: hidden is 1e+300, expected an integer from 1 to 1048576"},
      {With(R"("hidden": 64,)", ""), "toy.json: hidden is missing"},
      {With(R"("hidden")", R"("hiden": 3, "hidden")"),
       "toy.json: hiden is not a known key; known are attention, dense_layers, hidden, layers, moe, name, "
       "norm_eps, run, sandwich_norm, training; the nearest is hidden"},
      {With(R"("hidden")", R"("layers": 3, "hidden")"), "toy.json: has the key 'layers' twice in one object"},
      {With(R"("name": "toy")", R"("name": "")"), "toy.json: name is \"\", expected a text of 1 to 80 bytes"},
      {With(R"("name": "toy")", R"("name": 3)"), "toy.json: name is 3, expected a text of 1 to 80 bytes"},
      {With(R"("heads": 8)", R"("heads": 70000)"),
       "toy.json: attention.heads is 70000, expected an integer from 1 to 65536"},
      {With(R"("heads": 8)", R"("heads": 7)"),
       "toy.json: attention.heads is 7, expected a multiple of training.tensor_parallel, 2"},
      {With(R"("experts": 16)", R"("experts": 18)"),
       "toy.json: moe.experts is 18, expected a multiple of training.expert_shards, 4"},
      {With(R"("top_k": 2)", R"("top_k": 17)",
            With(R"("groups": 4, "top_groups": 2)", R"("groups": 1, "top_groups": 1)")),
       "toy.json: moe.top_k is 17, expected at most moe.experts, 16"},
      {With(R"("top_k": 2)", R"("top_k": 9)"),
       "toy.json: moe.top_k is 9, expected at most the experts of moe.top_groups groups, 8"},
      {With(R"("groups": 4)", R"("groups": 3)"),
       "toy.json: moe.groups is 3, expected 1 or a divisor of moe.experts, 16, that leaves 2 or more to "
       "each"},
      {With(R"("groups": 4)", R"("groups": 16)"),
       "toy.json: moe.groups is 16, expected 1 or a divisor of moe.experts, 16, that leaves 2 or more to "
       "each"},
      {With(R"("top_groups": 2)", R"("top_groups": 5)"),
       "toy.json: moe.top_groups is 5, expected at most moe.groups, 4"},
      {With(R"("score": "softmax")", R"("score": "relu")"),
       "toy.json: moe.score is \"relu\", expected one of \"softmax\", \"sigmoid\", \"sqrt_softplus\""},
      {With(R"("score": "softmax")", R"("score": 1)"),
       "toy.json: moe.score is 1, expected one of \"softmax\", \"sigmoid\", \"sqrt_softplus\""},
      {With(R"("router_bias": true)", R"("router_bias": 1)"),
       "toy.json: moe.router_bias is 1, expected true or false"},
      {With(R"("norm_eps": 1e-5)", R"("norm_eps": 0)"),
       "toy.json: norm_eps is 0, expected a number above 0 and up to 1"},
      {With(R"("rope_dim": 8)", R"("rope_dim": 7)"),
       "toy.json: attention.rope_dim is 7, expected an even number"},
      {With(R"("dense_layers": 1)", R"("dense_layers": 5)"),
       "toy.json: dense_layers is 5, expected at most layers, 4"},
      {With(R"("routed_scale": 2.5)", R"("routed_scale": 0)"),
       "toy.json: moe.routed_scale is 0, expected a number above 0 and up to 1000000"},
      {With(R"("sequence": 100)", R"("sequence": 100000000)"),
       "toy.json: training.sequence is 100000000, expected an integer from 1 to 16777216"},
      {With(R"("run": {"token_scale": 3, "head_scale": 2})", R"("run": 3)"),
       "toy.json: run is number, expected an object"},
      {With(R"("run": {"token_scale": 3, "head_scale": 2})", R"("run": {"token_scale": 3})"),
       "toy.json: run.head_scale is missing"},
      {"[1, 2]", "toy.json: the file is array, expected an object"},
  };
  for (const auto& c : cases) EXPECT_EQ(ErrorOf(c.json), c.message);
}

TEST(WorkloadTest, TextThatIsNotJsonSaysWhere) {
  for (const std::string& text :
       {std::string(), std::string("{"), std::string(kGood).append("x"), std::string("\xff\xfe")}) {
    EXPECT_EQ(ErrorOf(text).substr(0, 23), "toy.json: is not JSON: ");
  }
  EXPECT_NE(ErrorOf("{\"a\":\n  oops}").find("line 2"), std::string::npos);
  EXPECT_EQ(ErrorOf(std::string(100000, '[')).substr(0, 23), "toy.json: is not JSON: ");
}

TEST(WorkloadTest, NamesAndPathsAreFound) {
  Workload w;
  for (const char* name : {"deepseek_v3", "pangu_ultra_moe"}) {
    const Status status = LoadWorkload(name, WorkloadFolders(), &w);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(w.attention.qk_dim(), 192);
    EXPECT_EQ(w.moe.experts, 256);
    EXPECT_EQ(w.moe.groups, name == std::string("deepseek_v3") ? 8 : 1);
    EXPECT_EQ(w.sandwich_norm, name == std::string("pangu_ultra_moe"));
  }
  const std::string folder = ::testing::TempDir() + "cubist_workload_test";
  std::filesystem::create_directory(folder);
  std::ofstream(folder + "/toy.json") << kGood;
  EXPECT_TRUE(LoadWorkload(folder + "/toy.json", {}, &w).ok());
  EXPECT_TRUE(LoadWorkload("toy", {"/nonexistent", folder}, &w).ok());
  EXPECT_EQ(LoadWorkload("tyo", {folder}, &w).message(),
            "no workload is named 'tyo'; known are toy; the nearest is toy; a path ends in .json");
  EXPECT_EQ(LoadWorkload("/nonexistent/w.json", {folder}, &w).message(), "/nonexistent/w.json: no such file");
  EXPECT_EQ(LoadWorkload("./", {folder}, &w).message(), "./: is not a regular file");
  std::ofstream(folder + "/big.json") << std::string((1 << 20) + 1, ' ');
  EXPECT_EQ(LoadWorkload(folder + "/big.json", {}, &w).message(),
            folder + "/big.json: has 1048577 bytes; the limit is 1048576");
  std::filesystem::remove_all(folder);
}

TEST(ScaleTest, DividesTokensAndHeadsAndNothingElse) {
  Workload w;
  ASSERT_TRUE(ParseWorkload(kGood, "toy.json", &w).ok());
  const ScaledWorkload scaled = Scale(w, 3, 2);
  EXPECT_EQ(scaled.sequence, 33);
  EXPECT_EQ(scaled.batch, 3);
  EXPECT_EQ(scaled.tokens(), 99);
  EXPECT_EQ(scaled.heads, 2);
  EXPECT_EQ(scaled.local_experts(), 4);
  EXPECT_EQ(scaled.expert_rows(), 99);
  EXPECT_EQ(Scale(w, 1000, 1000).tokens(), 3);
  EXPECT_EQ(Scale(w, 1000, 1000).heads, 1);
}

}  // namespace
}  // namespace cubist
