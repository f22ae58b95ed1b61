// Which core computes which block of a grouped product.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/group_order_kernel.h"
#include "npu_model/chip.h"
#include "npu_model/host/scratch.h"
#include "npu_model/trace/record.h"
#include "npu_model/trace/trace_core.h"
#include "tests/support/random.h"

namespace cubist {
namespace {

// Blocks of groups of any size, whose weights are read ahead or not.
std::vector<GroupBlocks> RandomGroups(testing::Random& random) {
  std::vector<GroupBlocks> groups;
  const std::int64_t most_read = random.Integer(0, 1) * 50;
  for (std::int64_t count = random.Integer(1, 12); count > 0; --count)
    groups.push_back({{random.Integer(0, 8), random.Integer(0, 8)},
                      random.Integer(1, 300),
                      random.Integer(0, most_read),
                      random.Integer(1, 30)});
  return groups;
}

TEST(GroupOrderTest, EachBlockGoesToACoreThatHasLeast) {
  testing::Random random;
  for (int i = 0; i < 200; ++i) {
    const std::int64_t cores = random.Integer(1, 80);
    std::vector<std::int64_t> work(static_cast<std::size_t>(cores));
    Turns turns(cores);
    for (const GroupBlocks& blocks : RandomGroups(random)) {
      for (std::int64_t b = 0; b < blocks.grid.count(); ++b) {
        const Turns::Turn turn = turns.Next(blocks, blocks.grid.At(b));
        ASSERT_TRUE(turn.core >= 0 && turn.core < cores);
        std::int64_t& of_core = work[static_cast<std::size_t>(turn.core)];
        ASSERT_EQ(turn.begin, of_core);
        ASSERT_EQ(turn.begin, *std::min_element(work.begin(), work.end()));
        ASSERT_GE(turn.end, turn.begin + blocks.work);
        of_core = turn.end;
      }
    }
  }
}

// Of groups alike a block costs so many steps, however many cores there are.
TEST(GroupOrderTest, DealingTakesAFewStepsForABlock) {
  for (const std::int64_t cores : {2, 24, 1000}) {
    Turns turns(cores);
    const GroupBlocks blocks{{40, 30}, 128, 0, 0};
    turns.TakeSteps();
    for (std::int64_t b = 0; b < blocks.grid.count(); ++b) turns.Next(blocks, blocks.grid.At(b));
    EXPECT_EQ(turns.TakeSteps(), blocks.grid.count() * kStepsOfTurn);
    EXPECT_EQ(turns.TakeSteps(), 0);
  }
  // Behind a group of long blocks those of short ones pass some that wait.
  Turns turns(24);
  const GroupBlocks large{{12, 1}, 1000, 0, 0}, small{{100, 1}, 10, 0, 0};
  for (std::int64_t b = 0; b < 12; ++b) turns.Next(large, large.grid.At(b));
  turns.TakeSteps();
  for (std::int64_t b = 0; b < 100; ++b) turns.Next(small, small.grid.At(b));
  EXPECT_EQ(turns.TakeSteps(), 100 * (kStepsOfTurn + 12));
}

// A list of counts, or of ends, in memory.
GmTensor ListOf(std::vector<std::int32_t>& values) {
  GmTensor list;
  list.data = reinterpret_cast<std::byte*>(values.data());
  list.dtype = DType::kI32, list.name = "groups";
  list.bytes = std::ssize(values) * SizeOf(DType::kI32);
  list.sizes = {1, 1, 1, std::ssize(values)}, list.strides = {1, 1, 1, 1};
  return list;
}

TEST(GroupOrderTest, CoresHaveEveryBlockOnceAndSpendTheirTime) {
  std::vector<std::int32_t> counts{300, 0, 17, 128, 1};
  const std::int64_t all = 450;  // Four behind the last group's.
  const GmTensor list = ListOf(counts);
  const GroupRows rows{MatrixOf(list), /*ends=*/false, all};
  const auto blocks_of = [](std::int64_t, Range of_group) {
    return GroupBlocks{
        {6, CeilDiv(of_group.size(), 128)}, std::min<std::int64_t>(of_group.size(), 128), 0, 0};
  };
  for (const Dealing dealing : {Dealing::kRuns, Dealing::kTurns}) {
    std::set<std::tuple<std::int64_t, std::int64_t, std::int64_t>> seen;
    for (int index = 0; index < 5; ++index) {
      Scratch scratch;
      trace::CoreRecord record;
      TraceAiCore core(Ascend910B2(), scratch, index, 5, /*with_data=*/false, &record);
      ForMyGroupBlocks(core, GroupOrder{rows}, dealing, blocks_of, [&](const GroupBlock& block) {
        EXPECT_TRUE(seen.emplace(block.group, block.at.row, block.at.col).second);
      });
      EXPECT_TRUE(std::any_of(record.instrs.begin(), record.instrs.end(), [](const trace::Instr& instr) {
        return instr.op == trace::Op::kSpend && instr.dims[0] > 0;
      }));
    }
    EXPECT_EQ(seen.size(), 6u * (3 + 0 + 1 + 1 + 1 + 1)) << NameOf(dealing);
  }
}

// Every core takes the tiling that is chosen for the batch, by counts as by ends, and the time to look for it.
TEST(GroupOrderTest, CoresTakeTheTilingOfTheirBatch) {
  testing::Random random;
  std::set<std::size_t> taken;
  for (int i = 0; i < 100; ++i) {
    const std::int64_t groups = random.Integer(1, 40), steep = random.Integer(0, 12);
    std::vector<std::int32_t> counts, ends;
    std::int64_t all = 0;
    for (std::int64_t g = 0; g < groups; ++g) {
      counts.push_back(static_cast<std::int32_t>(random.Integer(500, 520) >> (g * steep / groups)));
      ends.push_back(static_cast<std::int32_t>(all += counts.back()));
    }
    GroupedTilings tilings{GroupSpreads(groups), std::vector<GroupedMatmulTiling>(GroupSpreads::kCount)};
    GroupSpreads::Meter meter(all + 4);
    for (const std::int32_t count : counts) meter.Add(count);
    const std::size_t spread = meter.SpreadBy(tilings.spreads);
    taken.insert(spread);
    for (const bool by_ends : {false, true}) {
      const GmTensor list = ListOf(by_ends ? ends : counts);
      Scratch scratch;
      trace::CoreRecord record;
      TraceAiCore core(Ascend910B2(), scratch, 1, 5, /*with_data=*/false, &record);
      EXPECT_EQ(&TilingFor(core, GroupRows{MatrixOf(list), by_ends, all + 4}, tilings), &tilings.of[spread]);
      EXPECT_FALSE(record.instrs.empty());
    }
  }
  EXPECT_GT(taken.size(), 4u);
  // Of one tiling there is nothing to look for.
  std::vector<std::int32_t> counts{3, 4};
  const GmTensor list = ListOf(counts);
  const GroupedTilings one{GroupSpreads(2), std::vector<GroupedMatmulTiling>(1)};
  Scratch scratch;
  trace::CoreRecord record;
  TraceAiCore core(Ascend910B2(), scratch, 0, 1, /*with_data=*/false, &record);
  EXPECT_EQ(&TilingFor(core, GroupRows{MatrixOf(list), false, 7}, one), &one.of[0]);
  EXPECT_TRUE(record.instrs.empty());
}

}  // namespace
}  // namespace cubist
