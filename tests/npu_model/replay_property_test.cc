// Properties of the replay of whatever is recorded, and its timeline.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "npu_model/sync/plan.h"
#include "npu_model/trace/replay.h"
#include "npu_model/trace/trace_core.h"
#include "tests/npu_model/random_record.h"
#include "tests/npu_model/trace_support.h"
#include "tests/support/json.h"

namespace cubist {
namespace {

using testing::AddPhase;
using testing::RecordOf;
using testing::TensorOf;
using trace::Record;
using trace::Replay;

Record RandomRecord(const ChipSpec& chip, unsigned seed) {
  return testing::RandomRecord(chip, /*cores=*/3, seed, /*steps=*/40);
}

// A chip on which earlier is never slower, to the rounding of sums; on a real one it may be by a little, as what starts
// earlier meets others at L2 and HBM, and changes what L2 holds.
struct World {
  const char* name;
  ChipSpec chip;
  double slack;
};

// Memory that nobody waits for, and cores that all start at once.
ChipSpec WithIdealMemory(ChipSpec chip) {
  ChipSpec::Memory& memory = chip.memory;
  for (Constant* rate : {&memory.hbm_bytes_per_s, &memory.l2_read_bytes_per_s, &memory.l2_write_bytes_per_s,
                         &memory.cube_read_bytes_per_s, &memory.core_read_bytes_per_cycle,
                         &memory.core_write_bytes_per_cycle}) {
    rate->value = 1e18;
  }
  for (Constant* cost : {&memory.core_miss_bytes_per_cycle, &memory.found_dirty, &memory.turn_around,
                         &memory.same_line, &chip.sync.start_spread_s}) {
    cost->value = 0;
  }
  return chip;
}

std::vector<World> Worlds() {
  return {{"real", Ascend910B2(), 1.01}, {"ideal memory", WithIdealMemory(Ascend910B2()), 1 + 1e-12}};
}

TEST(ReplayPropertyTest, NothingStartsBeforeWhatItConflictsWithEnds) {
  for (unsigned seed = 0; seed < 4; ++seed) {
    const Record record = RandomRecord(Ascend910B2(), seed);
    const Profile p = Replay(record, true);
    // Slices of a track come in program order, so the n-th instruction of a pipe is its n-th slice.
    std::map<std::tuple<int, int, Pipe>, std::vector<TimelineSlice>> tracks;
    for (const TimelineSlice& slice : *p.timeline)
      tracks[{slice.core, slice.lane, slice.pipe}].push_back(slice);
    for (std::size_t c = 0; c < record.phases[0].cores.size(); ++c) {
      const trace::CoreRecord& core = record.phases[0].cores[c];
      std::map<std::tuple<int, int, Pipe>, std::size_t> next;
      std::vector<TimelineSlice> slices;
      for (const trace::Instr& instr : core.instrs) {
        const std::tuple key(static_cast<int>(c), static_cast<int>(instr.lane), instr.pipe);
        ASSERT_LT(next[key], tracks[key].size());
        slices.push_back(tracks[key][next[key]++]);
      }
      const auto conflict = [&](const trace::Instr& x, const trace::Instr& y) {
        for (const trace::OperandUse u : x.uses) {
          for (const trace::OperandUse v : y.uses) {
            if (!u.used() || !v.used() || (!u.writes() && !v.writes())) continue;
            const trace::Operand &a = core.operands[u.operand()], &b = core.operands[v.operand()];
            if (a.slot == b.slot && a.row_begin < b.row_end && b.row_begin < a.row_end &&
                a.col_begin < b.col_end && b.col_begin < a.col_end) {
              return true;
            }
          }
        }
        return false;
      };
      std::size_t conflicts = 0;
      for (std::size_t j = 0; j < core.instrs.size(); ++j) {
        for (std::size_t i = 0; i < j; ++i) {
          if (!conflict(core.instrs[i], core.instrs[j])) continue;
          ++conflicts;
          ASSERT_LE(slices[i].end_us, slices[j].start_us + 1e-9) << i << " and " << j << " of core " << c;
        }
      }
      EXPECT_GT(conflicts, core.instrs.size());
    }
  }
}

TEST(ReplayPropertyTest, TimeCoversTheWorkOfEveryPipeAndEveryByte) {
  const ChipSpec& chip = Ascend910B2();
  const Record record = RandomRecord(chip, 7);
  const Profile p = Replay(record, true);
  std::map<std::tuple<int, int, Pipe>, double> busy_us;
  for (const TimelineSlice& slice : *p.timeline) {
    busy_us[{slice.core, slice.lane, slice.pipe}] += slice.end_us - slice.start_us;
  }
  for (const auto& [track, us] : busy_us) EXPECT_LE(us, p.time_s * 1e6);
  for (std::size_t pipe = 0; pipe < kPipeCount; ++pipe) {
    const Profile::Busy &busy = p.busy[pipe], &waiting = p.waiting[pipe];
    EXPECT_GE(busy.cube_side, 0);
    EXPECT_GE(waiting.cube_side, 0);
    EXPECT_GE(waiting.vector_side, 0);
    EXPECT_LE(busy.cube_side + waiting.cube_side, 1 + 1e-9) << NameOf(static_cast<Pipe>(pipe));
    EXPECT_LE(busy.vector_side + waiting.vector_side, 1 + 1e-9) << NameOf(static_cast<Pipe>(pipe));
  }
  const double missed = static_cast<double>(p.gm_read) * (1 - p.l2_hit_rate);
  EXPECT_GE(p.time_s, missed / chip.memory.hbm_bytes_per_s);
  EXPECT_GE(p.time_s, static_cast<double>(p.gm_read) / chip.memory.l2_read_bytes_per_s);
  EXPECT_GE(p.time_s, static_cast<double>(p.gm_written) / chip.memory.l2_write_bytes_per_s);
  EXPECT_GT(p.busy[static_cast<std::size_t>(Pipe::kM)].cube_side, 0);
  EXPECT_EQ(p.cube_utilisation, p.busy[static_cast<std::size_t>(Pipe::kM)].cube_side);
  EXPECT_EQ(p.vector_utilisation, p.busy[static_cast<std::size_t>(Pipe::kV)].vector_side);
  EXPECT_FALSE(p.verdict.empty());
}

// Leaves the wait at or behind `at` out of a core's plan, and its set: the n-th set of a flag belongs to its n-th wait.
void LeaveFlagOut(std::size_t at, std::vector<sync::SyncOp>* ops) {
  const auto is_wait = [](const sync::SyncOp& op) { return op.kind == sync::Kind::kWaitFlag; };
  while (!is_wait((*ops)[at])) at = (at + 1) % ops->size();
  const sync::SyncOp wait = (*ops)[at];
  const auto nth =
      std::count_if(ops->begin(), ops->begin() + static_cast<std::ptrdiff_t>(at), [&](const auto& op) {
        return is_wait(op) && op.pipe == wait.pipe && op.lane == wait.lane && op.peer == wait.peer &&
               op.id == wait.id;
      });
  ops->erase(ops->begin() + static_cast<std::ptrdiff_t>(at));
  auto set = ops->begin();
  for (std::ptrdiff_t seen = 0;; ++set) {
    if (set->kind == sync::Kind::kSetFlag && set->pipe == wait.peer && set->lane == wait.lane &&
        set->peer == wait.pipe && set->id == wait.id && seen++ == nth) {
      break;
    }
  }
  ops->erase(set);
}

TEST(ReplayPropertyTest, ALeftOutFlagIsNeverSlower) {
  for (const World& world : Worlds()) {
    for (unsigned seed = 0; seed < 8; ++seed) {
      const Record record = RandomRecord(world.chip, seed);
      const sync::Policy policy = seed % 2 == 0 ? sync::Policy::kMinimal : sync::Policy::kPerTile;
      const sync::Plan plan = sync::PlanFlags(record, policy);
      const double before = Replay(record, plan).cycles;
      std::mt19937 random(seed);
      for (int trial = 0; trial < 40; ++trial) {
        sync::Plan without = plan;
        auto& ops = without.phases[0].cores[random() % 3].ops;
        LeaveFlagOut(random() % ops.size(), &ops);
        EXPECT_LE(Replay(record, without).cycles, before * world.slack)
            << world.name << ", seed " << seed << ", " << trial;
      }
    }
  }
}

TEST(ReplayPropertyTest, MoreFlagsAreNeverQuicker) {
  for (const World& world : Worlds()) {
    for (unsigned seed = 0; seed < 4; ++seed) {
      const Record record = RandomRecord(world.chip, seed);
      EXPECT_LE(Replay(record, sync::PlanFlags(record, sync::Policy::kMinimal)).cycles,
                Replay(record, sync::PlanFlags(record, sync::Policy::kPerTile)).cycles * world.slack)
          << world.name << ", " << seed;
    }
  }
}

TEST(ReplayPropertyTest, IsDeterministic) {
  const Record record = RandomRecord(Ascend910B1(), 11);
  const Profile first = Replay(record, true), second = Replay(record, true);
  EXPECT_EQ(first.cycles, second.cycles);
  EXPECT_EQ(first.l2_hit_rate, second.l2_hit_rate);
  ASSERT_EQ(first.timeline->size(), second.timeline->size());
  for (std::size_t i = 0; i < first.timeline->size(); ++i) {
    ASSERT_EQ((*first.timeline)[i].start_us, (*second.timeline)[i].start_us) << i;
    ASSERT_EQ((*first.timeline)[i].end_us, (*second.timeline)[i].end_us) << i;
  }
}

// The same rows, dealt to more and more Vector cores of a real chip, in pieces of 16 KiB.
TEST(ReplayPropertyTest, MoreCoresNeverSlowIndependentWork) {
  constexpr std::int64_t kPieces = 240, kPiece = 4096;
  const GmTensor from = TensorOf(0, DType::kF32, kPieces, kPiece),
                 to = TensorOf(1, DType::kF32, kPieces, kPiece);
  const auto cycles = [&](const ChipSpec& chip, int cores) {
    return Replay(RecordOf<TraceVectorCore>(chip, cores,
                                            [&](auto& core) {
                                              Ring<Buffer::kUB, float> ring(core, "x", 1, kPiece, 2);
                                              for (std::int64_t p = core.index(); p < kPieces; p += cores) {
                                                const auto x = ring.Next(1, kPiece);
                                                core.Load(x, MatrixOf(from).Rows({p, p + 1}));
                                                core.Exp(x, x);
                                                core.Store(MatrixOf(to).Rows({p, p + 1}), x);
                                              }
                                            }),
                  false)
        .cycles;
  };
  for (const World& world : Worlds()) {
    double before = cycles(world.chip, 1);
    for (const int cores : {2, 3, 5, 8, 12, 16, 24, 40, 48}) {
      const double now = cycles(world.chip, cores);
      EXPECT_LE(now, before * world.slack) << world.name << ", " << cores;
      before = now;
    }
  }
}

TEST(ReplayPropertyTest, MoreBandwidthIsNeverSlower) {
  for (const World& world : Worlds()) {
    SCOPED_TRACE(world.name);
    const Record record = RandomRecord(world.chip, 3);
    const double before = Replay(record, false).cycles;
    const auto faster = [&](auto&& change) {
      Record changed = record;
      change(changed.chip);
      return Replay(changed, false).cycles;
    };
    const double most = before * world.slack;
    EXPECT_LE(faster([](ChipSpec& c) { c.memory.hbm_bytes_per_s.value *= 2; }), most);
    EXPECT_LE(faster([](ChipSpec& c) { c.memory.l2_read_bytes_per_s.value *= 2; }), most);
    EXPECT_LE(faster([](ChipSpec& c) { c.memory.l2_write_bytes_per_s.value *= 2; }), most);
    EXPECT_LE(faster([](ChipSpec& c) { c.memory.core_miss_bytes_per_cycle.value *= 2; }), most);
    for (int path = 0; path < kPathCount; ++path) {
      EXPECT_LE(
          faster([&](ChipSpec& c) { c.paths[static_cast<std::size_t>(path)].bytes_per_cycle.value *= 2; }),
          most)
          << NameOf(static_cast<Path>(path));
    }
    EXPECT_LT(faster([](ChipSpec& c) {
                for (PathSpec& path : c.paths) path.startup.value /= 2, path.bytes_per_cycle.value *= 2;
                c.sync.cross_core.value /= 2;
              }),
              before);
  }
}

// ---- Timeline ----

std::string TemporaryFile(const char* name) { return ::testing::TempDir() + "/cubist_" + name; }

TEST(TimelineTest, IsValidJsonWithoutOverlaps) {
  Record record = RandomRecord(Ascend910B2(), 5);
  AddPhase<TraceVectorCore>(record, 3, [](auto& core) {
    Ring<Buffer::kUB, float> ring(core, "x", 8, 64, 1);
    core.Fill(ring.Next(8, 64), 1.0f);
  });
  const Profile p = Replay(record, true);
  const std::string path = TemporaryFile("timeline.json");
  ASSERT_TRUE(p.WriteTimeline(path).ok());

  std::ifstream file(path);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  EXPECT_LT(text.find("\"profilingType\":\"op\""), text.find('['));
  const nlohmann::json json = testing::ParseJson(text);

  std::map<std::pair<int, int>, std::vector<std::pair<double, double>>> tracks;
  std::map<int, std::string> processes;
  std::map<std::pair<int, int>, std::string> threads;
  std::size_t slices = 0;
  std::int64_t bytes = 0;
  for (const auto& event : json.at("traceEvents")) {
    const int pid = event.at("pid"), tid = event.at("tid");
    if (event.at("ph") == "X") {
      ++slices;
      const double start = event.at("ts"), end = start + event.at("dur").get<double>();
      EXPECT_LE(start, end);
      tracks[{pid, tid}].emplace_back(start, end);
      bytes += event.at("args").at("bytes").get<std::int64_t>();
      EXPECT_NE(event.at("args").at("source").get<std::string>().find("tests/npu_model/"), std::string::npos);
    } else if (event.at("name") == "process_name") {
      processes[pid] = event.at("args").at("name");
    } else if (event.at("name") == "thread_name") {
      threads[{pid, tid}] = event.at("args").at("name");
    }
  }
  EXPECT_EQ(slices, static_cast<std::size_t>(p.instructions));
  std::int64_t moved = 0;
  for (const std::int64_t b : p.path_bytes) moved += b;
  EXPECT_EQ(bytes, moved);
  std::vector<std::string> names;
  for (const auto& [pid, name] : processes) names.push_back(name);
  EXPECT_EQ(names, (std::vector<std::string>{"AIC0", "AIV0-0", "AIV0-1", "AIC1", "AIV1-0", "AIV1-1", "AIC2",
                                             "AIV2-0", "AIV2-1"}));
  for (auto& [track, intervals] : tracks) {
    EXPECT_FALSE(threads[track].empty());
    std::sort(intervals.begin(), intervals.end());
    for (std::size_t i = 1; i < intervals.size(); ++i) {
      EXPECT_LE(intervals[i - 1].second, intervals[i].first + 1e-9) << threads[track];
    }
  }
  std::remove(path.c_str());
}

TEST(TimelineTest, StringsAreEscaped) {
  Profile p;
  auto slices = std::make_shared<std::vector<TimelineSlice>>(1);
  (*slices)[0].name = "a \"name\"";
  (*slices)[0].file = "C:\\kernels\tx.h";
  p.timeline = slices;
  const std::string path = TemporaryFile("escaped.json");
  ASSERT_TRUE(p.WriteTimeline(path).ok());
  std::ifstream file(path);
  const nlohmann::json json = testing::ParseJson(file);
  EXPECT_EQ(json.at("traceEvents").back().at("name"), "a \"name\"");
  EXPECT_EQ(json.at("traceEvents").back().at("args").at("source"), "C:\\kernels\tx.h:0");
  std::remove(path.c_str());
}

TEST(TimelineTest, TellsWhatItLeavesOut) {
  Profile p;
  TimelineSlice slice;
  slice.name = slice.file = "x";
  p.timeline = std::make_shared<std::vector<TimelineSlice>>(Profile::kMostEvents + 1, slice);
  const std::string path = TemporaryFile("long.json");
  ASSERT_TRUE(p.WriteTimeline(path).ok());
  std::ifstream file(path);
  const nlohmann::json json = testing::ParseJson(file);
  const auto& events = json.at("traceEvents");
  EXPECT_EQ(std::count_if(events.begin(), events.end(), [](const auto& e) { return e.at("ph") == "X"; }),
            static_cast<std::ptrdiff_t>(Profile::kMostEvents));
  EXPECT_EQ(json.at("otherData").at("timeline_events"), "1000001");
  std::remove(path.c_str());
}

TEST(TimelineTest, WhatCannotBeWrittenIsAnError) {
  Profile p;
  EXPECT_EQ(p.WriteTimeline("anywhere.json").code(), StatusCode::kInvalidArgument);
  p.timeline = std::make_shared<std::vector<TimelineSlice>>();
  const Status status = p.WriteTimeline("/no/such/folder/timeline.json");
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("/no/such/folder/timeline.json"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace cubist
