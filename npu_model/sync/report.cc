#include "npu_model/sync/report.h"

#include <algorithm>
#include <deque>
#include <map>
#include <string_view>
#include <tuple>
#include <utility>

#include "npu_model/json_text.h"

namespace cubist::sync {
namespace {

using json::List;
using json::Member;
using trace::CoreRecord;
using trace::Record;

// Pairs the sets and waits of one core, and adds them to the rows.
class CoreFold {
 public:
  using Key = std::tuple<std::size_t, bool, bool, bool, Pipe, Pipe, std::string_view, std::uint32_t,
                         std::string_view, std::string_view, std::uint32_t, std::string_view>;
  using Rows = std::map<Key, PlanRow>;

  // The ops of each row, on all cores.
  using Members = std::map<Key, std::vector<OpPlace>>;

  CoreFold(const CoreRecord& record, std::size_t phase, std::size_t core, Rows& rows, Members& members)
      : record_(record), phase_(phase), core_(core), rows_(rows), members_(members) {}

  void Add(const CorePlan& plan) {
    for (std::size_t o = 0; o < plan.ops.size(); ++o) {
      const Numbered op{plan.ops[o], o};
      if (op.instr >= record_.instrs.size()) continue;
      switch (op.kind) {
        case Kind::kPipeBarrier:
          AddRow(op, op, {op});
          break;
        case Kind::kSetFlag:
          up_[{op.lane, op.pipe, op.peer, op.id}].push_back(op);
          break;
        case Kind::kWaitFlag:
          Pair(up_[{op.lane, op.peer, op.pipe, op.id}], op);
          break;
        default:
          AddCross(op);
      }
    }
    for (auto& [key, event] : events_) {
      if (event.sets.empty() || event.waits.empty()) continue;
      std::vector<Numbered> all = event.sets;
      all.insert(all.end(), event.waits.begin(), event.waits.end());
      AddRow(OwnOf(event.sets), OwnOf(event.waits), all);
    }
    for (const auto& [key, count] : counts_) {
      PlanRow& row = rows_[key];
      row.count += count;
      row.most_on_core = std::max(row.most_on_core, count);
    }
    for (auto& [key, flags] : new_rows_) {
      std::sort(flags.begin(), flags.end(), [](const Flag& x, const Flag& y) { return x.set < y.set; });
      PlanRow& row = rows_[key];
      row.turn = TurnOf(flags);
      row.first_set = ExecutionOf(flags.front().set), row.first_wait = ExecutionOf(flags.front().wait);
    }
  }

 private:
  struct Numbered : SyncOp {
    Numbered(const SyncOp& op, std::size_t number) : SyncOp(op), number(number) {}
    std::size_t number;  // in CorePlan::ops
  };
  struct Event {
    std::vector<Numbered> sets, waits;
  };
  struct Flag {
    std::uint32_t set, wait;  // instructions
    int id;
  };

  // The shortest run of ids that, repeated, is all of theirs; none where that is long.
  static std::vector<int> TurnOf(const std::vector<Flag>& flags) {
    constexpr std::size_t kLongest = 16;
    for (std::size_t length = 1; length <= std::min(kLongest, flags.size()); ++length) {
      std::size_t i = length;
      while (i < flags.size() && flags[i].id == flags[i - length].id) ++i;
      if (i < flags.size()) continue;
      std::vector<int> turn;
      for (std::size_t n = 0; n < length; ++n) turn.push_back(flags[n].id);
      return turn;
    }
    return {};
  }
  // How often an instruction's line has been executed when it has.
  std::int64_t ExecutionOf(std::uint32_t number) const {
    const trace::Instr& instr = record_.instrs[number];
    const auto alike = [&](const trace::Instr& other) {
      return other.line == instr.line && other.op == instr.op && other.pipe == instr.pipe &&
             other.lane == instr.lane;
    };
    return 1 + std::count_if(record_.instrs.begin(), record_.instrs.begin() + number, alike);
  }

  void Pair(std::deque<Numbered>& sets, const Numbered& wait) {
    if (sets.empty()) return;
    AddRow(sets.front(), wait, {sets.front(), wait});
    sets.pop_front();
  }

  // The n-th set and the n-th wait of an id belong together, on every Vector core.
  void AddCross(const Numbered& op) {
    const bool sets = op.kind == Kind::kCrossSet;
    const bool from_cube = sets == (op.lane < 0);
    Event& event = events_[{from_cube, op.id, nth_[{sets, op.lane, op.id}]++}];
    (sets ? event.sets : event.waits).push_back(op);
  }

  // Of the parts of an event the one that stands at an instruction of its own pipe; the others only keep step.
  const Numbered& OwnOf(const std::vector<Numbered>& ops) const {
    for (const Numbered& op : ops) {
      const trace::Instr& instr = record_.instrs[op.instr];
      if (instr.pipe == op.pipe && instr.lane == op.lane) return op;
    }
    return ops.front();
  }

  PlanRow::Line LineOf(const SyncOp& op) const {
    const trace::Instr& instr = record_.instrs[op.instr];
    const trace::SourceLine& line = record_.lines[instr.line];
    return {line.file, line.line, trace::NameOf(instr.op)};
  }

  void AddRow(const SyncOp& set, const SyncOp& wait, const std::vector<Numbered>& all) {
    PlanRow row;
    row.phase = phase_;
    row.on_cube = set.lane < 0;
    row.cross_core = set.kind == Kind::kCrossSet;
    row.barrier = set.kind == Kind::kPipeBarrier;
    row.from = set.pipe, row.to = wait.pipe;
    row.set = LineOf(set), row.wait = LineOf(wait);
    const Key key{phase_,       !row.on_cube, row.cross_core, row.barrier,   row.from,      row.to,
                  row.set.file, row.set.line, row.set.what,   row.wait.file, row.wait.line, row.wait.what};
    const auto [place, is_new] = rows_.try_emplace(key, row);
    PlanRow& known = place->second;
    if (is_new) new_rows_[key];
    if (const auto mine = new_rows_.find(key); mine != new_rows_.end())
      mine->second.push_back({set.instr, wait.instr, set.id});
    if (!row.barrier && std::find(known.ids.begin(), known.ids.end(), set.id) == known.ids.end())
      known.ids.push_back(set.id);
    ++counts_[key];
    for (const Numbered& op : all) members_[key].push_back({phase_, core_, op.number});
  }

  const CoreRecord& record_;
  std::size_t phase_, core_;
  Rows& rows_;
  Members& members_;
  std::map<std::tuple<int, Pipe, Pipe, int>, std::deque<Numbered>> up_;
  std::map<std::tuple<bool, int, int>, std::size_t> nth_;
  std::map<std::tuple<bool, int, std::size_t>, Event> events_;
  std::map<Key, std::int64_t> counts_;
  std::map<Key, std::vector<Flag>> new_rows_;  // Those that no core before this one has.
};

// 0, 1, 2, 5 as "0-2 5".
std::string Ranges(const std::vector<int>& ids) {
  std::string text;
  for (std::size_t i = 0; i < ids.size();) {
    std::size_t j = i;
    while (j + 1 < ids.size() && ids[j + 1] == ids[j] + 1) ++j;
    if (!text.empty()) text += ' ';
    text += std::to_string(ids[i]);
    if (j > i) text.append("-").append(std::to_string(ids[j]));
    i = j + 1;
  }
  return text;
}

std::string LineJson(const char* file, std::uint32_t line, const char* what) {
  return std::string("{") + Member("file", file) + ", " + Member("line", std::int64_t{line}) + ", " +
         Member("instruction", what) + "}";
}

std::string RowJson(const PlanRow& row) {
  std::string json = std::string("{") + Member("phase", static_cast<std::int64_t>(row.phase)) + ", " +
                     Member("core", SideText(row)) + ", " +
                     Member("kind", row.barrier      ? "barrier"
                                    : row.cross_core ? "cross-core flag"
                                                     : "flag") +
                     ", " + Member("from", NameOf(row.from)) + ", " + Member("to", NameOf(row.to)) +
                     ", \"ids\": " + List(row.ids, [](int id) { return std::to_string(id); }) +
                     ", \"turn\": " + List(row.turn, [](int id) { return std::to_string(id); });
  if (!row.barrier) json += ", " + Member("first_set", row.first_set);
  if (!row.barrier) json += ", \"set\": " + LineJson(row.set.file, row.set.line, row.set.what);
  json += ", \"wait\": " + LineJson(row.wait.file, row.wait.line, row.wait.what);
  return json + ", " + Member("first_wait", row.first_wait) + ", " + Member("count", row.count) + ", " +
         Member("most_on_core", row.most_on_core) + "}";
}

std::string ShortageText(const Shortage& s) {
  constexpr const char* kRemedies[] = {" first waits for an id to come free, ",
                                       " waits for more than it needs, ",
                                       " waits by way of the scalar units, "};
  const char* const what = !s.cross_core                            ? "event ids of "
                           : s.remedy == Shortage::Remedy::kRelayed ? "cross-core ids of "
                                                                    : "cross-core counter of ";
  return std::string(what) + NameOf(s.from) + "_" + NameOf(s.to) + " run out: " + s.line.file + ":" +
         std::to_string(s.line.line) + kRemedies[static_cast<int>(s.remedy)] + std::to_string(s.count) +
         (s.count == 1 ? " time" : " times");
}

// "0 1" of flags that take these ids by turns; of those that take them as they come free which ones they are.
std::string TurnText(const PlanRow& row) {
  if (row.barrier) return "";
  if (row.turn.empty()) return "any of " + Ranges(row.ids);
  std::string text;
  for (const int id : row.turn) text.append(text.empty() ? "" : " ").append(std::to_string(id));
  return text;
}

std::string PlaceJson(const Place& place) {
  if (place.what[0] == '\0') return "null";
  std::string json = std::string("{") + Member("file", place.line.file) + ", " +
                     Member("line", std::int64_t{place.line.line}) + ", " +
                     Member("instruction", place.what) + ", " + Member("pipe", NameOf(place.pipe));
  if (place.lane >= 0) json += ", " + Member("vector_core", std::int64_t{place.lane});
  return json + "}";
}

}  // namespace

std::string LineText(const PlanRow::Line& line) {
  return std::string(line.file) + ":" + std::to_string(line.line) + " " + line.what;
}

std::string FlagText(const PlanRow& row) {
  if (row.barrier) return std::string("PipeBarrier<") + NameOf(row.from) + ">";
  if (!row.cross_core) return std::string(NameOf(row.from)) + "_" + NameOf(row.to);
  return std::string("CrossCore ") + NameOf(row.from) + "_" + NameOf(row.to);
}

const char* SideText(const PlanRow& row) {
  if (!row.cross_core) return row.on_cube ? "Cube" : "Vector";
  return row.on_cube ? "Cube to Vector" : "Vector to Cube";
}

std::vector<PlanRow> Fold(const Record& record, const Plan& plan,
                          std::vector<std::vector<OpPlace>>* members) {
  CoreFold::Rows rows;
  CoreFold::Members of_rows;
  for (std::size_t p = 0; p < std::min(record.phases.size(), plan.phases.size()); ++p) {
    const std::size_t cores = std::min(record.phases[p].cores.size(), plan.phases[p].cores.size());
    for (std::size_t c = 0; c < cores; ++c)
      CoreFold(record.phases[p].cores[c], p, c, rows, of_rows).Add(plan.phases[p].cores[c]);
  }
  std::vector<PlanRow> all;
  for (auto& [key, row] : rows) {
    std::sort(row.ids.begin(), row.ids.end());
    if (members != nullptr) members->push_back(std::move(of_rows[key]));
    all.push_back(std::move(row));
  }
  return all;
}

std::string PlanTable(const Record& record, const Plan& plan) {
  std::vector<std::vector<std::string>> cells = {
      {"phase", "core", "flag", "ids in turn", "after", "before", "first", "count", "most on a core"}};
  for (const PlanRow& row : Fold(record, plan)) {
    const std::string wait = std::to_string(row.first_wait);
    cells.push_back({std::to_string(row.phase), SideText(row), FlagText(row), TurnText(row),
                     row.barrier ? "" : LineText(row.set), LineText(row.wait),
                     row.barrier ? wait : std::to_string(row.first_set) + ", " + wait,
                     std::to_string(row.count), std::to_string(row.most_on_core)});
  }
  std::vector<std::size_t> widths(cells[0].size());
  for (const auto& row : cells) {
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string text = record.kernel + " on " + record.chip.name + ", " + NameOf(plan.policy) + " flags\n";
  for (const auto& row : cells) {
    std::string line;
    for (std::size_t c = 0; c < row.size(); ++c) {
      const std::string pad(widths[c] - row[c].size(), ' ');
      line += c >= 7 ? pad + row[c] + "  " : row[c] + pad + "  ";
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text + "first: at which execution of the two lines the first flag stands\n" + ShortagesText(plan);
}

std::string ShortagesText(const Plan& plan) {
  std::string text;
  for (const Shortage& s : plan.shortages) text += ShortageText(s) + "\n";
  return text;
}

std::string PlanJson(const Record& record, const Plan& plan) {
  return std::string("{") + Member("kernel", record.kernel) + ", " + Member("chip", record.chip.name) + ", " +
         Member("policy", NameOf(plan.policy)) + ", \"rows\": " + List(Fold(record, plan), RowJson) +
         ", \"shortages\": " +
         List(plan.shortages,
              [](const Shortage& s) {
                return std::string("{") + Member("from", NameOf(s.from)) + ", " + Member("to", NameOf(s.to)) +
                       ", " + Member("file", s.line.file) + ", " + Member("line", std::int64_t{s.line.line}) +
                       ", " + Member("count", s.count) + ", " + Member("text", ShortageText(s)) + "}";
              }) +
         "}\n";
}

std::string CheckText(const CheckResult& result) {
  std::string text = std::to_string(result.instructions) + " instructions, " + std::to_string(result.flags) +
                     " flags and barriers: ";
  if (result.ok()) return text + "every conflicting pair is ordered\n";
  text +=
      std::to_string(result.findings.size()) + (result.findings.size() == 1 ? " finding\n" : " findings\n");
  for (const Finding& f : result.findings) text += ToString(f) + "\n";
  return text;
}

std::string CheckJson(const CheckResult& result) {
  const auto finding = [](const Finding& f) {
    return std::string("{") + Member("fault", NameOf(f.fault)) + ", " +
           Member("phase", static_cast<std::int64_t>(f.phase)) + ", " +
           Member("core", static_cast<std::int64_t>(f.core)) + ", " +
           Member("other_core", static_cast<std::int64_t>(f.other_core)) + ", " + Member("memory", f.memory) +
           ", " + Member("begin", f.begin) + ", " + Member("end", f.end) +
           ", \"first\": " + PlaceJson(f.first) + ", \"second\": " + PlaceJson(f.second) + ", " +
           Member("missing", f.cure) +
           ", \"chain\": " + List(f.chain, [](const std::string& link) { return json::Quoted(link); }) +
           ", " + Member("count", f.count) + "}";
  };
  return std::string("{\"ok\": ") + (result.ok() ? "true" : "false") + ", " +
         Member("instructions", result.instructions) + ", " + Member("flags", result.flags) +
         ", \"findings\": " + List(result.findings, finding) + "}\n";
}

}  // namespace cubist::sync
