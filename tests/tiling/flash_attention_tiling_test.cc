#include "tiling/flash_attention_tiling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "kernels/flash_attention_kernel.h"
#include "npu_model/chip.h"
#include "npu_model/trace/trace_core.h"
#include "tests/tiling/tiling_support.h"

namespace cubist {
namespace {

using testing::Chips;
using testing::ExpectChoosingAgainGivesTheSame;
using testing::ExpectErrorsNameTheBuffer;
using testing::WithCapacity;

constexpr Buffer kBuffers[] = {Buffer::kL1, Buffer::kL0A, Buffer::kL0B, Buffer::kL0C, Buffer::kUB};

FlashAttentionShape ShapeOf(std::int64_t sq, std::int64_t skv, std::int64_t d_qk, std::int64_t d_rope,
                            std::int64_t d_v, DType dtype, bool causal) {
  FlashAttentionShape s;
  s.batches = 1, s.heads = 8, s.kv_heads = 2, s.rope_heads = d_rope > 0 ? 1 : 0;
  s.sq = sq, s.skv = skv;
  s.d_qk = d_qk, s.d_rope = d_rope, s.d_v = d_v;
  s.in = s.out = dtype;
  if (causal) s.band.highest = skv - sq;
  return s;
}

std::vector<FlashAttentionShape> Shapes() {
  std::vector<FlashAttentionShape> shapes;
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (bool causal : {false, true}) {
      shapes.push_back(ShapeOf(1, 1, 1, 0, 1, dtype, causal));
      shapes.push_back(ShapeOf(0, 5, 8, 0, 8, dtype, causal));
      shapes.push_back(ShapeOf(5, 0, 8, 4, 8, dtype, causal));
      shapes.push_back(ShapeOf(5, 7, 0, 0, 8, dtype, causal));
      shapes.push_back(ShapeOf(5, 7, 8, 0, 0, dtype, causal));
      shapes.push_back(ShapeOf(129, 300, 72, 24, 40, dtype, causal));
      shapes.push_back(ShapeOf(2048, 2048, 128, 64, 128, dtype, causal));
      shapes.push_back(ShapeOf(1, 4096, 192, 0, 128, dtype, causal));
      // The same with heads as rows of one, and with all that is done to scores.
      FlashAttentionShape folded = shapes.back();
      folded.band.fold = folded.heads / folded.kv_heads;
      folded.sq *= folded.band.fold, folded.heads = folded.kv_heads;
      shapes.push_back(folded);
      folded.sinks = folded.alibi = folded.bias = folded.mask = true;
      shapes.push_back(folded);
    }
  }
  return shapes;
}

std::string NameOf(const FlashAttentionShape& s) {
  return std::to_string(s.sq) + "x" + std::to_string(s.skv) + (s.folds() ? " folded" : "") +
         (s.mask ? " masked" : "") + " d " + std::to_string(s.d_qk) + "+" + std::to_string(s.d_rope) + "/" +
         std::to_string(s.d_v) + " " + NameOf(s.in) + (s.band.bounded() ? " causal" : "");
}
std::string NameOf(const FlashAttentionTiling& t) {
  return "m " + std::to_string(t.m) + " n " + std::to_string(t.n) + " k0 " + std::to_string(t.k0) +
         " strip " + std::to_string(t.strip) + " depth " + std::to_string(t.depth) + " stages " +
         std::to_string(t.q_stages) + std::to_string(t.kv_stages) + std::to_string(t.l0_stages) +
         std::to_string(t.s_stages) + std::to_string(t.ub_stages) + (t.pack_kv ? " packed" : "");
}

// A (b, n, s, d) tensor without data.
GmTensor TensorOf(std::int32_t index, DType dtype, std::int64_t b, std::int64_t n, std::int64_t s,
                  std::int64_t d) {
  GmTensor t;
  t.dtype = dtype, t.index = index, t.writable = true;
  t.sizes = {b, n, s, d};
  t.strides = {n * s * d, s * d, d, 1};
  t.bytes = b * n * s * d * SizeOf(dtype);
  return t;
}

template <class T>
trace::CoreRecord RecordOneCore(const ChipSpec& chip, const FlashAttentionShape& s,
                                const FlashAttentionTiling& t) {
  const std::int64_t heads = s.heads * s.band.fold, sq = s.sq / s.band.fold;
  const GmTensor q = TensorOf(0, s.in, s.batches, heads, sq, s.d_qk),
                 k = TensorOf(1, s.in, s.batches, s.kv_heads, s.skv, s.d_qk),
                 v = TensorOf(2, s.in, s.batches, s.kv_heads, s.skv, s.d_v),
                 q_rope = TensorOf(3, s.in, s.batches, heads, sq, s.d_rope),
                 k_rope = TensorOf(4, s.in, s.batches, s.rope_heads, s.skv, s.d_rope),
                 out = TensorOf(5, s.out, s.batches, heads, sq, s.d_v),
                 lse = TensorOf(6, DType::kF32, s.batches, heads, sq, 1),
                 part_out = TensorOf(8, DType::kF32, 1, s.heads, t.kv_splits * s.batches * s.sq, s.d_v),
                 part_lse = TensorOf(9, DType::kF32, 1, s.heads, t.kv_splits * s.batches * s.sq, 1),
                 per_head = TensorOf(10, DType::kF32, 1, 1, s.batches, heads),
                 bias = TensorOf(11, s.in, s.batches, heads, sq, s.skv),
                 mask = TensorOf(12, DType::kBool, s.batches, heads, sq, s.skv);
  GmTensor room = TensorOf(7, DType::kF32, 1, 1, s.batches * s.kv_heads, std::int64_t{1} << 30);
  const auto packed = [&](std::int64_t rows, std::int64_t cols) {
    PackedGm p;
    p.tensor = &room, p.role = Role::kB, p.dtype = s.in;
    p.rows = rows, p.cols = cols;
    p.row_part = {0, rows}, p.col_part = {0, cols};
    return p;
  };
  FlashAttentionOperands g;
  g.q = &q, g.k = &k, g.v = &v, g.out = &out, g.lse = &lse;
  g.part_out = &part_out, g.part_lse = &part_lse;
  g.sinks = g.alibi.slopes = &per_head, g.bias = &bias, g.mask = &mask;
  g.k_packed = packed(s.d_qk, s.skv), g.k_rope_packed = packed(s.d_rope, s.skv),
  g.v_packed = packed(s.skv, s.d_v);
  if (s.d_rope > 0) g.q_rope = &q_rope, g.k_rope = &k_rope;
  trace::CoreRecord record;
  Scratch scratch;
  TraceAiCore core(chip, scratch, 0, static_cast<int>(std::max<std::int64_t>(t.tasks(s), 1)),
                   /*with_data=*/false, &record);
  const FlashAttentionSchedule schedule(s, t, {});
  FlashAttentionKernel<T>(core, g, s, t, schedule);
  EXPECT_EQ(core.finding(), "") << chip.name << " " << NameOf(s) << " " << NameOf(t);
  return record;
}
trace::CoreRecord RecordOneCore(const ChipSpec& chip, const FlashAttentionShape& s,
                                const FlashAttentionTiling& t) {
  switch (s.in) {
    case DType::kBF16:
      return RecordOneCore<BF16>(chip, s, t);
    case DType::kF16:
      return RecordOneCore<F16>(chip, s, t);
    default:
      return RecordOneCore<float>(chip, s, t);
  }
}
// Bytes that the rings take of a buffer; of the UB of the first Vector core.
std::int64_t BytesIn(const trace::CoreRecord& record, Buffer buffer) {
  std::int64_t bytes = 0;
  for (const trace::SlotInfo& slot : record.slots) {
    if (slot.buffer == buffer && slot.lane <= 0) bytes += slot.bytes;
  }
  return bytes;
}

TEST(FlashAttentionTilingTest, WhatTheTilingCountsIsWhatTheRingsTake) {
  for (const ChipSpec* chip : Chips()) {
    for (const FlashAttentionShape& s : Shapes()) {
      const std::vector<FlashAttentionTiling> candidates = Candidates(*chip, s);
      for (std::size_t i = 0; i < candidates.size(); i += candidates.size() / 5 + 1) {
        const FlashAttentionTiling& t = candidates[i];
        const trace::CoreRecord record = RecordOneCore(*chip, s, t);
        for (Buffer buffer : kBuffers) {
          const std::int64_t bytes = BytesIn(record, buffer);
          EXPECT_TRUE(Fits(WithCapacity(*chip, buffer, bytes), s, t))
              << chip->name << " " << NameOf(s) << " " << NameOf(t) << ": " << bytes << " bytes of "
              << NameOf(buffer);
          if (bytes == 0) continue;
          EXPECT_FALSE(Fits(WithCapacity(*chip, buffer, bytes - 1), s, t))
              << chip->name << " " << NameOf(s) << " " << NameOf(t) << ": " << bytes << " bytes of "
              << NameOf(buffer);
        }
      }
    }
  }
}

// A row statistic must not be handed out again while a stage still needs it: the kernel runs every depth over
// several blocks of keys without a tile outliving its slot (which would abort).
TEST(FlashAttentionTilingTest, EveryDepthHasEnoughStages) {
  for (bool causal : {false, true}) {
    const FlashAttentionShape s = ShapeOf(70, 500, 32, 16, 24, DType::kBF16, causal);
    for (int depth : {0, 1, 2}) {
      FlashAttentionTiling t;
      t.m = 32, t.n = 32, t.k0 = 32;
      t.strip = 16, t.key_step = 16;
      t.depth = depth;
      for (int stages : {1, 2}) {
        t.ub_stages = t.q_stages = t.kv_stages = stages;
        ASSERT_TRUE(Fits(Ascend910B1(), s, t));
        RecordOneCore(Ascend910B1(), s, t);
      }
    }
  }
}

TEST(FlashAttentionTilingTest, CandidatesFitInMultiplesOfTheChipsSteps) {
  for (const ChipSpec* chip : Chips()) {
    for (const FlashAttentionShape& s : Shapes()) {
      const std::vector<FlashAttentionTiling> candidates = Candidates(*chip, s);
      ASSERT_FALSE(candidates.empty()) << chip->name << " " << NameOf(s);
      for (const FlashAttentionTiling& t : candidates) {
        SCOPED_TRACE(chip->name + " " + NameOf(s) + " " + NameOf(t));
        ASSERT_TRUE(Fits(*chip, s, t));
        ASSERT_TRUE(t.m > 0 && t.n > 0 && t.k0 > 0);
        ASSERT_EQ(t.m % chip->RowStep(s.in), 0);
        ASSERT_EQ(t.n % chip->mmad.n_step, 0);
        ASSERT_EQ(t.n % chip->PackedStep(Role::kB, s.in), 0);
        ASSERT_EQ(t.k0 % (chip->mmad.k_bytes / chip->OperandBytes(s.in)), 0);
        ASSERT_EQ(t.k0 % 2, 0);
        ASSERT_TRUE(t.depth >= 0 && t.q_stages > 0 && t.kv_stages > 0 && t.l0_stages > 0 &&
                    t.l0c_stages > 0 && t.s_stages > 0 && t.ub_stages > 0);
      }
    }
  }
}

TEST(FlashAttentionTilingTest, ChooseTakesACandidateOfLeastPrice) {
  for (const ChipSpec* chip : Chips()) {
    for (const FlashAttentionShape& s : Shapes()) {
      SCOPED_TRACE(chip->name + " " + NameOf(s));
      FlashAttentionTiling chosen;
      ASSERT_TRUE(Choose(*chip, s, &chosen).ok());
      double least = std::numeric_limits<double>::infinity();
      std::vector<std::string> names;
      for (const FlashAttentionTiling& t : Candidates(*chip, s)) {
        const double price = Price(*chip, s, t);
        ASSERT_TRUE(std::isfinite(price)) << NameOf(t);
        ASSERT_TRUE(price > 0 || (price == 0 && s.sq == 0)) << NameOf(t) << ": " << price;
        least = std::min(least, price);
        names.push_back(NameOf(t));
      }
      EXPECT_EQ(Price(*chip, s, chosen), least);
      EXPECT_EQ(std::count(names.begin(), names.end(), NameOf(chosen)), 1) << NameOf(chosen);
    }
  }
}

double BestPrice(const ChipSpec& chip, const FlashAttentionShape& s) {
  FlashAttentionTiling t;
  EXPECT_TRUE(Choose(chip, s, &t).ok());
  return Price(chip, s, t);
}

TEST(FlashAttentionTilingTest, MoreWorkIsNotCheaper) {
  for (const ChipSpec* chip : Chips()) {
    for (bool causal : {false, true}) {
      for (std::int64_t size : {200, 1024, 3000}) {
        const auto with = [&](std::int64_t sq, std::int64_t skv, std::int64_t d, std::int64_t heads) {
          FlashAttentionShape s = ShapeOf(sq, skv, d, 0, d, DType::kBF16, causal);
          s.heads = heads;
          return BestPrice(*chip, s);
        };
        SCOPED_TRACE(chip->name + " " + std::to_string(size) + (causal ? " causal" : ""));
        const double price = with(size, size, 64, 8);
        EXPECT_GE(with(2 * size, 2 * size, 64, 8), price);
        EXPECT_GE(with(size, 2 * size, 64, 8), price);
        EXPECT_GE(with(size, size, 128, 8), price);
        EXPECT_GE(with(size, size, 64, 16), price);
      }
    }
    // Half of the scores are masked away, and a long context costs its square.
    const double full = BestPrice(*chip, ShapeOf(8192, 8192, 128, 0, 128, DType::kBF16, false));
    const double causal = BestPrice(*chip, ShapeOf(8192, 8192, 128, 0, 128, DType::kBF16, true));
    const double twice = BestPrice(*chip, ShapeOf(16384, 16384, 128, 0, 128, DType::kBF16, false));
    EXPECT_GT(causal, 0.45 * full) << chip->name;
    EXPECT_LT(causal, 0.7 * full) << chip->name;
    EXPECT_GT(twice, 3.5 * full) << chip->name;
    EXPECT_LT(twice, 4.5 * full) << chip->name;
  }
}

// Whatever the band, the tiles and the part of the keys: every row meets each key that it sees once, the last step of
// its rows comes last, rows count their own rounds, and every row has at least one step.
TEST(FlashAttentionStepsTest, EveryRowMeetsWhatItSeesOnce) {
  constexpr std::int64_t kFar = AttentionBand::kUnbounded;
  std::vector<AttentionBand> bands;
  for (std::int64_t lowest : {-kFar, std::int64_t{-70}, std::int64_t{-9}, std::int64_t{4}}) {
    for (std::int64_t highest :
         {kFar, std::int64_t{-40}, std::int64_t{0}, std::int64_t{17}, std::int64_t{90}}) {
      bands.push_back({lowest, highest, 0});
    }
  }
  bands.push_back({-kFar, 0, 33}), bands.push_back({-kFar, -50, 100});
  for (const std::int64_t prefix : {1, 32, 41, 200}) {  // Two runs of keys.
    bands.push_back({-9, 0, prefix}), bands.push_back({-30, kFar, prefix}), bands.push_back({20, 60, prefix});
  }
  for (std::size_t i = bands.size(); i-- > 0;) {
    bands.push_back(bands[i]);
    bands.back().fold = 5;
  }
  for (const AttentionBand& band : bands) {
    for (const auto& [sq, skv] :
         {std::pair<std::int64_t, std::int64_t>{1, 1}, {75, 130}, {100, 40}, {3, 0}}) {
      for (std::int64_t strip : {8, 24, 48}) {
        for (std::int64_t splits : {1, 3}) {
          FlashAttentionShape s = ShapeOf(sq, skv, 8, 0, 8, DType::kF32, false);
          s.band = band;
          FlashAttentionTiling t;
          t.m = 48, t.n = 32, t.strip = strip, t.key_step = 16, t.kv_splits = splits;
          const FlashAttentionSchedule schedule(s, t, {});
          SCOPED_TRACE("band " + std::to_string(band.lowest) + ".." + std::to_string(band.highest) +
                       " prefix " + std::to_string(band.prefix) + " " + NameOf(s) + " " + NameOf(t));
          const std::int64_t parts = schedule.PartsOf(0);
          ASSERT_LE(parts, splits);
          std::vector<int> met(static_cast<std::size_t>(s.heads * sq * skv));
          std::vector<std::int64_t> rounds(static_cast<std::size_t>(s.heads * parts * sq));
          std::vector<bool> done(rounds.size());
          for (int core = 0; core < 5; ++core) {
            FlashAttentionSteps steps(schedule, t, core, 5);
            for (FlashAttentionStep step; steps.Next(step);) {
              ASSERT_LE(step.kv.size(), t.n);
              ASSERT_EQ(step.kv.empty() ? 0 : step.kv.begin % t.key_step, 0);
              for (std::int64_t i = step.rows.begin; i < step.rows.end; ++i) {
                const auto row =
                    static_cast<std::size_t>((step.task.head * parts + step.task.split) * sq + i);
                ASSERT_FALSE(done[row]);
                ASSERT_EQ(step.round, rounds[row]++);
                done[row] = step.last;
                for (std::int64_t j = step.kv.begin; j < step.kv.end; ++j) {
                  ++met[static_cast<std::size_t>((step.task.head * sq + i) * skv + j)];
                }
              }
            }
          }
          for (const bool row_is_done : done) ASSERT_TRUE(row_is_done);
          for (std::int64_t h = 0; h < s.heads; ++h) {
            for (std::int64_t i = 0; i < sq; ++i) {
              for (std::int64_t j = 0; j < skv; ++j) {
                const std::int64_t at = i / band.fold;
                const bool seen = (at + band.lowest <= j && j <= at + band.highest) || j < band.prefix;
                const int times = met[static_cast<std::size_t>((h * sq + i) * skv + j)];
                ASSERT_LE(times, 1);
                ASSERT_TRUE(times == 1 || !seen) << "row " << i << " key " << j;
              }
            }
          }
        }
      }
    }
  }
}

// Sequences of any lengths, in as many parts as their keys fill: every row meets every key once, no part is empty but the
// only one, and the outputs of parts of sequences that have several lie side by side.
TEST(FlashAttentionStepsTest, PartsOfRaggedSequences) {
  constexpr std::int64_t kKeys[] = {0, 1, 32, 33, 96, 97, 31, 160, 0, 64},
                         kRows[] = {3, 1, 0, 7, 50, 2, 1, 4, 0, 1};
  std::vector<AttentionSequence> sequences;
  for (std::size_t i = 0; i < std::size(kKeys); ++i)
    sequences.push_back({.sq = kRows[i], .skv = kKeys[i], .band = {}});
  FlashAttentionShape s = ShapeOf(50, 160, 8, 0, 8, DType::kF32, false);
  s.batches = std::ssize(sequences);
  FlashAttentionTiling t;
  t.m = t.strip = 16, t.n = 32, t.key_step = 16, t.kv_splits = 5;
  const FlashAttentionSchedule schedule(s, t, sequences);
  std::vector<int> met(static_cast<std::size_t>(s.batches * s.heads * 50 * 160));
  std::vector<int> outputs(static_cast<std::size_t>(s.heads * schedule.part_rows()));
  for (int core = 0; core < 7; ++core) {
    FlashAttentionSteps steps(schedule, t, core, 7);
    for (FlashAttentionStep step; steps.Next(step);) {
      const std::int64_t i = step.task.sequence,
                         parts = std::max<std::int64_t>(CeilDiv(step.sequence.skv, 32), 1);
      ASSERT_EQ(step.parts, parts);
      ASSERT_EQ(schedule.PartsOf(i), parts);
      ASSERT_TRUE(!step.kv.empty() || step.sequence.skv == 0);
      for (std::int64_t row = step.rows.begin; row < step.rows.end; ++row) {
        for (std::int64_t j = step.kv.begin; j < step.kv.end; ++j)
          ++met[static_cast<std::size_t>(((i * s.heads + step.task.head) * 50 + row) * 160 + j)];
        if (!step.last || parts == 1) continue;
        const std::int64_t at = step.part_row + row;
        ASSERT_LT(at, schedule.part_rows());
        ++outputs[static_cast<std::size_t>(step.task.head * schedule.part_rows() + at)];
      }
    }
  }
  std::int64_t pairs = 0;
  for (const AttentionSequence& x : sequences) pairs += s.heads * x.sq * x.skv;
  EXPECT_EQ(std::count(met.begin(), met.end(), 1), pairs);
  EXPECT_EQ(std::count(met.begin(), met.end(), 0), std::ssize(met) - pairs);
  EXPECT_EQ(std::count(outputs.begin(), outputs.end(), 1), std::ssize(outputs));
}

// Whatever the heads and the cores: every block of queries of every head is walked by one core, and cores that take heads
// apart meet as few KV heads as can be, with about as many blocks as the others.
TEST(FlashAttentionStepsTest, CoresTakeHeadsApart) {
  for (const auto& [batches, kv_heads, group] :
       {std::array{1, 8, 1}, {3, 4, 2}, {1, 7, 1}, {2, 48, 1}, {1, 1, 6}, {1, 12, 3}, {1, 0, 1}}) {
    for (const int cores : {1, 5, 8, 64}) {
      FlashAttentionShape s = ShapeOf(1000, 64, 8, 0, 8, DType::kF32, true);
      s.batches = batches, s.kv_heads = kv_heads, s.heads = group * kv_heads;
      FlashAttentionTiling t;
      t.m = 48, t.n = 64, t.strip = 48, t.key_step = 16, t.by_head = true;
      const FlashAttentionSchedule schedule(s, t, {});
      SCOPED_TRACE(NameOf(s) + " on " + std::to_string(cores));
      const std::int64_t kv = batches * kv_heads, teams = std::gcd(kv, cores);
      std::set<std::array<std::int64_t, 3>> walked;
      std::int64_t blocks = 0, fewest = schedule.tasks(), most = 0;
      for (int core = 0; core < cores; ++core) {
        std::vector<std::int64_t> met;  // KV heads, one after the other.
        FlashAttentionSteps steps(schedule, t, core, cores);
        std::int64_t own = 0;
        for (FlashAttentionStep step; steps.Next(step);) {
          if (!step.first) continue;
          ++own;
          walked.insert({step.task.sequence, step.task.head, step.task.q.begin});
          const std::int64_t head = step.task.sequence * kv_heads + step.task.head / group;
          if (met.empty() || met.back() != head) met.push_back(head);
        }
        if (cores == teams) {
          EXPECT_EQ(static_cast<std::int64_t>(met.size()), kv / teams);
        }
        std::sort(met.begin(), met.end());
        met.erase(std::unique(met.begin(), met.end()), met.end());
        EXPECT_LE(static_cast<std::int64_t>(met.size()), kv / teams);
        blocks += own, fewest = std::min(fewest, own), most = std::max(most, own);
      }
      EXPECT_EQ(blocks, schedule.tasks());
      EXPECT_EQ(static_cast<std::int64_t>(walked.size()), blocks);
      EXPECT_LE(most - fewest, 1);
    }
  }
}

// Cores begin in the order of their numbers where threads are fewer: the last ones of a team have least to do.
TEST(FlashAttentionStepsTest, CoresWithMoreToDoBeginFirst) {
  constexpr int kCores = 64, kTeam = 8;
  for (const bool causal : {false, true}) {
    for (const std::int64_t blocks : {9, 11, 12, 20, 22}) {
      SCOPED_TRACE(::testing::Message() << blocks << " blocks of a head, causal " << causal);
      FlashAttentionShape s = ShapeOf(blocks * 48, blocks * 48, 8, 0, 8, DType::kF32, causal);
      s.heads = s.kv_heads = kCores / kTeam;
      FlashAttentionTiling t;
      t.m = 48, t.n = 64, t.strip = 48, t.key_step = 16, t.by_head = true;
      const FlashAttentionSchedule schedule(s, t, {});
      std::vector<std::int64_t> scores(kCores);
      for (int core = 0; core < kCores; ++core) {
        FlashAttentionSteps steps(schedule, t, core, kCores);
        for (FlashAttentionStep step; steps.Next(step);)
          scores[static_cast<std::size_t>(core)] += step.rows.size() * step.kv.size();
      }
      for (auto team = scores.begin(); team != scores.end(); team += kTeam)
        EXPECT_GE(*team, *(team + kTeam - 1));
    }
  }
}

// Keys that L2 does not hold all of are met by all blocks of queries in turn, where none sees fewer of them than another.
TEST(FlashAttentionStepsTest, BlocksOfAKvHeadFollowEachOtherWhereL2IsTooSmall) {
  FlashAttentionShape s = ShapeOf(128, 1024, 512, 64, 512, DType::kBF16, false);
  s.heads = s.kv_heads = 1;
  const auto chosen = [&](std::int64_t batches, bool causal) {
    s.batches = batches;
    s.band.highest = causal ? s.skv - s.sq : AttentionBand::kUnbounded;
    FlashAttentionTiling t;
    EXPECT_TRUE(Choose(Ascend910B2(), s, &t).ok());
    return t;
  };
  EXPECT_FALSE(chosen(32, false).by_keys);
  EXPECT_FALSE(chosen(128, true).by_keys);
  const FlashAttentionTiling t = chosen(128, false);
  EXPECT_TRUE(t.by_keys);
  ASSERT_GT(t.query_blocks(s), 1);
  const FlashAttentionSchedule schedule(s, t, {});
  std::set<std::pair<std::int64_t, std::int64_t>> met;
  for (std::int64_t i = 0; i < schedule.tasks(); ++i) {
    const auto task = schedule.At(schedule.TeamOf(0, 24), i);
    ASSERT_TRUE(task.has_value());
    EXPECT_EQ(task->sequence, i / t.query_blocks(s));
    met.emplace(task->sequence, task->q.begin);
  }
  EXPECT_EQ(std::ssize(met), schedule.tasks());
  EXPECT_FALSE(schedule.At(schedule.TeamOf(0, 24), schedule.tasks()).has_value());
}

// Each edge of a causal mask costs strip / 2 keys in vain at most, and no block is computed that no row sees.
TEST(FlashAttentionStepsTest, TheDiagonalIsWalkedInStrips) {
  FlashAttentionShape s = ShapeOf(1024, 1024, 8, 0, 8, DType::kF32, true);
  for (std::int64_t strip : {32, 64, 256}) {
    FlashAttentionTiling t;
    t.m = 256, t.n = 256, t.strip = strip, t.key_step = 16;
    std::int64_t scores = 0;
    for (const Range q : Split(s.sq, t.m)) {
      FlashAttentionPieces pieces(s.band, q, {0, s.skv}, t);
      for (FlashAttentionPiece piece; pieces.Next(piece);) scores += piece.rows.size() * piece.keys.size();
    }
    EXPECT_EQ(scores, s.sq * (s.sq + strip) / 2);
  }
}

// Nothing between a prefix and a window is walked.
TEST(FlashAttentionStepsTest, TwoRunsOfKeysAreWalkedWithoutWhatLiesBetween) {
  constexpr std::int64_t kS = 4096, kPrefix = 100, kLeft = 300;
  for (std::int64_t strip : {32, 256}) {
    FlashAttentionTiling t;
    t.m = 256, t.n = 128, t.strip = strip, t.key_step = 16;
    const AttentionBand band{-kLeft, 0, kPrefix};
    for (const Range q : Split(kS, t.m)) {
      std::int64_t scores = 0;
      FlashAttentionPieces pieces(band, q, {0, kS}, t);
      for (FlashAttentionPiece piece; pieces.Next(piece);) scores += piece.rows.size() * piece.keys.size();
      EXPECT_LE(scores, t.m * (RoundUp(kPrefix, 16) + kLeft + strip + 16));
    }
  }
}

TEST(FlashAttentionTilingTest, OnlyWhatIsUsedAgainIsPacked) {
  for (const FlashAttentionShape& s : Shapes()) {
    for (const FlashAttentionTiling& t : Candidates(HostChip(), s)) {
      const bool again = t.query_blocks(s) * (s.heads / s.kv_heads) > 1;
      EXPECT_TRUE(again ? !t.kv_once : !t.pack_kv) << NameOf(s) << " " << NameOf(t);
    }
  }
}

// On an NPU, keys among others alone: by the price where many blocks of queries meet them, not where one does.
TEST(FlashAttentionTilingTest, KeysAmongOthersArePackedWhereManyRowsMeetThem) {
  const ChipSpec& chip = Ascend910B2();
  FlashAttentionShape s;
  s.batches = 1, s.heads = s.kv_heads = 8, s.sq = s.skv = 8192, s.d_qk = s.d_v = 128;
  s.in = s.out = DType::kBF16;
  const auto cheapest_packs = [&] {
    const std::vector<FlashAttentionTiling> all = Candidates(chip, s);
    return std::min_element(
               all.begin(), all.end(),
               [&](const auto& a, const auto& b) { return Price(chip, s, a) < Price(chip, s, b); })
        ->pack_kv;
  };
  for (const FlashAttentionTiling& t : Candidates(chip, s)) ASSERT_FALSE(t.pack_kv);
  s.among_others = true;
  EXPECT_TRUE(cheapest_packs());
  s.sq = 64;
  EXPECT_FALSE(cheapest_packs());
}

TEST(FlashAttentionTilingTest, ChoosingAgainGivesTheSame) {
  ExpectChoosingAgainGivesTheSame<FlashAttentionTiling>(Shapes());
}

TEST(FlashAttentionTilingTest, NoHeadsAreATiling) {
  for (const ChipSpec* chip : Chips()) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      FlashAttentionShape s = ShapeOf(16, 16, 8, 0, 8, dtype, false);
      s.heads = s.kv_heads = 0;
      FlashAttentionTiling t;
      EXPECT_TRUE(Choose(*chip, s, &t).ok()) << chip->name;
      EXPECT_EQ(t.tasks(s), 0);
      s.heads = 4, s.kv_heads = 2, s.batches = 0;
      EXPECT_TRUE(Choose(*chip, s, &t).ok()) << chip->name;
    }
  }
}

TEST(FlashAttentionTilingTest, HugeSizesAreChosenAtOnce) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 40;
  for (const ChipSpec* chip : Chips()) {
    for (const auto& [sq, skv] :
         {std::pair(kHuge, std::int64_t{1}), {std::int64_t{1}, kHuge}, {kHuge, kHuge}}) {
      const FlashAttentionShape s = ShapeOf(sq, skv, 64, 0, 64, DType::kBF16, false);
      FlashAttentionTiling t;
      ASSERT_TRUE(Choose(*chip, s, &t).ok()) << chip->name << " " << NameOf(s);
      EXPECT_TRUE(Fits(*chip, s, t));
      const double price = Price(*chip, s, t);
      EXPECT_TRUE(std::isfinite(price) && price > 0) << chip->name << " " << NameOf(s) << ": " << price;
    }
  }
}

TEST(FlashAttentionTilingTest, AnErrorNamesTheBufferThatIsTooSmall) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    ExpectErrorsNameTheBuffer<FlashAttentionTiling>(ShapeOf(300, 300, 64, 32, 48, dtype, true), kBuffers);
  }
}

TEST(FlashAttentionTilingTest, AHeadDimBeyondTheChipNamesItsBuffer) {
  for (std::int64_t d : {256, 512, 1000, 1500, 2000, 3000, 10000, 1 << 20}) {
    for (bool of_v : {false, true}) {
      const FlashAttentionShape s = ShapeOf(64, 64, of_v ? 64 : d, 0, of_v ? d : 64, DType::kBF16, false);
      FlashAttentionTiling t;
      const Status status = Choose(Ascend910B1(), s, &t);
      if (status.ok()) {
        EXPECT_TRUE(Fits(Ascend910B1(), s, t));
      } else {
        EXPECT_NE(status.message().find(" bytes of "), std::string::npos)
            << NameOf(s) << ": " << status.message();
      }
      EXPECT_TRUE(Choose(HostChip(), s, &t).ok()) << NameOf(s);  // The host has plain memory.
    }
  }
}

}  // namespace
}  // namespace cubist
