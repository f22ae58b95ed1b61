#include "npu_model/sync/alike.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>

#include "npu_model/parallel.h"
#include "npu_model/sync/ordered.h"
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

// But for operands and the bytes of GM. Sizes count where they tell whether a Mmad is over when the next one begins.
bool SameWork(const Instr& x, const Instr& y) {
  return x.op == y.op && x.pipe == y.pipe && x.lane == y.lane && x.line == y.line &&
         (x.pipe != Pipe::kM || std::ranges::equal(x.dims, y.dims)) && (x.access < 0) == (y.access < 0);
}

// Where a core's operands lie among the bounds of all that it writes. The planner asks whether one area meets or covers
// another of which one is written, and of what has been read, only for the last of each pipe that meets what is written
// next: of operands with the same places among the bounds it learns the same.
class Places {
 public:
  struct Place {
    std::int32_t slot = 0;
    std::uint64_t rows = 0, cols = 0;  // begin and end

    friend bool operator==(const Place&, const Place&) = default;
  };

  Places() = default;
  Places(const CoreRecord& core, const ChipSpec& chip) : places_(2 * core.operands.size()) {
    constexpr std::uint8_t kRead = 1, kWritten = 2;
    std::vector<std::uint8_t> uses(places_.size());
    for (const Instr& instr : core.instrs) {
      for (const trace::OperandUse use : instr.uses) {
        if (!use.used()) continue;
        std::uint8_t& of = uses[At(instr, use)];
        of = static_cast<std::uint8_t>(of | (use.writes() ? kWritten : kRead));
      }
    }
    std::vector<std::int64_t> rows, cols;
    const auto area_at = [&](std::size_t at) {
      return AreaOf(core, chip, core.operands[at / 2], /*pads=*/at % 2 == 1);
    };
    for (std::size_t at = 0; at < places_.size(); ++at) {
      if ((uses[at] & kWritten) == 0) continue;
      const std::int32_t slot = core.operands[at / 2].slot;
      const Area area = area_at(at);
      for (const std::int64_t bound : {area.row_begin, area.row_end}) rows.push_back(Bound(slot, bound));
      for (const std::int64_t bound : {area.col_begin, area.col_end}) cols.push_back(Bound(slot, bound));
    }
    Ascending row_bounds(std::move(rows)), col_bounds(std::move(cols));
    for (std::size_t at = 0; at < places_.size(); ++at) {
      if (uses[at] == 0) continue;
      const std::int32_t slot = core.operands[at / 2].slot;
      const Area area = area_at(at);
      const auto both = [&](Ascending& bounds, std::int64_t begin, std::int64_t end) {
        const std::uint64_t place = bounds.PlaceOf(Bound(slot, begin));
        return place << 32 | bounds.PlaceOf(Bound(slot, end));
      };
      places_[at] = {slot, both(row_bounds, area.row_begin, area.row_end),
                     both(col_bounds, area.col_begin, area.col_end)};
    }
  }

  const Place& Of(const Instr& instr, trace::OperandUse use) const { return places_[At(instr, use)]; }

 private:
  static std::size_t At(const Instr& instr, trace::OperandUse use) {
    return 2 * std::size_t{use.operand()} + (Pads(instr, use) ? 1 : 0);
  }
  static std::int64_t Bound(std::int32_t slot, std::int64_t at) { return (std::int64_t{slot} << 32) + at; }

  std::vector<Place> places_;  // by operand: as it is, and as a move writes it
};

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

// Whether they have the same slots, and say the same by the number of a line.
bool SameNames(const CoreRecord& x, const CoreRecord& y) {
  return x.instrs.size() == y.instrs.size() && x.workspace.size() == y.workspace.size() &&
         std::equal(x.slots.begin(), x.slots.end(), y.slots.begin(), y.slots.end(), SamePlace) &&
         std::equal(x.lines.begin(), x.lines.end(), y.lines.begin(), y.lines.end(), SameText);
}

// Of cores whose operands are the same, number by number.
bool AlikeInBytes(const CoreRecord& x, const CoreRecord& y, const std::vector<char>& shared) {
  const auto same = [](const Instr& a, const Instr& b) {
    return SameWork(a, b) && a.uses == b.uses && a.access == b.access;
  };
  return trace::SameBytes(x.operands, y.operands) && SameNames(x, y) && AllSame(x.instrs, y.instrs, same) &&
         std::ranges::equal(x.accesses, y.accesses, SameGm(shared));
}

bool AlikeInPlaces(const CoreRecord& x, const Places& of_x, const CoreRecord& y, const Places& of_y,
                   const std::vector<char>& shared) {
  const auto same = [&](const Instr& a, const Instr& b) {
    if (!SameWork(a, b) || a.access != b.access) return false;
    for (std::size_t u = 0; u < a.uses.size(); ++u) {
      const trace::OperandUse p = a.uses[u], q = b.uses[u];
      if (p.used() != q.used() || p.writes() != q.writes()) return false;
      if (p.used() && of_x.Of(a, p) != of_y.Of(b, q)) return false;
    }
    return true;
  };
  return SameNames(x, y) && std::ranges::equal(x.instrs, y.instrs, same) &&
         std::ranges::equal(x.accesses, y.accesses, SameGm(shared));
}

// Of much of what AlikeInPlaces compares, so that few cores of one digest differ.
std::uint64_t DigestOf(const CoreRecord& core, const Places& places) {
  constexpr std::size_t kApart = 4;  // Most that differ do so in many instructions.
  std::uint64_t digest = core.instrs.size();
  const auto add = [&](std::uint64_t bits) {
    digest = (digest ^ bits) * 0x9e3779b97f4a7c15u;
    digest ^= digest >> 32;
  };
  for (std::size_t i = 0; i < core.instrs.size(); i += kApart) {
    const Instr& instr = core.instrs[i];
    add(instr.line);
    for (const trace::OperandUse use : instr.uses) {
      if (!use.used()) continue;
      const Places::Place& place = places.Of(instr, use);
      add(place.rows ^ place.cols << 16 ^ static_cast<std::uint64_t>(place.slot));
    }
  }
  return digest;
}

}  // namespace

std::vector<std::size_t> FirstAlike(const trace::Phase& phase, const ChipSpec& chip,
                                    const std::vector<std::vector<char>>& in_order) {
  const std::size_t cores = phase.cores.size();
  std::vector<std::size_t> first(cores);
  // Cores of one length are compared with the first of them: many kernels have one kind of cores, or two.
  ForEach(cores, [&](std::size_t c) {
    const std::size_t length = phase.cores[c].instrs.size();
    std::size_t candidate = 0;
    while (phase.cores[candidate].instrs.size() != length) ++candidate;
    const bool alike = candidate != c && in_order[candidate] == in_order[c] &&
                       AlikeInBytes(phase.cores[candidate], phase.cores[c], in_order[c]);
    first[c] = alike ? candidate : c;
  });
  // What differs from it, with those of its digest, which is no proof.
  std::vector<Places> places(cores);
  std::vector<std::uint64_t> digests(cores);
  ForEach(cores, [&](std::size_t c) {
    if (first[c] != c) return;
    places[c] = Places(phase.cores[c], chip);
    digests[c] = DigestOf(phase.cores[c], places[c]);
  });
  const std::vector<std::size_t> own = first;
  ForEach(cores, [&](std::size_t c) {
    if (own[c] != c) return;
    const auto is_alike = [&](std::size_t candidate) {
      return own[candidate] == candidate && digests[candidate] == digests[c] &&
             in_order[candidate] == in_order[c] &&
             AlikeInPlaces(phase.cores[candidate], places[candidate], phase.cores[c], places[c], in_order[c]);
    };
    std::size_t candidate = 0;
    while (candidate < c && !is_alike(candidate)) ++candidate;
    first[c] = candidate;
  });
  return first;
}

}  // namespace cubist::sync
