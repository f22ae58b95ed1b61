// Matmul, and operands packed once for many of them.
#ifndef CUBIST_CUBIST_MATMUL_H_
#define CUBIST_CUBIST_MATMUL_H_

#include "kernels/matmul.h"
#include "kernels/pack_operand.h"

#endif  // CUBIST_CUBIST_MATMUL_H_
