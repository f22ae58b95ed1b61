// Replay: predicts the time of a recorded kernel on a chip.
//
// Instructions wait for the scalar unit to issue them, for the one before on their in-order pipe, and for the
// latest instruction on each other pipe of the AI core whose bytes they overlap (dependencies.h). An
// instruction then takes head + work / throughput of its pipe; a transfer to or from global memory takes its
// startup and then flows, sharing the cores' ports, L2 and HBM max-min fairly with all other transfers. Nothing
// steps by cycles: there is one event per start and end of a transfer, everything else follows at once.
//
// Approximations: L2 is fully associative with second-chance replacement over 4-KiB runs of
// lines; a line counts as present once its first reader began; write-back is charged to the
// transfer that evicts, and what is left in L2 at the end is never written back; a Cube core has
// one port for reads, one for FIX and one for MTE3; flags are not yet planned, so waits are by
// dependencies alone; bank conflicts, queue depths and same-address queueing are not modelled.
#ifndef CUBIST_NPU_MODEL_TRACE_REPLAY_H_
#define CUBIST_NPU_MODEL_TRACE_REPLAY_H_

#include "npu_model/profile.h"
#include "npu_model/trace/record.h"

namespace cubist::trace {

// With `timeline`, every instruction's start and end are kept in the profile.
Profile Replay(const Record& record, bool timeline);

}  // namespace cubist::trace

#endif  // CUBIST_NPU_MODEL_TRACE_REPLAY_H_
