// TokenPermute and TokenUnpermute beside chains of plain operators, each as good as it gets.
//
// <kernel>/<library>/<dtype>/<uniform|skewed>/<T>x<H>/top<k>of<experts>/threads:<n>. Libraries: cubist;
// gather ranks the routes, then copies a row for every row of the result; select_sum gathers the rows of
// every token, then sums them up; chain is what frameworks run for permute and unpermute, an operator each: sort, gather,
// gather back, multiply in fp32, add, narrow.
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "bench/support/answer.h"
#include "bench/support/arena.h"
#include "bench/support/harness.h"
#include "bench/support/random_data.h"
#include "kernels/token_permute.h"
#include "kernels/token_permute_grad.h"
#include "npu_model/host/movement_ops.h"
#include "npu_model/host/tile_ops.h"
#include "reference/token_permute.h"

namespace cubist::bench {
namespace {

constexpr std::int64_t kTokens = 4096, kHidden = 7168, kTopK = 8, kRoutes = kTokens * kTopK;

// Memory of one dtype, shared by all cases of it.
struct Memory {
  explicit Memory(DType dtype)
      : tokens(RandomBytes(dtype, kTokens * kHidden, 1)),
        permuted(RandomBytes(dtype, kRoutes * kHidden, 2)),
        out(RandomBytes(dtype, kTokens * kHidden, 3)),
        selected(RandomBytes(dtype, kRoutes * kHidden, 4)) {}
  Bytes tokens, permuted, out;
  Bytes selected;  // What select_sum keeps between its two steps.
};

Memory& MemoryOf(DType dtype) {
  static std::map<DType, Memory> memory;
  return memory.try_emplace(dtype, dtype).first->second;
}

// How often an expert is chosen, relative to others. Skewed as in practice: of sixteen experts the top three
// take 60 % of the routes, the bottom five 10 %.
double Popularity(std::int64_t expert, bool skewed) {
  if (!skewed) return 1;
  const std::int64_t place = expert % 16;
  return place < 3 ? 0.60 / 3 : place < 11 ? 0.30 / 8 : 0.10 / 5;
}

// kTopK different experts for every token: the ones whose exponential clocks of rate `Popularity` ring first.
std::vector<std::int32_t> RandomRoutes(std::int64_t experts, bool skewed) {
  std::mt19937_64 random(static_cast<std::uint64_t>(experts));
  std::exponential_distribution<double> clock;
  std::vector<std::int32_t> ids, order(static_cast<std::size_t>(experts));
  std::vector<double> rings(order.size());
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::size_t e = 0; e < rings.size(); ++e) {
      rings[e] = clock(random) / Popularity(static_cast<std::int64_t>(e), skewed);
    }
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + kTopK, order.end(), [&](std::int32_t a, std::int32_t b) {
      return rings[static_cast<std::size_t>(a)] < rings[static_cast<std::size_t>(b)];
    });
    ids.insert(ids.end(), order.begin(), order.begin() + kTopK);
  }
  return ids;
}

class Problem {
 public:
  Problem(DType dtype, std::int64_t experts, bool skewed)
      : dtype_(dtype),
        experts_(experts),
        memory_(MemoryOf(dtype)),
        ids_(RandomRoutes(experts, skewed)),
        routing_(reference::Route(ids(), experts, 0)),
        written_(static_cast<std::size_t>(kRoutes)),
        probs_(RandomBytes(DType::kF32, kRoutes, 5)),
        probs_grad_(RandomBytes(DType::kF32, kRoutes, 6)),
        rows_(Sample(kRoutes, 64)),
        some_tokens_(Sample(kTokens, 32)) {}

  DType dtype() const { return dtype_; }
  std::int64_t experts() const { return experts_; }
  std::int64_t row_bytes() const { return kHidden * SizeOf(dtype_); }
  ConstTensor ids() const { return {ids_.data(), {kTokens, kTopK}}; }
  Tensor tokens() const { return {memory_.tokens.data(), dtype_, {kTokens, kHidden}}; }
  Tensor permuted() const { return {memory_.permuted.data(), dtype_, {kRoutes, kHidden}}; }
  Tensor selected() const { return {memory_.selected.data(), dtype_, {kRoutes, kHidden}}; }
  Tensor out() const { return {memory_.out.data(), dtype_, {kTokens, kHidden}}; }
  ConstTensor probs() const { return {probs_.data(), DType::kF32, {kTokens, kTopK}}; }
  Tensor probs_grad() { return {probs_grad_.data(), DType::kF32, {kTokens, kTopK}}; }
  // Where permutes write their indices, and the right ones for unpermutes.
  Tensor written_indices() { return {written_.data(), {kRoutes}}; }
  ConstTensor right_indices() const { return {routing_.sorted_indices.data(), {kRoutes}}; }

  void SpoilPermuted();
  // The indices, one column of every row, and every column of some rows.
  std::string CheckPermuted() const;

  void SpoilOut();
  // One column of every token, and every column of some tokens. What was permuted last is what was to be
  // summed up, with the probabilities or with weights of 1.
  std::string CheckOut(bool weighted = true) const;

  // The gradient of unpermute, from `tokens` as the gradient of its result, in `selected` and probs_grad: some rows, and
  // the probabilities of some tokens.
  void SpoilRowsGrad();
  std::string CheckRowsGrad() const;

 private:
  template <class Void>
  static BasicTensor<Void> Column(BasicTensor<Void> x, std::int64_t column) {
    x.data = static_cast<char*>(const_cast<void*>(x.data)) + column * SizeOf(x.dtype);
    x.sizes[1] = 1;
    return x;
  }
  char* Element(const Tensor& x, std::int64_t row, std::int64_t column) const {
    return static_cast<char*>(x.data) + (row * kHidden + column) * SizeOf(dtype_);
  }
  std::string CompareOut(const reference::UnpermuteResult& result, std::span<const std::int64_t> tokens,
                         std::int64_t first_column, ConstTensor weights) const;

  DType dtype_;
  std::int64_t experts_;
  Memory& memory_;
  std::vector<std::int32_t> ids_;
  reference::Routing routing_;
  std::vector<std::int32_t> written_;
  Bytes probs_, probs_grad_;
  std::vector<std::int64_t> rows_, some_tokens_;
  std::int64_t column_ = Sample(kHidden, 3)[1];
};

void Problem::SpoilPermuted() {
  std::fill(written_.begin(), written_.end(), -1);
  for (std::int64_t row = 0; row < kRoutes; ++row) Spoil(Element(permuted(), row, column_), dtype_, 1);
  for (std::int64_t row : rows_) Spoil(Element(permuted(), row, 0), dtype_, kHidden);
}

std::string Problem::CheckPermuted() const {
  for (std::size_t s = 0; s < written_.size(); ++s) {
    if (written_[s] == routing_.sorted_indices[s]) continue;
    return "slot " + std::to_string(s) + " goes to row " + std::to_string(written_[s]) + ", expected " +
           std::to_string(routing_.sorted_indices[s]);
  }
  const std::vector<double> exact(static_cast<std::size_t>(kRoutes), 0.0);  // Rows only move.
  const std::vector<double> column = reference::Permute(Column(tokens(), column_), routing_);
  std::string wrong = Mismatch("transposed column " + std::to_string(column_),
                               Element(permuted(), 0, column_), dtype_, kHidden, column, exact);
  const std::vector<double> some = reference::Permute(tokens(), routing_, rows_);
  for (std::size_t i = 0; i < rows_.size() && wrong.empty(); ++i) {
    wrong = Mismatch("row " + std::to_string(rows_[i]), Element(permuted(), rows_[i], 0), dtype_, 1,
                     std::span(some).subspan(i * kHidden, kHidden), std::span(exact).first(kHidden));
  }
  return wrong;
}

void Problem::SpoilOut() {
  for (std::int64_t t = 0; t < kTokens; ++t) Spoil(Element(out(), t, column_), dtype_, 1);
  for (std::int64_t t : some_tokens_) Spoil(Element(out(), t, 0), dtype_, kHidden);
}

std::string Problem::CompareOut(const reference::UnpermuteResult& result,
                                std::span<const std::int64_t> tokens, std::int64_t first_column,
                                ConstTensor weights) const {
  const std::vector<double> bounds = reference::UnpermuteBounds(result, weights, dtype_, kTopK);
  const std::size_t width = result.out.size() / tokens.size();
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::string wrong = Mismatch(
        "token " + std::to_string(tokens[i]) + " from column " + std::to_string(first_column),
        Element(out(), tokens[i], first_column), dtype_, 1, std::span(result.out).subspan(i * width, width),
        std::span(bounds).subspan(i * width, width));
    if (!wrong.empty()) return wrong;
  }
  return {};
}

std::string Problem::CheckOut(bool weighted) const {
  const ConstTensor weights = weighted ? probs() : ConstTensor();
  std::vector<std::int64_t> all(static_cast<std::size_t>(kTokens));
  std::iota(all.begin(), all.end(), std::int64_t{0});
  const auto column = reference::Unpermute(Column(permuted(), column_), right_indices(), weights, kTopK);
  const std::string wrong = CompareOut(column, all, column_, weights);
  if (!wrong.empty()) return wrong;
  return CompareOut(reference::Unpermute(permuted(), right_indices(), weights, some_tokens_, kTopK),
                    some_tokens_, 0, weights);
}

void Problem::SpoilRowsGrad() {
  Spoil(probs_grad_.data(), DType::kF32, kRoutes);
  for (std::int64_t t : some_tokens_) {
    for (std::int64_t j = 0; j < kTopK; ++j)
      Spoil(Element(selected(), routing_.sorted_indices[static_cast<std::size_t>(t * kTopK + j)], 0), dtype_,
            kHidden);
  }
}

std::string Problem::CheckRowsGrad() const {
  const auto value = [&](const Tensor& x, std::int64_t row, std::int64_t h) -> double {
    return LoadFloat(x.data, dtype_, row * kHidden + h);
  };
  for (const std::int64_t t : some_tokens_) {
    for (std::int64_t j = 0; j < kTopK; ++j) {
      const std::int64_t slot = t * kTopK + j, row = routing_.sorted_indices[static_cast<std::size_t>(slot)];
      const double prob = LoadFloat(probs_.data(), DType::kF32, slot);
      std::vector<double> expected, bounds;
      double dot = 0, magnitude = 0;
      for (std::int64_t h = 0; h < kHidden; ++h) {
        const double grad = value(tokens(), t, h), product = grad * value(permuted(), row, h);
        expected.push_back(prob * grad);
        bounds.push_back(1.01 * (UnitRoundoff(dtype_) + 0x1p-24) * std::abs(expected.back()));
        dot += product, magnitude += std::abs(product);
      }
      const std::string where = "slot " + std::to_string(slot);
      std::string wrong = Mismatch(where, Element(selected(), row, 0), dtype_, 1, expected, bounds);
      if (!wrong.empty()) return wrong;
      const double bound = 1.01 * static_cast<double>(kHidden + 2) * 0x1p-24 * magnitude;
      wrong = Mismatch("probability of " + where, probs_grad_.data() + slot * 4, DType::kF32, 1,
                       std::span(&dot, 1), std::span(&bound, 1));
      if (!wrong.empty()) return wrong;
    }
  }
  return {};
}

// ---- Peers ----

char* RowOf(const ConstTensor& x, std::int64_t row) {
  return static_cast<char*>(const_cast<void*>(x.data)) + row * x.stride(0) * SizeOf(x.dtype);
}

// A counting sort of the routes, then one memcpy for every row of the result.
void Gather(Problem& problem, oneapi::tbb::task_arena& arena) {
  const auto* ids = static_cast<const std::int32_t*>(problem.ids().data);
  auto* indices = static_cast<std::int32_t*>(problem.written_indices().data);
  std::vector<std::int32_t> next(static_cast<std::size_t>(problem.experts()) + 1, 0);
  for (std::int64_t s = 0; s < kRoutes; ++s) ++next[static_cast<std::size_t>(ids[s]) + 1];
  std::partial_sum(next.begin(), next.end(), next.begin());
  std::vector<std::int64_t> token_of_row(static_cast<std::size_t>(kRoutes));
  for (std::int64_t s = 0; s < kRoutes; ++s) {
    indices[s] = next[static_cast<std::size_t>(ids[s])]++;
    token_of_row[static_cast<std::size_t>(indices[s])] = s / kTopK;
  }
  const auto bytes = static_cast<std::size_t>(problem.row_bytes());
  ForEach(arena, kRoutes, [&](std::int64_t row) {
    std::memcpy(RowOf(problem.permuted(), row),
                RowOf(problem.tokens(), token_of_row[static_cast<std::size_t>(row)]), bytes);
  });
}

// The rows of every token side by side, then their weighted sum.
void SelectSum(Problem& problem, oneapi::tbb::task_arena& arena) {
  const auto* indices = static_cast<const std::int32_t*>(problem.right_indices().data);
  const auto* probs = static_cast<const float*>(problem.probs().data);
  const auto bytes = static_cast<std::size_t>(problem.row_bytes());
  ForEach(arena, kRoutes, [&](std::int64_t s) {
    std::memcpy(RowOf(problem.selected(), s), RowOf(problem.permuted(), indices[s]), bytes);
  });
  const VectorOps& ops = BestVectorOps();
  ForEach(arena, kTokens, [&](std::int64_t t) {
    alignas(64) float sum[kHidden];
    std::array<const void*, kTopK> rows;
    for (std::int64_t j = 0; j < kTopK; ++j) {
      rows[static_cast<std::size_t>(j)] = RowOf(problem.selected(), t * kTopK + j);
    }
    const WeightedRows weighted{problem.dtype(), rows.data(), probs + t * kTopK, kTopK};
    BestMovementOps().weighted_sum(sum, kHidden, weighted, /*accumulate=*/false);
    ops.cast({RowOf(problem.out(), t), kHidden, 1, kHidden}, problem.dtype(), {sum, kHidden, 1, kHidden},
             DType::kF32, false);
  });
}

// A row that was selected, in fp32.
std::span<const float> Widened(const Problem& problem, std::int64_t slot) {
  alignas(64) thread_local std::array<float, kHidden> wide;
  BestVectorOps().cast({wide.data(), kHidden, 1, kHidden}, DType::kF32,
                       {RowOf(problem.selected(), slot), kHidden, 1, kHidden}, problem.dtype(), false);
  return wide;
}

// What a framework runs to unpermute, an operator after the other, each as well as it goes: rows back to their slots, times
// probabilities in fp32, sums over the slots of a token, narrowed.
void UnpermuteChain(Problem& problem, Bytes& products, oneapi::tbb::task_arena& arena) {
  const auto* indices = static_cast<const std::int32_t*>(problem.right_indices().data);
  const auto* probs = static_cast<const float*>(problem.probs().data);
  const auto bytes = static_cast<std::size_t>(problem.row_bytes());
  const VectorOps& ops = BestVectorOps();
  ForEach(arena, kRoutes, [&](std::int64_t s) {
    ops.copy(RowOf(problem.selected(), s), 0, RowOf(problem.permuted(), indices[s]), 0, 1,
             static_cast<std::int64_t>(bytes), /*stream=*/true);
  });
  const auto product = [&](std::int64_t s) { return products.data() + s * kHidden * 4; };
  ForEach(arena, kRoutes, [&](std::int64_t s) {
    void* const to = product(s);
    const void* const no_row = nullptr;
    float sum;
    BestMovementOps().scale_dots(&to, &sum, Widened(problem, s).data(), kHidden,
                                 {DType::kF32, &no_row, probs + s, 1}, /*stream=*/true);
  });
  ForEach(arena, kTokens, [&](std::int64_t t) {
    alignas(64) float sum[kHidden];
    std::array<const void*, kTopK> rows;
    std::array<float, kTopK> ones;
    for (std::int64_t j = 0; j < kTopK; ++j) {
      rows[static_cast<std::size_t>(j)] = product(t * kTopK + j);
      ones[static_cast<std::size_t>(j)] = 1;
    }
    const WeightedRows weighted{DType::kF32, rows.data(), ones.data(), kTopK};
    BestMovementOps().weighted_sum(sum, kHidden, weighted, /*accumulate=*/false);
    ops.cast({RowOf(problem.out(), t), kHidden, 1, kHidden}, problem.dtype(), {sum, kHidden, 1, kHidden},
             DType::kF32, true);
  });
}

// ---- Cases ----

using Made = std::function<Problem&()>;

// Bytes of rows on either side, and of the indices or probabilities beside them.
double TokenBytes(const Problem& x) { return static_cast<double>(kTokens * x.row_bytes()); }
double RouteBytes(const Problem& x) { return static_cast<double>(kRoutes * x.row_bytes()); }
constexpr double kIndexBytes = 4.0 * static_cast<double>(kRoutes);

void TimePermute(benchmark::State& state, Problem& problem, int threads, const std::function<Status()>& run) {
  std::string error;
  problem.SpoilPermuted();
  const Call call = {.run =
                         [&] {
                           if (const Status status = run(); !status.ok()) error = status.message();
                         },
                     .check = [&] { return error.empty() ? problem.CheckPermuted() : error; }};
  TimeMovement(state, threads, TokenBytes(problem) + kIndexBytes, RouteBytes(problem) + kIndexBytes, call);
}

void TimeUnpermute(benchmark::State& state, Problem& problem, int threads,
                   const std::function<Status()>& run) {
  std::string error;
  problem.SpoilOut();
  const Call call = {.run =
                         [&] {
                           if (const Status status = run(); !status.ok()) error = status.message();
                         },
                     .check = [&] { return error.empty() ? problem.CheckOut() : error; }};
  TimeMovement(state, threads, RouteBytes(problem) + 2 * kIndexBytes, TokenBytes(problem), call);
}

void RegisterPermute(const Made& made, const std::string& dtype, const std::string& text, int threads) {
  Register(CaseName("TokenPermute", "cubist", dtype, text, threads), [=](benchmark::State& state) {
    Problem& x = made();
    const TokenPermuteArgs args = {.tokens = x.tokens(),
                                   .topk_ids = x.ids(),
                                   .num_experts = x.experts(),
                                   .permuted = x.permuted(),
                                   .sorted_indices = x.written_indices()};
    const Device device = Host({.threads = threads});
    TimePermute(state, x, threads, [&] { return TokenPermute(device, args); });
  });
  Register(CaseName("TokenPermute", "gather", dtype, text, threads), [=](benchmark::State& state) {
    oneapi::tbb::task_arena arena(threads);
    TimePermute(state, made(), threads, [&] {
      Gather(made(), arena);
      return Status();
    });
  });
}

void RegisterUnpermute(const Made& made, const std::string& dtype, const std::string& text, int threads) {
  Register(CaseName("TokenUnpermute", "cubist", dtype, text, threads), [=](benchmark::State& state) {
    Problem& x = made();
    const TokenUnpermuteArgs args = {
        .permuted = x.permuted(), .sorted_indices = x.right_indices(), .probs = x.probs(), .out = x.out()};
    const Device device = Host({.threads = threads});
    TimeUnpermute(state, x, threads, [&] { return TokenUnpermute(device, args); });
  });
  Register(CaseName("TokenUnpermute", "select_sum", dtype, text, threads), [=](benchmark::State& state) {
    oneapi::tbb::task_arena arena(threads);
    TimeUnpermute(state, made(), threads, [&] {
      SelectSum(made(), arena);
      return Status();
    });
  });
}

// Weights of 1: as many rows as there are routes come back to their tokens.
void RegisterPermuteGrad(const Made& made, const std::string& dtype, const std::string& text, int threads) {
  Register(CaseName("TokenPermuteGrad", "cubist", dtype, text, threads), [=](benchmark::State& state) {
    Problem& x = made();
    const TokenPermuteGradArgs args = {.permuted_grad = x.permuted(),
                                       .sorted_indices = x.right_indices(),
                                       .top_k = kTopK,
                                       .tokens_grad = x.out()};
    const Device device = Host({.threads = threads});
    std::string error;
    x.SpoilOut();
    const Call call = {.run =
                           [&] {
                             if (const Status s = TokenPermuteGrad(device, args); !s.ok())
                               error = s.message();
                           },
                       .check = [&] { return error.empty() ? x.CheckOut(/*weighted=*/false) : error; }};
    TimeMovement(state, threads, RouteBytes(x) + kIndexBytes, TokenBytes(x), call);
  });
}

void RegisterUnpermuteGrad(const Made& made, const std::string& dtype, const std::string& text, int threads) {
  Register(CaseName("TokenUnpermuteGrad", "cubist", dtype, text, threads), [=](benchmark::State& state) {
    Problem& x = made();
    const TokenUnpermuteGradArgs args = {.out_grad = x.tokens(),
                                         .permuted = x.permuted(),
                                         .sorted_indices = x.right_indices(),
                                         .probs = x.probs(),
                                         .permuted_grad = x.selected(),
                                         .probs_grad = x.probs_grad()};
    const Device device = Host({.threads = threads});
    std::string error;
    x.SpoilRowsGrad();
    const Call call = {.run =
                           [&] {
                             if (const Status s = TokenUnpermuteGrad(device, args); !s.ok())
                               error = s.message();
                           },
                       .check = [&] { return error.empty() ? x.CheckRowsGrad() : error; }};
    TimeMovement(state, threads, TokenBytes(x) + RouteBytes(x) + 2 * kIndexBytes, RouteBytes(x) + kIndexBytes,
                 call);
  });
}

// There and back: ours reads and writes every row once each way; the chain moves selected rows and fp32 products too. The
// counter `bytes` is what each has to move at least.
void RegisterPair(const Made& made, const std::string& dtype, const std::string& text, int threads) {
  const auto time = [=](benchmark::State& state, double bytes, const std::function<Status()>& run) {
    Problem& x = made();
    std::string error;
    x.SpoilPermuted(), x.SpoilOut();
    const Call call = {.run =
                           [&] {
                             if (const Status status = run(); !status.ok()) error = status.message();
                           },
                       .check =
                           [&] {
                             if (!error.empty()) return error;
                             const std::string wrong = x.CheckPermuted();
                             return wrong.empty() ? x.CheckOut() : wrong;
                           }};
    TimeMovement(state, threads, bytes / 2, bytes / 2, call);
    state.counters["bytes"] = bytes;
  };
  Register(CaseName("TokenPair", "cubist", dtype, text, threads), [=](benchmark::State& state) {
    Problem& x = made();
    const Device device = Host({.threads = threads});
    const TokenPermuteArgs there = {.tokens = x.tokens(),
                                    .topk_ids = x.ids(),
                                    .num_experts = x.experts(),
                                    .permuted = x.permuted(),
                                    .sorted_indices = x.written_indices()};
    const TokenUnpermuteArgs back = {
        .permuted = x.permuted(), .sorted_indices = x.right_indices(), .probs = x.probs(), .out = x.out()};
    time(state, 2 * (TokenBytes(x) + RouteBytes(x)), [&] {
      const Status status = TokenPermute(device, there);
      return status.ok() ? TokenUnpermute(device, back) : status;
    });
  });
  Register(CaseName("TokenPair", "chain", dtype, text, threads), [=](benchmark::State& state) {
    Problem& x = made();
    static Bytes products = RandomBytes(DType::kF32, kRoutes * kHidden, 7);
    oneapi::tbb::task_arena arena(threads);
    const double wide = 4.0 * static_cast<double>(kRoutes * kHidden);
    // Gather reads and writes rows, gathering back too; products are written and read.
    time(state, 5 * RouteBytes(x) + 2 * wide + TokenBytes(x), [&] {
      Gather(x, arena);
      UnpermuteChain(x, products, arena);
      return Status();
    });
  });
}

void RegisterCases() {
  for (DType dtype : {DType::kBF16, DType::kF32}) {
    for (std::int64_t experts : {64, 256, 1024}) {
      for (bool skewed : {false, true}) {
        // Made by the first case that runs, then shared by all.
        auto problem = std::make_shared<std::unique_ptr<Problem>>();
        const Made made = [=]() -> Problem& {
          if (!*problem) *problem = std::make_unique<Problem>(dtype, experts, skewed);
          return **problem;
        };
        const std::string text = std::string(skewed ? "skewed/" : "uniform/") + std::to_string(kTokens) +
                                 "x" + std::to_string(kHidden) + "/top" + std::to_string(kTopK) + "of" +
                                 std::to_string(experts);
        for (int threads : ThreadCounts()) {
          RegisterPermute(made, NameOf(dtype), text, threads);
          RegisterUnpermute(made, NameOf(dtype), text, threads);
          RegisterPermuteGrad(made, NameOf(dtype), text, threads);
          RegisterUnpermuteGrad(made, NameOf(dtype), text, threads);
          if (dtype == DType::kBF16) RegisterPair(made, NameOf(dtype), text, threads);
        }
      }
    }
  }
}

}  // namespace
}  // namespace cubist::bench

int main(int argc, char** argv) {
  cubist::bench::RegisterPeaks();
  cubist::bench::RegisterCases();
  return cubist::bench::Main(argc, argv, "");
}
