// The two blocks of a layer, whole, as cases of a workload.
#ifndef CUBIST_TOOLS_BLOCK_CASES_H_
#define CUBIST_TOOLS_BLOCK_CASES_H_

#include "tools/cases.h"

namespace cubist {

// The attention half of the layer, with the device's heads.
Case MlaBlockCase(const ScaledWorkload& scaled);

// The other half, with the experts of the device alone: a token's routes are as many as reach the device on average.
Case MoeBlockCase(const ScaledWorkload& scaled);

}  // namespace cubist

#endif  // CUBIST_TOOLS_BLOCK_CASES_H_
