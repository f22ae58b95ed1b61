// What the cores share that record.
#ifndef CUBIST_NPU_MODEL_TRACE_RECORDING_H_
#define CUBIST_NPU_MODEL_TRACE_RECORDING_H_

#include "npu_model/trace/trace_core.h"

namespace cubist::trace {

inline bool Empty(const TileRef& tile) { return tile.rows() == 0 || tile.cols() == 0; }

// A hand-over slot is written by FIX and read by MTE2 of a Vector core.
void AddSend(Recorder& to, const Operand& between, const TileRef& src, const Loc& loc);
void AddReceive(Recorder& to, int lane, const Operand& between, const TileRef& dst, const Loc& loc);

}  // namespace cubist::trace

#endif  // CUBIST_NPU_MODEL_TRACE_RECORDING_H_
