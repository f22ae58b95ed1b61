// TokenPermute, TokenUnpermute and their gradients, and ReorderChunks.
#ifndef CUBIST_CUBIST_TOKEN_PERMUTE_H_
#define CUBIST_CUBIST_TOKEN_PERMUTE_H_

#include "kernels/reorder_chunks.h"
#include "kernels/token_permute.h"
#include "kernels/token_permute_grad.h"

#endif  // CUBIST_CUBIST_TOKEN_PERMUTE_H_
