// L2 prefetch of a grouped product: what the next groups need, read ahead by Vector cores that have nothing else to do.
#ifndef CUBIST_KERNELS_GROUPED_PREFETCH_KERNEL_H_
#define CUBIST_KERNELS_GROUPED_PREFETCH_KERNEL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>
#include <limits>
#include <map>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/group_order_kernel.h"
#include "kernels/matmul_prefetch_kernel.h"
#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/matmul_tiling.h"

namespace cubist {

// Columns of blocks that all cores work on together, and when they are to be read ahead: once cores have done so much work.
struct AheadWave {
  std::int64_t group = 0;
  Range rows, cols;  // of the group; of its columns of blocks
  std::int64_t at = 0;
};

// The work of all cores, as Turns deals it, whoever has it: cores of as much are one entry, and blocks of one kind are dealt to all
// of them at once. A scalar unit takes a few steps for a wave so, where one for each core and block would hold up the first.
class CoreLoads {
 public:
  explicit CoreLoads(std::int64_t cores) : loads_{{0, cores}} {}

  std::int64_t least() const { return loads_.begin()->first; }
  // `blocks` of so much work, of which none ends before `read`. Returns when the last does.
  std::int64_t Deal(std::int64_t blocks, std::int64_t work, std::int64_t read) {
    std::int64_t last = 0;
    while (blocks > 0) {
      const auto least = loads_.begin();
      const std::int64_t begin = least->first, count = std::min(blocks, least->second),
                         end = std::max(begin + work, read);
      least->second -= count;
      if (least->second == 0) loads_.erase(least);
      loads_[end] += count;
      last = std::max(last, end), blocks -= count;
    }
    return last;
  }

 private:
  std::map<std::int64_t, std::int64_t> loads_;  // How many cores have so much work.
};

// Calls visit(wave) for the waves of all groups in turn. Each is to be read as late as it still comes in time, with HBM busy from
// then on, at ten elevenths of its rate: what is read too early drives out of L2 what is still needed, since nobody has used it yet.
// For the same reason none is more than `ahead` columns behind the first that is not done.
template <CubeCore Core, class BlocksOf, class Visit>
void ForAhead(Core& core, const GroupOrder& groups, BlocksOf& blocks_of, std::int64_t ahead, Visit&& visit) {
  struct Planned {
    AheadWave wave;
    std::int64_t begin, end, read;  // when cores come to it and leave it; how long HBM takes
    std::int64_t columns;           // of all waves before
  };
  std::vector<Planned> waves;
  CoreLoads loads(core.count());
  std::int64_t columns = 0, read = 0;  // when HBM has given all waves so far
  groups.ForEach(core, [&](std::int64_t group, Range rows) {
    if (group == groups.rows.groups() || rows.empty()) return true;
    const GroupBlocks blocks = blocks_of(group, rows);
    for (const Range cols : Split(blocks.grid.rows, blocks.Together(core.count()))) {
      const std::int64_t of_wave = cols.size() * blocks.read, begin = loads.least();
      read += of_wave;
      const std::int64_t end = loads.Deal(cols.size() * blocks.grid.cols, blocks.work, read);
      waves.push_back({{group, rows, cols}, begin, end, of_wave, columns});
      columns += cols.size();
    }
    return true;
  });
  std::int64_t in_time = std::numeric_limits<std::int64_t>::max();
  for (std::size_t w = waves.size(); w-- > 0;) {
    in_time = std::min(in_time, waves[w].begin) - waves[w].read - waves[w].read / 10;
    waves[w].wave.at = in_time;
  }
  std::int64_t done = 0;  // when all waves are that are more than `ahead` columns in front
  std::size_t behind = 0;
  for (Planned& planned : waves) {
    for (; waves[behind].columns + ahead < planned.columns; ++behind)
      done = std::max(done, waves[behind].end);
    planned.wave.at = std::max(planned.wave.at, done);
    visit(planned.wave);
  }
}

// Vector cores read what waves of blocks need before Cube cores come to them, each Vector core its share, and drop it. They keep
// in step by waiting for what the Cube core has stored last.
template <class T, AiCore Core>
class GroupPrefetch {
 public:
  GroupPrefetch(Core& core, const MatmulTiling& t) : tiling_(t) {
    const std::int64_t lanes = std::ssize(core.vectors());
    for (std::int64_t i = 0; i < lanes; ++i)
      lanes_.emplace_back(core.vectors()[static_cast<std::size_t>(i)], t, core.index() * lanes + i,
                          core.count() * lanes);
  }

  // The next wave: rows (rows, K), where they are not read yet, and weights (K, cols).
  void Add(std::int64_t at, const Gm& x, const Gm& weights) { waves_.push_back({at, x, weights}); }
  // The Cube core has a block that goes to `out`, half done at `middle`. What is to be read by then is read now: readers can wait
  // for blocks alone, and this one's beginning is nearer than the next one's.
  void At(std::int64_t middle, const Gm& out) {
    if (read_ < waves_.size() && waves_[read_].at < middle) Wait();
    while (read_ < waves_.size() && waves_[read_].at < middle) ReadNext();
    stored_ = out;
  }
  // It has no more, but others may.
  void Finish() {
    Wait();
    while (read_ < waves_.size()) ReadNext();
  }

 private:
  using Vector = std::remove_cvref_t<decltype(std::declval<Core&>().vectors()[0])>;
  static constexpr std::int64_t kCorner = 8;
  struct Lane {
    Lane(Vector& vector, const MatmulTiling& t, std::int64_t index, std::int64_t readers)
        : reader(vector, t, index, readers), corner(vector, "corner", 1, kCorner, 1) {}
    AheadReader<T, Vector> reader;
    Ring<Buffer::kUB, float> corner;
  };
  struct Wave {
    std::int64_t at;
    Gm x, weights;
  };

  // Steps of a reader's scalar unit for a wave: its blocks are dealt to a few loads, and it is planned backwards and forwards.
  static constexpr std::int64_t kStepsOfWave = 24;

  // Until the last block is stored.
  void Wait() {
    if (stored_.tensor == nullptr) return;
    const Gm corner = stored_.Block({0, 1}, {0, std::min(stored_.cols, kCorner)});
    for (Lane& lane : lanes_) lane.reader.vector().Load(lane.corner.Next(1, corner.cols), corner);
  }
  void ReadNext() {
    const Wave& wave = waves_[read_++];
    const Split columns(wave.weights.cols, tiling_.n);
    for (Lane& lane : lanes_) {
      lane.reader.Read(
          wave.weights.rows, wave.x.rows > 0 ? 1 : 0, wave.x.rows,
          [&](std::int64_t, Range k) { return wave.x.Cols(k); }, columns.count(),
          [&](std::int64_t i, Range k) { return wave.weights.Block(k, columns[i]); });
      // The first is read whatever the plan, which is made beside it.
      if (read_ == 1) lane.reader.vector().Spend(std::ssize(waves_) * kStepsOfWave);
    }
  }

  const MatmulTiling& tiling_;
  std::vector<Wave> waves_;
  std::deque<Lane> lanes_;
  std::size_t read_ = 0;
  Gm stored_;
};

}  // namespace cubist

#endif  // CUBIST_KERNELS_GROUPED_PREFETCH_KERNEL_H_
