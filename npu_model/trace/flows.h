// Transfers that share memory: a fluid model with max-min fair rates.
#ifndef CUBIST_NPU_MODEL_TRACE_FLOWS_H_
#define CUBIST_NPU_MODEL_TRACE_FLOWS_H_

#include <array>
#include <cstdint>
#include <vector>

#include "npu_model/chip.h"

namespace cubist::trace {

// Where the bytes of a flow come from, or go to.
enum class Supply : std::uint8_t {
  kL2,
  kLate,  // L2, at the pace of another core's fetch from HBM
  kHbm,   // they miss, or make room in L2
};
inline constexpr int kSupplyCount = 3;

// Flows of the same path and supply have the same rate at all
// times, so a class keeps one running sum of bytes served per flow, and a flow ends
// when that sum has grown by its size. Rates change only when flows come and go.
class Flows {
 public:
  struct Flow {
    double bytes = 0;                     // through the port
    double then_late = 0, then_hits = 0;  // that follow from L2 once these are through
    std::uint32_t core = 0;
    std::uint32_t agent = 0;
  };

  explicit Flows(const ChipSpec& chip);

  void Start(Path path, Supply supply, const Flow& flow);
  // When the next flow will end, if none starts before; infinity without flows.
  double NextEnd();
  // Moves time forward, at most to NextEnd().
  void AdvanceTo(double time);
  // The flow that ends now. AdvanceTo(NextEnd()) came before.
  Flow TakeEnded(Path* path);

  double now() const { return now_; }
  // Cycles during which flows wanted more than the resource gave.
  double hbm_limited() const { return hbm_limited_; }
  double l2_limited() const { return l2_limited_; }  // in any of its ways

 private:
  enum Resource { kHbm, kL2Read, kCubeRead, kL2Write, kResources };
  static constexpr int kClasses = kSupplyCount * kPathCount;
  struct Entry {
    double ends_at;  // when `served` of its class gets here
    std::uint64_t order;
    Flow flow;
    bool operator>(const Entry& o) const {
      return ends_at != o.ends_at ? ends_at > o.ends_at : order > o.order;
    }
  };
  struct Class {
    double cap = 0;                         // bytes per cycle of one flow
    std::array<double, kResources> uses{};  // 1 of those that it takes from, else 0
    double rate = 0;                        // of each flow now
    double served = 0;                      // bytes per flow since the class was last empty
    std::vector<Entry> flows;               // a heap, the first to end in front
  };
  void ShareOut();

  std::array<Class, kClasses> classes_;
  std::array<double, kResources> capacity_{};  // bytes per cycle
  std::array<bool, kResources> full_{};
  double hbm_limited_ = 0, l2_limited_ = 0;
  std::vector<int> active_;  // classes with flows
  bool rates_known_ = true;
  double now_ = 0, next_end_ = 0;
  int ends_next_ = -1;  // class
  std::uint64_t started_ = 0;
};

}  // namespace cubist::trace

#endif  // CUBIST_NPU_MODEL_TRACE_FLOWS_H_
