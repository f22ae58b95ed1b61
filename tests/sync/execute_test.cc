// Records executed on real bytes, in many orders: a right plan gives the same bytes in every one, and they are what
// the host executor computes.
#include "npu_model/sync/execute.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"
#include "kernels/token_permute.h"
#include "npu_model/chip_constants.h"
#include "npu_model/sync/check.h"
#include "npu_model/sync/plan.h"
#include "npu_model/sync/report.h"
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/routes_in_parts.h"
#include "tests/support/shapes.h"
#include "tools/kernel_call.h"

namespace cubist::testing {
namespace {

using sync::Policy;
using sync::Schedule;

constexpr Policy kPolicies[] = {Policy::kMinimal, Policy::kPerTile};
constexpr Schedule kSchedules[] = {Schedule::kProgramOrder, Schedule::kEager, Schedule::kLate,
                                   Schedule::kRandom, Schedule::kRandom};

struct NamedCall {
  std::string name;
  KernelCall call;
};

NamedCall CallOf(const std::string& kernel, const std::string& shape, const std::string& dtype, bool causal) {
  KernelCallOptions options;
  options.kernel = kernel, options.shape = shape, options.dtype = dtype;
  options.causal = causal, options.with_data = true;
  NamedCall made;
  made.name = kernel + " " + shape + " " + dtype + (causal ? " causal" : "");
  const Status status = MakeKernelCall(options, &made.call);
  CUBIST_CHECK(status.ok(), status.message());
  return made;
}

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

// With data: the weights of a sum are numbers that the kernel reads.
trace::Record RecordOf(const KernelCall& call, const ChipSpec& chip = Ascend910B2()) {
  trace::Record record;
  NpuOptions options;
  options.record = &record;
  const Status status = call(Npu(chip, options));
  CUBIST_CHECK(status.ok(), status.message());
  return record;
}

// The bytes of a call's outputs among a record's tensors, which are in the order of the call's arguments.
std::vector<std::vector<std::byte>> OutputsOf(const KernelCall& call, const trace::Record& record,
                                              const trace::GmImage& gm) {
  std::vector<std::vector<std::byte>> outputs;
  for (std::size_t t = 0; t < gm.size(); ++t) {
    if (!record.tensors[t].input && outputs.size() < call.outputs().size()) outputs.push_back(gm[t]);
  }
  return outputs;
}

void ExpectOneAnswer(const std::string& name, const trace::Record& record) {
  for (const Policy policy : kPolicies) {
    const sync::Plan plan = sync::PlanFlags(record, policy);
    trace::GmImage first;
    unsigned seed = 1;
    for (const Schedule schedule : kSchedules) {
      trace::GmImage gm = trace::InitialGm(record, 5);
      ASSERT_TRUE(sync::Execute(record, plan, schedule, seed++, &gm)) << name << NameOf(schedule);
      if (first.empty()) {
        first = gm;
      } else {
        EXPECT_EQ(first, gm) << name << ", " << NameOf(policy) << ", " << NameOf(schedule);
      }
    }
  }
}

TEST(ExecuteTest, EveryOrderGivesTheSameBytes) {
  for (const auto& [name, call] : Calls()) {
    const trace::Record record = RecordOf(call);
    ASSERT_EQ(trace::UnknownTo(record), nullptr) << name;
    ExpectOneAnswer(name, record);
  }
}

// Integers and copies bit for bit; sums as far as their dtype goes, because a composite's expansion rounds more often
// than its body.
void ExpectWhatTheHostComputes(const KernelCall& call, const trace::Record& record, const sync::Plan& plan) {
  trace::GmImage gm = trace::InitialGm(record, 5);
  ASSERT_TRUE(sync::Execute(record, plan, Schedule::kLate, 3, &gm));
  ASSERT_TRUE(call(Host()).ok());
  const auto outputs = OutputsOf(call, record, gm);
  ASSERT_EQ(outputs.size(), call.outputs().size());
  for (std::size_t o = 0; o < outputs.size(); ++o) {
    const Tensor& host = call.outputs()[o];
    for (std::int64_t i = 0; i < host.count(); ++i) {
      if (!IsFloat(host.dtype)) {
        ASSERT_EQ(LoadInt(outputs[o].data(), host.dtype, i), LoadInt(host.data, host.dtype, i))
            << "output " << o << " element " << i;
        continue;
      }
      const float got = LoadFloat(outputs[o].data(), host.dtype, i),
                  want = LoadFloat(host.data, host.dtype, i);
      if (got == want) continue;
      // p is rounded to bf16 before it meets v: a difference of one in its last place moves a mean of
      // values below 1 by less than this; the backward pass adds up larger values.
      ASSERT_NEAR(got, want, 2 * UnitRoundoff(DType::kBF16) * std::max(1.0f, std::abs(want)))
          << "output " << o << " element " << i;
    }
  }
}

TEST(ExecuteTest, TheRecordComputesWhatTheHostComputes) {
  for (const auto& [name, call] : Calls()) {
    SCOPED_TRACE(name);
    const trace::Record record = RecordOf(call);
    ExpectWhatTheHostComputes(call, record, sync::PlanFlags(record, Policy::kMinimal));
  }
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

// Whether lines of that file issued any of a record.
bool IsOf(const trace::Record& record, const std::string& file) {
  for (const auto& phase : record.phases) {
    for (const trace::CoreRecord& core : phase.cores) {
      for (const trace::Instr& instr : core.instrs) {
        if (std::string(core.lines[instr.line].file).ends_with(file)) return true;
      }
    }
  }
  return false;
}

// Planned, proved, in one answer, and that the host's.
void ExpectRightOn(const ChipSpec& chip, const NamedCall& made, const std::string& file = {}) {
  SCOPED_TRACE(Join(made.name, " with ", chip.buffer(Buffer::kUB).capacity, " bytes of UB"));
  const trace::Record record = RecordOf(made.call, chip);
  EXPECT_TRUE(file.empty() || IsOf(record, file));
  ASSERT_EQ(trace::UnknownTo(record), nullptr);
  ExpectOneAnswer(made.name, record);
  for (const Policy policy : kPolicies) {
    const sync::Plan plan = sync::PlanFlags(record, policy);
    const sync::CheckResult checked = sync::Check(record, plan);
    ASSERT_TRUE(checked.ok()) << sync::CheckText(checked);
    ExpectWhatTheHostComputes(made.call, record, plan);
  }
}
void ExpectRightOn(const ChipSpec& chip, const std::string& kernel, const std::string& shape,
                   const std::string& file = {}) {
  for (const char* dtype : {"bf16", "fp32"})
    ExpectRightOn(chip, CallOf(kernel, shape, dtype, /*causal=*/false), file);
}

// Attention, forward or backward, of 4 heads that share one of keys, whose rows are turned: parts of their own, or the
// first columns of q and k.
struct TurnedCase {
  bool grad = false;
  std::int64_t sq = 40, rope = 0;
  bool apart = true;
  DType dtype = DType::kF32;
  RopeLayout layout = RopeLayout::kHalf;
};

template <class Args>
Args TurnedInputs(const TurnedCase& c, KernelCall* call) {
  Args args;
  args.q = call->Input(c.dtype, {1, 4, c.sq, 44}), args.k = call->Input(c.dtype, {1, 1, 50, 44});
  args.v = call->Input(c.dtype, {1, 1, 50, 24});
  if (c.apart) {
    args.q_rope = call->Input(c.dtype, {1, 4, c.sq, c.rope});
    args.k_rope = call->Input(c.dtype, {1, 1, 50, c.rope});
  }
  args.rope.cos = call->Input(DType::kF32, {90, c.rope / 2});
  args.rope.sin = call->Input(DType::kF32, {90, c.rope / 2});
  args.rope.layout = c.layout, args.rope.q_offset = 7;
  return args;
}

NamedCall TurnedCall(const TurnedCase& c) {
  NamedCall made{Join(c.grad ? "gradient" : "attention", " of ", c.sq, " rows, ", NameOf(c.dtype),
                      ", turned ", c.rope, c.apart ? " apart" : "", ", layout ", static_cast<int>(c.layout)),
                 KernelCall(/*with_data=*/true)};
  KernelCall& call = made.call;
  if (!c.grad) {
    auto args = TurnedInputs<FlashAttentionArgs>(c, &call);
    args.out = call.Output(c.dtype, {1, 4, c.sq, 24});
    call.set_run([=](const Device& device, Profile* p) { return FlashAttention(device, args, p); });
    return made;
  }
  auto args = TurnedInputs<FlashAttentionGradArgs>(c, &call);
  args.out = call.Input(c.dtype, {1, 4, c.sq, 24}), args.dout = call.Input(c.dtype, {1, 4, c.sq, 24});
  args.lse = call.Input(DType::kF32, {1, 4, c.sq});
  args.dq = call.Output(c.dtype, {1, 4, c.sq, 44}), args.dk = call.Output(c.dtype, {1, 1, 50, 44});
  args.dv = call.Output(c.dtype, {1, 1, 50, 24});
  if (c.apart) {
    args.dq_rope = call.Output(c.dtype, {1, 4, c.sq, c.rope});
    args.dk_rope = call.Output(c.dtype, {1, 1, 50, c.rope});
  }
  call.set_run([=](const Device& device, Profile* p) { return FlashAttentionGrad(device, args, p); });
  return made;
}

// Of any width: halves that are no whole blocks of UB have a gap behind the first.
TEST(ExecuteTest, RowsTurnedByAnyWidthComputeTheSame) {
  for (const std::int64_t rope : {6, 10, 20, 36, 40}) {
    for (const DType dtype : kFloatTypes) {
      for (const bool apart : {false, true}) {
        const auto layout = static_cast<RopeLayout>((rope / 2 + (apart ? 1 : 0)) % 3);
        // Many rows, and few, whose heads are rows of one matrix; and backward, where each output is one tensor.
        for (const std::int64_t sq : {40, 2}) {
          for (const bool grad : {false, true}) {
            if (grad && !apart) continue;
            ExpectRightOn(Ascend910B2(), TurnedCall({grad, sq, rope, apart, dtype, layout}));
          }
        }
      }
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
