#include "npu_model/sync/alike.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>

#include "npu_model/parallel.h"
#include "npu_model/sync/touches.h"

namespace cubist::sync {
namespace {

using trace::CoreRecord;
using trace::GmAccess;
using trace::Instr;
using trace::SlotInfo;

bool SamePlace(const SlotInfo& x, const SlotInfo& y) { return x.buffer == y.buffer && x.dtype == y.dtype; }

bool SameText(const trace::SourceLine& x, const trace::SourceLine& y) {
  return x.file == y.file && x.line == y.line;
}

// But for the bytes of GM.
bool SameWork(const Instr& x, const Instr& y) {
  const auto same_use = [](trace::OperandUse a, trace::OperandUse b) { return a.bits == b.bits; };
  return x.op == y.op && x.pipe == y.pipe && x.lane == y.lane && x.line == y.line &&
         std::equal(std::begin(x.dims), std::end(x.dims), std::begin(y.dims)) &&
         (x.access < 0) == (y.access < 0) &&
         std::equal(x.uses.begin(), x.uses.end(), y.uses.begin(), same_use);
}

// Of tensors whose bytes make a core wait for itself, what counts is how its accesses meet, so two cores may stand at
// a constant distance from each other. Of other tensors it does not matter where.
class SameGm {
 public:
  explicit SameGm(const std::vector<char>& shared) : shared_(shared), apart_(shared.size()) {}

  bool operator()(const GmAccess& x, const GmAccess& y) {
    if (x.tensor != y.tensor || x.writes != y.writes) return false;
    if (x.tensor < 0) return true;  // A hand-over slot: an operand says which.
    const auto tensor = static_cast<std::size_t>(x.tensor);
    if (shared_[tensor] == 0) return true;
    std::optional<std::int64_t>& apart = apart_[tensor];
    if (!apart.has_value()) apart = y.offset - x.offset;
    return y.offset - x.offset == *apart && x.rows == y.rows && x.row_stride == y.row_stride &&
           x.bursts == y.bursts && x.burst_stride == y.burst_stride && x.burst_bytes == y.burst_bytes;
  }

 private:
  const std::vector<char>& shared_;
  std::vector<std::optional<std::int64_t>> apart_;
};

bool Alike(const CoreRecord& x, const CoreRecord& y, const std::vector<char>& shared) {
  if (x.instrs.size() != y.instrs.size() || x.operands != y.operands ||
      x.workspace.size() != y.workspace.size() ||
      !std::equal(x.slots.begin(), x.slots.end(), y.slots.begin(), y.slots.end(), SamePlace) ||
      !std::equal(x.lines.begin(), x.lines.end(), y.lines.begin(), y.lines.end(), SameText)) {
    return false;
  }
  SameGm same_gm(shared);
  for (std::size_t i = 0; i < x.instrs.size(); ++i) {
    const Instr &a = x.instrs[i], &b = y.instrs[i];
    if (!SameWork(a, b)) return false;
    if (a.access >= 0 && !same_gm(x.accesses[static_cast<std::size_t>(a.access)],
                                  y.accesses[static_cast<std::size_t>(b.access)])) {
      return false;
    }
  }
  return true;
}

// Of much of what Alike compares, so that few cores of one digest differ.
std::uint64_t DigestOf(const CoreRecord& core) {
  std::uint64_t digest = core.instrs.size();
  const auto add = [&](std::uint64_t bits) {
    digest = (digest ^ bits) * 0x9e3779b97f4a7c15u;
    digest ^= digest >> 32;
  };
  for (const Instr& instr : core.instrs) {
    add(std::uint64_t{instr.line} << 32 | static_cast<std::uint32_t>(instr.dims[0]));
    for (const trace::OperandUse use : instr.uses) add(use.bits);
  }
  return digest;
}

}  // namespace

std::vector<std::size_t> FirstAlike(const trace::Phase& phase, const ChipSpec& chip) {
  const std::size_t cores = phase.cores.size();
  std::vector<std::size_t> first(cores);
  std::vector<std::vector<char>> shared(cores);
  ForEach(cores, [&](std::size_t c) { shared[c] = TensorsInOrder(phase.cores[c], chip); });
  const auto alike = [&](std::size_t x, std::size_t y) {
    return shared[x] == shared[y] && Alike(phase.cores[x], phase.cores[y], shared[x]);
  };
  // Cores of one length are compared with the first of them: many kernels have one kind of cores, or two.
  ForEach(cores, [&](std::size_t c) {
    const std::size_t length = phase.cores[c].instrs.size();
    std::size_t candidate = 0;
    while (phase.cores[candidate].instrs.size() != length) ++candidate;
    first[c] = candidate == c || alike(candidate, c) ? candidate : c;
  });
  // What differs from it, with the first of its digest, which is no proof.
  std::vector<std::uint64_t> digests(cores);
  ForEach(cores, [&](std::size_t c) {
    if (first[c] == c) digests[c] = DigestOf(phase.cores[c]);
  });
  const std::vector<std::size_t> own = first;
  ForEach(cores, [&](std::size_t c) {
    if (own[c] != c) return;
    std::size_t candidate = 0;
    while (own[candidate] != candidate || digests[candidate] != digests[c]) ++candidate;
    if (candidate != c && alike(candidate, c)) first[c] = candidate;
  });
  return first;
}

}  // namespace cubist::sync
