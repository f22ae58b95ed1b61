// Attention beside the assembly of oneDNN products and a vectorised softmax ("composed").
//
// FlashAttention/<library>/<dtype>/<full|causal>/<heads>x<S>x<Dqk>x<Dv>/threads:<n>. <Dqk>r<Dr> means Dr rope
// columns in tensors of their own, k_rope shared by all heads, and has our kernel without its ideas beside it:
// square_attention.h. With Dqk 576 two heads share one KV head, else each has its own.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/support/answer.h"
#include "bench/support/attention.h"
#include "bench/support/harness.h"
#include "bench/support/random_data.h"
#include "bench/support/square_attention.h"
#include "kernels/flash_attention.h"
#include "reference/attention.h"
#ifdef CUBIST_BENCH_ONEDNN
#include "bench/support/onednn.h"
#endif

namespace cubist::bench {
namespace {

struct Shape {
  std::int64_t heads, kv_heads, s, dqk, dr, dv;
};

std::string TextOf(const Shape& x) {
  std::string text = std::to_string(x.heads) + "x" + std::to_string(x.s) + "x" + std::to_string(x.dqk);
  if (x.dr > 0) text.append("r").append(std::to_string(x.dr));
  return text + "x" + std::to_string(x.dv);
}

// Queries and keys that see each other, times 2 (Dqk + Dr + Dv); causal counts half, as is customary.
double Flops(const Shape& x, bool causal) {
  const auto s = static_cast<double>(x.s);
  return static_cast<double>(2 * x.heads * (x.dqk + x.dr + x.dv)) * s * s / (causal ? 2 : 1);
}

// An attention problem with its memory and its expected answer on sampled rows.
class Problem {
 public:
  Problem(DType dtype, bool causal, const Shape& shape);

  const Attention& attention() const { return x_; }
  void SpoilAnswer() const {
    for (const reference::AttentionRow& row : rows_) Spoil(OutRow(row), x_.dtype, x_.dv);
  }
  std::string CheckAnswer();

 private:
  ConstTensor Input(std::int64_t heads, std::int64_t cols) {
    memory_.push_back(RandomBytes(x_.dtype, heads * x_.s * cols, memory_.size() + 1));
    return {memory_.back().data(), x_.dtype, {1, heads, x_.s, cols}};
  }
  char* OutRow(const reference::AttentionRow& row) const {
    return static_cast<char*>(x_.out.data) + (row.head * x_.s + row.query) * x_.dv * SizeOf(x_.dtype);
  }

  Attention x_;
  std::vector<Bytes> memory_;
  std::vector<reference::AttentionRow> rows_;
  std::vector<double> expected_, bounds_;
};

Problem::Problem(DType dtype, bool causal, const Shape& shape)
    : x_{.dtype = dtype,
         .causal = causal,
         .heads = shape.heads,
         .kv_heads = shape.kv_heads,
         .s = shape.s,
         .dqk = shape.dqk,
         .dr = shape.dr,
         .dv = shape.dv} {
  x_.q = Input(x_.heads, x_.dqk);
  x_.k = Input(x_.kv_heads, x_.dqk);
  x_.v = Input(x_.kv_heads, x_.dv);
  if (x_.dr > 0) x_.q_rope = Input(x_.heads, x_.dr), x_.k_rope = Input(1, x_.dr);
  Input(x_.heads, x_.dv);
  x_.out = Tensor(memory_.back().data(), x_.dtype, {1, x_.heads, x_.s, x_.dv});

  std::int64_t head = 0;
  for (std::int64_t query : Sample(x_.s, 12)) rows_.push_back({0, head++ % x_.heads, query});
}

std::string Problem::CheckAnswer() {
  if (expected_.empty()) {
    const reference::AttentionArgs args = {
        .q = x_.q,
        .k = x_.k,
        .v = x_.v,
        .q_rope = x_.q_rope,
        .k_rope = x_.k_rope,
        .mask = x_.causal ? reference::Mask::kTopLeft : reference::Mask::kNone};
    const auto result = reference::Attention(args, rows_);
    expected_ = result.out;
    bounds_ = reference::OutBounds(args, result, x_.dtype);
  }
  const auto dv = static_cast<std::size_t>(x_.dv);
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const std::string where =
        "head " + std::to_string(rows_[i].head) + " query " + std::to_string(rows_[i].query);
    const std::string wrong =
        Mismatch(where, OutRow(rows_[i]), x_.dtype, 1, std::span(expected_).subspan(i * dv, dv),
                 std::span(bounds_).subspan(i * dv, dv));
    if (!wrong.empty()) return wrong;
  }
  return {};
}

void Time(benchmark::State& state, Problem& problem, double flops, int threads, std::function<void()> run,
          const std::string& error) {
  problem.SpoilAnswer();
  const Call call = {.run = std::move(run),
                     .check = [&] { return error.empty() ? problem.CheckAnswer() : error; }};
  TimeCompute(state, threads, ArithmeticOf(problem.attention().dtype), flops, call);
}

// Of a call of this library.
void TimeOwn(benchmark::State& state, Problem& problem, double flops, int threads,
             const std::function<Status()>& call) {
  std::string error;
  const auto run = [&] {
    if (const Status status = call(); !status.ok()) error = status.message();
  };
  Time(state, problem, flops, threads, run, error);
}

void TimeCubist(benchmark::State& state, Problem& problem, double flops, int threads) {
  const Attention& x = problem.attention();
  const FlashAttentionArgs args = {.q = x.q,
                                   .k = x.k,
                                   .v = x.v,
                                   .q_rope = x.q_rope,
                                   .k_rope = x.k_rope,
                                   .out = x.out,
                                   .causal = x.causal ? Causal::kTopLeft : Causal::kNone};
  const Device device = Host({.threads = threads});
  TimeOwn(state, problem, flops, threads, [&] { return FlashAttention(device, args); });
}

void RegisterCase(DType dtype, bool causal, const Shape& shape) {
  // Made by the first case that runs, then shared by all libraries, thread counts and repetitions.
  auto problem = std::make_shared<std::unique_ptr<Problem>>();
  const auto made = [=]() -> Problem& {
    if (!*problem) *problem = std::make_unique<Problem>(dtype, causal, shape);
    return **problem;
  };
  const std::string text = std::string(causal ? "causal/" : "full/") + TextOf(shape);
  const double flops = Flops(shape, causal);
  for (int threads : ThreadCounts()) {
    Register(CaseName("FlashAttention", "cubist", NameOf(dtype), text, threads),
             [=](benchmark::State& state) { TimeCubist(state, made(), flops, threads); });
    for (const auto& [library, detour] : {std::pair("cubist_conventional", Detour::kPadded),
                                          std::pair("cubist_rectangular", Detour::kJoined)}) {
      if (shape.dr == 0) continue;
      Register(CaseName("FlashAttention", library, NameOf(dtype), text, threads),
               [=, detour = detour](benchmark::State& state) {
                 TimeOwn(state, made(), flops, threads, SquareAttention(made().attention(), detour, threads));
               });
    }
#ifdef CUBIST_BENCH_ONEDNN
    if (dtype == DType::kF16) continue;  // No product of fp16 on CPUs there.
    Register(CaseName("FlashAttention", "composed", NameOf(dtype), text, threads),
             [=](benchmark::State& state) {
               Time(state, made(), flops, threads, ComposedAttention(made().attention(), threads), "");
             });
#endif
  }
}

void RegisterCases() {
  std::vector<Shape> shapes;
  for (std::int64_t s : {1024, 2048, 4096, 8192}) {
    shapes.push_back({8, 8, s, 128, 0, 128});
    shapes.push_back({8, 8, s, 192, 0, 128});
    shapes.push_back({8, 8, s, 128, 64, 128});
    shapes.push_back({2, 1, s, 576, 0, 512});
  }
  for (std::int64_t d : {64, 72, 80, 177, 192}) shapes.push_back({8, 8, 1000, d, 0, d});
  for (DType dtype : {DType::kBF16, DType::kF32, DType::kF16}) {
    for (const Shape& shape : shapes) {
      for (bool causal : {false, true}) RegisterCase(dtype, causal, shape);
    }
  }
}

}  // namespace
}  // namespace cubist::bench

int main(int argc, char** argv) {
  cubist::bench::RegisterPeaks();
  cubist::bench::RegisterCases();
  return cubist::bench::Main(argc, argv, "x8192x");
}
