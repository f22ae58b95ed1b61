// How kernels take pre-packed operands.
#ifndef CUBIST_KERNELS_PACKED_INPUT_H_
#define CUBIST_KERNELS_PACKED_INPUT_H_

#include "kernels/pack_operand.h"
#include "npu_model/launch.h"

namespace cubist {

// Room, alignment and header: that the memory holds just what the view says, laid out as the device needs it.
Status CheckPacked(const Device& device, const char* kernel, const char* name, const PackedOperand& packed);

// The first of the operand's matrices; PackedGm::Matrix gives the others.
PackedGm PackedInput(Launch& launch, const char* name, const PackedOperand& packed);

}  // namespace cubist

#endif  // CUBIST_KERNELS_PACKED_INPUT_H_
