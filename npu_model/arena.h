// Arena: where a core's slots stand in the chip's buffers. Both executors place every slot here, so that a
// kernel that does not fit the chip is found on either.
#ifndef CUBIST_NPU_MODEL_ARENA_H_
#define CUBIST_NPU_MODEL_ARENA_H_

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "npu_model/chip.h"
#include "npu_model/tile.h"

namespace cubist {

class Arena {
 public:
  explicit Arena(const ChipSpec& chip) : chip_(&chip) {}

  // Gives each of `request.stages` slots its address, size and number. `lane` is the
  // Vector core (UB), -1 for the Cube core. Slots beyond the capacity get addresses
  // beyond it, and the first such ring becomes the finding.
  void Place(const SlotRequest& request, int lane, Slot* slots);

  // Empty, or which ring overflowed which buffer and by how much, with a map of the buffer in bytes.
  const std::string& finding() const { return finding_; }

 private:
  struct Placed {
    Buffer buffer;
    int lane;
    std::int64_t begin, end;
    const char* owner;
    int stages;
  };
  std::string MapOf(Buffer buffer, int lane) const;

  const ChipSpec* chip_;
  std::array<std::array<std::int64_t, kMaxVectorPerCube + 1>, kBufferCount> used_{};  // By buffer, lane + 1.
  std::array<Placed, 64> placed_;
  std::size_t placed_count_ = 0;
  std::int32_t next_id_ = 0;
  std::string finding_;
};

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_ARENA_H_
