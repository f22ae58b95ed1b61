// Execute: a record's instructions on real bytes, under a plan, in an order of one's choice.
#ifndef CUBIST_NPU_MODEL_SYNC_EXECUTE_H_
#define CUBIST_NPU_MODEL_SYNC_EXECUTE_H_

#include "npu_model/sync/plan.h"
#include "npu_model/sync/schedule.h"
#include "npu_model/trace/interpret.h"
#include "npu_model/trace/record.h"

namespace cubist::sync {

// Runs every phase of a record on `gm`: cores one after the other, the instructions of each in an order that its
// pipes and the plan's flags allow. False if a core gets stuck; `gm` then holds what was done so far. The record
// must hold no instruction that trace::UnknownTo names, and be made with data where a kernel reads numbers that it
// computes with. Interpreted element by element: for small shapes.
CUBIST_COMMAND_EXPORT bool Execute(const trace::Record& record, const Plan& plan, Schedule schedule,
                                   unsigned seed, trace::GmImage* gm);

}  // namespace cubist::sync

#endif  // CUBIST_NPU_MODEL_SYNC_EXECUTE_H_
