// The model's counts of attention and its gradient against closed forms of the kernels' loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/attention_sequences.h"
#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/traffic.h"
#include "tests/support/shapes.h"
#include "tiling/flash_attention_grad_steps.h"
#include "tiling/flash_attention_grad_tiling.h"
#include "tiling/flash_attention_steps.h"
#include "tiling/flash_attention_tiling.h"

namespace cubist::testing {
namespace {

struct AttentionCase {
  std::int64_t batch, heads, kv_heads, rope_heads, sq, skv, dqk, dr, dv;
  DType in, out;
  Causal causal = Causal::kNone;
  bool lse = true;
  bool mask = false;

  FlashAttentionArgs args() const {
    FlashAttentionArgs args;
    args.q = ConstTensor(nullptr, in, {batch, heads, sq, dqk});
    args.k = ConstTensor(nullptr, in, {batch, kv_heads, skv, dqk});
    args.v = ConstTensor(nullptr, in, {batch, kv_heads, skv, dv});
    if (dr > 0) {
      args.q_rope = ConstTensor(nullptr, in, {batch, heads, sq, dr});
      args.k_rope = ConstTensor(nullptr, in, {batch, rope_heads, skv, dr});
    }
    args.out = Tensor(nullptr, out, {batch, heads, sq, dv});
    if (lse) args.lse = Tensor(nullptr, DType::kF32, {batch, heads, sq});
    if (mask) args.mask = ConstTensor(nullptr, DType::kBool, {batch, 1, sq, skv});
    args.causal = causal;
    return args;
  }
  FlashAttentionShape shape() const {
    FlashAttentionShape s;
    s.batches = batch, s.heads = heads, s.kv_heads = kv_heads, s.rope_heads = dr > 0 ? rope_heads : 0;
    s.sq = sq, s.skv = skv, s.d_qk = dqk, s.d_rope = dr, s.d_v = dv, s.in = in, s.out = out;
    s.band = BandOf(causal, {}, sq, skv), s.mask = mask;
    if (sq <= 16 && heads > kv_heads) {  // Heads that share keys are rows of one.
      s.band.fold = heads / kv_heads;
      s.heads = kv_heads, s.sq *= s.band.fold;
    }
    return s;
  }
  std::string Name() const {
    return Join("b", batch, " n", heads, "/", kv_heads, " s", sq, "x", skv, " d", dqk, "+", dr, "/", dv, " ",
                NameOf(in));
  }
};

std::vector<AttentionCase> AttentionCases() {
  return {{1, 2, 2, 0, 512, 512, 128, 0, 128, DType::kBF16, DType::kBF16},
          {1, 4, 4, 4, 512, 600, 128, 64, 128, DType::kBF16, DType::kBF16, Causal::kBottomRight},
          {2, 6, 3, 1, 333, 257, 40, 24, 72, DType::kF16, DType::kF32, Causal::kTopLeft},
          {1, 8, 1, 0, 3, 1015, 64, 0, 64, DType::kBF16, DType::kF32},
          {1, 2, 1, 0, 300, 100, 33, 0, 17, DType::kF32, DType::kF32, Causal::kBottomRight, false},
          {1, 1, 1, 0, 70, 0, 16, 0, 24, DType::kBF16, DType::kBF16},
          {3, 2, 2, 0, 129, 1031, 192, 0, 128, DType::kF16, DType::kF16, Causal::kNone, false},
          {2, 2, 1, 0, 300, 290, 64, 0, 80, DType::kBF16, DType::kBF16, Causal::kBottomRight, true, true},
          {2, 1, 1, 1, 128, 1024, 512, 64, 512, DType::kBF16, DType::kBF16},
          {1, 2, 1, 0, 90, 150, 576, 0, 512, DType::kF32, DType::kF32, Causal::kBottomRight}};
}

// What a piece fetches to know which of its blocks a mask hides, some blocks at a time: counts at both ends of each.
std::int64_t HiddenCountsFetched(const FlashAttentionShape& s, const FlashAttentionTiling& t,
                                 const FlashAttentionPiece& piece) {
  std::int64_t counts = 0;
  for (const Range some : Split(BlocksOf(piece.keys, t).count(), kHiddenCounts - 1))
    counts += some.size() + 1;
  return counts * CeilDiv(piece.rows.size(), t.mask_cell(s)) * 4;
}

TEST(TrafficTest, FlashAttention) {
  for (const ChipSpec* chip : {&Ascend910B2(), &Ascend910B4()}) {
    for (const AttentionCase& x : AttentionCases()) {
      SCOPED_TRACE(x.Name() + " " + chip->name);
      const FlashAttentionShape shape = x.shape();
      FlashAttentionTiling t;
      Profile profile;
      ASSERT_TRUE(IsOk(FlashAttention(NpuThatTells(*chip, shape, &t), x.args(), &profile)));
      ExpectSane(*chip, profile);

      const std::int64_t e = SizeOf(x.in), d_scores = x.dqk + x.dr, heads = x.batch * shape.heads;
      Traffic one_head;
      std::int64_t macs = 0;
      for (const Range q : Split(shape.sq, t.m)) {
        // Q in and O out once.
        one_head[Path::kGmToL1Nd2Nz] += q.size() * d_scores * e;
        one_head[Path::kUbToGm] += q.size() * (x.dv * SizeOf(x.out) + (x.lse ? 4 : 0));
        FlashAttentionPieces pieces(shape.band, q, {0, x.skv}, t);
        for (FlashAttentionPiece piece; pieces.Next(piece);) {
          const std::int64_t rows = piece.rows.size();
          if (x.mask && !piece.keys.empty()) one_head[Path::kGmToUb] += HiddenCountsFetched(shape, t, piece);
          for (const Range kv : BlocksOf(piece.keys, t)) {
            const std::int64_t keys = kv.size();
            macs += rows * keys * (d_scores + x.dv);
            // K and V, and P on its way back; S, PV and P handed over. A step without keys hands over PV = 0.
            one_head[Path::kGmToL1Nd2Nz] += (keys * (d_scores + x.dv) + rows * keys) * e;
            one_head[Path::kL0CToGm] += rows * (keys + x.dv) * 4;
            one_head[Path::kGmToUb] += rows * (keys + x.dv) * 4 + (x.mask ? rows * keys : 0);
            one_head[Path::kUbToGm] += rows * keys * e;
            for (std::int64_t d : {x.dqk, x.dr}) {
              for (const Range k0 : Split(d, t.k0)) {
                one_head[Path::kL1ToL0A] += FractalBytes(rows, k0.size(), x.in);
                one_head[Path::kL1ToL0B] += FractalBytes(k0.size(), keys, x.in);
              }
            }
            for (const Range cols : Split(x.dv, t.v_cols(x.dv))) {
              for (const Range k0 : Split(keys, t.k0)) {
                one_head[Path::kL1ToL0A] += FractalBytes(rows, k0.size(), x.in);
                one_head[Path::kL1ToL0B] += FractalBytes(k0.size(), cols.size(), x.in);
              }
            }
          }
        }
      }
      for (auto& [path, bytes] : one_head) bytes *= heads;
      if (x.mask) {  // Read once for all heads, and counted.
        one_head[Path::kGmToUb] += x.batch * x.sq * x.skv;
        one_head[Path::kUbToGm] +=
            x.batch * CeilDiv(x.sq, t.mask_cell(shape)) * (x.skv + CeilDiv(x.skv, 512)) * 4;
      }
      EXPECT_EQ(profile.macs, macs * heads);
      EXPECT_EQ(profile.cores_used, std::min<std::int64_t>(t.tasks(shape), chip->cube_cores));
      ExpectTraffic(profile, one_head);
      EXPECT_GT(profile.workspace_bytes, 0);
    }
  }
}

FlashAttentionGradArgs GradArgsOf(const AttentionCase& x) {
  const FlashAttentionArgs f = x.args();
  FlashAttentionGradArgs args;
  args.q = f.q, args.k = f.k, args.v = f.v, args.q_rope = f.q_rope, args.k_rope = f.k_rope;
  args.out = f.out, args.dout = ConstTensor(nullptr, x.in, {x.batch, x.heads, x.sq, x.dv});
  args.lse = ConstTensor(nullptr, DType::kF32, {x.batch, x.heads, x.sq});
  args.dq = Tensor(nullptr, x.out, {x.batch, x.heads, x.sq, x.dqk});
  args.dk = Tensor(nullptr, x.out, {x.batch, x.kv_heads, x.skv, x.dqk});
  args.dv = Tensor(nullptr, x.out, {x.batch, x.kv_heads, x.skv, x.dv});
  if (x.dr > 0) {
    args.dq_rope = Tensor(nullptr, x.out, {x.batch, x.heads, x.sq, x.dr});
    args.dk_rope = Tensor(nullptr, x.out, {x.batch, x.rope_heads, x.skv, x.dr});
  }
  args.causal = x.causal;
  return args;
}

// The bytes of the products' phase, step by step, and of the rows before and the sums after it.
class GradTraffic {
 public:
  GradTraffic(const AttentionCase& x, const FlashAttentionGradShape& s, const FlashAttentionGradTiling& t)
      : x_(x), s_(s), t_(t), e_(SizeOf(x.in)), schedule_(s_, t_, {}) {
    AddRows();
    FlashAttentionGradSteps steps(schedule_, s_, t_, 0, 1);
    for (FlashAttentionGradStep step; steps.Next(step);) AddStep(step);
    AddSums();
  }

  std::int64_t macs = 0;
  Traffic traffic;

 private:
  void AddRows() {
    const std::int64_t rows = x_.batch * x_.heads * x_.sq;
    traffic[Path::kGmToUb] += rows * (x_.dv * (SizeOf(x_.out) + e_) + 4);
    traffic[Path::kUbToGm] += rows * 2 * 4;
    if (x_.causal == Causal::kBottomRight && x_.sq > x_.skv && x_.skv > 0) {  // The first rows see no key.
      const std::int64_t copies = rows * (x_.dqk + x_.dr + x_.dv) * e_;
      traffic[Path::kGmToUb] += copies + rows * 4, traffic[Path::kUbToGm] += copies;
    }
    if (!s_.hides()) return;  // A copy of k.
    const std::int64_t keys = x_.batch * x_.skv * (x_.kv_heads * x_.dqk + x_.rope_heads * x_.dr) * e_;
    traffic[Path::kGmToUb] += keys, traffic[Path::kUbToGm] += keys;
  }
  // (rows, k) times (k, cols), `k` in steps of k0.
  void AddProduct(std::int64_t rows, std::int64_t k, std::int64_t cols, bool turn_a, bool turn_b) {
    if (cols == 0) return;
    macs += rows * k * cols;
    for (const Range k0 : Split(k, t_.k0)) {
      traffic[Path::kL1ToL0A] +=
          turn_a ? FractalBytes(k0.size(), rows, x_.in) : FractalBytes(rows, k0.size(), x_.in);
      traffic[Path::kL1ToL0B] +=
          turn_b ? FractalBytes(cols, k0.size(), x_.in) : FractalBytes(k0.size(), cols, x_.in);
    }
  }
  // The same by the columns that are made at a time, whose accumulators go to GM.
  void AddGradient(std::int64_t rows, std::int64_t k, std::int64_t cols, bool turn_a) {
    for (const Range part : Split(cols, t_.cols_at_once(cols)))
      AddProduct(rows, k, part.size(), turn_a, false);
    traffic[Path::kL0CToGm] += rows * cols * 4;
  }
  void AddStep(const FlashAttentionGradStep& step) {
    const std::int64_t keys = step.keys.size(), queries = step.queries.size(), block = step.block.size();
    const std::int64_t d_all = x_.dqk + x_.dr + x_.dv;
    if (step.first_of_keys()) traffic[Path::kGmToL1Nd2Nz] += keys * d_all * e_;
    if (step.first_of_block()) traffic[Path::kGmToL1Nd2Nz] += block * d_all * e_;
    for (std::int64_t d : {x_.dqk, x_.dr, x_.dv}) AddProduct(keys, d, queries, false, true);
    // S and dP handed over, p and ds handed back; lse and delta, once for each Vector core that has keys.
    traffic[Path::kL0CToGm] += 2 * keys * queries * 4;
    traffic[Path::kGmToUb] += 2 * keys * queries * 4;
    traffic[Path::kUbToGm] += 2 * keys * queries * e_;
    traffic[Path::kGmToL1Nd2Nz] += 2 * keys * queries * e_;
    traffic[Path::kGmToUb] += (keys > CeilDiv(t_.n, 2) ? 2 : 1) * 2 * queries * 4;
    for (std::int64_t d : {x_.dqk, x_.dr}) AddGradient(queries, keys, d, true);
    if (!step.last_of_block()) return;
    for (std::int64_t d : {x_.dqk, x_.dr, x_.dv})
      AddGradient(keys, block, d, false);  // No sum is kept in L0C.
  }
  void AddSums() {
    const std::int64_t out = SizeOf(x_.out), keys = x_.batch * x_.kv_heads * x_.skv;
    const std::int64_t queries = x_.batch * x_.heads * x_.sq;
    // Of dQ the rows of each chunk that see any of its keys; of a shared head of k_rope every KV head's part.
    std::int64_t parts = 0;
    for (std::int64_t chunk = 0; chunk < t_.chunks; ++chunk) {
      std::int64_t done = 0;
      const Split blocks(x_.skv, t_.n);
      for (std::int64_t i = chunk; i < blocks.count(); i += t_.chunks) {
        const Range seeing = SeeingQueries(s_.band, blocks[i], x_.sq, t_.strip);
        parts += std::max<std::int64_t>(seeing.end - std::max(seeing.begin, done), 0);
        done = std::max(done, seeing.end);
      }
    }
    traffic[Path::kGmToUb] += x_.batch * x_.heads * parts * (x_.dqk + x_.dr) * 4;
    traffic[Path::kUbToGm] += queries * (x_.dqk + x_.dr) * out;
    traffic[Path::kGmToUb] += keys * (x_.dqk + x_.dr + x_.dv) * 4;
    traffic[Path::kUbToGm] += keys * (x_.dqk + x_.dv) * out + x_.batch * x_.rope_heads * x_.skv * x_.dr * out;
  }

  const AttentionCase& x_;
  const FlashAttentionGradShape& s_;
  const FlashAttentionGradTiling& t_;
  std::int64_t e_;
  FlashAttentionGradSchedule schedule_;
};

TEST(TrafficTest, FlashAttentionGrad) {
  for (const ChipSpec* chip : {&Ascend910B2(), &Ascend910B4()}) {
    for (const AttentionCase& x : AttentionCases()) {
      SCOPED_TRACE(x.Name() + " " + chip->name);
      FlashAttentionGradShape s;
      s.batches = x.batch, s.heads = x.heads, s.kv_heads = x.kv_heads,
      s.rope_heads = x.dr > 0 ? x.rope_heads : 0;
      s.sq = x.sq, s.skv = x.skv, s.d_qk = x.dqk, s.d_rope = x.dr, s.d_v = x.dv, s.in = x.in;
      s.band = BandOf(x.causal, {}, x.sq, x.skv);
      FlashAttentionGradTiling t;
      Profile profile;
      ASSERT_TRUE(IsOk(FlashAttentionGrad(NpuThatTells(*chip, s, &t), GradArgsOf(x), &profile)));
      ASSERT_FALSE(t.keep_sums);
      EXPECT_EQ(t.width > 0,
                x.dqk > 512 && x.in == DType::kF32);  // Only where L0B has no room for all columns.
      ExpectSane(*chip, profile);
      const GradTraffic expected(x, s, t);
      EXPECT_EQ(profile.macs, expected.macs);
      ExpectTraffic(profile, expected.traffic);
      // The sums' fp32 copies at least, which are linear in the length.
      const std::int64_t keys = x.batch * x.kv_heads * x.skv, rows = x.batch * x.heads * x.sq;
      const std::int64_t sums = 4 * (keys * (x.dqk + x.dr + x.dv) + rows * (t.chunks * (x.dqk + x.dr) + 2));
      EXPECT_GE(profile.workspace_bytes, sums);
    }
  }
}

}  // namespace
}  // namespace cubist::testing
