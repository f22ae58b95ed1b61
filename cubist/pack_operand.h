// PackOperand: operands of products packed once.
#ifndef CUBIST_CUBIST_PACK_OPERAND_H_
#define CUBIST_CUBIST_PACK_OPERAND_H_

#include "kernels/pack_operand.h"

#endif  // CUBIST_CUBIST_PACK_OPERAND_H_
