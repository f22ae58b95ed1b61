// Global memory as the replay sees it: where tensors stand, and what of them is in L2.
#ifndef CUBIST_NPU_MODEL_TRACE_GLOBAL_MEMORY_H_
#define CUBIST_NPU_MODEL_TRACE_GLOBAL_MEMORY_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "npu_model/trace/l2_cache.h"
#include "npu_model/trace/record.h"

namespace cubist::trace {

class GlobalMemory {
 public:
  struct Transfer {
    double port_bytes = 0;  // line slots through the core's port
    double hbm_bytes = 0;   // missed, or written back to make room: as many read ones as take HBM as long
    double late_bytes = 0;  // in L2, but still on their way there for another transfer
  };

  GlobalMemory(const Record& record, const ChipSpec& chip);

  // Bytes of hand-over slots, of all cores of a phase together.
  std::int64_t workspace_bytes() const { return workspace_bytes_; }
  // Share of the bytes read that L2 had.
  double hit_rate() const { return read_ == 0 ? 0 : 1 - missed_ / static_cast<double>(read_); }

  // Bytes that came from HBM or went there.
  double hbm_bytes() const { return hbm_; }

  // First byte of an access; `core_workspace` is where the core's hand-over slots begin.
  std::int64_t AddressOf(const GmAccess& access, std::int64_t core_workspace) const {
    return (access.tensor < 0 ? workspace_ + core_workspace
                              : tensors_[static_cast<std::size_t>(access.tensor)]) +
           access.offset;
  }
  void Prefetch(const GmAccess& access, std::int64_t core_workspace) const {
    l2_->Prefetch(AddressOf(access, core_workspace));
  }
  // At cycle `now` of the launch.
  Transfer Touch(const GmAccess& access, std::int64_t core_workspace, double now);

 private:
  double TurnAround(std::int64_t fetched, std::int64_t written_back);

  std::int64_t line_;
  double miss_rate_;                   // bytes per cycle
  double turn_around_;                 // lines for each that is written back between reads
  std::int64_t read_before_ = 0;       // lines fetched, not yet set against one written back
  std::vector<std::int64_t> tensors_;  // first byte of each
  std::int64_t workspace_ = 0, workspace_bytes_ = 0;
  std::unique_ptr<L2Cache> l2_;
  std::int64_t read_ = 0;
  double missed_ = 0, hbm_ = 0;
};

}  // namespace cubist::trace

#endif  // CUBIST_NPU_MODEL_TRACE_GLOBAL_MEMORY_H_
