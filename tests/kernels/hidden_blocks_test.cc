// Blocks of scores that a boolean mask hides whole are not computed, forward or backward, and that changes no bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention_sequences.h"
#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"
#include "npu_model/sync/check.h"
#include "npu_model/sync/plan.h"
#include "npu_model/sync/report.h"
#include "npu_model/trace/record.h"
#include "npu_model/tuning.h"
#include "tests/kernels/attention_features_call.h"
#include "tests/kernels/attention_grad_call.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"
#include "tiling/fields.h"
#include "tiling/flash_attention_grad_tiling.h"
#include "tiling/flash_attention_steps.h"
#include "tiling/flash_attention_tiling.h"

namespace cubist::testing {
namespace {

using Hidden = std::function<bool(std::int64_t i, std::int64_t j)>;

// Which pairs of (b, n, i, j) a mask hides, by any byte but 0.
void SetMask(Matrix& mask, const std::function<Hidden(std::int64_t b, std::int64_t n)>& of) {
  const Tensor view = mask.view();
  auto* bytes = static_cast<std::uint8_t*>(view.data);
  Hidden hidden;
  ForEachElement(view, [&](const Index& at, std::int64_t offset) {
    const auto& [b, n, i, j, none, neither] = at;
    if (i == 0 && j == 0) hidden = of(b, n);
    bytes[offset] = hidden(i, j) ? static_cast<std::uint8_t>(1 + (5 * i + j) % 255) : 0;
  });
}

// Rows see the keys of their own document.
Hidden Documents(std::int64_t length) {
  return [length](std::int64_t i, std::int64_t j) { return i / length != j / length; };
}
// Documents of random lengths.
Hidden RandomDocuments(Random& random, std::int64_t size) {
  std::vector<std::int64_t> of;
  for (std::int64_t document = 0; static_cast<std::int64_t>(of.size()) < size; ++document)
    of.insert(of.end(), static_cast<std::size_t>(random.Integer(1, 200)), document);
  return [of](std::int64_t i, std::int64_t j) {
    return of[static_cast<std::size_t>(i)] != of[static_cast<std::size_t>(j)];
  };
}
// A quarter of squares is seen.
Hidden RandomSquares(Random& random, std::int64_t size) {
  constexpr std::int64_t kSide = 48;
  const std::int64_t side = size / kSide + 1;
  std::vector<bool> seen;
  for (std::int64_t i = 0; i < side * side; ++i) seen.push_back(random.Integer(0, 3) == 0);
  return [=](std::int64_t i, std::int64_t j) {
    return !seen[static_cast<std::size_t>(i / kSide * side + j / kSide)];
  };
}
// Of each batch entry, or head, another one.
void SetRandomMask(Matrix& mask, Random& random, int kind) {
  const std::int64_t size = std::max(mask.view().size(2), mask.view().size(3));
  SetMask(mask, [&](std::int64_t b, std::int64_t n) -> Hidden {
    if (kind == 0) return RandomDocuments(random, size);
    if (kind == 1) return RandomSquares(random, size);
    const std::int64_t end = size * (b + 1) / 3 + 17 * n;  // Padding of keys.
    return [end](std::int64_t, std::int64_t j) { return j >= end; };
  });
}

std::int64_t MacsOf(const trace::Record& record) {
  std::int64_t macs = 0;
  for (const trace::Phase& phase : record.phases) {
    for (const trace::CoreRecord& core : phase.cores) {
      for (const trace::Instr& instr : core.instrs) {
        if (instr.op == trace::Op::kMmad) macs += std::int64_t{instr.dims[0]} * instr.dims[1] * instr.dims[2];
      }
    }
  }
  return macs;
}

// The model, its record and, where it is asked for, the tiling of its choice.
template <class Shape, class Tiling>
Device Recording(const Shape& shape, bool with_data, trace::Record* record, Tiling* tiling) {
  auto listening = std::make_shared<Tuning>();
  listening->on_choice = [shape, tiling](const TilingChoice& met) {
    EXPECT_TRUE(IsOk(ParseTiling(Ascend910B2(), shape, met.chosen, tiling)));
  };
  return Npu(Ascend910B2(), {.with_data = with_data, .record = record, .tuning = std::move(listening)});
}

TEST(HiddenBlocksTest, ForwardAgreesWithTheReference) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (int kind = 0; kind < 3; ++kind) {
      for (const DType in : {kFloatTypes[(kind + (device.kind() == Device::Kind::kHost ? 0 : 1)) % 3]}) {
        const Causal causal = static_cast<Causal>((kind + static_cast<int>(in)) % 3);
        const Features calls[] = {
            {.shape = {2, 4, 2, 310, 420, 24, 0, 16}, .causal = causal, .mask = {2, 1, 310, 420}},
            {.shape = {1, 2, 1, 310, 420, 24, 8, 16},
             .sinks = true,
             .turned = 8,
             .layout = kBsnd,
             .mask = {1, 2, 310, 420},
             .keep = 0.5f},
            {.shape = {1, 2, 1, 500, 600, 16, 0, 16},
             .causal = causal,
             .q_ends = {0, 130, 470},
             .kv_ends = {200, 200, 590},
             .mask = {kind == 0 ? 1 : 3, 1, 340, 390},
             .slopes = 1},
            // Decoding: heads as rows of one, keys in parts.
            {.shape = {2, 8, 2, 3, 4200, 16, 0, 16}, .causal = causal, .mask = {2, 1, 3, 4200}},
            {.shape = {2, 8, 2, 1, 4200, 16, 0, 16}, .sinks = true, .mask = {2, 8, 1, 4200}},
            {.shape = {2, 4, 2, 4, 4200, 16, 0, 16}, .mask = {2, 1, 1, 4200}},
            {.shape = {1, 2, 1, 310, 300, 24, 0, 16}, .mask = {1, 2, 310, 1}},
            // One row of the mask for no rows of queries, and one column for no keys.
            {.shape = {1, 2, 1, 3, 60, 16, 0, 16},
             .q_ends = {0, 0},
             .kv_ends = {20, 60},
             .mask = {1, 1, 1, 40}},
            {.shape = {1, 2, 1, 60, 3, 16, 0, 16},
             .q_ends = {20, 60},
             .kv_ends = {0, 0},
             .mask = {1, 1, 40, 1}}};
        for (Features f : calls) {
          f.in = in;
          SCOPED_TRACE(Join(f.Name(), " kind ", kind));
          Random random;
          FeaturesCall call(f, random);
          SetRandomMask(call.mask, random, kind);
          ASSERT_TRUE(IsOk(FlashAttention(device, call.args())));
          call.ExpectRight();
        }
      }
    }
  }
}

TEST(HiddenBlocksTest, BackwardAgreesWithTheReference) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (int kind = 0; kind < 3; ++kind) {
      for (const DType in : {kFloatTypes[(kind + (device.kind() == Device::Kind::kHost ? 0 : 1)) % 3]}) {
        const Causal causal = static_cast<Causal>((kind + static_cast<int>(in)) % 3);
        const std::pair<AttentionShape, GradOptions> calls[] = {
            {{2, 4, 2, 310, 420, 24, 0, 16}, {.causal = causal, .mask = {2, 1, 310, 420}}},
            {{1, 2, 1, 310, 420, 24, 8, 16},
             {.shared_rope = true,
              .layout = kBsnd,
              .turned = 8,
              .bias = {1, 2, 310, 420},
              .sinks = true,
              .mask = {1, 2, 310, 420},
              .keep = 0.5f}},
            {{1, 2, 1, 500, 600, 16, 0, 16},
             {.causal = causal,
              .q_ends = {0, 130, 470},
              .kv_ends = {200, 200, 590},
              .mask = {kind == 0 ? 1 : 3, 1, 340, 390},
              .slopes = true}},
            {{2, 2, 2, 310, 300, 24, 0, 16}, {.bias = {1, 1, 1, 300}, .mask = {2, 1, 1, 300}}},
            {{1, 2, 1, 3, 60, 16, 0, 16}, {.q_ends = {0, 0}, .kv_ends = {20, 60}, .mask = {1, 1, 1, 40}}},
            {{1, 2, 1, 60, 3, 16, 0, 16}, {.q_ends = {20, 60}, .kv_ends = {0, 0}, .mask = {1, 1, 40, 1}}}};
        for (auto [shape, options] : calls) {
          options.in = options.out = in;
          SCOPED_TRACE(Join("kind ", kind));
          Random random;
          GradCall call(shape, options);
          call.FillNormal(random);
          SetRandomMask(call.mask, random, kind);
          call.Forward();
          ExpectRight(device, call);
        }
      }
    }
  }
}

// A pair in every hidden block that the mask leaves and a bias of -inf hides: those are computed, to the same result.
struct Computed {
  static constexpr std::int64_t kStep = 16;  // Of which all blocks are multiples.
  static bool Shows(std::int64_t i, std::int64_t j) { return i % kStep == 0 && j % kStep == 0; }

  template <class Call>
  static void Set(Call& call, const Hidden& hidden, bool computed) {
    SetMask(call.mask, [&](std::int64_t, std::int64_t) -> Hidden {
      return [&hidden, computed](std::int64_t i, std::int64_t j) {
        return hidden(i, j) && !(computed && Shows(i, j));
      };
    });
    const Tensor bias = call.bias.view();
    for (std::int64_t i = 0; i < bias.size(2); ++i) {
      for (std::int64_t j = 0; j < bias.size(3); ++j) {
        if (hidden(i, j)) call.bias.set({0, 0, i, j}, -kInfinity);
      }
    }
  }
};

TEST(HiddenBlocksTest, ForwardHasTheBitsOfAllBlocks) {
  constexpr std::int64_t kSq = 520, kSkv = 700;
  int i = 0;
  for (const Causal causal : {Causal::kNone, Causal::kBottomRight}) {
    for (const DType in : kFloatTypes) {
      Random masks;
      const Hidden kinds[] = {Documents(180), RandomDocuments(masks, kSkv), RandomSquares(masks, kSkv)};
      for (const Hidden& hidden : {kinds[i++ * 2 % 3]}) {
        const Features f{.shape = {1, 2, 1, kSq, kSkv, 24, 0, 40},
                         .in = in,
                         .causal = causal,
                         .bias = {1, 1, kSq, kSkv},
                         .sinks = true,
                         .mask = {1, 1, kSq, kSkv},
                         .keep = 0.8f};
        Random random, same;
        FeaturesCall skips(f, random), computes(f, same);
        Computed::Set(skips, hidden, false), Computed::Set(computes, hidden, true);
        for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
          ASSERT_TRUE(IsOk(FlashAttention(device, skips.args())));
          ASSERT_TRUE(IsOk(FlashAttention(device, computes.args())));
          EXPECT_EQ(skips.out.ToDoubles(), computes.out.ToDoubles());
          EXPECT_EQ(skips.lse.ToDoubles(), computes.lse.ToDoubles());
        }
      }
    }
  }
}

TEST(HiddenBlocksTest, BackwardHasTheBitsOfAllBlocks) {
  constexpr std::int64_t kSq = 520, kSkv = 700;
  int i = 0;
  for (const Causal causal : {Causal::kNone, Causal::kBottomRight}) {
    for (const DType in : kFloatTypes) {
      Random masks;
      const Hidden kinds[] = {Documents(180), RandomDocuments(masks, kSkv), RandomSquares(masks, kSkv)};
      for (const Hidden& hidden : {kinds[i++ * 2 % 3]}) {
        const GradOptions options{.in = in,
                                  .causal = causal,
                                  .bias = {1, 1, kSq, kSkv},
                                  .sinks = true,
                                  .mask = {1, 1, kSq, kSkv},
                                  .keep = 0.8f};
        const AttentionShape shape{1, 2, 1, kSq, kSkv, 24, 0, 40};
        GradCall skips(shape, options), computes(shape, options);
        skips.FillNormal(), computes.FillNormal();
        Computed::Set(skips, hidden, false), Computed::Set(computes, hidden, true);
        skips.Forward();
        Assign(computes.out.view(), skips.out.ToDoubles()),
            Assign(computes.lse.view(), skips.lse.ToDoubles());
        for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
          ASSERT_TRUE(IsOk(FlashAttentionGrad(device, skips.args())));
          ASSERT_TRUE(IsOk(FlashAttentionGrad(device, computes.args())));
          for (std::size_t i = 0; i < skips.outputs().size(); ++i)
            EXPECT_EQ(skips.outputs()[i]->ToDoubles(), computes.outputs()[i]->ToDoubles()) << i;
        }
      }
    }
  }
}

// Of the record the products of the blocks that the mask shows, and no others; without data those of all.
TEST(HiddenBlocksTest, ForwardMultipliesWhatTheMaskShows) {
  constexpr std::int64_t kS = 1100, kD = 16;
  Random random;
  const std::vector<Hidden> masks = {Documents(275), RandomDocuments(random, kS), RandomSquares(random, kS),
                                     [](std::int64_t, std::int64_t) { return true; },
                                     [](std::int64_t, std::int64_t) { return false; }};
  for (const Causal causal : {Causal::kNone, Causal::kBottomRight}) {
    for (const Hidden& hidden : masks) {
      const Features f{.shape = {1, 2, 2, kS, kS, kD, 0, kD},
                       .in = DType::kBF16,
                       .causal = causal,
                       .mask = {1, 1, kS, kS}};
      FeaturesCall call(f, random);
      SetMask(call.mask, [&](std::int64_t, std::int64_t) { return hidden; });
      FlashAttentionShape s;
      s.batches = 1, s.heads = s.kv_heads = 2, s.sq = s.skv = kS, s.d_qk = s.d_v = kD;
      s.in = DType::kBF16, s.band = BandOf(causal, {}, kS, kS), s.mask = true;
      for (const bool with_data : {true, false}) {
        FlashAttentionTiling t;
        trace::Record record;
        ASSERT_TRUE(IsOk(FlashAttention(Recording(s, with_data, &record, &t), call.args())));
        std::int64_t pairs = 0;
        for (const Range q : Split(kS, t.m)) {
          FlashAttentionPieces pieces(s.band, q, {0, kS}, t);
          for (FlashAttentionPiece piece; pieces.Next(piece);) {
            for (const Range keys : BlocksOf(piece.keys, t)) {
              bool seen = !with_data;
              for (std::int64_t i = piece.rows.begin; i < piece.rows.end; ++i) {
                for (std::int64_t j = keys.begin; j < keys.end && !seen; ++j) seen = !hidden(i, j);
              }
              if (seen) pairs += piece.rows.size() * keys.size();
            }
          }
        }
        EXPECT_EQ(MacsOf(record), 2 * pairs * 2 * kD);
      }
    }
  }
}

TEST(HiddenBlocksTest, BackwardMultipliesWhatTheMaskShows) {
  constexpr std::int64_t kS = 1100, kD = 16;
  Random random;
  const std::vector<Hidden> masks = {Documents(275), RandomDocuments(random, kS), RandomSquares(random, kS),
                                     [](std::int64_t, std::int64_t) { return true; },
                                     [](std::int64_t, std::int64_t) { return false; }};
  for (const Hidden& hidden : masks) {
    GradCall call({1, 2, 2, kS, kS, kD, 0, kD}, {.in = DType::kBF16, .mask = {1, 1, kS, kS}});
    SetMask(call.mask, [&](std::int64_t, std::int64_t) { return hidden; });
    for (Matrix* x : {&call.q, &call.k, &call.v, &call.dout, &call.out, &call.lse}) x->FillNormal(random);
    FlashAttentionGradShape s;
    s.batches = 1, s.heads = s.kv_heads = 2, s.sq = s.skv = kS, s.d_qk = s.d_v = kD;
    s.in = DType::kBF16, s.mask = true;
    for (const bool with_data : {true, false}) {
      FlashAttentionGradTiling t;
      trace::Record record;
      ASSERT_TRUE(IsOk(FlashAttentionGrad(Recording(s, with_data, &record, &t), call.args())));
      std::int64_t pairs = 0;
      for (const Range keys : Split(kS, t.n)) {
        for (const Range q : Split(kS, t.m())) {
          bool seen = !with_data;
          for (std::int64_t i = q.begin; i < q.end; ++i) {
            for (std::int64_t j = keys.begin; j < keys.end && !seen; ++j) seen = !hidden(i, j);
          }
          if (seen) pairs += q.size() * keys.size();
        }
      }
      EXPECT_EQ(MacsOf(record), 2 * pairs * 5 * kD);
    }
  }
}

// What a mask leaves of the keys to the rows, but for hidden steps at the ends.
Range SeenSteps(Range rows, Range keys, std::int64_t step, const Hidden& hidden) {
  const auto hides = [&](Range some) {
    for (std::int64_t i = rows.begin; i < rows.end; ++i) {
      for (std::int64_t j = some.begin; j < some.end; ++j) {
        if (!hidden(i, j)) return false;
      }
    }
    return true;
  };
  Range seen;
  for (const Range some : Split(keys, step)) {
    if (hides(some)) continue;
    if (seen.empty()) seen.begin = some.begin;
    seen.end = some.end;
  }
  return seen;
}

// A device with the tilings of its choice but for some fields: `with` is what their texts end in.
Device Altered(const Device& device, std::function<Status(const Device&)> call, const std::string& with,
               NpuOptions options) {
  auto listening = std::make_shared<Tuning>(), altered = std::make_shared<Tuning>();
  listening->on_choice = [altered, with](const TilingChoice& met) {
    std::string tiling = "," + met.chosen;
    for (const std::string field : {",n=", ",chunks=", ",mask_step=", ",keep_sums="}) {
      const std::size_t at = tiling.find(field);
      if (at == std::string::npos || with.find(field) == std::string::npos) continue;
      tiling.erase(at, std::min(tiling.find(',', at + 1), tiling.size()) - at);
    }
    altered->Set(met.kernel, met.chip, met.shape, (tiling + with).substr(1));
  };
  EXPECT_TRUE(IsOk(call(Npu(device.chip(), {.with_data = true, .tuning = listening}))));
  options.tuning = altered;
  return Npu(device.chip(), options);
}

// Hosts leave out what a mask hides at the ends of their long blocks, in steps. On the model what that is can be counted.
TEST(HiddenBlocksTest, StepsAtTheEndsOfBlocksAreLeftOutWhereTheTilingSaysSo) {
  constexpr std::int64_t kS = 700, kD = 16, kStep = 32;
  Random random;
  const std::vector<Hidden> masks = {Documents(275), RandomDocuments(random, kS), RandomSquares(random, kS)};
  for (const Hidden& hidden : masks) {
    const Features f{.shape = {1, 2, 2, kS, kS, kD, 0, kD}, .in = DType::kBF16, .mask = {1, 1, kS, kS}};
    FeaturesCall call(f, random);
    SetMask(call.mask, [&](std::int64_t, std::int64_t) { return hidden; });
    FlashAttentionShape s;
    s.batches = 1, s.heads = s.kv_heads = 2, s.sq = s.skv = kS, s.d_qk = s.d_v = kD;
    s.in = DType::kBF16, s.mask = true;
    FlashAttentionTiling t;
    trace::Record record;
    const auto run = [&](const Device& device) { return FlashAttention(device, call.args()); };
    ASSERT_TRUE(IsOk(run(Recording(s, true, &record, &t))));
    const std::vector<double> right = call.out.ToDoubles();
    call.out.FillNaN();
    ASSERT_TRUE(IsOk(run(Altered(NpuWithData(Ascend910B2()), run, Join(",mask_step=", kStep),
                                 {.with_data = true, .record = &record}))));
    EXPECT_EQ(call.out.ToDoubles(), right);
    std::int64_t pairs = 0;
    for (const Range q : Split(kS, t.m)) {
      for (const Range keys : BlocksOf({0, kS}, t))
        pairs += q.size() * SeenSteps(q, keys, kStep, hidden).size();
    }
    EXPECT_EQ(MacsOf(record), 2 * pairs * 2 * kD);
    const sync::CheckResult checked = sync::Check(record, sync::PlanFlags(record, sync::Policy::kMinimal));
    EXPECT_TRUE(checked.ok()) << sync::CheckText(checked);
  }
  FlashAttentionShape s;
  s.batches = s.heads = s.kv_heads = 1, s.sq = s.skv = 4096, s.d_qk = s.d_v = 64, s.mask = true;
  for (const FlashAttentionTiling& t : Candidates(HostChip(), s)) EXPECT_GT(t.mask_step, 0);
}

// Sums of keys that stay in L0C start from nothing where the first block of queries does not see all of them.
TEST(HiddenBlocksTest, StepsOfBlocksOfKeysAreLeftOutBackward) {
  constexpr std::int64_t kS = 700, kD = 16;
  Random random;
  const std::vector<Hidden> masks = {Documents(275), RandomDocuments(random, kS), RandomSquares(random, kS)};
  for (const Hidden& hidden : masks) {
    GradCall call({1, 2, 2, kS, kS, kD, 0, kD}, {.in = DType::kBF16, .mask = {1, 1, kS, kS}});
    SetMask(call.mask, [&](std::int64_t, std::int64_t) { return hidden; });
    for (Matrix* x : {&call.q, &call.k, &call.v, &call.dout, &call.out, &call.lse}) x->FillNormal(random);
    const auto run = [&](const Device& device) { return FlashAttentionGrad(device, call.args()); };
    const auto results = [&] {
      std::vector<std::vector<double>> all;
      for (Matrix* x : {&call.dq, &call.dk, &call.dv}) all.push_back(x->ToDoubles()), x->FillNaN();
      return all;
    };
    std::vector<std::vector<double>> right;
    std::int64_t before = 0;
    for (const int step : {0, 32}) {
      trace::Record record;
      const Device device =
          Altered(NpuWithData(Ascend910B2()), run, Join(",n=64,chunks=1,keep_sums=1,mask_step=", step),
                  {.with_data = true, .record = &record});
      results();
      ASSERT_TRUE(IsOk(run(device)));
      const auto got = results();
      if (step == 0) {
        right = got, before = MacsOf(record);
      } else {
        EXPECT_EQ(got, right);
        EXPECT_LT(MacsOf(record), before);
      }
      const sync::CheckResult checked = sync::Check(record, sync::PlanFlags(record, sync::Policy::kMinimal));
      EXPECT_TRUE(checked.ok()) << sync::CheckText(checked);
    }
  }
}

// Of folded heads and parts of the keys, too: most of the keys are padding.
TEST(HiddenBlocksTest, DecodingLeavesOutPadding) {
  const auto macs = [&](std::vector<std::int64_t> mask, double kept) {
    const std::int64_t keys = 8000;
    Random random;
    FeaturesCall call({.shape = {1, 8, 2, 2, keys, 16, 0, 16}, .in = DType::kBF16, .mask = std::move(mask)},
                      random);
    SetMask(call.mask, [&](std::int64_t, std::int64_t) -> Hidden {
      return [=](std::int64_t, std::int64_t j) { return static_cast<double>(j) >= kept * keys; };
    });
    trace::Record record;
    EXPECT_TRUE(IsOk(FlashAttention(Npu(Ascend910B2(), {.record = &record}), call.args())));
    call.ExpectRight();
    return static_cast<double>(MacsOf(record));
  };
  for (const std::vector<std::int64_t>& mask :
       {std::vector<std::int64_t>{1, 1, 1, 8000}, {1, 1, 2, 8000}, {1, 8, 2, 8000}}) {
    const double all = macs(mask, 1);
    EXPECT_LT(macs(mask, 0.1), 0.2 * all);
    EXPECT_EQ(macs(mask, 0), 0);
  }
}

// NaN and Inf of hidden blocks reach nothing: not by keys or values, nor by the queries that they are hidden from.
TEST(HiddenBlocksTest, HiddenBlocksAreNotRead) {
  constexpr std::int64_t kS = 2048;
  GradCall call({1, 1, 1, kS, kS, 24, 0, 16}, {.mask = {1, 1, kS, kS}});
  Random random;
  for (Matrix* x : {&call.q, &call.k, &call.v, &call.dout, &call.out, &call.lse}) x->FillNormal(random);
  SetMask(call.mask, [](std::int64_t, std::int64_t) { return Documents(kS / 2); });
  const auto first_half_of_document = [](const Matrix& x) {  // Blocks may hold the end of one and more.
    const std::vector<double> all = x.ToDoubles();
    return std::vector<double>(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(all.size() / 4));
  };
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    std::vector<std::vector<double>> before;
    for (const double last : {1.0, kNaN, kInfinity}) {
      for (Matrix* x : {&call.q, &call.k, &call.v, &call.dout}) x->set({0, 0, kS - 1, 3}, last);
      ASSERT_TRUE(IsOk(FlashAttentionGrad(device, call.args())));
      std::vector<std::vector<double>> now;
      for (const Matrix* x : {&call.dq, &call.dk, &call.dv}) now.push_back(first_half_of_document(*x));
      if (before.empty()) before = now;
      EXPECT_EQ(now, before);
    }
  }
}

// Parts of dQ that no block of keys adds to are zero: memory full of NaN where they stand reaches nothing.
TEST(HiddenBlocksTest, UnwrittenMemoryReachesNothing) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (const Causal causal : {Causal::kNone, Causal::kBottomRight}) {
      GradCall call({1, 2, 1, 700, 900, 24, 8, 16}, {.causal = causal, .mask = {1, 1, 700, 900}});
      call.FillNormal();
      SetMask(call.mask, [](std::int64_t, std::int64_t) { return Documents(230); });
      call.Forward();
      FlashAttentionGradArgs args = call.args();
      std::int64_t bytes = 0;
      ASSERT_TRUE(IsOk(FlashAttentionGradWorkspace(device, args, &bytes)));
      std::vector<std::uint8_t> memory(static_cast<std::size_t>(bytes), 0xff);
      args.workspace = {memory.data(), bytes};
      ASSERT_TRUE(IsOk(FlashAttentionGrad(device, args)));
      call.ExpectRight();
    }
  }
}

}  // namespace
}  // namespace cubist::testing
