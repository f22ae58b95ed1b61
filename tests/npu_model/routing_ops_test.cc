// Bodies of the router's selection against their definitions, with ties, NaN, infinities and rows of any length.
#include "npu_model/host/routing_ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iterator>
#include <numeric>
#include <vector>

#include "npu_model/host/activation_ops.h"
#include "tests/npu_model/tile_ops_support.h"

namespace cubist::tile_ops {
namespace {

// What rows may hold.
enum class Contents { kReals, kTies, kSpecial, kAscending, kMostlyGone };
constexpr Contents kContents[] = {Contents::kReals, Contents::kTies, Contents::kSpecial, Contents::kAscending,
                                  Contents::kMostlyGone};

void FillWith(Contents contents, const Matrix<float>& x, Random& random) {
  const float special[] = {0.0f, -0.0f, kInfinity, -kInfinity, kNaN, 0x1p-140f, -0x1p-140f, 0x1p127f};
  std::int64_t at = 0;
  x.Fill([&]() -> float {
    ++at;
    switch (contents) {
      case Contents::kTies:
        return random.Small();
      case Contents::kSpecial:
        return at % 3 == 0 ? random.Real() : special[at / 3 % 8];
      case Contents::kAscending:
        return static_cast<float>(at);
      case Contents::kMostlyGone:  // Fewer numbers than are selected, in some rows.
        return at % 11 == 0 ? random.Real() : (at % 7 == 0 ? kNaN : -kInfinity);
      case Contents::kReals:
        break;
    }
    return random.Real();
  });
}

TEST_P(TileOpsTest, TopK) {
  const RoutingOps& ops = BestRoutingOps();
  Random random(5);
  for (const std::int64_t cols : {1, 2, 5, 8, 15, 16, 17, 31, 32, 33, 47, 64, 100, 256, 1000, 66000}) {
    for (const std::int64_t k : {1, 4, 7, 8, 9, 15, 16, 40}) {
      if (k > cols || (cols > 256 && k != 8 && k != 40)) continue;
      for (const std::int64_t rows : {1, 8, 19}) {
        if (cols > 1000 && rows > 1) continue;
        for (const Contents contents : kContents) {
          SCOPED_TRACE(::testing::Message() << rows << " x " << cols << ", " << k << " highest of contents "
                                            << static_cast<int>(contents));
          Matrix<float> a(rows, cols, cols + 3), values(rows, k, k + 1);
          Matrix<std::int32_t> ids(rows, k, k + 2);
          FillWith(contents, a, random);
          ops.top_k(values.view(), ids.view(), a.view());
          for (std::int64_t i = 0; i < rows; ++i) {
            const auto key = [&](std::int64_t j) { return std::isnan(a(i, j)) ? -kInfinity : a(i, j); };
            std::vector<std::int32_t> order(Index(cols));
            std::iota(order.begin(), order.end(), 0);
            std::stable_sort(order.begin(), order.end(),
                             [&](std::int32_t x, std::int32_t y) { return key(x) > key(y); });
            for (std::int64_t j = 0; j < k; ++j) {
              ASSERT_EQ(ids(i, j), order[Index(j)]) << i << ", " << j;
              ASSERT_EQ(values(i, j), key(order[Index(j)])) << i << ", " << j;
            }
          }
        }
      }
    }
  }
}

TEST_P(TileOpsTest, GroupTop) {
  const RoutingOps& ops = BestRoutingOps();
  Random random(6);
  for (const std::int64_t width : {1, 2, 3, 15, 16, 17, 32, 33, 64, 70}) {
    for (const std::int64_t groups : {1, 3, 8, 16, 21}) {
      for (const std::int64_t count : {1, 2, 3}) {
        if (count > width) continue;
        const std::int64_t rows = 5;
        Matrix<float> a(rows, groups * width, groups * width + 2), sums(rows, groups, groups + 1);
        a.Fill([&] { return random.Real() < -0.9f ? -kInfinity : random.Small(); });
        ops.group_top(sums.view(), a.view(), count);
        for (std::int64_t i = 0; i < rows; ++i) {
          for (std::int64_t g = 0; g < groups; ++g) {
            std::vector<float> part(&a(i, g * width), &a(i, g * width) + width);
            std::sort(part.begin(), part.end(), std::greater<>());
            float expected = part[0];
            for (std::size_t j = 1; j < Index(count) && part[j] > -kInfinity; ++j) expected += part[j];
            ASSERT_EQ(sums(i, g), expected)
                << "part " << g << " of row " << i << ", " << count << " of " << width;
          }
        }
      }
    }
  }
}

TEST_P(TileOpsTest, KeepGroups) {
  const RoutingOps& ops = BestRoutingOps();
  Random random(7);
  for (const std::int64_t width : {1, 3, 16, 32, 35}) {
    for (const std::int64_t groups : {1, 4, 63, 64, 65, 130}) {
      for (const std::int64_t last : {width, (width + 1) / 2}) {  // Columns of the last group.
        const std::int64_t cols = (groups - 1) * width + last, kept = (groups + 1) / 2;
        Matrix<float> a(3, cols, cols + 1), before(3, cols, cols);
        Matrix<std::int32_t> ids(3, kept, kept);
        before.Fill([&] { return random.Real(); });
        std::int32_t next = 0;
        ids.Fill([&] { return next = (next + 3) % static_cast<std::int32_t>(groups + 1) - (next % 5 == 4); });
        for (std::int64_t i = 0; i < 3; ++i) std::copy_n(&before(i, 0), cols, &a(i, 0));
        ops.keep_groups(a.view(), ids.view(), width);
        for (std::int64_t i = 0; i < 3; ++i) {
          for (std::int64_t j = 0; j < cols; ++j) {
            const bool keeps = std::find(&ids(i, 0), &ids(i, 0) + kept, j / width) != &ids(i, 0) + kept;
            ASSERT_EQ(a(i, j), keeps ? before(i, j) : -kInfinity) << i << ", " << j << " of groups " << width;
          }
        }
      }
    }
  }
}

// One body, and one for each step.
void CheckGroupedTopK(std::int64_t rows, std::int64_t width, std::int64_t groups, std::int64_t kept_groups,
                      std::int64_t k, std::int64_t summed, bool biased, Contents contents, Random& random) {
  SCOPED_TRACE(::testing::Message() << rows << " rows, " << kept_groups << " of " << groups << " groups of "
                                    << width << ", " << k << " highest, sums of " << summed << ", biased "
                                    << biased << ", contents " << static_cast<int>(contents));
  const RoutingOps& ops = BestRoutingOps();
  const std::int64_t cols = groups * width;
  Matrix<float> a(rows, cols, cols + 3), bias(1, cols, cols), choice(rows, cols, cols + 1),
      sum(rows, cols, cols), worths(rows, groups, groups + 1), best(rows, kept_groups, kept_groups + 1),
      values(rows, k, k + 1), expected(rows, k, k + 1);
  Matrix<std::int32_t> kept(rows, kept_groups, kept_groups + 1), ids(rows, k, k + 2),
      expected_ids(rows, k, k + 2);
  FillWith(contents, a, random);
  bias.Fill([&] { return random.Small(); });
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) sum(i, j) = biased ? a(i, j) + bias(0, j) : a(i, j);
  }
  ops.group_top(worths.view(), sum.view(), summed);
  ops.top_k(best.view(), kept.view(), worths.view());
  ops.keep_groups(sum.view(), kept.view(), width);
  ops.top_k(expected.view(), expected_ids.view(), sum.view());
  ops.grouped_top_k({values.view(), ids.view(), a.view(), biased ? bias.view() : Rows(), choice.view(),
                     worths.view(), best.view(), kept.view()},
                    summed);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < k; ++j) {
      ASSERT_EQ(ids(i, j), expected_ids(i, j)) << i << ", " << j;
      ASSERT_EQ(values(i, j), expected(i, j)) << i << ", " << j;
    }
  }
}

TEST_P(TileOpsTest, GroupedTopK) {
  constexpr std::int64_t kRows[] = {16, 1, 19, 7};
  Random random(9);
  std::size_t turn = 0;
  for (const std::int64_t width : {1, 7, 8, 16, 17, 24, 32, 40, 64, 100}) {
    for (const std::int64_t groups : {1, 2, 5, 8, 9, 17}) {
      for (const std::int64_t kept : {std::int64_t{1}, (groups + 1) / 2, groups}) {
        for (const std::int64_t k : {1, 5, 8, 9}) {
          for (const std::int64_t summed : {1, 2, 3}) {
            if (k > kept * width || summed > width) continue;
            const Contents contents = kContents[turn % std::size(kContents)];
            for (const bool biased : {false, true})
              CheckGroupedTopK(kRows[turn % std::size(kRows)], width, groups, kept, k, summed, biased,
                               contents, random);
            ++turn;
          }
        }
      }
    }
  }
  for (const Contents contents : kContents) CheckGroupedTopK(37, 32, 8, 4, 8, 2, true, contents, random);
}

TEST_P(TileOpsTest, AllWithin) {
  const RoutingOps& ops = BestRoutingOps();
  for (const std::int64_t cols : Columns()) {
    Matrix<float> x(2, cols, cols + 1);
    for (const float value : {2.0f, -2.0f, 2.5f, -2.5f, kInfinity, -kInfinity, kNaN}) {
      for (const std::int64_t at : {std::int64_t{0}, cols - 1, 2 * cols - 1}) {
        x.Fill([] { return 1.0f; });
        x(at / cols, at % cols) = value;
        ASSERT_EQ(ops.all_within(x.view(), 2.0f), std::abs(value) <= 2.0f) << value << " at " << at;
      }
    }
  }
}

// The sum of a row of 2^20 is off by a few roundings, not by as many as it has terms.
TEST_P(TileOpsTest, SoftmaxOfManyColumns) {
  const std::int64_t cols = 1 << 20;
  Random random(10);
  Matrix<float> x(1, cols, cols), n(1, cols, cols);
  x.Fill([&] { return random.Real(); });
  BestActivationOps().scores(ScoreFunction::kSoftmax, n.view(), x.view());
  double sum = 0;
  for (std::int64_t j = 0; j < cols; ++j) sum += std::exp(static_cast<double>(x(0, j)));
  for (std::int64_t j = 0; j < cols; ++j) {
    const double expected = std::exp(static_cast<double>(x(0, j))) / sum;
    ASSERT_NEAR(n(0, j), expected, 10 * kEps * expected) << j;
  }
}

TEST_P(TileOpsTest, Scores) {
  const ActivationOps& ops = BestActivationOps();
  for (const std::int64_t cols : Columns()) {
    Random random(8);
    Matrix<float> x(3, cols, cols + 1), n(3, cols, cols + 1);
    x.Fill([&] { return random.Real(-100.0f, 100.0f) * random.Real(); });
    x(0, 0) = kNaN, x(1, 0) = 200.0f, x(2, 0) = -170.0f;
    const auto run = [&](ScoreFunction function) {
      Matrix<float> elsewhere(3, cols, cols + 2);
      ops.scores(function, elsewhere.view(), x.view());
      for (std::int64_t i = 0; i < 3; ++i) std::copy_n(&x(i, 0), cols, &n(i, 0));
      ops.scores(function, n.view(), n.view());
      for (std::int64_t i = 0; i < 3; ++i) {
        for (std::int64_t j = 0; j < cols; ++j) ASSERT_EQ(BitsOf(n(i, j)), BitsOf(elsewhere(i, j)));
      }
    };
    const auto expect = [&](const char* name, const std::function<double(double)>& formula) {
      for (std::int64_t i = 0; i < 3; ++i) {
        for (std::int64_t j = 0; j < cols; ++j) {
          const double expected = formula(static_cast<double>(x(i, j)));
          if (std::isnan(expected)) {
            ASSERT_TRUE(std::isnan(n(i, j))) << name;
          } else {
            ASSERT_NEAR(n(i, j), expected, 4 * kEps * expected + 0x1p-148) << name << " of " << x(i, j);
          }
        }
      }
    };
    run(ScoreFunction::kSigmoid);
    expect("sigmoid", [](double v) { return 1 / (1 + std::exp(-v)); });
    run(ScoreFunction::kSqrtSoftplus);
    expect("sqrt-softplus", [](double v) {
      return std::isnan(v) ? v : std::sqrt(std::max(v, 0.0) + std::log1p(std::exp(-std::abs(v))));
    });
    x(0, 0) = 1.0f;
    run(ScoreFunction::kSoftmax);
    for (std::int64_t i = 0; i < 3; ++i) {
      double most = -HUGE_VAL, sum = 0;
      for (std::int64_t j = 0; j < cols; ++j) most = std::max(most, static_cast<double>(x(i, j)));
      for (std::int64_t j = 0; j < cols; ++j) sum += std::exp(static_cast<double>(x(i, j)) - most);
      for (std::int64_t j = 0; j < cols; ++j) {
        const double difference = static_cast<double>(x(i, j)) - most, expected = std::exp(difference) / sum;
        ASSERT_NEAR(n(i, j), expected, (8 - difference) * kEps * expected + 0x1p-148) << i << ", " << j;
      }
    }
  }
}

}  // namespace
}  // namespace cubist::tile_ops
