#include "npu_model/sync/touches.h"

#include <algorithm>
#include <iterator>

#include "npu_model/sync/ordered.h"
#include "npu_model/trace/dependencies.h"

namespace cubist::sync {
namespace {

// Whether rows of two matrices with one stride share a byte. Row r of a and row s of b meet where
// -b.burst_bytes < (r - s) * stride + (a.offset - b.offset) < ... ; only r - s matters.
bool RowsMeet(const trace::GmAccess& a, const trace::GmAccess& b) {
  const std::int64_t stride = a.row_stride, apart = b.offset - a.offset;
  // k = r - s with apart - a.burst_bytes < k * stride < apart + b.burst_bytes
  const auto floor_div = [](std::int64_t x, std::int64_t y) { return x / y - (x % y < 0 ? 1 : 0); };
  const std::int64_t least = floor_div(apart - a.burst_bytes, stride) + 1;
  const std::int64_t most = -floor_div(-(apart + b.burst_bytes), stride) - 1;
  return std::max(least, -(b.rows - 1)) <= std::min(most, a.rows - 1);
}

}  // namespace

bool BytesMeet(const trace::GmAccess& a, const trace::GmAccess& b) {
  if (a.bursts > 1 || b.bursts > 1) return true;
  trace::GmAccess x = a, y = b;
  if (x.rows == 1) x.row_stride = y.row_stride;
  if (y.rows == 1) y.row_stride = x.row_stride;
  return x.row_stride <= 0 || x.row_stride != y.row_stride || RowsMeet(x, y);
}

bool CoversRows(const trace::GmAccess& a, const trace::GmAccess* b) {
  return b != nullptr && a.offset == b->offset && a.rows == b->rows && a.row_stride == b->row_stride &&
         a.bursts == b->bursts && a.burst_stride == b->burst_stride && a.burst_bytes == b->burst_bytes;
}

Area AreaOf(const trace::CoreRecord& record, const ChipSpec& chip, const trace::Operand& o, bool pads) {
  Area area{o.row_begin, o.row_end, o.col_begin, o.col_end};
  if (o.slot < 0) return area;
  const trace::SlotInfo& slot = record.slots[static_cast<std::size_t>(o.slot)];
  if (slot.buffer == Buffer::kUB && pads)
    area.col_end = RoundUp(area.col_end, kBlockBytes / SizeOf(slot.dtype));
  if (slot.buffer == Buffer::kUB || slot.buffer == Buffer::kBT) return area;
  const std::int64_t panel =
      slot.buffer == Buffer::kL0C ? chip.mmad.n_step : kBlockBytes / chip.OperandBytes(slot.dtype);
  area.col_begin -= area.col_begin % panel;
  area.col_end = RoundUp(area.col_end, panel);
  return area;
}

std::vector<char> TensorsInOrder(const trace::CoreRecord& record, const ChipSpec& chip) {
  struct Use {
    const trace::GmAccess* gm;
    int agent;
  };
  std::vector<char> written;
  for (const trace::GmAccess& access : record.accesses) {
    if (access.tensor < 0) continue;
    const auto tensor = static_cast<std::size_t>(access.tensor);
    if (written.size() <= tensor) written.resize(tensor + 1);
    if (access.writes) written[tensor] = 1;
  }
  std::vector<std::vector<Use>> uses(written.size());
  for (const trace::Instr& instr : record.instrs) {
    if (instr.access < 0) continue;
    const trace::GmAccess& access = record.accesses[static_cast<std::size_t>(instr.access)];
    if (access.tensor < 0 || !written[static_cast<std::size_t>(access.tensor)]) continue;
    uses[static_cast<std::size_t>(access.tensor)].push_back(
        {&access, trace::AgentOf(instr.pipe, instr.lane)});
  }
  const auto meet = [&chip](std::vector<Use>& of_tensor) {
    const int first = of_tensor.empty() ? 0 : of_tensor.front().agent;
    const auto by_first = [&](const Use& use) { return use.agent == first; };
    if (!chip.sync.moves_need_barrier && std::all_of(of_tensor.begin(), of_tensor.end(), by_first))
      return false;
    // By their first bytes: each against those before it that reach as far.
    SortBy(of_tensor, [](const Use& use) { return use.gm->offset; });
    const auto reaches = [](const Use& x, const Use& y) { return x.gm->end() > y.gm->offset; };
    if (std::ranges::adjacent_find(of_tensor, reaches) == of_tensor.end()) return false;
    constexpr std::int64_t kMostPairs = 1 << 20;  // Beyond, they are taken to meet.
    std::int64_t pairs = 0;
    std::vector<Use> open;
    for (const Use& use : of_tensor) {
      std::erase_if(open, [&](const Use& old) { return old.gm->end() <= use.gm->offset; });
      pairs += std::ssize(open);
      if (pairs > kMostPairs) return true;
      for (const Use& old : open) {
        const bool in_order = old.agent == use.agent && !chip.sync.moves_need_barrier;
        const bool conflict = !in_order && (old.gm->writes || use.gm->writes);
        if (conflict && BytesMeet(*old.gm, *use.gm)) return true;
      }
      open.push_back(use);
    }
    return false;
  };
  std::vector<char> shared;
  for (std::vector<Use>& of_tensor : uses) shared.push_back(meet(of_tensor));
  return shared;
}

}  // namespace cubist::sync
