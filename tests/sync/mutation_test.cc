// The checker against broken plans and records: for every shipped kernel each flag is dropped, moved and
// retargeted, each barrier dropped, each ring shrunk, neighbouring slots laid over each other. A mutant is caught,
// or every conflicting pair is still ordered under it, which a brute-force graph confirms.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/block_steps.h"
#include "npu_model/sync/check.h"
#include "npu_model/sync/plan.h"
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/routes_in_parts.h"
#include "tests/sync/happens_before.h"
#include "tests/sync/shipped_kernels.h"
#include "tools/kernel_call.h"
#include "tools/subject.h"

namespace cubist::testing {
namespace {

using sync::Kind;
using sync::SyncOp;

// One core of one phase as a record of its own; what other phases wrote counts as given.
trace::Record CoreOf(const trace::Record& record, std::size_t phase, std::size_t core) {
  trace::Record one;
  one.kernel = record.kernel;
  one.chip = record.chip;
  one.tensors = record.tensors;
  for (trace::TensorInfo& t : one.tensors) t.input = true;
  one.phases.push_back({record.phases[phase].vector_only, {record.phases[phase].cores[core]}});
  return one;
}

// The ops of a plan that belong to one flag, by number in CorePlan::ops: a set (or, by Vector cores, all their
// parts) and the wait that it ends (or, on Vector cores, all of them).
struct FlagOps {
  std::vector<std::size_t> sets, waits;
};

std::vector<FlagOps> FlagsOf(const sync::CorePlan& plan, int lanes) {
  std::vector<FlagOps> flags;
  std::map<std::tuple<int, Pipe, Pipe, int>, std::deque<std::size_t>> up;
  std::map<std::pair<bool, int>, std::map<int, std::size_t>> nth;  // cross-core: events so far by side
  std::map<std::tuple<bool, int, std::size_t>, FlagOps> events;
  for (std::size_t o = 0; o < plan.ops.size(); ++o) {
    const SyncOp& op = plan.ops[o];
    switch (op.kind) {
      case Kind::kSetFlag:
        up[{op.lane, op.pipe, op.peer, op.id}].push_back(o);
        break;
      case Kind::kWaitFlag: {
        auto& queue = up[{op.lane, op.peer, op.pipe, op.id}];
        flags.push_back({{queue.front()}, {o}});
        queue.pop_front();
        break;
      }
      case Kind::kPipeBarrier:
        break;
      case Kind::kCrossSet:
        events[{op.lane < 0, op.id, nth[{true, op.id}][op.lane]++}].sets.push_back(o);
        break;
      case Kind::kCrossWait:
        events[{op.lane >= 0, op.id, nth[{false, op.id}][op.lane]++}].waits.push_back(o);
        break;
    }
  }
  for (auto& [key, event] : events) {
    const std::size_t setters = std::get<0>(key) ? 1 : static_cast<std::size_t>(lanes);
    const std::size_t waiters = std::get<0>(key) ? static_cast<std::size_t>(lanes) : 1;
    EXPECT_EQ(event.sets.size(), setters);
    EXPECT_EQ(event.waits.size(), waiters);
    flags.push_back(event);
  }
  return flags;
}

sync::CorePlan Without(const sync::CorePlan& plan, std::vector<std::size_t> dropped) {
  sync::CorePlan rest;
  for (std::size_t o = 0; o < plan.ops.size(); ++o) {
    if (std::find(dropped.begin(), dropped.end(), o) == dropped.end()) rest.ops.push_back(plan.ops[o]);
  }
  return rest;
}

// With ops changed and, as the form demands, sorted again.
template <class Change>
sync::CorePlan With(const sync::CorePlan& plan, const std::vector<std::size_t>& changed, Change change) {
  sync::CorePlan mutant = plan;
  for (const std::size_t o : changed) change(mutant.ops[o]);
  std::stable_sort(mutant.ops.begin(), mutant.ops.end(),
                   [](const SyncOp& x, const SyncOp& y) { return x.position() < y.position(); });
  return mutant;
}

sync::Plan PlanOf(sync::CorePlan core) {
  sync::Plan plan;
  plan.phases.emplace_back().cores.push_back(std::move(core));
  return plan;
}

struct Tally {
  int made = 0, caught = 0, confirmed = 0;
};

bool IsRace(const sync::Finding& f) {
  return f.fault == sync::Fault::kReadAfterWrite || f.fault == sync::Fault::kWriteAfterRead ||
         f.fault == sync::Fault::kWriteAfterWrite;
}

class MutationTest : public ::testing::Test {
 protected:
  // Beyond this many instructions and flags the graph is too slow for every mutant.
  static constexpr std::size_t kMostForGraph = 700;

  // A mutated plan is caught, or its order holds by the graph too.
  void Try(const char* kind, const trace::Record& record, sync::CorePlan mutant) {
    Tally& tally = tallies_[kind];
    ++tally.made;
    const trace::CoreRecord& core = record.phases[0].cores[0];
    const int lanes = record.phases[0].vector_only ? 1 : record.chip.vector_per_cube;
    const sync::Plan plan = PlanOf(std::move(mutant));
    const sync::CheckResult result = sync::Check(record, plan);
    if (!result.ok()) {
      ++tally.caught;
      const bool only_races = std::all_of(result.findings.begin(), result.findings.end(), IsRace);
      // And not for nothing: where there are races alone, the graph finds one.
      if (!only_races || tally.caught % 16 != 0 ||
          core.instrs.size() + plan.phases[0].cores[0].ops.size() > kMostForGraph)
        return;
      const HappensBefore graph(record.chip, core, plan.phases[0].cores[0], lanes);
      EXPECT_TRUE(graph.FirstRace().has_value()) << kind << ": " << sync::ToString(result.findings[0]);
      return;
    }
    if (core.instrs.size() + plan.phases[0].cores[0].ops.size() > kMostForGraph) return;
    const HappensBefore graph(record.chip, core, plan.phases[0].cores[0], lanes);
    ASSERT_FALSE(graph.deadlocks()) << kind;
    const auto race = graph.FirstRace();
    EXPECT_FALSE(race.has_value()) << kind << ": instructions " << race->first << " and " << race->second;
    ++tally.confirmed;
  }

  // Of all flags each `stride`-th.
  void MutatePlan(const trace::Record& record, const sync::CorePlan& plan, std::size_t stride) {
    const ChipSpec& chip = record.chip;
    const int lanes = record.phases[0].vector_only ? 1 : chip.vector_per_cube;
    const std::vector<FlagOps> flags = FlagsOf(plan, lanes);
    for (std::size_t f = 0; f < flags.size(); f += stride) {
      const FlagOps& flag = flags[f];
      std::vector<std::size_t> both = flag.sets;
      both.insert(both.end(), flag.waits.begin(), flag.waits.end());
      Try("drop a flag", record, Without(plan, both));
      Try("drop a set", record, Without(plan, {flag.sets.front()}));
      Try("drop a wait", record, Without(plan, {flag.waits.front()}));
      Try("move a set in front of its instruction", record,
          With(plan, flag.sets, [](SyncOp& op) { op.after = false; }));
      Try("move a wait behind its instruction", record,
          With(plan, flag.waits, [](SyncOp& op) { op.after = true; }));
      Try("retarget a set to another id", record, With(plan, {flag.sets.front()}, [&](SyncOp& op) {
            const bool cross = op.kind == Kind::kCrossSet;
            op.id = static_cast<std::uint8_t>((op.id + 1) %
                                              (cross ? chip.sync.cross_core_ids : chip.sync.event_ids));
          }));
      Try("retarget a set to another pipe", record, With(plan, {flag.sets.front()}, [](SyncOp& op) {
            if (op.kind == Kind::kCrossSet) {
              op.pipe = op.pipe == Pipe::kMte2 ? Pipe::kMte3 : Pipe::kMte2;
            } else {
              op.peer = op.peer == Pipe::kMte2 || op.pipe == Pipe::kMte2 ? Pipe::kS : Pipe::kMte2;
            }
          }));
    }
    for (std::size_t o = 0; o < plan.ops.size(); ++o) {
      if (plan.ops[o].kind == Kind::kPipeBarrier) Try("drop a barrier", record, Without(plan, {o}));
    }
  }

  // Slots are laid over each other; the plan stays.
  void MutateRecord(const trace::Record& record, const sync::CorePlan& plan) {
    const auto& slots = record.phases[0].cores[0].slots;
    const auto lay_over = [&](const char* kind, std::size_t victim, std::size_t other) {
      trace::Record mutant = record;
      auto& changed = mutant.phases[0].cores[0].slots;
      changed[victim].address = changed[other].address;
      Tally& tally = tallies_[kind];
      ++tally.made;
      if (!sync::Check(mutant, PlanOf(plan)).ok()) {
        ++tally.caught;
        return;
      }
      const int lanes = record.phases[0].vector_only ? 1 : record.chip.vector_per_cube;
      if (record.phases[0].cores[0].instrs.size() + plan.ops.size() > kMostForGraph) return;
      const HappensBefore graph(record.chip, mutant.phases[0].cores[0], plan, lanes);
      EXPECT_FALSE(graph.FirstRace().has_value())
          << kind << ": " << slots[victim].owner << " over " << slots[other].owner;
      ++tally.confirmed;
    };
    for (std::size_t s = 0; s + 1 < slots.size(); ++s) {
      const auto &a = slots[s], &b = slots[s + 1];
      if (a.buffer != b.buffer || a.lane != b.lane || !Used(record, s) || !Used(record, s + 1)) continue;
      const bool same_ring = std::string(a.owner) == b.owner;
      lay_over(same_ring ? "shrink a ring" : "alias two tiles", s + 1, s);
    }
  }
  static bool Used(const trace::Record& record, std::size_t slot) {
    const trace::CoreRecord& core = record.phases[0].cores[0];
    return std::any_of(core.operands.begin(), core.operands.end(),
                       [&](const trace::Operand& o) { return o.slot == static_cast<std::int32_t>(slot); });
  }

  void Mutate(const NamedRecord& made, sync::Policy policy, std::size_t stride) {
    SCOPED_TRACE(made.name);
    const sync::Plan plan = sync::PlanFlags(made.record, policy);
    const sync::CheckResult whole = sync::Check(made.record, plan);
    ASSERT_TRUE(whole.ok()) << sync::ToString(whole.findings[0]);
    for (std::size_t p = 0; p < made.record.phases.size(); ++p) {
      const std::size_t cores = made.record.phases[p].cores.size();
      for (const std::size_t c : {std::size_t{0}, cores - 1}) {
        const trace::Record one = CoreOf(made.record, p, c);
        MutatePlan(one, plan.phases[p].cores[c], stride);
        MutateRecord(one, plan.phases[p].cores[c]);
        if (cores == 1) break;
      }
    }
  }

  void Print(const char* title) const {
    std::printf("%s\n  %-42s %8s %8s %10s\n", title, "mutation", "made", "caught", "redundant");
    for (const auto& [kind, tally] : tallies_)
      std::printf("  %-42s %8d %8d %10d (%d confirmed by the graph)\n", kind.c_str(), tally.made,
                  tally.caught, tally.made - tally.caught, tally.confirmed);
  }

  std::map<std::string, Tally> tallies_;
};

NamedRecord RecordOf(const char* kernel, const char* shape, const ChipSpec& chip = Ascend910B2()) {
  KernelCallOptions options;
  options.kernel = kernel, options.shape = shape;
  KernelCall call;
  Status status = MakeKernelCall(options, &call);
  CUBIST_CHECK(status.ok(), status.message());
  NamedRecord made;
  made.name = std::string(kernel) + " " + shape + " on " + chip.name;
  status = call(Recorder(chip, &made.record));
  CUBIST_CHECK(status.ok(), status.message());
  return made;
}

// A call with some fields of its tiling as given, on a 910B2.
NamedRecord RecordTiled(const std::string& kernel, const std::string& shape, const std::string& tiling) {
  SubjectOptions options;
  options.call.kernel = kernel, options.call.shape = shape, options.tiling = tiling;
  NamedRecord made;
  made.name = kernel + " " + shape + ", " + tiling;
  Subject subject;
  Status status = MakeSubject(options, &subject);
  CUBIST_CHECK(status.ok(), status.message());
  Profile profile;
  status = subject.Run(&profile, /*timeline=*/false, &made.record);
  CUBIST_CHECK(status.ok(), status.message());
  return made;
}

NamedRecord RecordSum() {
  NamedRecord made;
  made.name = "sum 70x300";
  const ConstTensor term(nullptr, DType::kBF16, {70, 300});
  const SumArgs args{.a = term, .b = term, .c = term, .out = Tensor(nullptr, DType::kBF16, {70, 300})};
  const Status status = Sum(Recorder(Ascend910B2(), &made.record), args, nullptr);
  CUBIST_CHECK(status.ok(), status.message());
  return made;
}

// Every kernel of the library, and what is awkward about some.
std::vector<NamedRecord> Kernels() {
  std::vector<NamedRecord> all;
  for (const KernelForm& form : KernelForms()) all.push_back(RecordOf(form.name, form.small));
  for (const ChipSpec* chip : {&Ascend910B2(), &Ascend910B4()}) {
    all.push_back(RecordMatmul(*chip, DType::kBF16, 300, 500, 600, false, true));
    all.push_back(RecordMatmul(*chip, DType::kF32, 40, 50, 900, true, false));
    all.push_back(RecordAttention(*chip, DType::kBF16, {.sq = 128, .skv = 200}));
    all.push_back(RecordAttention(
        *chip, DType::kF16,
        {.heads = 1, .sq = 70, .skv = 130, .d = 40, .d_rope = 16, .causal = Causal::kBottomRight}));
    all.push_back(RecordAttention(*chip, DType::kBF16, {.heads = 1, .sq = 5, .skv = 600}));
    all.push_back(RecordAttentionGrad(*chip, DType::kBF16, {.sq = 40, .skv = 70, .d = 16}));
    for (const bool grad : {false, true}) all.push_back(RecordHiddenBlocks(*chip, 300, 150, grad));
    all.push_back(RecordPermute(*chip, 200, 96, 3, 8, DType::kI64));
    all.push_back(RecordUnpermute(*chip, 200, 96, 3));
  }
  // Rows after the last group alone, which the first core has.
  all.push_back(RecordGroupedMatmul(Ascend910B2(), DType::kBF16, {0}, 16, 70, /*grad=*/false));
  // What only some tilings do.
  all.push_back(RecordAttentionGrad(Ascend910B2(), DType::kF32, {.heads = 1, .sq = 20, .skv = 36, .d = 576}));
  all.push_back(RecordTiled("matmul", "300x500x600", "pack_a=1,pack_b=1"));
  all.push_back(RecordTiled("matmul", "300x500x600", "prefetch=1"));
  all.push_back(RecordMatmul(Ascend910B2(), DType::kBF16, 40, 50, 8000, false, false));  // k is split.
  all.push_back(RecordTiled("grouped_matmul", "200x256x256x3", "prefetch=1"));
  all.push_back(RecordTiled("flash_attention", "2x300x64x64x0", "kv_splits=2"));
  all.push_back(RecordTiled("flash_attention_grad", "1x128x32x32x0",
                            "n=32,strip=32,strips=1,pieces=2,depth=0,load_stages=2"));
  all.push_back(RecordSum());
  all.push_back(RecordOverlappingMoves(true));
  // Rows in parts.
  all.push_back(RecordOf("route", "3x150x7x5", WithCapacity(Buffer::kUB, 3072)));
  all.push_back(RecordOf("route", "2x150x3x2", WithCapacity(Buffer::kUB, 2560)));
  all.push_back(RecordOf("route_grad", "3x150x5", WithCapacity(Buffer::kUB, 2048)));
  all.push_back(RecordOf("token_permute_by_map", "2x5x7x1000", WithCapacity(Buffer::kUB, 16 << 10)));
  const TokenPermuteShape routes{.tokens = 1, .hidden = 5, .top_k = 200, .experts = 8};
  all.push_back(
      RecordOf("token_permute", "1x5x200x8", ChipsThatCutRoutes<TokenPermuteTiling>(routes).back()));
  all.push_back(
      RecordOf("token_unpermute", "1x5x200", ChipsThatCutRoutes<TokenUnpermuteTiling>(routes).back()));
  all.push_back(RecordOf("token_unpermute_grad_dropped", "1x5x200",
                         ChipsThatCutRoutes<TokenUnpermuteGradTiling>(routes).back()));
  all.push_back(RecordOf("token_unpermute_grad_by_row", "1x5x200x1",
                         ChipsThatCutRoutes<TokenUnpermuteGradTiling>(routes).back()));
  // Few ids and a short counter: what the plan does when they run out is mutated too.
  ChipSpec scarce = Ascend910B2();
  scarce.name = "scarce";
  scarce.sync.event_ids = 2, scarce.sync.cross_core_limit = 2;
  all.push_back(RecordMatmul(scarce, DType::kBF16, 300, 500, 600, false, true));
  all.push_back(RecordAttention(scarce, DType::kBF16, {.sq = 128, .skv = 200}));
  all.push_back(RecordUnpermute(scarce, 200, 96, 5));
  return all;
}

TEST_F(MutationTest, MinimalPlans) {
  for (const NamedRecord& made : Kernels()) Mutate(made, sync::Policy::kMinimal, /*stride=*/1);
  Print("Minimal plans");
  const Tally& dropped = tallies_["drop a flag"];
  EXPECT_GT(dropped.made, 500);
  EXPECT_GE(dropped.caught, 0.99 * dropped.made);
  EXPECT_EQ(tallies_["drop a barrier"].caught, tallies_["drop a barrier"].made);
  for (const char* kind : {"drop a set", "drop a wait"})
    EXPECT_EQ(tallies_[kind].caught, tallies_[kind].made) << kind;
  for (const char* kind : {"shrink a ring", "alias two tiles"}) EXPECT_GT(tallies_[kind].caught, 0) << kind;
}

// Of their many flags, which ablations alone use, every third.
TEST_F(MutationTest, PerTilePlans) {
  for (const NamedRecord& made : Kernels()) Mutate(made, sync::Policy::kPerTile, /*stride=*/3);
  Print("Per-tile plans");
  EXPECT_LT(tallies_["drop a flag"].caught, tallies_["drop a flag"].made);  // Many are implied.
  for (const char* kind : {"drop a set", "drop a wait"})
    EXPECT_EQ(tallies_[kind].caught, tallies_[kind].made) << kind;
}

// The files whose lines issued what is mutated: those of a phase's first and last core.
std::set<std::string> MutatedFiles() {
  std::set<std::string> files;
  for (const NamedRecord& made : Kernels()) {
    for (const auto& phase : made.record.phases) {
      for (const trace::CoreRecord* core : {&phase.cores.front(), &phase.cores.back()}) {
        for (const trace::Instr& instr : core->instrs)
          files.insert(std::filesystem::path(core->lines[instr.line].file).filename());
      }
    }
  }
  return files;
}

TEST(MutationCoverageTest, ReachesEveryKernelFile) {
  std::set<std::string> mutated = MutatedFiles();
  mutated.insert("operand_kernel.h");          // Its loads stand under their caller's line.
  mutated.insert("matmul_operands_kernel.h");  // Issues nothing.
  int kernels = 0;
  for (const auto& entry : std::filesystem::directory_iterator(CUBIST_KERNELS_IN_SOURCE)) {
    const std::string file = entry.path().filename();
    if (!file.ends_with("_kernel.h")) continue;
    ++kernels;
    EXPECT_TRUE(mutated.contains(file)) << file;
  }
  EXPECT_GT(kernels, 20);
}

}  // namespace
}  // namespace cubist::testing
