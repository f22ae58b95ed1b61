#include "tests/sync/executed_call.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "npu_model/device.h"
#include "npu_model/sync/check.h"
#include "npu_model/sync/report.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

using sync::Policy;
using sync::Schedule;

constexpr Policy kPolicies[] = {Policy::kMinimal, Policy::kPerTile};
constexpr Schedule kSchedules[] = {Schedule::kProgramOrder, Schedule::kEager, Schedule::kLate,
                                   Schedule::kRandom, Schedule::kRandom};

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

}  // namespace

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

trace::Record RecordOf(const KernelCall& call, const ChipSpec& chip) {
  trace::Record record;
  NpuOptions options;
  options.record = &record;
  const Status status = call(Npu(chip, options));
  CUBIST_CHECK(status.ok(), status.message());
  return record;
}

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

void ExpectRightOn(const ChipSpec& chip, const NamedCall& made, const std::string& file) {
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
                   const std::string& file) {
  for (const char* dtype : {"bf16", "fp32"})
    ExpectRightOn(chip, CallOf(kernel, shape, dtype, /*causal=*/false), file);
}

}  // namespace cubist::testing
