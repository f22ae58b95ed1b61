// Which core computes which block of all groups' products, and when.
#ifndef CUBIST_KERNELS_GROUP_ORDER_KERNEL_H_
#define CUBIST_KERNELS_GROUP_ORDER_KERNEL_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/block_order.h"
#include "tiling/grouped_matmul_tiling.h"

namespace cubist {

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

// A group, and where its rows are.
struct GroupVisit {
  std::int64_t group = 0;
  Range rows;
};

// The groups in the order of their rows, or in that of `visits`.
struct GroupOrder {
  const GroupRows& rows;
  std::span<const GroupVisit> visits = {};

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
  std::vector<GroupVisit> sorted;
  groups.ForEach(core, [&](std::int64_t group, Range rows) {
    if (!rows.empty() || group == groups.groups()) sorted.push_back({group, rows});
    return true;
  });
  const GroupVisit after = sorted.back();
  sorted.pop_back();
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) { return a.rows.size() > b.rows.size(); });
  const auto lead_of = [&](const GroupVisit& at) {
    const GroupBlocks blocks = blocks_of(at.group, at.rows);
    return blocks.grid.count() * blocks.work - core.count() * blocks.grid.rows * blocks.read;
  };
  const auto lights =
      std::find_if(sorted.begin(), sorted.end(), [&](const auto& at) { return lead_of(at) <= 0; });
  std::reverse(lights, sorted.end());
  std::vector<GroupVisit> visits;
  std::int64_t lead = 0;
  for (auto heavy = sorted.begin(), light = lights; heavy != lights || light != sorted.end();) {
    const bool is_heavy = heavy != lights && (sorted.end() - light < 2 || 2 * lead + lead_of(*light) <= 0);
    visits.push_back(is_heavy ? *heavy++ : *light++);
    lead += lead_of(visits.back());
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

// Turns: each block goes to the core that has least work so far, the first of several; what is read ahead ends no block before
// HBM has given its weights. Cores that run together are at neighbouring blocks, and find rows and weights of one group in L2.
class Turns {
 public:
  explicit Turns(std::int64_t cores)
      : cores_(static_cast<std::ptrdiff_t>(std::min<std::int64_t>(cores, kMostCoresInTurns))) {}

  struct Turn {
    std::int64_t core, begin, end;
  };
  // Of the next block.
  Turn Next(const GroupBlocks& blocks, BlockCoord at) {
    const auto least = std::min_element(work_.begin(), work_.begin() + cores_);
    if (const std::int64_t columns = blocks.WaveFrom(at, cores_); columns > 0) read_ += blocks.read * columns;
    const std::int64_t begin = *least;
    *least = std::max(begin + blocks.work, read_);
    return {least - work_.begin(), begin, *least};
  }

 private:
  std::ptrdiff_t cores_;
  std::array<std::int64_t, kMostCoresInTurns> work_{};
  std::int64_t read_ = 0;  // when the weights of all waves so far are there
};

// Calls visit(block) for this core's share of the blocks of all groups, one list, group by group. Which core does a block follows
// from the groups alone, not from time.
template <CubeCore Core, class BlocksOf, class Visit>
void ForMyGroupBlocks(Core& core, const GroupOrder& groups, Dealing dealing, BlocksOf&& blocks_of,
                      Visit&& visit) {
  if (dealing == Dealing::kRuns) return ForMyRun(core, groups, blocks_of, visit);
  Turns turns(core.count());
  groups.ForEach(core, [&](std::int64_t group, Range rows) {
    const GroupBlocks blocks = blocks_of(group, rows);
    for (std::int64_t i = 0; i < blocks.grid.count(); ++i) {
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
