// Measured rows read, replayed and summarised.
#include "tools/validate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/matmul.h"
#include "npu_model/chip.h"
#include "npu_model/device.h"
#include "npu_model/sync/plan.h"
#include "tests/support/json.h"
#include "tools/interval.h"
#include "tools/kernel_call.h"
#include "tools/validation/csv.h"
#include "tools/validation/measured.h"
#include "tools/validation/predict.h"

namespace cubist {
namespace {

std::string Temporary(const char* name, const std::string& text) {
  const std::string file = ::testing::TempDir() + "/cubist_validate_" + name;
  std::ofstream(file) << text;
  return file;
}

TEST(CsvTest, QuotesHoldCommasAndQuotes) {
  const auto lines = ParseCsv("a,b\n\n\"1,2\",\"say \"\"x\"\"\"\r\n,\n");
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[1].number, 3);
  EXPECT_EQ(lines[1].fields, (std::vector<std::string>{"1,2", "say \"x\""}));
  EXPECT_EQ(lines[2].fields, (std::vector<std::string>{"", ""}));
}

TEST(CsvTest, AStrayQuoteSpoilsItsLineAlone) {
  const auto lines = ParseCsv("a,b\n\"1,2\n3,4\n");
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[1].fields, (std::vector<std::string>{"1,2"}));
  EXPECT_EQ(lines[2].fields, (std::vector<std::string>{"3", "4"}));
}

constexpr const char* kSchedules = "M,N,K,dtype,variant,TFLOPS_digitised,us_derived\n";
constexpr const char* kOperators = "chip,op,case,shapes,dtypes,attrs,kernels,measured_us\n";

TEST(MeasuredTest, BadRowsAreNamedAndTheRestIsRead) {
  MeasuredRows rows;
  ASSERT_TRUE(
      ReadMeasured(Temporary("bad.csv", std::string(kSchedules) + "128,256,512,fp16,step1_single,1,12.5\n"
                                                                  "128,256,x,fp16,step1_single,1,12.5\n"
                                                                  "128,256,512,fp16,step1_single,1,-3\n"
                                                                  "128,256\n"),
                   &rows)
          .ok());
  ASSERT_EQ(rows.rows.size(), 1u);
  EXPECT_EQ(rows.rows[0].shapes[0], (Shape{128, 256, 512}));
  ASSERT_EQ(rows.bad.size(), 3u);
  EXPECT_NE(rows.bad[0].find("line 3: K 'x'"), std::string::npos) << rows.bad[0];
  EXPECT_NE(rows.bad[1].find("line 4: us_derived '-3'"), std::string::npos) << rows.bad[1];
  EXPECT_NE(rows.bad[2].find("line 5: 2 fields, not 7"), std::string::npos) << rows.bad[2];
}

TEST(MeasuredTest, AByteOrderMarkIsNoPartOfTheFirstName) {
  MeasuredRows rows;
  const std::string text =
      "\xEF\xBB\xBF" + std::string(kSchedules) + "128,256,512,fp16,step1_single,1,12.5\n";
  ASSERT_TRUE(ReadMeasured(Temporary("mark.csv", text), &rows).ok());
  EXPECT_EQ(rows.rows.size(), 1u);
}

// Rows that parse and that no operator can take: each is skipped for a reason.
TEST(MeasuredTest, RowsThatMakeNoSenseAreSkipped) {
  const std::string bf16 = ",\"[\"\"bf16\"\"]\",";
  const std::pair<std::string, const char*> cases[] = {
      {"rms_norm,1,\"[[],[768]]\"" + bf16 + "{},K,5", "no dimensions"},
      {"rms_norm,2,\"[null,[768]]\"" + bf16 + "{},K,5", "no dimensions"},
      {"maximum,3,\"[[64,64],null]\"" + bf16 + "{},K,5", "no dimensions"},
      {"swi_glu,4,\"[[64,64]]\"" + bf16 + "\"{\"\"dim\"\":\"\"x\"\"}\",K,5", "attrs"},
      {"swi_glu,5,\"[[64,64]]\"" + bf16 + "\"{\"\"dim\"\":null}\",K,5", "attrs"},
      {"mha,6,\"[[1,8,2,64],[1,8,2,64],[1,8,2,64]]\"" + bf16 + "\"{\"\"inputLayout\"\":5}\",K,5", "attrs"},
      {"swi_glu,7,\"[[1024,0]]\"" + bf16 + "{},K,5", "size of 0"},
      {"sigmoid,8,\"[[2147483648,2147483648]]\"" + bf16 + "{},K,5", "elements"},
      {"sigmoid,9,\"[[2147483648,2147483648,2147483648]]\"" + bf16 + "{},K,5", "elements"},
      {"gemm,10,\"[[64,64],[32,64]]\"" + bf16 + "{},K,5", "64 columns, b 32 rows"},
      {"gemm,11,\"[[131072,131072],[131072,131072]]\"" + bf16 + "{},K,5", "multiply-adds"},
  };
  for (const auto& [line, why] : cases) {
    SCOPED_TRACE(line);
    MeasuredRows rows;
    ASSERT_TRUE(ReadMeasured(Temporary("odd.csv", kOperators + ("910b2," + line) + "\n"), &rows).ok());
    ASSERT_EQ(rows.rows.size(), 1u) << rows.bad.at(0);
    const std::string skipped = RecordRow(rows.rows[0], Ascend910B2()).skipped;
    EXPECT_NE(skipped.find(why), std::string::npos) << skipped;
  }
}

TEST(MeasuredTest, RoutingWithoutTokensIsReplayed) {
  MeasuredRows rows;
  const std::string line =
      "910b2,moe_init_routing_v3,1,\"[[0,2048],[0,8]]\",\"[\"\"bf16\"\",\"\"int32\"\"]\",\"{\"\"expert_"
      "num\"\":256}\",K,1.7\n";
  ASSERT_TRUE(ReadMeasured(Temporary("none.csv", kOperators + line), &rows).ok());
  ASSERT_EQ(rows.rows.size(), 1u) << rows.bad.at(0);
  const Recorded recorded = RecordRow(rows.rows[0], Ascend910B2());
  EXPECT_EQ(recorded.skipped, "");
  EXPECT_FALSE(recorded.launches.empty());
}

TEST(MeasuredTest, OtherFilesAreErrors) {
  MeasuredRows rows;
  EXPECT_FALSE(ReadMeasured("/no/such.csv", &rows).ok());
  EXPECT_NE(ReadMeasured(Temporary("other.csv", "x,y\n1,2\n"), &rows).message().find("begins with neither"),
            std::string::npos);
}

TEST(SummaryTest, ErrorsAndRanks) {
  const ErrorSummary s = Summarise({11, 18, 30}, {10, 20, 30});
  EXPECT_NEAR(s.mape, (0.1 + 0.1 + 0) / 3, 1e-12);
  EXPECT_NEAR(s.median, 0, 1e-12);
  EXPECT_DOUBLE_EQ(s.spearman, 1);
  EXPECT_DOUBLE_EQ(Summarise({3, 2, 1}, {10, 20, 30}).spearman, -1);
  EXPECT_EQ(Summarise({}, {}).rows, 0u);
}

double Us(const std::string& line) {
  MeasuredRows rows;
  EXPECT_TRUE(ReadMeasured(Temporary("row.csv", kSchedules + line + "\n"), &rows).ok());
  Recorded recorded = RecordRow(rows.rows.at(0), Ascend910B2());
  EXPECT_EQ(recorded.skipped, "");
  EXPECT_EQ(recorded.group, kKnownSchedules);
  return PredictedUs(recorded.launches, Ascend910B2());
}

// Each step of the guide is quicker than the one before where there is work enough, and none beats the Cube.
TEST(ScheduleTest, StepsAreAsTheyWereMeasured) {
  const double floor = 1024.0 / 16 * 4096 / 16 * 2048 / 16 / 24 / 1.8e9 * 1e6;
  const double one = Us("1024,4096,2048,fp16,step1_single_noswz,1,1"),
               two = Us("1024,4096,2048,fp16,step2_double_noswz,1,1"),
               four = Us("1024,4096,2048,fp16,step4_manual_swz5,1,1");
  EXPECT_GT(one, 1.3 * two);
  EXPECT_GT(two, 1.02 * four);
  EXPECT_GT(four, floor);
  // Edges of every kind of block.
  EXPECT_GT(Us("130,300,700,fp16,step1_single_noswz,1,1"), 0);
  EXPECT_GT(Us("130,300,700,fp16,step3_double_swz5,1,1"), 0);
}

TEST(ValidateTest, WritesJsonAndGoesOnAfterBadRows) {
  const std::string csv = Temporary(
      "operators.csv",
      std::string(kOperators) +
          "910b2,sigmoid,1,\"[[1024, 1024]]\",\"[\"\"float16\"\"]\",{},Sigmoid,5.3\n"
          "910b2,maximum,5,\"[[64, 64], [64, 64]]\",\"[\"\"int64\"\", \"\"int64\"\"]\",{},Maximum,7\n"
          "910b2,sigmoid,7,\"[[10, -1]]\",\"[\"\"float16\"\"]\",{},Sigmoid,5.0\n"
          "910b9,sigmoid,9,\"[[10, 1]]\",\"[\"\"float16\"\"]\",{},Sigmoid,5.0\n");
  ValidateOptions options;
  options.file = csv;
  options.json = ::testing::TempDir() + "/cubist_validate.json";
  ASSERT_EQ(ValidateCommand(options), 2);  // Having told of the others.
  std::ifstream file(options.json);
  const nlohmann::json json = testing::ParseJson(file);
  ASSERT_EQ(json.at("rows").size(), 1u);
  const auto& row = json.at("rows")[0];
  EXPECT_EQ(row.at("case"), "sigmoid 1");
  EXPECT_DOUBLE_EQ(row.at("measured_us"), 5.3);
  const double predicted = row.at("predicted_us");
  EXPECT_NEAR(row.at("error").get<double>(), predicted / 5.3 - 1, 1e-9);
  EXPECT_LT(row.at("low_us").get<double>(), predicted);
  EXPECT_GT(row.at("high_us").get<double>(), predicted);
  EXPECT_DOUBLE_EQ(json.at("inside_interval"), 1);
  EXPECT_NEAR(json.at("median_interval_width").get<double>(),
              (row.at("high_us").get<double>() - row.at("low_us").get<double>()) / 2 / predicted, 1e-9);
  EXPECT_NEAR(json.at("mape").get<double>(), std::abs(predicted / 5.3 - 1), 1e-9);
  EXPECT_EQ(json.at("skipped").size(), 2u);
  EXPECT_NE(json.at("skipped")[0].at("reason").get<std::string>().find("int64"), std::string::npos);

  options.file = "/no/such.csv";
  EXPECT_EQ(ValidateCommand(options), 2);
}

// The less is known of how a kernel is scheduled, the wider its interval.
TEST(IntervalTest, WidensWithWhatIsNotKnown) {
  MeasuredRows rows;
  ASSERT_TRUE(
      ReadMeasured(Temporary("interval.csv",
                             std::string(kOperators) +
                                 "910b2,swi_glu,1,\"[[1024, 2048]]\",\"[\"\"float16\"\"]\",{},SwiGlu,15\n"),
                   &rows)
          .ok());
  const ChipSpec& chip = Ascend910B2();
  Recorded recorded = RecordRow(rows.rows.at(0), chip);
  ASSERT_EQ(recorded.skipped, "");
  const double us = PredictedUs(recorded.launches, chip);
  EXPECT_GT(us, kOperatorStart);
  const Interval any = AnySchedule(recorded.launches, chip);
  EXPECT_LT(any.low, us);
  EXPECT_GT(any.high, us);
  const auto width_as = [&](Schedule schedule) {
    recorded.schedule = schedule;
    const Interval interval = IntervalOf(recorded, chip, us);
    EXPECT_GT(interval.low, 0);
    EXPECT_LT(interval.low, us);
    EXPECT_GT(interval.high, us);
    return interval.high - interval.low;
  };
  const double known = width_as(Schedule::kKnown), standard = width_as(Schedule::kStandard),
               unknown = width_as(Schedule::kUnknown);
  EXPECT_GT(standard, 1.1 * known);
  EXPECT_GT(unknown, 1.1 * standard);
}

// Where the beginning is like the rest: a long permute first ranks, and fills L2 before HBM takes what it writes, and is told
// a wider interval than it has.
TEST(IntervalTest, ABeginningTellsWhatAllOfALaunchDoes) {
  const ChipSpec& chip = Ascend910B2();
  for (const auto& [kernel, shape] :
       {std::pair("matmul", "1024x4096x4096"), std::pair("flash_attention", "8x1024x128x128"),
        std::pair("token_permute", "2048x1024x8x64")}) {
    SCOPED_TRACE(kernel);
    KernelCallOptions options;
    options.kernel = kernel, options.shape = shape;
    KernelCall call;
    ASSERT_TRUE(MakeKernelCall(options, &call).ok());
    RecordedLaunch launch;
    ASSERT_TRUE(call(Npu(chip, {.with_data = false, .record = &launch.record})).ok());
    launch.plan = sync::PlanFlags(launch.record, sync::Policy::kMinimal);
    std::int64_t instructions = 0;
    for (const trace::Phase& phase : launch.record.phases) {
      for (const trace::CoreRecord& core : phase.cores) instructions += std::ssize(core.instrs);
    }
    const double us = PredictedUs({&launch, 1}, chip);
    const Interval exact = IntervalOf({&launch, 1}, chip, us);
    const Interval whole = IntervalFromBeginning(launch, chip, us, instructions);
    EXPECT_DOUBLE_EQ(whole.low, exact.low);
    EXPECT_DOUBLE_EQ(whole.high, exact.high);
    const Interval half = IntervalFromBeginning(launch, chip, us, instructions / 2);
    EXPECT_NEAR(half.high / us - 1, exact.high / us - 1, 0.35 * (exact.high / us - 1));
    EXPECT_NEAR(1 - half.low / us, 1 - exact.low / us, 0.35 * (1 - exact.low / us));
    EXPECT_LT(half.low, us);
    EXPECT_GT(half.high, us);
  }
}

TEST(IntervalTest, ErrorsOfBothAddAsIndependentOnes) {
  const Interval both = Together(100, {97, 103}, {96, 104});
  EXPECT_DOUBLE_EQ(both.low, 95);
  EXPECT_DOUBLE_EQ(both.high, 105);
  EXPECT_DOUBLE_EQ(Together(10, {0, 10}, {0, 20}).low, 0);
}

// The published targets, on all rows that are given.
TEST(ValidateTest, GroupsKeepToTheirTargets) {
  ValidateOptions options;
  options.json = ::testing::TempDir() + "/cubist_validate_all.json";
  options.intervals = false;
  ASSERT_EQ(ValidateCommand(options), 0);
  std::ifstream file(options.json);
  const nlohmann::json json = testing::ParseJson(file);
  EXPECT_LE(json.at("mape").get<double>(), 0.05);
  const auto mape = [&](const char* group) { return json.at("groups").at(group).at("mape").get<double>(); };
  EXPECT_LE(mape(kMemoryBound), 0.15);
  EXPECT_LE(mape("attention"), 0.25);
  EXPECT_LE(mape("vendor GEMM"), 0.1);
  EXPECT_LE(mape("grouped matmul"), 0.2);
  EXPECT_LE(mape("other vector"), 0.2);
  EXPECT_LE(10 * json.at("skipped").size(), json.at("rows").size() + json.at("skipped").size());
}

// Fused kernels of others, on whose times no constant was fitted.
TEST(ValidateTest, AttentionWithKnownBlocksIsWithinAQuarter) {
  ValidateOptions options;
  options.file = CUBIST_DATA_IN_SOURCE "/measured_attention_910b2.csv";
  options.json = ::testing::TempDir() + "/cubist_validate_blocks.json";
  options.intervals = false;
  ASSERT_EQ(ValidateCommand(options), 0);
  std::ifstream file(options.json);
  const nlohmann::json json = testing::ParseJson(file);
  EXPECT_EQ(json.at("rows").size(), 26u);
  EXPECT_LE(json.at("groups").at(kKnownBlocks).at("mape").get<double>(), 0.15);
  for (const nlohmann::json& row : json.at("rows"))
    EXPECT_LE(std::abs(row.at("error").get<double>()), 0.25) << row.at("case");
}

// asc-devkit's kernels, by what they differ in: quotients of two rows, measured and replayed, the latter on any chip that
// differs in costs alone.
class DevkitTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    MeasuredRows rows;
    ASSERT_TRUE(ReadMeasured(CUBIST_DATA_IN_SOURCE "/measured_devkit_910b1.csv", &rows).ok());
    EXPECT_TRUE(rows.bad.empty());
    for (const MeasuredRow& row : rows.rows) {
      Recorded recorded = RecordRow(row, Ascend910B1());
      EXPECT_EQ(recorded.skipped, "") << row.name;
      Rows().emplace(row.name, std::pair(row.us, std::move(recorded)));
    }
  }
  static void TearDownTestSuite() { Rows().clear(); }

  static double Measured(const std::string& more, const std::string& less) {
    return Rows().at(more).first / Rows().at(less).first;
  }
  static double Replayed(const std::string& more, const std::string& less,
                         const ChipSpec& chip = Ascend910B1()) {
    return PredictedUs(Rows().at(more).second.launches, chip) /
           PredictedUs(Rows().at(less).second.launches, chip);
  }
  // How much larger or smaller than measured the quotient is.
  static double Error(const std::string& more, const std::string& less) {
    return Replayed(more, less) / Measured(more, less) - 1;
  }

 private:
  static std::map<std::string, std::pair<double, Recorded>>& Rows() {
    static std::map<std::string, std::pair<double, Recorded>> rows;
    return rows;
  }
};

// Bursts of 128 bytes: 2.5 times as long in moves of one, and on their way to L1 1.3 times as long as whole lines, which the
// model makes 1.56.
TEST_F(DevkitTest, NarrowTilesTakeLonger) {
  EXPECT_LE(std::abs(Error("read_gm UB 1x64", "read_gm UB 64x64")), 0.1);
  EXPECT_LE(std::abs(Error("read_gm UB 64x64", "read_gm UB 64x1024")), 0.1);
  EXPECT_LE(std::abs(Error("read_gm L1 64x64", "read_gm L1 64x256")), 0.2);
}

// Rows from odd addresses on the way to L1: 2.0 times as long, 1.5 here. (On the way to UB 1.3, and not here.)
TEST_F(DevkitTest, OddRowsTakeLonger) {
  const double longer = Replayed("read_gm L1 64x256 odd columns", "read_gm L1 64x256");
  EXPECT_GE(longer, 1.4);
  EXPECT_LE(longer, Measured("read_gm L1 64x256 odd columns", "read_gm L1 64x256"));
}

// A quarter of the matrix has room in L2, and is found there three times of four; on a chip with too small a one it is not.
TEST_F(DevkitTest, SlicesAreFoundInL2) {
  ChipSpec small = Ascend910B1();
  small.memory.l2_bytes /= 4;
  for (const auto& [to, most] : {std::pair(std::string("UB"), 0.1), std::pair(std::string("L1"), 0.25)}) {
    const std::string whole = "read_gm " + to + " 64x1024 whole four times",
                      slices = "read_gm " + to + " 64x1024 slices four times";
    EXPECT_LE(std::abs(Error(whole, slices)), most) << to;
    EXPECT_NEAR(Replayed(whole, slices, small), 1, 0.05) << to;
  }
}

// What staggering along k and diagonals gain: 1.15 and 1.08, as measured. Cores that begin at one place all wait for what one
// of them fetches, at the pace of a single core's misses; where a core's misses are as quick as all of HBM, there is nothing to
// gain. Waits for the same line take no part.
TEST_F(DevkitTest, StaggeringFetchesSideBySide) {
  const std::string plain = "core_matmul 768x2048x6144", staggered = plain + " staggered";
  const std::string columns = "core_matmul 30720x1024x4096", diagonal = columns + " diagonal";
  EXPECT_LE(std::abs(Error(plain, staggered)), 0.04);
  EXPECT_LE(std::abs(Error(columns, diagonal)), 0.03);

  ChipSpec changed = Ascend910B1();
  changed.memory.core_miss_bytes_per_cycle.value = 0;
  EXPECT_LT(Replayed(plain, staggered, changed), 1);
  EXPECT_LT(Replayed(columns, diagonal, changed), 1.03);
  changed = Ascend910B1();
  changed.memory.same_line.value = 0;
  EXPECT_NEAR(Replayed(plain, staggered, changed), Replayed(plain, staggered), 0.01);
}

// Too long for every change; scripts/ci-full asks for it.
TEST(ValidateTest, DISABLED_IntervalsHoldWhatWasMeasured) {
  ValidateOptions options;
  options.json = ::testing::TempDir() + "/cubist_validate_intervals.json";
  ASSERT_EQ(ValidateCommand(options), 0);
  std::ifstream file(options.json);
  const nlohmann::json json = testing::ParseJson(file);
  EXPECT_GE(json.at("inside_interval").get<double>(), 0.9);
  EXPECT_LE(json.at("median_interval_width").get<double>(), 0.15);
}

// A product of a vendor's kernel: shape and what it took.
struct VendorProduct {
  MeasuredRow row;
  std::int64_t m, n, k;
  double us;
  bool transpose_b;

  double flops() const {
    return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  }
};

// Those of which the Cubes compute for at least half of the time.
std::vector<VendorProduct> ComputeBound(const ChipSpec& chip) {
  const double peak_flops = 2.0 * 16 * 16 * 16 * chip.clock_hz * chip.cube_cores;  // a Mmad step a cycle
  std::vector<VendorProduct> products;
  for (const char* file : {"measured_matmul_schedules_910b2.csv", "measured_ops_910b.csv"}) {
    MeasuredRows measured;
    EXPECT_TRUE(ReadMeasured(std::string(CUBIST_DATA_IN_SOURCE "/") + file, &measured).ok());
    for (const MeasuredRow& row : measured.rows) {
      if (row.chip != "ascend910b2" && !row.schedule) continue;
      VendorProduct p{row, 0, 0, 0, row.us, row.schedule};
      if (row.op == "torch_npu_matmul") {
        p.m = row.shapes[0][0], p.n = row.shapes[0][1], p.k = row.shapes[0][2];
      } else if (row.op == "gemm") {
        p.m = row.shapes[0][0], p.n = row.shapes[1][1], p.k = row.shapes[0][1];
      }
      if (p.flops() > 0.5 * peak_flops * p.us * 1e-6) products.push_back(p);
    }
  }
  return products;
}

// The library's own products beside the vendor's: not slower than well-tuned kernels are; and, but for Vector cores that read
// ahead, which the vendor's leave idle (with them 512 x 4096 x 4096 takes 0.73), not faster than can be.
void ExpectOursBesideTheVendors(double least_flops, double most_flops) {
  ChipSpec chip;
  ASSERT_TRUE(FindChip("ascend910b2", &chip).ok());
  int met = 0;
  for (const VendorProduct& p : ComputeBound(chip)) {
    if (p.flops() < least_flops || p.flops() >= most_flops) continue;
    ++met;
    MatmulArgs args;
    args.a = ConstTensor(nullptr, DType::kF16, {p.m, p.k});
    args.b = p.transpose_b ? ConstTensor(nullptr, DType::kF16, {p.n, p.k})
                           : ConstTensor(nullptr, DType::kF16, {p.k, p.n});
    args.transpose_b = p.transpose_b;
    args.c = Tensor(nullptr, DType::kF16, {p.m, p.n});
    Profile profile;
    ASSERT_TRUE(Matmul(Npu(chip, {.with_data = false}), args, &profile).ok());
    EXPECT_LE(profile.time_s * 1e6 / p.us, 1.02) << p.row.name;
    const Recorded recorded = RecordRow(p.row, chip);
    ASSERT_EQ(recorded.skipped, "") << p.row.name;
    EXPECT_GE(PredictedUs(recorded.launches, chip) / p.us, 0.75) << p.row.name;
  }
  EXPECT_GE(met, 4);
}

constexpr double kSmallProduct = 3.2e11;

TEST(ValidateTest, OurProductsStandBesideTheVendors) { ExpectOursBesideTheVendors(0, kSmallProduct); }
TEST(ValidateTest, DISABLED_OurLargeProductsStandBesideTheVendors) {
  ExpectOursBesideTheVendors(kSmallProduct, 1e15);
}

}  // namespace
}  // namespace cubist
