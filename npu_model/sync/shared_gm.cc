#include "npu_model/sync/shared_gm.h"

#include <algorithm>
#include <utility>

namespace cubist::sync {
namespace {

using trace::CoreRecord;
using trace::GmAccess;
using trace::Record;

// Bytes of GM that one core touches in a phase.
struct CoreBytes {
  std::int64_t begin, end;
  std::uint32_t core, instr;
};

// Cores of a phase share no bytes of GM that one of them writes.
class SharedGm {
 public:
  SharedGm(const Record& record, std::size_t phase) : record_(record), phase_(phase) {}

  void Find(Findings& findings) {
    const auto& cores = record_.phases[phase_].cores;
    FindCandidates();
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      const Seen& seen = tensors_[t];
      if (!seen.written || !seen.by_several) continue;
      std::vector<CoreBytes> reads, writes;
      for (std::uint32_t c = 0; c < cores.size(); ++c) Collect(cores[c], c, t, reads, writes);
      const auto by_begin = [](const CoreBytes& x, const CoreBytes& y) { return x.begin < y.begin; };
      std::sort(writes.begin(), writes.end(), by_begin);
      std::vector<CoreBytes> disjoint;
      for (CoreBytes w : writes) {
        if (!disjoint.empty() && disjoint.back().end > w.begin) {
          CoreBytes& last = disjoint.back();
          if (last.core != w.core) {
            Add(findings, t, last, w);
          } else {
            last.end = std::max(last.end, w.end);
            continue;
          }
          w.begin = last.end;
        }
        if (w.begin < w.end) disjoint.push_back(w);
      }
      for (const CoreBytes& r : reads) {
        auto at = std::partition_point(disjoint.begin(), disjoint.end(),
                                       [&](const CoreBytes& w) { return w.end <= r.begin; });
        for (; at != disjoint.end() && at->begin < r.end; ++at) {
          if (at->core != r.core) Add(findings, t, *at, r);
        }
      }
    }
  }

 private:
  struct Seen {
    std::int64_t core = -1;
    bool by_several = false, written = false;
  };

  void FindCandidates() {
    const auto& cores = record_.phases[phase_].cores;
    for (std::size_t c = 0; c < cores.size(); ++c) {
      for (const GmAccess& gm : cores[c].accesses) {
        if (gm.tensor < 0) continue;
        const auto tensor = static_cast<std::size_t>(gm.tensor);
        if (tensors_.size() <= tensor) tensors_.resize(tensor + 1);
        Seen& seen = tensors_[tensor];
        const auto core = static_cast<std::int64_t>(c);
        seen.by_several |= seen.core >= 0 && seen.core != core;
        seen.core = core;
        seen.written |= gm.writes;
      }
    }
  }

  static void Collect(const CoreRecord& from, std::uint32_t core, std::size_t tensor,
                      std::vector<CoreBytes>& reads, std::vector<CoreBytes>& writes) {
    for (std::uint32_t i = 0; i < from.instrs.size(); ++i) {
      if (from.instrs[i].access < 0) continue;
      const GmAccess& gm = from.accesses[static_cast<std::size_t>(from.instrs[i].access)];
      if (gm.tensor != static_cast<std::int32_t>(tensor)) continue;
      auto& to = gm.writes ? writes : reads;
      ForEachByteRange(gm, [&](std::int64_t begin, std::int64_t end) {
        to.push_back({begin, end, core, i});
      });
    }
  }

  void Add(Findings& findings, std::size_t tensor, const CoreBytes& x, const CoreBytes& y) const {
    Finding f;
    f.fault = Fault::kSharedGm;
    f.phase = phase_;
    f.core = x.core, f.other_core = y.core;
    f.first = PlaceOf(x), f.second = PlaceOf(y);
    f.memory = TensorName(record_, tensor);
    f.begin = std::max(x.begin, y.begin), f.end = std::min(x.end, y.end);
    f.cure = "give the bytes to one core, or to two phases";
    findings.Add(std::move(f));
  }
  Place PlaceOf(const CoreBytes& bytes) const {
    return PlaceOfInstr(record_.phases[phase_].cores[bytes.core], bytes.instr);
  }

  const Record& record_;
  std::size_t phase_;
  std::vector<Seen> tensors_;
};

}  // namespace

void FindSharedGm(const Record& record, std::size_t phase, Findings& findings) {
  SharedGm(record, phase).Find(findings);
}

std::vector<char> WatchedTensors(const Record& record, const GmState& gm) {
  std::vector<char> watched;
  for (const trace::Phase& phase : record.phases) {
    for (const CoreRecord& core : phase.cores) {
      for (const trace::Instr& instr : core.instrs) {
        if (instr.access < 0) continue;
        const GmAccess& access = core.accesses[static_cast<std::size_t>(instr.access)];
        if (access.tensor < 0 || (access.writes && !instr.accumulates)) continue;
        const auto tensor = static_cast<std::size_t>(access.tensor);
        if (watched.size() <= tensor) watched.resize(tensor + 1, 0);
        watched[tensor] = !gm.IsInput(tensor);
      }
    }
  }
  return watched;
}

void AddWritten(const trace::Phase& phase, const std::vector<char>& watched, GmState& gm) {
  gm.written.resize(watched.size());
  for (const CoreRecord& core : phase.cores) {
    for (const GmAccess& access : core.accesses) {
      const auto tensor = static_cast<std::size_t>(access.tensor);
      if (access.tensor < 0 || !access.writes || tensor >= watched.size() || !watched[tensor]) continue;
      ForEachByteRange(access,
                       [&](std::int64_t begin, std::int64_t end) { gm.written[tensor].Add(begin, end); });
    }
  }
  for (ByteSet& set : gm.written) set.Merge();
}

}  // namespace cubist::sync
