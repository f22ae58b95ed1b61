// MoeBlock and its gradient.
#ifndef CUBIST_CUBIST_MOE_BLOCK_H_
#define CUBIST_CUBIST_MOE_BLOCK_H_

#include "kernels/moe_block.h"

#endif  // CUBIST_CUBIST_MOE_BLOCK_H_
