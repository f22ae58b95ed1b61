// The built `cubist` command as a user calls it: what it prints, writes and returns.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cubist/version.h"
#include "tools/kernel_call.h"
#include "tools/npy.h"

namespace cubist {
namespace {

using Json = nlohmann::json;

// Small and odd: 3 * 33 tokens, 2 heads, 4 of 16 experts on the device.
constexpr const char* kToy = R"({
  "name": "toy", "hidden": 72, "layers": 4, "dense_layers": 1,
  "attention": {"heads": 8, "q_rank": 33, "kv_rank": 17, "nope_dim": 16, "rope_dim": 8, "v_dim": 24},
  "moe": {"experts": 16, "shared_experts": 1, "top_k": 2, "ffn": 40, "dense_ffn": 96, "routed_scale": 2.5},
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
  Outcome Cubist(const std::string& arguments) const {
    const std::string command = std::string("'") + CUBIST_COMMAND + "' " + arguments + " >'" + Path("out") +
                                "' 2>'" + Path("err") + "'";
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

TEST_F(CommandTest, RunsEveryCaseAndWritesItsRows) {
  const Outcome outcome = RunToy("--json '" + Path("rows.json") + "'");
  ASSERT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  const Json json = Json::parse(Read("rows.json"));
  EXPECT_EQ(json["passed"], true);
  EXPECT_EQ(json["sequence"], 33);
  EXPECT_EQ(json["heads"], 2);
  EXPECT_EQ(json["rows"].size(), 20u);
  for (const Json& row : json["rows"]) {
    SCOPED_TRACE(row["case"]);
    EXPECT_EQ(row["passed"], true);
    EXPECT_TRUE(row["problems"].empty());
    EXPECT_GT(row["host_seconds_median"].get<double>(), 0);
    EXPECT_GE(row["host_seconds_median"].get<double>(), row["host_seconds_best"].get<double>());
    EXPECT_LE(row["error_over_bound"].get<double>(), 1);
    EXPECT_EQ(row["rows_checked"], row["rows"]) << "so small a case is checked as a whole";
    EXPECT_GT(row["modelled"]["seconds"].get<double>(), 0);
    EXPECT_EQ(row["modelled"]["chip"], "ascend910b2");
  }
  EXPECT_NE(outcome.out.find("20 of 20 cases passed"), std::string::npos);
}

TEST_F(CommandTest, TheTableFits150Columns) {
  const Outcome outcome = Cubist("run --quick --only out --only permute.skewed --threads 1");
  ASSERT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  std::istringstream lines(outcome.out);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 150u) << line;
}

// What a run wrote can be read back as input, and gives the same results.
TEST_F(CommandTest, ResultsAreWrittenAndDependOnInputsAlone) {
  ASSERT_EQ(RunToy("--seed 5 --threads 1 --output '" + Path("first") + "'").status, 0);
  ASSERT_EQ(RunToy("--seed 5 --threads 2 --output '" + Path("second") + "'").status, 0);
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(Path("first"))) {
    const std::string name = entry.path().filename().string();
    EXPECT_EQ(Read("first/" + name), Read("second/" + name)) << name;
    ++files;
  }
  EXPECT_EQ(files, 9 + 2 * 2 + 2 * 6 - 1 + 2) << "attention has two outputs, permute three, each block one";
  OwnedTensor out;
  ASSERT_TRUE(ReadNpy(Path("first/attention.out.npy"), &out).ok());
  EXPECT_EQ(out.shape(), (Shape{99, 2, 24}));
  EXPECT_EQ(out.dtype(), DType::kBF16);
}

TEST_F(CommandTest, TakesTensorsOfTheUser) {
  // x (99, 72) = ones, weights (72, 33) = 1/8: every element of q_down's c is 9.
  OwnedTensor x(DType::kF32, {99, 72}), weight(DType::kF32, {72, 33});
  std::fill_n(reinterpret_cast<float*>(x.data()), x.count(), 1.0f);
  std::fill_n(reinterpret_cast<float*>(weight.data()), weight.count(), 0.125f);
  ASSERT_TRUE(WriteNpy(Path("x.npy"), x.view()).ok());
  ASSERT_TRUE(WriteNpy(Path("w.npy"), weight.view()).ok());
  const Outcome outcome = RunToy("--only q_down --input x='" + Path("x.npy") + "' --input q_down.weight='" +
                                 Path("w.npy") + "' --output '" + Path("results") + "'");
  ASSERT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  OwnedTensor c;
  ASSERT_TRUE(ReadNpy(Path("results/q_down.c.npy"), &c).ok());
  ASSERT_EQ(c.shape(), (Shape{99, 33}));
  for (std::int64_t i = 0; i < c.count(); ++i) ASSERT_EQ(LoadFloat(c.data(), c.dtype(), i), 9.0f);
}

TEST_F(CommandTest, TakesRoutingOfTheUser) {
  OwnedTensor ids(DType::kI64, {99, 2});
  for (std::int64_t i = 0; i < ids.count(); ++i)
    reinterpret_cast<std::int64_t*>(ids.data())[i] = i % 2 == 0 ? 3 : 0;
  ASSERT_TRUE(WriteNpy(Path("ids.npy"), ids.view()).ok());
  const Outcome outcome = RunToy("--only permute.uniform --input uniform.topk_ids='" + Path("ids.npy") +
                                 "' --output '" + Path("results") + "'");
  ASSERT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  OwnedTensor counts;
  ASSERT_TRUE(ReadNpy(Path("results/permute.uniform.expert_counts.npy"), &counts).ok());
  for (std::int64_t e = 0; e < 16; ++e) {
    EXPECT_EQ(LoadInt(counts.data(), counts.dtype(), e), e == 0 || e == 3 ? 99 : 0);
  }
}

TEST_F(CommandTest, WritesTimelines) {
  const Outcome outcome = RunToy("--only attention --timeline attention='" + Path("trace.json") + "'");
  ASSERT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  const Json trace = Json::parse(Read("trace.json"));
  EXPECT_GT((trace.is_array() ? trace : trace["traceEvents"]).size(), 10u);
}

TEST_F(CommandTest, RefusesBadInput) {
  OwnedTensor small(DType::kF32, {3, 4}), ids(DType::kI32, {99, 2});
  std::fill_n(reinterpret_cast<std::int32_t*>(ids.data()), ids.count(), 0);
  reinterpret_cast<std::int32_t*>(ids.data())[101] = 16;
  ASSERT_TRUE(WriteNpy(Path("small.npy"), small.view()).ok());
  ASSERT_TRUE(WriteNpy(Path("ids.npy"), ids.view()).ok());
  std::ofstream(Path("bad.npy")) << "not an array";
  std::ofstream(Path("bad.json")) << "{\"name\": 3}";
  const auto input = [&](const std::string& name, const std::string& file) {
    return "--input " + name + "='" + Path(file) + "'";
  };

  ExpectRefused("--chip ascend999", "ascend910b2");
  ExpectRefused("--routing random", "--routing: 'random' is none of skewed, uniform, both; the nearest is");
  ExpectRefused("--only nothing", "--only is 'nothing'; known are q_down, q_up");
  ExpectRefused("--only atention", "; the nearest is attention");
  ExpectRefused("--threads 0", "--threads");
  ExpectRefused("--scale 0", "--scale");
  for (const char* seed : {"-1", "one", "1x", "18446744073709551616"}) {
    ExpectRefused(std::string("--seed ") + seed,
                  std::string("--seed: '") + seed + "' is no whole number from 0 to 2^64 - 1");
  }
  ExpectRefused("--unknown", "--unknown");
  ExpectRefused("--timeline attention", "--timeline is 'attention', expected case=file.json");
  ExpectRefused("--timeline all=x.json", "--timeline: no case is named 'all'");
  ExpectRefused("--timeline attention=/nonexistent/x.json", "there is no folder /nonexistent");
  ExpectRefused("--input x", "--input is 'x', expected name=file.npy");
  ExpectRefused(input("y", "small.npy"), "no tensor is named 'y'; known are x, q_down.weight");
  ExpectRefused(input("x", "none.npy"), "none.npy: no such file");
  ExpectRefused(input("x", "bad.npy"), "bad.npy: is not a .npy file");
  ExpectRefused(input("x", "small.npy"), "small.npy: as x, has shape (3, 4), expected (99, 72)");
  ExpectRefused(input("probs", "ids.npy"), "ids.npy: as probs, has dtype int32, expected fp32, bf16 or fp16");
  ExpectRefused(input("uniform.topk_ids", "ids.npy"), "the id at (50, 1) is 16; expert ids go from 0 to 15");
  const Outcome unknown = Cubist("run --workload nothing");
  EXPECT_EQ(unknown.status, 2);
  EXPECT_NE(unknown.err.find(
                "no workload is named 'nothing'; known are deepseek_v3, pangu_ultra_moe; the nearest is "),
            std::string::npos);
  const Outcome malformed = Cubist("run --workload '" + Path("bad.json") + "'");
  EXPECT_EQ(malformed.status, 2);
  EXPECT_NE(malformed.err.find("bad.json: name is 3, expected a text"), std::string::npos) << malformed.err;
}

TEST_F(CommandTest, RefusesPlacesThatCannotBeWritten) {
  EXPECT_EQ(RunToy("--json /nonexistent/rows.json").status, 2);
  EXPECT_EQ(RunToy("--json '" + folder_ + "'").status, 2);
  EXPECT_EQ(RunToy("--output '" + Path("toy.json") + "'").status, 2);
}

TEST_F(CommandTest, RefusesWorkloadsBeyondTheMachine) {
  std::string huge = kToy;
  huge.replace(huge.find("\"sequence\": 100"), 15, "\"sequence\": 16777216");
  huge.replace(huge.find("\"hidden\": 72"), 12, "\"hidden\": 1048576");
  std::ofstream(Path("huge.json")) << huge;
  const Outcome outcome = Cubist("run --scale 1 --workload '" + Path("huge.json") + "'");
  EXPECT_EQ(outcome.status, 2);
  EXPECT_NE(outcome.err.find("GiB of tensors, this machine has"), std::string::npos) << outcome.err;
}

TEST_F(CommandTest, AblatesAndWritesTheSteps) {
  const Outcome outcome =
      Cubist("ablate matmul --only 1024x1024x1024 --budget 2 --json '" + Path("rows.json") + "'");
  ASSERT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  const Json json = Json::parse(Read("rows.json"));
  ASSERT_EQ(json.size(), 1u);
  EXPECT_EQ(json[0]["case"], "1024x1024x1024");
  const Json& steps = json[0]["steps"];
  ASSERT_GE(steps.size(), 2u);
  EXPECT_EQ(steps.front()["name"], "conventional");
  EXPECT_NEAR(json[0]["gain"].get<double>(),
              steps.front()["time_us"].get<double>() / steps.back()["time_us"].get<double>(), 1e-9);
  for (const Json& step : steps) {
    EXPECT_GT(step["gm_bytes"].get<double>(), 3 * 2 * 1024 * 1024);
    EXPECT_GT(step["cube_busy"].get<double>(), 0);
    EXPECT_NE(outcome.out.find(step["name"].get<std::string>()), std::string::npos);
  }
  const Outcome unknown = Cubist("ablate matmull");
  EXPECT_EQ(unknown.status, 2);
  EXPECT_NE(unknown.err.find("the nearest is matmul"), std::string::npos) << unknown.err;
  EXPECT_EQ(Cubist("ablate matmul --only nothing").status, 2);
  EXPECT_EQ(Cubist("ablate matmul --set clock=3").status, 2);
  EXPECT_EQ(Cubist("ablate matmul --json /nonexistent/x.json").status, 2);
}

TEST_F(CommandTest, TunesAndTakesWhatItWrote) {
  const std::string subject = "matmul --shape 300x520x400 --tuning '" + Path("tiles.txt") + "'";
  const Outcome tuned = Cubist("tune matmul --shape 300x520x400 --budget 20 --output '" + Path("tiles.txt") +
                               "' --json '" + Path("tune.json") + "'");
  ASSERT_EQ(tuned.status, 0) << tuned.err;
  const Json json = Json::parse(Read("tune.json"));
  EXPECT_GE(json["gain"].get<double>(), 1);
  ASSERT_EQ(
      Cubist("sweep " + subject + " --over sync.flag --values 20 --json '" + Path("sweep.json") + "'").status,
      0);
  const Outcome again = Cubist("tune " + subject + " --budget 1");
  EXPECT_EQ(again.status, 0) << again.err;

  std::ofstream(Path("tiles.txt")) << "matmul ascend910b2 m=300\n";
  const Outcome bad = Cubist("tune " + subject);
  EXPECT_EQ(bad.status, 2);
  EXPECT_NE(bad.err.find("tiles.txt:1: has 3 words"), std::string::npos) << bad.err;
  EXPECT_EQ(Cubist("tune matmul --tiling m=17").status, 2);
  EXPECT_EQ(Cubist("tune matmul --tiling size=17").status, 2);
}

TEST_F(CommandTest, SweepsConstantsSizesAndTilings) {
  const auto times = [&](const std::string& arguments) {
    const Outcome outcome =
        Cubist("sweep matmul --shape 512x512x512 --json '" + Path("sweep.json") + "' --csv '" +
               Path("sweep.csv") + "' --svg '" + Path("sweep.svg") + "' " + arguments);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    std::vector<double> us;
    const Json json = Json::parse(Read("sweep.json"));
    for (const Json& point : json["points"]) us.push_back(point["time_us"]);
    EXPECT_NE(Read("sweep.svg").find("polyline"), std::string::npos);
    return us;
  };
  const std::vector<double> hbm =
      times("--over memory.hbm_bytes_per_s --from 1e11 --to 4e12 --log --points 4");
  ASSERT_EQ(hbm.size(), 4u);
  EXPECT_TRUE(std::is_sorted(hbm.rbegin(), hbm.rend())) << "more bandwidth, less time";
  EXPECT_GT(hbm.front(), 1.5 * hbm.back());
  const std::vector<double> rows = times("--over M --values 64,1024,8192");
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_LT(rows[0], rows[2]);
  EXPECT_EQ(times("--over tiling.order --values row-major,diagonal").size(), 2u);
  const std::string csv = Read("sweep.csv");
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 3);

  const Outcome unknown = Cubist("sweep matmul --over cube_core --values 1");
  EXPECT_EQ(unknown.status, 2);
  EXPECT_NE(unknown.err.find("the nearest is cube_cores"), std::string::npos) << unknown.err;
  EXPECT_EQ(Cubist("sweep matmul --over cube_cores").status, 2);
  EXPECT_EQ(Cubist("sweep matmul --over cube_cores --values 0").status, 2);
}

// ---- profile ----

TEST_F(CommandTest, TitlesSayWhatWasChanged) {
  const Outcome outcome = Cubist(
      "profile matmul --shape 256x256x256 --set memory.hbm_bytes_per_s=1e12 --tiling k0=32 "
      "--vs memory.hbm_bytes_per_s=2e12 --json '" +
      Path("profile.json") + "'");
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("memory.hbm_bytes_per_s=1e12, k0=32"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("memory.hbm_bytes_per_s=2e12, k0=32"), std::string::npos) << outcome.out;
  const Json json = Json::parse(Read("profile.json"));
  EXPECT_EQ(json["vs"]["title"],
            "matmul 256x256x256 bf16 on ascend910b2*, memory.hbm_bytes_per_s=2e12, k0=32");
}

TEST_F(CommandTest, ProfilesAddUp) {
  for (const std::string subject :
       {"matmul --shape 520x300x400", "flash_attention --shape 4x256x128x128",
        "token_permute --shape 256x512x4x16", "token_unpermute --shape 256x512x4"}) {
    SCOPED_TRACE(subject);
    const Outcome outcome = Cubist("profile " + subject + " --json '" + Path("profile.json") + "' --csv '" +
                                   Path("profile.csv") + "' --trace '" + Path("trace.json") + "'");
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    const Json json = Json::parse(Read("profile.json"));
    const double time_us = json["time_us"], low_us = json["interval_us"][0], high_us = json["interval_us"][1];
    EXPECT_LT(low_us, 0.97 * time_us) << "no constant is known that well";
    EXPECT_GT(high_us, 1.03 * time_us);
    EXPECT_NE(outcome.out.find("by the spread of the constants"), std::string::npos);
    double path_us = 0, critical_us = 0;
    for (const Json& cause : json["critical_path"]) path_us += cause["us"].get<double>();
    for (const Json& line : json["lines"]) critical_us += line["critical_us"].get<double>();
    EXPECT_NEAR(path_us, time_us, 1e-6 * time_us) << "every microsecond has a cause";
    EXPECT_LT(critical_us, time_us);
    EXPECT_GT(critical_us, 0.2 * time_us);
    std::int64_t instructions = 0;
    for (const Json& line : json["lines"]) instructions += line["count"].get<std::int64_t>();
    EXPECT_EQ(instructions, json["instructions"].get<std::int64_t>()) << "every instruction has a line";
    for (const Json& pipe : json["pipes"]) {
      EXPECT_NEAR(pipe["busy"].get<double>() + pipe["waiting"].get<double>() + pipe["idle"].get<double>(), 1,
                  1e-9);
    }
    ASSERT_FALSE(json["occupancy"].empty());
    for (const Json& buffer : json["occupancy"]) {
      EXPECT_GT(buffer["most"].get<std::int64_t>(), 0);
      EXPECT_LE(buffer["most"].get<std::int64_t>(), buffer["capacity"].get<std::int64_t>());
    }
    EXPECT_LE(json["roofline"]["share"].get<double>(), 1);
    EXPECT_NE(outcome.out.find(json["verdict"].get<std::string>()), std::string::npos);
    EXPECT_NE(Read("profile.csv").find("total,time_us,"), std::string::npos);
    EXPECT_GT(Json::parse(Read("trace.json"))["traceEvents"].size(), json["instructions"].get<std::size_t>());
  }
}

TEST_F(CommandTest, ProfilesAnswerWhatIf) {
  const auto time_us = [&](const std::string& arguments) {
    const Outcome outcome =
        Cubist("profile matmul --shape 512x512x512 --json '" + Path("profile.json") + "' " + arguments);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    const Json json = Json::parse(Read("profile.json"));
    return json["time_us"].get<double>();
  };
  const double base = time_us("");
  EXPECT_GT(time_us("--set memory.hbm_bytes_per_s=1e11"), 1.5 * base);
  std::ofstream(Path("chip.json"))
      << R"({"name": "slow", "base": "ascend910b2", "set": {"memory.hbm_bytes_per_s": 1e11}})";
  EXPECT_GT(time_us("--chip '" + Path("chip.json") + "'"), 1.5 * base);
  EXPECT_GE(time_us("--policy per-tile"), base);
  EXPECT_NE(time_us("--tiling m=16,n=16,k1=32,k0=16"), base);
  time_us("--slack");
  const Json slack = Json::parse(Read("profile.json"))["slack"];
  EXPECT_FALSE(slack["rows"].empty());
  for (const char* bad : {"--set memory.hbm=1", "--policy none", "--vs shape", "--vs shape=1x2",
                          "--html /nonexistent/x", "--tiling m=1000000", "--shape 1x1"}) {
    const Outcome outcome = Cubist(std::string("profile matmul ") + bad);
    EXPECT_EQ(outcome.status, 2) << bad;
    EXPECT_NE(outcome.err, "") << bad;
    EXPECT_EQ(outcome.out, "") << bad;
  }
}

TEST_F(CommandTest, ProfilesShowAWindowOfTheTime) {
  const auto spans = [&](const std::string& window) {
    const Outcome outcome =
        Cubist("profile matmul --shape 512x512x512 --trace '" + Path("trace.json") + "' " + window);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    std::vector<std::pair<double, double>> all;  // from, to
    const Json trace = Json::parse(Read("trace.json"));
    for (const Json& event : trace["traceEvents"]) {
      if (event["ph"] != "X") continue;
      const double from = event["ts"];
      all.emplace_back(from, from + event["dur"].get<double>());
    }
    return all;
  };
  const auto all = spans("");
  ASSERT_GT(all.size(), 100u);
  const double end =
      std::max_element(all.begin(), all.end(), [](auto& x, auto& y) { return x.second < y.second; })->second;
  const double from = 0.4 * end, to = 0.5 * end;
  const auto part = spans("--window " + std::to_string(from) + ":" + std::to_string(to));
  const auto inside = std::count_if(all.begin(), all.end(), [&](const auto& span) {
    return span.second > from + 1e-3 && span.first < to - 1e-3;
  });
  EXPECT_GT(inside, 0);
  EXPECT_NEAR(static_cast<double>(part.size()), static_cast<double>(inside), 2)
      << "those at the window's edges";
  for (const auto& [begins, ends] : part) {
    EXPECT_GT(ends, from - 1e-3);
    EXPECT_LT(begins, to + 1e-3);
  }
  for (const char* bad : {"5", "5:", "5:4", "-1:4", "a:b", "1:2x"}) {
    const Outcome outcome = Cubist(std::string("profile matmul --shape 64x64x64 --window=") + bad);
    EXPECT_EQ(outcome.status, 2) << bad;
    EXPECT_NE(outcome.err.find("--window"), std::string::npos) << outcome.err;
  }
}

// The page draws from the figures of the JSON, and a browser can.
TEST_F(CommandTest, ProfilePagesShowTheFigures) {
  const Outcome outcome = Cubist("profile matmul --shape 512x512x512 --vs policy=per-tile --json '" +
                                 Path("profile.json") + "' --html '" + Path("page.html") + "'");
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const std::string page = Read("page.html"), mark = "id=\"data\">";
  const std::size_t begin = page.find(mark) + mark.size();
  const Json data = Json::parse(page.substr(begin, page.find("</script>", begin) - begin));
  Json json = Json::parse(Read("profile.json"));
  EXPECT_EQ(data["b"], json["vs"]);
  json.erase("vs");
  EXPECT_EQ(data["a"], json);
  EXPECT_EQ(data["timelines"].size(), 2u);
  EXPECT_GT(data["timelines"][0]["slices"].size(), 10u);
  EXPECT_EQ(page.find("http://"), std::string::npos) << "the page is self-contained";
  EXPECT_EQ(page.find("https://"), std::string::npos);

  if (std::system("command -v chromium >/dev/null 2>&1") != 0)
    GTEST_SKIP() << "no chromium: the page was not drawn in a browser";
  const std::string draw = "HOME='" + folder_ +
                           "' timeout 60 chromium --headless --no-sandbox --disable-gpu --dump-dom 'file://" +
                           Path("page.html") + "' >'" + Path("dom") + "' 2>/dev/null";
  ASSERT_EQ(std::system(draw.c_str()), 0);
  const std::string dom = Read("dom");
  EXPECT_NE(dom.find("data-ready=\"yes\""), std::string::npos) << "the script ran to its end";
  char time[32];
  std::snprintf(time, sizeof time, "%.2f us", json["time_us"].get<double>());
  EXPECT_NE(dom.find(time), std::string::npos) << time;
  std::snprintf(time, sizeof time, "%.2f us", json["interval_us"][1].get<double>());
  EXPECT_NE(dom.find(time), std::string::npos) << time;
  EXPECT_NE(dom.find("<canvas"), std::string::npos);
  // Each call's own traffic and source lines, with its letter.
  const auto count = [&](const std::string& text) {
    int found = 0;
    for (std::size_t at = dom.find(text); at != std::string::npos; at = dom.find(text, at + 1)) ++found;
    return found;
  };
  EXPECT_EQ(count("<th>path</th>"), 2);
  EXPECT_EQ(count("<th>source line</th>"), 2);
  EXPECT_EQ(count("<p class=\"hint\">A</p>"), count("<p class=\"hint\">B</p>"));
  EXPECT_GE(count("<p class=\"hint\">B</p>"), 5);
}

TEST_F(CommandTest, ListsHelpsAndInforms) {
  const Outcome list = RunToy("--list");
  EXPECT_EQ(list.status, 0);
  EXPECT_NE(list.out.find("attention.fp16"), std::string::npos);
  EXPECT_NE(list.out.find("(99, 72)"), std::string::npos);
  EXPECT_EQ(Cubist("--help").status, 0);
  EXPECT_EQ(Cubist("run --help").status, 0);
  EXPECT_EQ(Cubist("").status, 2);
  EXPECT_EQ(Cubist("fly").status, 2);
  const Outcome info = Cubist("info");
  EXPECT_EQ(info.status, 0);
  for (const char* chip : {"ascend910b1", "ascend910b2", "ascend910b3", "ascend910b4"}) {
    EXPECT_NE(info.out.find(chip), std::string::npos) << chip;
  }
}

TEST_F(CommandTest, InfoMeasuresTheMachine) {
  const Outcome info = Cubist("info --threads 1 --json '" + Path("machine.json") + "'");
  ASSERT_EQ(info.status, 0) << info.err;
  const Json json = Json::parse(Read("machine.json"));
  EXPECT_EQ(json["threads"], 1);
  EXPECT_GT(json["peaks"]["fp32_flops"].get<double>(), 1e8);
  EXPECT_GT(json["peaks"]["copy_bytes_per_s"].get<double>(), 1e8);
  EXPECT_EQ(json["chips"].size(), 4u);
  EXPECT_EQ(json["chips"][1]["name"], "ascend910b2");
}

TEST_F(CommandTest, ThreadsComeFromTheEnvironment) {
  setenv("CUBIST_NUM_THREADS", "3", 1);
  const Outcome three = Cubist("info --no-peaks --json '" + Path("machine.json") + "'");
  EXPECT_EQ(three.status, 0) << three.err;
  EXPECT_EQ(Json::parse(Read("machine.json"))["threads"], 3);
  for (const char* value : {"0", "-1", "two", "3x", "1025", "99999999999"}) {
    setenv("CUBIST_NUM_THREADS", value, 1);
    for (const char* command : {"info --no-peaks", "bench swiglu --shape 8x8"}) {
      const Outcome refused = Cubist(command);
      EXPECT_EQ(refused.status, 2) << value;
      EXPECT_NE(refused.err.find("CUBIST_NUM_THREADS is '" + std::string(value) + "', needs 1 to 1024"),
                std::string::npos)
          << refused.err;
    }
  }
  unsetenv("CUBIST_NUM_THREADS");
}

TEST_F(CommandTest, BenchTimesEveryKernel) {
  const Outcome list = Cubist("bench fly");
  EXPECT_EQ(list.status, 2);
  for (const KernelForm& form : KernelForms()) {
    SCOPED_TRACE(form.name);
    const Outcome outcome = Cubist(std::string("bench ") + form.name + " --shape " + form.small +
                                   " --repetitions 4 --no-ceilings --json '" + Path("row.json") + "'");
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    const Json json = Json::parse(Read("row.json"));
    EXPECT_EQ(json["runs"], 4);
    EXPECT_GT(json["best_seconds"].get<double>(), 0);
    EXPECT_GE(json["median_seconds"].get<double>(), json["best_seconds"].get<double>());
    EXPECT_GT(json["bytes_read"].get<double>(), 0);
    EXPECT_GT(json["bytes_written"].get<double>(), 0);
  }
  // The call and its ceiling are timed one after the other: a machine that is busy in between may tell nonsense once.
  double share = 0;
  for (int attempt = 0; attempt < 5 && !(share > 0.01 && share < 2); ++attempt) {
    const Outcome outcome =
        Cubist("bench matmul --shape 384x256x512 --dtype fp32 --threads 1 --seconds 0.05 --json '" +
               Path("row.json") + "'");
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    const Json json = Json::parse(Read("row.json"));
    EXPECT_EQ(json["flops"], 2.0 * 384 * 256 * 512);
    EXPECT_EQ(json["bytes_read"], 4.0 * (384 * 512 + 512 * 256));
    EXPECT_EQ(json["ceiling"]["of"], "arithmetic");
    share = json["ceiling"]["share"].get<double>();
  }
  EXPECT_GT(share, 0.01);
  EXPECT_LT(share, 2);
}

TEST_F(CommandTest, CompletesWordsInBash) {
  const Outcome script = Cubist("completion bash");
  ASSERT_EQ(script.status, 0) << script.err;
  std::ofstream(Path("completion")) << script.out;
  const auto complete = [&](const std::string& words, int at) {
    const std::string command = "bash -c '. \"" + Path("completion") + "\"; COMP_WORDS=(" + words +
                                "); COMP_CWORD=" + std::to_string(at) +
                                "; _cubist; echo \"${COMPREPLY[@]}\"' >'" + Path("words") + "'";
    EXPECT_EQ(std::system(command.c_str()), 0);
    return Read("words");
  };
  EXPECT_EQ(complete("cubist pro", 1), "profile\n");
  EXPECT_EQ(complete("cubist check swiglu_", 2), "swiglu_grad\n");
  EXPECT_EQ(complete("cubist tune matmul --bud", 3), "--budget\n");
  EXPECT_EQ(complete("cubist profile matmul --chip ascend910b3", 4), "ascend910b3\n");
  EXPECT_NE(complete("cubist x", 1), complete("cubist r", 1));
  for (const char* shell : {"zsh", "fish"}) {
    const Outcome other = Cubist(std::string("completion ") + shell);
    EXPECT_EQ(other.status, 0);
    for (const char* word : {"flash_attention", "ascend910b4", "budget", "completion"})
      EXPECT_NE(other.out.find(word), std::string::npos) << shell << " " << word;
  }
  EXPECT_EQ(Cubist("completion tcsh").status, 2);
}

TEST_F(CommandTest, EveryCommandHasAnExample) {
  for (const char* command :
       {"run", "check", "profile", "tune", "sweep", "ablate", "validate", "bench", "info", "completion"}) {
    const Outcome help = Cubist(std::string(command) + " --help");
    EXPECT_EQ(help.status, 0);
    EXPECT_NE(help.out.find("Example: "), std::string::npos) << command;
  }
}

// ---- check ----

TEST_F(CommandTest, CheckProvesAndExecutesEveryKernel) {
  for (const char* call :
       {"matmul --shape 100x90x70", "flash_attention --shape 2x70x40x24x16 --causal",
        "token_permute --shape 50x33x3x8", "token_unpermute --shape 50x33x3 --dtype fp32"}) {
    for (const char* policy : {"minimal", "per-tile"}) {
      const Outcome outcome = Cubist(std::string("check ") + call + " --execute 2 --policy " + policy);
      EXPECT_EQ(outcome.status, 0) << call << outcome.out << outcome.err;
      EXPECT_NE(outcome.out.find("executed in 5 orders: the same bytes in each"), std::string::npos)
          << call << outcome.out;
    }
  }
}

// /dev/full takes nothing: whether a command prints by stdio, by fmt or through the parser.
TEST_F(CommandTest, TextThatDoesNotArriveIsAnError) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full";
  for (const char* arguments :
       {"--help", "--version", "completion bash", "info --no-peaks", "run --list",
        "profile matmul --shape 64x64x64", "check flash_attention_grad --shape 2x200x64x48 --plan"}) {
    const std::string command =
        std::string("'") + CUBIST_COMMAND + "' " + arguments + " >/dev/full 2>'" + Path("err") + "'";
    const int status = std::system(command.c_str());
    ASSERT_TRUE(WIFEXITED(status)) << arguments;
    EXPECT_EQ(WEXITSTATUS(status), 2) << arguments;
    EXPECT_NE(Read("err").find("cubist: cannot write to "), std::string::npos) << arguments << Read("err");
  }
}

TEST_F(CommandTest, CheckRefusesWhatItDoesNotKnow) {
  const auto refused = [&](const std::string& arguments, const std::string& message) {
    const Outcome outcome = Cubist(arguments);
    EXPECT_EQ(outcome.status, 2) << arguments;
    EXPECT_NE(outcome.err.find(message), std::string::npos) << arguments << outcome.err;
    EXPECT_EQ(outcome.out, "") << arguments;
  };
  refused("check matmull", "no kernel is named 'matmull'; known are matmul");
  refused("check matmul --shape 4x5", "shape '4x5' of matmul needs MxNxK");
  refused("check matmul --shape 4x5x-6", "needs MxNxK");
  refused("check matmul --dtype int8", "--dtype: 'int8' is none of fp32, bf16, fp16; the nearest is");
  refused("check matmul --chip ascend910", "nearest is");
  refused("check matmul --set memory.hbm=1", "memory.hbm");
  refused("check matmul --json /nonexistent/x", "--json /nonexistent/x: there is no folder");
  refused("check matmul --dot /nonexistent/x", "--dot /nonexistent/x: there is no folder");
  refused("profile matmul --vs polcy=per-tile",
          "--vs is 'polcy': neither an option of the call nor a constant");
  refused("run --chip ascend910b9", "ascend910b9");
  refused("check matmul --policy none",
          "--policy: 'none' is none of minimal, per-tile; the nearest is minimal");
}

TEST_F(CommandTest, MisspeltWordsGetTheNearest) {
  const auto refused = [&](const std::string& arguments, const std::string& message) {
    const Outcome outcome = Cubist(arguments);
    EXPECT_EQ(outcome.status, 2) << arguments;
    EXPECT_EQ(outcome.err, message + "\n") << arguments;
    EXPECT_EQ(outcome.out, "") << arguments;
  };
  refused("profle matmul", "cubist: there is no command 'profle'; the nearest is profile");
  refused("--versoin", "cubist: there is no option --versoin; the nearest is --version");
  refused("check matmul --shap 3x3x3", "cubist: check has no option --shap; the nearest is --shape");
  refused("check matmul --shap=3x3x3", "cubist: check has no option --shap; the nearest is --shape");
  refused("bench flash_attention --causl", "cubist: bench has no option --causl; the nearest is --causal");
  const Outcome prefix = Cubist("check matmul --set memory.hbm=1");
  EXPECT_NE(prefix.err.find("the nearest is memory.hbm_"), std::string::npos) << prefix.err;
}

TEST_F(CommandTest, TellsItsVersion) {
  const Outcome outcome = Cubist("--version");
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.out, std::string("cubist ") + Version() + "\n");
}

}  // namespace
}  // namespace cubist
