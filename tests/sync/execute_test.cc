// Records executed on real bytes, in many orders: a right plan gives the same bytes in every one, and they are what
// the host executor computes.
#include "npu_model/sync/execute.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "kernels/token_permute.h"
#include "kernels/token_permute_grad.h"
#include "npu_model/chip_constants.h"
#include "npu_model/core.h"
#include "npu_model/launch.h"
#include "npu_model/sync/check.h"
#include "npu_model/sync/plan.h"
#include "npu_model/sync/report.h"
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/routes_in_parts.h"
#include "tests/support/shapes.h"
#include "tests/sync/executed_call.h"
#include "tools/kernel_call.h"

namespace cubist::testing {
namespace {

using sync::Policy;
using sync::Schedule;

// Every kernel of the library.
std::vector<NamedCall> Calls() {
  std::vector<NamedCall> calls;
  for (const KernelForm& form : KernelForms()) {
    for (const char* dtype : {"bf16", "fp32"}) {
      calls.push_back(CallOf(form.name, form.small, dtype, /*causal=*/false));
      if (form.masks) calls.push_back(CallOf(form.name, form.small, dtype, /*causal=*/true));
    }
  }
  return calls;
}

TEST(ExecuteTest, EveryOrderGivesTheSameBytes) {
  for (const auto& [name, call] : Calls()) {
    const trace::Record record = RecordOf(call);
    ASSERT_EQ(trace::UnknownTo(record), nullptr) << name;
    ExpectOneAnswer(name, record);
  }
}

TEST(ExecuteTest, TheRecordComputesWhatTheHostComputes) {
  for (const auto& [name, call] : Calls()) {
    SCOPED_TRACE(name);
    const trace::Record record = RecordOf(call);
    ExpectWhatTheHostComputes(call, record, sync::PlanFlags(record, Policy::kMinimal));
  }
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(),
                kInfinity = std::numeric_limits<float>::infinity();

struct MaximaOperands {
  Gm a, b;
  Gm of_both, of_number, of_nan, of_rows, values, ids;
};

template <VectorCore V>
void MaximaKernel(V& core, const MaximaOperands& g) {
  const std::int64_t rows = g.a.rows, cols = g.a.cols, k = g.values.cols;
  Ring<Buffer::kUB, float> in_ub(core, "in_ub", rows, cols, 2), out_ub(core, "out_ub", rows, cols, 3),
      row_ub(core, "row_ub", rows, 1, 1), values_ub(core, "values_ub", rows, k, 1);
  Ring<Buffer::kUB, std::int32_t> ids_ub(core, "ids_ub", rows, k, 1);
  const UbTile<float> a = in_ub.Next(rows, cols), b = in_ub.Next(rows, cols), row = row_ub.Next(rows, 1),
                      values = values_ub.Next(rows, k);
  const UbTile<float> of_both = out_ub.Next(rows, cols), of_number = out_ub.Next(rows, cols),
                      of_nan = out_ub.Next(rows, cols);
  const UbTile<std::int32_t> ids = ids_ub.Next(rows, k);
  core.Load(a, g.a), core.Load(b, g.b);
  core.Max(of_both, a, b), core.Store(g.of_both, of_both);
  core.MaxScalar(of_number, a, 0.5f), core.Store(g.of_number, of_number);
  core.MaxScalar(of_nan, a, kNan), core.Store(g.of_nan, of_nan);
  core.RowMax(row, a), core.Store(g.of_rows, row);
  core.TopK(values, ids, a), core.Store(g.values, values), core.Store(g.ids, ids);
}

// Rows without NaN, with one first, within or last, with nothing else, and with -inf beside it.
NamedCall MaximaCall() {
  constexpr std::int64_t kRows = 6, kCols = 5, kKept = 3;
  constexpr float kA[kRows][kCols] = {{1, -2, 0, 3, 0},
                                      {kNan, 1, 2, -1, 0},
                                      {1, 2, kNan, 0, kInfinity},
                                      {4, 0, 1, 2, kNan},
                                      {kNan, kNan, kNan, kNan, kNan},
                                      {-kInfinity, kNan, -1, -kInfinity, kNan}};
  NamedCall made{"maxima", KernelCall(/*with_data=*/true)};
  KernelCall& call = made.call;
  const auto input = [&](auto value_of) {
    const ConstTensor x = call.Input(DType::kF32, {kRows, kCols});
    for (std::int64_t e = 0; e < kRows * kCols; ++e)
      static_cast<float*>(const_cast<void*>(x.data))[e] = value_of(e / kCols, e % kCols);
    return x;
  };
  const ConstTensor a = input([&](std::int64_t i, std::int64_t j) { return kA[i][j]; }),
                    b = input([](std::int64_t i, std::int64_t j) { return (i + j) % 4 == 1 ? kNan : 1.0f; });
  std::vector<Tensor> out;
  for (int n = 0; n < 3; ++n) out.push_back(call.Output(DType::kF32, {kRows, kCols}));
  out.push_back(call.Output(DType::kF32, {kRows, 1}));
  out.push_back(call.Output(DType::kF32, {kRows, kKept})),
      out.push_back(call.Output(DType::kI32, {kRows, kKept}));
  call.set_run([=](const Device& device, Profile* profile) {
    Launch launch(device, "maxima");
    MaximaOperands g;
    g.a = MatrixOf(*launch.Input("a", a)), g.b = MatrixOf(*launch.Input("b", b));
    Gm* const to[] = {&g.of_both, &g.of_number, &g.of_nan, &g.of_rows, &g.values, &g.ids};
    for (std::size_t n = 0; n < out.size(); ++n) *to[n] = MatrixOf(*launch.Output("out", out[n]));
    launch.OnVectorCores(1, [&](auto& core) { MaximaKernel(core, g); });
    return launch.Finish(profile);
  });
  return made;
}

// NaN is what NUMERICS.md says in the host's bodies and in records: any maximum of it is NaN, and TopK takes it for -inf.
TEST(ExecuteTest, MaximaOfNanAreThoseOfTheHost) {
  const NamedCall made = MaximaCall();
  const trace::Record record = RecordOf(made.call);
  trace::GmImage gm = trace::InitialGm(record, 5);
  ASSERT_TRUE(sync::Execute(record, sync::PlanFlags(record, Policy::kMinimal), Schedule::kLate, 3, &gm));
  ASSERT_TRUE(made.call(Host()).ok());
  const auto outputs = OutputsOf(made.call, record, gm);
  ASSERT_EQ(outputs.size(), made.call.outputs().size());
  std::int64_t nans = 0;
  for (std::size_t o = 0; o < outputs.size(); ++o) {
    const Tensor& host = made.call.outputs()[o];
    for (std::int64_t e = 0; e < host.count(); ++e) {
      SCOPED_TRACE(Join("output ", o, " element ", e));
      if (!IsFloat(host.dtype)) {
        EXPECT_EQ(LoadInt(outputs[o].data(), host.dtype, e), LoadInt(host.data, host.dtype, e));
        continue;
      }
      const float got = LoadFloat(outputs[o].data(), host.dtype, e),
                  want = LoadFloat(host.data, host.dtype, e);
      EXPECT_TRUE(std::isnan(want) ? std::isnan(got) : got == want) << got << " and " << want;
      nans += std::isnan(want) ? 1 : 0;
    }
  }
  EXPECT_EQ(nans, 15 + 10 + 30 + 5);  // Of both, of a number, of NaN, of rows.
}

// Rows divide among any number of Vector cores, of which some get none.
TEST(ExecuteTest, ChipsOfOneToFourVectorCoresComputeTheSame) {
  std::vector<NamedCall> calls = Calls();
  for (const char* dtype : {"bf16", "fp32"}) {
    calls.push_back(CallOf("matmul_epilogue", "5x50x70", dtype, false));
    calls.push_back(CallOf("flash_attention", "2x5x40x24x16", dtype, false));
    calls.push_back(CallOf("flash_attention_grad", "2x5x40x24x16", dtype, false));
  }
  for (int vector_cores = 1; vector_cores <= kMaxVectorPerCube; ++vector_cores) {
    ChipSpec chip = Ascend910B2();
    ASSERT_TRUE(SetConstant(&chip, "vector_per_cube", vector_cores).ok());
    for (const auto& [name, call] : calls) {
      SCOPED_TRACE(name + " on " + std::to_string(vector_cores));
      const trace::Record record = RecordOf(call, chip);
      const sync::Plan plan = sync::PlanFlags(record, Policy::kMinimal);
      const sync::CheckResult checked = sync::Check(record, plan);
      ASSERT_TRUE(checked.ok()) << sync::CheckText(checked);
      ExpectWhatTheHostComputes(call, record, plan);
    }
  }
}

// Experts that do not fit UB go in parts.
TEST(ExecuteTest, ExpertsInPartsComputeTheSame) {
  const char* const file = "route_parts_kernel.h";
  ExpectRightOn(WithCapacity(Buffer::kUB, 3072), "route", "9x150x7x5", file);
  ExpectRightOn(WithCapacity(Buffer::kUB, 2560), "route", "4x150x3x2", file);
  ExpectRightOn(WithCapacity(Buffer::kUB, 2880), "route", "3x96x30x1", file);
  ExpectRightOn(WithCapacity(Buffer::kUB, 2048), "route_grad", "9x150x5", file);
}

// Nor do a token's routes, or its routing map.
TEST(ExecuteTest, RoutesInPartsComputeTheSame) {
  const auto expect = [](const std::string& kernel, const std::string& shape, std::vector<ChipSpec> chips) {
    EXPECT_FALSE(chips.empty()) << kernel;
    if (chips.size() > 2) chips = {chips.front(), chips.back()};
    for (const ChipSpec& chip : chips) ExpectRightOn(chip, kernel, shape);
  };
  const TokenPermuteShape moved{.tokens = 3, .hidden = 9, .top_k = 200, .experts = 8},
      finalized{.tokens = 3, .hidden = 9, .top_k = 200, .experts = 8, .reads_ids = true};
  expect("token_permute", "3x9x200x8", ChipsThatCutRoutes<TokenPermuteTiling>(moved));
  for (const char* kernel : {"token_unpermute", "token_permute_grad"})
    expect(kernel, "3x9x200", ChipsThatCutRoutes<TokenUnpermuteTiling>(moved));
  for (const char* kernel : {"token_unpermute_grad", "token_unpermute_grad_dropped"})
    expect(kernel, "3x9x200", ChipsThatCutRoutes<TokenUnpermuteGradTiling>(moved));
  for (const char* kernel : {"token_unpermute_by_row", "token_permute_grad_by_row"})
    expect(kernel, "3x9x200x1", ChipsThatCutRoutes<TokenUnpermuteTiling>(moved));
  expect("token_unpermute_grad_by_row", "3x9x200x4", ChipsThatCutRoutes<TokenUnpermuteGradTiling>(moved));
  expect("token_finalize", "3x9x200x8", ChipsThatCutRoutes<TokenUnpermuteTiling>(finalized));
  for (const std::int64_t ub : {16 << 10, 20 << 10})
    expect("token_permute_by_map", "3x9x7x1000", {WithCapacity(Buffer::kUB, ub)});
}

// A permute whose capacity keeps the likeliest of 400 routes to one expert.
NamedCall LikeliestCall(std::int64_t capacity) {
  constexpr std::int64_t kTokens = 400, kHidden = 5, kExperts = 2;
  NamedCall made{Join("the likeliest ", capacity), KernelCall(/*with_data=*/true)};
  KernelCall& call = made.call;
  TokenPermuteArgs args;
  args.tokens = call.Input(DType::kF32, {kTokens, kHidden}),
  args.probs = call.Input(DType::kF32, {kTokens, 1});
  args.topk_ids = call.Ids(std::vector<std::int32_t>(kTokens, 1), {kTokens, 1});
  args.num_experts = kExperts, args.capacity = capacity, args.capacity_keeps = CapacityKeeps::kHighest;
  args.permuted = call.Output(DType::kF32, {kExperts * capacity, kHidden});
  args.sorted_indices = call.Output(DType::kI32, {kTokens});
  args.permuted_probs = call.Output(DType::kF32, {kExperts * capacity});
  call.set_run([=](const Device& device, Profile* p) { return TokenPermute(device, args, p); });
  return made;
}

// They do not fit, and are looked for in parts: once, and as often as a part's size more are found.
TEST(ExecuteTest, TheLikeliestInPartsAreTheSame) {
  for (const std::int64_t capacity : {7, 300})
    ExpectRightOn(WithCapacity(Buffer::kUB, 6 << 10), LikeliestCall(capacity), "running_top_kernel.h");
}

// A permute of 40 tokens to 12 experts on 6 devices of 2 nodes, with all that it may write.
struct PermuteForm {
  std::string name;
  bool map = true, valid = false, places = false, pad_with_tokens = false;
  CapacityKeeps keeps = CapacityKeeps::kFirst;
  std::int64_t capacity = 0, row_multiple = 1, num_out_tokens = 0;
  std::optional<Range> rows = {};
};

NamedCall PermuteCallOf(DType dtype, const PermuteForm& f) {
  constexpr std::int64_t kTokens = 40, kHidden = 33, kTopK = 3, kExperts = 12, kSlots = kTokens * kTopK;
  NamedCall made{Join("permute with ", f.name, ", ", NameOf(dtype)), KernelCall(/*with_data=*/true)};
  KernelCall& call = made.call;
  std::vector<std::uint8_t> map(kTokens * kExperts), valid(kTokens, 1);
  std::vector<std::int32_t> ids(kSlots, -1), places;
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::int64_t j = 0; j < kTopK - t % 2; ++j) {
      const std::int64_t expert = (t * 7 + 2 * j) % kExperts;
      map[static_cast<std::size_t>(t * kExperts + expert)] = 1;
      ids[static_cast<std::size_t>(t * kTopK + j)] = static_cast<std::int32_t>(expert);
    }
    valid[static_cast<std::size_t>(t)] = t % 5 != 2;
  }
  for (std::int64_t e = 0; e < kExperts; ++e)
    places.push_back(static_cast<std::int32_t>((e * 5 + 3) % kExperts));
  const std::int64_t all = f.capacity > 0 ? kExperts * f.capacity : kSlots + kExperts * (f.row_multiple - 1),
                     rows = f.rows.has_value() ? f.rows->size() : all + f.num_out_tokens;
  TokenPermuteArgs args;
  args.tokens = call.Input(dtype, {kTokens, kHidden});
  args.probs = call.Input(DType::kF32, {kTokens, f.map ? kExperts : kTopK});
  if (f.map) {
    args.routing_map = call.Flags(map, {kTokens, kExperts}), args.top_k = kTopK;
  } else {
    args.topk_ids = call.Ids(ids, {kTokens, kTopK});
  }
  if (f.valid) args.valid = call.Flags(valid, {kTokens});
  if (f.places) args.expert_places = call.Ids(places, {kExperts});
  args.num_experts = kExperts, args.num_out_tokens = f.num_out_tokens;
  args.capacity = f.capacity, args.capacity_keeps = f.keeps, args.pad_with_tokens = f.pad_with_tokens;
  args.row_multiple = f.row_multiple, args.rows = f.rows;
  args.permuted = call.Output(dtype, {rows, kHidden});
  args.sorted_indices = call.Output(DType::kI32, {kSlots});
  args.expert_counts = call.Output(DType::kI32, {kExperts});
  args.expert_offsets = call.Output(DType::kI32, {kExperts + 1});
  args.permuted_probs = call.Output(DType::kF32, {rows});
  args.row_tokens = call.Output(DType::kI32, {rows});
  args.device_counts = call.Output(DType::kI32, {6});
  args.node_counts = call.Output(DType::kI32, {2});
  call.set_run([=](const Device& device, Profile* p) { return TokenPermute(device, args, p); });
  return made;
}

TEST(ExecuteTest, FormsOfPermuteComputeTheSame) {
  const CapacityKeeps likeliest = CapacityKeeps::kHighest;
  for (const PermuteForm& form :
       {PermuteForm{.name = "places", .valid = true, .places = true},
        PermuteForm{.name = "placed ids", .map = false, .places = true, .rows = Range{17, 80}},
        PermuteForm{.name = "padded experts", .row_multiple = 16},
        PermuteForm{
            .name = "padded experts in a window", .map = false, .row_multiple = 4, .rows = Range{30, 91}},
        PermuteForm{.name = "few rows", .map = false, .valid = true, .num_out_tokens = -50},
        PermuteForm{.name = "a capacity", .places = true, .capacity = 5},
        PermuteForm{.name = "the likeliest", .keeps = likeliest, .capacity = 5, .rows = Range{7, 44}},
        PermuteForm{.name = "tokens as pads", .pad_with_tokens = true, .capacity = 14},
        PermuteForm{.name = "tokens as pads in a window",
        .valid = true,
        .pad_with_tokens = true,
        .capacity = 14,
        .rows = Range{20, 121}},
        PermuteForm{.name = "pads beside the likeliest",
        .pad_with_tokens = true,
        .keeps = likeliest,
        .capacity = 8}}) {
    for (const DType dtype : {DType::kBF16, DType::kF32})
      ExpectRightOn(Ascend910B2(), PermuteCallOf(dtype, form));
  }
}

// The rows [19, 80) of 120 slots, or of 8 experts with 15 rows each: the way back and both gradients.
template <class Args>
void SetWindow(bool by_row, KernelCall* call, Args* args) {
  constexpr std::int32_t kTokens = 40, kSlots = 120, kCapacity = 15;
  args->rows = Range{19, 80};
  std::vector<std::int32_t> places, of_rows;
  for (std::int32_t s = 0; s < kSlots; ++s) places.push_back(s % 7 == 3 ? -1 : (s * 7 + 5) % kSlots);
  for (std::int32_t r = 19; r < 80; ++r) of_rows.push_back(r % 6 == 1 ? -1 : r % kCapacity + r / kCapacity);
  if (by_row) {
    args->row_tokens = call->Ids(of_rows, {61}), args->capacity = kCapacity;
  } else {
    args->sorted_indices = call->Ids(places, {kSlots}), args->top_k = kSlots / kTokens;
  }
}

std::vector<NamedCall> WindowCalls(DType dtype, bool by_row) {
  constexpr std::int64_t kTokens = 40, kHidden = 33, kRows = 61;
  const std::int64_t experts = by_row ? 6 : 3;  // Those whose rows begin before the window ends; or routes.
  std::vector<NamedCall> calls;
  const auto next = [&](const char* name) {
    calls.push_back(
        {Join(name, by_row ? " by row " : " by slot ", NameOf(dtype)), KernelCall(/*with_data=*/true)});
    return &calls.back().call;
  };
  KernelCall* call = next("unpermute");
  TokenUnpermuteArgs back;
  back.permuted = call->Input(dtype, {kRows, kHidden});
  SetWindow(by_row, call, &back);
  back.probs = call->Input(DType::kF32, {kTokens, experts});
  back.residual = call->Input(dtype, {kTokens, kHidden});
  back.out = call->Output(dtype, {kTokens, kHidden});
  call->set_run([=](const Device& device, Profile* p) { return TokenUnpermute(device, back, p); });

  call = next("gradient of permute");
  TokenPermuteGradArgs permute;
  permute.permuted_grad = call->Input(dtype, {kRows, kHidden});
  SetWindow(by_row, call, &permute);
  permute.permuted_probs_grad = call->Input(DType::kF32, {kRows});
  permute.tokens_grad = call->Output(dtype, {kTokens, kHidden});
  permute.probs_grad = call->Output(DType::kF32, {kTokens, experts});
  call->set_run([=](const Device& device, Profile* p) { return TokenPermuteGrad(device, permute, p); });

  call = next("gradient of unpermute");
  TokenUnpermuteGradArgs unpermute;
  unpermute.out_grad = call->Input(dtype, {kTokens, kHidden});
  unpermute.permuted = call->Input(dtype, {kRows, kHidden});
  SetWindow(by_row, call, &unpermute);
  unpermute.probs = call->Input(DType::kF32, {kTokens, experts});
  unpermute.permuted_grad = call->Output(dtype, {kRows, kHidden});
  unpermute.probs_grad = call->Output(DType::kF32, {kTokens, experts});
  call->set_run([=](const Device& device, Profile* p) { return TokenUnpermuteGrad(device, unpermute, p); });
  return calls;
}

TEST(ExecuteTest, WindowsOfRowsComputeTheSame) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const bool by_row : {false, true}) {
      for (const NamedCall& made : WindowCalls(dtype, by_row)) ExpectRightOn(Ascend910B2(), made);
    }
  }
}

// Without its flags a kernel goes wrong in some order; and never where the checker finds nothing.
TEST(ExecuteTest, HolesInAPlanShowInTheData) {
  KernelCallOptions options;
  options.kernel = "flash_attention", options.shape = "1x40x300x24", options.with_data = true;
  KernelCall call;
  ASSERT_TRUE(MakeKernelCall(options, &call).ok());
  const trace::Record record = RecordOf(call);
  const sync::Plan whole = sync::PlanFlags(record, Policy::kMinimal);
  trace::GmImage right = trace::InitialGm(record, 5);
  ASSERT_TRUE(sync::Execute(record, whole, Schedule::kProgramOrder, 1, &right));
  int made = 0, caught = 0, seen = 0;
  const auto& ops = whole.phases.back().cores[0].ops;
  for (std::size_t drop = 0; drop < ops.size(); ++drop) {
    if (ops[drop].kind != sync::Kind::kWaitFlag && ops[drop].kind != sync::Kind::kPipeBarrier) continue;
    sync::Plan plan = whole;
    auto& mutant = plan.phases.back().cores[0].ops;
    mutant.erase(mutant.begin() + static_cast<std::ptrdiff_t>(drop));
    ++made;
    const bool ok = sync::Check(record, plan).ok();
    bool differs = false;
    for (const Schedule schedule : {Schedule::kLate, Schedule::kEager, Schedule::kRandom}) {
      trace::GmImage gm = trace::InitialGm(record, 5);
      differs |= !sync::Execute(record, plan, schedule, 11, &gm) || gm != right;
      if (differs) break;
    }
    EXPECT_TRUE(!ok || !differs) << drop;
    caught += ok ? 0 : 1;
    seen += differs ? 1 : 0;
  }
  std::printf("%d waits and barriers dropped: the checker objects to %d, the data differ for %d\n", made,
              caught, seen);
  EXPECT_EQ(caught, made);
  EXPECT_GT(seen, made / 2);
}

}  // namespace
}  // namespace cubist::testing
