// Records executed on real bytes, in many orders: a right plan gives the same bytes in every one, and they are what
// the host executor computes.
#include "npu_model/sync/execute.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/flash_attention.h"
#include "kernels/matmul.h"
#include "kernels/token_permute.h"
#include "npu_model/sync/check.h"
#include "npu_model/sync/plan.h"

namespace cubist::testing {
namespace {

using sync::Policy;
using sync::Schedule;

constexpr Policy kPolicies[] = {Policy::kMinimal, Policy::kPerTile};
constexpr Schedule kSchedules[] = {Schedule::kProgramOrder, Schedule::kEager, Schedule::kLate,
                                   Schedule::kRandom, Schedule::kRandom};

// A kernel call that owns its tensors' bytes.
class Call {
 public:
  using Run = std::function<Status(const Device&)>;

  explicit Call(std::string name) : name(std::move(name)) {}

  ConstTensor Input(DType dtype, std::initializer_list<std::int64_t> sizes) {
    const Tensor t = Room(dtype, sizes);
    for (std::int64_t i = 0; i < t.count(); ++i)
      StoreFloat(t.data, dtype, i, static_cast<float>(random_() % 2048) / 1024 - 1);
    return t;
  }
  ConstTensor Ids(const std::vector<std::int32_t>& ids, std::initializer_list<std::int64_t> sizes) {
    const Tensor t = Room(DType::kI32, sizes);
    std::copy(ids.begin(), ids.end(), static_cast<std::int32_t*>(t.data));
    return t;
  }
  Tensor Output(DType dtype, std::initializer_list<std::int64_t> sizes) {
    outputs_.push_back(Room(dtype, sizes));
    return outputs_.back();
  }

  const std::vector<Tensor>& outputs() const { return outputs_; }

  std::string name;
  Run run;

 private:
  Tensor Room(DType dtype, std::initializer_list<std::int64_t> sizes) {
    Tensor t(static_cast<void*>(nullptr), dtype, sizes);
    bytes_.emplace_back(static_cast<std::size_t>(t.count() * SizeOf(dtype)));
    t.data = bytes_.back().data();
    return t;
  }

  std::mt19937 random_{17};
  std::vector<std::vector<std::byte>> bytes_;
  std::vector<Tensor> outputs_;  // in the order in which the kernel names them
};

Call MatmulCall(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k, bool transpose_b, bool bias) {
  Call call("matmul " + std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k) + " " +
            NameOf(dtype));
  MatmulArgs args;
  args.a = call.Input(dtype, {m, k});
  args.b = transpose_b ? call.Input(dtype, {n, k}) : call.Input(dtype, {k, n});
  if (bias) args.bias = call.Input(DType::kF32, {n});
  args.c = call.Output(DType::kF32, {m, n});
  args.transpose_b = transpose_b;
  call.run = [args](const Device& device) { return Matmul(device, args); };
  return call;
}

Call AttentionCall(DType dtype, std::int64_t heads, std::int64_t sq, std::int64_t skv, std::int64_t d_rope,
                   Causal causal) {
  Call call("flash_attention " + std::to_string(sq) + "x" + std::to_string(skv) + " " + NameOf(dtype));
  FlashAttentionArgs args;
  args.q = call.Input(dtype, {1, heads, sq, 40});
  args.k = call.Input(dtype, {1, heads, skv, 40});
  if (d_rope > 0) {
    args.q_rope = call.Input(dtype, {1, heads, sq, d_rope});
    args.k_rope = call.Input(dtype, {1, 1, skv, d_rope});
  }
  args.v = call.Input(dtype, {1, heads, skv, 24});
  args.out = call.Output(DType::kF32, {1, heads, sq, 24});
  args.lse = call.Output(DType::kF32, {1, heads, sq});
  args.causal = causal;
  call.run = [args](const Device& device) { return FlashAttention(device, args); };
  return call;
}

Call PermuteCall(std::int64_t tokens, std::int64_t hidden, std::int64_t top_k, std::int64_t experts) {
  Call call("token_permute " + std::to_string(tokens));
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < tokens * top_k; ++i)
    ids.push_back(static_cast<std::int32_t>(i * 7 / 3 % experts));
  TokenPermuteArgs args;
  args.tokens = call.Input(DType::kBF16, {tokens, hidden});
  args.topk_ids = call.Ids(ids, {tokens, top_k});
  args.num_experts = experts;
  args.permuted = call.Output(DType::kBF16, {tokens * top_k, hidden});
  args.sorted_indices = call.Output(DType::kI32, {tokens * top_k});
  call.run = [args](const Device& device) { return TokenPermute(device, args); };
  return call;
}

Call UnpermuteCall(std::int64_t tokens, std::int64_t hidden, std::int64_t top_k) {
  Call call("token_unpermute " + std::to_string(tokens));
  std::vector<std::int32_t> places;
  for (std::int64_t i = 0; i < tokens * top_k; ++i)
    places.push_back(static_cast<std::int32_t>(tokens * top_k - 1 - i));
  TokenUnpermuteArgs args;
  args.permuted = call.Input(DType::kBF16, {tokens * top_k, hidden});
  args.sorted_indices = call.Ids(places, {tokens * top_k});
  args.probs = call.Input(DType::kF32, {tokens, top_k});
  args.out = call.Output(DType::kBF16, {tokens, hidden});
  call.run = [args](const Device& device) { return TokenUnpermute(device, args); };
  return call;
}

std::vector<Call> Calls() {
  std::vector<Call> calls;
  calls.push_back(MatmulCall(DType::kBF16, 70, 90, 130, false, true));
  calls.push_back(MatmulCall(DType::kF32, 33, 20, 100, true, false));
  calls.push_back(AttentionCall(DType::kBF16, 2, 70, 130, 16, Causal::kBottomRight));
  calls.push_back(AttentionCall(DType::kF32, 1, 20, 300, 0, Causal::kNone));
  calls.push_back(PermuteCall(100, 33, 3, 8));
  calls.push_back(UnpermuteCall(60, 33, 3));
  return calls;
}

// With data: the weights of a sum are numbers that the kernel reads.
trace::Record RecordOf(const Call& call) {
  trace::Record record;
  NpuOptions options;
  options.record = &record;
  const Status status = call.run(Npu(Ascend910B2(), options));
  CUBIST_CHECK(status.ok(), status.message());
  return record;
}

// The bytes of a call's outputs among a record's tensors, which are in the order of the call's arguments.
std::vector<std::vector<std::byte>> OutputsOf(const Call& call, const trace::Record& record,
                                              const trace::GmImage& gm) {
  std::vector<std::vector<std::byte>> outputs;
  for (std::size_t t = 0; t < gm.size(); ++t) {
    if (!record.tensors[t].input && outputs.size() < call.outputs().size()) outputs.push_back(gm[t]);
  }
  return outputs;
}

TEST(ExecuteTest, EveryOrderGivesTheSameBytes) {
  for (const Call& call : Calls()) {
    const trace::Record record = RecordOf(call);
    ASSERT_EQ(trace::UnknownTo(record), nullptr) << call.name;
    for (const Policy policy : kPolicies) {
      const sync::Plan plan = sync::PlanFlags(record, policy);
      trace::GmImage first;
      unsigned seed = 1;
      for (const Schedule schedule : kSchedules) {
        trace::GmImage gm = trace::InitialGm(record, 5);
        ASSERT_TRUE(sync::Execute(record, plan, schedule, seed++, &gm)) << call.name << NameOf(schedule);
        if (first.empty()) {
          first = gm;
        } else {
          EXPECT_EQ(first, gm) << call.name << ", " << NameOf(policy) << ", " << NameOf(schedule);
        }
      }
    }
  }
}

// Integers and copies bit for bit; sums as far as their dtype goes, because a composite's expansion rounds more often
// than its body.
TEST(ExecuteTest, TheRecordComputesWhatTheHostComputes) {
  for (const Call& call : Calls()) {
    const trace::Record record = RecordOf(call);
    trace::GmImage gm = trace::InitialGm(record, 5);
    ASSERT_TRUE(sync::Execute(record, sync::PlanFlags(record, Policy::kMinimal), Schedule::kLate, 3, &gm));
    ASSERT_TRUE(call.run(Host()).ok());
    const auto outputs = OutputsOf(call, record, gm);
    ASSERT_EQ(outputs.size(), call.outputs().size());
    for (std::size_t o = 0; o < outputs.size(); ++o) {
      const Tensor& host = call.outputs()[o];
      for (std::int64_t i = 0; i < host.count(); ++i) {
        if (!IsFloat(host.dtype)) {
          ASSERT_EQ(LoadInt(outputs[o].data(), host.dtype, i), LoadInt(host.data, host.dtype, i))
              << call.name << " output " << o << " element " << i;
          continue;
        }
        const float got = LoadFloat(outputs[o].data(), host.dtype, i),
                    want = LoadFloat(host.data, host.dtype, i);
        if (got == want) continue;
        // p is rounded to bf16 before it meets v: a difference of one in its last place moves a mean of
        // values below 1 by less than this.
        ASSERT_NEAR(got, want, 2 * UnitRoundoff(DType::kBF16))
            << call.name << " output " << o << " element " << i;
      }
    }
  }
}

// Without its flags a kernel goes wrong in some order; and never where the checker finds nothing.
TEST(ExecuteTest, HolesInAPlanShowInTheData) {
  const Call call = AttentionCall(DType::kBF16, 1, 40, 300, 0, Causal::kNone);
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
