// What the command tells of the model: profiles, checks, ablations, tunings and sweeps.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/tools/command.h"

namespace cubist {
namespace {

TEST_F(CommandTest, AblatesAndWritesTheSteps) {
  const Outcome outcome =
      Cubist("ablate matmul --only 1024x1024x1024 --budget 2 --json '" + Path("rows.json") + "'");
  ASSERT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  const Json json = testing::ParseJson(Read("rows.json"));
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
    EXPECT_GT(step["transfers"].get<int>(), 10);
    EXPECT_LT(step["transfers"].get<int>(), step["instructions"].get<int>());
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
  const Json json = testing::ParseJson(Read("tune.json"));
  EXPECT_GE(json["gain"].get<double>(), 1);
  EXPECT_EQ(json["budget"], 20);
  EXPECT_EQ(json["dtype"], "bf16");
  EXPECT_EQ(json["set"], Json::array());
  ASSERT_EQ(
      Cubist("sweep " + subject + " --over sync.flag --values 20 --json '" + Path("sweep.json") + "'").status,
      0);
  const Outcome again = Cubist("tune " + subject + " --budget 1");
  EXPECT_EQ(again.status, 0) << again.err;

  std::ofstream(Path("tiles.txt")) << "matmul ascend910b2 m=300\n";
  const Outcome bad = Cubist("tune " + subject);
  EXPECT_EQ(bad.status, 2);
  EXPECT_NE(bad.err.find("tiles.txt:1: has 3 words"), std::string::npos) << bad.err;
  const auto tiling = [&](const std::string& fields, const std::string& message) {
    const Outcome outcome = Cubist("tune matmul --tiling " + fields);
    EXPECT_EQ(outcome.status, 2);
    EXPECT_TRUE(outcome.err.starts_with("cubist tune: --tiling: matmul: " + message)) << outcome.err;
  };
  tiling("m=17", "m is 17, needs 1 to");
  tiling("l1_stage=2", "no field is named 'l1_stage'; the nearest is l1_stages; they are m, n, ");
}

TEST_F(CommandTest, SweepsConstantsSizesAndTilings) {
  const auto times = [&](const std::string& arguments) {
    const Outcome outcome =
        Cubist("sweep matmul --shape 512x512x512 --json '" + Path("sweep.json") + "' --csv '" +
               Path("sweep.csv") + "' --svg '" + Path("sweep.svg") + "' " + arguments);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    std::vector<double> us;
    const Json json = testing::ParseJson(Read("sweep.json"));
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
  const Outcome no_values = Cubist("sweep matmul --over cube_cores");
  EXPECT_EQ(no_values.status, 2);
  EXPECT_NE(no_values.err.find("--from and --to are missing"), std::string::npos) << no_values.err;
  const Outcome no_start = Cubist("sweep matmul --over M --to 4096");
  EXPECT_EQ(no_start.status, 2);
  EXPECT_NE(no_start.err.find("--from is missing"), std::string::npos) << no_start.err;
  const Outcome backwards = Cubist("sweep matmul --over M --from 64 --to 32");
  EXPECT_EQ(backwards.status, 2);
  EXPECT_NE(backwards.err.find("--from is 64 and --to is 32"), std::string::npos) << backwards.err;
  EXPECT_EQ(Cubist("sweep matmul --over cube_cores --values 0").status, 2);
}

// What does not fit at some points is told there, with the buffer, and the others are modelled.
TEST_F(CommandTest, SweepsGoOnPastWhatCannotBe) {
  const std::string files = " --json '" + Path("sweep.json") + "' --csv '" + Path("sweep.csv") + "' --svg '" +
                            Path("sweep.svg") + "'";
  const auto sweep = [&](const std::string& arguments) { return Cubist("sweep " + arguments + files); };
  const Outcome some = sweep("matmul --shape 256x256x256 --over buffer.l0c --values 65536,512,131072");
  EXPECT_EQ(some.status, 0) << some.err;
  const std::string reason = "matmul: even the smallest tiles need 1024 bytes of L0C, ascend910b2* has 512";
  EXPECT_NE(some.out.find(reason), std::string::npos) << some.out;
  const Json json = testing::ParseJson(Read("sweep.json"));
  const Json& points = json["points"];
  ASSERT_EQ(points.size(), 3u);
  EXPECT_EQ(points[1], Json({{"value", "512"}, {"error", reason}}));
  for (const std::size_t i : {0u, 2u}) {
    EXPECT_GT(points[i]["time_us"].get<double>(), 0);
    EXPECT_FALSE(points[i].contains("error"));
  }
  EXPECT_NE(Read("sweep.csv").find("\n512,,,,,,,,\"" + reason + "\"\n"), std::string::npos)
      << Read("sweep.csv");
  const std::string svg = Read("sweep.svg");
  EXPECT_NE(svg.find("<polyline"), svg.rfind("<polyline")) << "two lines with a gap between them";
  EXPECT_EQ(svg.find("nan"), std::string::npos);

  EXPECT_EQ(sweep("matmul --shape 256x256x256 --over tiling.m --values 64,4096").status, 0);
  EXPECT_NE(Read("sweep.json").find(" bytes of L"), std::string::npos) << Read("sweep.json");

  for (const char* file : {"sweep.json", "sweep.csv", "sweep.svg"}) std::filesystem::remove(Path(file));
  for (const auto& [arguments, message] :
       {std::pair("--over buffer.l0c --values 16,512",
                  "buffer.l0c = 16: matmul: even the smallest tiles need"),
        std::pair("--over tiling.m --values 17,64", "tiling.m = 17: --tiling: matmul: m is 17, needs 1 to"),
        std::pair("--over cube_cores --values 8,0",
                  "cube_cores = 0: --set: cube_cores is 0, needs a whole")}) {
    const Outcome none = sweep(std::string("matmul --shape 256x256x256 ") + arguments);
    EXPECT_EQ(none.status, 2) << arguments;
    EXPECT_EQ(none.err.rfind("cubist sweep: " + std::string(message), 0), 0u) << none.err;
    EXPECT_EQ(none.out, "");
    for (const char* file : {"sweep.json", "sweep.csv", "sweep.svg"})
      EXPECT_FALSE(std::filesystem::exists(Path(file))) << arguments;
  }
}

// What stands in a file is enough to have it again.
TEST_F(CommandTest, FilesTellTheirSettings) {
  const auto run = [&](const std::string& arguments) {
    const Outcome outcome = Cubist(arguments + " --json '" + Path("file.json") + "'");
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return testing::ParseJson(Read("file.json"));
  };
  const std::string call =
      "flash_attention --shape 2x128x32x32 --dtype fp16 --causal --chip ascend910b4 --policy per-tile "
      "--set memory.hbm_bytes_per_s=1e12 --tiling q_stages=1 ";
  const auto expect_settings = [](const Json& json, const char* shape, const char* hbm) {
    EXPECT_EQ(json["kernel"], "flash_attention");
    EXPECT_EQ(json["shape"], shape);
    EXPECT_EQ(json["dtype"], "fp16");
    EXPECT_EQ(json["causal"], true);
    EXPECT_EQ(json["chip"], "ascend910b4*");
    EXPECT_EQ(json["base"], "ascend910b4");
    EXPECT_EQ(json["set"].back(), hbm);
    EXPECT_EQ(json["policy"], "per-tile");
    EXPECT_EQ(json["tuning"], "");
    EXPECT_EQ(json["tiling"], "q_stages=1");
  };
  const char* const kHbm = "memory.hbm_bytes_per_s=1e12";
  const Json sweep = run("sweep " + call + "--over LENGTH --values 128,256");
  expect_settings(sweep, "2x128x32x32x0", kHbm);
  EXPECT_EQ(sweep["over"], "LENGTH");
  EXPECT_EQ(sweep["points"].size(), 2u);

  const Json profile =
      run("profile " + call + "--interval --vs shape=2x256x32x32 --vs memory.hbm_bytes_per_s=2e12");
  expect_settings(profile, "2x128x32x32x0", kHbm);
  EXPECT_EQ(profile["interval"], true);
  expect_settings(profile["vs"], "2x256x32x32x0", "memory.hbm_bytes_per_s=2e12");
  EXPECT_EQ(run("profile matmul --shape 64x64x64")["interval"], false);

  const Json check = run("check " + call + "--execute 2");
  expect_settings(check, "2x128x32x32x0", kHbm);
  EXPECT_EQ(check["execute"], 2);
  EXPECT_EQ(check["executed_alike"], true);
  EXPECT_EQ(check["plan"]["policy"], "per-tile");

  // A file's name may hold any bytes.
  std::ofstream(Path("\xff.txt")) << "";
  EXPECT_TRUE(run("check matmul --shape 16x16x16 --tuning '" + Path("\xff.txt") + "'")["tuning"]
                  .get<std::string>()
                  .ends_with("\xEF\xBF\xBD.txt"));

  const Json ablation =
      run("ablate matmul --only 1024x1024x1024 --budget 2 --chip ascend910b4 --set cube_cores=10");
  ASSERT_EQ(ablation.size(), 1u);
  EXPECT_EQ(ablation[0]["kernel"], "matmul");
  EXPECT_EQ(ablation[0]["workload"], "deepseek_v3");
  EXPECT_EQ(ablation[0]["chip"], "ascend910b4*");
  EXPECT_EQ(ablation[0]["base"], "ascend910b4");
  EXPECT_EQ(ablation[0]["set"], Json::array({"cube_cores=10"}));
  EXPECT_EQ(ablation[0]["budget"], 2);
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
  const Json json = testing::ParseJson(Read("profile.json"));
  EXPECT_EQ(json["vs"]["title"],
            "matmul 256x256x256 bf16 on ascend910b2*, memory.hbm_bytes_per_s=2e12, k0=32");
}

TEST_F(CommandTest, ProfilesAddUp) {
  for (const std::string subject :
       {"matmul --shape 520x300x400", "flash_attention --shape 4x256x128x128",
        "flash_attention --shape 4x256x128x128 --set vector_per_cube=4", "token_permute --shape 256x512x4x16",
        "token_unpermute --shape 256x512x4"}) {
    SCOPED_TRACE(subject);
    const Outcome outcome = Cubist("profile " + subject + " --json '" + Path("profile.json") + "' --csv '" +
                                   Path("profile.csv") + "' --trace '" + Path("trace.json") + "'");
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    const Json json = testing::ParseJson(Read("profile.json"));
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
    EXPECT_GT(testing::ParseJson(Read("trace.json"))["traceEvents"].size(),
              json["instructions"].get<std::size_t>());
  }
}

// Elements times instructions of kernels/swiglu_kernel.h and of rms_norm_kernel.h: what their expansions in
// npu_model/composites.h have for each element and for each row.
TEST_F(CommandTest, VectorCoresHaveARoofline) {
  const auto profile = [&](const std::string& call) {
    const Outcome outcome = Cubist("profile " + call + " --json '" + Path("profile.json") + "'");
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return std::pair(testing::ParseJson(Read("profile.json")), outcome.out);
  };
  for (const auto& [call, operations] :
       {std::pair("swiglu --shape 70x520 --dtype fp32", 70.0 * 520 * 6),
        std::pair("swiglu --shape 70x520 --dtype bf16", 70.0 * 520 * 9),
        std::pair("rms_norm --shape 70x520 --dtype fp32", 70.0 * (520 * 4 + 5))}) {
    SCOPED_TRACE(call);
    const auto [json, text] = profile(call);
    const Json& roofline = json["vector_roofline"];
    EXPECT_EQ(roofline["operations"], operations);
    EXPECT_DOUBLE_EQ(roofline["attained_operations_per_s"].get<double>(),
                     operations / (json["time_us"].get<double>() * 1e-6));
    EXPECT_DOUBLE_EQ(roofline["peak_operations_per_s"].get<double>(), 48 * 64 * 1.8e9) << "cores, lanes, Hz";
    EXPECT_DOUBLE_EQ(roofline["intensity"].get<double>(), operations / json["hbm_bytes"].get<double>());
    EXPECT_EQ(json["roofline"]["flops"], 0);
    EXPECT_NE(text.find("roofline of the Vector cores: "), std::string::npos) << text;
    EXPECT_EQ(text.find("roofline of the Cubes"), std::string::npos) << text;
  }
  EXPECT_NE(profile("flash_attention --shape 2x128x32x32").second.find("roofline of the Cubes: "),
            std::string::npos);
  EXPECT_NE(profile("matmul --shape 0x64x64").second.find("roofline: no arithmetic; "), std::string::npos);
}

// Each figure of either call is there once, in the column of its own.
TEST_F(CommandTest, FiguresOfBothCallsStandInTheCsv) {
  const auto rows = [&](const std::string& arguments) {
    const Outcome outcome =
        Cubist("profile matmul --shape 520x300x400 --csv '" + Path("profile.csv") + "' " + arguments);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    std::istringstream lines(Read("profile.csv"));
    std::map<std::string, std::string> values;  // behind the section and the name
    for (std::string line; std::getline(lines, line);) {
      const std::size_t name = line.find(',', line.find(',') + 1);
      EXPECT_TRUE(values.emplace(line.substr(0, name), line.substr(name + 1)).second) << line;
    }
    return values;
  };
  const auto a = rows(""), b = rows("--policy per-tile --tiling m=64,n=64");
  auto both = rows("--vs policy=per-tile --vs tiling.m=64 --vs tiling.n=64");
  EXPECT_EQ(both.at("section,name"), "value,value_b");
  EXPECT_NE(a.at("total,time_us"), b.at("total,time_us"));
  both.erase("section,name");
  for (const auto& [name, values] : both) {
    const auto in_a = a.find(name), in_b = b.find(name);
    EXPECT_TRUE(in_a != a.end() || in_b != b.end()) << name;
    EXPECT_EQ(values, (in_a == a.end() ? "" : in_a->second) + "," + (in_b == b.end() ? "" : in_b->second))
        << name;
  }
  for (const auto* call : {&a, &b}) {
    for (const auto& [name, value] : *call)
      EXPECT_TRUE(name == "section,name" || both.contains(name)) << name;
  }
}

TEST_F(CommandTest, ProfilesAnswerWhatIf) {
  const auto time_us = [&](const std::string& arguments) {
    const Outcome outcome =
        Cubist("profile matmul --shape 512x512x512 --json '" + Path("profile.json") + "' " + arguments);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    const Json json = testing::ParseJson(Read("profile.json"));
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
  const Json slack = testing::ParseJson(Read("profile.json"))["slack"];
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
    const Json trace = testing::ParseJson(Read("trace.json"));
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
  for (const char* bad : {"5", "5:", "5:4", "-1:4", "a:b", "1:2x", "1000:1001"}) {
    const Outcome outcome = Cubist(std::string("profile matmul --shape 64x64x64 --window=") + bad);
    EXPECT_EQ(outcome.status, 2) << bad;
    EXPECT_NE(outcome.err.find("--window"), std::string::npos) << outcome.err;
    EXPECT_EQ(outcome.out, "") << bad;
  }
}

class ProfilePageTest : public CommandTest {
 protected:
  void SetUp() override {
    CommandTest::SetUp();
    const Outcome outcome = Cubist("profile matmul --shape 512x512x512 --vs policy=per-tile --json '" +
                                   Path("profile.json") + "' --html '" + Path("page.html") + "'");
    ASSERT_EQ(outcome.status, 0) << outcome.err;
  }
};

// The page draws from the figures of the JSON.
TEST_F(ProfilePageTest, HoldsTheFigures) {
  const std::string page = Read("page.html"), mark = "id=\"data\">";
  const std::size_t begin = page.find(mark) + mark.size();
  const Json data = testing::ParseJson(page.substr(begin, page.find("</script>", begin) - begin));
  Json json = testing::ParseJson(Read("profile.json"));
  EXPECT_EQ(data["b"], json["vs"]);
  json.erase("vs");
  EXPECT_EQ(data["a"], json);
  EXPECT_EQ(data["timelines"].size(), 2u);
  EXPECT_GT(data["timelines"][0]["slices"].size(), 10u);
  EXPECT_EQ(page.find("http://"), std::string::npos) << "the page is self-contained";
  EXPECT_EQ(page.find("https://"), std::string::npos);
}

TEST_F(ProfilePageTest, ABrowserDrawsTheFigures) {
  if (std::system("command -v chromium >/dev/null 2>&1") != 0)
    GTEST_SKIP() << "no chromium: the page was not drawn in a browser";
  const Json json = testing::ParseJson(Read("profile.json"));
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
  refused("check matmul --dtype int8", "--dtype: 'int8' is none of fp32, bf16, fp16; cubist check --help");
  refused("check matmul --chip ascend910", "nearest is");
  refused("check matmul --set memory.hbm=1", "memory.hbm");
  refused("check matmul --json /nonexistent/x", "--json /nonexistent/x: there is no folder");
  refused("check matmul --dot /nonexistent/x", "--dot /nonexistent/x: there is no folder");
  refused("profile matmul --vs polcy=per-tile",
          "--vs is 'polcy': neither an option of the call nor a constant");
  refused("run --chip ascend910b9", "ascend910b9");
  refused("check matmul --policy none", "--policy: 'none' is none of minimal, per-tile; cubist check --help");
}

}  // namespace
}  // namespace cubist
