// Predictions of measured rows: which kernel stands for which row, and what the model says of it.
#ifndef CUBIST_TOOLS_VALIDATION_PREDICT_H_
#define CUBIST_TOOLS_VALIDATION_PREDICT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/status.h"
#include "tools/interval.h"
#include "tools/validation/measured.h"

namespace cubist {

// Rows that one summary takes together.
inline constexpr const char* kKnownSchedules = "known schedules";
inline constexpr const char* kMemoryBound = "memory-bound";
inline constexpr const char* kKnownBlocks = "known blocks";
inline constexpr const char* kReads = "reads of GM";
inline constexpr const char* kCoreProducts = "products by core";

// How far the schedule of a row's kernels is known: to the last buffer; by what such kernels do anyhow (double buffers, all
// cores, the better order of blocks); or not even by how far its pipes overlap.
enum class Schedule : std::uint8_t { kKnown, kStandard, kUnknown };

// Share of the time after launch and start, of kernels whose schedule is not known to the last buffer. pto-dsl guide: steps
// 2 to 4, all with double buffers, differ by 13 to 19 %, of which the better of several is taken.
inline constexpr double kOtherSchedule = 0.107;
// The same of attention with known blocks. pto-isa: a block takes 75.8, 97.5 and 107.8 us for 8192 keys where 24, 24 and 16
// cores have such at a time (16384 x 16384, 8192 x 8192, 2048 x 8192), which is 92 +-18 %.
inline constexpr double kOtherAttention = 0.18;

// The launches of a row, recorded and planned: replayed with other constants as often as one likes.
struct Recorded {
  std::string group;
  std::string skipped;  // why there is nothing to replay; empty otherwise
  std::vector<RecordedLaunch> launches;
  Schedule schedule = Schedule::kStandard;
  double other_schedule = kOtherSchedule;
};

// What the spreads of the chip's constants imply and, of vendor kernels, those of the two below and, where the schedule is
// unknown, any schedule of the same work.
Interval IntervalOf(Recorded& recorded, const ChipSpec& chip, double us);

// Before its first transfer an operator of the vendor's Ascend C copies its tiling from GM, works out where its tiles are
// and sets up its queues, all by the scalar unit with cold caches. Products (MatMul) and the compiled elementwise operators
// (Sigmoid, Gelu, Maximum, Slice) do not. The spread is that of operators whose schedule is unknown; of the others it is
// kStandardStart, in us.
inline constexpr Constant kOperatorStart{
    2.75, "us", Basis::kMeasured, 3.6,
    "vendor guide: a tiling known to the compiler saves 2.75 us of 10.6; rows of SwiGlu ask for 7 to 9, of "
    "MoeFinalizeRouting for up to 12, attention of a few heads for 13"};
// Attention's tiling is longer, and its kernel copies all of it, eight bytes at a time (ops-transformer,
// fused_infer_attention_score_tilingdata.h, of 12 numbers for every Cube core; fused_infer_attention_score_v3.cpp). The
// guide's operator had that of one product, about kUsualTiling.
inline constexpr std::int64_t kUsualTiling = 200, kAttentionTiling = 1480;  // bytes
inline constexpr double kStandardStart = 1.5;  // rows of MoeReRouting ask for 1 to 3

Recorded RecordRow(const MeasuredRow& row, const ChipSpec& chip);

}  // namespace cubist

#endif  // CUBIST_TOOLS_VALIDATION_PREDICT_H_
