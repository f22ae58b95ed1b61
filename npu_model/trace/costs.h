// What an instruction costs its pipe, by the chip's table.
#ifndef CUBIST_NPU_MODEL_TRACE_COSTS_H_
#define CUBIST_NPU_MODEL_TRACE_COSTS_H_

#include <algorithm>
#include <cstdint>

#include "npu_model/chip.h"
#include "npu_model/trace/record.h"

namespace cubist::trace {

// Cycles from the start of an instruction.
struct Cost {
  double busy = 0;  // until its pipe takes the next one
  double done = 0;  // until its results are there
};

class Costs {
 public:
  explicit Costs(const ChipSpec& chip) : chip_(&chip) {}

  // Of an instruction that does not touch GM.
  Cost Of(const CoreRecord& record, const Instr& instr) const;

  // Of a transfer to or from GM: until the next one may begin, and until its first bytes flow. One of several moves is later
  // by as much as their gaps are longer than their bytes take.
  Cost Of(const GmAccess& access) const {
    const PathSpec& path = chip_->path(access.path);
    const auto moves = static_cast<double>(access.moves());
    if (moves == 1) return {path.gap, path.startup};
    const double bytes = static_cast<double>(access.bytes()) / moves / path.bytes_per_cycle;
    return {moves * path.gap, path.startup + (moves - 1) * std::max(0.0, path.gap - bytes)};
  }
  // Until it is complete, at least.
  double LeastOf(const GmAccess& access) const { return chip_->path(access.path).least; }
  // And what its rows add, which overlaps nothing.
  double RowsOf(const GmAccess& access) const {
    return static_cast<double>(access.rows * access.bursts) * chip_->path(access.path).row;
  }
  bool rows_cost() const {
    return std::any_of(chip_->paths.begin(), chip_->paths.end(), [](const PathSpec& p) { return p.row > 0; });
  }

  // Bytes that a MTE1 load moves: whole fractals.
  std::int64_t FractalBytes(const Instr& instr) const;
  static Path PathOf(Op op) {
    return op == Op::kLoadL0A ? Path::kL1ToL0A : op == Op::kLoadL0B ? Path::kL1ToL0B : Path::kL1ToBT;
  }

 private:
  Cost Mmad(const Instr& instr) const;
  Cost Vector(const CoreRecord& record, const Instr& instr) const;
  double ScalarCycles(const Instr& instr) const;
  Cost Reduction(std::int64_t rows, std::int64_t cols, std::int64_t element, std::int64_t slot_cols,
                 double cycles) const;
  Cost Sort(std::int64_t rows, std::int64_t cols) const;
  Cost SortPass(const Instr& instr, std::int64_t keys) const;
  Cost Load(const Instr& instr) const;
  Cost Repeated(double repeats, double cycles) const;

  const ChipSpec* chip_;
};

}  // namespace cubist::trace

#endif  // CUBIST_NPU_MODEL_TRACE_COSTS_H_
