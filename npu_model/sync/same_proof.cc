#include "npu_model/sync/same_proof.h"

#include <algorithm>
#include <cstdint>
#include <optional>

#include "npu_model/parallel.h"
#include "npu_model/sync/bytes.h"

namespace cubist::sync {
namespace {

using trace::CoreRecord;
using trace::GmAccess;
using trace::SlotInfo;

bool SameBytes(const SlotInfo& x, const SlotInfo& y) {
  return x.buffer == y.buffer && x.dtype == y.dtype && x.lane == y.lane && x.rows == y.rows &&
         x.cols == y.cols && x.address == y.address && x.bytes == y.bytes;
}

// What an instruction computes and what it is called do not matter.
bool SameUse(const trace::Instr& x, const trace::Instr& y) {
  return x.pipe == y.pipe && x.lane == y.lane && x.uses == y.uses && x.access == y.access &&
         x.accumulates == y.accumulates && (x.pipe != Pipe::kM || std::ranges::equal(x.dims, y.dims));
}

bool SameBytes(const std::vector<GmAccess>& xs, const std::vector<GmAccess>& ys,
               const std::vector<char>& in_order) {
  std::vector<std::optional<std::int64_t>> apart(in_order.size());
  return std::ranges::equal(xs, ys, [&](const GmAccess& x, const GmAccess& y) {
    if (x.tensor != y.tensor || x.writes != y.writes) return false;
    if (x.tensor < 0 || in_order[static_cast<std::size_t>(x.tensor)] == 0) return true;
    std::optional<std::int64_t>& distance = apart[static_cast<std::size_t>(x.tensor)];
    if (!distance.has_value()) distance = y.offset - x.offset;
    return y.offset - x.offset == *distance && x.rows == y.rows && x.row_stride == y.row_stride &&
           x.bursts == y.bursts && x.burst_stride == y.burst_stride && x.burst_bytes == y.burst_bytes;
  });
}

bool SameSlots(const std::vector<SlotInfo>& xs, const std::vector<SlotInfo>& ys) {
  return std::ranges::equal(xs, ys, [](const SlotInfo& x, const SlotInfo& y) { return SameBytes(x, y); });
}

// Of much of what is compared, so that few cores of one digest differ; no proof.
std::uint64_t DigestOf(const CoreRecord& core, const CorePlan& plan) {
  std::uint64_t digest = core.instrs.size() << 32 ^ plan.ops.size();
  const auto add = [&](std::uint64_t bits) {
    digest = (digest ^ bits) * 0x9e3779b97f4a7c15u;
    digest ^= digest >> 32;
  };
  for (const trace::Instr& instr : core.instrs)
    add(instr.uses[0].bits ^ std::uint64_t{instr.uses[1].bits} << 32);
  for (const trace::Operand& o : core.operands)
    add(static_cast<std::uint64_t>(o.col_begin) << 32 ^ static_cast<std::uint64_t>(o.row_begin) << 16 ^
        static_cast<std::uint64_t>(o.slot));
  return digest;
}

}  // namespace

std::vector<std::size_t> FirstWithProof(const trace::Phase& phase, const std::vector<const CorePlan*>& plans,
                                        const std::vector<Tensors>& written_twice, const GmState& gm,
                                        std::vector<GmWatch>* watches) {
  std::vector<std::size_t> first(phase.cores.size()), kinds;
  std::vector<std::uint64_t> digests(phase.cores.size());
  ForEach(first.size(), [&](std::size_t c) { digests[c] = DigestOf(phase.cores[c], *plans[c]); });
  watches->resize(phase.cores.size());
  for (std::size_t c = 0; c < phase.cores.size(); ++c) {
    const CoreRecord& y = phase.cores[c];
    const auto is_like = [&](std::size_t k) {
      const CoreRecord& x = phase.cores[k];
      return digests[k] == digests[c] && written_twice[k] == written_twice[c] && x.operands == y.operands &&
             std::ranges::equal(x.instrs, y.instrs, SameUse) && SameSlots(x.slots, y.slots) &&
             SameSlots(x.workspace, y.workspace) &&
             SameBytes(x.accesses, y.accesses, (*watches)[k].in_order) && plans[k]->ops == plans[c]->ops;
    };
    const auto like = std::find_if(kinds.begin(), kinds.end(), is_like);
    first[c] = like == kinds.end() ? c : *like;
    if (like != kinds.end()) continue;
    kinds.push_back(c);
    (*watches)[c] = WatchOf(y, written_twice[c], gm);
  }
  return first;
}

bool HoldsReads(const CoreRecord& core, const std::vector<char>& of_tensors, const GmState& gm) {
  if (std::find(of_tensors.begin(), of_tensors.end(), 1) == of_tensors.end()) return true;
  bool holds = true;
  for (const trace::Instr& instr : core.instrs) {
    if (instr.access < 0) continue;
    const GmAccess& access = core.accesses[static_cast<std::size_t>(instr.access)];
    if (access.tensor < 0 || (access.writes && !instr.accumulates)) continue;
    const auto tensor = static_cast<std::size_t>(access.tensor);
    if (of_tensors[tensor] == 0) continue;
    ForEachByteRange(
        access, [&](std::int64_t begin, std::int64_t end) { holds = holds && gm.Holds(tensor, begin, end); });
  }
  return holds;
}

}  // namespace cubist::sync
