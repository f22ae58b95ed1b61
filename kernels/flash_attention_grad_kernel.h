// The backward pass of attention (RECT-FA): dQ, dK and dV from dO, with the weights computed again from the
// log-sum-exp. Three phases: what each query row needs; the products; the sums of their parts.
#ifndef CUBIST_KERNELS_FLASH_ATTENTION_GRAD_KERNEL_H_
#define CUBIST_KERNELS_FLASH_ATTENTION_GRAD_KERNEL_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <type_traits>

#include "kernels/operand_kernel.h"
#include "npu_model/core.h"
#include "npu_model/pipeline.h"
#include "npu_model/tile.h"
#include "tiling/flash_attention_grad_tiling.h"

namespace cubist {

// The (b, n, s, d) tensors of a call, and what one phase leaves for the next.
struct FlashAttentionGradOperands {
  const GmTensor *q = nullptr, *q_rope = nullptr;
  const GmTensor *k = nullptr, *k_rope = nullptr, *v = nullptr;
  const GmTensor *out = nullptr, *lse = nullptr, *dout = nullptr;  // lse: (b, head, Sq, 1)
  const GmTensor *dq = nullptr, *dq_rope = nullptr, *dk = nullptr, *dk_rope = nullptr, *dv = nullptr;
  float scale = 1;
  std::span<const AttentionBand> bands;  // Of each batch entry, where they differ; see Band.

  PackedGm q_packed, q_rope_packed, dout_packed;        // One matrix per (b, head), where t.pack_queries.
  const GmTensor *row_lse = nullptr, *delta = nullptr;  // (b, head, Sq, 1), fp32 like all that follow
  const GmTensor *dq_parts = nullptr, *dq_rope_parts = nullptr;  // (chunk, b * heads + head, Sq, d)
  const GmTensor *dk_sums = nullptr, *dk_rope_sums = nullptr, *dv_sums = nullptr;  // (b, KV head, Skv, d)

  const AttentionBand& Band(const FlashAttentionGradShape& s, std::int64_t b) const {
    return bands.empty() ? s.band : bands[static_cast<std::size_t>(b)];
  }
  // The query rows of a head as the chosen tiling reads them.
  Operand QueriesOf(const GmTensor& plain, const PackedGm& packed, const FlashAttentionGradTiling& t,
                    std::int64_t b, std::int64_t h) const {
    if (t.pack_queries) return {{}, packed.Matrix(b * plain.sizes[1] + h), true};
    return {MatrixOf(plain, b, h), {}, false};
  }
};

// First phase, on Vector cores, `rows_at_once` rows of a head at a time: what a query row needs beside its scores.
//   delta = sum of dO * O over the row;   row_lse = lse, but the lowest finite float for a row that sees no key,
// so that exp(-inf - row_lse) is 0 there and not NaN.
template <VectorCore Core>
void FlashAttentionGradRowsKernel(Core& core, const FlashAttentionGradOperands& g,
                                  const FlashAttentionGradShape& s, std::int64_t rows_at_once) {
  Ring<Buffer::kUB, float> out_ub(core, "out_ub", rows_at_once, s.d_v, 2);
  Ring<Buffer::kUB, float> dout_ub(core, "dout_ub", rows_at_once, s.d_v, 2);
  Ring<Buffer::kUB, float> delta_ub(core, "delta_ub", rows_at_once, 1, 2);
  Ring<Buffer::kUB, float> lse_ub(core, "lse_ub", rows_at_once, 1, 2);
  const Split blocks(s.sq, rows_at_once);
  for (std::int64_t task = core.index(); task < s.batches * s.heads * blocks.count(); task += core.count()) {
    const std::int64_t matrix = task / blocks.count(), b = matrix / s.heads, h = matrix % s.heads;
    const Range rows = blocks[task % blocks.count()];
    const UbTile<float> lse = lse_ub.Next(rows.size(), 1);
    core.Load(lse, MatrixOf(*g.lse, b, h).Rows(rows));
    core.MaxScalar(lse, lse, std::numeric_limits<float>::lowest());
    core.Store(MatrixOf(*g.row_lse, b, h).Rows(rows), lse);

    const UbTile<float> out = out_ub.Next(rows.size(), s.d_v), dout = dout_ub.Next(rows.size(), s.d_v);
    core.Load(out, MatrixOf(*g.out, b, h).Rows(rows));
    core.Load(dout, MatrixOf(*g.dout, b, h).Rows(rows));
    core.Mul(out, out, dout);
    const UbTile<float> delta = delta_ub.Next(rows.size(), 1);
    core.Fill(delta, 0.0f);  // Stays where Dv is 0.
    core.RowSum(delta, out);
    core.Store(MatrixOf(*g.delta, b, h).Rows(rows), delta);
  }
}

// A block of keys and a piece of a block of queries, on their way through the stages.
struct FlashAttentionGradStep {
  std::int64_t b = 0, kv_head = 0, h = 0, chunk = 0;
  Range keys;            // Seen by any of `block`; a block of keys, or the head of one.
  Range block, queries;  // A block of queries, and the piece of it.
  bool first_block = false, last_block = false;  // Of queries, for the block of keys.
  bool adds = false;  // An earlier block of keys of the chunk has given these queries a part of dQ.

  Range Piece() const { return {queries.begin - block.begin, queries.end - block.begin}; }
  bool first_of_block() const { return queries.begin == block.begin; }
  bool last_of_block() const { return queries.end == block.end; }
  bool first_of_keys() const { return first_block && first_of_block(); }
};

// The steps of core `index` of `count`. Tasks (chunk, b, KV head) are dealt round; in a task its blocks of keys come in
// ascending order, for each the query heads of the group, and of each the queries that see the block from the last to
// the first, so that the first ones see all of its keys, in narrow blocks where the mask cuts it. A block of keys that
// no query sees is one step without queries.
class FlashAttentionGradSteps {
 public:
  FlashAttentionGradSteps(const FlashAttentionGradOperands& g, const FlashAttentionGradShape& s,
                          const FlashAttentionGradTiling& t, int index, int count)
      : g_(g), s_(s), t_(t), task_(index), count_(count), key_block_(index / heads() - t.chunks) {}

  bool Next(FlashAttentionGradStep& step) {
    if (done_ && !NextKeys()) return false;
    if (piece_ == block_.end) NextBlock();
    step.b = batch(), step.kv_head = task_ % s_.kv_heads, step.chunk = task_ / heads();
    step.h = step.kv_head * s_.group() + std::max<std::int64_t>(head_, 0);
    step.keys = seen_, step.block = block_;
    step.queries = {piece_, std::min(piece_ + t_.piece(), block_.end)};
    step.adds = step.queries.begin < written_;
    step.first_block = first_block_;
    step.last_block = block_.begin == queries_.begin && head_ + 1 >= s_.group();
    piece_ = step.queries.end;
    done_ = step.last_block && step.last_of_block();
    if (step.last_of_block()) first_block_ = false;
    return true;
  }

 private:
  std::int64_t heads() const { return std::max<std::int64_t>(s_.batches * s_.kv_heads, 1); }
  std::int64_t batch() const { return task_ % heads() / s_.kv_heads; }

  bool NextKeys() {
    if (task_ >= t_.tasks(s_)) return false;
    key_block_ += t_.chunks;
    while (key_block_ >= t_.key_blocks(s_)) {
      task_ += count_;
      if (task_ >= t_.tasks(s_)) return false;
      key_block_ = task_ / heads();
    }
    const Split blocks(s_.skv, t_.n);
    const AttentionBand& band = g_.Band(s_, batch());
    seen_ = keys_ = blocks[key_block_];
    queries_ = s_.group() > 0 ? SeeingQueries(band, keys_, s_.sq, t_.strip) : Range{};
    // Rows before this see the chunk's block before this one, too.
    written_ =
        key_block_ < t_.chunks ? 0 : SeeingQueries(band, blocks[key_block_ - t_.chunks], s_.sq, t_.strip).end;
    // From this row on they see all keys, as far as causal order goes.
    full_ = band.prefix >= keys_.end
                ? 0
                : RoundUp(std::max<std::int64_t>(keys_.end - 1 - band.highest, 0), t_.strip);
    head_ = queries_.empty() ? s_.group() - 1 : -1;
    block_ = {queries_.begin, queries_.begin};
    piece_ = block_.end;
    first_block_ = true;
    return true;
  }

  // The block of queries before this one, or the last of the next head.
  void NextBlock() {
    if (queries_.empty()) return;
    std::int64_t end = block_.begin;
    if (end == queries_.begin) ++head_, end = queries_.end;
    const std::int64_t width = end > full_ ? t_.m() : t_.strip;
    block_ = {std::max((end - 1) / width * width, queries_.begin), end};
    for (const std::int64_t border : {full_, written_}) {
      if (block_.begin < border && border < block_.end) block_.begin = border;
    }
    piece_ = block_.begin;
    // The first block starts the sums of all keys; any other leaves out those behind the last that it sees.
    const AttentionBand& band = g_.Band(s_, batch());
    const std::int64_t last = first_block_ ? keys_.end : std::max(block_.end + band.highest, band.prefix);
    seen_.end = std::clamp(last, keys_.begin, keys_.end);
  }

  const FlashAttentionGradOperands& g_;
  const FlashAttentionGradShape& s_;
  const FlashAttentionGradTiling& t_;
  std::int64_t task_, count_, key_block_, head_ = 0;
  Range keys_, queries_, block_, seen_;
  std::int64_t piece_ = 0, written_ = 0, full_ = 0;
  bool first_block_ = true, done_ = true;
};

// Second phase. Each core walks its steps through three stages; `t.depth` sets how far neighbouring steps overlap.
//   scores    Cube    S^T = K Q^T, then S^T += K_rope Q_rope^T in the same L0C tile;  dP^T = V dO^T
//   weights   Vector  P^T = exp(scale * S^T - lse),  dS^T = P^T * (dP^T - delta)
//   products  Cube    dQ = dS K, added to the chunk's part in GM;  behind a block's last piece dV += P^T dO,
//                     dK += dS^T Q
// Keys run along the rows, so that P^T and dS^T are left operands as they stand and lse and delta are rows; dQ alone
// takes dS^T turned. dS lacks the factor `scale`, which the last phase gives to dQ and dK.
template <class T, AiCore Core>
void FlashAttentionGradKernel(Core& core, const FlashAttentionGradOperands& g,
                              const FlashAttentionGradShape& s, const FlashAttentionGradTiling& t) {
  using Vector = std::remove_cvref_t<decltype(core.vectors()[0])>;
  constexpr std::size_t kMaxLanes = 2;
  const std::size_t lane_count = core.vectors().size();
  CUBIST_CHECK(lane_count <= kMaxLanes, "more Vector cores per Cube core than the kernel splits rows over");
  const Split lane_rows(t.n, CeilDiv(t.n, static_cast<std::int64_t>(lane_count)));
  const bool rope = s.d_rope > 0;
  const int kept = t.operand_stages(), handed = t.hand_over_stages();
  const std::int64_t sum_rows = t.keep_sums ? t.n : 0;
  const std::int64_t widest = std::max({s.d_qk, s.d_rope, t.keep_sums ? 0 : s.d_v});

  Ring<Buffer::kL1, T> k_l1(core, "k_l1", t.n, s.d_qk, kept, Role::kA, Role::kB);
  Ring<Buffer::kL1, T> k_rope_l1(core, "k_rope_l1", t.n, s.d_rope, kept, Role::kA, Role::kB);
  Ring<Buffer::kL1, T> v_l1(core, "v_l1", t.n, s.d_v, kept, Role::kA);
  Ring<Buffer::kL1, T> q_l1(core, "q_l1", t.m(), s.d_qk, kept, Role::kB, Role::kBTransposed);
  Ring<Buffer::kL1, T> q_rope_l1(core, "q_rope_l1", t.m(), s.d_rope, kept, Role::kB, Role::kBTransposed);
  Ring<Buffer::kL1, T> dout_l1(core, "dout_l1", t.m(), s.d_v, kept, Role::kB, Role::kBTransposed);
  Ring<Buffer::kL1, T> p_l1(core, "p_l1", t.n, t.m(), handed, Role::kA);
  Ring<Buffer::kL1, T> ds_l1(core, "ds_l1", t.n, t.m(), handed, Role::kA, Role::kATransposed);
  Ring<Buffer::kL0A, T> a_l0(core, "a_l0", std::max(t.piece(), t.n), t.k0, t.l0_stages, Role::kA);
  Ring<Buffer::kL0B, T> b_l0(core, "b_l0", t.k0, std::max({t.piece(), s.d_qk, s.d_rope, s.d_v}), t.l0_stages,
                             Role::kB);
  Ring<Buffer::kL0C, float> score_l0(core, "score_l0", t.n, t.piece(), 2);
  Ring<Buffer::kL0C, float> dv_l0(core, "dv_l0", sum_rows, s.d_v, 1);
  Ring<Buffer::kL0C, float> dk_l0(core, "dk_l0", sum_rows, s.d_qk, 1);
  Ring<Buffer::kL0C, float> dk_rope_l0(core, "dk_rope_l0", sum_rows, s.d_rope, 1);
  Ring<Buffer::kL0C, float> part_l0(core, "part_l0", t.keep_sums ? t.piece() : std::max(t.piece(), t.n),
                                    widest, t.sum_stages);

  struct Lane {
    Lane(Vector& vector, std::int64_t rows, const FlashAttentionGradTiling& t)
        : core(vector),
          s_ub(core, "s_ub", rows, t.piece(), t.hand_over_stages()),
          dp_ub(core, "dp_ub", rows, t.piece(), t.hand_over_stages()),
          p_ub(core, "p_ub", rows, t.piece(), t.ub_stages),
          ds_ub(core, "ds_ub", rows, t.piece(), t.ub_stages),
          lse_ub(core, "lse_ub", 1, t.piece(), t.ub_stages),
          delta_ub(core, "delta_ub", 1, t.piece(), t.ub_stages) {}

    Vector& core;
    Ring<Buffer::kUB, float> s_ub, dp_ub;
    Ring<Buffer::kUB, T> p_ub, ds_ub;
    Ring<Buffer::kUB, float> lse_ub, delta_ub;
  };
  std::array<std::optional<Lane>, kMaxLanes> lanes;
  for (std::size_t i = 0; i < lane_count; ++i) lanes[i].emplace(core.vectors()[i], lane_rows[0].size(), t);

  struct Step : FlashAttentionGradStep {
    L1Tile<T> k, k_rope, v;                      // Of `keys`.
    L1Tile<T> q, q_rope, dout;                   // Of `block`.
    L1Tile<T> p, ds;                             // (keys, block)
    std::array<UbTile<float>, kMaxLanes> s, dp;  // (lane's keys, queries)
  };

  // acc (+)= op(a) op(b), along what is summed over in steps of t.k0.
  const auto multiply = [&](L0CTile<float> acc, L1Tile<T> a1, Transpose turn_a, L1Tile<T> b1,
                            Transpose turn_b, Accumulate accumulate) {
    const bool a_turned = turn_a == Transpose::kYes, b_turned = turn_b == Transpose::kYes;
    for (const Range k0 : AtLeastOnce(Split(a_turned ? a1.rows() : a1.cols(), t.k0))) {
      const L0ATile<T> a0 = a_l0.Next(acc.rows(), k0.size());
      const L0BTile<T> b0 = b_l0.Next(k0.size(), acc.cols());
      core.Load(a0, a_turned ? a1.Rows(k0) : a1.Cols(k0), turn_a);
      core.Load(b0, b_turned ? b1.Cols(k0) : b1.Rows(k0), turn_b);
      core.Mmad(acc, a0, b0, accumulate);
      accumulate = Accumulate::kYes;
    }
  };
  const auto load = [&](Ring<Buffer::kL1, T>& ring, const Operand& source, Range rows, std::int64_t cols) {
    const L1Tile<T> tile = ring.Next(rows.size(), cols);
    LoadOperand(core, tile, source.Block(rows, {0, cols}));
    return tile;
  };
  // For every Vector core its lane, its number and its rows of the step's keys.
  const auto for_each_lane = [&](Step& step, auto&& body) {
    for (std::size_t i = 0; i < lane_count; ++i) {
      const Range all = lane_rows[static_cast<std::int64_t>(i)];
      const Range rows{std::min(all.begin, step.keys.size()), std::min(all.end, step.keys.size())};
      if (!rows.empty()) body(*lanes[i], i, rows);
    }
  };

  L1Tile<T> k1, k_rope1, v1, q1, q_rope1, dout1;  // Of the block of keys and of queries in the scores stage.
  const auto scores = [&](Step& step) {
    const std::int64_t rope_head = s.rope_heads == 1 ? 0 : step.kv_head;
    if (step.first_of_keys()) {
      k1 = load(k_l1, {MatrixOf(*g.k, step.b, step.kv_head), {}, false}, step.keys, s.d_qk);
      v1 = load(v_l1, {MatrixOf(*g.v, step.b, step.kv_head), {}, false}, step.keys, s.d_v);
      if (rope)
        k_rope1 = load(k_rope_l1, {MatrixOf(*g.k_rope, step.b, rope_head), {}, false}, step.keys, s.d_rope);
    }
    if (step.first_of_block()) {
      q1 = load(q_l1, g.QueriesOf(*g.q, g.q_packed, t, step.b, step.h), step.block, s.d_qk);
      dout1 = load(dout_l1, g.QueriesOf(*g.dout, g.dout_packed, t, step.b, step.h), step.block, s.d_v);
      if (rope)
        q_rope1 =
            load(q_rope_l1, g.QueriesOf(*g.q_rope, g.q_rope_packed, t, step.b, step.h), step.block, s.d_rope);
    }
    const Range keys{0, step.keys.size()};
    step.k = k1.Rows(keys), step.v = v1.Rows(keys), step.q = q1, step.dout = dout1;
    if (rope) step.k_rope = k_rope1.Rows(keys), step.q_rope = q_rope1;

    const L0CTile<float> score = score_l0.Next(keys.size(), step.queries.size());
    multiply(score, step.k, Transpose::kNo, step.q.Rows(step.Piece()), Transpose::kYes, Accumulate::kNo);
    if (rope) {
      multiply(score, step.k_rope, Transpose::kNo, step.q_rope.Rows(step.Piece()), Transpose::kYes,
               Accumulate::kYes);
    }
    for_each_lane(step, [&](Lane& lane, std::size_t i, Range rows) {
      step.s[i] = lane.s_ub.Next(rows.size(), step.queries.size());
      lane.core.Move(step.s[i], score.Rows(rows));
    });
    const L0CTile<float> dp = score_l0.Next(keys.size(), step.queries.size());
    multiply(dp, step.v, Transpose::kNo, step.dout.Rows(step.Piece()), Transpose::kYes, Accumulate::kNo);
    for_each_lane(step, [&](Lane& lane, std::size_t i, Range rows) {
      step.dp[i] = lane.dp_ub.Next(rows.size(), step.queries.size());
      lane.core.Move(step.dp[i], dp.Rows(rows));
    });
  };

  L1Tile<T> p1, ds1;  // Of the block of queries in the weights stage.
  const auto weights = [&](Step& step) {
    if (step.first_of_block()) {
      p1 = p_l1.Next(step.keys.size(), step.block.size());
      ds1 = ds_l1.Next(step.keys.size(), step.block.size());
    }
    step.p = p1, step.ds = ds1;
    for_each_lane(step, [&](Lane& lane, std::size_t i, Range rows) {
      const UbTile<float> lse = lane.lse_ub.Next(1, step.queries.size());
      const UbTile<float> delta = lane.delta_ub.Next(1, step.queries.size());
      lane.core.Load(lse, MatrixOf(*g.row_lse, step.b, step.h).Rows(step.queries).Transposed());
      lane.core.Load(delta, MatrixOf(*g.delta, step.b, step.h).Rows(step.queries).Transposed());
      float scale = g.scale;
      const Range keys{step.keys.begin + rows.begin, step.keys.begin + rows.end};
      const AttentionBand& band = g.Band(s, step.b);
      if (band.SeenByAll(step.queries, keys) != keys) {
        // Scaled first: a scale of 0 or below must not turn -inf into something else.
        lane.core.MulScalar(step.s[i], step.s[i], scale);
        const std::int64_t open = std::clamp<std::int64_t>(band.prefix - keys.begin, 0, keys.size());
        const std::int64_t offset = keys.begin + open - step.queries.begin;
        lane.core.MaskOutside(step.s[i].Rows({open, keys.size()}), offset - band.highest,
                              offset - band.lowest, -std::numeric_limits<float>::infinity());
        scale = 1.0f;
      }
      const UbTile<T> p = lane.p_ub.Next(rows.size(), step.queries.size());
      const UbTile<T> ds = lane.ds_ub.Next(rows.size(), step.queries.size());
      lane.core.AttentionGradStep(p, ds, step.s[i], step.dp[i], lse, delta, scale);
      lane.core.Move(step.p.Part(rows, step.Piece()), p);
      lane.core.Move(step.ds.Part(rows, step.Piece()), ds);
    });
  };

  L0CTile<float> dv, dk, dk_rope;  // Of the block of keys in the products stage, where they are kept.
  // A sum over all queries of a block of keys: kept in L0C until the last step, or added up in GM by every step.
  const auto add_keys = [&](const Step& step, Ring<Buffer::kL0C, float>& ring, L0CTile<float>& sum,
                            const GmTensor& sums, L1Tile<T> left, L1Tile<T> right) {
    const Accumulate accumulate = step.first_block ? Accumulate::kNo : Accumulate::kYes;
    const Gm gm = MatrixOf(sums, step.b, step.kv_head);
    if (!t.keep_sums) {
      const L0CTile<float> part = part_l0.Next(step.keys.size(), right.cols());
      multiply(part, left, Transpose::kNo, right, Transpose::kNo, Accumulate::kNo);
      core.Store(gm.Rows(step.keys), part, accumulate);
      return;
    }
    if (step.first_block) sum = ring.Next(step.keys.size(), right.cols());
    multiply(sum.Rows({0, step.keys.size()}), left, Transpose::kNo, right, Transpose::kNo, accumulate);
    if (step.last_block)
      core.Store(gm.Rows({step.keys.begin, step.keys.begin + sum.rows()}), sum, Accumulate::kNo);
  };
  const auto add_queries = [&](const Step& step, const GmTensor& parts, L1Tile<T> right) {
    const L0CTile<float> part = part_l0.Next(step.queries.size(), right.cols());
    multiply(part, step.ds.Cols(step.Piece()), Transpose::kYes, right, Transpose::kNo, Accumulate::kNo);
    core.Store(MatrixOf(parts, step.chunk, step.b * s.heads + step.h).Rows(step.queries), part,
               step.adds ? Accumulate::kYes : Accumulate::kNo);
  };
  const auto products = [&](Step& step) {
    if (!step.queries.empty()) {
      add_queries(step, *g.dq_parts, step.k);
      if (rope) add_queries(step, *g.dq_rope_parts, step.k_rope);
    }
    if (!step.last_of_block()) return;
    add_keys(step, dv_l0, dv, *g.dv_sums, step.p, step.dout);
    add_keys(step, dk_l0, dk, *g.dk_sums, step.ds, step.q);
    if (rope) add_keys(step, dk_rope_l0, dk_rope, *g.dk_rope_sums, step.ds, step.q_rope);
  };

  FlashAttentionGradSteps steps(g, s, t, core.index(), core.count());
  Pipeline<Step>(
      t.depth, [&](Step& step) { return steps.Next(step); }, scores, weights, products);
}

// Third phase, on Vector cores: a gradient as the sum of its parts, in their order, times `scale`.
struct FlashAttentionGradSum {
  const GmTensor* gradient = nullptr;  // (b, n, s, d)
  const GmTensor* parts = nullptr;
  float scale = 1;
  enum class Of { kOne, kHeads, kChunks } of = Of::kOne;

  std::int64_t count(const FlashAttentionGradShape& s, const FlashAttentionGradTiling& t) const {
    return of == Of::kChunks ? t.chunks : of == Of::kHeads ? s.kv_heads : 1;
  }
  Gm Part(std::int64_t b, std::int64_t n, std::int64_t part) const {
    if (of == Of::kChunks) return MatrixOf(*parts, part, b * gradient->sizes[1] + n);
    return MatrixOf(*parts, b, of == Of::kHeads ? part : n);
  }
  // Visits the rows of `rows` that a part has, in ranges. A chunk has those that see any of its blocks of keys.
  template <class Visit>
  void ForEachRange(const FlashAttentionGradOperands& g, const FlashAttentionGradShape& s,
                    const FlashAttentionGradTiling& t, std::int64_t b, std::int64_t part, Range rows,
                    Visit&& visit) const {
    if (of != Of::kChunks) return visit(rows);
    std::int64_t done = rows.begin;
    for (std::int64_t block = part; block < t.key_blocks(s) && done < rows.end; block += t.chunks) {
      const Range seeing = SeeingQueries(g.Band(s, b), Split(s.skv, t.n)[block], s.sq, t.strip);
      const Range has{std::max(seeing.begin, done), std::min(seeing.end, rows.end)};
      if (has.empty()) continue;
      visit(has);
      done = has.end;
    }
  }
};

template <VectorCore Core>
void FlashAttentionGradSumKernel(Core& core, const FlashAttentionGradSum& sum,
                                 const FlashAttentionGradOperands& g, const FlashAttentionGradShape& s,
                                 const FlashAttentionGradTiling& t, std::int64_t rows_at_once) {
  const auto& sizes = sum.gradient->sizes;
  Ring<Buffer::kUB, float> sum_ub(core, "sum_ub", rows_at_once, sizes[3], 2);
  Ring<Buffer::kUB, float> part_ub(core, "part_ub", rows_at_once, sizes[3], 2);
  const Split blocks(sizes[2], rows_at_once);
  for (std::int64_t task = core.index(); task < sizes[0] * sizes[1] * blocks.count(); task += core.count()) {
    const std::int64_t b = task / blocks.count() / sizes[1], n = task / blocks.count() % sizes[1];
    const Range rows = blocks[task % blocks.count()];
    const UbTile<float> total = sum_ub.Next(rows.size(), sizes[3]);
    bool started = false;
    for (std::int64_t i = 0; i < sum.count(s, t); ++i) {
      sum.ForEachRange(g, s, t, b, i, rows, [&](Range has) {
        if (!started && has == rows) {
          core.Load(total, sum.Part(b, n, i).Rows(rows));
        } else {
          if (!started) core.Fill(total, 0.0f);
          const UbTile<float> part = part_ub.Next(has.size(), sizes[3]);
          const UbTile<float> to = total.Rows({has.begin - rows.begin, has.end - rows.begin});
          core.Load(part, sum.Part(b, n, i).Rows(has));
          core.Add(to, to, part);
        }
        started = true;
      });
    }
    if (!started) core.Fill(total, 0.0f);
    core.MulScalar(total, total, sum.scale);
    core.Store(MatrixOf(*sum.gradient, b, n).Rows(rows), total);
  }
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_FLASH_ATTENTION_GRAD_KERNEL_H_
