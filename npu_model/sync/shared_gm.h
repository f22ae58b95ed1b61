// Global memory over a whole phase: bytes that cores share, and what is written when it ends.
#ifndef CUBIST_NPU_MODEL_SYNC_SHARED_GM_H_
#define CUBIST_NPU_MODEL_SYNC_SHARED_GM_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "npu_model/sync/bytes.h"
#include "npu_model/sync/findings.h"
#include "npu_model/trace/record.h"

namespace cubist::sync {

// What the launch has put into GM before the phase.
struct GmState {
  explicit GmState(const trace::Record& record) : record(&record) {}
  bool IsInput(std::size_t tensor) const {
    return tensor >= record->tensors.size() || record->tensors[tensor].input;
  }
  bool Holds(std::size_t tensor, std::int64_t begin, std::int64_t end) const {
    return IsInput(tensor) || (tensor < written.size() && written[tensor].Contains(begin, end));
  }

  const trace::Record* record;
  std::vector<ByteSet> written;  // by tensor
};

// What a core's accesses to GM are checked for, by tensor.
struct GmWatch {
  std::vector<char> in_order;  // pipes of the core, or instructions of one, may quarrel about its bytes
  std::vector<char> held;      // its bytes are the launch's own: what is read must have been written
};

// For each core of a phase, in ascending order, the tensors of which it writes some bytes twice. Adds to `findings` the
// bytes of GM that two cores touch and one of them writes.
using Tensors = std::vector<std::size_t>;
std::vector<Tensors> FindSharedGm(const trace::Record& record, std::size_t phase, Findings& findings);

GmWatch WatchOf(const trace::CoreRecord& core, const Tensors& written_twice, const GmState& gm);

// Tensors of the launch's own that some phase reads or adds to.
std::vector<char> WatchedTensors(const trace::Record& record, const GmState& gm);

// Notes what a phase has written to the watched tensors.
void AddWritten(const trace::Phase& phase, const std::vector<char>& watched, GmState& gm);

}  // namespace cubist::sync

#endif  // CUBIST_NPU_MODEL_SYNC_SHARED_GM_H_
