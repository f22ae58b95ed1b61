// LossScaler: what it does to gradients, and when its scale falls and grows.
#include "kernels/loss_scale.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"

namespace cubist::testing {
namespace {

TEST(LossScalerTest, DividesInPlace) {
  for (DType dtype : kFloatTypes) {
    Random random;
    Matrix gradient(dtype, {7, 5, 3}), other(dtype, {11});
    gradient.FillNormal(random, 0, 100), other.FillNormal(random, 0, 100);
    std::vector<double> expected = gradient.ToDoubles();
    for (double& v : expected) v /= 48;
    LossScaler scaler({.initial = 48});
    const Tensor all[] = {gradient.view(), other.view()};
    bool apply = false;
    ASSERT_TRUE(IsOk(scaler.Unscale(all, &apply)));
    EXPECT_TRUE(apply);
    for (double& v : expected) v = RoundTo(dtype, static_cast<float>(v));  // To fp32, then to the dtype.
    ExpectExactly(gradient.view(), expected);
    ExpectGuards(gradient), ExpectGuards(other);
  }
}

TEST(LossScalerTest, BacksOffAndLeavesTheGradientsAlone) {
  for (double bad : {kNaN, kInfinity, -kInfinity}) {
    Matrix good(DType::kF16, {4}), spoilt(DType::kF16, {3, 3});
    good.Fill(2), spoilt.Fill(3), spoilt.set({2, 1}, bad);
    const Matrix before = good;
    LossScaler scaler({.initial = 8, .least = 3});
    const Tensor all[] = {good.view(), spoilt.view()};
    bool apply = true;
    for (float scale : {4.0f, 3.0f, 3.0f}) {
      ASSERT_TRUE(IsOk(scaler.Unscale(all, &apply)));
      EXPECT_FALSE(apply);
      EXPECT_EQ(scaler.scale(), scale);
    }
    ExpectSameBits(good.view(), before.view());
  }
}

// By a scale below 1 a gradient grows; one that would be infinite then is none to apply.
TEST(LossScalerTest, QuotientsThatDoNotFitAreNotApplied) {
  for (const auto& [dtype, largest] : {std::pair(DType::kF16, 65504.0), std::pair(DType::kBF16, 0x1.fep127),
                                       std::pair(DType::kF32, 0x1.fffffep127)}) {
    SCOPED_TRACE(static_cast<int>(dtype));
    Matrix good(DType::kF32, {3}), large(dtype, {2, 3});
    good.Fill(2), large.Fill(-3), large.set({1, 2}, -largest);
    const Matrix good_before = good, large_before = large;
    LossScaler scaler({.initial = 0.75f, .growth_interval = 2, .least = 0.25f});
    const Tensor all[] = {good.view(), large.view()};
    bool apply = true;
    for (int step = 0; step < 3; ++step) {
      ASSERT_TRUE(IsOk(scaler.Unscale(all, &apply)));
      EXPECT_FALSE(apply);
      EXPECT_EQ(scaler.scale(), 0.75f);
      ExpectSameBits(good.view(), good_before.view());
      ExpectSameBits(large.view(), large_before.view());
    }
    large.set({1, 2}, -0.75 * largest);
    ASSERT_TRUE(IsOk(scaler.Unscale(all, &apply)));
    EXPECT_TRUE(apply);
    EXPECT_EQ(large.at({1, 2}), -largest);
    EXPECT_EQ(scaler.clean_steps(), 1);
  }
}

TEST(LossScalerTest, GrowsAfterCleanStepsInARow) {
  Matrix gradient(DType::kF32, {2});
  LossScaler scaler({.initial = 2, .growth_interval = 3, .most = 8});
  bool apply = false;
  const auto step = [&](double value) {
    gradient.Fill(value);
    const Tensor all[] = {gradient.view()};
    EXPECT_TRUE(IsOk(scaler.Unscale(all, &apply)));
    return scaler.scale();
  };
  EXPECT_EQ(step(1), 2);
  EXPECT_EQ(step(1), 2);
  EXPECT_EQ(step(kInfinity), 1);  // The count of clean steps starts again.
  EXPECT_EQ(step(1), 1);
  EXPECT_EQ(step(1), 1);
  EXPECT_EQ(step(1), 2);
  EXPECT_EQ(step(1), 2);
  EXPECT_EQ(step(1), 2);
  EXPECT_EQ(step(1), 4);
  for (int i = 0; i < 9; ++i) step(1);
  EXPECT_EQ(scaler.scale(), 8);
}

TEST(LossScalerTest, NamesBadArguments) {
  Matrix gradient(DType::kF32, {2}), ids(DType::kI32, {2});
  gradient.Fill(1);
  bool apply = false;
  const auto message = [&](const LossScaleOptions& options, const Tensor& x) {
    LossScaler scaler(options);
    const Tensor all[] = {x};
    return scaler.Unscale(all, &apply).message();
  };
  EXPECT_NE(message({.growth = 1}, gradient.view()).find("loss_scale: growth is 1"), std::string::npos);
  EXPECT_NE(message({.backoff = 1}, gradient.view()).find("loss_scale: backoff is 1"), std::string::npos);
  EXPECT_NE(message({.initial = 0.5f}, gradient.view()).find("loss_scale: initial is 0.5"),
            std::string::npos);
  EXPECT_NE(message({.initial = 1e-9f}, gradient.view())
                .find("initial is 1e-09, needs least to most, 1 to 16777216"),
            std::string::npos);
  EXPECT_NE(message({.most = INFINITY}, gradient.view()).find("most is inf"), std::string::npos);
  EXPECT_NE(message({.growth_interval = -1}, gradient.view()).find("growth_interval is -1, needs"),
            std::string::npos);
  EXPECT_NE(message({}, ids.view()).find("gradients[0] is int32"), std::string::npos);
  Tensor odd = gradient.view();
  odd.rank = 7;
  EXPECT_NE(message({}, odd).find("gradients[0] has rank 7, needs 1 to 6"), std::string::npos);
  odd.rank = 1, odd.sizes[0] = -2;
  EXPECT_NE(message({}, odd).find("gradients[0] has size -2"), std::string::npos);
  EXPECT_NE(message({}, Tensor()).find("not given"), std::string::npos);
  const Tensor all[] = {gradient.view()};
  EXPECT_EQ(LossScaler().Unscale(all, nullptr).message(), "loss_scale: apply is a null pointer");
}

// It would be divided twice.
TEST(LossScalerTest, OneGradientMayNotStandInTheListTwice) {
  Matrix gradient(DType::kF16, {6});
  gradient.Fill(8);
  const Matrix before = gradient;
  LossScaler scaler;
  const Tensor last_two(static_cast<F16*>(gradient.view().data) + 4, {2});
  const Tensor all[] = {gradient.view(), last_two};
  bool apply = true;
  const std::string message = scaler.Unscale(all, &apply).message();
  EXPECT_NE(message.find("gradients[1] overlaps gradients[0]"), std::string::npos) << message;
  ExpectSameBits(gradient.view(), before.view());
  EXPECT_EQ(scaler.clean_steps(), 0);
}

}  // namespace
}  // namespace cubist::testing
