// Check: proves that a plan orders every pair of conflicting accesses, or names what is wrong.
//
// Happens-before by vector clocks, one agent per pipe of a core. Flags are FIFOs of clocks, so that a set that
// comes later cannot order what an earlier one had to. Memory is a map of byte intervals that remember their
// last write and the reads since (FastTrack: Flanagan and Freund, 2009). One deterministic run decides a
// record, because every wait has one set that ends it; a kernel whose control flow depends on data needs
// a record per kind of input. The planner (plan.h) and this file share nothing but the form of a plan.
//
// What orders:
//   - a scalar unit issues the instructions of its core in program order: what it has waited for and read, they
//     may count on. Its own writes to UB only once it has set a flag behind them.
//   - instructions of one pipe start and end in order, except where the chip says that a PipeBarrier is needed.
//   - a flag: everything before its set on the setting pipe, before everything behind its wait.
#ifndef CUBIST_NPU_MODEL_SYNC_CHECK_H_
#define CUBIST_NPU_MODEL_SYNC_CHECK_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "npu_model/sync/plan.h"
#include "npu_model/trace/record.h"

namespace cubist::sync {

enum class Fault : std::uint8_t {
  kReadAfterWrite,  // unordered accesses to the same bytes
  kWriteAfterRead,
  kWriteAfterWrite,
  kUninitialised,  // read of bytes that nothing wrote
  kLiveSlot,       // bytes of a slot overwritten through another slot before they were read
  kSharedGm,       // two cores on the same bytes of GM in one phase, one of them writing
  kDeadlock,
  kNeverSet,    // a wait that no set can end, because there are fewer sets than waits
  kLeftSet,     // a flag that is up when the kernel ends
  kSetTwice,    // a flag set while it may still be up, a cross-core counter beyond its limit
  kBadOp,       // an id or a pipe that the chip does not have
  kMisaligned,  // an operand in UB, of a move or a Vector instruction, that does not begin at a block
  kPadding,     // read of bytes that a move into UB lost, because it writes whole blocks
};
inline constexpr int kFaultCount = 13;
CUBIST_EXPORT const char* NameOf(Fault fault);

// An instruction of a record, or (op empty) a synchronisation instruction near it.
struct Place {
  std::uint32_t instr = 0;
  Pipe pipe = Pipe::kS;
  std::int8_t lane = -1;
  const char* what = "";  // "Load L1", "WaitFlag", ..
  trace::SourceLine line;
};

struct Finding {
  Fault fault = Fault::kReadAfterWrite;
  std::size_t phase = 0, core = 0;  // of the first of its kind
  Place first, second;              // in program order; `first` may be missing (empty `what`)
  std::size_t other_core = 0;       // kSharedGm: the core of `second`
  std::string memory;               // "L1 'a_l1'", "GM 'out'"
  std::int64_t begin = 0, end = 0;  // bytes there
  std::string cure;                 // the shortest missing edge, or what to do
  std::vector<std::string> chain;   // kDeadlock, kNeverSet: who waits for whom
  std::int64_t count = 1;           // findings of this kind between these lines
};
// One or more lines for people.
CUBIST_EXPORT std::string ToString(const Finding& finding);

// Of cores with one proof, the accesses are those of the first.
struct CheckResult {
  std::vector<Finding> findings;
  std::string deadlock_dot;                                // graph of the first deadlock
  std::int64_t instructions = 0, flags = 0, accesses = 0;  // checked; accesses are intervals

  bool ok() const { return findings.empty(); }
};

CUBIST_EXPORT CheckResult Check(const trace::Record& record, const Plan& plan);

}  // namespace cubist::sync

#endif  // CUBIST_NPU_MODEL_SYNC_CHECK_H_
