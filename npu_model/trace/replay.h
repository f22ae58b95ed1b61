// Replay: predicts the time of a recorded kernel on a chip.
//
// Instructions and the flags of a plan (sync/plan.h) are issued by the scalar units into the pipes' bounded queues,
// and the pipes take them in order. Nothing but queues and flags holds an instruction back: a record with too few
// flags is replayed as wrongly as a device would run it, so prove the plan first (sync/check.h). Arithmetic takes
// head + work / throughput of its pipe; a transfer to or from global memory takes its startup and then flows,
// sharing the cores' ports, L2 and HBM max-min fairly with all other transfers. Nothing steps by cycles: there is
// one event per start and end of a transfer, everything else follows at once.
//
// Approximations: L2 is fully associative with second-chance replacement over 4-KiB runs of lines, at first full of
// what ran before; a line that another transfer fetches is there once that fetch would end if it were alone; a store
// that adds takes HBM for the lines that it adds to and L2 lacks, as if it read them, and its core's port but once;
// write-back is charged to the transfer that evicts, and what is left in L2 at the end is never written back; a
// Cube core has one port for reads, one for FIX and one for MTE3; cores that read from the same address at a time
// wait for each other by line, those that read overlapping blocks from different addresses do not.
#ifndef CUBIST_NPU_MODEL_TRACE_REPLAY_H_
#define CUBIST_NPU_MODEL_TRACE_REPLAY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>

#include "npu_model/profile.h"
#include "npu_model/sync/plan.h"
#include "npu_model/trace/record.h"

namespace cubist::trace {

struct ReplayOptions {
  bool timeline = false;  // Keep every instruction's start and end in the profile.
  // Go on until it is certain that the launch takes longer; its time is infinite then, and nothing else is told of it.
  double give_up_s = std::numeric_limits<double>::infinity();
  // In place of the record's, from which it differs in costs alone.
  const ChipSpec* chip = nullptr;
  // Told of every stop at a WaitFlag or barrier: which op of the plan, and for how many cycles.
  std::function<void(std::size_t phase, std::size_t core, std::uint32_t op, double cycles)> on_wait = {};
};

// A pure function of its arguments, so that a tool may leave out a flag and replay. A plan in which a WaitFlag has no
// set is a programming error.
CUBIST_EXPORT Profile Replay(const Record& record, const sync::Plan& plan, const ReplayOptions& options = {});

// By a minimal plan.
CUBIST_EXPORT Profile Replay(const Record& record, bool timeline);

}  // namespace cubist::trace

#endif  // CUBIST_NPU_MODEL_TRACE_REPLAY_H_
