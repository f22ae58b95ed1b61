// MlaBlock.
#ifndef CUBIST_CUBIST_MLA_BLOCK_H_
#define CUBIST_CUBIST_MLA_BLOCK_H_

#include "kernels/mla_block.h"

#endif  // CUBIST_CUBIST_MLA_BLOCK_H_
