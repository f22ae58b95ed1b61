#include "npu_model/trace/l2_cache.h"

#include <algorithm>
#include <array>
#include <bit>

#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist::trace {
namespace {

// Of eight lines; a popcount is a call where the compiler may not use the instruction.
constexpr std::array<std::uint8_t, 256> kBits = [] {
  std::array<std::uint8_t, 256> bits{};
  for (unsigned lines = 0; lines < bits.size(); ++lines)
    bits[lines] = static_cast<std::uint8_t>(std::popcount(lines));
  return bits;
}();

}  // namespace

L2Cache::L2Cache(std::int64_t capacity, std::int64_t line, std::int64_t extent, double found_dirty)
    : capacity_lines_(std::max<std::int64_t>(capacity / line, 1)),
      line_shift_(std::countr_zero(static_cast<std::uint64_t>(line))),
      foreign_lines_(capacity_lines_),
      found_dirty_(found_dirty),
      runs_(static_cast<std::size_t>(CeilDiv(extent, kRunLines * line))) {
  CUBIST_CHECK(std::has_single_bit(static_cast<std::uint64_t>(line)) && line >= 4,
               "lines of L2 of " + std::to_string(line) + " bytes: not a power of two from 4 up");
}

void L2Cache::TouchRows(std::int64_t address, std::int64_t bytes, std::int64_t rows, std::int64_t stride,
                        bool write, Tally* tally, double now, double fetched_at) {
  if (bytes <= 0) return;
  constexpr std::uint64_t kRun = kRunLines;
  for (std::int64_t row = 0; row < rows; ++row, address += stride) {
    const auto first_line = static_cast<std::uint64_t>(address) >> line_shift_;
    const auto last_line = static_cast<std::uint64_t>(address + bytes - 1) >> line_shift_;
    const std::uint64_t last = last_line / kRun;
    tally->lines += static_cast<std::int64_t>(last_line - first_line + 1);
    std::uint32_t mask = 0xffu << first_line % kRun & 0xffu;
    for (std::uint64_t number = first_line / kRun; number <= last; ++number, mask = 0xffu) {
      if (number == last) mask &= 0xffu >> (kRun - 1 - last_line % kRun);
      const auto lines = static_cast<std::uint8_t>(mask);
      Run& run = runs_[number];
      if ((lines & ~run.present) == 0 && run.there_at <= now && !write) {
        run.hit = true;
      } else {
        TouchSlowly(number, lines, write, tally, now, fetched_at);
      }
    }
  }
}

// Lines of one run that are not all there, or not yet, or change.
void L2Cache::TouchSlowly(std::uint64_t number, std::uint8_t lines, bool write, Tally* tally, double now,
                          double fetched_at) {
  Run& run = runs_[number];
  const auto absent = static_cast<std::uint8_t>(lines & ~run.present);
  if (write) run.changed |= lines;
  if (run.there_at > now) tally->on_the_way += kBits[lines & run.present];
  run.hit |= absent != lines;
  if (absent == 0) return;
  run.present |= absent;
  const int missed = kBits[absent];
  tally->missed += missed;
  if (!write) run.there_at = static_cast<float>(fetched_at);
  present_lines_ += missed;
  if (!run.queued) {
    run.queued = true;
    queue_.push_back(static_cast<std::uint32_t>(number));
  }
  MakeRoom(tally);
}

void L2Cache::MakeRoom(Tally* tally) {
  const std::int64_t excess = std::min(present_lines_ + foreign_lines_ - capacity_lines_, foreign_lines_);
  if (excess > 0) {
    foreign_lines_ -= excess;
    owed_ += found_dirty_ * static_cast<double>(excess);
    const auto whole = static_cast<std::int64_t>(owed_);
    owed_ -= static_cast<double>(whole);
    tally->written_back += whole;
  }
  while (present_lines_ > capacity_lines_) Evict(tally);
}

void L2Cache::Evict(Tally* tally) {
  const std::uint32_t number = queue_.front();
  queue_.pop_front();
  Run& run = runs_[number];
  if (run.hit) {
    run.hit = false;
    queue_.push_back(number);
    return;
  }
  present_lines_ -= kBits[run.present];
  tally->written_back += kBits[run.changed];
  run = {};
}

}  // namespace cubist::trace
