// Symbols in place of data: every element of every slot holds a hash of how it came about. What is the same on
// symbols is the same on any data, whatever the instructions compute.
#ifndef CUBIST_TESTS_SYNC_SYMBOLS_H_
#define CUBIST_TESTS_SYNC_SYMBOLS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "npu_model/sync/schedule.h"
#include "npu_model/trace/record.h"

namespace cubist::testing {

// A machine of sync::Scheduler.
class Symbols {
 public:
  struct Result {
    std::uint32_t instr;
    std::uint64_t inputs;
  };

  explicit Symbols(const trace::CoreRecord& record)
      : record_(record), slots_(record.slots.size()), workspace_(record.workspace.size()) {
    for (std::size_t s = 0; s < slots_.size(); ++s) slots_[s].assign(Elements(record.slots[s]), s + 1);
    for (std::size_t s = 0; s < workspace_.size(); ++s)
      workspace_[s].assign(Elements(record.workspace[s]), s + 99);
  }

  Result Start(std::uint32_t i) { return {i, Read(i)}; }
  void Finish(const Result& done) {
    const trace::Instr& instr = record_.instrs[done.instr];
    std::uint64_t symbol = done.inputs;
    for (const trace::OperandUse use : instr.uses) {
      if (use.used() && use.writes())
        ForEachElement(use, [&](std::uint64_t& to) { to = symbol = Mix(symbol, 1); });
    }
    if (instr.access < 0) return;
    const trace::GmAccess& gm = record_.accesses[static_cast<std::size_t>(instr.access)];
    if (gm.writes && gm.tensor >= 0) stored_[{gm.tensor, gm.offset}] = done.inputs;
  }

  // Of everything on chip and of everything stored.
  std::uint64_t Hash() const {
    std::uint64_t hash = 0;
    for (const auto* buffers : {&slots_, &workspace_}) {
      for (const auto& buffer : *buffers) {
        for (const std::uint64_t symbol : buffer) hash = Mix(hash, symbol);
      }
    }
    for (const auto& [key, symbol] : stored_) hash = Mix(hash, symbol);
    return hash;
  }

 private:
  static std::size_t Elements(const trace::SlotInfo& slot) {
    return static_cast<std::size_t>(slot.rows * slot.cols);
  }
  static std::uint64_t Mix(std::uint64_t a, std::uint64_t b) {
    std::uint64_t h = (a ^ (b + 0x9e3779b97f4a7c15u)) * 0xbf58476d1ce4e5b9u;
    return h ^ h >> 29;
  }

  template <class Visit>
  void ForEachElement(trace::OperandUse use, Visit visit) {
    const trace::Operand& o = record_.operands[use.operand()];
    const auto number = static_cast<std::size_t>(o.slot >= 0 ? o.slot : ~o.slot);
    const trace::SlotInfo& info = o.slot >= 0 ? record_.slots[number] : record_.workspace[number];
    auto& symbols = o.slot >= 0 ? slots_[number] : workspace_[number];
    for (std::int64_t r = o.row_begin; r < o.row_end; ++r) {
      for (std::int64_t c = o.col_begin; c < o.col_end; ++c)
        visit(symbols[static_cast<std::size_t>(r * info.cols + c)]);
    }
  }

  std::uint64_t Read(std::uint32_t i) {
    std::uint64_t hash = i;
    for (const trace::OperandUse use : record_.instrs[i].uses) {
      if (use.used()) ForEachElement(use, [&](const std::uint64_t& symbol) { hash = Mix(hash, symbol); });
    }
    return hash;
  }

  const trace::CoreRecord& record_;
  std::vector<std::vector<std::uint64_t>> slots_, workspace_;
  std::map<std::pair<std::int32_t, std::int64_t>, std::uint64_t> stored_;
};

// The hash after a run; nothing if it gets stuck.
inline std::optional<std::uint64_t> RunOnSymbols(const ChipSpec& chip, const trace::CoreRecord& record,
                                                 const sync::CorePlan& plan, int lanes,
                                                 sync::Schedule schedule, unsigned seed) {
  Symbols symbols(record);
  sync::Scheduler<Symbols> run(chip, record, plan, lanes, symbols);
  if (!run.Run(schedule, seed)) return std::nullopt;
  return symbols.Hash();
}

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_SYNC_SYMBOLS_H_
