// How kernels take pre-packed operands.
#ifndef CUBIST_KERNELS_PACKED_INPUT_H_
#define CUBIST_KERNELS_PACKED_INPUT_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/pack_operand.h"
#include "npu_model/launch.h"

namespace cubist {

// What stands before the matrices.
inline constexpr std::int64_t kPackedHeaderBytes = 128;

// Room, alignment and header: that the memory holds just what the view says, laid out as the device needs it.
Status CheckPacked(const Device& device, const char* kernel, const char* name, const PackedOperand& packed);

// What CheckPacked found to hold, to be found again in other memory without working it out: of the same device, sizes,
// dtype and side.
class PackedStamp {
 public:
  PackedStamp() = default;
  PackedStamp(const Device& device, const PackedOperand& packed);
  bool IsOn(const PackedOperand& packed) const;

 private:
  std::int64_t bytes_ = 0;
  std::array<std::byte, kPackedHeaderBytes> header_{};
};

// The first of the operand's matrices; PackedGm::Matrix gives the others.
PackedGm PackedInput(Launch& launch, const char* name, const PackedOperand& packed);

}  // namespace cubist

#endif  // CUBIST_KERNELS_PACKED_INPUT_H_
