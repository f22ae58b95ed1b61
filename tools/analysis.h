// Analysis: where the time of a modelled call went: critical path by cause, lines of source, roofline, buffers.
#ifndef CUBIST_TOOLS_ANALYSIS_H_
#define CUBIST_TOOLS_ANALYSIS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/profile.h"
#include "npu_model/trace/record.h"

namespace cubist {

struct Analysis {
  struct PipeShare {
    std::string core, pipe;                  // "Cube" or "Vector"
    double busy = 0, waiting = 0, idle = 0;  // shares of the time, of all cores of the chip
  };
  struct Cause {
    std::string name;
    double us = 0;
  };
  // What one line of source had its pipe do. Instructions of a composite share its line.
  struct LineCost {
    std::string file, what, pipe;
    std::uint32_t line = 0;
    std::int64_t count = 0, bytes = 0;
    double busy_us = 0;      // per core in use
    double critical_us = 0;  // on the critical path
  };
  // Bytes of a buffer that hold something which is still to be read, on one core.
  struct Occupancy {
    std::string buffer;
    std::int64_t capacity = 0, most = 0;
    std::vector<std::pair<double, std::int64_t>> bytes;  // from a time in us on
  };
  // Of one kind of unit, all of the chip's together.
  struct Roofline {
    double operations = 0, bytes = 0;  // bytes from and to HBM, of whatever the call does
    double attained_per_s = 0, attained_bytes_per_s = 0;
    double peak_per_s = 0, peak_bytes_per_s = 0;
    double intensity() const { return bytes > 0 ? operations / bytes : 0; }
    // Of what the roof allows at this intensity.
    double share = 0;
  };

  std::vector<PipeShare> pipes;      // those that did anything
  std::vector<Cause> critical_path;  // adds up to the time; the largest first
  std::vector<LineCost> lines;       // the largest on the critical path first
  std::vector<Occupancy> occupancy;  // on the core that ends last, of the longest phase
  Roofline roofline;                 // of the Cubes: two operations for each multiply-add
  // Of the Vector cores: one for each element of an instruction on pipe V, whatever it does; the peak is one for each 32-bit
  // lane and cycle. Nothing of several launches, of which not all are recorded.
  Roofline vector_roofline;
  int critical_core =
      0;  // AI core, or Vector core of a Vector-only phase, that ends last in the longest phase
  int critical_phase = 0;
};

// `profile` was made of `record` with its timeline. The critical path walks back from the last instruction to end: each
// one began when the one before on its pipe, or one whose bytes it needs, had ended; what lies between is put down to
// flags, hand-overs, startups of transfers or issue.
Analysis Analyse(const ChipSpec& chip, const trace::Record& record, const Profile& profile);

}  // namespace cubist

#endif  // CUBIST_TOOLS_ANALYSIS_H_
