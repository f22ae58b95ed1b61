#include "npu_model/sync/shared_gm.h"

#include <algorithm>
#include <utility>

#include "npu_model/sync/agents.h"
#include "npu_model/sync/ordered.h"

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

  std::vector<Tensors> Find(Findings& findings) {
    const auto& cores = record_.phases[phase_].cores;
    FindCandidates();
    written_twice_.resize(cores.size());
    for (std::uint32_t c = 0; c < cores.size(); ++c) Collect(cores[c], c);
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      auto& [reads, writes] = touched_[t];
      SortBy(writes, [](const CoreBytes& w) { return w.begin; });
      std::vector<CoreBytes> disjoint;
      disjoint.reserve(writes.size());
      for (CoreBytes w : writes) {
        if (!disjoint.empty() && disjoint.back().end > w.begin) {
          CoreBytes& last = disjoint.back();
          if (last.core != w.core) {
            Add(findings, t, last, w);
          } else {
            Tensors& twice = written_twice_[w.core];
            if (twice.empty() || twice.back() != t) twice.push_back(t);
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
    return std::move(written_twice_);
  }

 private:
  struct Seen {
    std::int64_t core = -1;
    bool by_several = false, written = false;
    std::size_t writes = 0;  // ranges
  };
  struct Touched {
    std::vector<CoreBytes> reads, writes;
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
        if (gm.writes) seen.writes += static_cast<std::size_t>(gm.rows * gm.bursts);
      }
    }
    touched_.resize(tensors_.size());
    for (std::size_t t = 0; t < tensors_.size(); ++t) touched_[t].writes.reserve(tensors_[t].writes);
  }

  void Collect(const CoreRecord& from, std::uint32_t core) {
    for (std::uint32_t i = 0; i < from.instrs.size(); ++i) {
      if (from.instrs[i].access < 0) continue;
      const GmAccess& gm = from.accesses[static_cast<std::size_t>(from.instrs[i].access)];
      if (gm.tensor < 0) continue;
      const Seen& seen = tensors_[static_cast<std::size_t>(gm.tensor)];
      if (!seen.written || (!gm.writes && !seen.by_several)) continue;
      Touched& touched = touched_[static_cast<std::size_t>(gm.tensor)];
      auto& to = gm.writes ? touched.writes : touched.reads;
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
  std::vector<Touched> touched_;  // of those that are written
  std::vector<Tensors> written_twice_;
};

}  // namespace

std::vector<Tensors> FindSharedGm(const Record& record, std::size_t phase, Findings& findings) {
  return SharedGm(record, phase).Find(findings);
}

GmWatch WatchOf(const CoreRecord& core, const Tensors& written_twice, const GmState& gm) {
  struct Seen {
    std::uint64_t agents = 0;
    bool reads = false, writes = false, updates = false;
  };
  std::vector<Seen> seen;
  for (const trace::Instr& instr : core.instrs) {
    if (instr.access < 0) continue;
    const GmAccess& access = core.accesses[static_cast<std::size_t>(instr.access)];
    if (access.tensor < 0) continue;
    const auto tensor = static_cast<std::size_t>(access.tensor);
    if (seen.size() <= tensor) seen.resize(tensor + 1);
    seen[tensor].agents |= std::uint64_t{1} << AgentAt(instr.pipe, instr.lane);
    (access.writes ? seen[tensor].writes : seen[tensor].reads) = true;
    seen[tensor].updates |= access.writes && instr.accumulates;
  }
  GmWatch watch;
  for (std::size_t t = 0; t < seen.size(); ++t) {
    const bool shared = seen[t].writes && (seen[t].agents & (seen[t].agents - 1)) != 0;
    // A tensor without values of its own is watched for reads of what nobody wrote; a store that adds is such a read.
    const bool updated = seen[t].updates && !gm.IsInput(t);
    watch.in_order.push_back(shared || updated);
    watch.held.push_back(!gm.IsInput(t) && seen[t].reads);
  }
  for (const std::size_t t : written_twice) watch.in_order[t] = 1;
  return watch;
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
