// A chip of round numbers and shorthands to record on it.
#ifndef CUBIST_TESTS_NPU_MODEL_TRACE_SUPPORT_H_
#define CUBIST_TESTS_NPU_MODEL_TRACE_SUPPORT_H_

#include <cstdint>
#include <utility>

#include "npu_model/chip.h"
#include "npu_model/host/scratch.h"
#include "npu_model/trace/record.h"
#include "npu_model/trace/trace_core.h"

namespace cubist::testing {

// One cycle is a nanosecond. Issue 1 cycle, of flags none; flags 5, cross-core 100; every path starts in 10
// cycles and carries 64 bytes per cycle, the next transfer may begin 1 cycle later; memory never limits. Mmad:
// complete 4 cycles after its work, the next one begins 2 after it. Vector: head 6, 4 cycles per repeat. Moves of a pipe
// end in order.
inline ChipSpec RoundChip() {
  const auto is = [](double value) { return Constant{value, "", Basis::kGuessed, 0, "chosen for the test"}; };
  ChipSpec chip = Ascend910B1();
  chip.name = "round";
  chip.clock_hz = is(1e9);
  for (PathSpec& path : chip.paths) path = {is(10), is(64), is(1), is(0)};
  chip.mmad.head_idle = is(4), chip.mmad.head_busy = is(2);
  chip.vector.head = is(6), chip.vector.least = is(1);
  for (Constant& cycles : chip.vector.cycles) cycles = is(4);
  chip.scalar.issue = is(1), chip.scalar.issue_flag = is(0), chip.scalar.read = is(3),
  chip.scalar.read_gm = is(7), chip.scalar.update = is(2), chip.scalar.step = is(4);
  auto& memory = chip.memory;
  memory.hbm_bytes_per_s = memory.cube_read_bytes_per_s = memory.l2_read_bytes_per_s =
      memory.l2_write_bytes_per_s = is(1e18);
  memory.core_read_bytes_per_cycle = memory.core_write_bytes_per_cycle = is(1e9);
  memory.core_miss_bytes_per_cycle = memory.found_dirty = memory.turn_around = memory.same_line = is(0);
  chip.sync.moves_need_barrier = false;
  chip.sync.flag = is(5), chip.sync.cross_core = is(100), chip.sync.execute = is(0);
  chip.sync.barrier_s = chip.sync.launch_s = chip.sync.mixed_launch_s = chip.sync.start_spread_s = is(0);
  return chip;
}

// A contiguous (rows, cols) tensor, without data unless given.
inline GmTensor TensorOf(std::int32_t index, DType dtype, std::int64_t rows, std::int64_t cols,
                         void* data = nullptr) {
  GmTensor t;
  t.data = static_cast<std::byte*>(data);
  t.dtype = dtype;
  t.writable = true;
  t.index = index;
  t.name = "tensor";
  t.bytes = rows * cols * SizeOf(dtype);
  t.sizes = {1, 1, rows, cols};
  t.strides = {rows * cols, rows * cols, cols, 1};
  return t;
}

// Adds a phase of `count` AI cores (or Vector cores) that all run `kernel(core)`.
template <class Core, class Kernel>
void AddPhase(trace::Record& record, int count, Kernel&& kernel, bool with_data = false) {
  trace::Phase& phase = record.phases.emplace_back();
  phase.vector_only = std::is_same_v<Core, TraceVectorCore>;
  phase.cores.resize(static_cast<std::size_t>(count));
  for (int index = 0; index < count; ++index) {
    Scratch scratch;
    Core core(record.chip, scratch, index, count, with_data, &phase.cores[static_cast<std::size_t>(index)]);
    kernel(core);
  }
}

template <class Core, class Kernel>
trace::Record RecordOf(const ChipSpec& chip, int count, Kernel&& kernel, bool with_data = false) {
  trace::Record record;
  record.kernel = "test";
  record.chip = chip;
  AddPhase<Core>(record, count, std::forward<Kernel>(kernel), with_data);
  return record;
}

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_NPU_MODEL_TRACE_SUPPORT_H_
