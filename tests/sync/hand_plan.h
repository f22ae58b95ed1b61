// Plans written by hand, and what the checker says of them.
#ifndef CUBIST_TESTS_SYNC_HAND_PLAN_H_
#define CUBIST_TESTS_SYNC_HAND_PLAN_H_

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "npu_model/sync/check.h"
#include "npu_model/sync/plan.h"
#include "tests/npu_model/trace_support.h"

namespace cubist::testing {

using sync::CheckResult;
using sync::Fault;
using sync::Kind;
using sync::SyncOp;
using trace::Record;

inline constexpr Pipe kS = Pipe::kS, kMte1 = Pipe::kMte1, kMte2 = Pipe::kMte2, kMte3 = Pipe::kMte3,
                      kM = Pipe::kM, kV = Pipe::kV, kFix = Pipe::kFix;

// A plan for the first core, written by hand. Instructions are numbered in program order.
class Hand {
 public:
  explicit Hand(int lane) : lane_(lane) {}

  Hand& Flag(std::uint32_t after, Pipe from, std::uint32_t before, Pipe to, int id = 0) {
    return Set(after, from, to, id).Wait(before, to, from, id);
  }
  Hand& Set(std::uint32_t after, Pipe from, Pipe to, int id = 0) {
    return Add(after, true, Kind::kSetFlag, from, to, lane_, id);
  }
  Hand& Wait(std::uint32_t before, Pipe to, Pipe from, int id = 0) {
    return Add(before, false, Kind::kWaitFlag, to, from, lane_, id);
  }
  Hand& Barrier(std::uint32_t before, Pipe pipe) {
    return Add(before, false, Kind::kPipeBarrier, pipe, pipe, lane_, 0);
  }
  Hand& CrossSet(std::uint32_t after, Pipe pipe, int lane, int id = 0) {
    return Add(after, true, Kind::kCrossSet, pipe, pipe, lane, id);
  }
  Hand& CrossWait(std::uint32_t before, Pipe pipe, int lane, int id = 0) {
    return Add(before, false, Kind::kCrossWait, pipe, pipe, lane, id);
  }

  CheckResult Check(const Record& record) const {
    sync::CorePlan core{ops_};
    std::stable_sort(core.ops.begin(), core.ops.end(),
                     [](const SyncOp& x, const SyncOp& y) { return x.position() < y.position(); });
    sync::Plan plan;
    plan.phases.emplace_back().cores.push_back(std::move(core));
    return sync::Check(record, plan);
  }

 private:
  Hand& Add(std::uint32_t instr, bool after, Kind kind, Pipe pipe, Pipe peer, int lane, int id) {
    SyncOp op;
    op.instr = instr, op.after = after, op.kind = kind, op.pipe = pipe, op.peer = peer;
    op.lane = static_cast<std::int8_t>(lane), op.id = static_cast<std::uint8_t>(id);
    ops_.push_back(op);
    return *this;
  }

  int lane_;
  std::vector<SyncOp> ops_;
};

inline Hand OnVector() { return Hand(0); }
inline Hand OnCube() { return Hand(-1); }

inline std::multiset<Fault> FaultsOf(const CheckResult& result) {
  std::multiset<Fault> faults;
  for (const sync::Finding& f : result.findings) faults.insert(f.fault);
  return faults;
}
using Faults = std::multiset<Fault>;

template <class Kernel>
Record OnVectorCore(Kernel&& kernel, int cores = 1) {
  return RecordOf<TraceVectorCore>(RoundChip(), cores, kernel);
}
template <class Kernel>
Record OnAiCore(Kernel&& kernel) {
  return RecordOf<TraceAiCore>(RoundChip(), 1, kernel);
}

inline const GmTensor kIn = TensorOf(0, DType::kF32, 64, 64), kOut = TensorOf(1, DType::kF32, 64, 64);
inline const GmTensor kHalf = TensorOf(2, DType::kBF16, 256, 256);
inline Gm Piece(const GmTensor& t, Range rows, Range cols = {0, 64}) { return MatrixOf(t).Block(rows, cols); }

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_SYNC_HAND_PLAN_H_
