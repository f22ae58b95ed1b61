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
      runs_(static_cast<std::size_t>(CeilDiv(extent, kRunLines * line))),
      changes_((runs_.size() >> kPageRunsShift) + 1),
      seen_(std::size_t{1} << kSeenBits) {
  CUBIST_CHECK(std::has_single_bit(static_cast<std::uint64_t>(line)) && line >= 4,
               "lines of L2 of " + std::to_string(line) + " bytes: not a power of two from 4 up");
}

void L2Cache::TouchRows(std::int64_t address, std::int64_t bytes, std::int64_t rows, std::int64_t stride,
                        bool write, Tally* tally, double now, double fetched_at) {
  if (bytes <= 0) return;
  // Rows farther apart than pages are cheaper to walk than their pages.
  const bool dense = stride > 0 && stride >> (line_shift_ + kPageLinesShift) == 0;
  if (!write && rows >= kRowsToRemember && dense) {
    TouchAgain({address, bytes, rows, stride}, tally, now, fetched_at);
  } else {
    TouchAll({address, bytes, rows, stride}, write, tally, now, fetched_at);
  }
}

// Reads of rows that were all there when last read so, and are: nothing to do but count.
void L2Cache::TouchAgain(const Rows& rows, Tally* tally, double now, double fetched_at) {
  constexpr std::uint64_t kSpread = 0x9e3779b97f4a7c15u;
  const auto key = static_cast<std::uint64_t>(rows.address ^ rows.bytes << 40 ^ rows.count << 52);
  Seen& seen = seen_[key * kSpread >> (64 - kSeenBits)];
  const std::int64_t end = rows.address + (rows.count - 1) * rows.stride + rows.bytes;
  const int page_shift = line_shift_ + kPageLinesShift;
  std::uint64_t changes = 0;
  for (std::int64_t page = rows.address >> page_shift; page <= (end - 1) >> page_shift; ++page)
    changes += changes_[static_cast<std::size_t>(page)];
  if (seen.rows == rows && seen.changes == changes && seen.at <= now) {
    tally->lines += seen.lines;
    return;
  }
  const std::int64_t lines = tally->lines;
  if (TouchAll(rows, false, tally, now, fetched_at)) seen = {rows, tally->lines - lines, changes, now};
}

bool L2Cache::TouchAll(const Rows& all, bool write, Tally* tally, double now, double fetched_at) {
  constexpr std::uint64_t kRun = kRunLines;
  bool there = true;
  const auto touch = [&](std::uint64_t number, std::uint32_t lines) {
    Run& run = runs_[number];
    if ((lines & ~std::uint32_t{run.present}) == 0 && !write) {
      run.hit = true;
      if (run.there_at > now) there = false, tally->on_the_way += kBits[lines];
    } else {
      there = false;
      TouchSlowly(number, static_cast<std::uint8_t>(lines), write, tally, now, fetched_at);
    }
  };
  const int run_shift = line_shift_ + kRunShift;
  std::int64_t address = all.address;
  for (std::int64_t row = 0; row < all.count; ++row, address += all.stride) {
    const auto first_line = static_cast<std::uint64_t>(address) >> line_shift_;
    const auto last_line = static_cast<std::uint64_t>(address + all.bytes - 1) >> line_shift_;
    const std::uint64_t first = first_line / kRun, last = last_line / kRun;
    const std::uint32_t first_lines = 0xffu << first_line % kRun & 0xffu,
                        last_lines = 0xffu >> (kRun - 1 - last_line % kRun);
    const auto lines = static_cast<std::int64_t>(last_line - first_line + 1);
    if (first == last && (all.stride & ((std::int64_t{1} << run_shift) - 1)) == 0) {
      // All rows take the same lines of one run each.
      const auto step = static_cast<std::uint64_t>(all.stride >> run_shift);
      const auto count = static_cast<std::uint64_t>(all.count);
      for (std::uint64_t i = 0; i < count; ++i) touch(first + i * step, first_lines & last_lines);
      tally->lines += lines * all.count;
      return there;
    }
    tally->lines += lines;
    if (first == last) {
      touch(first, first_lines & last_lines);
      continue;
    }
    touch(first, first_lines);
    for (std::uint64_t number = first + 1; number < last; ++number) touch(number, 0xff);
    touch(last, last_lines);
  }
  return there;
}

// Lines of one run that are not all there, or change.
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
  if (!write) {
    run.there_at = static_cast<float>(fetched_at);
    ++changes_[number >> kPageRunsShift];
  }
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
  constexpr std::size_t kAhead = 8;
  const std::uint32_t number = queue_.front();
  queue_.pop_front();
  if (queue_.size() > kAhead) __builtin_prefetch(&runs_[queue_[kAhead]], 1);
  Run& run = runs_[number];
  ++changes_[number >> kPageRunsShift];
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
