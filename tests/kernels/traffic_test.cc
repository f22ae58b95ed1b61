// The model's counts against closed forms of the kernels' loops, and its profiles against what must hold of
// any: the same kernels as on the host, recorded.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/attention_sequences.h"
#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"
#include "kernels/matmul.h"
#include "kernels/token_permute.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"
#include "tiling/flash_attention_grad_steps.h"
#include "tiling/flash_attention_grad_tiling.h"
#include "tiling/flash_attention_steps.h"
#include "tiling/flash_attention_tiling.h"
#include "tiling/matmul_tiling.h"
#include "tiling/token_permute_tiling.h"

namespace cubist::testing {
namespace {

std::int64_t Bytes(const Profile& profile, Path path) {
  return profile.path_bytes[static_cast<std::size_t>(path)];
}

using Traffic = std::map<Path, std::int64_t>;

// Every path carries what is expected, those that are not named nothing.
void ExpectTraffic(const Profile& profile, const Traffic& expected) {
  std::int64_t read = 0, written = 0;
  for (int p = 0; p < kPathCount; ++p) {
    const Path path = static_cast<Path>(p);
    const auto found = expected.find(path);
    const std::int64_t bytes = found == expected.end() ? 0 : found->second;
    EXPECT_EQ(Bytes(profile, path), bytes) << NameOf(path);
    if (path == Path::kGmToL1 || path == Path::kGmToL1Nd2Nz || path == Path::kGmToUb) read += bytes;
    if (path == Path::kL0CToGm || path == Path::kL1ToGm || path == Path::kUbToGm) written += bytes;
  }
  EXPECT_EQ(profile.gm_read, read);
  EXPECT_EQ(profile.gm_written, written);
}

// Bytes of an operand tile: fractals of 16 rows by 32 bytes.
std::int64_t FractalBytes(std::int64_t rows, std::int64_t cols, DType dtype) {
  return RoundUp(rows, 16) * RoundUp(cols * SizeOf(dtype), 32);
}

// What must hold of a profile whatever the kernel.
void ExpectSane(const ChipSpec& chip, const Profile& p) {
  EXPECT_EQ(p.chip, chip.name);
  EXPECT_GT(p.instructions, 0);
  EXPECT_GE(p.cores_used, 1);
  EXPECT_GT(p.time_s, chip.sync.launch_s);
  EXPECT_NEAR(p.cycles, p.time_s * chip.clock_hz, 1e-6 * p.cycles);
  for (int i = 0; i < kPipeCount; ++i) {
    const auto& busy = p.busy[static_cast<std::size_t>(i)];
    for (double share : {busy.cube_side, busy.vector_side}) {
      EXPECT_GE(share, 0) << NameOf(static_cast<Pipe>(i));
      EXPECT_LE(share, 1) << NameOf(static_cast<Pipe>(i));
    }
  }
  for (double share : {p.cube_utilisation, p.vector_utilisation, p.mte_utilisation, p.l2_hit_rate}) {
    EXPECT_GE(share, 0);
    EXPECT_LE(share, 1);
  }
  EXPECT_GT(p.mte_utilisation, 0);
  if (p.macs > 0) {
    EXPECT_GT(p.cube_utilisation, 0);
  }
  // No faster than the chip: every byte passes L2, every product the Cubes.
  const auto d = [](std::int64_t x) { return static_cast<double>(x); };
  EXPECT_GE(p.time_s, d(p.gm_read) / chip.memory.l2_read_bytes_per_s);
  EXPECT_GE(p.time_s, d(p.gm_written) / chip.memory.l2_write_bytes_per_s);
  EXPECT_GE(p.time_s, d(p.gm_read) * (1 - p.l2_hit_rate) / chip.memory.hbm_bytes_per_s);
  EXPECT_GE(p.time_s * (1 + 1e-9), p.hbm_bytes / chip.memory.hbm_bytes_per_s);
  EXPECT_GE(p.time_s * chip.clock_hz * chip.cube_cores, d(p.macs) / (16 * 16 * 16));
  EXPECT_FALSE(p.bound.empty());
  EXPECT_FALSE(p.verdict.empty());
  EXPECT_EQ(p.timeline, nullptr);
}

void ExpectSameProfile(const Profile& x, const Profile& y) {
  EXPECT_EQ(x.time_s, y.time_s);
  EXPECT_EQ(x.cycles, y.cycles);
  EXPECT_EQ(x.instructions, y.instructions);
  EXPECT_EQ(x.macs, y.macs);
  EXPECT_EQ(x.path_bytes, y.path_bytes);
  EXPECT_EQ(x.workspace_bytes, y.workspace_bytes);
  EXPECT_EQ(x.l2_hit_rate, y.l2_hit_rate);
  EXPECT_EQ(x.bound, y.bound);
  for (std::size_t p = 0; p < kPipeCount; ++p) {
    EXPECT_EQ(x.busy[p].cube_side, y.busy[p].cube_side);
    EXPECT_EQ(x.busy[p].vector_side, y.busy[p].vector_side);
  }
}

// A pipe does one thing at a time, within the time of the call, and every instruction has its slice.
void ExpectOrderlyTimeline(const Profile& profile) {
  ASSERT_NE(profile.timeline, nullptr);
  EXPECT_EQ(static_cast<std::int64_t>(profile.timeline->size()), profile.instructions);
  std::map<std::tuple<int, int, Pipe>, std::vector<TimelineSlice>> tracks;
  for (const TimelineSlice& slice : *profile.timeline) {
    tracks[{slice.core, slice.lane, slice.pipe}].push_back(slice);
    ASSERT_GE(slice.start_us, 0);
    ASSERT_LE(slice.start_us, slice.end_us);
    ASSERT_LE(slice.end_us, profile.time_s * 1e6 * (1 + 1e-12));
    ASSERT_STRNE(slice.name, "");
    ASSERT_STRNE(slice.file, "");
    ASSERT_GT(slice.line, 0u);
  }
  for (auto& [track, slices] : tracks) {
    std::stable_sort(slices.begin(), slices.end(),
                     [](const auto& x, const auto& y) { return x.start_us < y.start_us; });
    for (std::size_t i = 1; i < slices.size(); ++i) {
      ASSERT_GE(slices[i].start_us, slices[i - 1].end_us - 1e-9)
          << slices[i - 1].name << " and " << slices[i].name << " on core " << std::get<0>(track) << " lane "
          << std::get<1>(track) << " pipe " << NameOf(std::get<2>(track));
    }
  }
}

// ---- Matmul ----

struct MatmulCase {
  std::int64_t m, n, k;
  DType in, out;
  std::optional<DType> bias = {};
  bool transpose_a = false, transpose_b = false;

  MatmulArgs args() const {
    MatmulArgs args;
    args.a = transpose_a ? ConstTensor(nullptr, in, {k, m}) : ConstTensor(nullptr, in, {m, k});
    args.b = transpose_b ? ConstTensor(nullptr, in, {n, k}) : ConstTensor(nullptr, in, {k, n});
    if (bias) args.bias = ConstTensor(nullptr, *bias, {n});
    args.c = Tensor(nullptr, out, {m, n});
    args.transpose_a = transpose_a, args.transpose_b = transpose_b;
    return args;
  }
  std::string Name() const { return Join(m, "x", n, "x", k, " ", NameOf(in), bias ? " bias" : ""); }
};

// The shape that the call gives to the tiling.
cubist::MatmulShape ShapeOf(const MatmulCase& x) {
  cubist::MatmulShape shape;
  shape.m = x.m, shape.n = x.n, shape.k = x.k, shape.in = x.in, shape.out = x.out,
  shape.bias = x.bias.has_value();
  shape.a_row_bytes = x.transpose_a ? (x.m == 1 ? SizeOf(x.in) : 0) : x.k * SizeOf(x.in);
  shape.b_row_bytes = x.transpose_b ? (x.k == 1 ? SizeOf(x.in) : 0) : x.n * SizeOf(x.in);
  shape.b_col_bytes = x.transpose_b && x.k != 1 ? x.k * SizeOf(x.in) : 0;
  return shape;
}

std::vector<MatmulCase> MatmulCases() {
  return {{1024, 1024, 1024, DType::kBF16, DType::kBF16},
          {1000, 1010, 1020, DType::kBF16, DType::kF32, DType::kF32},
          {129, 257, 300, DType::kF32, DType::kF32, DType::kF32},
          {517, 771, 333, DType::kF16, DType::kF16, DType::kF16},
          {2048, 384, 700, DType::kBF16, DType::kBF16, {}, true, false},
          {384, 1536, 512, DType::kF32, DType::kF32, {}, false, true},
          {7, 4099, 129, DType::kF16, DType::kF32, {}, true, true},
          {1, 1, 1, DType::kF32, DType::kF32},
          {65, 63, 0, DType::kBF16, DType::kF32, DType::kBF16}};
}

TEST(TrafficTest, Matmul) {
  for (const ChipSpec* chip : {&Ascend910B2(), &Ascend910B4()}) {
    for (const MatmulCase& x : MatmulCases()) {
      SCOPED_TRACE(x.Name() + " " + chip->name);
      MatmulTiling t;
      ASSERT_TRUE(IsOk(Choose(*chip, ShapeOf(x), &t)));
      Profile profile;
      auto listening = std::make_shared<Tuning>();
      listening->on_choice = [&](const TilingChoice& met) {
        EXPECT_TRUE(IsOk(ParseTiling(*chip, ShapeOf(x), met.chosen, &t)));
      };
      ASSERT_TRUE(IsOk(Matmul(Npu(*chip, {.with_data = false, .tuning = listening}), x.args(), &profile)));
      ExpectSane(*chip, profile);

      const std::int64_t rows = CeilDiv(x.m, t.m), cols = CeilDiv(x.n, t.n);
      EXPECT_EQ(profile.macs, x.m * x.n * x.k);
      EXPECT_EQ(profile.cores_used, std::min<std::int64_t>(rows * cols, chip->cube_cores));
      EXPECT_EQ(profile.workspace_bytes > 0, t.pack_b);
      Traffic traffic;
      // A is read once for every column of blocks, but for what a core keeps from one block to the next; B once for every
      // row, from its packed copy where there is one.
      std::int64_t of_a = cols * x.m * x.k;
      for (std::int64_t core = 0; t.keep_a > 0 && core < chip->cube_cores; ++core) {
        const CoreTasks tasks(t.grid, t.deal(), rows * cols, core, chip->cube_cores);
        for (std::int64_t i = 1; i < tasks.count(); ++i) {
          const std::int64_t row = t.grid.At(tasks[i]).row;
          if (row == t.grid.At(tasks[i - 1]).row)
            of_a -= Split(x.m, t.m)[row].size() * std::min(x.k, t.keep_a * t.a_k1());
        }
      }
      const std::int64_t of_b = x.k * x.n * SizeOf(x.in);
      traffic[Path::kGmToL1Nd2Nz] = of_a * SizeOf(x.in) + (t.pack_b ? 1 : rows) * of_b;
      if (t.pack_b) {
        traffic[Path::kL1ToGm] = chip->PackedBytes(Role::kB, x.in, x.k, x.n);
        traffic[Path::kGmToL1] = rows * traffic[Path::kL1ToGm];
      }
      // All of such small operands fits L2: what is read ahead at all is read once.
      if (t.prefetch > 0) {
        EXPECT_GE(t.prefetch, CeilDiv(rows * cols, chip->cube_cores));
        traffic[Path::kGmToUb] = (x.m * x.k + (t.pack_b ? 0 : x.k * x.n)) * SizeOf(x.in);
      }
      traffic[Path::kL0CToGm] = x.m * x.n * SizeOf(x.out);
      std::int64_t parts = 0;  // of all columns of blocks; A comes into L0 for each
      for (const Range n : Split(x.n, t.n)) parts += Split(n, t.part_n()).count();
      for (const Range k1 : Split(x.k, t.k1)) {
        for (const Range k0 : Split(k1.size(), t.k0)) {
          for (const Range m : Split(x.m, t.m))
            traffic[Path::kL1ToL0A] += parts * FractalBytes(m.size(), k0.size(), x.in);
          for (const Range n : Split(x.n, t.n)) {
            for (const Range part : Split(n, t.part_n()))
              traffic[Path::kL1ToL0B] += rows * FractalBytes(k0.size(), part.size(), x.in);
          }
        }
      }
      if (x.bias) {
        traffic[Path::kL1ToBT] = rows * x.n * SizeOf(*x.bias);
        traffic[Path::kGmToL1] += traffic[Path::kL1ToBT];
      }
      ExpectTraffic(profile, traffic);
    }
  }
}

// Where all sizes are multiples of the fractals, operands in L0 are the operands, nothing more.
TEST(TrafficTest, MatmulWithoutPadding) {
  const MatmulCase x{1024, 2048, 512, DType::kBF16, DType::kF32};
  MatmulTiling t;
  ASSERT_TRUE(IsOk(Choose(Ascend910B2(), ShapeOf(x), &t)));
  Profile profile;
  ASSERT_TRUE(IsOk(Matmul(NpuWithoutData(Ascend910B2()), x.args(), &profile)));
  EXPECT_EQ(Bytes(profile, Path::kL1ToL0A), 2 * CeilDiv(x.n, t.n) * t.c_parts * x.m * x.k);
  EXPECT_EQ(Bytes(profile, Path::kL1ToL0B), 2 * CeilDiv(x.m, t.m) * x.k * x.n);
}

// ---- FlashAttention ----

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
          {1, 8, 1, 0, 3, 2047, 64, 0, 64, DType::kBF16, DType::kF32},
          {1, 2, 1, 0, 300, 100, 33, 0, 17, DType::kF32, DType::kF32, Causal::kBottomRight, false},
          {1, 1, 1, 0, 70, 0, 16, 0, 24, DType::kBF16, DType::kBF16},
          {3, 2, 2, 0, 129, 1031, 192, 0, 128, DType::kF16, DType::kF16, Causal::kNone, false},
          {2, 2, 1, 0, 300, 290, 64, 0, 80, DType::kBF16, DType::kBF16, Causal::kBottomRight, true, true},
          {2, 1, 1, 1, 128, 1024, 512, 64, 512, DType::kBF16, DType::kBF16}};
}

TEST(TrafficTest, FlashAttention) {
  for (const ChipSpec* chip : {&Ascend910B2(), &Ascend910B4()}) {
    for (const AttentionCase& x : AttentionCases()) {
      SCOPED_TRACE(x.Name() + " " + chip->name);
      const FlashAttentionShape shape = x.shape();
      FlashAttentionTiling t;
      ASSERT_TRUE(IsOk(Choose(*chip, shape, &t)));
      Profile profile;
      ASSERT_TRUE(IsOk(FlashAttention(NpuWithoutData(*chip), x.args(), &profile)));
      ExpectSane(*chip, profile);

      const std::int64_t e = SizeOf(x.in), d_scores = x.dqk + x.dr, heads = x.batch * x.heads;
      Traffic one_head;
      std::int64_t macs = 0;
      for (const Range q : Split(x.sq, t.m)) {
        // Q in and O out once.
        one_head[Path::kGmToL1Nd2Nz] += q.size() * d_scores * e;
        one_head[Path::kUbToGm] += q.size() * (x.dv * SizeOf(x.out) + (x.lse ? 4 : 0));
        FlashAttentionPieces pieces(shape.band, q, {0, x.skv}, t);
        for (FlashAttentionPiece piece; pieces.Next(piece);) {
          const std::int64_t rows = piece.rows.size();
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
    for (std::int64_t d : {x_.dqk, x_.dr}) {
      AddProduct(queries, keys, d, true, false);
      traffic[Path::kL0CToGm] += queries * d * 4;
    }
    if (!step.last_of_block()) return;
    for (std::int64_t d : {x_.dqk, x_.dr, x_.dv}) {
      AddProduct(keys, block, d, false, false);
      traffic[Path::kL0CToGm] += keys * d * 4;  // No sum is kept in L0C.
    }
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
      ASSERT_TRUE(IsOk(Choose(*chip, s, &t)));
      ASSERT_FALSE(t.keep_sums);
      Profile profile;
      ASSERT_TRUE(IsOk(FlashAttentionGrad(NpuWithoutData(*chip), GradArgsOf(x), &profile)));
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

// ---- TokenPermute and TokenUnpermute ----

struct PermuteCase {
  std::int64_t tokens, topk, experts, hidden;
  DType dtype, ids;
  std::int64_t num_out_tokens = 0;
  bool counts = true;

  std::int64_t slots() const { return tokens * topk; }
  std::int64_t rows() const {
    return num_out_tokens > 0 ? std::min(num_out_tokens, slots())
                              : std::max<std::int64_t>(slots() + num_out_tokens, 0);
  }
  // Float tensors without data, ids of the caller's.
  TokenPermuteArgs args(const Matrix& topk_ids) const {
    TokenPermuteArgs args;
    args.tokens = ConstTensor(nullptr, dtype, {tokens, hidden});
    args.topk_ids = topk_ids.view();
    args.num_experts = experts, args.num_out_tokens = num_out_tokens;
    args.permuted = Tensor(nullptr, dtype, {rows(), hidden});
    args.sorted_indices = Tensor(nullptr, DType::kI32, {slots()});
    if (counts) args.expert_counts = Tensor(nullptr, DType::kI32, {experts});
    return args;
  }
  // Tokens of which a slot has a row that is kept, ranked with std::stable_sort.
  std::int64_t KeptTokens(const Matrix& topk_ids) const {
    const std::vector<double> expert = topk_ids.ToDoubles();
    std::vector<std::size_t> order(expert.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return expert[a] < expert[b]; });
    std::set<std::int64_t> kept;
    for (std::int64_t r = 0; r < rows(); ++r)
      kept.insert(static_cast<std::int64_t>(order[static_cast<std::size_t>(r)]) / topk);
    return static_cast<std::int64_t>(kept.size());
  }
  TokenPermuteShape shape() const {
    TokenPermuteShape s;
    s.tokens = tokens, s.hidden = hidden, s.top_k = topk, s.experts = experts, s.dtype = dtype;
    s.wide_ids = ids == DType::kI64;
    return s;
  }
  std::string Name() const {
    return Join("t", tokens, " k", topk, " e", experts, " h", hidden, " ", NameOf(dtype));
  }
};

std::vector<PermuteCase> PermuteCases() {
  return {{1024, 8, 256, 7168, DType::kBF16, DType::kI32},
          {501, 3, 17, 1001, DType::kF32, DType::kI64, 700},
          {77, 2, 5, 20011, DType::kF16, DType::kI32, -50, false},
          {300, 4, 100'000, 64, DType::kBF16, DType::kI64},
          {1, 1, 1, 1, DType::kF32, DType::kI32}};
}

// Bytes of a call whose experts one table holds; each token with a row is read once, and goes to every place that is kept.
Traffic OneTableTraffic(const PermuteCase& x, const TokenPermuteTiling& t, std::int64_t kept_tokens) {
  const std::int64_t counts = t.chunks * x.experts * 4, row = x.hidden * SizeOf(x.dtype);
  // Sums over the chunks before each, and over all, where they are made once for all chunks.
  const std::int64_t sums = t.sums_chunks ? counts + x.experts * 4 : 0;
  Traffic traffic;
  // Ids once to count and once to rank; all chunks' counts by every chunk, or once and two sums by every chunk.
  traffic[Path::kGmToUb] =
      2 * x.slots() * SizeOf(x.ids) + (t.sums_chunks ? 3 : t.chunks) * counts + kept_tokens * row;
  traffic[Path::kUbToGm] = counts + sums + x.slots() * 4 + x.rows() * row + (x.counts ? x.experts * 4 : 0);
  return traffic;
}

// Likewise with digits, but for the searches among the sorted routes.
Traffic DigitsTraffic(const PermuteCase& x, const TokenPermuteTiling& t, std::int64_t kept_tokens) {
  const std::int64_t counts = t.chunks * t.Bins(x.experts) * 4, sums = counts + t.Bins(x.experts) * 4,
                     passes = t.Passes(x.experts), row = x.hidden * SizeOf(x.dtype), slots = x.slots() * 4;
  Traffic traffic;
  // The ids as given, then twice in each pass, with slots the second time; the ids of ranges of experts; all indices.
  traffic[Path::kGmToUb] = 2 * x.slots() * SizeOf(x.ids) + 3 * (passes - 1) * slots + 3 * passes * counts +
                           (x.counts ? slots : 0) + slots + kept_tokens * row;
  traffic[Path::kUbToGm] =
      passes * (counts + sums + 2 * slots) + slots + x.rows() * row + (x.counts ? x.experts * 4 : 0);
  return traffic;
}

TEST(TrafficTest, TokenPermute) {
  for (const ChipSpec* chip : {&Ascend910B2(), &Ascend910B4()}) {
    for (const PermuteCase& x : PermuteCases()) {
      SCOPED_TRACE(x.Name() + " " + chip->name);
      Random random;
      Matrix ids(x.ids, {x.tokens, x.topk}, kContiguous);
      ids.FillIntegers(random, 0, x.experts - 1);
      TokenPermuteTiling t;
      ASSERT_TRUE(IsOk(Choose(*chip, x.shape(), &t)));
      Profile profile;
      ASSERT_TRUE(IsOk(TokenPermute(NpuWithoutData(*chip), x.args(ids), &profile)));
      ExpectSane(*chip, profile);
      EXPECT_EQ(profile.macs, 0);
      const std::int64_t bins = t.Bins(x.experts) * 4,
                         tables = (t.sums_chunks ? 2 * t.chunks + 1 : t.chunks) * bins;
      if (t.digit_bits == 0) {
        ExpectTraffic(profile, OneTableTraffic(x, t, x.KeptTokens(ids)));
        EXPECT_EQ(profile.workspace_bytes, tables);
        continue;
      }
      Traffic traffic = DigitsTraffic(x, t, x.KeptTokens(ids));
      const std::int64_t searched = Bytes(profile, Path::kGmToUb) - traffic[Path::kGmToUb],
                         searches = 2 * CeilDiv(x.experts, t.range_experts) + t.chunks;
      EXPECT_GT(searched, 0);
      EXPECT_LE(
          searched,
          searches * 4 * static_cast<std::int64_t>(std::bit_width(static_cast<std::uint64_t>(x.slots()))));
      traffic[Path::kGmToUb] += searched;
      ExpectTraffic(profile, traffic);
      EXPECT_EQ(profile.workspace_bytes, tables + 4 * x.slots() * 4);
    }
  }
  // One of the cases is for the digits.
  TokenPermuteTiling t;
  ASSERT_TRUE(IsOk(Choose(Ascend910B2(), PermuteCases()[3].shape(), &t)));
  EXPECT_GT(t.digit_bits, 0);
}

TEST(TrafficTest, TokenUnpermute) {
  for (const ChipSpec* chip : {&Ascend910B2(), &Ascend910B4()}) {
    for (const PermuteCase& x : PermuteCases()) {
      for (DType probs : {DType::kF32, DType::kBF16}) {
        SCOPED_TRACE(x.Name() + " " + chip->name);
        std::vector<std::int32_t> indices(static_cast<std::size_t>(x.slots()));
        std::int64_t kept = 0;
        for (std::size_t s = 0; s < indices.size(); ++s) {
          indices[s] = s % 11 == 7 ? -1 : static_cast<std::int32_t>(s);
          kept += indices[s] >= 0 && indices[s] < x.rows();
        }
        TokenUnpermuteArgs args;
        args.permuted = ConstTensor(nullptr, x.dtype, {x.rows(), x.hidden});
        args.sorted_indices = ConstTensor(indices.data(), {x.slots()});
        args.probs = ConstTensor(nullptr, probs, {x.tokens, x.topk});
        args.out = Tensor(nullptr, x.dtype, {x.tokens, x.hidden});
        Profile profile;
        ASSERT_TRUE(IsOk(TokenUnpermute(NpuWithoutData(*chip), args, &profile)));
        ExpectSane(*chip, profile);
        // Each kept row once, each token once.
        const std::int64_t row = x.hidden * SizeOf(x.dtype);
        ExpectTraffic(profile, {{Path::kGmToUb, x.slots() * (4 + SizeOf(probs)) + kept * row},
                                {Path::kUbToGm, x.tokens * row}});
        EXPECT_EQ(profile.workspace_bytes, 0);
        EXPECT_EQ(profile.macs, 0);
      }
    }
  }
}

// ---- Profiles, of one call of each kernel ----

// Tensors with data for every kernel.
struct Calls {
  Calls() {
    Random random;
    for (Matrix* x : {&a, &b, &bias, &q, &k, &v, &q_rope, &k_rope, &tokens}) x->FillUniform(random);
    probs.FillUniform(random, 0.25, 1), ids.FillIntegers(random, 0, 9);
    std::vector<double> rows;
    for (int s = 0; s < 600; ++s) rows.push_back(s * 7 % 600);
    Assign(indices.view(), rows);
    permuted.FillUniform(random);
  }

  Status Run(int kernel, const Device& device, Profile* profile) {
    switch (kernel) {
      case 0:
        return Matmul(device, {.a = a.view(), .b = b.view(), .bias = bias.view(), .c = c.view()}, profile);
      case 1:
        return FlashAttention(device,
                              {.q = q.view(),
                               .k = k.view(),
                               .v = v.view(),
                               .q_rope = q_rope.view(),
                               .k_rope = k_rope.view(),
                               .out = out.view(),
                               .lse = lse.view(),
                               .causal = Causal::kTopLeft},
                              profile);
      case 2:
        return TokenPermute(device,
                            {.tokens = tokens.view(),
                             .topk_ids = ids.view(),
                             .num_experts = 10,
                             .permuted = permuted.view(),
                             .sorted_indices = sorted.view(),
                             .expert_counts = counts.view()},
                            profile);
      default:
        return TokenUnpermute(device,
                              {.permuted = permuted.view(),
                               .sorted_indices = indices.view(),
                               .probs = probs.view(),
                               .out = back.view()},
                              profile);
    }
  }
  std::vector<const Matrix*> outputs(int kernel) const {
    if (kernel == 0) return {&c};
    if (kernel == 1) return {&out, &lse};
    if (kernel == 2) return {&permuted, &sorted, &counts};
    return {&back};
  }

  Matrix a{DType::kBF16, {300, 260}}, b{DType::kBF16, {260, 515}}, bias{DType::kF32, {515}},
      c{DType::kBF16, {300, 515}};
  Matrix q{DType::kBF16, {1, 4, 200, 40}}, k{DType::kBF16, {1, 2, 220, 40}}, v{DType::kBF16, {1, 2, 220, 48}};
  Matrix q_rope{DType::kBF16, {1, 4, 200, 16}}, k_rope{DType::kBF16, {1, 1, 220, 16}};
  Matrix out{DType::kBF16, {1, 4, 200, 48}}, lse{DType::kF32, {1, 4, 200}};
  Matrix tokens{DType::kBF16, {200, 500}}, ids{DType::kI32, {200, 3}}, permuted{DType::kBF16, {600, 500}};
  Matrix sorted{DType::kI32, {600}}, counts{DType::kI32, {10}}, indices{DType::kI32, {600}};
  Matrix probs{DType::kF32, {200, 3}}, back{DType::kBF16, {200, 500}};
};

constexpr const char* kKernels[] = {"matmul", "flash_attention", "token_permute", "token_unpermute"};

TEST(ProfileTest, SameEveryTimeAndWithoutData) {
  for (int kernel = 0; kernel < 4; ++kernel) {
    SCOPED_TRACE(kKernels[kernel]);
    Profile profiles[4];
    Calls calls;
    ASSERT_TRUE(IsOk(calls.Run(kernel, NpuWithData(Ascend910B2()), &profiles[0])));
    ASSERT_TRUE(IsOk(calls.Run(kernel, NpuWithData(Ascend910B2()), &profiles[1])));
    ASSERT_TRUE(IsOk(calls.Run(kernel, NpuWithoutData(Ascend910B2()), &profiles[2])));
    Calls elsewhere;  // Addresses of the tensors take no part.
    ASSERT_TRUE(IsOk(elsewhere.Run(kernel, NpuWithoutData(Ascend910B2()), &profiles[3])));
    ExpectSane(Ascend910B2(), profiles[0]);
    EXPECT_EQ(profiles[0].kernel, kKernels[kernel]);
    for (int i : {1, 2, 3}) ExpectSameProfile(profiles[i], profiles[0]);
  }
}

// Float outputs are not written without data, nor is a profile asked for.
TEST(ProfileTest, NothingFloatIsWrittenWithoutData) {
  for (int kernel = 0; kernel < 4; ++kernel) {
    SCOPED_TRACE(kKernels[kernel]);
    Calls calls;
    const Calls before = calls;
    ASSERT_TRUE(IsOk(calls.Run(kernel, NpuWithoutData(Ascend910B2()), nullptr)));
    for (std::size_t i = 0; i < calls.outputs(kernel).size(); ++i) {
      const Matrix* output = calls.outputs(kernel)[i];
      if (IsFloat(output->dtype())) ExpectSameBits(output->view(), before.outputs(kernel)[i]->view());
      ExpectGuards(*output);
    }
  }
}

// The host fills no profile.
TEST(ProfileTest, HostLeavesProfileAlone) {
  for (int kernel = 0; kernel < 4; ++kernel) {
    Calls calls;
    Profile profile;
    profile.kernel = "mine";
    ASSERT_TRUE(IsOk(calls.Run(kernel, Host(), &profile)));
    EXPECT_EQ(profile.kernel, "mine");
    EXPECT_EQ(profile.instructions, 0);
  }
}

TEST(ProfileTest, TimelinesDoNotOverlap) {
  for (const ChipSpec* chip : {&Ascend910B2(), &Ascend910B4()}) {
    for (int kernel = 0; kernel < 4; ++kernel) {
      SCOPED_TRACE(Join(kKernels[kernel], " ", chip->name));
      Calls calls;
      Profile profile, plain;
      ASSERT_TRUE(IsOk(calls.Run(kernel, Npu(*chip, {.with_data = false, .timeline = true}), &profile)));
      ExpectOrderlyTimeline(profile);
      ASSERT_TRUE(IsOk(calls.Run(kernel, NpuWithoutData(*chip), &plain)));
      ExpectSameProfile(profile, plain);
    }
  }
}

// More cores, a faster clock: no slower.
TEST(ProfileTest, FasterChipsAreFaster) {
  for (int kernel = 0; kernel < 4; ++kernel) {
    SCOPED_TRACE(kKernels[kernel]);
    Calls calls;
    Profile b2, b4;
    ASSERT_TRUE(IsOk(calls.Run(kernel, NpuWithoutData(Ascend910B2()), &b2)));
    ASSERT_TRUE(IsOk(calls.Run(kernel, NpuWithoutData(Ascend910B4()), &b4)));
    EXPECT_LT(b2.time_s, b4.time_s);
  }
}

// One text on both executors: where sums are exact, the same answers.
TEST(ProfileTest, BothExecutorsAgree) {
  Calls host, npu;
  Random random;
  for (Calls* calls : {&host, &npu}) {
    Random same;
    calls->a.FillIntegers(same), calls->b.FillIntegers(same), calls->bias.FillIntegers(same);
    calls->q.Fill(0), calls->q_rope.Fill(0), calls->v.Fill(3);
    calls->permuted.FillIntegers(same), calls->probs.Fill(0.5);
  }
  for (int kernel : {0, 1, 3, 2}) {
    SCOPED_TRACE(kKernels[kernel]);
    ASSERT_TRUE(IsOk(host.Run(kernel, Host(), nullptr)));
    ASSERT_TRUE(IsOk(npu.Run(kernel, NpuWithData(Ascend910B2()), nullptr)));
    for (std::size_t i = 0; i < host.outputs(kernel).size(); ++i) {
      if (host.outputs(kernel)[i] == &host.lse) continue;  // Logarithms are not exact.
      ExpectSameBits(npu.outputs(kernel)[i]->view(), host.outputs(kernel)[i]->view());
    }
  }
}

}  // namespace
}  // namespace cubist::testing
