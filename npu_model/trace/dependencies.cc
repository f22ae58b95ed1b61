#include "npu_model/trace/dependencies.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

namespace cubist::trace {
namespace {

// A rectangle of a slot, or an interval of bytes of a GM tensor (one row).
struct Rect {
  std::int64_t row_begin, row_end, col_begin, col_end;

  bool Overlaps(const Rect& o) const {
    return row_begin < o.row_end && o.row_begin < row_end && col_begin < o.col_end && o.col_begin < col_end;
  }
  bool Contains(const Rect& o) const {
    return row_begin <= o.row_begin && o.row_end <= row_end && col_begin <= o.col_begin &&
           o.col_end <= col_end;
  }
  void GrowTo(const Rect& o) {
    row_begin = std::min(row_begin, o.row_begin), row_end = std::max(row_end, o.row_end);
    col_begin = std::min(col_begin, o.col_begin), col_end = std::max(col_end, o.col_end);
  }
};

struct Use {
  Rect rect;
  std::uint32_t instr;
  std::uint8_t agent;
  bool writes;
};

// The accesses to one slot that later ones may have to wait for.
class History {
 public:
  // Raises latest[agent] to the last instruction + 1 that an access has to wait for.
  // The agents met, a bit each.
  std::uint32_t Collect(const Use& access, std::array<std::uint32_t, kMaxAgents>& latest) const {
    std::uint32_t agents = 0;
    for (const Use& use : uses_) {
      if ((access.writes || use.writes) && use.rect.Overlaps(access.rect)) {
        latest[use.agent] = std::max(latest[use.agent], use.instr + 1);
        agents |= 1u << use.agent;
      }
    }
    return agents;
  }

  // What a write covers, and what a later read of the same agent covers, cannot be
  // the last to wait for any more.
  void Add(const Use& use) {
    std::size_t kept = 0;
    for (const Use& old : uses_) {
      const bool covered =
          use.rect.Contains(old.rect) && (use.writes || (!old.writes && old.agent == use.agent));
      if (!covered) uses_[kept++] = old;
    }
    uses_.resize(kept);
    if (kept < kMaxUses) {
      uses_.push_back(use);
      return;
    }
    // Scattered accesses of one agent and kind are kept as their bounding box, as
    // late as the last: stricter, never laxer.
    const auto like = std::find_if(uses_.begin(), uses_.end(), [&](const Use& old) {
      return old.agent == use.agent && old.writes == use.writes;
    });
    if (like == uses_.end()) {
      uses_.push_back(use);
      return;
    }
    Use box = use;
    kept = 0;
    for (const Use& old : uses_) {
      if (old.agent == use.agent && old.writes == use.writes) {
        box.rect.GrowTo(old.rect);
      } else {
        uses_[kept++] = old;
      }
    }
    uses_.resize(kept);
    uses_.push_back(box);
  }

 private:
  static constexpr std::size_t kMaxUses = 48;
  std::vector<Use> uses_;
};

Rect RectOf(const Operand& o) { return {o.row_begin, o.row_end, o.col_begin, o.col_end}; }

// GM tensors that a core both reads and writes: only these can make it wait for itself.
std::vector<char> ReadAndWritten(const CoreRecord& record) {
  std::vector<char> kinds;  // 1: read, 2: written
  for (const GmAccess& access : record.accesses) {
    if (access.tensor < 0) continue;
    const auto tensor = static_cast<std::size_t>(access.tensor);
    if (kinds.size() <= tensor) kinds.resize(tensor + 1, 0);
    kinds[tensor] = static_cast<char>(kinds[tensor] | (access.writes ? 2 : 1));
  }
  for (char& kind : kinds) kind = kind == 3;
  return kinds;
}

}  // namespace

Dependencies::Dependencies(const CoreRecord& record) {
  const std::vector<char> tracked = ReadAndWritten(record);
  std::vector<History> slots(record.slots.size()), workspace(record.workspace.size()),
      tensors(tracked.size());
  // waited[a][b] - 1 is the last instruction of agent b that an instruction of agent a has waited for.
  std::array<std::array<std::uint32_t, kMaxAgents>, kMaxAgents> waited{};

  std::array<std::uint32_t, kMaxAgents> latest{};
  std::array<std::pair<History*, Use>, kMaxOperands + 1> touched;  // every operand and one GM access

  begin_.reserve(record.instrs.size() + 1);
  all_.reserve(record.instrs.size());
  begin_.push_back(0);
  for (std::uint32_t i = 0; i < record.instrs.size(); ++i) {
    const Instr& instr = record.instrs[i];
    const auto agent = static_cast<std::uint8_t>(AgentOf(instr.pipe, instr.lane));
    std::size_t count = 0;
    const auto touch = [&](History& history, const Rect& rect, bool writes) {
      touched[count++] = {&history, Use{rect, i, agent, writes}};
    };
    for (const OperandUse use : instr.uses) {
      if (!use.used()) continue;
      const Operand& operand = record.operands[use.operand()];
      History& history = operand.slot >= 0 ? slots[static_cast<std::size_t>(operand.slot)]
                                           : workspace[static_cast<std::size_t>(~operand.slot)];
      touch(history, RectOf(operand), use.writes());
    }
    if (instr.access >= 0) {
      const GmAccess& access = record.accesses[static_cast<std::size_t>(instr.access)];
      if (access.tensor >= 0 && tracked[static_cast<std::size_t>(access.tensor)]) {
        touch(tensors[static_cast<std::size_t>(access.tensor)], {0, 1, access.offset, access.end()},
              access.writes);
      }
    }

    std::uint32_t agents = 0;
    for (std::size_t t = 0; t < count; ++t) agents |= touched[t].first->Collect(touched[t].second, latest);
    for (std::size_t t = 0; t < count; ++t) touched[t].first->Add(touched[t].second);
    latest[agent] = 0;
    for (; agents != 0; agents &= agents - 1) {
      const auto other = static_cast<std::uint32_t>(std::countr_zero(agents));
      const std::uint32_t last = std::exchange(latest[other], 0);
      if (last <= waited[agent][other]) continue;
      waited[agent][other] = last;
      all_.push_back({last - 1, other});
    }
    begin_.push_back(static_cast<std::uint32_t>(all_.size()));
  }
}

}  // namespace cubist::trace
