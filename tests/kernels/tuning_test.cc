// Tunings: tilings as texts, and calls that take theirs from a device's tuning.
#include "npu_model/tuning.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "kernels/choose_for.h"
#include "kernels/flash_attention.h"
#include "kernels/grouped_matmul.h"
#include "kernels/matmul.h"
#include "kernels/token_permute.h"
#include "npu_model/chip_constants.h"
#include "npu_model/device.h"
#include "npu_model/sync/check.h"
#include "npu_model/sync/plan.h"
#include "npu_model/trace/record.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/random.h"
#include "tiling/fields.h"
#include "tiling/flash_attention_grad_tiling.h"
#include "tiling/flash_attention_tiling.h"
#include "tiling/grouped_matmul_tiling.h"
#include "tiling/matmul_tiling.h"
#include "tiling/rowwise_tiling.h"
#include "tiling/token_permute_tiling.h"

namespace cubist {
namespace {

using testing::IsOk;

// Every field is in the list: a text makes the same tiling again, from one that says nothing.
template <class Tiling, class Shape>
void ExpectTextsComeBack(const ChipSpec& chip, const Shape& shape, const std::vector<Tiling>& candidates) {
  ASSERT_FALSE(candidates.empty());
  for (const Tiling& candidate : candidates) {
    const std::string text = TilingText(chip, shape, candidate);
    Tiling parsed;
    ASSERT_TRUE(IsOk(ParseTiling(chip, shape, text, &parsed))) << text;
    ASSERT_TRUE(parsed == candidate) << text;
  }
}

TEST(TilingTextTest, ComesBackForEveryCandidate) {
  for (const ChipSpec* chip : {&Ascend910B2(), &HostChip()}) {
    SCOPED_TRACE(chip->name);
    MatmulShape matmul;
    matmul.m = 300, matmul.n = 515, matmul.k = 700, matmul.in = matmul.out = DType::kBF16;
    ExpectTextsComeBack(*chip, matmul, Candidates(*chip, matmul));
    FlashAttentionShape attention;
    attention.batches = 1, attention.heads = 4, attention.kv_heads = 2, attention.rope_heads = 1;
    attention.sq = 300, attention.skv = 515, attention.d_qk = 128, attention.d_rope = 64, attention.d_v = 128;
    attention.in = attention.out = DType::kBF16;
    ExpectTextsComeBack(*chip, attention, Candidates(*chip, attention));
    FlashAttentionGradShape backward;
    backward.batches = 1, backward.heads = 4, backward.kv_heads = 2, backward.rope_heads = 1;
    backward.sq = 300, backward.skv = 515, backward.d_qk = 128, backward.d_rope = 64, backward.d_v = 128;
    backward.in = DType::kBF16;
    ExpectTextsComeBack(*chip, backward, Candidates(*chip, backward));
    TokenPermuteShape permute;
    permute.tokens = 1000, permute.hidden = 777, permute.top_k = 3, permute.experts = 100;
    permute.dtype = DType::kBF16;
    ExpectTextsComeBack(*chip, permute, PermuteCandidates(*chip, permute));
    ExpectTextsComeBack(*chip, permute, UnpermuteCandidates(*chip, permute));
  }
}

TEST(TilingTextTest, ErrorsNameTheField) {
  const ChipSpec& chip = Ascend910B2();
  MatmulShape shape;
  shape.m = shape.n = shape.k = 1024, shape.in = shape.out = DType::kBF16;
  MatmulTiling tiling;
  ASSERT_TRUE(IsOk(Choose(chip, shape, &tiling)));
  const MatmulTiling before = tiling;
  const auto expect = [&](const std::string& text, const std::string& message) {
    const Status status = ParseTiling(chip, shape, text, &tiling);
    EXPECT_FALSE(status.ok()) << text;
    EXPECT_NE(status.message().find(message), std::string::npos) << status.message();
    EXPECT_TRUE(tiling == before);
  };
  expect("m=17", "m is 17, needs 1 to 1048576, multiples of 16");
  expect("m=0", "m is 0, needs 1 to");
  expect("m=sixteen", "m is 'sixteen', needs a whole number");
  expect("m=16,m=16", "m is given twice");
  expect("rows=16", "no field is named 'rows'; they are m, n, k1, k0");
  expect("order=zigzag", "order is 'zigzag'; known are row-major, swizzled, diagonal");
  expect("m", "'m' is not name=value");
  expect("m=2048,n=2048", " bytes of L0C, ascend910b2 has 131072");
}

// What a kernel would read beyond its rings or through a phase that is not there.
TEST(TilingTextTest, PermuteRefusesWhatItsKernelsCannotRun) {
  for (const ChipSpec* chip : {&Ascend910B2(), &HostChip()}) {
    TokenPermuteShape shape{.tokens = 1000, .hidden = 777, .top_k = 3, .experts = 100};
    shape.dtype = DType::kBF16;
    TokenPermuteTiling tiling;
    ASSERT_TRUE(IsOk(Choose(*chip, shape, &tiling)));
    const auto message = [&](const std::string& text) {
      return ParseTiling(*chip, shape, text, &tiling).message();
    };
    EXPECT_EQ(message("digit_bits=4,sums_chunks=1,sorts=0"), "");
    EXPECT_NE(message("digit_bits=4,sums_chunks=0").find("has fields that do not go together"),
              std::string::npos);
    EXPECT_NE(message("row_stages=1").find("row_stages is 1, needs 2 to"), std::string::npos);
  }
}

TEST(TilingTextTest, RowsThatMayNotBeCutAreNot) {
  const RowwiseShape whole{.rows = 100, .cols = 256, .loads = 1, .stores = 1, .uncut_rows = true};
  RowwiseShape any = whole;
  any.uncut_rows = false;
  RowwiseTiling tiling;
  ASSERT_TRUE(IsOk(Choose(Ascend910B2(), whole, &tiling)));
  EXPECT_TRUE(IsOk(ParseTiling(Ascend910B2(), any, "cols=64", &tiling)));
  EXPECT_NE(ParseTiling(Ascend910B2(), whole, "cols=64", &tiling)
                .message()
                .find("has fields that do not go together"),
            std::string::npos);
  EXPECT_TRUE(IsOk(ParseTiling(Ascend910B2(), whole, "cols=256", &tiling)));
}

TEST(TilingTextTest, GroupsKeepNoTilesOfOneProduct) {
  GroupedMatmulShape shape;
  shape.product.m = shape.product.n = shape.product.k = 512, shape.groups = 4;
  shape.product.in = shape.product.out = DType::kBF16;
  GroupedMatmulTiling tiling;
  ASSERT_TRUE(IsOk(Choose(Ascend910B2(), shape, &tiling)));
  EXPECT_NE(ParseTiling(Ascend910B2(), shape, "keep_a=1", &tiling)
                .message()
                .find("has fields that do not go together"),
            std::string::npos);
}

class TunedMatmul : public ::testing::Test {
 protected:
  TunedMatmul() : a_(300 * 256), b_(256 * 200), c_(300 * 200) {
    testing::Random random(7);
    for (float& x : a_) x = static_cast<float>(random.Integer(-4, 4));
    for (float& x : b_) x = static_cast<float>(random.Integer(-4, 4));
  }
  MatmulArgs Args() {
    MatmulArgs args;
    args.a = ConstTensor(a_.data(), {300, 256}), args.b = ConstTensor(b_.data(), {256, 200});
    args.c = Tensor(c_.data(), {300, 200});
    return args;
  }
  // What a call meets on a device.
  template <class MakeDevice>
  TilingChoice Meet(const MakeDevice& device) {
    TilingChoice met;
    Tuning listening;
    listening.on_choice = [&](const TilingChoice& choice) { met = choice; };
    EXPECT_TRUE(IsOk(Matmul(device(std::make_shared<const Tuning>(listening)), Args())));
    return met;
  }

  std::vector<float> a_, b_, c_;
};

// Rows of A that stay in L1 are read less often, operands read ahead once more, blocks leave in parts, B is read from a
// packed copy; none of it changes a bit, and all is ordered by its flags.
TEST_F(TunedMatmul, EveryWayToTheSameBits) {
  const ChipSpec& chip = Ascend910B2();
  const TilingChoice met =
      Meet([&](std::shared_ptr<const Tuning> tuning) { return Npu(chip, {.tuning = std::move(tuning)}); });
  Profile profile;
  // One switch after the other on a plain walk.
  const auto run = [&](const std::string& more, int n = 16) {
    std::string text =
        "m=16,k1=48,k0=16,l1_stages=2,l0_stages=2,l0c_stages=1,pieces=1,n=" + std::to_string(n);
    for (const char* plain :
         {"order=row-major", "pack_b=0", "keep_a=0", "a_span=1", "c_parts=1", "prefetch=0"}) {
      const std::string name(plain, std::strchr(plain, '='));
      if (("," + more).find("," + name + "=") == std::string::npos) text += std::string(",") + plain;
    }
    auto tuning = std::make_shared<Tuning>();
    tuning->Set(met.kernel, met.chip, met.shape, text + (more.empty() ? "" : "," + more));
    trace::Record record;
    std::fill(c_.begin(), c_.end(), -1.0f);
    EXPECT_TRUE(IsOk(Matmul(Npu(chip, {.record = &record, .tuning = tuning}), Args(), &profile))) << more;
    const sync::CheckResult checked = sync::Check(record, sync::PlanFlags(record, sync::Policy::kMinimal));
    EXPECT_TRUE(checked.findings.empty()) << more;
    return c_;
  };
  const auto bytes = [&](Path path) { return profile.path_bytes[static_cast<std::size_t>(path)]; };
  const std::vector<float> plain = run("");
  const std::int64_t of_a = 13 * 300 * 256 * 4,
                     of_b = 19 * 256 * 200 * 4;  // For every column of blocks, for every row.
  EXPECT_EQ(bytes(Path::kGmToL1Nd2Nz), of_a + of_b);
  EXPECT_EQ(bytes(Path::kGmToUb), 0);
  EXPECT_EQ(run("prefetch=11"), plain);
  EXPECT_EQ(bytes(Path::kGmToUb), (300 + 200) * 256 * 4);
  EXPECT_EQ(bytes(Path::kGmToL1Nd2Nz), of_a + of_b);

  EXPECT_EQ(run("keep_a=6"), plain);  // All of k.
  const std::int64_t all_kept = bytes(Path::kGmToL1Nd2Nz);
  EXPECT_LT(all_kept, of_a / 4 + of_b);
  EXPECT_EQ(run("keep_a=99"), plain);  // There are no more.
  EXPECT_EQ(bytes(Path::kGmToL1Nd2Nz), all_kept);
  EXPECT_EQ(run("keep_a=2,prefetch=2"), plain);  // 96 of 256.
  EXPECT_EQ(bytes(Path::kGmToL1Nd2Nz), of_a + of_b - (of_a + of_b - all_kept) * 96 / 256);
  EXPECT_GT(bytes(Path::kGmToUb), 0);
  EXPECT_EQ(run("keep_a=1,a_span=2,prefetch=2"), plain);  // The same in one tile.
  EXPECT_EQ(bytes(Path::kGmToL1Nd2Nz), of_a + of_b - (of_a + of_b - all_kept) * 96 / 256);
  EXPECT_EQ(run("keep_a=3,order=swizzled,width=4"), plain);
  EXPECT_EQ(run("a_span=3,prefetch=3"), plain);

  EXPECT_EQ(run("", 96), plain);
  const std::int64_t a_once = bytes(Path::kL1ToL0A), wide = bytes(Path::kGmToL1Nd2Nz);
  EXPECT_EQ(run("c_parts=3", 96), plain);
  EXPECT_EQ(bytes(Path::kGmToL1Nd2Nz), wide);
  // 96, 96 and 8 columns are seven parts of 32.
  EXPECT_EQ(3 * bytes(Path::kL1ToL0A), 7 * a_once);
  EXPECT_EQ(run("keep_a=2,a_span=2,prefetch=1,c_parts=2,order=swizzled,width=2", 96), plain);
  EXPECT_EQ(run("pack_b=1", 96), plain);
  EXPECT_EQ(bytes(Path::kL1ToGm), 256 * 200 * 4);
  EXPECT_EQ(run("pack_a=1", 96), plain);
  EXPECT_EQ(run("pack_a=1,pack_b=1", 96), plain);
  EXPECT_EQ(run("keep_a=2,pack_a=1,pack_b=1,c_parts=2", 64), plain);
  EXPECT_EQ(run("keep_a=1,a_span=2,pack_a=1", 96), plain);
  EXPECT_EQ(run("keep_a=2,pack_b=1,c_parts=2", 64), plain);
  EXPECT_EQ(run("pack_b=1,prefetch=2", 96), plain);
  EXPECT_GT(bytes(Path::kGmToUb), 0);
  EXPECT_LE(bytes(Path::kGmToUb), 300 * 256 * 4);
}

// Groups' operands are read ahead once, those of an empty group not at all; bits stay, and all is ordered by its flags.
TEST(TunedGroupedMatmul, ReadsGroupsAhead) {
  const ChipSpec& chip = Ascend910B2();
  const std::vector<std::int32_t> counts = {20, 0, 33, 1, 10};
  constexpr std::int64_t kRows = 70, kN = 96, kK = 80, kUsed = 64, kFilled = 4;
  std::vector<float> x(kRows * kK), weights(std::size(counts) * kK * kN), out(kRows * kN);
  testing::Random random(11);
  for (float& v : x) v = static_cast<float>(random.Integer(-4, 4));
  for (float& v : weights) v = static_cast<float>(random.Integer(-4, 4));
  for (const bool transposed : {false, true}) {
    GroupedMatmulArgs args;
    args.x = ConstTensor(x.data(), {kRows, kK});
    args.groups = ConstTensor(counts.data(), {std::ssize(counts)});
    args.weights = transposed ? ConstTensor(weights.data(), {std::ssize(counts), kN, kK})
                              : ConstTensor(weights.data(), {std::ssize(counts), kK, kN});
    args.transpose_weights = transposed;
    args.out = Tensor(out.data(), {kRows, kN});
    TilingChoice met;
    auto listening = std::make_shared<Tuning>();
    listening->on_choice = [&](const TilingChoice& choice) { met = choice; };
    ASSERT_TRUE(IsOk(GroupedMatmul(Npu(chip, {.tuning = listening}), args)));
    const auto run = [&](int ahead, std::int64_t* read) {
      auto tuning = std::make_shared<Tuning>();
      tuning->Set(met.kernel, met.chip, met.shape,
                  "m=16,n=32,k1=32,k0=16,l1_stages=2,l0_stages=2,l0c_stages=1,pieces=1,c_parts=1,prefetch=" +
                      std::to_string(ahead));
      trace::Record record;
      Profile profile;
      std::fill(out.begin(), out.end(), -1.0f);
      EXPECT_TRUE(IsOk(GroupedMatmul(Npu(chip, {.record = &record, .tuning = tuning}), args, &profile)));
      EXPECT_TRUE(sync::Check(record, sync::PlanFlags(record, sync::Policy::kMinimal)).findings.empty());
      *read = profile.path_bytes[static_cast<std::size_t>(Path::kGmToUb)];
      return out;
    };
    std::int64_t read = 0;
    const std::vector<float> plain = run(0, &read);
    EXPECT_EQ(read, 0);
    for (int ahead : {1, 2, 9}) {
      SCOPED_TRACE(ahead);
      EXPECT_EQ(run(ahead, &read), plain);
      // Besides the operands, each of two Vector cores of a core reads 32 bytes between two of its groups.
      const std::int64_t operands = (kUsed * kK + kFilled * kK * kN) * 4;
      EXPECT_GE(read, operands);
      EXPECT_LE(read, operands + chip.cube_cores * 2 * 32 * std::ssize(counts));
    }
  }
}

TEST_F(TunedMatmul, RunsTheTilingOfItsEntryOnTheModel) {
  const auto device = [](std::shared_ptr<const Tuning> tuning) {
    return Npu(Ascend910B2(), {.tuning = std::move(tuning)});
  };
  const TilingChoice met = Meet(device);
  EXPECT_EQ(met.kernel, "matmul");
  EXPECT_EQ(met.chip, "ascend910b2");
  ASSERT_GT(met.candidates.size(), 10u);

  Profile untuned, tuned;
  ASSERT_TRUE(IsOk(Matmul(device(nullptr), Args(), &untuned)));
  const std::vector<float> expected = c_;
  std::fill(c_.begin(), c_.end(), -1.0f);
  Tuning tuning;
  const auto run = [&](const std::string& tiling) {
    tuning.Set(met.kernel, met.chip, met.shape, tiling);
    ASSERT_TRUE(IsOk(Matmul(device(std::make_shared<const Tuning>(tuning)), Args(), &tuned)));
    EXPECT_EQ(c_, expected);
    EXPECT_EQ(tuned.macs, untuned.macs);
  };
  run(met.chosen);
  EXPECT_EQ(tuned.time_s, untuned.time_s);
  // The cheapest by price is no quicker than what the replay chose.
  run(std::min_element(met.candidates.begin(), met.candidates.end(), [](const auto& x, const auto& y) {
        return x.price < y.price;
      })->tiling);
  EXPECT_GE(tuned.time_s, untuned.time_s);
  run("m=16,n=16,k1=32,k0=16,keep_a=0,prefetch=0");
  // 19 x 13 blocks, each of which reads its rows of A and columns of B.
  EXPECT_EQ(tuned.gm_read, 4 * (300 * 256 * 13 + 256 * 200 * 19));
}

TEST_F(TunedMatmul, ChoosesWhatItsEntryLeavesOutOnTheModel) {
  const auto device = [](std::shared_ptr<const Tuning> tuning) {
    return Npu(Ascend910B2(), {.with_data = false, .tuning = std::move(tuning)});
  };
  const TilingChoice met = Meet(device);
  Tuning tuning;
  tuning.Set(met.kernel, met.chip, met.shape, "n=64");
  Profile profile;
  ASSERT_TRUE(IsOk(Matmul(device(std::make_shared<const Tuning>(tuning)), Args(), &profile)));
  const double best = profile.time_s;
  int with_it = 0;
  for (std::size_t i = 0; i < met.candidates.size(); i += 7) {
    const std::string& tiling = met.candidates[i].tiling;
    if (tiling.find(",n=64,") == std::string::npos) continue;
    tuning.Set(met.kernel, met.chip, met.shape, tiling);
    ASSERT_TRUE(IsOk(Matmul(device(std::make_shared<const Tuning>(tuning)), Args(), &profile)));
    EXPECT_GE(profile.time_s, best * 0.97) << tiling;
    ++with_it;
  }
  EXPECT_GT(with_it, 10);
}

// Replays are counted, and tell every tiling apart.
template <std::int64_t kAlone = 0>
struct CountedReplay {
  static constexpr ShortListLimits kFamilies{.count = 12, .work = 180000},
      kWalks{.count = 6, .work = 100000, .alone = kAlone};
  std::atomic<int>* replays;
  std::int64_t layout = 0;

  Status operator()(const Device& model, const MatmulTiling& tiling, Profile* profile) const {
    ++*replays;
    profile->time_s = model.chip().clock_hz * static_cast<double>(tiling.m + tiling.n);
    return {};
  }
  void AddTo(ChoiceKey* key) const { key->Add(layout); }
};

TEST(RememberedChoiceTest, HangsOnChipCallAndEntry) {
  MatmulShape shape;
  shape.m = 300, shape.n = 515, shape.k = 700, shape.in = shape.out = DType::kBF16;
  ChipSpec chip = Ascend910B2();
  const auto replays = [&](std::int64_t layout, const char* entry, MatmulTiling* tiling) {
    std::atomic<int> count = 0;
    auto tuning = std::make_shared<Tuning>();
    if (entry != nullptr) tuning->Set("counted", chip.name, ShapeText(shape), entry);
    EXPECT_TRUE(IsOk(ChooseFor(Npu(chip, {.tuning = tuning}), "counted", shape, &Candidates, tiling,
                               CountedReplay<>{&count, layout})));
    return count.load();
  };
  MatmulTiling first, again;
  EXPECT_GT(replays(0, nullptr, &first), 1);
  EXPECT_EQ(replays(0, nullptr, &again), 0);
  EXPECT_TRUE(first == again);
  EXPECT_GT(replays(1, nullptr, &again), 1) << "another layout of the operands";
  EXPECT_GT(replays(0, "n=64", &again), 0);
  EXPECT_EQ(again.n, 64);
  EXPECT_EQ(replays(0, "n=64", &again), 0);
  EXPECT_EQ(replays(0, "m=16,n=16,k1=48,k0=16,l1_stages=3", &again), 0) << "no candidate: nothing to replay";
  EXPECT_EQ(again.l1_stages, 3);
  chip.memory.hbm_bytes_per_s.value /= 2;
  EXPECT_GT(replays(0, nullptr, &again), 1) << "a chip of the same name";
  EXPECT_EQ(replays(0, nullptr, &again), 0);
}

// More work than is replayed: the price alone decides, but where so much is allowed for one.
TEST(RememberedChoiceTest, LargeCallsAreReplayedWhereAllowed) {
  MatmulShape shape;
  shape.m = shape.n = shape.k = 8192, shape.in = shape.out = DType::kBF16;
  MatmulTiling tiling;
  std::atomic<int> none = 0, some = 0;
  const Device device = Npu(Ascend910B2());
  EXPECT_TRUE(
      IsOk(ChooseFor(device, "by price", shape, &Candidates, &tiling, CountedReplay<>{&none, /*layout=*/0})));
  EXPECT_TRUE(IsOk(ChooseFor(device, "by replay", shape, &Candidates, &tiling,
                             CountedReplay<1000000>{&some, /*layout=*/0})));
  EXPECT_EQ(none, 0);
  EXPECT_GT(some, 2);
  EXPECT_LT(some, 8);
}

TEST(RememberedChoiceTest, KeyHoldsEveryConstantOfTheChip) {
  const auto key_of = [](const ChipSpec& chip) {
    ChoiceKey key;
    key.Add(chip);
    return key.bytes();
  };
  for (const NamedConstant& constant : ConstantsOf(Ascend910B2())) {
    ChipSpec changed = Ascend910B2();
    const double value = constant.constant.value == constant.least ? constant.least + 1 : constant.least;
    ASSERT_TRUE(IsOk(SetConstant(&changed, constant.name, value)));
    EXPECT_NE(key_of(changed), key_of(Ascend910B2())) << constant.name;
  }
}

TEST(RememberedChoiceTest, KeyHoldsLayoutsAndNotAddresses) {
  const auto key_of = [](const ConstTensor& tensor) {
    ChoiceKey key;
    key.Add(tensor);
    return key.bytes();
  };
  float here = 0, there = 0;
  const ConstTensor tensor(&here, {4, 8});
  ConstTensor strided = tensor, wider = tensor;
  strided.strides[0] = 9, wider.sizes[1] = 9;
  EXPECT_EQ(key_of(tensor), key_of(ConstTensor(&there, {4, 8})));
  EXPECT_NE(key_of(tensor), key_of(strided));
  EXPECT_NE(key_of(tensor), key_of(wider));
  EXPECT_NE(key_of(tensor), key_of(ConstTensor()));
}

TEST_F(TunedMatmul, RunsTheTilingOfItsEntryOnTheHost) {
  const auto device = [](std::shared_ptr<const Tuning> tuning) {
    return Host({.tuning = std::move(tuning)});
  };
  const TilingChoice met = Meet(device);
  const std::vector<float> expected = c_;
  Tuning tuning;
  for (std::size_t i = 0; i < met.candidates.size(); i += 37) {
    std::fill(c_.begin(), c_.end(), -1.0f);
    tuning.Set(met.kernel, met.chip, met.shape, met.candidates[i].tiling);
    ASSERT_TRUE(IsOk(Matmul(device(std::make_shared<const Tuning>(tuning)), Args())));
    EXPECT_EQ(c_, expected) << met.candidates[i].tiling;
  }
  tuning.Set(met.kernel, met.chip, met.shape, "l1_stages=7");
  const Status status = Matmul(device(std::make_shared<const Tuning>(tuning)), Args());
  EXPECT_NE(status.message().find("that this machine computes with"), std::string::npos) << status.message();
}

// A product is cut for as many cores as its call may use; a tiling of more or fewer is taken all the same.
TEST(TuningTest, ProductsAreCutForTheCallsThreads) {
  constexpr std::int64_t kM = 256, kN = 256, kK = 64;
  std::vector<float> a(kM * kK, 1.0f), b(kK * kN, 2.0f), c(kM * kN);
  const MatmulArgs args{.a = ConstTensor(a.data(), {kM, kK}),
                        .b = ConstTensor(b.data(), {kK, kN}),
                        .c = Tensor(c.data(), {kM, kN})};
  for (const int threads : {1, 2, 1000}) {
    SCOPED_TRACE(threads);
    const ChipSpec& chip = HostChip(threads);
    EXPECT_EQ(chip.concurrent_cores, std::min(threads, HostChip().concurrent_cores));
    MatmulShape shape{kM, kN, kK};
    shape.a_row_bytes = kK * 4, shape.b_row_bytes = kN * 4;
    MatmulTiling expected;
    ASSERT_TRUE(IsOk(Choose(chip, shape, &expected)));
    TilingChoice met;
    auto listening = std::make_shared<Tuning>();
    listening->on_choice = [&](const TilingChoice& choice) { met = choice; };
    ASSERT_TRUE(IsOk(Matmul(Host({.threads = threads, .tuning = listening}), args)));
    EXPECT_EQ(met.chosen, TilingText(chip, shape, expected));
    for (const int others : {1, 2}) {
      auto tuning = std::make_shared<Tuning>();
      tuning->Set(met.kernel, met.chip, met.shape, met.chosen);
      std::fill(c.begin(), c.end(), -1.0f);
      ASSERT_TRUE(IsOk(Matmul(Host({.threads = others, .tuning = tuning}), args)));
      EXPECT_EQ(c, std::vector<float>(kM * kN, 2.0f * kK));
    }
  }
}

TEST_F(TunedMatmul, RefusesAnEntryThatDoesNotFitAndWritesNothing) {
  const TilingChoice met = Meet([](auto tuning) { return Npu(Ascend910B2(), {.tuning = tuning}); });
  std::fill(c_.begin(), c_.end(), -1.0f);
  Tuning tuning;
  tuning.Set(met.kernel, met.chip, met.shape, "m=15");
  const Status status =
      Matmul(Npu(Ascend910B2(), {.tuning = std::make_shared<const Tuning>(tuning)}), Args());
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(status.message().starts_with("matmul: m is 15, needs 1 to")) << status.message();
  EXPECT_NE(status.message().find("(in the tiling 'm=15' given for m=300,n=200,k=256"), std::string::npos)
      << status.message();
  EXPECT_EQ(c_, std::vector<float>(c_.size(), -1.0f));
}

TEST(TuningTest, FilesComeBackAndErrorsNameTheLine) {
  const std::string path = ::testing::TempDir() + "cubist_tuning_test.txt";
  Tuning tuning;
  tuning.Set("matmul", "ascend910b2", "m=1,n=2", "m=16");
  tuning.Set("matmul", "ascend910b3", "m=1,n=2", "m=32");
  tuning.Set("matmul", "ascend910b3", "m=1,n=2", "m=48");
  ASSERT_TRUE(IsOk(tuning.Write(path)));
  Tuning read;
  ASSERT_TRUE(IsOk(read.Read(path)));
  EXPECT_EQ(read.size(), 2u);
  ASSERT_NE(read.Find("matmul", "ascend910b3", "m=1,n=2"), nullptr);
  EXPECT_EQ(*read.Find("matmul", "ascend910b3", "m=1,n=2"), "m=48");
  EXPECT_EQ(read.Find("matmul", "ascend910b1", "m=1,n=2"), nullptr);
  EXPECT_EQ(read.Text(), tuning.Text());

  EXPECT_EQ(read.Parse("# comment\n\nmatmul x m=1\n", "file").message(),
            "file:3: has 3 words, needs kernel, chip, shape and tiling");
  EXPECT_EQ(read.Parse("a b m=1 n=1\nmatmul x shape m=16\n", "file").message(),
            "file:2: 'shape' is not name=value,..");
  EXPECT_EQ(read.Parse("a b m=1 n=1\n# comment\na b m=1 n=2\n", "file").message(),
            "file:3: the call of line 1 again");
  EXPECT_EQ(read.size(), 2u) << "a bad text adds nothing";
  EXPECT_NE(read.Read("/nonexistent/tuning").message().find("/nonexistent/tuning: cannot be read"),
            std::string::npos);
  EXPECT_EQ(read.Read(::testing::TempDir()).message(),
            ::testing::TempDir() + ": is a folder, expected a file");
  const std::string pipe = ::testing::TempDir() + "cubist_tuning_test_" + std::to_string(getpid());
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);  // Nobody writes to it.
  EXPECT_EQ(read.Read(pipe).message(), pipe + ": is not a regular file");
  std::filesystem::remove(pipe);
  EXPECT_NE(tuning.Write("/nonexistent/tuning").message().find("cannot be written"), std::string::npos);
}

// Outputs that are computed in parts have the bits of whole ones, and their flags order them.
TEST(TuningTest, WideOutputsOfAttentionComeInParts) {
  constexpr std::int64_t kRows = 40, kKeys = 100, kD = 32, kWide = 200;
  testing::Random random(11);
  const auto made = [&](std::int64_t count) {
    std::vector<BF16> values(static_cast<std::size_t>(count));
    for (BF16& x : values) x = BF16(static_cast<float>(random.Uniform(-1, 1)));
    return values;
  };
  const std::vector<BF16> q = made(2 * kRows * kD), k = made(kKeys * kD), v = made(kKeys * kWide);
  std::vector<float> out(2 * kRows * kWide);
  FlashAttentionArgs args;
  args.q = ConstTensor(q.data(), {1, 2, kRows, kD}), args.k = ConstTensor(k.data(), {1, 1, kKeys, kD});
  args.v = ConstTensor(v.data(), {1, 1, kKeys, kWide});
  args.out = Tensor(out.data(), {1, 2, kRows, kWide});
  args.causal = Causal::kBottomRight;
  const ChipSpec& chip = Ascend910B2();
  TilingChoice met;
  auto listening = std::make_shared<Tuning>();
  listening->on_choice = [&](const TilingChoice& choice) { met = choice; };
  ASSERT_TRUE(IsOk(FlashAttention(Npu(chip, {.tuning = listening}), args)));

  std::vector<float> whole;
  std::int64_t loaded = 0;  // of P and the queries, which every part asks for again
  for (const char* parts : {"1", "2", "3", "7"}) {
    SCOPED_TRACE(parts);
    auto tuning = std::make_shared<Tuning>();
    tuning->Set(met.kernel, met.chip, met.shape, std::string("m=32,n=48,k0=16,depth=1,v_parts=") + parts);
    trace::Record record;
    Profile profile;
    std::fill(out.begin(), out.end(), -1.0f);
    ASSERT_TRUE(IsOk(FlashAttention(Npu(chip, {.record = &record, .tuning = tuning}), args, &profile)));
    EXPECT_TRUE(sync::Check(record, sync::PlanFlags(record, sync::Policy::kMinimal)).findings.empty());
    if (whole.empty()) whole = out;
    EXPECT_EQ(out, whole);
    const std::int64_t bytes = profile.path_bytes[static_cast<std::size_t>(Path::kL1ToL0A)];
    EXPECT_GT(bytes, loaded);
    loaded = bytes;
  }
}

// The other kernels look up under their own names.
TEST(TuningTest, EveryKernelMeetsItsChoice) {
  std::vector<std::string> met;
  auto tuning = std::make_shared<Tuning>();
  tuning->on_choice = [&](const TilingChoice& choice) {
    met.push_back(choice.kernel);
    EXPECT_FALSE(choice.candidates.empty());
    EXPECT_TRUE(std::any_of(choice.candidates.begin(), choice.candidates.end(),
                            [&](const auto& candidate) { return candidate.tiling == choice.chosen; }));
  };
  const Device device = Npu(Ascend910B2(), {.with_data = false, .tuning = tuning});
  FlashAttentionArgs attention;
  attention.q = ConstTensor(nullptr, DType::kBF16, {1, 2, 64, 64});
  attention.k = attention.v = attention.q;
  attention.out = Tensor(nullptr, DType::kBF16, {1, 2, 64, 64});
  EXPECT_TRUE(IsOk(FlashAttention(device, attention)));
  const std::vector<std::int32_t> ids = {1, 0, 2, 1};
  TokenPermuteArgs permute;
  permute.tokens = ConstTensor(nullptr, DType::kBF16, {2, 64});
  permute.topk_ids = ConstTensor(ids.data(), {2, 2});
  permute.num_experts = 3;
  permute.permuted = Tensor(nullptr, DType::kBF16, {4, 64});
  permute.sorted_indices = Tensor(nullptr, DType::kI32, {4});
  EXPECT_TRUE(IsOk(TokenPermute(device, permute)));
  TokenUnpermuteArgs unpermute;
  unpermute.permuted = ConstTensor(nullptr, DType::kBF16, {4, 64});
  unpermute.sorted_indices = ConstTensor(ids.data(), {4});
  unpermute.probs = ConstTensor(nullptr, DType::kF32, {2, 2});
  unpermute.out = Tensor(nullptr, DType::kBF16, {2, 64});
  EXPECT_TRUE(IsOk(TokenUnpermute(device, unpermute)));
  EXPECT_EQ(met, (std::vector<std::string>{"flash_attention", "token_permute", "token_unpermute"}));
}

}  // namespace
}  // namespace cubist
