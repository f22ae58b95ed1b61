// Cores that the planner, or the checker, takes for alike: each has the plan, and the findings, that it has alone.
#include "npu_model/sync/alike.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "npu_model/sync/check.h"
#include "npu_model/sync/core_checker.h"
#include "npu_model/sync/core_planner.h"
#include "npu_model/sync/plan.h"
#include "npu_model/sync/same_proof.h"
#include "npu_model/sync/touches.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"
#include "tools/kernel_call.h"

namespace cubist::testing {
namespace {

using sync::Policy;

trace::Record RecordOf(const std::string& kernel, const std::string& shape) {
  KernelCallOptions options;
  options.kernel = kernel, options.shape = shape, options.with_data = true;
  KernelCall call;
  CUBIST_CHECK(MakeKernelCall(options, &call).ok(), kernel);
  trace::Record record;
  NpuOptions npu;
  npu.record = &record;
  CUBIST_CHECK(call(Npu(Ascend910B2(), npu)).ok(), kernel);
  return record;
}

// Kernels whose cores go by their data, each in its own way, and some whose cores do one thing.
std::vector<std::pair<std::string, std::string>> Kernels() {
  return {{"token_permute", "1024x64x2x64"},
          {"token_permute_by_map", "200x64x3x64"},
          {"token_permute_by_digits", "512x64x8x65536"},
          {"reorder_chunks", "1000x64x8x4"},
          {"token_finalize", "100x64x4x8"},
          {"route", "300x64x4x4"},
          {"flash_attention_grad", "4x300x64x64x0"},
          {"grouped_matmul", "900x600x100x5"}};
}

// How many cores have another's plan.
std::int64_t ExpectOwnPlans(const trace::Record& record) {
  std::int64_t shared = 0;
  for (const Policy policy : {Policy::kMinimal, Policy::kPerTile}) {
    const sync::Plan plan = sync::PlanFlags(record, policy);
    for (std::size_t p = 0; p < record.phases.size(); ++p) {
      const trace::Phase& phase = record.phases[p];
      std::vector<std::vector<char>> in_order;
      for (const trace::CoreRecord& core : phase.cores)
        in_order.push_back(sync::TensorsInOrder(core, record.chip));
      const std::vector<std::size_t> first = sync::FirstAlike(phase, record.chip, in_order);
      for (std::size_t c = 0; c < phase.cores.size(); ++c) {
        if (first[c] == c) continue;
        ++shared;
        sync::CorePlanner alone(phase.cores[c], record.chip, phase.vector_only, policy, in_order[c]);
        const sync::CorePlan own = alone.Run();
        if (alone.LacksIds() || !alone.Shortages().empty()) continue;
        EXPECT_EQ(plan.phases[p].cores[c].ops, own.ops) << "phase " << p << ", core " << c;
      }
    }
  }
  return shared;
}

std::vector<sync::Finding> CheckAlone(const trace::Record& record, const sync::Plan& plan) {
  sync::Findings findings;
  sync::GmState gm(record);
  const std::vector<char> watched = sync::WatchedTensors(record, gm);
  for (std::size_t p = 0; p < record.phases.size(); ++p) {
    const trace::Phase& phase = record.phases[p];
    sync::Findings shared;
    const std::vector<sync::Tensors> twice = sync::FindSharedGm(record, p, shared);
    for (std::size_t c = 0; c < phase.cores.size(); ++c) {
      const sync::GmWatch watch = sync::WatchOf(phase.cores[c], twice[c], gm);
      sync::CoreChecker checker(record, gm, watch, p, c, plan.phases[p].cores[c]);
      checker.Run();
      for (sync::Finding& f : checker.TakeFindings()) findings.Add(std::move(f));
    }
    for (sync::Finding& f : shared.Take()) findings.Add(std::move(f));
    sync::AddWritten(phase, watched, gm);
  }
  return findings.Take();
}

// Whether anything was found.
bool ExpectOwnFindings(const trace::Record& record, const sync::Plan& plan) {
  const std::vector<sync::Finding> together = sync::Check(record, plan).findings,
                                   alone = CheckAlone(record, plan);
  const auto texts = [](const std::vector<sync::Finding>& findings) {
    std::vector<std::string> all;
    for (const sync::Finding& f : findings) all.push_back(ToString(f));
    return all;
  };
  EXPECT_EQ(texts(together), texts(alone));
  return !alone.empty();
}

std::size_t KindsOfProof(const trace::Record& record, const sync::Plan& plan, std::size_t p) {
  sync::GmState gm(record);
  sync::Findings shared;
  std::vector<const sync::CorePlan*> plans;
  for (const sync::CorePlan& core : plan.phases[p].cores) plans.push_back(&core);
  std::vector<sync::GmWatch> watches;
  const auto first = sync::FirstWithProof(record.chip, record.phases[p], plans,
                                          sync::FindSharedGm(record, p, shared), gm, &watches);
  std::size_t kinds = 0;
  for (std::size_t c = 0; c < first.size(); ++c) kinds += first[c] == c ? 1 : 0;
  return kinds;
}

TEST(AlikeTest, EveryCoreHasItsOwnPlan) {
  for (const auto& [kernel, shape] : Kernels()) {
    SCOPED_TRACE(kernel);
    EXPECT_GT(ExpectOwnPlans(RecordOf(kernel, shape)), 10);  // There is something to compare.
  }
}

// Cores that permute different tokens, or different chunks, have few kinds of plans and proofs.
TEST(AlikeTest, DataMakesFewKinds) {
  for (const char* kernel : {"token_permute", "token_permute_by_map", "reorder_chunks"}) {
    SCOPED_TRACE(kernel);
    const trace::Record record = RecordOf(kernel, "");
    const sync::Plan plan = sync::PlanFlags(record, Policy::kMinimal);
    for (std::size_t p = 0; p < record.phases.size(); ++p) EXPECT_LE(KindsOfProof(record, plan, p), 8u) << p;
  }
}

// Rows that a core takes from the last one on are the same bytes: neither plan nor proof asks for their order, and both go
// on to be shared.
TEST(AlikeTest, RowsTakenDownwardsAreTheSameBytes) {
  Random random(11);
  for (const auto& [kernel, shape] : Kernels()) {
    SCOPED_TRACE(kernel);
    const trace::Record record = RecordOf(kernel, shape);
    trace::Record turned = record;
    for (trace::Phase& phase : turned.phases) {
      for (trace::CoreRecord& core : phase.cores) {
        for (trace::GmAccess& gm : core.accesses) {
          gm.rows_down = gm.rows > 1 && random.Integer(0, 1) == 0;
          gm.bursts_down = gm.bursts > 1 && random.Integer(0, 1) == 0;
        }
      }
    }
    EXPECT_EQ(ExpectOwnPlans(turned), ExpectOwnPlans(record));
    const sync::Plan plan = sync::PlanFlags(record, Policy::kMinimal),
                     of_turned = sync::PlanFlags(turned, Policy::kMinimal);
    EXPECT_FALSE(ExpectOwnFindings(turned, plan));
    for (std::size_t p = 0; p < record.phases.size(); ++p) {
      EXPECT_EQ(KindsOfProof(turned, plan, p), KindsOfProof(record, plan, p)) << p;
      for (std::size_t c = 0; c < plan.phases[p].cores.size(); ++c)
        EXPECT_EQ(of_turned.phases[p].cores[c].ops, plan.phases[p].cores[c].ops) << p << ", core " << c;
    }
  }
}

// A flag less in all cores of one plan, so that they stay alike.
TEST(AlikeTest, HolesAreFoundInEveryCore) {
  Random random(3);
  int found = 0;
  for (const auto& [kernel, shape] : Kernels()) {
    SCOPED_TRACE(kernel);
    const trace::Record record = RecordOf(kernel, shape);
    const sync::Plan plan = sync::PlanFlags(record, Policy::kMinimal);
    EXPECT_FALSE(ExpectOwnFindings(record, plan));
    for (int i = 0; i < 12; ++i) {
      sync::Plan holed = plan;
      auto& cores =
          holed.phases[static_cast<std::size_t>(random.Integer(0, std::ssize(plan.phases) - 1))].cores;
      const auto ops = cores[static_cast<std::size_t>(random.Integer(0, std::ssize(cores) - 1))].ops;
      if (ops.empty()) continue;
      const std::int64_t op = random.Integer(0, std::ssize(ops) - 1);
      for (sync::CorePlan& core : cores) {
        if (core.ops == ops) core.ops.erase(core.ops.begin() + op);
      }
      found += ExpectOwnFindings(record, holed) ? 1 : 0;
    }
  }
  EXPECT_GT(found, 20);
}

// Operands of single cores moved, cut or made longer: what their kind reads or writes is then not theirs.
TEST(AlikeTest, ChangedOperandsAreTheCoresOwn) {
  Random random(5);
  int found = 0;
  for (const auto& [kernel, shape] : Kernels()) {
    SCOPED_TRACE(kernel);
    const trace::Record record = RecordOf(kernel, shape);
    const sync::Plan plan = sync::PlanFlags(record, Policy::kMinimal);
    for (int i = 0; i < 12; ++i) {
      trace::Record changed = record;
      auto& cores =
          changed.phases[static_cast<std::size_t>(random.Integer(0, std::ssize(record.phases) - 1))].cores;
      trace::CoreRecord& core = cores[static_cast<std::size_t>(random.Integer(0, std::ssize(cores) - 1))];
      if (core.operands.empty()) continue;
      trace::Operand& o =
          core.operands[static_cast<std::size_t>(random.Integer(0, std::ssize(core.operands) - 1))];
      if (o.slot < 0) continue;
      const auto cols = static_cast<std::int32_t>(core.slots[static_cast<std::size_t>(o.slot)].cols);
      if (i % 2 == 0) {
        o.col_end = static_cast<std::int32_t>(random.Integer(o.col_begin + 1, cols));
      } else {
        o.col_begin = static_cast<std::int32_t>(random.Integer(0, o.col_end - 1));
      }
      found += ExpectOwnFindings(changed, plan) ? 1 : 0;
      ExpectOwnPlans(changed);
    }
  }
  EXPECT_GT(found, 10);
}

}  // namespace
}  // namespace cubist::testing
