#include "tools/analysis.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <map>
#include <span>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "npu_model/trace/dependencies.h"

namespace cubist {
namespace {

using trace::CoreRecord;
using trace::Instr;

struct Span {
  double start = 0, end = 0;  // us
};

// What an instruction's time on the critical path is put down to.
std::string CauseOf(const Instr& instr) {
  switch (instr.pipe) {
    case Pipe::kM:
      return "Cube multiplies (M)";
    case Pipe::kMte1:
      return "L1 to L0 (MTE1)";
    case Pipe::kMte2:
      return instr.lane < 0 ? "loads to L1 (MTE2)" : "loads to UB (MTE2)";
    case Pipe::kMte3:
      return "stores (MTE3)";
    case Pipe::kFix:
      return "stores of L0C (FIX)";
    case Pipe::kV:
      return "Vector arithmetic (V)";
    default:
      return "scalar unit (S)";
  }
}

// When the instructions of the core ran that ends last in a phase.
class PhaseTimes {
 public:
  // `slices` are those of the phase.
  PhaseTimes(const trace::Record& record, const trace::Phase& phase, std::span<const TimelineSlice> slices) {
    const auto core_of = [&](const TimelineSlice& slice) {
      const int per_cube = record.chip.vector_per_cube;
      return static_cast<std::size_t>(phase.vector_only ? slice.core * per_cube + slice.lane : slice.core);
    };
    for (const TimelineSlice& slice : slices) {
      if (slice.end_us > end_) end_ = slice.end_us, last_ = core_of(slice);
    }
    if (phase.cores.empty()) return;
    spans_.resize(phase.cores[last_].instrs.size());
    for (const TimelineSlice& slice : slices) {
      if (core_of(slice) == last_) spans_[slice.instr] = {slice.start_us, slice.end_us};
    }
  }

  const std::vector<Span>& spans() const { return spans_; }
  double end() const { return end_; }
  std::size_t core() const { return last_; }

 private:
  std::vector<Span> spans_;
  double end_ = 0;
  std::size_t last_ = 0;
};

// Walks back over one core.
class CriticalPath {
 public:
  CriticalPath(const CoreRecord& record, const std::vector<Span>& times)
      : record_(&record), times_(&times), dependencies_(record), before_(record.instrs.size(), kNone) {
    std::array<std::uint32_t, trace::kMaxAgents> last{};
    last.fill(kNone);
    for (std::uint32_t i = 0; i < record.instrs.size(); ++i) {
      auto& previous = last[static_cast<std::size_t>(AgentOf(i))];
      before_[i] = previous;
      previous = i;
    }
  }

  // Calls on_instr(i, us) and on_gap(cause, us) for what lies between `from` and the end of the core.
  template <class OnInstr, class OnGap>
  void Walk(double from, OnInstr on_instr, OnGap on_gap) const {
    std::uint32_t at = kNone;
    double now = from;
    for (std::uint32_t i = 0; i < times_->size(); ++i) {
      if ((*times_)[i].end > now) now = (*times_)[i].end, at = i;
    }
    while (at != kNone && now > from) {
      const Span& span = (*times_)[at];
      const double start = std::clamp(span.start, from, now);
      on_instr(at, now - start);
      now = start;
      const std::uint32_t before = Before(at);
      const double ended = before == kNone ? from : std::clamp((*times_)[before].end, from, now);
      if (now > ended) on_gap(GapCause(at, before), now - ended);
      now = ended;
      at = before;
    }
  }

 private:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  int AgentOf(std::uint32_t i) const {
    return trace::AgentOf(record_->instrs[i].pipe, record_->instrs[i].lane);
  }

  // Of those that an instruction had to wait for, the one that ended last; always an earlier one.
  std::uint32_t Before(std::uint32_t i) const {
    std::uint32_t latest = before_[i];
    for (const trace::Dependency& d : dependencies_.Of(i)) {
      if (latest == kNone || (*times_)[d.instr].end > (*times_)[latest].end) latest = d.instr;
    }
    return latest;
  }

  const char* GapCause(std::uint32_t i, std::uint32_t before) const {
    if (record_->instrs[i].access >= 0) return "startups of transfers, flags and issue";
    if (before == kNone) return "issue";
    const int agent = AgentOf(i), other = AgentOf(before);
    if (agent == other) return "issue";
    return trace::IssuerOf(agent) == trace::IssuerOf(other) ? "flags between pipes"
                                                            : "flags between Cube and Vector cores";
  }

  const CoreRecord* record_;
  const std::vector<Span>* times_;
  trace::Dependencies dependencies_;
  std::vector<std::uint32_t> before_;  // on the same pipe
};

// A slot holds something from the start of the write that began it to the end of the last read or write before the next.
std::vector<Analysis::Occupancy> OccupancyOf(const ChipSpec& chip, const CoreRecord& record,
                                             const std::vector<Span>& times) {
  struct Life {
    double begin = -1, end = -1;
    bool read = false;
  };
  std::vector<Life> lives(record.slots.size());
  std::array<std::map<double, std::int64_t>, kBufferCount> changes;
  const auto close = [&](std::size_t slot) {
    const trace::SlotInfo& info = record.slots[slot];
    if (lives[slot].begin < 0 || info.lane > 0) return;
    auto& events = changes[static_cast<std::size_t>(info.buffer)];
    events[lives[slot].begin] += info.bytes;
    events[lives[slot].end] -= info.bytes;
  };
  for (std::size_t i = 0; i < record.instrs.size(); ++i) {
    for (const bool writes : {false, true}) {
      for (const trace::OperandUse use : record.instrs[i].uses) {
        if (!use.used() || use.writes() != writes) continue;
        const std::int32_t number = record.operands[use.operand()].slot;
        if (number < 0) continue;
        Life& life = lives[static_cast<std::size_t>(number)];
        if (writes && (life.begin < 0 || (life.read && times[i].start >= life.end))) {
          close(static_cast<std::size_t>(number));
          life = {times[i].start, times[i].end, false};
        }
        life.end = std::max(life.end, times[i].end);
        life.read = life.read || !writes;
      }
    }
  }
  for (std::size_t slot = 0; slot < lives.size(); ++slot) close(slot);

  std::vector<Analysis::Occupancy> all;
  for (int b = 0; b < kBufferCount; ++b) {
    const auto& events = changes[static_cast<std::size_t>(b)];
    if (events.empty()) continue;
    const auto buffer = static_cast<Buffer>(b);
    Analysis::Occupancy occupancy{NameOf(buffer), chip.buffer(buffer).capacity, 0, {}};
    // At most so many points: of those between two the fullest.
    constexpr std::size_t kPoints = 400;
    const double begin = events.begin()->first, end = events.rbegin()->first;
    const double step = (end - begin) / static_cast<double>(kPoints);
    std::int64_t bytes = 0, fullest = 0;
    double next = begin;
    for (const auto& [time, change] : events) {
      if (time >= next) {
        if (time > begin) occupancy.bytes.emplace_back(std::max(next - step, begin), fullest);
        next = time + step;
        fullest = bytes;
      }
      bytes += change;
      fullest = std::max(fullest, bytes);
      occupancy.most = std::max(occupancy.most, bytes);
    }
    occupancy.bytes.emplace_back(std::max(next - step, begin), fullest);
    occupancy.bytes.emplace_back(end, 0);
    all.push_back(std::move(occupancy));
  }
  return all;
}

Analysis::Roofline RooflineOf(const ChipSpec& chip, const Profile& p, double operations, double peak_per_s) {
  Analysis::Roofline r;
  r.operations = operations, r.peak_per_s = peak_per_s;
  r.bytes = p.hbm_bytes, r.peak_bytes_per_s = chip.memory.hbm_bytes_per_s;
  if (p.time_s <= 0) return r;
  r.attained_per_s = r.operations / p.time_s;
  r.attained_bytes_per_s = r.bytes / p.time_s;
  r.share = std::max(r.attained_per_s / r.peak_per_s, r.attained_bytes_per_s / r.peak_bytes_per_s);
  return r;
}

// A step of every Cube, two operations for each pair of 16-bit elements, per cycle.
double CubePeak(const ChipSpec& chip) {
  const auto step = static_cast<double>(chip.mmad.m_step * chip.mmad.n_step * chip.mmad.k_bytes);
  return step / chip.mmad.narrow_passes * chip.clock_hz * chip.cube_cores;
}

double VectorPeak(const ChipSpec& chip) {
  const auto lanes = static_cast<double>(chip.vector.repeat_bytes) / 4;
  return lanes * chip.clock_hz * chip.cube_cores * chip.vector_per_cube;
}

// Elements of the instructions on pipe V.
double VectorOperations(const trace::Record& record) {
  double operations = 0;
  for (const trace::Phase& phase : record.phases) {
    for (const CoreRecord& core : phase.cores) {
      for (const Instr& instr : core.instrs) {
        if (instr.pipe == Pipe::kV) operations += static_cast<double>(instr.dims[0]) * instr.dims[1];
      }
    }
  }
  return operations;
}

std::vector<Analysis::PipeShare> PipesOf(const Profile& p) {
  std::vector<Analysis::PipeShare> pipes;
  for (const bool cube : {true, false}) {
    for (std::size_t i = 0; i < kPipeCount; ++i) {
      const double busy = cube ? p.busy[i].cube_side : p.busy[i].vector_side;
      const double waiting = cube ? p.waiting[i].cube_side : p.waiting[i].vector_side;
      if (busy + waiting <= 0) continue;
      pipes.push_back({cube ? "Cube" : "Vector", NameOf(static_cast<Pipe>(i)), busy, waiting,
                       std::max(0.0, 1 - busy - waiting)});
    }
  }
  return pipes;
}

// By file, line, instruction and pipe. The texts are those of the build: equal pointers, equal texts.
using LineKey = std::tuple<const char*, std::uint32_t, const char*, Pipe>;
struct HashOfLine {
  std::size_t operator()(const LineKey& key) const {
    const auto& [file, line, what, pipe] = key;
    constexpr std::size_t kMany = 0x9e3779b97f4a7c15;
    return (reinterpret_cast<std::size_t>(what) ^ (std::size_t{line} << 32) ^
            reinterpret_cast<std::size_t>(file) ^ static_cast<std::size_t>(pipe)) *
               kMany >>
           16;
  }
};
using LineCosts = std::unordered_map<LineKey, Analysis::LineCost, HashOfLine>;

LineCosts CostsOf(const Profile& profile) {
  LineCosts lines;
  const double cores = std::max(profile.cores_used, 1);
  for (const TimelineSlice& slice : *profile.timeline) {
    Analysis::LineCost& cost = lines[{slice.file, slice.line, slice.name, slice.pipe}];
    ++cost.count;
    cost.bytes += slice.bytes;
    cost.busy_us += (slice.end_us - slice.start_us) / cores;
  }
  return lines;
}

// The slices of a phase: a timeline has them phase by phase.
std::span<const TimelineSlice> SlicesOf(const Profile& profile, std::size_t phase) {
  const std::vector<TimelineSlice>& all = *profile.timeline;
  const auto begin = std::partition_point(all.begin(), all.end(),
                                          [&](const TimelineSlice& slice) { return slice.phase < phase; });
  const auto end = std::partition_point(begin, all.end(),
                                        [&](const TimelineSlice& slice) { return slice.phase == phase; });
  return {begin, end};
}

}  // namespace

Analysis Analyse(const ChipSpec& chip, const trace::Record& record, const Profile& profile) {
  Analysis analysis;
  analysis.pipes = PipesOf(profile);
  analysis.roofline = RooflineOf(chip, profile, 2 * static_cast<double>(profile.macs), CubePeak(chip));
  const double of_vector = profile.launches > 1 ? 0 : VectorOperations(record);
  analysis.vector_roofline = RooflineOf(chip, profile, of_vector, VectorPeak(chip));
  if (profile.timeline == nullptr || profile.launches > 1) return analysis;

  LineCosts lines = CostsOf(profile);
  std::map<std::string, double> causes;
  double on_path = 0, longest = -1;
  double phase_begin = trace::LaunchSeconds(record, chip) * 1e6;
  for (std::size_t p = 0; p < record.phases.size(); ++p) {
    const PhaseTimes times(record, record.phases[p], SlicesOf(profile, p));
    if (p > 0) phase_begin += chip.sync.barrier_s * 1e6;
    if (times.end() <= 0) continue;
    const CoreRecord& core = record.phases[p].cores[times.core()];
    const std::vector<Span>& spans = times.spans();
    const CriticalPath path(core, spans);
    path.Walk(
        phase_begin,
        [&](std::uint32_t i, double us) {
          const Instr& instr = core.instrs[i];
          const trace::SourceLine& line = core.lines[instr.line];
          causes[CauseOf(instr)] += us;
          lines[{line.file, line.line, trace::NameOf(instr.op), instr.pipe}].critical_us += us;
          on_path += us;
        },
        [&](const char* cause, double us) {
          causes[cause] += us;
          on_path += us;
        });
    if (times.end() - phase_begin > longest) {
      longest = times.end() - phase_begin;
      analysis.critical_core = static_cast<int>(times.core());
      analysis.critical_phase = static_cast<int>(p);
      analysis.occupancy = OccupancyOf(chip, core, spans);
    }
    phase_begin = times.end();
  }
  const double rest = profile.time_s * 1e6 - on_path;
  if (rest > 0) causes["launch and barriers"] += rest;
  for (const auto& [name, us] : causes) analysis.critical_path.push_back({name, us});
  std::stable_sort(analysis.critical_path.begin(), analysis.critical_path.end(),
                   [](const auto& a, const auto& b) { return a.us > b.us; });
  for (auto& [key, cost] : lines) {
    const auto& [file, line, what, pipe] = key;
    const auto same = [&, f = file, l = line, w = what, p = pipe](const Analysis::LineCost& other) {
      return other.line == l && other.file == f && other.what == w && other.pipe == NameOf(p);
    };
    // A header's text may stand in more than one object file.
    auto known = std::find_if(analysis.lines.begin(), analysis.lines.end(), same);
    if (known == analysis.lines.end()) {
      cost.file = file, cost.line = line, cost.what = what, cost.pipe = NameOf(pipe);
      analysis.lines.push_back(std::move(cost));
      continue;
    }
    known->count += cost.count, known->bytes += cost.bytes;
    known->busy_us += cost.busy_us, known->critical_us += cost.critical_us;
  }
  std::stable_sort(analysis.lines.begin(), analysis.lines.end(), [](const auto& a, const auto& b) {
    return std::tie(a.critical_us, a.busy_us, b.file, b.line, b.what, b.pipe) >
           std::tie(b.critical_us, b.busy_us, a.file, a.line, a.what, a.pipe);
  });
  return analysis;
}

}  // namespace cubist
