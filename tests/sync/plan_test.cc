// Plans of the shipped kernels and of random records: proved by the checker, and where the record is small enough by
// the brute-force graph as well.
#include "npu_model/sync/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "npu_model/sync/alike.h"
#include "npu_model/sync/check.h"
#include "npu_model/sync/core_planner.h"
#include "npu_model/sync/report.h"
#include "npu_model/sync/slack.h"
#include "npu_model/trace/replay.h"
#include "tests/npu_model/random_record.h"
#include "tests/support/json.h"
#include "tests/sync/happens_before.h"
#include "tests/sync/shipped_kernels.h"
#include "tests/sync/symbols.h"

namespace cubist::testing {
namespace {

using sync::Kind;
using sync::Policy;
using sync::Schedule;

constexpr std::array kPolicies = {Policy::kMinimal, Policy::kPerTile};

std::int64_t CountOf(const sync::Plan& plan, Kind kind) {
  std::int64_t count = 0;
  for (const auto& phase : plan.phases) {
    for (const auto& core : phase.cores)
      count += std::count_if(core.ops.begin(), core.ops.end(),
                             [&](const sync::SyncOp& op) { return op.kind == kind; });
  }
  return count;
}

void ExpectProved(const NamedRecord& made) {
  SCOPED_TRACE(made.name);
  std::array<std::int64_t, 2> sets{};
  for (std::size_t p = 0; p < kPolicies.size(); ++p) {
    const sync::Plan plan = sync::PlanFlags(made.record, kPolicies[p]);
    const sync::CheckResult result = sync::Check(made.record, plan);
    EXPECT_TRUE(result.ok()) << NameOf(kPolicies[p]) << "\n" << sync::CheckText(result);
    EXPECT_EQ(CountOf(plan, Kind::kSetFlag), CountOf(plan, Kind::kWaitFlag));
    sets[p] = CountOf(plan, Kind::kSetFlag) + CountOf(plan, Kind::kCrossSet);
  }
  EXPECT_LE(sets[0], sets[1]);
}

TEST(PlanTest, ShippedKernelsAreProved) {
  for (const ChipSpec* chip : {&Ascend910B1(), &Ascend910B2(), &Ascend910B4()}) {
    ExpectProved(RecordMatmul(*chip, DType::kBF16, 512, 512, 512, false, false));
    ExpectProved(RecordMatmul(*chip, DType::kF32, 129, 257, 300, true, true));
    ExpectProved(RecordGroupedMatmul(*chip, DType::kBF16, {300, 0, 7, 130}, 300, 500, /*grad=*/false));
    ExpectProved(RecordGroupedMatmul(*chip, DType::kBF16, {300, 0, 7, 130}, 300, 500, /*grad=*/true));
    ExpectProved(RecordAttention(*chip, DType::kBF16, {.sq = 300, .skv = 500, .d = 128}));
    ExpectProved(RecordAttentionGrad(*chip, DType::kBF16, {.sq = 300, .skv = 500}));
    ExpectProved(RecordAttentionGrad(*chip, DType::kBF16, {.sq = 300, .skv = 300, .d_rope = 16}));
    ExpectProved(RecordPermute(*chip, 300, 500, 4, 16, DType::kI32));
    ExpectProved(RecordUnpermute(*chip, 300, 500, 4));
    for (const NamedRecord& made : RecordRowwise(*chip, DType::kBF16, 300, 500)) ExpectProved(made);
  }
}

TEST(PlanTest, DecodingIsProved) {
  for (const ChipSpec* chip : {&Ascend910B2(), &Ascend910B4()}) {
    for (const bool with_features : {false, true}) {
      for (const std::int64_t positions : {1, 3})
        ExpectProved(RecordDecoding(*chip, DType::kBF16, positions, with_features));
      ExpectProved(RecordDecoding(*chip, DType::kF32, 1, with_features, /*keep=*/0.5f));
    }
  }
}

TEST(PlanTest, HiddenBlocksAreProved) {
  for (const bool grad : {false, true}) {
    ExpectProved(RecordHiddenBlocks(Ascend910B2(), 2100, 700, grad));
    ExpectProved(RecordHiddenBlocks(Ascend910B4(), 1200, 200, grad));
  }
}

// Windows far from some keys, or from all: those are not turned, and nothing that is not turned is read.
TEST(PlanTest, KeysThatNobodySeesAreProved) {
  for (const auto& [sq, right] : {std::pair<std::int64_t, std::int64_t>{3, -60}, {40, -60}, {40, -120}}) {
    const AttentionWindow window{.left = 100, .right = right};
    ExpectProved(RecordAttention(Ascend910B2(), DType::kBF16,
                                 {.sq = sq, .skv = 700, .d_rope = 16, .window = window, .turned = true}));
    ExpectProved(RecordAttentionGrad(Ascend910B2(), DType::kBF16,
                                     {.sq = sq, .skv = 700, .d_rope = 16, .window = window}));
  }
}

// Halves of rotary positions that are no whole blocks of UB, in every phase that turns rows.
TEST(PlanTest, RopeOfAnyWidthIsProved) {
  const ChipSpec& chip = Ascend910B2();
  constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
  for (const std::int64_t rope : {2, 6, 10, 20, 36, 40}) {
    for (const DType in : kTypes) {
      for (const RopeLayout layout : {RopeLayout::kHalf, RopeLayout::kInterleaved}) {
        const AttentionCase c{.sq = 130, .skv = 200, .d_rope = rope, .turned = true, .layout = layout};
        ExpectProved(RecordAttention(chip, in, c));
        ExpectProved(RecordAttentionGrad(chip, in, c));
      }
    }
    ExpectProved(RecordDecoding(chip, kTypes[rope / 2 % 3], 3, /*with_features=*/true, /*keep=*/1, rope));
  }
}

TEST(PlanTest, OddShapesAreProved) {
  const ChipSpec& chip = Ascend910B2();
  ExpectProved(RecordMatmul(chip, DType::kF16, 1, 4096, 512, false, true));
  ExpectProved(RecordMatmul(chip, DType::kF16, 33, 40, 7, false, true));
  ExpectProved(RecordMatmul(chip, DType::kBF16, 64, 64, 0, false, true));
  ExpectProved(
      RecordGroupedMatmul(chip, DType::kF32, std::vector<std::int64_t>(200, 1), 33, 65, /*grad=*/true));
  ExpectProved(RecordGroupedMatmul(chip, DType::kF16, {0, 0, 900}, 40, 1000, /*grad=*/false));
  ExpectProved(
      RecordAttention(chip, DType::kBF16, {.sq = 5, .skv = 700, .d_rope = 16}));  // one Vector core idles
  ExpectProved(
      RecordAttention(chip, DType::kF16, {.sq = 300, .skv = 300, .d = 100, .causal = Causal::kBottomRight}));
  ExpectProved(
      RecordAttention(chip, DType::kF32, {.sq = 33, .skv = 1000, .d = 72, .causal = Causal::kTopLeft}));
  ExpectProved(
      RecordAttentionGrad(chip, DType::kF32, {.sq = 33, .skv = 190, .d = 40, .causal = Causal::kTopLeft}));
  ExpectProved(RecordAttentionGrad(chip, DType::kF16, {.sq = 130, .skv = 77, .d = 24, .d_rope = 6}));
  ExpectProved(RecordAttentionGrad(chip, DType::kF32, {.sq = 40, .skv = 70, .d = 576}));  // Columns in parts.
  ExpectProved(RecordPermute(chip, 100, 70000, 2, 60000, DType::kI64));
  ExpectProved(RecordUnpermute(chip, 30, 60000, 12));
  for (const NamedRecord& made : RecordRowwise(chip, DType::kF32, 41, 20011)) ExpectProved(made);
  for (const NamedRecord& made : RecordRowwise(chip, DType::kF16, 1, 1)) ExpectProved(made);
}

// Ids and counters down to one: the plan waits earlier, or for more, says where, and stays right.
TEST(PlanTest, FewIds) {
  for (const int ids : {1, 2, 3}) {
    SCOPED_TRACE(ids);
    ChipSpec chip = Ascend910B2();
    chip.sync.event_ids = ids;
    chip.sync.cross_core_limit = ids;
    ExpectProved(RecordMatmul(chip, DType::kBF16, 512, 512, 512, false, true));
    ExpectProved(RecordAttention(chip, DType::kBF16, {.sq = 300, .skv = 900, .d = 128}));
    ExpectProved(RecordAttention(chip, DType::kBF16, {.kv_heads = 2, .sq = 5, .skv = 3000}));
    ExpectProved(RecordAttention(chip, DType::kBF16, {.sq = 1, .skv = 3000}));
    // With one id kMinimal's own remedies cost more flags than kPerTile's.
    ExpectProved(RecordAttention(chip, DType::kBF16, {.heads = 8, .sq = 64, .skv = 3000}));
    ExpectProved(RecordPermute(chip, 300, 500, 4, 16, DType::kI32));
    ExpectProved(RecordUnpermute(chip, 300, 500, 5));
  }
}

std::int64_t RelaysOf(const sync::Plan& plan) {
  std::int64_t count = 0;
  for (const sync::Shortage& s : plan.shortages) {
    if (s.remedy == sync::Shortage::Remedy::kRelayed) count += s.count;
  }
  return count;
}

// Cross-core ids down to one: the scalar units stand in, which is told and is never quicker than all ids.
TEST(PlanTest, FewCrossCoreIds) {
  const auto kernels = [](const ChipSpec& chip) {
    std::vector<NamedRecord> all;
    all.push_back(RecordAttention(chip, DType::kBF16, {.sq = 300, .skv = 900, .d = 128}));
    all.push_back(RecordAttention(chip, DType::kBF16, {.sq = 5, .skv = 700, .d_rope = 16}));
    all.push_back(RecordAttentionGrad(chip, DType::kBF16, {.sq = 300, .skv = 500}));
    all.push_back(RecordAttentionGrad(chip, DType::kF32, {.sq = 130, .skv = 77, .d = 24, .d_rope = 6}));
    return all;
  };
  std::vector<double> ample;
  for (const NamedRecord& made : kernels(Ascend910B2()))
    ample.push_back(trace::Replay(made.record, /*timeline=*/false).time_s);
  for (const int limit : {1, 2, 15}) {
    for (const int ids : {1, 2, 3}) {
      ChipSpec chip = Ascend910B2();
      chip.sync.cross_core_ids = ids, chip.sync.cross_core_limit = limit;
      if (limit == 1) chip.sync.event_ids = ids;
      const std::vector<NamedRecord> all = kernels(chip);
      for (std::size_t k = 0; k < all.size(); ++k) {
        ExpectProved(all[k]);
        const sync::Plan plan = sync::PlanFlags(all[k].record, Policy::kMinimal);
        const double seconds = trace::Replay(all[k].record, plan).time_s;
        EXPECT_GE(seconds, ample[k]) << ids << " ids, " << all[k].name;
        // Of the forward pass two pairs of pipes in each direction, where a core has more than one block.
        if (ids > 1 || k > 0) continue;
        EXPECT_GT(RelaysOf(plan), 0);
        EXPECT_GT(seconds, ample[k]);
        const std::string table = sync::PlanTable(all[k].record, plan);
        EXPECT_NE(table.find("cross-core ids of FIX_MTE2 run out: "), std::string::npos) << table;
      }
    }
  }
}

TEST(PlanTest, ShortagesNameTheLine) {
  const auto shortages = [](int ids) {
    ChipSpec chip = Ascend910B2();
    chip.sync.event_ids = ids;
    const NamedRecord made = RecordUnpermute(chip, 300, 500, 8);
    return std::pair(sync::PlanFlags(made.record, Policy::kPerTile), made);
  };
  EXPECT_TRUE(shortages(64).first.shortages.empty());
  const auto [plan, made] = shortages(1);
  ASSERT_FALSE(plan.shortages.empty());
  std::int64_t count = 0;
  for (const sync::Shortage& s : plan.shortages) {
    EXPECT_NE(std::string(s.line.file).find("token_permute_kernel.h"), std::string::npos);
    EXPECT_GT(s.line.line, 0u);
    count += s.count;
  }
  EXPECT_GT(count, 100);
  const std::string table = sync::PlanTable(made.record, plan);
  EXPECT_NE(table.find("run out: " + std::string(plan.shortages[0].line.file)), std::string::npos) << table;
}

// ---- Random records ----

bool IsRace(const sync::Finding& f) { return f.fault <= sync::Fault::kWriteAfterWrite; }

TEST(PlanTest, RandomRecordsAreProvedAndTheGraphAgrees) {
  for (unsigned seed = 0; seed < 24; ++seed) {
    SCOPED_TRACE(seed);
    ChipSpec chip = Ascend910B2();
    if (seed % 3 == 1) chip.sync.event_ids = 1, chip.sync.cross_core_limit = 1;
    if (seed % 3 == 2) chip.sync.event_ids = 2, chip.sync.cross_core_limit = 3;
    if (seed % 4 == 3) chip.sync.vector_needs_barrier = false;
    if (seed % 5 < 3) chip.sync.cross_core_ids = 1 + static_cast<int>(seed % 5);
    const trace::Record record = RandomRecord(chip, 1, seed, 10);
    for (const Policy policy : kPolicies) {
      const sync::Plan plan = sync::PlanFlags(record, policy);
      const sync::CheckResult result = sync::Check(record, plan);
      ASSERT_TRUE(result.ok()) << sync::CheckText(result);
      const HappensBefore graph(chip, record.phases[0].cores[0], plan.phases[0].cores[0],
                                chip.vector_per_cube);
      ASSERT_FALSE(graph.deadlocks());
      const auto race = graph.FirstRace();
      ASSERT_FALSE(race.has_value()) << race->first << " and " << race->second;
    }
  }
}

// Plans with many holes: checker and graph find a race or none, alike.
TEST(PlanTest, CheckerAndGraphAgreeOnBrokenPlans) {
  int races = 0, clean = 0;
  for (unsigned seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    const ChipSpec& chip = Ascend910B2();
    const trace::Record record = RandomRecord(chip, 1, 100 + seed % 10, 5);
    sync::Plan plan = sync::PlanFlags(record, seed % 2 == 0 ? Policy::kMinimal : Policy::kPerTile);
    auto& ops = plan.phases[0].cores[0].ops;
    std::mt19937 random(seed);
    // A flag of the core goes with its set and its wait: the n-th of its pair and id.
    for (unsigned drops = 1 + seed % 3; drops > 0; --drops) {
      const std::size_t at = random() % ops.size();
      const sync::SyncOp op = ops[at];
      if (op.kind == Kind::kPipeBarrier) {
        ops.erase(ops.begin() + static_cast<std::ptrdiff_t>(at));
        continue;
      }
      if (op.kind != Kind::kSetFlag) continue;
      const auto is_wait = [&](const sync::SyncOp& o) {
        return o.kind == Kind::kWaitFlag && o.lane == op.lane && o.pipe == op.peer && o.peer == op.pipe &&
               o.id == op.id;
      };
      // Ids are free before they are set again, so the next wait in the program is this set's.
      const auto wait = std::find_if(ops.begin() + static_cast<std::ptrdiff_t>(at), ops.end(), is_wait);
      ASSERT_NE(wait, ops.end());
      ops.erase(wait);
      ops.erase(ops.begin() + static_cast<std::ptrdiff_t>(at));
    }
    const sync::CheckResult result = sync::Check(record, plan);
    const bool races_by_check = std::any_of(result.findings.begin(), result.findings.end(), IsRace);
    const HappensBefore graph(chip, record.phases[0].cores[0], plan.phases[0].cores[0], chip.vector_per_cube);
    ASSERT_EQ(races_by_check, graph.FirstRace().has_value());
    (races_by_check ? races : clean) += 1;
  }
  EXPECT_GT(races, 50);
  EXPECT_GT(clean, 20);
}

// More order never makes a new finding.
TEST(PlanTest, MoreBarriersAddNoFinding) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    const trace::Record record = RandomRecord(Ascend910B2(), 1, seed, 6);
    sync::Plan plan = sync::PlanFlags(record, Policy::kMinimal);
    auto& ops = plan.phases[0].cores[0].ops;
    std::mt19937 random(seed);
    for (int drops = 0; drops < 8; ++drops) {
      const auto at = ops.begin() + static_cast<std::ptrdiff_t>(random() % ops.size());
      if (at->kind == Kind::kPipeBarrier) ops.erase(at);
    }
    const auto findings = [&] {
      std::set<std::string> all;
      for (sync::Finding f : sync::Check(record, plan).findings) {
        f.count = 1;
        all.insert(std::string(NameOf(f.fault)) + f.first.what + f.second.what + f.memory);
      }
      return all;
    };
    const std::set<std::string> before = findings();
    for (int added = 0; added < 10; ++added) {
      const auto i = static_cast<std::uint32_t>(random() % record.phases[0].cores[0].instrs.size());
      const trace::Instr& instr = record.phases[0].cores[0].instrs[i];
      if (instr.pipe == Pipe::kS) continue;
      sync::SyncOp op;
      op.instr = i, op.kind = Kind::kPipeBarrier, op.pipe = op.peer = instr.pipe, op.lane = instr.lane;
      ops.insert(std::upper_bound(ops.begin(), ops.end(), op,
                                  [](const auto& x, const auto& y) { return x.position() < y.position(); }),
                 op);
    }
    for (const std::string& finding : findings()) EXPECT_TRUE(before.contains(finding)) << finding;
  }
}

// ---- Every order that the flags allow ----

constexpr std::array kSchedules = {Schedule::kProgramOrder, Schedule::kEager,  Schedule::kLate,
                                   Schedule::kRandom,       Schedule::kRandom, Schedule::kRandom};

// How many different results the schedules give; a schedule that gets stuck counts as one.
std::size_t Results(const trace::Record& record, const sync::Plan& plan, std::size_t core, unsigned seed) {
  std::set<std::optional<std::uint64_t>> results;
  for (const Schedule schedule : kSchedules) {
    results.insert(RunOnSymbols(record.chip, record.phases.back().cores[core], plan.phases.back().cores[core],
                                record.phases.back().vector_only ? 1 : record.chip.vector_per_cube, schedule,
                                ++seed));
  }
  return results.size();
}

TEST(PlanTest, EveryScheduleOfARandomRecordGivesTheSame) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    ChipSpec chip = Ascend910B2();
    chip.sync.event_ids = 1 + static_cast<int>(seed % 6);
    chip.sync.cross_core_limit = 1 + static_cast<int>(seed % 3);
    if (seed % 2 == 1) chip.sync.cross_core_ids = 1 + static_cast<int>(seed % 4);
    const trace::Record record = RandomRecord(chip, 1, seed, 6);
    for (const Policy policy : kPolicies)
      EXPECT_EQ(Results(record, sync::PlanFlags(record, policy), 0, seed), 1u)
          << seed << " " << NameOf(policy);
  }
}

TEST(PlanTest, EveryScheduleOfAKernelGivesTheSame) {
  const ChipSpec& chip = Ascend910B2();
  std::vector<NamedRecord> kernels;
  kernels.push_back(RecordMatmul(chip, DType::kBF16, 100, 200, 300, false, true));
  kernels.push_back(RecordAttention(chip, DType::kBF16, {.sq = 64, .skv = 200}));
  kernels.push_back(RecordPermute(chip, 100, 64, 3, 8, DType::kI32));
  kernels.push_back(RecordUnpermute(chip, 100, 64, 3));
  for (const NamedRecord& made : kernels) {
    for (const Policy policy : kPolicies) {
      const sync::Plan plan = sync::PlanFlags(made.record, policy);
      EXPECT_EQ(Results(made.record, plan, 0, 1), 1u) << made.name << " " << NameOf(policy);
    }
  }
}

// And a plan with holes does not: the schedules find most of what the checker proves wrong, and nothing else.
TEST(PlanTest, SchedulesDifferOnlyWhereTheCheckerObjects) {
  int objected = 0, seen = 0;
  for (unsigned seed = 0; seed < 120; ++seed) {
    const trace::Record record = RandomRecord(Ascend910B2(), 1, seed % 8, 4);
    sync::Plan plan = sync::PlanFlags(record, Policy::kMinimal);
    auto& ops = plan.phases[0].cores[0].ops;
    const std::size_t at = seed % ops.size();
    if (ops[at].kind != Kind::kPipeBarrier && ops[at].kind != Kind::kWaitFlag) continue;
    ops.erase(ops.begin() + static_cast<std::ptrdiff_t>(at));
    const bool ok = sync::Check(record, plan).ok();
    const bool same = Results(record, plan, 0, seed) == 1;
    EXPECT_TRUE(!ok || same) << seed;
    objected += ok ? 0 : 1;
    seen += same ? 0 : 1;
  }
  EXPECT_GT(objected, 20);
  EXPECT_GT(seen, objected / 4);
}

// ---- Printed ----

TEST(PlanTest, TheTableFoldsLoops) {
  const NamedRecord made = RecordMatmul(Ascend910B2(), DType::kBF16, 512, 512, 2048, false, false);
  const sync::Plan plan = sync::PlanFlags(made.record, Policy::kMinimal);
  const std::vector<sync::PlanRow> rows = sync::Fold(made.record, plan);
  std::int64_t flags = 0, barriers = 0;
  for (const sync::PlanRow& row : rows) {
    (row.barrier ? barriers : flags) += row.count;
    EXPECT_LE(row.most_on_core, row.count);
    EXPECT_EQ(row.barrier, row.ids.empty());
  }
  EXPECT_EQ(flags, CountOf(plan, Kind::kSetFlag));
  EXPECT_EQ(barriers, CountOf(plan, Kind::kPipeBarrier));
  EXPECT_LT(rows.size(), 20u);
  const std::string table = sync::PlanTable(made.record, plan);
  for (const char* text :
       {"MTE2_MTE1", "MTE1_M", "M_FIX", "M_MTE1", "MTE1_MTE2", "kernels/multiply_block_kernel.h:"})
    EXPECT_NE(table.find(text), std::string::npos) << text << "\n" << table;
}

TEST(PlanTest, JsonParsesAndAddsUp) {
  const NamedRecord made = RecordAttention(Ascend910B2(), DType::kBF16, {.sq = 200, .skv = 300});
  sync::Plan plan = sync::PlanFlags(made.record, Policy::kMinimal);
  const nlohmann::json json = ParseJson(sync::PlanJson(made.record, plan));
  EXPECT_EQ(json.at("kernel"), "flash_attention");
  EXPECT_EQ(json.at("policy"), "minimal");
  std::int64_t flags = 0, cross = 0, barriers = 0;
  for (const auto& row : json.at("rows")) {
    const std::string kind = row.at("kind");
    (kind == "flag" ? flags : kind == "barrier" ? barriers : cross) += row.at("count").get<std::int64_t>();
    EXPECT_FALSE(row.at("wait").at("file").get<std::string>().empty());
  }
  EXPECT_EQ(flags, CountOf(plan, Kind::kSetFlag));
  EXPECT_EQ(barriers, CountOf(plan, Kind::kPipeBarrier));
  EXPECT_GT(cross, 0);

  plan.phases[0].cores[0].ops.clear();
  const sync::CheckResult broken = sync::Check(made.record, plan);
  const nlohmann::json report = ParseJson(sync::CheckJson(broken));
  EXPECT_EQ(report.at("ok"), false);
  EXPECT_EQ(report.at("findings").size(), broken.findings.size());
  EXPECT_EQ(ParseJson(sync::CheckJson(sync::CheckResult{})).at("ok"), true);
}

TEST(PlanTest, FileNamesAreEscaped) {
  const std::string file = "C:\\kernels\t\"a\".h";
  NamedRecord made = RecordMatmul(Ascend910B2(), DType::kBF16, 64, 64, 64, false, false);
  for (trace::CoreRecord& core : made.record.phases[0].cores) {
    for (trace::SourceLine& line : core.lines) line.file = file.c_str();
  }
  const sync::Plan plan = sync::PlanFlags(made.record, Policy::kMinimal);
  const nlohmann::json json = ParseJson(sync::PlanJson(made.record, plan));
  ASSERT_FALSE(json.at("rows").empty());
  for (const auto& row : json.at("rows")) EXPECT_EQ(row.at("wait").at("file"), file);
  const nlohmann::json slack = ParseJson(sync::SlackJson(sync::FindSlack(made.record, plan)));
  for (const auto& row : slack.at("rows")) EXPECT_EQ(row.at("wait").get<std::string>().find(file + ":"), 0u);
}

// A plan that cores share is the one that each would have got on its own.
std::vector<std::size_t> FirstAlike(const trace::Phase& phase, const ChipSpec& chip) {
  std::vector<std::vector<char>> in_order;
  for (const trace::CoreRecord& core : phase.cores) in_order.push_back(sync::TensorsInOrder(core, chip));
  return sync::FirstAlike(phase, chip, in_order);
}

TEST(PlanTest, CoresAlikeShareOnePlan) {
  std::size_t shared = 0;
  const auto expect_own = [&](const NamedRecord& made) {
    SCOPED_TRACE(made.name);
    for (const Policy policy : kPolicies) {
      const sync::Plan plan = sync::PlanFlags(made.record, policy);
      for (std::size_t p = 0; p < made.record.phases.size(); ++p) {
        const trace::Phase& phase = made.record.phases[p];
        const std::vector<std::size_t> first = FirstAlike(phase, made.record.chip);
        for (std::size_t c = 0; c < phase.cores.size(); ++c) {
          ASSERT_LE(first[c], c);
          EXPECT_EQ(first[first[c]], first[c]);
          shared += first[c] != c ? 1 : 0;
          sync::CorePlanner planner(phase.cores[c], made.record.chip, phase.vector_only, policy,
                                    sync::TensorsInOrder(phase.cores[c], made.record.chip));
          EXPECT_EQ(plan.phases[p].cores[c].ops, planner.Run().ops) << "core " << c;
        }
      }
    }
  };
  expect_own(RecordMatmul(Ascend910B2(), DType::kBF16, 2048, 2048, 512, false, false));
  expect_own(RecordAttention(Ascend910B2(), DType::kBF16, {.heads = 2, .sq = 512, .skv = 512, .d = 64}));
  expect_own(RecordPermute(Ascend910B2(), 300, 640, 4, 8, DType::kI32));
  EXPECT_GT(shared, 20u);
}

// Two cores that differ in one instruction, or in how their accesses to memory of their own meet.
TEST(PlanTest, CoresThatDifferArePlannedApart) {
  trace::Record record = RecordMatmul(Ascend910B2(), DType::kBF16, 2048, 2048, 512, false, false).record;
  trace::Phase phase;
  phase.cores = {record.phases[0].cores[0], record.phases[0].cores[0], record.phases[0].cores[0]};
  const auto mmad =
      std::ranges::find(phase.cores[1].instrs, Pipe::kM, [](const trace::Instr& i) { return i.pipe; });
  mmad->dims[0] -= 16;
  EXPECT_EQ(FirstAlike(phase, record.chip), (std::vector<std::size_t>{0, 1, 0}));

  trace::CoreRecord writes_and_reads;
  writes_and_reads.lines.resize(1);
  for (const bool writes : {true, false}) {
    trace::Instr instr;
    instr.op = writes ? trace::Op::kStoreUb : trace::Op::kLoadUb;
    instr.pipe = writes ? Pipe::kMte3 : Pipe::kMte2, instr.lane = 0;
    instr.access = static_cast<std::int32_t>(writes_and_reads.accesses.size());
    writes_and_reads.instrs.push_back(instr);
    trace::GmAccess access;
    access.tensor = 0, access.writes = writes, access.burst_bytes = 64;
    writes_and_reads.accesses.push_back(access);
  }
  phase.cores = {writes_and_reads, writes_and_reads, writes_and_reads};
  for (trace::GmAccess& access : phase.cores[1].accesses) access.offset = 640;
  phase.cores[2].accesses[1].offset = 640;
  EXPECT_EQ(FirstAlike(phase, record.chip), (std::vector<std::size_t>{0, 0, 2}));
}

// One row of GM is written by two moves of a pipe, or two rows by one each.
TEST(PlanTest, MovesOfOnePipeThatMeetGetABarrier) {
  for (const bool meet : {true, false}) {
    const trace::Record record = RecordOverlappingMoves(meet).record;
    for (const Policy policy : kPolicies) {
      const sync::Plan plan = sync::PlanFlags(record, policy);
      EXPECT_TRUE(sync::Check(record, plan).ok()) << sync::CheckText(sync::Check(record, plan));
      std::set<Pipe> pipes;
      for (const sync::SyncOp& op : plan.phases[0].cores[0].ops) {
        if (op.kind == Kind::kPipeBarrier) pipes.insert(op.pipe);
      }
      EXPECT_EQ(pipes, (meet ? std::set{Pipe::kMte2, Pipe::kMte3} : std::set<Pipe>{}));
    }
    trace::Record in_order = record;
    in_order.chip.sync.moves_need_barrier = false;
    EXPECT_EQ(CountOf(sync::PlanFlags(in_order, Policy::kMinimal), Kind::kPipeBarrier), 0);
  }
}

// The replay has the second move wait until the first is over.
TEST(PlanTest, BarriersBetweenMovesTakeTime) {
  trace::Record record = RecordOverlappingMoves(true).record;
  const double with = trace::Replay(record, false).cycles;
  record.chip.sync.moves_need_barrier = false;
  EXPECT_GT(with, 1.01 * trace::Replay(record, false).cycles);
}

TEST(PlanTest, PlansAreDeterministic) {
  const NamedRecord made = RecordAttention(Ascend910B2(), DType::kBF16, {.sq = 200, .skv = 300});
  const sync::Plan first = sync::PlanFlags(made.record, Policy::kMinimal);
  const sync::Plan second = sync::PlanFlags(made.record, Policy::kMinimal);
  for (std::size_t c = 0; c < first.phases[0].cores.size(); ++c)
    EXPECT_EQ(first.phases[0].cores[c].ops, second.phases[0].cores[c].ops);
}

// ---- Slack ----

TEST(PlanTest, SlackSaysWhatEachWaitCosts) {
  ChipSpec chip = Ascend910B2();
  const NamedRecord made = RecordAttention(chip, DType::kBF16, {.sq = 200, .skv = 300});
  const sync::Plan plan = sync::PlanFlags(made.record, Policy::kMinimal);
  std::size_t told = 0;
  const sync::Slack slack =
      sync::FindSlack(made.record, plan, [&](std::size_t done, std::size_t) { told = done; });
  EXPECT_EQ(slack.rows.size(), sync::Fold(made.record, plan).size());
  EXPECT_EQ(told, slack.rows.size());
  const trace::ReplayOptions none;
  EXPECT_NEAR(slack.time_us, trace::Replay(made.record, plan, none).time_s * 1e6, 1e-6);
  double waited = 0;
  for (const sync::SlackRow& row : slack.rows) {
    EXPECT_GE(row.waited_us, 0);
    EXPECT_LT(row.saved_us, slack.time_us);
    waited += row.waited_us;
  }
  EXPECT_GT(waited, 0);
  EXPECT_GT(slack.rows.front().saved_us, 0);
  EXPECT_TRUE(std::is_sorted(slack.rows.begin(), slack.rows.end(),
                             [](const auto& x, const auto& y) { return x.saved_us > y.saved_us; }));
  EXPECT_EQ(slack.shortage_us, 0);
  const nlohmann::json json = ParseJson(sync::SlackJson(slack));
  EXPECT_EQ(json.at("rows").size(), slack.rows.size());
  EXPECT_NEAR(json.at("time_us").get<double>(), slack.time_us, 1e-3);
  EXPECT_NE(sync::SlackTable(slack).find("of " + std::string()), std::string::npos);
}

// Two ids in place of six: the plan says where they run out, and the slack what that costs.
TEST(PlanTest, SlackPricesIdsThatRunOut) {
  ChipSpec chip = Ascend910B2();
  chip.sync.event_ids = 1, chip.sync.cross_core_limit = 1;
  const NamedRecord made = RecordMatmul(chip, DType::kBF16, 512, 512, 4096, false, false);
  const sync::Plan plan = sync::PlanFlags(made.record, Policy::kMinimal);
  ASSERT_FALSE(plan.shortages.empty());
  const sync::Slack slack = sync::FindSlack(made.record, plan);
  EXPECT_GT(slack.shortage_us, 0);
  EXPECT_NE(sync::SlackTable(slack).find("ids that run out cost"), std::string::npos);
}

}  // namespace
}  // namespace cubist::testing
