// Routes counted and ranked by a table and by sorting (Sort32 and MergeSort): the same numbers, from the host's body, from
// the expansion on primitive instructions and from records run under their flags; and the model's choice between the two.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/token_permute.h"
#include "npu_model/composites.h"
#include "npu_model/device.h"
#include "npu_model/host/host_core.h"
#include "npu_model/sync/check.h"
#include "npu_model/sync/execute.h"
#include "npu_model/sync/plan.h"
#include "npu_model/trace/record.h"
#include "npu_model/tuning.h"
#include "tests/kernels/kernel_test.h"
#include "tiling/fields.h"
#include "tiling/token_permute_tiling.h"

namespace cubist {
namespace {

using testing::IsOk;

// Experts of (tokens, top_k) slots: of `skewed` the first one in three, and with `gaps` some -1.
std::vector<std::int32_t> RandomIds(std::int64_t tokens, std::int64_t top_k, std::int64_t experts,
                                    bool skewed, bool gaps, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::int32_t> ids;
  for (std::int64_t s = 0; s < tokens * top_k; ++s) {
    auto id = static_cast<std::int32_t>(random() % static_cast<unsigned>(experts));
    if (skewed && random() % 3 == 0) id = 0;
    if (gaps && random() % 5 == 0) id = -1;
    ids.push_back(id);
  }
  return ids;
}

// The row of every slot by std::stable_sort; -1 for routes to no expert.
std::vector<std::int32_t> StableRows(const std::vector<std::int32_t>& ids) {
  std::vector<std::int32_t> slots, rows(ids.size(), -1);
  for (std::size_t s = 0; s < ids.size(); ++s) {
    if (ids[s] >= 0) slots.push_back(static_cast<std::int32_t>(s));
  }
  std::stable_sort(slots.begin(), slots.end(), [&](std::int32_t a, std::int32_t b) {
    return ids[static_cast<std::size_t>(a)] < ids[static_cast<std::size_t>(b)];
  });
  for (std::size_t r = 0; r < slots.size(); ++r)
    rows[static_cast<std::size_t>(slots[r])] = static_cast<std::int32_t>(r);
  return rows;
}

// Likewise of experts with `capacity` rows each, which the first routes take.
std::vector<std::int32_t> RowsWithin(const std::vector<std::int32_t>& ids, std::int64_t experts,
                                     std::int64_t capacity) {
  std::vector<std::int64_t> taken(static_cast<std::size_t>(experts));
  std::vector<std::int32_t> rows;
  for (const std::int32_t id : ids) {
    const bool has_row = id >= 0 && taken[static_cast<std::size_t>(id)] < capacity;
    rows.push_back(has_row ? static_cast<std::int32_t>(id * capacity + taken[static_cast<std::size_t>(id)]++)
                           : -1);
  }
  return rows;
}

std::vector<std::int32_t> CountsOf(const std::vector<std::int32_t>& ids, std::int64_t experts) {
  std::vector<std::int32_t> counts(static_cast<std::size_t>(experts));
  for (const std::int32_t id : ids) {
    if (id >= 0) ++counts[static_cast<std::size_t>(id)];
  }
  return counts;
}

// One Vector core of a host.
struct Rig {
  template <class T>
  UbTile<T> NewTile(std::int64_t rows, std::int64_t cols) {
    return Ring<Buffer::kUB, T>(vector, "tile", rows, cols, 1).Next(rows, cols);
  }
  UbTile<std::int32_t> Filled(std::int64_t rows, std::int64_t cols, const std::vector<std::int32_t>& values) {
    GmTensor t;
    t.data = reinterpret_cast<std::byte*>(const_cast<std::int32_t*>(values.data()));
    t.dtype = DType::kI32, t.sizes = {1, 1, rows, cols}, t.strides = {0, 0, cols, 1};
    const auto tile = NewTile<std::int32_t>(rows, cols);
    vector.Load(tile, MatrixOf(t));
    return tile;
  }
  std::vector<std::int64_t> ValuesOf(const UbTile<std::int32_t>& tile) {
    std::vector<std::int64_t> values;
    for (std::int64_t i = 0; i < tile.rows(); ++i) {
      for (std::int64_t j = 0; j < tile.cols(); ++j)
        values.push_back(vector.ReadScalar(tile.Rows({i, i + 1}), j));
    }
    return values;
  }

  Scratch scratch;
  HostContext context{HostChip(), scratch, 0, 1};
  HostAiCore core{context};
  HostVectorCore& vector{core.vectors()[0]};
  HostVector executor{context, 0};
};

TEST(RankSortTest, TheExpansionIsTheBody) {
  unsigned seed = 1;
  for (const std::int64_t rows : {1, 4, 16, 85, 300}) {
    for (const std::int64_t cols : {1, 3, 8, 11}) {
      for (const std::int64_t experts : {1, 7, 64, 1000}) {
        Rig rig;
        const auto ids = RandomIds(rows, cols, experts, seed % 2 == 0, seed % 3 == 0, seed);
        ++seed;
        const auto tile = rig.Filled(rows, cols, ids);
        std::vector<std::int32_t> first(static_cast<std::size_t>(experts)),
            ramp(static_cast<std::size_t>(std::max(rows * cols, experts + 1)));
        std::iota(first.begin(), first.end(), 100), std::iota(ramp.begin(), ramp.end(), 0);
        const auto words = [&] { return rig.NewTile<std::int32_t>(rows, cols); };
        const auto floats = [&] { return rig.NewTile<float>(rows, cols); };
        const auto of_bins = [&] { return rig.NewTile<float>(1, experts + 1); };
        const SortTiles tiles{rig.Filled(rows, cols, ramp),
                              of_bins(),
                              {floats(), floats()},
                              {words(), words()},
                              of_bins(),
                              of_bins(),
                              of_bins(),
                              rig.NewTile<std::int32_t>(1, experts + 1)};
        rig.vector.Cast(tiles.bins, rig.Filled(1, experts + 1, ramp));
        const SortRefs refs{tiles.places,
                            tiles.bins,
                            {tiles.keys[0], tiles.keys[1]},
                            {tiles.values[0], tiles.values[1]},
                            tiles.starts,
                            tiles.probes,
                            tiles.found,
                            tiles.at};
        const auto table = rig.Filled(1, experts, first), sorted = rig.Filled(1, experts, first),
                   body = rig.Filled(1, experts, first), by_table = rig.NewTile<std::int32_t>(rows, cols),
                   by_sort = rig.NewTile<std::int32_t>(rows, cols),
                   by_body = rig.NewTile<std::int32_t>(rows, cols);
        rig.vector.Fill(by_sort, -1);
        rig.vector.Rank(by_table, table, tile, {});
        ExpandRankBySort(rig.executor, by_sort, sorted, tile, refs, Loc::current());
        rig.vector.Rank(by_body, body, tile, {}, tiles);
        ASSERT_EQ(rig.ValuesOf(by_sort), rig.ValuesOf(by_table)) << rows << "x" << cols << " of " << experts;
        ASSERT_EQ(rig.ValuesOf(by_body), rig.ValuesOf(by_table)) << rows << "x" << cols << " of " << experts;
        ASSERT_EQ(rig.ValuesOf(sorted), rig.ValuesOf(table)) << rows << "x" << cols << " of " << experts;
        ASSERT_EQ(rig.ValuesOf(body), rig.ValuesOf(table)) << rows << "x" << cols << " of " << experts;
        // Counts, on top of those of a piece before.
        rig.vector.Histogram(table, tile, {});
        ExpandHistogramBySort(rig.executor, sorted, tile, refs, Loc::current());
        ASSERT_EQ(rig.ValuesOf(sorted), rig.ValuesOf(table)) << rows << "x" << cols << " of " << experts;
      }
    }
  }
}

// A permute on a chip, by the tiling of its own choice with some fields set to others.
struct Permute {
  Permute(std::int64_t tokens, std::int64_t hidden, std::int64_t top_k, std::int64_t experts, bool skewed,
          std::int64_t capacity = 0)
      : tokens(tokens),
        hidden(hidden),
        experts(experts),
        capacity(capacity),
        ids(RandomIds(tokens, top_k, experts, skewed, skewed, 5)) {
    shape.tokens = tokens, shape.hidden = hidden, shape.top_k = top_k, shape.experts = experts;
    shape.dtype = DType::kBF16, shape.drops = capacity > 0;
  }
  Status Run(const ChipSpec& chip, const std::string& fields, Profile* profile, trace::Record* record) {
    const std::int64_t slots = static_cast<std::int64_t>(ids.size());
    auto tuning = std::make_shared<Tuning>();
    tuning->Set("token_permute", chip.name, ShapeText(shape), fields);
    rows.assign(ids.size(), -7), counts.assign(static_cast<std::size_t>(experts), -7);
    TokenPermuteArgs args;
    args.tokens = {nullptr, DType::kBF16, {tokens, hidden}};
    args.capacity = capacity;
    args.permuted = {nullptr, DType::kBF16, {capacity > 0 ? experts * capacity : slots, hidden}};
    args.topk_ids = {ids.data(), {tokens, shape.top_k}}, args.num_experts = experts;
    args.sorted_indices = {rows.data(), {slots}}, args.expert_counts = {counts.data(), {experts}};
    return TokenPermute(Npu(chip, {.with_data = false, .record = record, .tuning = tuning}), args, profile);
  }
  // What a record's outputs of int32 hold by name, its instructions run in an order that only flags restrain.
  static std::map<std::string, std::vector<std::int32_t>> Executed(const trace::Record& record,
                                                                   sync::Schedule schedule) {
    trace::GmImage gm = trace::InitialGm(record, 5);
    EXPECT_TRUE(sync::Execute(record, sync::PlanFlags(record, sync::Policy::kMinimal), schedule, 3, &gm));
    std::map<std::string, std::vector<std::int32_t>> found;
    for (std::size_t t = 0; t < record.tensors.size(); ++t) {
      if (record.tensors[t].dtype != DType::kI32) continue;
      auto& values = found[record.tensors[t].name];
      values.resize(gm[t].size() / sizeof(std::int32_t));
      std::memcpy(values.data(), gm[t].data(), gm[t].size());
    }
    return found;
  }

  std::int64_t tokens, hidden, experts, capacity;
  std::vector<std::int32_t> ids, rows, counts;
  TokenPermuteShape shape;
};

void ExpectRecordsRank(Permute call, const std::vector<std::int32_t>& rows) {
  for (const char* fields : {"sorts=0", "sorts=1", "sorts=1,piece_tokens=3", "sorts=1,piece_tokens=64"}) {
    SCOPED_TRACE(std::string(fields) + " of " + ShapeText(call.shape));
    trace::Record record;
    ASSERT_TRUE(IsOk(call.Run(Ascend910B2(), std::string("chunk_tokens=90,") + fields, nullptr, &record)));
    ASSERT_EQ(trace::UnknownTo(record), nullptr);
    const sync::CheckResult checked = sync::Check(record, sync::PlanFlags(record, sync::Policy::kMinimal));
    ASSERT_TRUE(checked.findings.empty());
    for (const sync::Schedule schedule : {sync::Schedule::kProgramOrder, sync::Schedule::kLate}) {
      const auto found = Permute::Executed(record, schedule);
      ASSERT_EQ(found.at("sorted_indices"), rows);
      ASSERT_EQ(found.at("expert_counts"), CountsOf(call.ids, call.experts));
    }
  }
}

TEST(RankSortTest, RecordsOfBothRankAsAStableSort) {
  for (const std::int64_t experts : {5, 64, 300}) {
    for (const std::int64_t top_k : {1, 6, 8}) {
      const Permute call(333, 16, top_k, experts, experts == 64);
      ExpectRecordsRank(call, StableRows(call.ids));
    }
  }
}

TEST(RankSortTest, RecordsOfBothKeepToACapacity) {
  for (const std::int64_t experts : {5, 64}) {
    const std::int64_t capacity = 300 * 6 / experts;
    const Permute call(333, 16, 6, experts, /*skewed=*/true, capacity);
    ExpectRecordsRank(call, RowsWithin(call.ids, experts, capacity));
  }
}

// Whichever the chooser takes, the other one is not faster. Returns which it was, or -1 where it was neither.
int ExpectCheaperByReplay(const ChipSpec& chip, Permute call) {
  TokenPermuteTiling chosen;
  EXPECT_TRUE(IsOk(Choose(chip, call.shape, &chosen)));
  if (chosen.digit_bits != 0) return -1;
  TokenPermuteTiling other = chosen;
  other.sorts = !chosen.sorts;
  if (Fits(chip, call.shape, other)) {
    Profile mine, others;
    EXPECT_TRUE(IsOk(call.Run(chip, TilingText(chip, call.shape, chosen), &mine, nullptr)));
    EXPECT_TRUE(IsOk(call.Run(chip, TilingText(chip, call.shape, other), &others, nullptr)));
    EXPECT_LE(mine.time_s, 1.005 * others.time_s)
        << chip.name << ", " << ShapeText(call.shape) << ", capacity " << call.capacity << ", sorts "
        << chosen.sorts;
  }
  return chosen.sorts ? 1 : 0;
}

// Either is taken somewhere.
TEST(RankSortTest, TheChoiceIsTheCheaperByReplay) {
  std::array<int, 2> taken{};
  for (const ChipSpec* chip : {&Ascend910B2(), &Ascend910B3()}) {
    for (const std::int64_t experts : {16, 64, 256, 1024}) {
      for (const auto& [tokens, hidden] : {std::pair{4096, 64}, {4096, 7168}, {600, 2048}, {64, 7168}}) {
        const int sorts = ExpectCheaperByReplay(*chip, Permute(tokens, hidden, 8, experts, /*skewed=*/false));
        if (sorts >= 0) ++taken[static_cast<std::size_t>(sorts)];
      }
    }
  }
  EXPECT_GT(taken[0], 0);
  EXPECT_GT(taken[1], 0);
}

// The choice is of the count alone. Of the last sizes, on the second chip, it is a sort, and a table were it of both phases.
TEST(RankSortTest, WithACapacityTheChoiceIsTheCheaperByReplay) {
  struct Sizes {
    std::int64_t tokens, hidden, top_k, experts;
  };
  std::array<int, 2> taken{};
  for (const auto& [tokens, hidden, top_k, experts] : {Sizes{1024, 64, 8, 64},
                                                       {1024, 7168, 8, 64},
                                                       {1024, 7168, 8, 256},
                                                       {4096, 64, 8, 64},
                                                       {4096, 64, 8, 256},
                                                       {4096, 7168, 8, 256},
                                                       {64, 7168, 8, 64},
                                                       {64, 7168, 8, 256},
                                                       {8192, 2048, 4, 2048}}) {
    for (const ChipSpec* chip : {&Ascend910B2(), &Ascend910B4()}) {
      const std::int64_t capacity = CeilDiv(tokens * top_k, experts);
      Permute call(tokens, hidden, top_k, experts, /*skewed=*/false, capacity);
      const int sorts = ExpectCheaperByReplay(*chip, call);
      if (sorts >= 0) ++taken[static_cast<std::size_t>(sorts)];
    }
  }
  EXPECT_GT(taken[0], 0);
  EXPECT_GT(taken[1], 0);
}

}  // namespace
}  // namespace cubist
