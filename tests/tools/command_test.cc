// The command as a user calls it: what it prints, writes and returns.
#include "tests/tools/command.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "cubist/version.h"
#include "tools/kernel_call.h"
#include "tools/npy.h"

namespace cubist {
namespace {

TEST_F(CommandTest, RunsEveryCaseAndWritesItsRows) {
  const Outcome outcome = RunToy("--json '" + Path("rows.json") + "'");
  ASSERT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  const Json json = testing::ParseJson(Read("rows.json"));
  EXPECT_EQ(json["passed"], true);
  EXPECT_EQ(json["sequence"], 33);
  EXPECT_EQ(json["heads"], 2);
  EXPECT_EQ(json["rows"].size(), 22u);
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
  EXPECT_NE(outcome.out.find("22 of 22 cases passed"), std::string::npos);
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
  EXPECT_EQ(files, 9 + 2 * 2 + 2 * 6 - 1 + 2 + 10 + 8)
      << "attention has two outputs, permute three, each block one, its gradient one for each weight and x";
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
  const Json trace = testing::ParseJson(Read("trace.json"));
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
  ExpectRefused("--routing random",
                "--routing: 'random' is none of skewed, uniform, both; cubist run --help");
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
  EXPECT_NE(
      unknown.err.find("no workload is named 'nothing'; known are deepseek_v3, pangu_ultra_moe; a path"),
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
  const Json json = testing::ParseJson(Read("machine.json"));
  EXPECT_EQ(json["threads"], 1);
  EXPECT_GT(json["peaks"]["fp32_flops"].get<double>(), 1e8);
  EXPECT_GT(json["peaks"]["copy_bytes_per_s"].get<double>(), 1e8);
  EXPECT_EQ(json["chips"].size(), 4u);
  EXPECT_EQ(json["chips"][1]["name"], "ascend910b2");
}

// The file alone, to be read by what stands behind a pipe.
TEST_F(CommandTest, JsonGoesToTheStandardOutput) {
  for (const char* arguments : {"info --no-peaks --json -", "profile matmul --shape 64x64x64 --json -",
                                "check matmul --shape 64x64x64 --json -",
                                "bench matmul --shape 64x64x64 --repetitions 3 --no-ceilings --json -"}) {
    SCOPED_TRACE(arguments);
    const Outcome outcome = Cubist(arguments);
    EXPECT_EQ(outcome.status, 0);
    EXPECT_TRUE(testing::IsJson(outcome.out)) << outcome.out;
    EXPECT_FALSE(outcome.err.empty());  // What people read.
  }
}

TEST_F(CommandTest, OtherFilesGoToTheStandardOutput) {
  for (const auto& [arguments, first] :
       {std::pair("profile matmul --shape 64x64x64 --csv -", "section,name,value\n"),
        std::pair("tune matmul --shape 16x16x16 --output -", "# kernel chip shape tiling\n")}) {
    SCOPED_TRACE(arguments);
    const Outcome outcome = Cubist(arguments);
    EXPECT_EQ(outcome.status, 0);
    EXPECT_EQ(outcome.out.rfind(first, 0), 0u) << outcome.out;
  }
}

TEST_F(CommandTest, TheStandardOutputTakesOneFile) {
  for (const auto& [more, error] :
       {std::pair("--csv -", "--csv -: another option writes to the standard output"),
        std::pair("--trace -", "--trace -: takes the name of a file only")}) {
    const Outcome outcome = Cubist(std::string("profile matmul --shape 64x64x64 --json - ") + more);
    EXPECT_EQ(outcome.status, 2);
    EXPECT_EQ(outcome.out, "");
    EXPECT_NE(outcome.err.find(error), std::string::npos) << outcome.err;
  }
}

TEST_F(CommandTest, WhatDoesNotFitIsAnError) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers end the program where operator new would throw";
#endif
  for (const char* arguments :
       {"bench matmul --shape 16777216x16777216x16777216", "bench swiglu --shape 16777216x16777216",
        "check matmul --shape 16777216x16777216x16777216 --execute 1",
        "profile token_permute --shape 16777216x1x16777216x2"}) {
    SCOPED_TRACE(arguments);
    const Outcome outcome = Cubist(arguments);
    EXPECT_EQ(outcome.status, 2);
    EXPECT_NE(outcome.err.find("do not fit in this machine's"), std::string::npos) << outcome.err;
  }
}

TEST_F(CommandTest, FoldersAreNoFiles) {
  for (const char* option : {"profile matmul --chip ", "profile matmul --tuning ", "validate "}) {
    const Outcome outcome = Cubist(option + ("'" + Path("") + "'"));
    EXPECT_EQ(outcome.status, 2);
    EXPECT_NE(outcome.err.find("is a folder, expected a file"), std::string::npos) << outcome.err;
  }
}

TEST_F(CommandTest, ValidateNeedsRowsAndKnownConstants) {
  std::ofstream(Path("rows.csv"))
      << "M,N,K,dtype,variant,TFLOPS_digitised,us_derived\n128,256,x,fp16,step1_single,1,2\n";
  const Outcome none = Cubist("validate '" + Path("rows.csv") + "'");
  EXPECT_EQ(none.status, 2);
  EXPECT_NE(none.err.find("has no row"), std::string::npos) << none.err;
  const Outcome set = Cubist("validate --set memory.hbm=1");
  EXPECT_EQ(set.status, 2);
  EXPECT_NE(set.err.find("memory.hbm_bytes_per_s"), std::string::npos) << set.err;
}

TEST_F(CommandTest, ThreadsAndSecondsAreNumbers) {
  EXPECT_EQ(Cubist("bench matmul --shape 64x64x64 --seconds nan").status, 2);
  ASSERT_EQ(setenv("CUBIST_NUM_THREADS", "many", 1), 0);
  const Outcome run = RunToy("");
  EXPECT_EQ(unsetenv("CUBIST_NUM_THREADS"), 0);
  EXPECT_EQ(run.status, 2);
  EXPECT_NE(run.err.find("CUBIST_NUM_THREADS"), std::string::npos) << run.err;
}

TEST_F(CommandTest, InfoListsTheConstantsOfAChip) {
  const Outcome info = Cubist("info --chip ascend910b4 --json '" + Path("chip.json") + "'");
  ASSERT_EQ(info.status, 0) << info.err;
  const Json json = testing::ParseJson(Read("chip.json"));
  EXPECT_EQ(json["name"], "ascend910b4");
  EXPECT_GT(json["constants"].size(), 50u);
  for (const Json& constant : json["constants"]) {
    const std::string name = constant["name"];
    EXPECT_NE(info.out.find("\n" + name + " "), std::string::npos) << name;
    if (name == "memory.hbm_bytes_per_s") {
      EXPECT_EQ(constant["value"], json["hbm_bytes_per_s"]);
    }
  }
  const Outcome bad = Cubist("info --chip ascend910b5");
  EXPECT_EQ(bad.status, 2);
  EXPECT_NE(bad.err.find("ascend910b4"), std::string::npos) << bad.err;
}

TEST_F(CommandTest, ThreadsComeFromTheEnvironment) {
  setenv("CUBIST_NUM_THREADS", "3", 1);
  const Outcome three = Cubist("info --no-peaks --json '" + Path("machine.json") + "'");
  EXPECT_EQ(three.status, 0) << three.err;
  EXPECT_EQ(testing::ParseJson(Read("machine.json"))["threads"], 3);
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
    const Json json = testing::ParseJson(Read("row.json"));
    EXPECT_EQ(json["runs"], 4);
    EXPECT_EQ(json["shape"], form.small);
    for (const char* setting : {"dtype", "causal", "chip", "threads", "pin", "seconds"})
      EXPECT_TRUE(json.contains(setting)) << setting;
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
    const Json json = testing::ParseJson(Read("row.json"));
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
  EXPECT_EQ(complete("cubist ablate l", 2), "layer\n");
  EXPECT_EQ(complete("cubist ablate swi", 2), "\n");
  EXPECT_EQ(complete("cubist profile matmul --chip ascend910b3", 4), "ascend910b3\n");
  EXPECT_NE(complete("cubist x", 1), complete("cubist r", 1));
  EXPECT_EQ(complete("cubist --v", 1), "--version\n");
  // Values where they are known, behind "--option value" and "--option=value", which bash cuts at "=".
  EXPECT_EQ(complete("cubist profile matmul --chip = ascend910b4", 5), "ascend910b4\n");
  EXPECT_EQ(complete("cubist run --workload pan", 3), "pangu_ultra_moe\n");
  EXPECT_EQ(complete("cubist run --only unpermute.s", 3), "unpermute.skewed\n");
  EXPECT_EQ(complete("cubist run --timeline moe", 3), "moe_block= moe_block.grad=\n");
  for (const char* command :
       {"run", "profile matmul", "sweep matmul", "ablate layer", "validate", "check matmul"}) {
    const int words = std::string(command).find(' ') == std::string::npos ? 2 : 3;
    EXPECT_EQ(complete("cubist " + std::string(command) + " --set memory.hbm", words + 1),
              "memory.hbm_bytes_per_s=\n")
        << command;
  }
  EXPECT_EQ(complete("cubist profile matmul --vs pol", 4), "policy=\n");
  EXPECT_EQ(complete("cubist sweep matmul --over sync.event", 4), "sync.event_ids\n");
  EXPECT_EQ(complete("cubist sweep flash_attention --over HEA", 4), "HEADS\n");
  EXPECT_EQ(complete("cubist sweep matmul --over HEA", 4), "\n");
  EXPECT_EQ(complete("cubist ablate flash_attention --only back", 4), "backward\n");
  EXPECT_EQ(complete("cubist ablate matmul --only 4096x512x1", 4), "4096x512x16384\n");
  // The value of a constant, a file: nothing of ours.
  EXPECT_EQ(complete("cubist profile matmul --set clock_hz =", 5), "\n");
  EXPECT_EQ(complete("cubist profile matmul --set clock_hz = 1", 6), "\n");
  EXPECT_EQ(complete("cubist profile matmul --json x", 4), "\n");
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
    EXPECT_NE(help.out.find("\nExample"), std::string::npos) << command;
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
    EXPECT_NE(Read("err").find(": cannot write to "), std::string::npos) << arguments << Read("err");
  }
}

TEST_F(CommandTest, RowsOfARunGoToTheStandardOutput) {
  const Outcome run = Cubist("run --quick --only attention --json -");
  EXPECT_EQ(run.status, 0) << run.err;
  EXPECT_TRUE(nlohmann::json::parse(run.out)["passed"].get<bool>());
}

TEST_F(CommandTest, ListsAreJsonToo) {
  const auto list = [&](const std::string& arguments) {
    const Outcome outcome = Cubist(arguments + " --list --json -");
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return nlohmann::json::parse(outcome.out);
  };
  const nlohmann::json run = list("run");
  EXPECT_GT(run["cases"].size(), 10u);
  EXPECT_TRUE(run["inputs"][0]["shape"].is_array());
  EXPECT_TRUE(list("ablate token_permute")[0]["case"].is_string());
}

TEST_F(CommandTest, EachFileIsOneOptions) {
  const Outcome refused =
      Cubist("profile matmul --shape 64x64x64 --json '" + Path("same") + "' --csv '" + Path("same") + "'");
  EXPECT_EQ(refused.status, 2);
  EXPECT_NE(refused.err.find("--json writes to this file"), std::string::npos) << refused.err;
  EXPECT_FALSE(std::filesystem::exists(Path("same")));
  std::ofstream(Path("chip.json")) << R"({"name": "mine", "base": "ascend910b2"})";
  const std::string chip = Read("chip.json");
  const Outcome overwrites = Cubist("profile matmul --shape 64x64x64 --chip '" + Path("chip.json") +
                                    "' --json '" + Path("chip.json") + "'");
  EXPECT_EQ(overwrites.status, 2);
  EXPECT_NE(overwrites.err.find("--chip reads this file"), std::string::npos) << overwrites.err;
  EXPECT_EQ(Read("chip.json"), chip);
  // However it is spelt.
  const std::string command = "cd '" + folder_ + "' && '" + CUBIST_COMMAND +
                              "' profile matmul --shape 64x64x64 --json same --csv ./same >out 2>err";
  const int status = std::system(command.c_str());
  EXPECT_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -1, 2);
  EXPECT_NE(Read("err").find("--csv ./same: --json writes to this file"), std::string::npos) << Read("err");
}

TEST_F(CommandTest, FilesWithoutAnEndAreRefused) {
  if (!std::filesystem::exists("/dev/zero")) GTEST_SKIP() << "there is no /dev/zero";
  const auto expect_refused = [&](const std::string& arguments, const std::string& message) {
    const Outcome refused = Cubist(arguments);
    EXPECT_EQ(refused.status, 2) << arguments;
    EXPECT_NE(refused.err.find(message), std::string::npos) << arguments << refused.err;
  };
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  for (const std::string command : {"profile matmul --tuning ", "validate ", "info --chip "}) {
    expect_refused(command + "/dev/zero", "/dev/zero: is not a regular file");
    expect_refused(command + "'" + Path("pipe") + "'", "pipe: is not a regular file");
    expect_refused(command + "/dev/stdin </dev/zero", "/dev/stdin: has more than ");
  }
}

TEST_F(CommandTest, ReadsWhatIsPipedIn) {
  const std::string profile = "profile matmul --shape 64x64x64 --tuning /dev/stdin";
  const std::string cat = "cat '" + Path("tilings") + "' | ";
  const Outcome tuned = Cubist("tune matmul --shape 64x64x64 --budget 2 --output '" + Path("tilings") + "'");
  ASSERT_EQ(tuned.status, 0) << tuned.err;
  EXPECT_EQ(Cubist(profile, cat).status, 0);
  std::ofstream(Path("tilings")) << "three words alone\n";
  const Outcome refused = Cubist(profile, cat);
  EXPECT_EQ(refused.status, 2);
  EXPECT_NE(refused.err.find("/dev/stdin:1: has 3 words"), std::string::npos) << refused.err;
}

// A tiling that was searched for with one --set is none for a chip with another.
TEST_F(CommandTest, TilingsAreOfTheChipTheyWereTunedFor) {
  const std::string file = Path("tilings");
  const Outcome tuned =
      Cubist("tune rms_norm --shape 64x512 --set cube_cores=8 --budget 2 --output '" + file + "'");
  ASSERT_EQ(tuned.status, 0) << tuned.err;
  const auto profile = [&](const std::string& set) {
    return Cubist("profile rms_norm --shape 64x512 --set " + set + " --tuning '" + file + "'");
  };
  EXPECT_EQ(profile("cube_cores=8").err.find("has no tiling"), std::string::npos);
  EXPECT_NE(profile("cube_cores=9").err.find("has no tiling for this call"), std::string::npos);
}

TEST_F(CommandTest, MisspeltWordsGetTheNearest) {
  const auto refused = [&](const std::string& arguments, const std::string& message) {
    const Outcome outcome = Cubist(arguments);
    EXPECT_EQ(outcome.status, 2) << arguments;
    EXPECT_EQ(outcome.err, message + "\n") << arguments;
    EXPECT_EQ(outcome.out, "") << arguments;
  };
  refused("profle matmul",
          "cubist: there is no command 'profle'; the nearest is profile; cubist --help lists them");
  refused("--versoin", "cubist: there is no option --versoin; the nearest is --version");
  refused("check matmul --shap 3x3x3", "cubist check: there is no option --shap; the nearest is --shape");
  refused("check matmul --shap=3x3x3", "cubist check: there is no option --shap; the nearest is --shape");
  refused("bench flash_attention --causl",
          "cubist bench: there is no option --causl; the nearest is --causal");
  const Outcome prefix = Cubist("check matmul --set memory.hbm=1");
  EXPECT_NE(prefix.err.find("the nearest is memory.hbm_"), std::string::npos) << prefix.err;
}

// Whatever the parser refuses says whose input it was, as commands do of what they refuse.
TEST_F(CommandTest, ErrorsBeginWithTheCommand) {
  const auto refused = [&](const std::string& arguments, const std::string& beginning) {
    const Outcome outcome = Cubist(arguments);
    EXPECT_EQ(outcome.status, 2) << arguments;
    EXPECT_TRUE(outcome.err.starts_with(beginning)) << arguments << ": " << outcome.err;
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  };
  refused("", "cubist: ");
  refused("bench", "cubist bench: kernel is required; cubist bench --help tells more");
  refused("profile matmul --dtype bf17", "cubist profile: --dtype: 'bf17' is none of");
  refused("check matmul --execute", "cubist check: --execute is given without a value; ");
  refused("check matmul more", "cubist check: ");
  refused("run --check-seed -1", "cubist run: --check-seed: '-1' is no whole number");
  for (const char* threads : {"0", "1025", "1.5", "two", "1e3", "18446744073709551617"}) {
    refused(std::string("bench matmul --threads ") + threads,
            std::string("cubist bench: --threads: '") + threads + "' is no whole number from 1 to 1024");
  }
  for (const char* number : {"a", "inf", "nan", "1e999", "3x"}) {
    refused(std::string("sweep matmul --over M --to 4 --from ") + number,
            std::string("cubist sweep: --from: '") + number + "' is no number");
  }
  refused("profile matmul --shape",
          "cubist profile: --shape is given without a value; cubist profile --help");
  refused("profile matmul --shape ''", "cubist profile: --shape is given an empty value");
  refused("profile matmul --json ''", "cubist profile: --json is given an empty value");
  refused("fly", "cubist: there is no command 'fly'; cubist --help lists them");
  refused("profile matmul --tiling m=", "cubist profile: --tiling: matmul: m is '', needs a whole number\n");
}

TEST_F(CommandTest, OnlyAttentionHasMasks) {
  for (const char* command : {"bench", "check", "profile", "tune", "sweep"}) {
    const Outcome outcome = Cubist(std::string(command) + " matmul --shape 64x64x64 --causal" +
                                   (command == std::string("sweep") ? " --over M --values 64" : ""));
    EXPECT_EQ(outcome.status, 2) << command;
    EXPECT_NE(outcome.err.find("--causal: matmul has no mask; flash_attention, "), std::string::npos)
        << outcome.err;
    EXPECT_EQ(outcome.out, "") << command;
  }
  for (const char* kernel : {"flash_attention", "flash_attention_grad", "flash_attention_masked"}) {
    const Outcome outcome = Cubist(std::string("profile ") + kernel + " --shape 1x64x32x32 --causal");
    EXPECT_EQ(outcome.status, 0) << outcome.err;
  }
}

TEST_F(CommandTest, TellsItsVersion) {
  const Outcome outcome = Cubist("--version");
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.out, std::string("cubist ") + Version() + "\n");
}

}  // namespace
}  // namespace cubist
