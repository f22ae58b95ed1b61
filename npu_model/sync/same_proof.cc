#include "npu_model/sync/same_proof.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>

#include "npu_model/parallel.h"
#include "npu_model/sync/bytes.h"
#include "npu_model/sync/ordered.h"

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
bool SamePart(const trace::Instr& x, const trace::Instr& y) {
  return x.pipe == y.pipe && x.lane == y.lane && x.accumulates == y.accumulates &&
         (x.pipe != Pipe::kM || std::ranges::equal(x.dims, y.dims));
}
bool SameUse(const trace::Instr& x, const trace::Instr& y) {
  return SamePart(x, y) && x.uses == y.uses && x.access == y.access;
}

// Of GM that is checked in order, the bytes at one distance; of other GM only who moves it.
class SameGm {
 public:
  explicit SameGm(const std::vector<char>& in_order) : in_order_(in_order), apart_(in_order.size()) {}

  bool operator()(const GmAccess& x, const GmAccess& y) {
    if (x.tensor != y.tensor || x.writes != y.writes) return false;
    if (x.tensor < 0 || in_order_[static_cast<std::size_t>(x.tensor)] == 0) return true;
    std::optional<std::int64_t>& distance = apart_[static_cast<std::size_t>(x.tensor)];
    if (!distance.has_value()) distance = y.offset - x.offset;
    return y.offset - x.offset == *distance && x.rows == y.rows && x.row_stride == y.row_stride &&
           x.bursts == y.bursts && x.burst_stride == y.burst_stride && x.burst_bytes == y.burst_bytes;
  }

 private:
  const std::vector<char>& in_order_;
  std::vector<std::optional<std::int64_t>> apart_;
};

bool SameSlots(const std::vector<SlotInfo>& xs, const std::vector<SlotInfo>& ys) {
  return std::ranges::equal(xs, ys, [](const SlotInfo& x, const SlotInfo& y) { return SameBytes(x, y); });
}

std::uint64_t Mix(std::uint64_t digest, std::uint64_t bits) {
  digest = (digest ^ bits) * 0x9e3779b97f4a7c15u;
  return digest ^ digest >> 32;
}

constexpr std::size_t kDigestStep = 4;  // instructions: most cores that differ do so in many

// Of much of what is compared, so that few cores of one digest differ; no proof.
std::uint64_t DigestOf(const CoreRecord& core, const CorePlan& plan) {
  std::uint64_t digest = core.instrs.size() << 32 ^ plan.ops.size();
  for (std::size_t i = 0; i < core.instrs.size(); i += kDigestStep) {
    const trace::Instr& instr = core.instrs[i];
    digest = Mix(digest, instr.uses[0].bits ^ std::uint64_t{instr.uses[1].bits} << 32);
  }
  for (const trace::Operand& o : core.operands) {
    digest =
        Mix(digest, static_cast<std::uint64_t>(o.col_begin) << 32 ^
                        static_cast<std::uint64_t>(o.row_begin) << 16 ^ static_cast<std::uint64_t>(o.slot));
  }
  return digest;
}

// Where operands lie among the edges of all that the core writes to their slots. Between these edges all bytes have the
// same writes; of the reads of such bytes, a write that follows has to come behind the last of each pipe, wherever it was.
// So operands with the same places have the same history, as long as slots share no bytes.
class Grid {
 public:
  Grid() = default;
  Grid(const CoreRecord& core, const ChipSpec& chip) : core_(&core), chip_(&chip) {
    apart_ = AreApart(core.slots, /*in_gm=*/false) && AreApart(core.workspace, /*in_gm=*/true);
    if (!apart_) return;
    FindEdges();
    places_.reserve(core.operands.size());
    for (const trace::Operand& o : core.operands) places_.push_back(PlaceOf(o));
    for (std::size_t i = 0; i < core.instrs.size(); i += kDigestStep) {
      const Instr& instr = core.instrs[i];
      digest_ = Mix(digest_, static_cast<std::uint64_t>(instr.pipe));
      for (const trace::OperandUse use : instr.uses) {
        if (use.used())
          digest_ = Mix(digest_, places_[use.operand()].rows ^ places_[use.operand()].cells << 16);
      }
    }
  }

  std::uint64_t digest() const { return digest_; }
  // Whether two cores with these grids, of the same slots, do the same in their places; same_gm(x's access, y's).
  template <class SameAccess>
  bool IsLike(const Grid& other, SameAccess&& same_gm) const {
    if (!apart_ || !other.apart_) return false;
    return std::ranges::equal(core_->instrs, other.core_->instrs, [&](const Instr& x, const Instr& y) {
      if (!SamePart(x, y) || (x.access < 0) != (y.access < 0)) return false;
      for (std::size_t u = 0; u < x.uses.size(); ++u) {
        if (!SamePlace(x, x.uses[u], other, y.uses[u])) return false;
      }
      return x.access < 0 || same_gm(core_->accesses[static_cast<std::size_t>(x.access)],
                                     other.core_->accesses[static_cast<std::size_t>(y.access)]);
    });
  }

 private:
  using Instr = trace::Instr;
  using Operand = trace::Operand;

  struct Place {
    std::int32_t slot = 0;
    std::uint64_t rows = 0, cells = 0;  // begin and end
    std::uint64_t pad = 0;              // where its last block ends
    std::int64_t lane = 0;              // where in its block it begins
  };

  // Slots of one buffer share no bytes, and those of UB begin at blocks.
  bool AreApart(const std::vector<SlotInfo>& slots, bool in_gm) const {
    struct Span {
      int buffer;
      std::int64_t begin, end;
    };
    std::vector<Span> spans;
    for (const SlotInfo& slot : slots) {
      if (slot.buffer == Buffer::kUB && slot.address % kBlockBytes != 0) return false;
      const Operand all{0, 0, static_cast<std::int32_t>(slot.rows), 0, static_cast<std::int32_t>(slot.cols)};
      const int buffer = in_gm ? 0 : static_cast<int>(slot.buffer) * (kMaxVectorPerCube + 1) + slot.lane + 1;
      ForEachByteRange(*chip_, slot, in_gm, all, [&](std::int64_t begin, std::int64_t end) {
        spans.push_back({buffer, begin, end});
      });
    }
    std::ranges::sort(spans, [](const Span& x, const Span& y) {
      return std::tie(x.buffer, x.begin) < std::tie(y.buffer, y.begin);
    });
    return std::ranges::adjacent_find(spans, [](const Span& x, const Span& y) {
             return x.buffer == y.buffer && y.begin < x.end;
           }) == spans.end();
  }

  const SlotInfo& SlotOf(const Operand& o) const {
    return o.slot < 0 ? core_->workspace[static_cast<std::size_t>(~o.slot)]
                      : core_->slots[static_cast<std::size_t>(o.slot)];
  }
  bool InUb(const Operand& o) const { return o.slot >= 0 && SlotOf(o).buffer == Buffer::kUB; }
  Cells Of(const Operand& o) const { return CellsOf(*chip_, SlotOf(o), o.slot < 0, o); }
  static std::int64_t Edge(const Operand& o, std::int64_t at) { return (std::int64_t{o.slot} << 32) + at; }
  static bool Pads(const Instr& instr, trace::OperandUse use) {
    return instr.pipe == Pipe::kMte2 && use.writes();
  }

  void FindEdges() {
    std::vector<std::int64_t> rows, bytes;
    constexpr std::uint8_t kWritten = 1, kPadded = 2;
    std::vector<std::uint8_t> uses(core_->operands.size());
    for (const Instr& instr : core_->instrs) {
      for (const trace::OperandUse use : instr.uses) {
        if (!use.used() || !use.writes()) continue;
        std::uint8_t& of = uses[use.operand()];
        of = static_cast<std::uint8_t>(of | (Pads(instr, use) ? kPadded : kWritten));
      }
    }
    for (std::size_t i = 0; i < uses.size(); ++i) {
      if (uses[i] == 0) continue;
      const Operand& o = core_->operands[i];
      const Cells cells = Of(o);
      for (const std::int64_t at : {cells.row_begin, cells.row_end}) rows.push_back(Edge(o, at));
      for (const std::int64_t at : {cells.begin, cells.end}) bytes.push_back(Edge(o, at));
      if ((uses[i] & kPadded) != 0 && InUb(o)) bytes.push_back(Edge(o, RoundUp(cells.end, kBlockBytes)));
    }
    rows_ = Ascending(std::move(rows)), cells_ = Ascending(std::move(bytes));
  }

  Place PlaceOf(const Operand& o) {
    const Cells cells = Of(o);
    const auto both = [&](Ascending& edges, std::int64_t begin, std::int64_t end) {
      const std::uint64_t place = edges.PlaceOf(Edge(o, begin));
      return place << 32 | edges.PlaceOf(Edge(o, end));
    };
    Place place;
    place.slot = o.slot;
    place.rows = both(rows_, cells.row_begin, cells.row_end);
    place.cells = both(cells_, cells.begin, cells.end);
    if (InUb(o)) {
      place.pad = cells_.PlaceOf(Edge(o, RoundUp(cells.end, kBlockBytes)));
      place.lane = cells.begin % kBlockBytes;
    }
    return place;
  }

  // A scalar unit takes its operands anywhere in a block.
  bool SamePlace(const Instr& instr, trace::OperandUse use, const Grid& other,
                 trace::OperandUse of_other) const {
    if (use.used() != of_other.used() || use.writes() != of_other.writes()) return false;
    if (!use.used()) return true;
    const Place &x = places_[use.operand()], &y = other.places_[of_other.operand()];
    return x.slot == y.slot && x.rows == y.rows && x.cells == y.cells &&
           (x.pad == y.pad || !Pads(instr, use)) && (x.lane == y.lane || instr.pipe == Pipe::kS);
  }

  const CoreRecord* core_ = nullptr;
  const ChipSpec* chip_ = nullptr;
  bool apart_ = false;
  Ascending rows_, cells_;     // edges, by slot
  std::vector<Place> places_;  // by operand
  std::uint64_t digest_ = 0;
};

}  // namespace

std::vector<std::size_t> FirstWithProof(const ChipSpec& chip, const trace::Phase& phase,
                                        const std::vector<const CorePlan*>& plans,
                                        const std::vector<Tensors>& written_twice, const GmState& gm,
                                        std::vector<GmWatch>* watches) {
  std::vector<std::size_t> first(phase.cores.size()), kinds;
  std::vector<std::uint64_t> digests(phase.cores.size());
  ForEach(first.size(), [&](std::size_t c) { digests[c] = DigestOf(phase.cores[c], *plans[c]); });
  watches->resize(phase.cores.size());
  const auto may_be_like = [&](std::size_t k, std::size_t c) {
    const CoreRecord &x = phase.cores[k], &y = phase.cores[c];
    return written_twice[k] == written_twice[c] && SameSlots(x.slots, y.slots) &&
           SameSlots(x.workspace, y.workspace) && trace::SameBytes(plans[k]->ops, plans[c]->ops);
  };
  for (std::size_t c = 0; c < phase.cores.size(); ++c) {
    const CoreRecord& y = phase.cores[c];
    const auto is_like = [&](std::size_t k) {
      const CoreRecord& x = phase.cores[k];
      return digests[k] == digests[c] && trace::SameBytes(x.operands, y.operands) &&
             AllSame(x.instrs, y.instrs, SameUse) &&
             std::ranges::equal(x.accesses, y.accesses, SameGm((*watches)[k].in_order)) && may_be_like(k, c);
    };
    const auto like = std::find_if(kinds.begin(), kinds.end(), is_like);
    first[c] = like == kinds.end() ? c : *like;
    if (like != kinds.end()) continue;
    kinds.push_back(c);
    (*watches)[c] = WatchOf(y, written_twice[c], gm);
  }
  if (kinds.size() < 2) return first;
  // Those that differ in bytes may be alike in where these lie.
  std::vector<Grid> grids(phase.cores.size());
  ForEach(kinds.size(), [&](std::size_t k) { grids[kinds[k]] = Grid(phase.cores[kinds[k]], chip); });
  std::vector<std::size_t> kept;
  for (const std::size_t c : kinds) {
    const auto like = std::find_if(kept.begin(), kept.end(), [&](std::size_t k) {
      return grids[k].digest() == grids[c].digest() && may_be_like(k, c) &&
             grids[k].IsLike(grids[c], SameGm((*watches)[k].in_order));
    });
    first[c] = like == kept.end() ? c : *like;
    if (like == kept.end()) kept.push_back(c);
  }
  for (std::size_t& f : first) f = first[f];
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
