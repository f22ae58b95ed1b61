// What a core has touched so far, as the planner sees it: rectangles of slots and of GM, and which of them meet.
#ifndef CUBIST_NPU_MODEL_SYNC_TOUCHES_H_
#define CUBIST_NPU_MODEL_SYNC_TOUCHES_H_

#include <cstdint>
#include <vector>

#include "npu_model/trace/record.h"

namespace cubist::sync {

// A rectangle of a slot, or of bytes of GM.
struct Area {
  std::int64_t row_begin = 0, row_end = 1, col_begin = 0, col_end = 0;
  const trace::GmAccess* gm = nullptr;  // the exact bytes, where the rectangle is only their bounds
};

inline bool BoundsMeet(const Area& a, const Area& b) {
  return a.row_begin < b.row_end && b.row_begin < a.row_end && a.col_begin < b.col_end &&
         b.col_begin < a.col_end;
}
// Whether two pieces of GM whose bounds meet share bytes. Exact for matrices of one stride and for contiguous
// bytes against rows; otherwise true, which is stricter.
bool BytesMeet(const trace::GmAccess& a, const trace::GmAccess& b);
inline bool Meet(const Area& a, const Area& b) {
  return BoundsMeet(a, b) && (a.gm == nullptr || b.gm == nullptr || BytesMeet(*a.gm, *b.gm));
}
// Whether every byte of b is one of a.
bool CoversRows(const trace::GmAccess& a, const trace::GmAccess* b);
inline bool Covers(const Area& a, const Area& b) {
  if (a.gm != nullptr && (a.gm->rows > 1 || a.gm->bursts > 1)) return CoversRows(*a.gm, b.gm);
  return a.row_begin <= b.row_begin && b.row_end <= a.row_end && a.col_begin <= b.col_begin &&
         b.col_end <= a.col_end;
}

// Where an operand lies. The Cube's buffers are moved by whole panels of columns. A move that pads writes whole blocks
// of UB.
Area AreaOf(const trace::CoreRecord& record, const ChipSpec& chip, const trace::Operand& o, bool pads);
inline bool Pads(const trace::Instr& instr, trace::OperandUse use) {
  return instr.pipe == Pipe::kMte2 && use.writes();
}

// By tensor: whether two instructions of the core that are not in order by themselves touch the same bytes of it, one of
// them writing: of two pipes, or of one whose moves need a barrier. Only these tensors make the core wait for itself.
std::vector<char> TensorsInOrder(const trace::CoreRecord& record, const ChipSpec& chip);

struct Touch {
  Area area;
  std::uint32_t instr = 0;
  std::uint8_t agent = 0;
  bool writes = false;
};

// The accesses to one slot or tensor that a later one may have to wait for.
class Past {
 public:
  template <class Visit>
  void ForEachConflict(const Touch& now, Visit visit) const {
    for (const Touch& old : touches_) {
      if ((now.writes || old.writes) && Meet(old.area, now.area)) visit(old);
    }
  }
  // Waiting for a write waits for what it covers, and waiting for a pipe's read for its earlier ones.
  void Add(const Touch& now) {
    std::erase_if(touches_, [&](const Touch& old) {
      return (now.writes || (!old.writes && old.agent == now.agent)) && Covers(now.area, old.area);
    });
    touches_.push_back(now);
  }

 private:
  std::vector<Touch> touches_;
};

}  // namespace cubist::sync

#endif  // CUBIST_NPU_MODEL_SYNC_TOUCHES_H_
