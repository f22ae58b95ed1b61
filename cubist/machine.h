// The machine, for those who write a kernel of their own: the instruction set and what a call is made of. A kernel is
// a template over the core alone,
//
//   template <cubist::VectorCore Core> void ScaledAddKernel(Core& core, ..);
//
// and its call checks the arguments (kernels/validate.h), chooses a tiling (tiling/choose.h, kernels/choose_for.h), and
// launches it (npu_model/launch.h) on whatever device it is given. cubist/command.h brings it to the command line.
#ifndef CUBIST_CUBIST_MACHINE_H_
#define CUBIST_CUBIST_MACHINE_H_

// The vocabulary of a kernel.
#include "npu_model/composites.h"
#include "npu_model/core.h"
#include "npu_model/pipeline.h"
#include "npu_model/tile.h"
#include "npu_model/types.h"
#include "tiling/block_order.h"

// A call: its arguments, its tiling, its launch, its profile.
#include "kernels/choose_for.h"
#include "kernels/element_type.h"
#include "kernels/pack.h"
#include "kernels/rowwise.h"
#include "kernels/validate.h"
#include "npu_model/chip.h"
#include "npu_model/chip_constants.h"
#include "npu_model/device.h"
#include "npu_model/launch.h"
#include "npu_model/profile.h"
#include "npu_model/status.h"
#include "npu_model/tuning.h"
#include "tiling/choose.h"
#include "tiling/cost.h"
#include "tiling/fields.h"

// Blocks of a product, for what comes behind one.
#include "kernels/multiply_block_kernel.h"
#include "tiling/matmul_tiling.h"

// What a call recorded: its flags planned and proved.
#include "npu_model/sync/check.h"
#include "npu_model/sync/plan.h"
#include "npu_model/sync/report.h"
#include "npu_model/trace/record.h"
#include "npu_model/trace/replay.h"

#endif  // CUBIST_CUBIST_MACHINE_H_
