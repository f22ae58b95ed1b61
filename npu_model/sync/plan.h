// Plan: where flags and barriers go so that a recorded kernel is right on a chip whose pipes run side by
// side.
//
// A plan is data: for each core of each phase a list of synchronisation instructions, each on one pipe, before
// or after an instruction of the record. The planner makes one from the bytes that instructions touch; the
// checker (check.h), which shares no code with it, proves or refutes any.
#ifndef CUBIST_NPU_MODEL_SYNC_PLAN_H_
#define CUBIST_NPU_MODEL_SYNC_PLAN_H_

#include <cstdint>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/sync/policy.h"
#include "npu_model/trace/record.h"

namespace cubist::sync {

enum class Kind : std::uint8_t {
  kSetFlag,   // SetFlag<pipe_peer>(id): once everything before it on `pipe` is complete
  kWaitFlag,  // WaitFlag<peer_pipe>(id): what follows on `pipe` waits for the flag, which is then down again
  kPipeBarrier,  // PipeBarrier<pipe>: what follows on `pipe` waits for everything before it there
  // Between a Cube core and all of its Vector cores (mode 2). A set by the Cube core counts up on every Vector
  // core; sets by all Vector cores together count up once on the Cube core. A wait counts down.
  kCrossSet,   // CrossCoreSetFlag<2, pipe>(id)
  kCrossWait,  // CrossCoreWaitFlag<2, pipe>(id)
};
CUBIST_EXPORT const char* NameOf(Kind kind);
inline bool IsSet(Kind kind) { return kind == Kind::kSetFlag || kind == Kind::kCrossSet; }

struct SyncOp {
  std::uint32_t instr = 0;  // CoreRecord::instrs, of any pipe: the place in program order
  bool after = false;       // behind that instruction, otherwise in front of it
  Kind kind = Kind::kSetFlag;
  Pipe pipe = Pipe::kS;   // that executes it,
  std::int8_t lane = -1;  // of the Cube core (-1) or of a Vector core
  Pipe peer = Pipe::kS;   // the other pipe of a SetFlag or WaitFlag, on the same core
  std::uint8_t id = 0;
  std::uint16_t unused = 0;  // No byte is left out: like ops are like bytes.

  // Program order: instruction i stands between 2 i and 2 i + 1.
  std::uint64_t position() const { return 2 * std::uint64_t{instr} + (after ? 1 : 0); }
  friend bool operator==(const SyncOp&, const SyncOp&) = default;
};

struct CorePlan {
  std::vector<SyncOp> ops;  // by position; those of one pipe at the same position in the order of the list
};

struct PhasePlan {
  std::vector<CorePlan> cores;
};

// More flags than ids: a wait that stands earlier, or for more, than the bytes ask for.
struct Shortage {
  enum class Remedy : std::uint8_t {
    kWaitsForId,     // for an earlier use of the id
    kWaitsForLater,  // for a later instruction of `from`
    kRelayed,        // no cross-core id for this pair of pipes: the scalar units wait and set for them
  };
  Pipe from = Pipe::kS, to = Pipe::kS;
  bool cross_core = false;
  Remedy remedy = Remedy::kWaitsForId;
  trace::SourceLine line;  // of the instruction that waits too long
  std::int64_t count = 0;
};

struct Plan {
  Policy policy = Policy::kMinimal;
  std::vector<PhasePlan> phases;
  std::vector<Shortage> shortages;
};

// Orders every pair of instructions of a core that touch the same bytes, one of them writing, in program
// order. Every wait stands behind its set in program order, so that a plan cannot deadlock.
CUBIST_EXPORT Plan PlanFlags(const trace::Record& record, Policy policy);
// The same as if the record were of a chip with other flags.
CUBIST_EXPORT Plan PlanFlags(const trace::Record& record, Policy policy, const ChipSpec& chip);

}  // namespace cubist::sync

#endif  // CUBIST_NPU_MODEL_SYNC_PLAN_H_
