// FlashAttention with few query rows of each sequence and many keys: parts of the keys walked side by side, heads that
// share keys as rows of one matrix. Against the reference, on the host and on the model.
#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"
#include "npu_model/sync/check.h"
#include "npu_model/sync/plan.h"
#include "npu_model/trace/record.h"
#include "npu_model/tuning.h"
#include "tests/kernels/attention_call.h"
#include "tests/kernels/attention_features_call.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

std::vector<Device> Both() { return {Host(), NpuWithData(Ascend910B2())}; }

// The ends of sequences of so many rows.
std::vector<std::int64_t> EndsOf(const std::vector<std::int64_t>& lengths) {
  std::vector<std::int64_t> ends;
  std::int64_t end = 0;
  for (const std::int64_t length : lengths) ends.push_back(end += length);
  return ends;
}

// Lengths around multiples of a part's: of 1024 keys on the host, of 512 on the model, see MostSplits.
const std::vector<std::int64_t> kRows = {1, 1, 0, 1, 1, 1, 1, 1, 1},
                                kKeys = {1, 0, 30, 1023, 1024, 1025, 4096, 2049, 16};

Features Ragged(std::int64_t heads, std::int64_t kv_heads, const std::vector<std::int64_t>& rows = kRows) {
  Features f;
  f.q_ends = EndsOf(rows), f.kv_ends = EndsOf(kKeys);
  f.shape = {1, heads, kv_heads, f.q_ends.back() + 2, f.kv_ends.back() + 3, 16, 0, 24};
  return f;
}

// All that a call may ask for besides lengths, by name.
std::vector<std::pair<std::string, std::function<void(Features&)>>> AllFeatures() {
  const auto sequences = static_cast<std::int64_t>(kRows.size());
  const std::int64_t longest = 4096;
  return {{"plain", [](Features&) {}},
          {"causal", [](Features& f) { f.causal = Causal::kBottomRight; }},
          {"top left", [](Features& f) { f.causal = Causal::kTopLeft; }},
          {"window", [](Features& f) { f.window = AttentionWindow{.left = 2100, .right = -3}; }},
          {"nothing seen", [](Features& f) { f.window = AttentionWindow{.right = -6000}; }},
          {"sinks", [](Features& f) { f.sinks = true; }},
          {"alibi", [](Features& f) { f.slopes = 2; }},
          {"root of alibi", [](Features& f) { f.slopes = 1, f.root = true, f.alibi_offset = 7; }},
          {"soft cap", [](Features& f) { f.soft_cap = 3.0f, f.scale = -0.7f; }},
          {"bias",
           [=](Features& f) {
             f.bias = {sequences, f.shape.q_heads, 3, longest};
           }},
          {"bias of all",
           [=](Features& f) {
             f.bias = {1, 1, 1, longest + 3};
           }},
          {"mask",
           [=](Features& f) {
             f.mask = {sequences, f.shape.q_heads, 3, longest};
           }},
          {"mask of rows",
           [=](Features& f) {
             f.mask = {1, 1, 3, longest}, f.masked = 0.97;
           }},
          {"mask of all",
           [=](Features& f) {
             f.mask = {1, f.shape.q_heads, 1, 1}, f.scale = 0.0f;
           }},
          {"prefix",
           [](Features& f) {
             f.causal = Causal::kTopLeft;
             for (const std::int64_t keys : kKeys) f.prefix.push_back(keys / 2);
           }},
          {"prefix and window",
           [](Features& f) {
             f.window = AttentionWindow{.left = 30, .right = 0};
             for (const std::int64_t keys : kKeys) f.prefix.push_back(keys / 3);
           }},
          {"dropout", [](Features& f) { f.keep = 0.75f; }},
          {"rope", [](Features& f) { f.shape.dr = 8, f.turned = 8, f.q_offset = 5; }},
          {"rope of part",
           [](Features& f) { f.turned = 6, f.positions = 2, f.window = AttentionWindow{.left = 100}; }},
          {"all", [=](Features& f) {
             f.shape.dr = 8, f.turned = 8, f.positions = 1, f.causal = Causal::kBottomRight;
             f.sinks = true, f.slopes = 2, f.soft_cap = 9.0f;
             f.bias = {1, f.shape.q_heads, 1, longest}, f.mask = {1, 1, 1, longest};
           }}};
}

// Every feature, where heads are folded and where they are not, of one row of each sequence and of a few.
TEST(FlashAttentionDecodeTest, EveryFeatureOfRaggedSequences) {
  const std::vector<std::int64_t> few = {3, 1, 0, 2, 1, 3, 3, 1, 2};
  int i = 0;
  for (const Device& device : Both()) {
    for (const auto& [name, set] : AllFeatures()) {
      for (const Features& shape : {Ragged(4, 2), Ragged(2, 2), Ragged(5, 1, few), Ragged(2, 2, few)}) {
        Features f = shape;
        set(f);
        f.in = kFloatTypes[i % 3];
        if (i++ % 2 == 0) f.layout = kBsnd;
        SCOPED_TRACE(name);
        ExpectRight(device, f);
      }
    }
  }
}

// The same of batch entries that are one sequence each.
TEST(FlashAttentionDecodeTest, EveryFeatureOfLikeSequences) {
  int i = 0;
  for (const Device& device : Both()) {
    for (const auto& [name, set] : AllFeatures()) {
      for (const std::int64_t sq : {1, 3}) {
        Features f{.shape = {2, 6, 2, sq, 2100, 16, 0, 24}};
        set(f);
        for (std::vector<std::int64_t>* sizes : {&f.bias, &f.mask}) {
          if (sizes->empty()) continue;
          if ((*sizes)[0] > 1) (*sizes)[0] = 2;
          if ((*sizes)[2] > 1) (*sizes)[2] = sq;
          if ((*sizes)[3] > 1) (*sizes)[3] = 2100;
        }
        if (!f.prefix.empty()) f.prefix = {0, 1500};
        f.in = kFloatTypes[i % 3];
        if (i++ % 2 == 0) f.layout = kBsnd;
        SCOPED_TRACE(name);
        ExpectRight(device, f);
      }
    }
  }
}

// Rows and heads that end inside tiles, and more of them than a tile holds.
TEST(FlashAttentionDecodeTest, ManyHeadsAndPositions) {
  for (const Device& device : Both()) {
    for (const std::int64_t sq : {1, 2, 15, 16, 17}) {
      for (const std::int64_t heads : {7, 33}) {
        Features f{.shape = {1, heads, 1, sq, 75, 8, 0, 8},
                   .in = kFloatTypes[sq % 3],
                   .causal = Causal::kBottomRight,
                   .sinks = true,
                   .slopes = 1};
        ExpectRight(device, f);
        f.q_ends = {sq / 2, sq}, f.kv_ends = {20, 75};
        ExpectRight(device, f);
      }
    }
  }
}

// Columns of heads that are not adjacent, and rows of them that are, as keys stand in a cache that grows along its last dimension.
TEST(FlashAttentionDecodeTest, ColumnsThatAreApart) {
  const Layout turned{.order = {0, 1, 3, 2, 4, 5}}, turned_bsnd{.order = {3, 0, 1, 2, 4, 5}, .step = 3};
  int i = 0;
  for (const Device& device : Both()) {
    for (const Layout& layout : {kApart, turned, turned_bsnd}) {
      for (const std::int64_t sq : {1, 3}) {
        Features f{.shape = {2, 6, 2, sq, 1300, 16, 0, 24},
                   .in = kFloatTypes[i++ % 3],
                   .causal = Causal::kBottomRight,
                   .layout = layout};
        ExpectRight(device, f);
        f.shape.dr = f.turned = 8, f.q_offset = 3;
        ExpectRight(device, f);
        Features ragged = Ragged(4, 2);
        ragged.in = f.in, ragged.layout = layout;
        ExpectRight(device, ragged);
      }
    }
  }
}

// Values of NaN behind masks, windows and ends of parts reach no row that does not see them.
// Absorbed MLA: values are the first columns of the keys. An NPU has both from one tile, however deep its stages overlap.
TEST(FlashAttentionDecodeTest, ValuesMayBeColumnsOfKeys) {
  const AttentionShape shapes[] = {{1, 6, 1, 1, 700, 72, 0, 64},
                                   {2, 4, 2, 3, 130, 48, 8, 48},
                                   {1, 2, 1, 150, 150, 40, 16, 23},
                                   {1, 3, 1, 5, 0, 24, 0, 16}};
  std::size_t ways = 0;
  for (const AttentionShape& shape : shapes) {
    for (const DType in : kFloatTypes) {
      for (const Causal causal : {Causal::kNone, Causal::kBottomRight}) {
        Random random;
        Call call(shape, {.in = in, .causal = causal, .shared_rope = true, .one_latent = true});
        call.FillNormal(random);
        SCOPED_TRACE(shape.Name() + " " + call.options.Name());
        const Answer answer(call);
        TilingChoice met;
        auto listening = std::make_shared<Tuning>();
        listening->on_choice = [&](const TilingChoice& choice) { met = choice; };
        for (const Device& device : {Host(), Npu(Ascend910B2(), {.with_data = true, .tuning = listening})}) {
          call.out.FillNaN(), call.lse.FillNaN();
          ASSERT_TRUE(IsOk(FlashAttention(device, call.args())));
          answer.Expect(call);
        }
        // Some of all ways, others in each turn.
        constexpr std::size_t kWays = 6;
        const std::size_t step = met.candidates.size() / kWays + 1;
        for (std::size_t i = ++ways % step; i < met.candidates.size(); i += step) {
          SCOPED_TRACE(met.candidates[i].tiling);
          auto tuning = std::make_shared<Tuning>();
          tuning->Set(met.kernel, met.chip, met.shape, met.candidates[i].tiling);
          trace::Record record;
          call.out.FillNaN(), call.lse.FillNaN();
          const Device device = Npu(Ascend910B2(), {.with_data = true, .record = &record, .tuning = tuning});
          ASSERT_TRUE(IsOk(FlashAttention(device, call.args())));
          answer.Expect(call);
          EXPECT_TRUE(sync::Check(record, sync::PlanFlags(record, sync::Policy::kMinimal)).findings.empty());
        }
      }
    }
  }
}

TEST(FlashAttentionDecodeTest, OneLatentIsReadOnce) {
  static const char kKeys[1] = {}, kValues[1] = {};  // Nothing is read without data.
  const auto profile = [](const void* values) {
    FlashAttentionArgs args;
    args.q = ConstTensor(nullptr, DType::kBF16, {1, 128, 1, 576});
    args.k = ConstTensor(kKeys, DType::kBF16, {1, 1, 8192, 576});
    args.v = ConstTensor(values, DType::kBF16, {1, 1, 8192, 512}, {8192 * 576, 8192 * 576, 576, 1});
    args.out = Tensor(nullptr, DType::kBF16, {1, 128, 1, 512});
    Profile of_call;
    EXPECT_TRUE(IsOk(FlashAttention(NpuWithoutData(Ascend910B2()), args, &of_call)));
    return of_call;
  };
  const Profile one = profile(kKeys), two = profile(kValues);
  const auto keys = [](const Profile& p) {
    return p.path_bytes[static_cast<std::size_t>(Path::kGmToL1Nd2Nz)];
  };
  EXPECT_GE(keys(one), 8192 * 576 * 2);
  EXPECT_LE(keys(one), 0.65 * static_cast<double>(keys(two)));
  EXPECT_LT(one.time_s, two.time_s);
}

TEST(FlashAttentionDecodeTest, HiddenValuesReachNoRow) {
  for (const Device& device : Both()) {
    for (const DType in : kFloatTypes) {
      for (const int mask_of : {0, 1, 2}) {  // Every row and head, all heads, all rows.
        Features f = Ragged(4, 2, {3, 1, 0, 2, 1, 3, 3, 1, 2});
        f.in = in, f.causal = Causal::kBottomRight, f.sinks = true;
        f.mask = {1, mask_of == 1 ? 1 : 4, mask_of == 2 ? 1 : 3, 4096};
        SCOPED_TRACE(f.Name());
        Random random;
        FeaturesCall call(f, random);
        for (std::int64_t j = 3; j < f.shape.skv; j += 509)
          call.v.set({0, j % 2, j, 5}, j % 3 == 0 ? kNaN : kInfinity);
        ASSERT_TRUE(IsOk(FlashAttention(device, call.args())));
        call.ExpectRight();
      }
    }
  }
}

TEST(FlashAttentionDecodeTest, SameBitsForAnyThreads) {
  const tbb::global_control more_threads_than_cores(tbb::global_control::max_allowed_parallelism, 8);
  int i = 0;
  for (const auto& [name, set] : AllFeatures()) {
    Features f = i % 2 == 0 ? Ragged(4, 2) : Ragged(2, 2, {3, 1, 0, 2, 1, 3, 3, 1, 2});
    f.in = kFloatTypes[i++ % 3];
    set(f);
    SCOPED_TRACE(name);
    Random random;
    FeaturesCall call(f, random);
    ASSERT_TRUE(IsOk(FlashAttention(Host({.threads = 1}), call.args())));
    const std::vector<double> out = call.out.ToDoubles(), lse = call.lse.ToDoubles();
    for (const int threads : kThreadCounts) {
      call.out.FillNaN(), call.lse.FillNaN();
      ASSERT_TRUE(IsOk(FlashAttention(Host({.threads = threads}), call.args())));
      ExpectExactly(call.out.view(), out);
      ExpectExactly(call.lse.view(), lse);
    }
  }
}

// A call on the model without data, of one sequence: as a batch entry, or by its lengths.
Profile ProfileOf(std::int64_t heads, std::int64_t skv, bool by_lengths,
                  const FlashAttentionArgs& more = {}) {
  const std::int64_t d_qk = heads == 1 ? 128 : 576, d_v = heads == 1 ? 128 : 512;
  FlashAttentionArgs args = more;
  args.q = ConstTensor(nullptr, DType::kBF16, {1, heads, 1, d_qk});
  args.k = ConstTensor(nullptr, DType::kBF16, {1, 1, skv, d_qk});
  args.v = ConstTensor(nullptr, DType::kBF16, {1, 1, skv, d_v});
  args.out = Tensor(nullptr, DType::kBF16, {1, heads, 1, d_v});
  const std::vector<std::int64_t> q_ends = {1}, kv_ends = {skv};
  if (by_lengths) args.lengths = {q_ends, kv_ends};
  Profile profile;
  EXPECT_TRUE(IsOk(FlashAttention(NpuWithoutData(Ascend910B2()), args, &profile)));
  return profile;
}

// Lengths, and what is done to scores, cost neither cores nor traffic but their own.
TEST(FlashAttentionDecodeTest, LengthsAndFeaturesKeepAllCoresBusy) {
  for (const auto& [heads, skv] : {std::pair<std::int64_t, std::int64_t>{128, 8192}, {1, 16384}}) {
    const Profile plain = ProfileOf(heads, skv, false);
    EXPECT_GE(plain.cores_used, 16);
    FlashAttentionArgs featured;
    featured.sinks = ConstTensor(nullptr, DType::kF32, {heads});
    featured.alibi.slopes = ConstTensor(nullptr, DType::kF32, {heads});
    featured.bias = ConstTensor(nullptr, DType::kBF16, {1, 1, 1, skv});
    featured.mask = ConstTensor(nullptr, DType::kBool, {1, 1, 1, skv});
    for (const FlashAttentionArgs& more : {FlashAttentionArgs{}, featured}) {
      const Profile x = ProfileOf(heads, skv, true, more);
      EXPECT_EQ(x.cores_used, plain.cores_used);
      EXPECT_LE(x.gm_read, plain.gm_read + 8 * heads * skv);
      EXPECT_LT(x.cycles, 1.2 * plain.cycles);
    }
  }
}

// Keys that no query sees are not turned, in either pass: memory full of NaN where they would stand changes no bit.
TEST(FlashAttentionDecodeTest, KeysThatNobodySeesAreNotTurned) {
  const auto args = [](std::int64_t skv) {
    FlashAttentionArgs args;
    args.q = ConstTensor(nullptr, DType::kBF16, {1, 1, 1, 128});
    args.k = args.v = ConstTensor(nullptr, DType::kBF16, {1, 1, skv, 128});
    args.out = Tensor(nullptr, DType::kBF16, {1, 1, 1, 128});
    args.rope.cos = args.rope.sin = ConstTensor(nullptr, DType::kF32, {skv, 32});
    args.window = AttentionWindow{.left = 127};
    return args;
  };
  Profile few, many;
  ASSERT_TRUE(IsOk(FlashAttention(NpuWithoutData(Ascend910B2()), args(1024), &few)));
  ASSERT_TRUE(IsOk(FlashAttention(NpuWithoutData(Ascend910B2()), args(16384), &many)));
  EXPECT_EQ(many.gm_read, few.gm_read);
  EXPECT_EQ(many.gm_written, few.gm_written);
}

TEST(FlashAttentionDecodeTest, UnwrittenMemoryChangesNoBit) {
  const AttentionWindow window{.left = 20, .right = -7};
  std::vector<Features> calls = {
      {.shape = {2, 4, 2, 3, 500, 16, 8, 24}, .window = window, .turned = 8},
      {.shape = {2, 4, 2, 40, 500, 16, 8, 24}, .window = window, .turned = 8},
      {.shape = {2, 4, 1, 40, 500, 16, 0, 24}, .causal = Causal::kTopLeft, .turned = 8, .prefix = {3, 70}},
      {.shape = {1, 4, 1, 40, 500, 16, 0, 24}, .window = window, .turned = 8},
      {.shape = {1, 2, 1, 5, 4100, 16, 0, 24}, .window = AttentionWindow{.left = 3000}, .turned = 8}};
  calls[3].q_ends = {1, 1, 35}, calls[3].kv_ends = {60, 90, 400};
  for (const Device& device : Both()) {
    for (Features f : calls) {
      for (f.in = DType::kBF16; const DType in : kFloatTypes) {
        f.in = in;
        SCOPED_TRACE(f.Name());
        Random random;
        FeaturesCall call(f, random);
        FlashAttentionArgs args = call.args();
        std::int64_t bytes = 0;
        ASSERT_TRUE(IsOk(FlashAttentionWorkspace(device, args, &bytes)));
        std::vector<std::uint8_t> memory(static_cast<std::size_t>(bytes), 0xff);  // NaN, of any dtype.
        args.workspace = {memory.data(), bytes};
        ASSERT_TRUE(IsOk(FlashAttention(device, args)));
        call.ExpectRight();
        std::fill(memory.begin(), memory.end(), std::uint8_t{0});
        const std::vector<double> out = call.out.ToDoubles();
        ASSERT_TRUE(IsOk(FlashAttention(device, args)));
        ExpectExactly(call.out.view(), out);
      }
    }
  }
}

// Random decoding; a failure prints its seed, and CUBIST_TEST_SEED runs it again.
TEST(FlashAttentionDecodeTest, RandomCalls) {
  Random random;
  for (int i = 0; i < 60; ++i) {
    const auto yes = [&] { return random.Integer(0, 2) == 0; };
    Features f;
    const std::int64_t kv_heads = random.Integer(1, 2), group = random.Integer(1, 6);
    f.shape = {1,
               kv_heads * group,
               kv_heads,
               0,
               0,
               random.Integer(1, 20),
               yes() ? 2 * random.Integer(1, 6) : 0,
               random.Integer(1, 20)};
    const std::int64_t sequences = random.Integer(1, 5), most_rows = yes() ? 20 : random.Integer(1, 4);
    std::vector<std::int64_t> rows, keys;
    for (std::int64_t s = 0; s < sequences; ++s) {
      rows.push_back(random.Integer(0, most_rows));
      keys.push_back(random.Integer(0, yes() ? 5000 : 200));
    }
    f.q_ends = EndsOf(rows), f.kv_ends = EndsOf(keys);
    f.shape.sq = f.q_ends.back() + random.Integer(0, 2),
    f.shape.skv = f.kv_ends.back() + random.Integer(0, 20);
    const std::int64_t sq = *std::max_element(rows.begin(), rows.end()),
                       skv = *std::max_element(keys.begin(), keys.end());
    f.in = kFloatTypes[i % 3];
    f.causal = static_cast<Causal>(random.Integer(0, 2));
    const auto anchor = static_cast<Causal>(random.Integer(1, 2));
    if (yes()) f.window = AttentionWindow{{}, random.Integer(-50, 300), anchor};
    if (yes()) {
      for (std::int64_t s = 0; s < sequences; ++s) f.prefix.push_back(random.Integer(0, f.shape.skv));
    }
    if (yes()) {
      f.window = AttentionWindow{random.Integer(-10, 3000), random.Integer(-10, 90), anchor};
    }
    if (yes()) f.soft_cap = static_cast<float>(random.Uniform(1, 40));
    const auto pairs = [&]() -> std::vector<std::int64_t> {
      return {yes() ? sequences : 1, yes() ? f.shape.q_heads : 1, yes() ? sq : 1, yes() ? 1 : skv};
    };
    if (yes()) f.bias = pairs();
    if (yes()) f.mask = pairs(), f.masked = random.Uniform(0, 1);
    f.sinks = yes();
    f.turned = f.shape.dr > 0 ? (yes() ? f.shape.dr : 0) : yes() ? f.shape.dqk / 2 * 2 : 0;
    f.rope_layout = static_cast<RopeLayout>(random.Integer(0, 2));
    if (f.turned > 0 && yes()) f.positions = static_cast<int>(random.Integer(1, 2));
    if (yes()) f.layout = kBsnd;
    f.slopes = static_cast<int>(random.Integer(0, 2)), f.root = yes();
    if (yes()) f.alibi_offset = random.Integer(-50, 50);
    if (yes()) f.keep = static_cast<float>(random.Uniform(0.1, 1));
    ExpectRight(i % 2 == 0 ? Host() : NpuWithData(Ascend910B2()), f);
  }
}

}  // namespace
}  // namespace cubist::testing
