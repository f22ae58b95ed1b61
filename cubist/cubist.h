// Cubist: every kernel of the library, on every device. One header per kernel lies beside this one.
#ifndef CUBIST_CUBIST_CUBIST_H_
#define CUBIST_CUBIST_CUBIST_H_

#include "cubist/flash_attention.h"
#include "cubist/grouped_matmul.h"
#include "cubist/loss_scale.h"
#include "cubist/matmul.h"
#include "cubist/mla_block.h"
#include "cubist/moe_block.h"
#include "cubist/pack_operand.h"
#include "cubist/reorder_chunks.h"
#include "cubist/rms_norm.h"
#include "cubist/route.h"
#include "cubist/swiglu.h"
#include "cubist/token_permute.h"
#include "cubist/version.h"

#endif  // CUBIST_CUBIST_CUBIST_H_
