// What must hold of the profile of any kernel, of one call of each: the same kernels as on the host, recorded.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "kernels/flash_attention.h"
#include "kernels/matmul.h"
#include "kernels/token_permute.h"
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/traffic.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

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
