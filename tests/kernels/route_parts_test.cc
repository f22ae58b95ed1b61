// Route and its gradient on chips whose UB holds no whole row: experts in parts.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "kernels/route.h"
#include "npu_model/tuning.h"
#include "reference/route.h"
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/route_call.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

// A chip with so much UB that computes, and the widths of the tiles that Route and RouteGrad last chose.
struct SmallChip {
  explicit SmallChip(std::int64_t bytes) {
    tuning->on_choice = [this](const TilingChoice& met) {
      const std::string field = ",cols=";
      cols[met.kernel] = std::stoll(met.chosen.substr(met.chosen.find(field) + field.size()));
    };
    device = Npu(WithCapacity(Buffer::kUB, bytes), {.with_data = true, .tuning = tuning});
  }
  bool Cuts(const char* kernel, std::int64_t experts) const { return cols.at(kernel) < experts; }

  std::shared_ptr<Tuning> tuning = std::make_shared<Tuning>();
  std::map<std::string, std::int64_t> cols;
  Device device;
};

struct Cuts {
  int forward = 0, backward = 0;
};

// The call on chips with ever less UB, until it fits no more; how often its experts were cut, in another way each time.
Cuts ExpectRoutesInParts(const RouteCase& c) {
  Cuts cuts;
  std::map<std::string, std::int64_t> before;
  for (std::int64_t bytes = 96 << 10; bytes >= 256; bytes = bytes * 2 / 3 / 32 * 32) {
    SmallChip chip(bytes);
    RouteCall call(c);
    const Status status = Route(chip.device, call.args());
    if (!status.ok()) {
      EXPECT_EQ(status.code(), StatusCode::kUnsupported) << status.message();
      EXPECT_NE(status.message().find(Join("small chip has ", bytes)), std::string::npos) << status.message();
      EXPECT_TRUE(std::isnan(call.aux_loss.at({0})));
      break;
    }
    if (!chip.Cuts("route", c.experts)) continue;
    EXPECT_TRUE(IsOk(RouteGrad(chip.device, call.grad_args())));
    if (chip.cols == before) continue;
    before = chip.cols;
    SCOPED_TRACE(Join("parts of ", chip.cols["route"], " and ", chip.cols["route_grad"]));
    ExpectRoutes(chip.device, c);
    ++cuts.forward;
    cuts.backward += chip.Cuts("route_grad", c.experts) ? 1 : 0;
  }
  return cuts;
}

class RouteInPartsTest : public ::testing::TestWithParam<RouteCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, RouteInPartsTest, ::testing::ValuesIn(RouteCases()), ShapeName());

TEST_P(RouteInPartsTest, AgreesWithTheReference) {
  const RouteCase& c = GetParam();
  const Cuts cuts = ExpectRoutesInParts(c);
  EXPECT_TRUE(cuts.forward > 0 || c.experts < 60) << c.experts;
  EXPECT_LE(cuts.backward, cuts.forward);
}

TEST(RoutePartsTest, RandomCallsAgreeWithTheReference) {
  Cuts all;
  for (std::uint64_t seed = 101; seed <= 140; ++seed) {
    const Cuts cuts = ExpectRoutesInParts(RandomRouteCase(seed));
    all.forward += cuts.forward, all.backward += cuts.backward;
  }
  EXPECT_GT(all.forward, 40);
  EXPECT_GT(all.backward, 20);
}

// The call on chips with ever less UB, whose routes are those of `host`; check(call). How often its experts were cut.
template <class Check>
int RouteInParts(const RouteCase& c, const RouteCall& host, Check check) {
  int cut = 0;
  for (std::int64_t bytes = 12 << 10; bytes >= 1 << 10; bytes = bytes * 3 / 4 / 32 * 32) {
    SmallChip chip(bytes);
    RouteCall call(c);
    call.logits = host.logits, call.bias = host.bias;
    if (!Route(chip.device, call.args()).ok()) break;
    SCOPED_TRACE(Join("top ", c.top_k, " of ", c.options.groups, " groups, parts of ", chip.cols["route"]));
    cut += chip.Cuts("route", c.experts) ? 1 : 0;
    ExpectSameBits(call.ids.view(), host.ids.view());
    ExpectSameBits(call.counts.view(), host.counts.view());
    check(call);
  }
  return cut;
}

// A token with fewer experts left than it has routes, in its groups or at all.
TEST(RoutePartsTest, LeftOutExpertsAreTheHosts) {
  for (const auto& [top_k, options] :
       {std::pair(100, RouteOptions{.expert_dropout = 0.5f, .seed = 3}),
        std::pair(120, RouteOptions{.score = ScoreFunction::kSigmoid, .expert_dropout = 0.1f, .seed = 4}),
        std::pair(36, RouteOptions{.groups = 3, .top_groups = 1, .expert_dropout = 0.5f, .seed = 5}),
        std::pair(20, RouteOptions{.groups = 12, .top_groups = 2, .expert_dropout = 0.5f, .seed = 6})}) {
    const RouteCase c{"left out", 5, 120, top_k, options, /*biased=*/true};
    const std::int64_t routes = top_k;
    RouteCall host(c);
    ASSERT_TRUE(IsOk(Route(Host(), host.args())));
    int left_out = 0;
    for (std::int64_t j = 0; j < routes; ++j) left_out += host.ids.at({0, j}) < 0 ? 1 : 0;
    EXPECT_GT(left_out, 0);
    const int cut = RouteInParts(c, host, [&](const RouteCall& call) {
      for (std::int64_t j = 0; j < routes; ++j)
        EXPECT_EQ(call.weights.at({0, j}) == 0, host.ids.at({0, j}) < 0);
    });
    EXPECT_GT(cut, 0);
  }
}

TEST(RoutePartsTest, BiasesOfMinusInfinityLeaveTheHostsExpertsOut) {
  const RouteCase c{"minus infinity", 5, 120, 30, {.score = ScoreFunction::kSigmoid}, /*biased=*/true};
  const auto leave_out = [](RouteCall& call) {
    for (std::int64_t e = 0; e < 120; ++e) {
      if (e % 5 != 0) call.bias.set({e}, -kInfinity);
    }
  };
  RouteCall host(c);
  leave_out(host);
  ASSERT_TRUE(IsOk(Route(Host(), host.args())));
  for (std::int64_t j = 0; j < 30; ++j) EXPECT_EQ(host.ids.at({0, j}) < 0, j >= 24);
  const int cut = RouteInParts(
      c, host, [&](const RouteCall& call) { ExpectSameBits(call.weights.view(), host.weights.view()); });
  EXPECT_GT(cut, 0);
}

// Logits of four values, so that almost every choice is one among equals, within parts and across them, and of groups.
TEST(RoutePartsTest, TiesAreTheHosts) {
  for (const RouteOptions& options :
       {RouteOptions{.score = ScoreFunction::kSigmoid},
        RouteOptions{.score = ScoreFunction::kSigmoid, .groups = 12, .top_groups = 5, .group_top = 2},
        RouteOptions{.score = ScoreFunction::kSigmoid, .groups = 2, .top_groups = 1, .group_top = 7},
        RouteOptions{
            .score = ScoreFunction::kSigmoid, .groups = 3, .top_groups = 2, .expert_dropout = 0.5f}}) {
    for (const std::int64_t top_k : {1, 7, 40}) {
      for (const bool biased : {false, true}) {
        const RouteCase c{"ties", 9, 120, top_k, options, biased};
        RouteCall host(c);
        Random random(RunSeed() + 7);
        for (std::int64_t i = 0; i < 9 * 120; ++i)
          host.logits.set({i / 120, i % 120}, static_cast<double>(random.Integer(0, 3)) / 4);
        host.bias.Fill(0.5);
        ASSERT_TRUE(IsOk(Route(Host(), host.args())));
        const int cut = RouteInParts(
            c, host, [&](const RouteCall& call) { ExpectSameBits(call.scores.view(), host.scores.view()); });
        EXPECT_GT(cut, 0);
      }
    }
  }
}

TEST(RoutePartsTest, BadLogitsAreFoundCountedAndReplaced) {
  for (const BadLogits policy : {BadLogits::kZero, BadLogits::kMean}) {
    for (const ScoreFunction score : kScoreFunctions) {
      const RouteCase c{"bad", 6, 300, 3, {.score = score, .bad_logits = policy, .limit = 100}};
      SmallChip chip(4 << 10);
      RouteCall call(c);
      call.logits.set({1, 3}, kNaN), call.logits.set({1, 9}, kInfinity), call.logits.set({4, 299}, -101);
      for (std::int64_t e = 0; e < 300; ++e) call.logits.set({5, e}, kNaN);
      ASSERT_TRUE(IsOk(Route(chip.device, call.args())));
      ASSERT_TRUE(chip.Cuts("route", 300));
      const auto expected = reference::Route(call.logits.view(), {}, 3, ReferenceOptions(call.options));
      ExpectExactly(call.bad.view(), expected.bad);
      EXPECT_EQ(expected.bad, (std::vector<double>{0, 2, 0, 0, 1, 300}));
      ExpectNear(call.scores, expected.scores, 0x1p-19, 1e-30);
    }
  }
}

// Without outputs that only some callers want, scores pass through a workspace.
TEST(RoutePartsTest, OutputsMayBeLeftOut) {
  const RouteCase c{"few outputs", 30, 300, 4, {.score = ScoreFunction::kSigmoid}, true};
  RouteCall host(c), call(c);
  SmallChip chip(4 << 10);
  ASSERT_TRUE(IsOk(Route(Host(), host.args())));
  RouteArgs args = call.args();
  args.scores = {}, args.counts = {}, args.aux_loss = {}, args.bad = {};
  ASSERT_TRUE(IsOk(Route(chip.device, args)));
  ASSERT_TRUE(chip.Cuts("route", 300));
  ExpectSameBits(call.ids.view(), host.ids.view());
  ExpectSameBits(call.weights.view(), host.weights.view());
}

TEST(RoutePartsTest, ManyExperts) {
  const RouteOptions options = {.score = ScoreFunction::kSigmoid, .renormalise = true, .aux_coefficient = 1};
  for (const std::int64_t experts : {8100, 8176, 8177, 20000}) {
    const RouteCase c{Join(experts, "_experts"), 3, experts, 4, options, true};
    ExpectRoutes(NpuWithData(Ascend910B2()), c);
    ExpectRoutes(Host(), c);
  }
  const std::int64_t million = std::int64_t{1} << 20;
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    ExpectRoutes(device, {"a_million_experts", 2, million, 5, options});
    ExpectRoutes(device, {"a_million_in_groups",
                          1,
                          million,
                          300,
                          {.score = ScoreFunction::kSqrtSoftplus, .groups = 1024, .top_groups = 3}});
    ExpectRoutes(device, {"many_by_softmax", 2, 30000, 20, {.groups = 4, .top_groups = 2}});
  }
}

// What does not fit is refused before anything is written.
TEST(RoutePartsTest, TooManyRoutesForAChip) {
  RouteCall call({"too_many", 2, 20000, 15000, {.aux_coefficient = 1}});
  const Status status = Route(NpuWithData(Ascend910B2()), call.args());
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_EQ(
      status.message(),
      "route: K is 15000, needs at most 4088 where 20000 experts do not fit UB, of which ascend910b2 has "
      "196608 bytes");
  for (const Matrix* x : {&call.weights, &call.scores, &call.aux_loss, &call.bad})
    EXPECT_TRUE(std::isnan(x->ToDoubles()[0]));
}

}  // namespace
}  // namespace cubist::testing
