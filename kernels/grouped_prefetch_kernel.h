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

// Vector cores read the operands of t.prefetch groups in front of the one that the Cube core is at, each Vector core its
// share, and drop them. They keep in step by waiting for what the Cube core has stored last.
template <class T, AiCore Core>
class GroupPrefetch {
 public:
  // `groups` in the order in which they are computed.
  GroupPrefetch(Core& core, std::vector<GroupOperands> groups, const MatmulTiling& t)
      : tiling_(t),
        groups_(std::move(groups)),
        cores_(core.count()),
        lane_count_(std::ssize(core.vectors())) {
    for (std::int64_t i = 0; i < lane_count_; ++i)
      lanes_.emplace_back(core.vectors()[static_cast<std::size_t>(i)], t, core.index() * lane_count_ + i);
    ReadTo(t.prefetch);
  }

  // The Cube core has a block of `group` that goes to `out`.
  void At(std::int64_t group, const Gm& out) {
    if (group > group_) Wait();
    group_ = group, stored_ = out;
    ReadTo(group + tiling_.prefetch);
  }
  // It has no more, but others may.
  void Finish() {
    Wait();
    ReadTo(std::ssize(groups_));
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

  // Until the last block is stored.
  void Wait() {
    if (stored_.tensor == nullptr) return;
    const Gm corner = stored_.Block({0, 1}, {0, std::min(stored_.cols, kCorner)});
    for (Lane& lane : lanes_) lane.vector.Load(lane.corner.Next(1, corner.cols), corner);
  }
  // Up to and with group `last`.
  void ReadTo(std::int64_t last) {
    for (; read_ <= last && read_ < std::ssize(groups_); ++read_) {
      for (Lane& lane : lanes_) Read(lane, groups_[static_cast<std::size_t>(read_)]);
    }
  }
  // As many columns at a time as cores work on together, with the first of them the rows.
  void Read(Lane& lane, const GroupOperands& group) {
    if (group.x.rows == 0) return;
    const MatmulTiling& t = tiling_;
    const std::int64_t all = cores_ * lane_count_,
                       together = std::max<std::int64_t>(cores_ / CeilDiv(group.x.rows, t.m), 1);
    for (const Range cols : Split(group.weights.cols, together * t.n)) {
      for (const Range k1 : Split(group.weights.rows, t.k1)) {
        if (cols.begin == 0) lane.x.Read(group.x.Cols(k1), lane.mine, all, &lane.piece);
        for (const Range n : Split(cols, t.n)) {
          const Gm weights = group.weights.Block(k1, n);
          lane.weights.Read(t.b_turned ? weights.Transposed() : weights, lane.mine, all, &lane.piece);
        }
      }
    }
  }

  const MatmulTiling& tiling_;
  std::vector<GroupOperands> groups_;
  std::int64_t cores_, lane_count_;
  std::deque<Lane> lanes_;
  std::int64_t read_ = 0, group_ = 0;
  Gm stored_;
};

}  // namespace cubist

#endif  // CUBIST_KERNELS_GROUPED_PREFETCH_KERNEL_H_
