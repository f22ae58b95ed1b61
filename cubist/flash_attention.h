// FlashAttention and its gradient.
#ifndef CUBIST_CUBIST_FLASH_ATTENTION_H_
#define CUBIST_CUBIST_FLASH_ATTENTION_H_

#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"

#endif  // CUBIST_CUBIST_FLASH_ATTENTION_H_
