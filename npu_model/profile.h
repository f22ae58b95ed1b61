// Profile: what the model predicts of one call on a chip.
#ifndef CUBIST_NPU_MODEL_PROFILE_H_
#define CUBIST_NPU_MODEL_PROFILE_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/status.h"

namespace cubist {

// One instruction on one pipe of one core, for the timeline.
struct TimelineSlice {
  std::int32_t core = 0;   // AI core; a Vector-only phase runs on the Vector cores of AI cores 0, 1, ..
  std::int32_t lane = -1;  // -1: the Cube core; otherwise a Vector core
  Pipe pipe = Pipe::kS;
  const char* name = "";   // instruction
  std::uint32_t line = 0;  // source line that issued it
  const char* file = "";
  double start_us = 0, end_us = 0;
  std::int64_t bytes = 0;              // moved, 0 for arithmetic
  std::uint32_t phase = 0, instr = 0;  // in the record: of the launch, and in program order of the core
};

struct CUBIST_EXPORT Profile {
  std::string kernel, chip;
  double time_s = 0;   // launch, all phases and the barriers between them
  double cycles = 0;   // time_s in cycles of the chip's clock
  int cores_used = 0;  // of the busiest phase
  std::int64_t instructions = 0;
  std::int64_t transfers = 0;  // of the instructions those that move data to or from GM
  int launches = 0;            // kernels, one after the other

  // Busy share of a pipe: its busy time over time_s, averaged over all cores of the chip that have the pipe.
  struct Busy {
    double cube_side = 0;    // pipes of the Cube cores
    double vector_side = 0;  // pipes of the Vector cores
  };
  std::array<Busy, kPipeCount> busy{};
  std::array<Busy, kPipeCount> waiting{};  // likewise, standing still at a flag or barrier
  double cube_utilisation = 0;             // busy share of M
  double vector_utilisation = 0;           // busy share of V
  double mte_utilisation = 0;              // the busiest of MTE1, MTE2, MTE3, FIX on either side

  std::array<std::int64_t, kPathCount> path_bytes{};  // bytes that took each path
  std::int64_t gm_read = 0, gm_written = 0;           // bytes through the cores' ports
  std::int64_t workspace_bytes = 0;                   // GM that hand-overs and packed operands need
  double l2_hit_rate = 0;                             // of gm_read
  double hbm_bytes = 0;                               // what L2 fetched from HBM, and wrote back to make room
  std::int64_t macs = 0;                              // multiply-adds of the Cube, unpadded

  std::string
      bound;  // the pipe or resource that bounds the time: "M", "MTE2", "V", "HBM", "L2", "launch", ..
  std::string verdict;  // the same in a sentence

  std::shared_ptr<const std::vector<TimelineSlice>> timeline;  // when asked for

  // Another call behind this one: times, work and traffic add up, shares become means over the time. An empty
  // profile becomes the other; where one of them was given up (NpuOptions::give_up_s), both together were.
  void Append(const Profile& next);

  // Chrome trace JSON: a process per core, a track per pipe, and more of them where slices overlap. Opens in
  // Perfetto and in MindStudio Insight. Of a longer timeline the first kMostEvents are written, as otherData tells.
  static constexpr std::size_t kMostEvents = 1000000;
  Status WriteTimeline(const std::string& path) const;
};

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_PROFILE_H_
