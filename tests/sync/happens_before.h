// The order that a plan gives, by brute force: a graph of starts and ends, closed transitively. Slow and obvious;
// the checker is compared with it.
#ifndef CUBIST_TESTS_SYNC_HAPPENS_BEFORE_H_
#define CUBIST_TESTS_SYNC_HAPPENS_BEFORE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "npu_model/sync/plan.h"
#include "npu_model/trace/record.h"

namespace cubist::testing {

class HappensBefore {
 public:
  HappensBefore(const ChipSpec& chip, const trace::CoreRecord& record, const sync::CorePlan& plan, int lanes)
      : chip_(chip), record_(record) {
    for (const trace::GmAccess& access : record.accesses) runs_.push_back(RunsOf(access));
    std::size_t op = 0;
    for (std::uint32_t i = 0; i < record.instrs.size(); ++i) {
      for (; op < plan.ops.size() && plan.ops[op].position() <= 2 * std::uint64_t{i}; ++op)
        AddOp(plan.ops[op]);
      item_of_.push_back(items_.size());
      items_.push_back({record.instrs[i].pipe, record.instrs[i].lane, i, std::nullopt});
    }
    for (; op < plan.ops.size(); ++op) AddOp(plan.ops[op]);
    edges_.resize(3 * items_.size());
    Issue();
    Pipes();
    Flags(lanes);
    Close();
  }

  // A cycle: nothing on it can run.
  bool deadlocks() const { return !acyclic_; }

  // The first pair of conflicting instructions that is not ordered.
  std::optional<std::pair<std::uint32_t, std::uint32_t>> FirstRace() const {
    for (std::uint32_t j = 0; j < record_.instrs.size(); ++j) {
      for (std::uint32_t i = 0; i < j; ++i) {
        if (!SameScalarUnit(i, j) && Conflict(i, j) && !Ordered(i, j)) return std::pair(i, j);
      }
    }
    return std::nullopt;
  }

 private:
  struct Item {
    Pipe pipe;
    std::int8_t lane;
    std::uint32_t instr;
    std::optional<sync::SyncOp> op;
  };
  // Nodes of item k: its start, its end, and the end of its writes, which differs on scalar units alone.
  static std::size_t Start(std::size_t k) { return 3 * k; }
  static std::size_t End(std::size_t k) { return 3 * k + 1; }
  static std::size_t Written(std::size_t k) { return 3 * k + 2; }
  void Edge(std::size_t from, std::size_t to) { edges_[from].push_back(to); }
  void AddOp(const sync::SyncOp& op) { items_.push_back({op.pipe, op.lane, op.instr, op}); }

  void Issue() {
    std::map<int, std::vector<std::size_t>> scalar;  // of each side, so far
    for (std::size_t k = 0; k < items_.size(); ++k) {
      Edge(Start(k), End(k));
      Edge(Start(k), Written(k));
      auto& before = scalar[items_[k].lane];
      if (!before.empty()) {
        // A set does not hold up what is issued behind it.
        const std::size_t last = before.back();
        Edge(items_[last].op && IsSet(*items_[last].op) ? Start(last) : End(last), Start(k));
      }
      if (items_[k].pipe != Pipe::kS) {
        Edge(Written(k), End(k));  // other pipes write what they compute before they end
        continue;
      }
      if (items_[k].op && IsSet(*items_[k].op)) {
        for (const std::size_t s : before) Edge(Written(s), End(k));
      }
      before.push_back(k);
    }
  }

  bool InOrder(const Item& item) const {
    if (item.op) return true;
    if (item.pipe == Pipe::kV) return !chip_.sync.vector_needs_barrier;
    if (item.pipe == Pipe::kS) return true;
    if (item.pipe != Pipe::kM) return !chip_.sync.moves_need_barrier;
    const auto& dims = record_.instrs[item.instr].dims;
    return ((dims[0] + 15) / 16) * ((dims[1] + 15) / 16) >= chip_.sync.mmad_barrier_below;
  }

  void Pipes() {
    std::map<std::pair<int, Pipe>, std::vector<std::size_t>> pipes;
    for (std::size_t k = 0; k < items_.size(); ++k) {
      const Item& item = items_[k];
      if (item.pipe == Pipe::kS) continue;  // in order already, by issue
      auto& before = pipes[{item.lane, item.pipe}];
      if (!before.empty()) {
        Edge(Start(before.back()), Start(k));
        const Item& last = items_[before.back()];
        // A completed Mmad completes those before it; a flag does not.
        if (InOrder(last)) Edge(End(before.back()), Start(k));
        if (!last.op && InOrder(last)) {
          for (const std::size_t b : before) Edge(End(b), Start(k));
        }
        const bool waits_for_all = item.op && (IsSet(*item.op) || item.op->kind == sync::Kind::kPipeBarrier);
        if (waits_for_all) {
          for (const std::size_t b : before) Edge(End(b), End(k));
        }
      }
      before.push_back(k);
    }
    // A set stands on its pipe's queue: what follows it does not wait for it to take effect.
    for (auto& [pipe, queue] : pipes) {
      const bool computes = pipe.second == Pipe::kV || pipe.second == Pipe::kM;
      const bool all_in_order = !computes && !chip_.sync.moves_need_barrier;
      if (all_in_order) continue;
      for (std::size_t q = 0; q + 1 < queue.size(); ++q) {
        if (!items_[queue[q]].op || !IsSet(*items_[queue[q]].op)) continue;
        std::erase(edges_[End(queue[q])], Start(queue[q + 1]));
      }
    }
  }

  static bool IsSet(const sync::SyncOp& op) {
    return op.kind == sync::Kind::kSetFlag || op.kind == sync::Kind::kCrossSet;
  }

  void Flags(int lanes) {
    using Key = std::tuple<bool, int, Pipe, Pipe, int>;
    std::map<Key, std::deque<std::vector<std::size_t>>> sets;
    std::map<Key, std::vector<std::deque<std::size_t>>> parts;
    for (std::size_t k = 0; k < items_.size(); ++k) {
      if (!items_[k].op) continue;
      const sync::SyncOp& op = *items_[k].op;
      if (op.kind == sync::Kind::kSetFlag) sets[{false, op.lane, op.pipe, op.peer, op.id}].push_back({k});
      if (op.kind != sync::Kind::kCrossSet) continue;
      if (op.lane < 0) {
        for (int lane = 0; lane < lanes; ++lane) sets[{true, lane, Pipe::kS, Pipe::kS, op.id}].push_back({k});
        continue;
      }
      const Key key{true, -1, Pipe::kS, Pipe::kS, op.id};
      auto& part = parts[key];
      part.resize(static_cast<std::size_t>(lanes));
      part[static_cast<std::size_t>(op.lane)].push_back(k);
      if (std::any_of(part.begin(), part.end(), [](const auto& p) { return p.empty(); })) continue;
      std::vector<std::size_t> all;
      for (auto& p : part) all.push_back(p.front()), p.pop_front();
      sets[key].push_back(all);
    }
    for (std::size_t k = 0; k < items_.size(); ++k) {
      if (!items_[k].op) continue;
      const sync::SyncOp& op = *items_[k].op;
      const bool cross = op.kind == sync::Kind::kCrossWait;
      if (!cross && op.kind != sync::Kind::kWaitFlag) continue;
      auto& queue = cross ? sets[{true, op.lane, Pipe::kS, Pipe::kS, op.id}]
                          : sets[{false, op.lane, op.peer, op.pipe, op.id}];
      if (queue.empty()) continue;
      for (const std::size_t s : queue.front()) Edge(End(s), End(k));
      queue.pop_front();
    }
  }

  void Close() {
    const std::size_t n = edges_.size();
    std::vector<std::size_t> order, degree(n);
    for (const auto& to : edges_) {
      for (const std::size_t t : to) ++degree[t];
    }
    for (std::size_t v = 0; v < n; ++v) {
      if (degree[v] == 0) order.push_back(v);
    }
    for (std::size_t at = 0; at < order.size(); ++at) {
      for (const std::size_t t : edges_[order[at]]) {
        if (--degree[t] == 0) order.push_back(t);
      }
    }
    acyclic_ = order.size() == n;
    if (!acyclic_) return;
    const std::size_t words = (n + 63) / 64;
    reach_.assign(n, std::vector<std::uint64_t>(words, 0));
    for (auto v = order.rbegin(); v != order.rend(); ++v) {
      reach_[*v][*v / 64] |= std::uint64_t{1} << (*v % 64);
      for (const std::size_t t : edges_[*v]) {
        for (std::size_t w = 0; w < words; ++w) reach_[*v][w] |= reach_[t][w];
      }
    }
  }

  bool SameScalarUnit(std::uint32_t i, std::uint32_t j) const {
    const trace::Instr &x = record_.instrs[i], &y = record_.instrs[j];
    return x.pipe == Pipe::kS && y.pipe == Pipe::kS && x.lane == y.lane;
  }

  // Ordered, as far as they conflict: a scalar read is over at its end, a scalar write when it is in UB.
  bool Ordered(std::uint32_t i, std::uint32_t j) const {
    const trace::Instr& first = record_.instrs[i];
    const bool writes = Conflict(i, j, /*of_writes=*/true);
    const std::size_t over = first.pipe == Pipe::kS && writes ? Written(item_of_[i]) : End(item_of_[i]);
    const std::size_t start = Start(item_of_[j]);
    return (reach_[over][start / 64] >> (start % 64) & 1) != 0;
  }

  // Slots laid over each other conflict as a whole, which is stricter than bytes.
  bool SlotsMeet(std::int32_t x, std::int32_t y) const {
    const auto &a = record_.slots[static_cast<std::size_t>(x)],
               &b = record_.slots[static_cast<std::size_t>(y)];
    return a.buffer == b.buffer && a.lane == b.lane && a.address < b.address + b.bytes &&
           b.address < a.address + a.bytes;
  }

  // Whether j touches what i writes or writes what i reads; `of_writes`: whether j touches what i writes.
  bool Conflict(std::uint32_t i, std::uint32_t j, bool of_writes = false) const {
    for (const trace::OperandUse u : record_.instrs[i].uses) {
      for (const trace::OperandUse v : record_.instrs[j].uses) {
        if (!u.used() || !v.used() || (!u.writes() && (of_writes || !v.writes()))) continue;
        const trace::Operand a = WholeBlocks(i, u), b = WholeBlocks(j, v);
        if (a.slot != b.slot && a.slot >= 0 && b.slot >= 0 && SlotsMeet(a.slot, b.slot)) return true;
        if (a.slot == b.slot && a.row_begin < b.row_end && b.row_begin < a.row_end &&
            a.col_begin < b.col_end && b.col_begin < a.col_end) {
          return true;
        }
      }
    }
    return GmConflict(i, j, of_writes);
  }

  // A move into UB writes to the end of its last block.
  trace::Operand WholeBlocks(std::uint32_t i, trace::OperandUse use) const {
    trace::Operand o = record_.operands[use.operand()];
    if (record_.instrs[i].pipe != Pipe::kMte2 || !use.writes() || o.slot < 0) return o;
    const trace::SlotInfo& slot = record_.slots[static_cast<std::size_t>(o.slot)];
    const auto block = static_cast<std::int32_t>(kBlockBytes / SizeOf(slot.dtype));
    if (slot.buffer == Buffer::kUB) o.col_end = (o.col_end + block - 1) / block * block;
    return o;
  }

  // Bytes of GM from .. to, ascending.
  using Runs = std::vector<std::pair<std::int64_t, std::int64_t>>;

  static Runs RunsOf(const trace::GmAccess& a) {
    Runs runs;
    for (std::int64_t row = 0; row < a.rows; ++row) {
      for (std::int64_t burst = 0; burst < a.bursts; ++burst) {
        const std::int64_t begin = a.offset + row * a.row_stride + burst * a.burst_stride;
        runs.emplace_back(begin, begin + a.burst_bytes);
      }
    }
    std::sort(runs.begin(), runs.end());
    return runs;
  }
  static bool Meet(const Runs& a, const Runs& b) {
    for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
      if (a[i].first < b[j].second && b[j].first < a[i].second) return true;
      a[i].second <= b[j].second ? ++i : ++j;
    }
    return false;
  }

  bool GmConflict(std::uint32_t i, std::uint32_t j, bool of_writes) const {
    const std::int32_t x = record_.instrs[i].access, y = record_.instrs[j].access;
    if (x < 0 || y < 0) return false;
    const trace::GmAccess &a = record_.accesses[static_cast<std::size_t>(x)],
                          &b = record_.accesses[static_cast<std::size_t>(y)];
    if (a.tensor < 0 || a.tensor != b.tensor || (!a.writes && (of_writes || !b.writes))) return false;
    return a.offset < b.end() && b.offset < a.end() &&
           Meet(runs_[static_cast<std::size_t>(x)], runs_[static_cast<std::size_t>(y)]);
  }

  const ChipSpec& chip_;
  const trace::CoreRecord& record_;
  std::vector<Runs> runs_;  // of each access
  std::vector<Item> items_;
  std::vector<std::size_t> item_of_;
  std::vector<std::vector<std::size_t>> edges_;
  std::vector<std::vector<std::uint64_t>> reach_;
  bool acyclic_ = false;
};

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_SYNC_HAPPENS_BEFORE_H_
