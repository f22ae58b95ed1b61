// Line slots: what bursts of GM take on their way, which is more than their bytes.
#ifndef CUBIST_NPU_MODEL_LINE_SLOTS_H_
#define CUBIST_NPU_MODEL_LINE_SLOTS_H_

#include <cstdint>

namespace cubist {

// Slots of a line's size that a burst takes: it is cut at line boundaries, and a piece shorter than a line goes in
// packets of a half, a quarter, and what is left below a quarter, each as dear as a line. A line is 1 << shift bytes.
inline std::int64_t LineSlots(std::int64_t address, std::int64_t bytes, int shift) {
  const std::int64_t line = std::int64_t{1} << shift;
  const auto packets = [shift, line](std::int64_t piece) {
    return (piece >> (shift - 1)) + (piece >> (shift - 2)) % 2 + ((piece & (line / 4 - 1)) != 0);
  };
  const std::int64_t lead = -address & (line - 1);
  if (lead >= bytes) return packets(bytes);
  return packets(lead) + ((bytes - lead) >> shift) + packets((bytes - lead) & (line - 1));
}

// The same of `count` bursts, `stride` bytes apart.
inline std::int64_t LineSlots(std::int64_t address, std::int64_t bytes, std::int64_t count,
                              std::int64_t stride, int shift) {
  const std::int64_t line = std::int64_t{1} << shift;
  if ((stride & (line - 1)) == 0) return count * LineSlots(address, bytes, shift);
  std::int64_t slots = 0;
  for (std::int64_t i = 0; i < count; ++i) slots += LineSlots(address + i * stride, bytes, shift);
  return slots;
}

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_LINE_SLOTS_H_
