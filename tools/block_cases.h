// The two blocks of a layer, whole, forward and backward, as cases of a workload.
#ifndef CUBIST_TOOLS_BLOCK_CASES_H_
#define CUBIST_TOOLS_BLOCK_CASES_H_

#include "tools/cases.h"

namespace cubist {

// The attention half of the layer, with the device's heads: rotary positions turned inside, sandwich norm where the model
// has it.
Case MlaBlockCase(const ScaledWorkload& scaled);
Case MlaBlockGradCase(const ScaledWorkload& scaled);

// The other half, with the experts of the device alone: a token's routes are as many as reach the device on average. Its
// router scores as the model's; where that limits routes to groups, these are as many of the model's as have two of the
// device's experts each, and the same share of them is selected from.
Case MoeBlockCase(const ScaledWorkload& scaled);
Case MoeBlockGradCase(const ScaledWorkload& scaled);

}  // namespace cubist

#endif  // CUBIST_TOOLS_BLOCK_CASES_H_
