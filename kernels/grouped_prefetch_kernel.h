// L2 prefetch of a grouped product: what the next groups need, read ahead by Vector cores that have nothing else to do.
#ifndef CUBIST_KERNELS_GROUPED_PREFETCH_KERNEL_H_
#define CUBIST_KERNELS_GROUPED_PREFETCH_KERNEL_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <iterator>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/matmul_prefetch_kernel.h"
#include "npu_model/core.h"
#include "npu_model/tile.h"
#include "tiling/matmul_tiling.h"

namespace cubist {

struct GroupOperands {
  Gm x, weights;  // (rows, K), (K, N); of no row where the group is empty
};

// Vector cores read the operands of t.prefetch columns of blocks in front of the wave that the Cube core is at, each Vector
// core its share, and drop them. A wave is the columns of a group's weights that all cores work on together, the first of a group
// with its rows. They keep in step by waiting for what the Cube core has stored last: what is read too early drives out of L2
// what is still needed, since nobody has used it yet.
template <class T, AiCore Core>
class GroupPrefetch {
 public:
  // `groups` in the order in which they are computed.
  GroupPrefetch(Core& core, std::vector<GroupOperands> groups, const MatmulTiling& t)
      : tiling_(t), groups_(std::move(groups)), cores_(core.count()) {
    const std::int64_t lanes = std::ssize(core.vectors());
    readers_ = cores_ * lanes;
    for (std::int64_t i = 0; i < lanes; ++i)
      lanes_.emplace_back(core.vectors()[static_cast<std::size_t>(i)], t, core.index() * lanes + i);
    std::int64_t columns = 0;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      first_wave_.push_back(waves_.size());
      if (groups_[g].x.rows == 0) continue;
      for (const Range cols : Split(groups_[g].weights.cols, Together(groups_[g]))) {
        waves_.push_back({g, cols, columns});
        columns += CeilDiv(cols.size(), t.n);
      }
    }
    ReadFrom(0);
  }

  // The Cube core has a block of `group`, of columns from `col` on, that goes to `out`.
  void At(std::int64_t group, std::int64_t col, const Gm& out) {
    const auto g = static_cast<std::size_t>(group);
    const std::size_t wave = g < groups_.size()
                                 ? first_wave_[g] + static_cast<std::size_t>(col / Together(groups_[g]))
                                 : waves_.size();
    if (wave > wave_) Wait();
    wave_ = wave, stored_ = out;
    ReadFrom(wave);
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
    Lane(Vector& v, const MatmulTiling& t, std::int64_t number)
        : vector(v),
          mine(number),
          x(v, "x_ahead", t.m, t.a_k1()),
          weights(v, "weights_ahead", t.b_turned ? t.n : t.k1, t.b_turned ? t.k1 : t.n),
          corner(v, "corner", 1, kCorner, 1) {}
    Vector& vector;
    std::int64_t mine, piece = 0;
    AheadReader<T, Vector> x, weights;
    Ring<Buffer::kUB, float> corner;
  };
  struct Wave {
    std::size_t group;
    Range cols;
    std::int64_t columns;  // of blocks, in all waves before
  };

  // Columns of a group that cores work on together.
  std::int64_t Together(const GroupOperands& group) const {
    return std::max<std::int64_t>(cores_ / CeilDiv(group.x.rows, tiling_.m), 1) * tiling_.n;
  }
  // Until the last block is stored.
  void Wait() {
    if (stored_.tensor == nullptr) return;
    const Gm corner = stored_.Block({0, 1}, {0, std::min(stored_.cols, kCorner)});
    for (Lane& lane : lanes_) lane.vector.Load(lane.corner.Next(1, corner.cols), corner);
  }
  // What a Cube core needs that is at `wave`, and what is read ahead of that.
  void ReadFrom(std::size_t wave) {
    while (read_ < waves_.size() && wave < waves_.size() &&
           waves_[read_].columns <= waves_[wave].columns + tiling_.prefetch)
      ReadNext();
  }
  void ReadNext() {
    for (Lane& lane : lanes_) Read(lane, waves_[read_]);
    ++read_;
  }
  void Read(Lane& lane, const Wave& wave) {
    const MatmulTiling& t = tiling_;
    const GroupOperands& group = groups_[wave.group];
    for (const Range k1 : Split(group.weights.rows, t.k1)) {
      if (wave.cols.begin == 0) lane.x.Read(group.x.Cols(k1), lane.mine, readers_, &lane.piece);
      for (const Range n : Split(wave.cols, t.n)) {
        const Gm weights = group.weights.Block(k1, n);
        lane.weights.Read(t.b_turned ? weights.Transposed() : weights, lane.mine, readers_, &lane.piece);
      }
    }
  }

  const MatmulTiling& tiling_;
  std::vector<GroupOperands> groups_;
  std::vector<Wave> waves_;
  std::vector<std::size_t> first_wave_;  // of each group
  std::int64_t cores_, readers_ = 0;
  std::deque<Lane> lanes_;
  std::size_t read_ = 0, wave_ = 0;
  Gm stored_;
};

}  // namespace cubist

#endif  // CUBIST_KERNELS_GROUPED_PREFETCH_KERNEL_H_
