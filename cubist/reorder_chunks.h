// ReorderChunks: chunks of rows from rank-major to expert-major order, and back.
#ifndef CUBIST_CUBIST_REORDER_CHUNKS_H_
#define CUBIST_CUBIST_REORDER_CHUNKS_H_

#include "kernels/reorder_chunks.h"

#endif  // CUBIST_CUBIST_REORDER_CHUNKS_H_
