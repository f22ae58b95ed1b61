// Transfers that share memory: a fluid model with max-min fair rates.
#ifndef CUBIST_NPU_MODEL_TRACE_FLOWS_H_
#define CUBIST_NPU_MODEL_TRACE_FLOWS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>
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
  // Whose transfer flows.
  struct Owner {
    std::uint32_t core = 0;
    std::uint32_t agent = 0;
  };

  explicit Flows(const ChipSpec& chip);

  // `bytes` through the port.
  void Start(Path path, Supply supply, double bytes, Owner owner);
  // When the next flow will end, if none starts before; infinity without flows.
  double NextEnd();
  // Moves time forward, at most to NextEnd().
  void AdvanceTo(double time);
  // Whose flow ends now. AdvanceTo(NextEnd()) came before.
  Owner TakeEnded(Path* path);

  double now() const { return now_; }
  // Cycles during which flows wanted more than the resource gave.
  double hbm_limited() const { return hbm_limited_; }
  double l2_limited() const { return l2_limited_; }  // in any of its ways

 private:
  enum Resource { kHbm, kL2Read, kCubeRead, kL2Write, kResources };
  static constexpr int kClasses = kSupplyCount * kPathCount;
  struct Entry {
    double ends_at;  // when `served` of its class gets here
    Owner owner;
  };
  // The first to end in front, of equals the first to start. Most transfers are of one size, and end as they start.
  class Queue {
   public:
    std::size_t size() const { return entries_.size() - head_; }
    bool empty() const { return size() == 0; }
    const Entry& front() const { return entries_[head_]; }
    void Add(const Entry& entry);
    void Pop();

   private:
    std::vector<Entry> entries_;  // From head_ on.
    std::size_t head_ = 0;
  };
  struct Class {
    double cap = 0;                         // bytes per cycle of one flow
    std::array<double, kResources> uses{};  // 1 of those that it takes from, else 0
    double rate = 0;                        // of each flow now
    double served = 0;                      // bytes per flow since the class was last empty
    Queue flows;
  };
  // Rates are a function of how many flows each class has, and few such counts come again and again.
  using Counts = std::array<std::uint16_t, 32>;
  static_assert(kClasses <= std::tuple_size_v<Counts>);
  static constexpr std::size_t kMostShared = 12;  // classes
  struct Shares {
    Counts counts{};
    std::array<double, kMostShared> rates{};  // of active_, in its order
    std::array<bool, kResources> full{};
  };
  void Count(int number, int change);
  void ShareOut();
  void ShareAnew();

  std::array<Class, kClasses> classes_;
  std::array<double, kResources> capacity_{};  // bytes per cycle
  std::array<bool, kResources> full_{};
  double hbm_limited_ = 0, l2_limited_ = 0;
  std::vector<int> active_;           // classes with flows
  Counts counts_{};                   // flows of each class
  std::uint64_t digest_ = 0;          // of counts_
  std::vector<Shares> known_shares_;  // by digest
  bool rates_known_ = true;
  double now_ = 0, next_end_ = 0;
  int ends_next_ = -1;  // class
};

}  // namespace cubist::trace

#endif  // CUBIST_NPU_MODEL_TRACE_FLOWS_H_
