// The built `cubist` command as a user calls it, in a folder of the test's own.
#ifndef CUBIST_TESTS_TOOLS_COMMAND_H_
#define CUBIST_TESTS_TOOLS_COMMAND_H_

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "tests/support/json.h"

namespace cubist {

using Json = nlohmann::json;

// Small and odd: 3 * 33 tokens, 2 heads, 4 of 16 experts on the device.
inline constexpr const char* kToy = R"({
  "name": "toy", "hidden": 72, "layers": 4, "dense_layers": 1,
  "norm_eps": 1e-5, "sandwich_norm": true,
  "attention": {"heads": 8, "q_rank": 33, "kv_rank": 17, "nope_dim": 16, "rope_dim": 8, "v_dim": 24,
                "rope_theta": 500, "rope_layout": "half"},
  "moe": {"experts": 16, "shared_experts": 1, "top_k": 2, "ffn": 40, "dense_ffn": 96, "score": "sigmoid",
          "router_bias": true, "groups": 4, "top_groups": 2, "routed_scale": 2.5},
  "training": {"tensor_parallel": 2, "expert_shards": 4, "sequence": 100, "micro_batch": 3},
  "run": {"token_scale": 3, "head_scale": 2}
})";

struct Outcome {
  int status = -1;
  std::string out, err;
};

class CommandTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = ::testing::TempDir() + "cubist_command_" + std::to_string(getpid()) + "_" + test->name();
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directory(folder_);
    std::ofstream(Path("toy.json")) << kToy;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& name) const { return folder_ + "/" + name; }
  std::string Read(const std::string& name) const {
    std::ifstream file(Path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // `before` is what the shell runs in front of it, as "cat file | ".
  Outcome Cubist(const std::string& arguments, const std::string& before = "") const {
    const std::string command =
        before + "'" + CUBIST_COMMAND + "' " + arguments + " >'" + Path("out") + "' 2>'" + Path("err") + "'";
    const int status = std::system(command.c_str());
    return {.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1, .out = Read("out"), .err = Read("err")};
  }
  Outcome RunToy(const std::string& arguments) const {
    return Cubist("run --quick --scale 3 --workload '" + Path("toy.json") + "' " + arguments);
  }
  // Bad input: status 2, the message, and no trace of a run.
  void ExpectRefused(const std::string& arguments, const std::string& message) const {
    SCOPED_TRACE(arguments);
    const Outcome outcome =
        RunToy(arguments + " --json '" + Path("rows.json") + "' --output '" + Path("results") + "'");
    EXPECT_EQ(outcome.status, 2);
    EXPECT_NE(outcome.err.find(message), std::string::npos) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    EXPECT_FALSE(std::filesystem::exists(Path("rows.json")));
    EXPECT_FALSE(std::filesystem::exists(Path("results")));
  }

  std::string folder_;
};

}  // namespace cubist

#endif  // CUBIST_TESTS_TOOLS_COMMAND_H_
