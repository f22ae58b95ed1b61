// Which core computes which block of all groups' products, and when.
#ifndef CUBIST_KERNELS_GROUP_ORDER_KERNEL_H_
#define CUBIST_KERNELS_GROUP_ORDER_KERNEL_H_

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>
#include <span>
#include <utility>
#include <vector>

#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/block_order.h"
#include "tiling/grouped_matmul_tiling.h"

namespace cubist {

// Steps of the scalar unit: what a group's blocks are; whose a block is; two groups compared while they are sorted; a group's rows
// and their square added up.
inline constexpr std::int64_t kStepsOfGroup = 8, kStepsOfTurn = 3, kStepsOfCompare = 2, kStepsOfMeter = 4;

// Where the groups' rows are, as GM says.
struct GroupRows {
  Gm list;  // (1, E) counts, or ends
  bool ends = false;
  std::int64_t rows = 0;  // of all groups, and those after the last

  std::int64_t groups() const { return list.cols; }

  // Calls visit(group, rows) for every group in turn, and at last for the rows after them, as group E, until it returns
  // false.
  template <CubeCore Core, class Visit>
  void ForEach(Core& core, Visit&& visit) const {
    std::int64_t begin = 0;
    for (std::int64_t group = 0; group < groups(); ++group) {
      const std::int64_t value = core.ReadScalar(list, group);
      const std::int64_t end = ends ? value : begin + value;
      if (!visit(group, Range{begin, end})) return;
      begin = end;
    }
    visit(groups(), Range{begin, rows});
  }
};

// The tiling for the groups' spread.
template <CubeCore Core>
const GroupedMatmulTiling& TilingFor(Core& core, const GroupRows& groups, const GroupedTilings& tilings) {
  if (tilings.of.size() == 1) return tilings.of[0];
  GroupSpreads::Meter meter(groups.rows);
  groups.ForEach(core, [&](std::int64_t group, Range rows) {
    if (group < groups.groups()) meter.Add(rows.size());
    return true;
  });
  core.Spend(groups.groups() * kStepsOfMeter);
  return tilings.of[meter.SpreadBy(tilings.spreads)];
}

// A group, and where its rows are.
struct GroupVisit {
  std::int64_t group = 0;
  Range rows;
};

// The groups in the order of their rows, or in that of `visits`.
struct GroupOrder {
  const GroupRows& rows;
  std::span<const GroupVisit> visits = {};

  std::int64_t size() const { return visits.empty() ? rows.groups() + 1 : std::ssize(visits); }
  template <CubeCore Core, class Visit>
  void ForEach(Core& core, Visit&& visit) const {
    if (visits.empty()) return rows.ForEach(core, visit);
    for (const GroupVisit& at : visits)
      if (!visit(at.group, at.rows)) return;
  }
};

// A group's blocks, what each of them costs, and what HBM takes in the same units for a column of them that is read ahead, which
// `ahead` columns may be.
struct GroupBlocks {
  BlockGrid grid;
  std::int64_t work = 0, read = 0, ahead = 0;

  // Waves: columns of blocks that `cores` work on at a time. What is read ahead of them is complete when the last is. Where so many
  // are more than may be ahead, waves are of one width: after 24 of 32 columns of fp32 the last 8 would be all that is ahead.
  std::int64_t Together(std::int64_t cores) const {
    const std::int64_t most = std::max<std::int64_t>(cores / std::max<std::int64_t>(grid.cols, 1), 1);
    return most <= ahead ? most : EvenShare(grid.rows, most);
  }
  // Columns of the wave that begins with this block; 0: none does.
  std::int64_t WaveFrom(BlockCoord at, std::int64_t cores) const {
    const std::int64_t together = Together(cores);
    return at.col == 0 && at.row % together == 0 ? std::min(together, grid.rows - at.row) : 0;
  }
};

// The groups that have rows in an order that keeps Cube cores and HBM busy, whatever that of the rows: of those whose products
// take longer than HBM takes for their weights the largest left, wherever the products so far have taken no longer than HBM;
// elsewhere the smallest left of the others, whose last ends the list, as beside it nothing is read. Of large groups in a row
// L2 cannot hold what is read ahead, and of small ones in a row nothing is.
template <CubeCore Core, class BlocksOf>
std::vector<GroupVisit> Alternating(Core& core, const GroupRows& groups, BlocksOf& blocks_of) {
  struct Led {
    GroupVisit visit;
    std::int64_t lead = 0;  // of its products over HBM
  };
  std::vector<Led> sorted;
  GroupVisit after;
  groups.ForEach(core, [&](std::int64_t group, Range rows) {
    after = {group, rows};
    if (group == groups.groups() || rows.empty()) return true;
    const GroupBlocks blocks = blocks_of(group, rows);
    sorted.push_back(
        {after, blocks.grid.count() * blocks.work - core.count() * blocks.grid.rows * blocks.read});
    return true;
  });
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const Led& x, const Led& y) { return x.visit.rows.size() > y.visit.rows.size(); });
  const auto compares =
      static_cast<std::int64_t>(1 + std::bit_width(sorted.size()));  // of a group, in the mean
  core.Spend(std::ssize(sorted) * (kStepsOfGroup + compares * kStepsOfCompare));

  const auto lights = std::find_if(sorted.begin(), sorted.end(), [](const Led& x) { return x.lead <= 0; });
  std::reverse(lights, sorted.end());
  std::vector<GroupVisit> visits;
  std::int64_t lead = 0;
  for (auto heavy = sorted.begin(), light = lights; heavy != lights || light != sorted.end();) {
    const bool is_heavy = heavy != lights && (sorted.end() - light < 2 || 2 * lead + light->lead <= 0);
    const Led& next = is_heavy ? *heavy++ : *light++;
    visits.push_back(next.visit);
    lead += next.lead;
  }
  visits.push_back(after);
  return visits;
}

// A block that a core has.
struct GroupBlock {
  std::int64_t group = 0;
  Range rows;  // of the group
  BlockCoord at;
  std::int64_t middle = 0;  // of its turn, in work
};

// Runs of equal work: a core takes the blocks that begin in its part of all work, neighbours that read the same rows.
template <CubeCore Core, class BlocksOf, class Visit>
void ForMyRun(Core& core, const GroupOrder& groups, BlocksOf& blocks_of, Visit& visit) {
  std::int64_t total = 0;
  groups.ForEach(core, [&](std::int64_t group, Range rows) {
    const GroupBlocks blocks = blocks_of(group, rows);
    total += blocks.grid.count() * blocks.work;
    return true;
  });
  core.Spend(2 * groups.size() * kStepsOfGroup);
  const std::int64_t share = total / core.count(), rest = total % core.count();
  const auto begin_of = [&](std::int64_t index) { return index * share + std::min(index, rest); };
  const std::int64_t begin = begin_of(core.index()), end = begin_of(core.index() + 1);

  std::int64_t at = 0;  // Work before the group.
  groups.ForEach(core, [&](std::int64_t group, Range rows) {
    const GroupBlocks blocks = blocks_of(group, rows);
    const std::int64_t first =
        CeilDiv(std::max<std::int64_t>(begin - at, 0), std::max<std::int64_t>(blocks.work, 1));
    for (std::int64_t i = first; i < blocks.grid.count() && at + i * blocks.work < end; ++i)
      visit(GroupBlock{group, rows, blocks.grid.At(i)});
    at += blocks.grid.count() * blocks.work;
    return at < end;
  });
}

// Turns: each block goes to the core that has least work so far, of several to the one that has had it longest; what is read ahead
// ends no block before HBM has given its weights. Cores that run together are at neighbouring blocks, and find rows and weights of
// one group in L2. Cores stand in a queue by their work. Who has a block goes back to its end, since blocks of a group cost the same,
// or a few places before, behind those of a larger group: a few steps of the scalar unit, however many cores there are.
class Turns {
 public:
  explicit Turns(std::int64_t cores) : steps_(cores * kStepsOfTurn) {
    for (std::int64_t core = 0; core < cores; ++core) queue_.push_back({core, 0});
  }

  struct Turn {
    std::int64_t core, begin, end;
  };
  // Of the next block.
  Turn Next(const GroupBlocks& blocks, BlockCoord at) {
    if (const std::int64_t columns = blocks.WaveFrom(at, std::ssize(queue_)); columns > 0)
      read_ += blocks.read * columns;
    const Load least = queue_.front();
    queue_.pop_front();
    const std::int64_t end = std::max(least.work + blocks.work, read_);
    auto place = queue_.end();
    for (; place != queue_.begin() && std::prev(place)->work > end; --place) ++steps_;
    queue_.insert(place, {least.core, end});
    steps_ += kStepsOfTurn;
    return {least.core, least.work, end};
  }
  // Steps since the last call.
  std::int64_t TakeSteps() { return std::exchange(steps_, 0); }

 private:
  struct Load {
    std::int64_t core, work;
  };
  std::deque<Load> queue_;  // by work
  std::int64_t read_ = 0;   // when the weights of all waves so far are there
  std::int64_t steps_;
};

// Calls visit(block) for this core's share of the blocks of all groups, one list, group by group. Which core does a block follows
// from the groups alone, not from time.
template <CubeCore Core, class BlocksOf, class Visit>
void ForMyGroupBlocks(Core& core, const GroupOrder& groups, Dealing dealing, BlocksOf&& blocks_of,
                      Visit&& visit) {
  if (dealing == Dealing::kRuns) return ForMyRun(core, groups, blocks_of, visit);
  Turns turns(core.count());
  std::int64_t dealt = 0, steps = 0;
  groups.ForEach(core, [&](std::int64_t group, Range rows) {
    const GroupBlocks blocks = blocks_of(group, rows);
    if (blocks.grid.count() > 0) steps += kStepsOfGroup;
    for (std::int64_t i = 0; i < blocks.grid.count(); ++i) {
      // A block for each core at a time: those of one core are about as far apart.
      if (dealt++ % core.count() == 0) core.Spend(std::exchange(steps, 0) + turns.TakeSteps());
      const BlockCoord at = blocks.grid.At(i);
      const Turns::Turn turn = turns.Next(blocks, at);
      if (turn.core == core.index())
        visit(GroupBlock{group, rows, at, turn.begin + (turn.end - turn.begin) / 2});
    }
    return true;
  });
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_GROUP_ORDER_KERNEL_H_
