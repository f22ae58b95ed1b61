#include "npu_model/arena.h"

#include <algorithm>

namespace cubist {

void Arena::Place(const SlotRequest& request, int lane, Slot* slots) {
  CUBIST_CHECK(lane < kMaxVectorPerCube, "more Vector cores per Cube core than an arena holds");
  CUBIST_CHECK(request.stages > 0 && request.rows >= 0 && request.cols >= 0,
               "a ring of no stages or negative size");
  const BufferSpec& buffer = chip_->buffer(request.buffer);
  std::int64_t& used = used_[static_cast<std::size_t>(request.buffer)][static_cast<std::size_t>(lane + 1)];
  const std::int64_t bytes = chip_->SlotBytes(request.buffer, request.dtype, request.rows, request.cols);
  const std::int64_t begin = used;
  for (int stage = 0; stage < request.stages; ++stage) {
    Slot& slot = slots[stage];
    slot.id = next_id_++;
    slot.lane = lane;
    slot.address = used;
    slot.bytes = bytes;
    used += bytes;
  }
  if (placed_count_ < placed_.size()) {
    placed_[placed_count_++] = {request.buffer, lane, begin, used, request.owner, request.stages};
  }
  if (used > buffer.capacity && finding_.empty()) {
    finding_ = std::string("ring '") + request.owner + "' needs " + std::to_string(used - begin) +
               " bytes (" + std::to_string(request.stages) + " x " + std::to_string(request.rows) + " x " +
               std::to_string(request.cols) + " " + NameOf(request.dtype) + "), which ends " +
               std::to_string(used - buffer.capacity) + " bytes beyond " + NameOf(request.buffer) + " (" +
               std::to_string(buffer.capacity) + " bytes) of " + chip_->name + "\n" +
               MapOf(request.buffer, lane);
  }
}

std::string Arena::MapOf(Buffer buffer, int lane) const {
  const auto padded = [](std::int64_t value) {
    std::string text = std::to_string(value);
    return std::string(text.size() < 9 ? 9 - text.size() : 0, ' ') + text;
  };
  std::string map = std::string("  ") + NameOf(buffer) + " map, bytes:\n";
  for (const Placed& p : std::span(placed_).first(placed_count_)) {
    if (p.buffer != buffer || p.lane != lane) continue;
    map += "  [" + padded(p.begin) + "," + padded(p.end) + ")  " + p.owner + ", " + std::to_string(p.stages) +
           (p.stages == 1 ? " slot" : " slots") + "\n";
  }
  return map;
}

}  // namespace cubist
