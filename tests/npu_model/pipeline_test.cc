#include "npu_model/pipeline.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace cubist {
namespace {

// The stages that a pipeline of A, B, .. issues for `count` steps, as "A0 A1 B0 ..".
template <std::size_t... kStage>
std::string OrderOf(std::int64_t depth, std::int64_t count, std::index_sequence<kStage...>) {
  std::string order;
  const auto note = [&](char name, std::int64_t step) {
    if (!order.empty()) order += ' ';
    order += name + std::to_string(step);
  };
  std::int64_t made = 0;
  Pipeline<std::int64_t>(
      depth,
      [&](std::int64_t& step) {
        step = made;
        return made++ < count;
      },
      [&](std::int64_t step) { note(static_cast<char>('A' + kStage), step); }...);
  return order;
}
template <std::size_t kStages>
std::string OrderOf(std::int64_t depth, std::int64_t count) {
  return OrderOf(depth, count, std::make_index_sequence<kStages>());
}

TEST(PipelineTest, NoStepsIssueNothing) {
  for (std::int64_t depth = 0; depth <= kMaxPipelineDepth; ++depth) EXPECT_EQ(OrderOf<3>(depth, 0), "");
}

TEST(PipelineTest, OneStepGoesThroughItsStages) {
  for (std::int64_t depth = 0; depth <= kMaxPipelineDepth; ++depth) {
    EXPECT_EQ(OrderOf<3>(depth, 1), "A0 B0 C0");
    EXPECT_EQ(OrderOf<1>(depth, 1), "A0");
  }
}

TEST(PipelineTest, DepthZeroRunsStepAfterStep) { EXPECT_EQ(OrderOf<3>(0, 3), "A0 B0 C0 A1 B1 C1 A2 B2 C2"); }

TEST(PipelineTest, DepthOneIsThePictureOfTheHeader) {
  EXPECT_EQ(OrderOf<3>(1, 2), "A0 A1 B0 B1 C0 C1");
  EXPECT_EQ(OrderOf<3>(1, 4), "A0 A1 B0 A2 B1 C0 A3 B2 C1 B3 C2 C3");
}

TEST(PipelineTest, DepthTwoLooksTwoStepsAhead) {
  EXPECT_EQ(OrderOf<3>(2, 2), "A0 A1 B0 B1 C0 C1");
  EXPECT_EQ(OrderOf<3>(2, 5), "A0 A1 A2 B0 A3 B1 A4 B2 C0 B3 C1 B4 C2 C3 C4");
}

TEST(PipelineTest, OneStageIsALoop) {
  for (std::int64_t depth = 0; depth <= kMaxPipelineDepth; ++depth)
    EXPECT_EQ(OrderOf<1>(depth, 4), "A0 A1 A2 A3");
}

// For any number of stages and steps: in round r stage s works on step r - s * depth, if there is one.
TEST(PipelineTest, EveryRoundFollowsTheRule) {
  const auto expected = [](std::int64_t stages, std::int64_t depth, std::int64_t count) {
    std::string order;
    for (std::int64_t round = 0; round < count + (stages - 1) * depth; ++round) {
      for (std::int64_t stage = 0; stage < stages; ++stage) {
        const std::int64_t step = round - stage * depth;
        if (step < 0 || step >= count) continue;
        if (!order.empty()) order += ' ';
        order += static_cast<char>('A' + stage) + std::to_string(step);
      }
    }
    return order;
  };
  for (std::int64_t depth = 0; depth <= kMaxPipelineDepth; ++depth) {
    for (std::int64_t count = 0; count <= 40; ++count) {
      EXPECT_EQ(OrderOf<2>(depth, count), expected(2, depth, count));
      EXPECT_EQ(OrderOf<4>(depth, count), expected(4, depth, count));
      EXPECT_EQ(OrderOf<5>(depth, count), expected(5, depth, count));
    }
  }
}

// What a stage leaves in its step is what the same step's next stage finds, and `next` is asked once beyond
// the last.
TEST(PipelineTest, AStepKeepsWhatItsStagesWrite) {
  struct Step {
    std::int64_t number = -1, visited = 0;
  };
  for (std::int64_t depth = 0; depth <= kMaxPipelineDepth; ++depth) {
    constexpr std::int64_t kCount = 23;
    std::int64_t asked = 0, finished = 0;
    const auto visit = [&](std::int64_t stage) {
      return [&, stage](Step& step) {
        EXPECT_EQ(step.visited, stage) << "step " << step.number;
        ++step.visited;
      };
    };
    Pipeline<Step>(
        depth,
        [&](Step& step) {
          step = {asked, 0};
          return asked++ < kCount;
        },
        visit(0), visit(1), visit(2),
        [&](Step& step) {
          EXPECT_EQ(step.number, finished++);
          EXPECT_EQ(step.visited, 3);
        });
    EXPECT_EQ(asked, kCount + 1);
    EXPECT_EQ(finished, kCount);
  }
}

TEST(PipelineDeathTest, ADepthBeyondTheLimitIsRefused) {
  EXPECT_DEATH(OrderOf<2>(kMaxPipelineDepth + 1, 1), "pipeline depth");
  EXPECT_DEATH(OrderOf<2>(-1, 1), "pipeline depth");
}

}  // namespace
}  // namespace cubist
