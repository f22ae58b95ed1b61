#include "npu_model/trace/global_memory.h"

#include <algorithm>
#include <bit>

#include "npu_model/line_slots.h"

namespace cubist::trace {
GlobalMemory::GlobalMemory(const Record& record, const ChipSpec& chip)
    : line_(chip.memory.l2_line),
      miss_rate_(chip.memory.core_miss_bytes_per_cycle),
      turn_around_(chip.memory.turn_around) {
  std::vector<std::int64_t> extents(record.tensors.size());
  for (std::size_t t = 0; t < extents.size(); ++t) extents[t] = record.tensors[t].bytes;
  for (const Phase& phase : record.phases) {
    std::int64_t workspace = 0;
    for (const CoreRecord& core : phase.cores) {
      workspace += RoundUp(core.workspace_bytes, line_);
      for (const GmAccess& access : core.accesses) {
        if (access.tensor < 0) continue;
        const auto tensor = static_cast<std::size_t>(access.tensor);
        if (extents.size() <= tensor) extents.resize(tensor + 1);
        extents[tensor] = std::max(extents[tensor], access.end());
      }
    }
    workspace_bytes_ = std::max(workspace_bytes_, workspace);
  }
  constexpr std::int64_t kApart = 8;  // lines: tensors share no run of L2
  std::int64_t end = 0;
  for (const std::int64_t extent : extents) {
    tensors_.push_back(end);
    end += RoundUp(extent, kApart * line_);
  }
  workspace_ = end;
  l2_ =
      std::make_unique<L2Cache>(chip.memory.l2_bytes, line_, end + workspace_bytes_, chip.memory.found_dirty);
}

// Lines' worth of time that HBM turns from reading to writing and back. Controllers collect what is to be written, so the
// turns are as many as the lines written, as long as there is as much to read between them.
double GlobalMemory::TurnAround(std::int64_t fetched, std::int64_t written_back) {
  constexpr std::int64_t kCollected = 4096;  // lines
  read_before_ += fetched;
  const std::int64_t turned = std::min(read_before_, written_back);
  read_before_ = std::min(read_before_ - turned, kCollected);
  return turn_around_ * static_cast<double>(turned);
}

GlobalMemory::Transfer GlobalMemory::Touch(const GmAccess& access, std::int64_t core_workspace, double now) {
  const std::int64_t first = AddressOf(access, core_workspace);
  const int shift = std::countr_zero(static_cast<std::uint64_t>(line_));
  std::int64_t slots = 0;
  L2Cache::Tally tally;
  const double fetched_at = miss_rate_ > 0 ? now + static_cast<double>(access.bytes()) / miss_rate_ : now;
  // A column of bursts at a time where there is one, a row of them where there are many.
  const bool columns = access.bursts == 1;
  const std::int64_t count = columns ? access.rows : access.bursts,
                     stride = columns ? access.row_stride : access.burst_stride;
  for (std::int64_t row = 0; row < (columns ? 1 : access.rows); ++row) {
    const std::int64_t address = first + row * access.row_stride;
    slots += LineSlots(address, access.burst_bytes, count, stride, shift);
    l2_->TouchRows(address, access.burst_bytes, count, stride, access.writes, &tally, now, fetched_at);
  }
  // L2 adds where a line stands, and fetches it first; what only writes needs none of what was there.
  const std::int64_t fetched = access.writes && !access.adds ? 0 : tally.missed;
  if (!access.writes) {
    read_ += access.bytes();
    missed_ += static_cast<double>(access.bytes()) * static_cast<double>(tally.missed) /
               static_cast<double>(std::max<std::int64_t>(tally.lines, 1));
  }
  const std::int64_t late = access.writes ? 0 : tally.on_the_way;
  const auto bytes = [&](std::int64_t lines) { return static_cast<double>(lines * line_); };
  hbm_ += bytes(fetched + tally.written_back);
  const double turns = TurnAround(fetched, tally.written_back) * static_cast<double>(line_);
  return {bytes(slots), bytes(fetched + tally.written_back) + turns, bytes(late)};
}

}  // namespace cubist::trace
