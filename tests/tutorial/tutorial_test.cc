// The steps of kernels/TUTORIAL.md, in its order.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "npu_model/sync/check.h"
#include "npu_model/sync/plan.h"
#include "npu_model/trace/record.h"
#include "reference/bounds.h"
#include "reference/matmul.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/tutorial/matmul_silu.h"

namespace tutorial {
namespace {

using cubist::testing::ExpectClose;
using cubist::testing::Matrix;
using cubist::testing::Random;

struct Problem {
  Problem(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k)
      : a(dtype, {m, k}), b(dtype, {k, n}), bias(DType::kF32, {n}), out(dtype, {m, n}) {
    Random random(3);
    a.FillNormal(random), b.FillNormal(random), bias.FillNormal(random);
  }
  MatmulSiluArgs Args() {
    return {std::as_const(a).view(), std::as_const(b).view(), std::as_const(bias).view(), out.view()};
  }

  Matrix a, b, bias, out;
};

// [reference]
// What is right, in double, and how far from it a right answer may be.
void ExpectSilu(Problem& problem) {
  const MatmulSiluArgs args = problem.Args();
  const reference::MatmulResult product = reference::Matmul(args.a, false, args.b, false, args.bias);
  const std::vector<double> bounds =
      reference::MatmulBounds(product, args.a.size(1), args.a.dtype, DType::kF32);
  std::vector<double> expected, allowed;
  for (std::size_t i = 0; i < product.c.size(); ++i) {
    const double x = product.c[i], y = x / (1 + std::exp(-x));
    // silu's slope is at most 1.1; exp errs by kExpError, and three more operations round.
    const double error =
        1.1 * bounds[i] + std::abs(y) * (reference::kExpError + reference::Gamma(4, 0x1p-24));
    expected.push_back(y);
    allowed.push_back(error + reference::OutputRounding(args.out.dtype, y, error) +
                      reference::kSmallestNormal);
  }
  ExpectClose(args.out, expected, allowed);
}
// [reference]

// [step 1]
TEST(Tutorial, OneTileComputesAndIsModelled) {
  Problem problem(DType::kBF16, 48, 64, 96);
  ASSERT_TRUE(OneTile(Host(), problem.Args()).ok());
  ExpectSilu(problem);

  problem.out.FillNaN();
  Profile profile;
  ASSERT_TRUE(OneTile(Npu(Ascend910B2()), problem.Args(), &profile).ok());
  ExpectSilu(problem);  // The model computes too, with the chip's tiles.
  EXPECT_EQ(profile.macs, 48 * 64 * 96);
  EXPECT_EQ(profile.cores_used, 1);
}

TEST(Tutorial, OneTileDoesNotFitForLong) {
  Problem problem(DType::kBF16, 256, 256, 256);
  const Status status = OneTile(Npu(Ascend910B2()), problem.Args());
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("L0A"), std::string::npos) << status.message();
}
// [step 1]

// [step 2]
TEST(Tutorial, AnyShapeOnBothExecutors) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const auto& [m, n, k] :
         {std::array<std::int64_t, 3>{1, 1, 1}, {17, 33, 65}, {300, 200, 130}, {16, 48, 4096}, {5, 0, 3}}) {
      SCOPED_TRACE(std::string(NameOf(dtype)) + " " + std::to_string(m) + "x" + std::to_string(n));
      Problem problem(dtype, m, n, k);
      ASSERT_TRUE(MatmulSilu(Host(), problem.Args()).ok());
      ExpectSilu(problem);
      problem.out.FillNaN();
      ASSERT_TRUE(MatmulSilu(Npu(Ascend910B2()), problem.Args()).ok());
      ExpectSilu(problem);
    }
  }
}

TEST(Tutorial, ErrorsNameTheArgument) {
  Problem problem(DType::kBF16, 8, 8, 8), other(DType::kBF16, 8, 8, 9);
  MatmulSiluArgs args = problem.Args();
  args.b = other.Args().b;
  EXPECT_EQ(MatmulSilu(Host(), args).message().rfind("matmul_silu: b ", 0), 0u);
}
// [step 2]

trace::Record RecordOf(std::int64_t m, std::int64_t n, std::int64_t k, Profile* profile = nullptr) {
  Problem problem(DType::kBF16, m, n, k);
  trace::Record record;
  const Status status =
      MatmulSilu(Npu(Ascend910B2(), {.with_data = false, .record = &record}), problem.Args(), profile);
  EXPECT_TRUE(status.ok()) << status.message();
  return record;
}

// [step 3]
TEST(Tutorial, FlagsArePlannedAndProved) {
  const trace::Record record = RecordOf(300, 500, 400);
  sync::Plan plan = sync::PlanFlags(record, sync::Policy::kMinimal);
  EXPECT_TRUE(sync::Check(record, plan).ok());
  EXPECT_TRUE(plan.shortages.empty());

  // Without one of them the checker names the race.
  std::vector<sync::SyncOp>& ops = plan.phases[0].cores[0].ops;
  ops.erase(std::find_if(ops.begin(), ops.end(), [](const sync::SyncOp& op) {
    return op.kind == sync::Kind::kWaitFlag && op.pipe == Pipe::kM;
  }));
  EXPECT_FALSE(sync::Check(record, plan).ok());
}
// [step 3]

// [step 4]
TEST(Tutorial, FusedMovesFewerBytesThanTheProductAndThenTheActivation) {
  Profile profile;
  RecordOf(2048, 4096, 1024, &profile);
  const std::int64_t out_bytes = 2 * 2048 * 4096;
  // The result is written once, in bf16. What crosses to the Vector cores is fp32 there and back.
  EXPECT_EQ(profile.path_bytes[static_cast<std::size_t>(Path::kUbToGm)], out_bytes);
  EXPECT_EQ(profile.path_bytes[static_cast<std::size_t>(Path::kL0CToGm)], 2 * out_bytes);
}
// [step 4]

// [step 5]
// The tilings that a call considers, tried on the model: the quickest of the `budget` cheapest by price.
Status Tune(const ChipSpec& chip, const MatmulSiluArgs& args, std::size_t budget, Tuning* tuned) {
  TilingChoice choice;
  auto listening = std::make_shared<Tuning>();
  listening->on_choice = [&](const TilingChoice& c) { choice = c; };
  CUBIST_RETURN_IF_ERROR(MatmulSilu(Npu(chip, {.with_data = false, .tuning = listening}), args));
  std::sort(choice.candidates.begin(), choice.candidates.end(),
            [](const auto& x, const auto& y) { return x.price < y.price; });
  double best = 0;
  for (std::size_t i = 0; i < std::min(budget, choice.candidates.size()); ++i) {
    auto tuning = std::make_shared<Tuning>();
    tuning->Set(choice.kernel, choice.chip, choice.shape, choice.candidates[i].tiling);
    Profile profile;
    CUBIST_RETURN_IF_ERROR(MatmulSilu(Npu(chip, {.with_data = false, .tuning = tuning}), args, &profile));
    if (best == 0 || profile.time_s < best) best = profile.time_s, *tuned = *tuning;
  }
  return {};
}

TEST(Tutorial, TuningFindsATilingThatIsAtLeastAsQuick) {
  Problem problem(DType::kBF16, 384, 1536, 1024);
  Profile chosen, tuned;
  ASSERT_TRUE(MatmulSilu(Npu(Ascend910B2(), {.with_data = false}), problem.Args(), &chosen).ok());
  auto tuning = std::make_shared<Tuning>();
  ASSERT_TRUE(Tune(Ascend910B2(), problem.Args(), 12, tuning.get()).ok());
  ASSERT_EQ(tuning->size(), 1u);
  ASSERT_TRUE(
      MatmulSilu(Npu(Ascend910B2(), {.with_data = false, .tuning = tuning}), problem.Args(), &tuned).ok());
  EXPECT_LE(tuned.time_s, chosen.time_s);
}
// [step 5]

}  // namespace
}  // namespace tutorial
