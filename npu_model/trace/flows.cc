#include "npu_model/trace/flows.h"

#include <algorithm>
#include <cstddef>
#include <limits>

#include "npu_model/status.h"

namespace cubist::trace {
namespace {

constexpr int kSharesBits = 10;  // of the number of a place in known_shares_

constexpr double kNever = std::numeric_limits<double>::infinity();

bool IsWrite(Path path) { return path == Path::kL0CToGm || path == Path::kL1ToGm || path == Path::kUbToGm; }

}  // namespace

Flows::Flows(const ChipSpec& chip) : known_shares_(std::size_t{1} << kSharesBits) {
  const ChipSpec::Memory& memory = chip.memory;
  capacity_[kHbm] = memory.hbm_bytes_per_s / chip.clock_hz;
  capacity_[kL2Read] = memory.l2_read_bytes_per_s / chip.clock_hz;
  capacity_[kCubeRead] = memory.cube_read_bytes_per_s / chip.clock_hz;
  capacity_[kL2Write] = memory.l2_write_bytes_per_s / chip.clock_hz;
  for (int p = 0; p < kPathCount; ++p) {
    const Path path = static_cast<Path>(p);
    const bool write = IsWrite(path);
    const double port = write ? memory.core_write_bytes_per_cycle : memory.core_read_bytes_per_cycle;
    for (int s = 0; s < kSupplyCount; ++s) {
      const Supply supply = static_cast<Supply>(s);
      Class& c = classes_[static_cast<std::size_t>(kSupplyCount * p + s)];
      c.cap = std::min<double>(chip.path(path).bytes_per_cycle, port);
      if (supply != Supply::kL2 && !write && memory.core_miss_bytes_per_cycle > 0) {
        c.cap = std::min<double>(c.cap, memory.core_miss_bytes_per_cycle);
      }
      c.uses[kHbm] = supply == Supply::kHbm ? 1 : 0;
      c.uses[write ? kL2Write : kL2Read] = 1;
      c.uses[kCubeRead] = path == Path::kGmToL1 || path == Path::kGmToL1Nd2Nz ? 1 : 0;
    }
  }
  active_.reserve(kClasses);
}

void Flows::Queue::Add(const Entry& entry) {
  std::size_t at = entries_.size();
  entries_.push_back(entry);
  for (; at > head_ && entries_[at - 1].ends_at > entry.ends_at; --at) entries_[at] = entries_[at - 1];
  entries_[at] = entry;
}

void Flows::Queue::Pop() {
  constexpr std::size_t kMost = 256;
  ++head_;
  if (head_ < entries_.size() && head_ < kMost) return;
  entries_.erase(entries_.begin(), entries_.begin() + static_cast<std::ptrdiff_t>(head_));
  head_ = 0;
}

void Flows::Start(Path path, Supply supply, double bytes, Owner owner) {
  const int number = kSupplyCount * static_cast<int>(path) + static_cast<int>(supply);
  Class& c = classes_[static_cast<std::size_t>(number)];
  if (c.flows.empty()) {
    c.served = 0;
    active_.insert(std::lower_bound(active_.begin(), active_.end(), number), number);
  }
  c.flows.Add({c.served + bytes, owner});
  Count(number, 1);
  rates_known_ = false;
}

void Flows::Count(int number, int change) {
  std::uint16_t& count = counts_[static_cast<std::size_t>(number)];
  count = static_cast<std::uint16_t>(count + change);
  // A weight for each class, no sum of a few others.
  std::uint64_t weight = (static_cast<std::uint64_t>(number) + 1) * 0x9e3779b97f4a7c15u;
  weight = (weight ^ weight >> 29) * 0xbf58476d1ce4e5b9u;
  digest_ += static_cast<std::uint64_t>(change) * weight;
}

void Flows::ShareOut() {
  if (active_.size() > kMostShared) return ShareAnew();
  Shares& shares = known_shares_[digest_ >> (64 - kSharesBits)];
  if (shares.counts == counts_) {
    for (std::size_t a = 0; a < active_.size(); ++a)
      classes_[static_cast<std::size_t>(active_[a])].rate = shares.rates[a];
    full_ = shares.full;
    return;
  }
  ShareAnew();
  shares.counts = counts_, shares.full = full_;
  for (std::size_t a = 0; a < active_.size(); ++a)
    shares.rates[a] = classes_[static_cast<std::size_t>(active_[a])].rate;
}

void Flows::ShareAnew() {
  // All rates grow together from zero. A class stops at its cap; all classes on a
  // resource stop when it is full.
  std::array<double, kResources> left = capacity_;
  std::array<double, kResources> wanting{};  // flows that still grow
  std::array<int, kClasses> growing;
  std::size_t count = 0;
  for (const int number : active_) {
    const Class& c = classes_[static_cast<std::size_t>(number)];
    growing[count++] = number;
    const auto flows = static_cast<double>(c.flows.size());
    for (std::size_t r = 0; r < kResources; ++r) wanting[r] += c.uses[r] * flows;
  }
  full_ = {};
  while (count > 0) {
    double level = kNever;
    std::size_t fullest = 0;
    for (std::size_t r = 0; r < kResources; ++r) {
      if (wanting[r] > 0 && left[r] / wanting[r] < level) level = left[r] / wanting[r], fullest = r;
    }
    const auto stops_at_cap = [&](const Class& c) { return c.cap <= level; };
    bool any_at_cap = false;
    for (std::size_t g = 0; g < count; ++g)
      any_at_cap |= stops_at_cap(classes_[static_cast<std::size_t>(growing[g])]);
    if (!any_at_cap) full_[fullest] = true;

    std::size_t kept = 0;
    for (std::size_t g = 0; g < count; ++g) {
      Class& c = classes_[static_cast<std::size_t>(growing[g])];
      if (any_at_cap ? !stops_at_cap(c) : c.uses[fullest] == 0) {
        growing[kept++] = growing[g];
        continue;
      }
      c.rate = any_at_cap ? c.cap : level;
      const auto flows = static_cast<double>(c.flows.size());
      for (std::size_t r = 0; r < kResources; ++r) {
        left[r] = std::max(left[r] - c.uses[r] * (c.rate * flows), 0.0);
        wanting[r] -= c.uses[r] * flows;
      }
    }
    count = kept;
  }
}

double Flows::NextEnd() {
  if (rates_known_) return active_.empty() ? kNever : next_end_;
  ShareOut();
  rates_known_ = true;
  next_end_ = kNever;
  for (const int number : active_) {
    const Class& c = classes_[static_cast<std::size_t>(number)];
    const double end = now_ + std::max(c.flows.front().ends_at - c.served, 0.0) / c.rate;
    if (end < next_end_) next_end_ = end, ends_next_ = number;
  }
  return next_end_;
}

void Flows::AdvanceTo(double time) {
  NextEnd();
  const double cycles = time - now_;
  if (cycles <= 0) return;
  for (const int number : active_) {
    Class& c = classes_[static_cast<std::size_t>(number)];
    c.served += c.rate * cycles;
  }
  if (!active_.empty()) {
    hbm_limited_ += full_[kHbm] ? cycles : 0.0;
    l2_limited_ += full_[kL2Read] || full_[kCubeRead] || full_[kL2Write] ? cycles : 0.0;
  }
  now_ = time;
}

Flows::Owner Flows::TakeEnded(Path* path) {
  CUBIST_CHECK(ends_next_ >= 0 && !active_.empty(), "no flow to end");
  Class& c = classes_[static_cast<std::size_t>(ends_next_)];
  *path = static_cast<Path>(ends_next_ / kSupplyCount);
  const Entry entry = c.flows.front();
  c.flows.Pop();
  Count(ends_next_, -1);
  c.served = std::max(c.served, entry.ends_at);
  if (c.flows.empty()) active_.erase(std::find(active_.begin(), active_.end(), ends_next_));
  rates_known_ = false;
  return entry.owner;
}

}  // namespace cubist::trace
