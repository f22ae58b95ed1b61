// Which lines of global memory are in L2.
#ifndef CUBIST_NPU_MODEL_TRACE_L2_CACHE_H_
#define CUBIST_NPU_MODEL_TRACE_L2_CACHE_H_

#include <cstdint>
#include <deque>
#include <vector>

namespace cubist::trace {

// Fully associative, with second-chance replacement by runs of eight lines: a run that was hit since it was
// last looked at is kept for another round. Writes allocate without fetching. At first it is full of what ran
// before: a share `found_dirty` of the lines that make room has to be written back.
class L2Cache {
 public:
  struct Tally {
    std::int64_t lines = 0;         // touched
    std::int64_t missed = 0;        // of these, not present
    std::int64_t on_the_way = 0;    // of these, still being fetched for an earlier transfer
    std::int64_t written_back = 0;  // changed lines that had to leave
  };

  // `extent` bytes of memory, at addresses from 0. `line` is a power of two.
  L2Cache(std::int64_t capacity, std::int64_t line, std::int64_t extent, double found_dirty = 0);

  // At time `now`; lines that a read misses are there at `fetched_at`.
  void Touch(std::int64_t address, std::int64_t bytes, bool write, Tally* tally, double now = 0,
             double fetched_at = 0) {
    TouchRows(address, bytes, 1, 0, write, tally, now, fetched_at);
  }
  // What a Touch of this address will look at comes nearer.
  void Prefetch(std::int64_t address) const {
    __builtin_prefetch(runs_.data() + (static_cast<std::uint64_t>(address) >> line_shift_ >> kRunShift), 1);
  }
  // `rows` pieces of `bytes` each, one after the other, their first bytes `stride` apart.
  void TouchRows(std::int64_t address, std::int64_t bytes, std::int64_t rows, std::int64_t stride, bool write,
                 Tally* tally, double now, double fetched_at);

 private:
  static constexpr int kRunShift = 3;
  static constexpr std::int64_t kRunLines = 1 << kRunShift;
  struct Run {
    std::uint8_t present = 0, changed = 0;  // a bit per line
    bool queued = false, hit = false;
    float there_at = 0;  // when the last missed line of it is fetched
  };
  struct Rows {
    std::int64_t address = 0, bytes = 0, count = 0, stride = 0;
    friend bool operator==(const Rows&, const Rows&) = default;
  };
  // Rows that were all there, and marked as hit, at some time; they still are as long as nothing changed in their pages
  // but what was written.
  struct Seen {
    Rows rows;
    std::int64_t lines = 0;
    std::uint64_t changes = 0;
    double at = 0;
  };
  static constexpr std::int64_t kRowsToRemember = 16;
  static constexpr int kSeenBits = 12, kPageRunsShift = 6, kPageLinesShift = kPageRunsShift + kRunShift;

  void TouchAgain(const Rows& rows, Tally* tally, double now, double fetched_at);
  // Whether all was there and stays as it is.
  bool TouchAll(const Rows& rows, bool write, Tally* tally, double now, double fetched_at);
  void TouchSlowly(std::uint64_t number, std::uint8_t lines, bool write, Tally* tally, double now,
                   double fetched_at);
  void MakeRoom(Tally* tally);
  void Evict(Tally* tally);

  std::int64_t capacity_lines_;
  int line_shift_;
  std::int64_t present_lines_ = 0;
  std::int64_t foreign_lines_;  // left by what ran before
  double found_dirty_, owed_ = 0;
  std::vector<Run> runs_;
  std::vector<std::uint64_t>
      changes_;  // by page: runs that got lines by a read, or were looked at to make room
  std::vector<Seen> seen_;
  std::deque<std::uint32_t> queue_;  // runs with present lines, the oldest first
};

}  // namespace cubist::trace

#endif  // CUBIST_NPU_MODEL_TRACE_L2_CACHE_H_
