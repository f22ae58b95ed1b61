// Calls executed on real bytes as the model records them: in many orders, and beside the host.
#ifndef CUBIST_TESTS_SYNC_EXECUTED_CALL_H_
#define CUBIST_TESTS_SYNC_EXECUTED_CALL_H_

#include <cstddef>
#include <string>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/chip_constants.h"
#include "npu_model/sync/execute.h"
#include "npu_model/sync/plan.h"
#include "npu_model/trace/record.h"
#include "tools/kernel_call.h"

namespace cubist::testing {

struct NamedCall {
  std::string name;
  KernelCall call;
};

// One of the command's table, with data.
NamedCall CallOf(const std::string& kernel, const std::string& shape, const std::string& dtype, bool causal);

// With data: the weights of a sum are numbers that the kernel reads.
trace::Record RecordOf(const KernelCall& call, const ChipSpec& chip = Ascend910B2());

// The bytes of a call's outputs among a record's tensors, which are in the order of the call's arguments.
std::vector<std::vector<std::byte>> OutputsOf(const KernelCall& call, const trace::Record& record,
                                              const trace::GmImage& gm);

// Every policy and schedule gives the same bytes.
void ExpectOneAnswer(const std::string& name, const trace::Record& record);

// Integers and copies bit for bit; sums as far as their dtype goes, because a composite's expansion rounds more often
// than its body.
void ExpectWhatTheHostComputes(const KernelCall& call, const trace::Record& record, const sync::Plan& plan);

// Planned, proved, in one answer, and that the host's; of a record to which `file`, where given, has given instructions.
void ExpectRightOn(const ChipSpec& chip, const NamedCall& made, const std::string& file = {});
// The same of CallOf, in bf16 and fp32.
void ExpectRightOn(const ChipSpec& chip, const std::string& kernel, const std::string& shape,
                   const std::string& file = {});

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_SYNC_EXECUTED_CALL_H_
