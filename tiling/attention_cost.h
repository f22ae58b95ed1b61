// What the prices of both passes of attention have in common, and the cores that they go to.
#ifndef CUBIST_TILING_ATTENTION_COST_H_
#define CUBIST_TILING_ATTENTION_COST_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "npu_model/chip.h"
#include "tiling/cost.h"

namespace cubist {

// Cycles that products keep the pipes around L0 busy.
struct ProductCycles {
  double mmad = 0, mte1 = 0, issue = 0;

  // A product of (rows, k) and (k, width), k in steps of k0, `times` over.
  void Add(const ChipSpec& chip, DType in, double times, std::int64_t rows, std::int64_t k,
           std::int64_t width, std::int64_t k0) {
    if (width == 0) return;
    const auto bytes = static_cast<double>(chip.OperandBytes(in));
    for (const Range step : Split(k, k0)) {
      mmad += times * MmadCycles(chip, in, rows, step.size(), width);
      mte1 += times * (PathCycles(chip, Path::kL1ToL0A, static_cast<double>(rows * step.size()) * bytes, 1) +
                       PathCycles(chip, Path::kL1ToL0B, static_cast<double>(step.size() * width) * bytes, 1));
      issue += times * 3 * chip.scalar.issue;
    }
  }
};

// A phase before, on all cores, that reads `bytes` and writes them in the core's layout.
inline double PackingCycles(const ChipSpec& chip, double bytes) {
  const auto cores = static_cast<double>(chip.concurrent_cores);
  return chip.sync.barrier_s * chip.clock_hz + 2 * bytes / LoadRate(chip, Path::kGmToL1Nd2Nz, cores) / cores;
}

// What the instructions of a step cost a host besides their work. Fitted to all tilings of 256 heads with 62 causal queries, bf16,
// on a Zen 5, which take 1 to 12 steps each.
inline double HostStepCycles(const ChipSpec& chip) { return 0.9e-6 * chip.clock_hz; }

// Cores that the tasks of a call go to: a host, where a core takes most of a microsecond to set up, gives each of them several
// small ones, as long as no thread stands idle.
template <class Shape>
std::int64_t CoresOfTasks(const ChipSpec& chip, const Shape& s, std::int64_t tasks) {
  constexpr double kSmall = 1 << 20;  // Multiply-adds of the scores and of the output.
  constexpr std::int64_t kMostTasks = 8, kPerThread = 4;
  if (chip.pipes_overlap || tasks == 0) return tasks;
  const double all = static_cast<double>(s.batches * s.heads * s.sq) *
                     static_cast<double>(s.skv * (s.d_qk + s.d_rope + s.d_v));
  const std::int64_t together = std::llround(
      std::clamp<double>(kSmall * static_cast<double>(tasks) / std::max(all, 1.0), 1, kMostTasks));
  return std::max(CeilDiv(tasks, together),
                  std::min<std::int64_t>(tasks, kPerThread * chip.concurrent_cores));
}

// The share of a block's scores for which a quarter of a host's L2 has no room, where it multiplies so quickly that their way
// shows: in tile registers. Fitted, as the cycles that each of them costs, to tilings measured on a Granite Rapids.
inline double SpilledShare(const ChipSpec& chip, DType in, double bytes) {
  const auto room = static_cast<double>(chip.buffer(Buffer::kL0C).fast);
  return chip.InTileRegisters(in) && bytes > room ? 1 - room / bytes : 0;
}

}  // namespace cubist

#endif  // CUBIST_TILING_ATTENTION_COST_H_
