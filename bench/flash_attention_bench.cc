// Attention beside the assembly of oneDNN products and a vectorised softmax ("composed").
//
// FlashAttention/<library>/<dtype>/<full|causal>/<heads>x<S>x<Dqk>x<Dv>/threads:<n>. <Dqk>r<Dr> means Dr rope
// columns in tensors of their own, k_rope shared by all heads, and has our kernel without its ideas beside it:
// square_attention.h. With Dqk 576 two heads share one KV head, else each has its own.
// FlashAttention/<library>/<dtype>/decode/<heads>on<KV heads>x<S>x<Dqk>x<Dv>/threads:<n>: one query a head.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bench/support/answer.h"
#include "bench/support/attention.h"
#include "bench/support/attention_cases.h"
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

// The queries of heads that share keys as rows of one matrix, where there is one of each head.
[[maybe_unused]] Attention JoinedHeads(Attention x) {
  if (x.sq != 1) return x;
  x.sq = x.heads / x.kv_heads, x.heads = x.kv_heads;
  x.q = ConstTensor(x.q.data, x.dtype, {1, x.heads, x.sq, x.dqk});
  x.out = Tensor(x.out.data, x.dtype, {1, x.heads, x.sq, x.dv});
  return x;
}

// An attention problem with its memory and its expected answer on sampled rows.
class Problem {
 public:
  Problem(DType dtype, bool causal, const AttentionShape& shape);

  static double Flops(const AttentionShape& x, bool causal) {
    return PairFlops(x, causal, x.dqk + x.dr + x.dv);
  }
  static bool HasComposed([[maybe_unused]] DType dtype, const AttentionShape&) {
#ifdef CUBIST_BENCH_ONEDNN
    return OneDnnMultiplies(dtype, DType::kF32);
#else
    return false;
#endif
  }
  std::function<Status()> Own(int threads) const;
  std::function<Status()> Square(Detour detour, int threads) const {
    return SquareAttention(x_, detour, threads);
  }
  std::function<void()> Composed([[maybe_unused]] int threads) const {
#ifdef CUBIST_BENCH_ONEDNN
    return ComposedAttention(JoinedHeads(x_), threads);
#else
    return {};
#endif
  }
  void SpoilAnswer() const {
    for (const reference::AttentionRow& row : rows_) Spoil(OutRow(row), x_.dtype, x_.dv);
  }
  std::string CheckAnswer();

 private:
  ConstTensor Input(std::int64_t heads, std::int64_t rows, std::int64_t cols) {
    memory_.push_back(RandomBytes(x_.dtype, heads * rows * cols, memory_.size() + 1));
    return {memory_.back().data(), x_.dtype, {1, heads, rows, cols}};
  }
  char* OutRow(const reference::AttentionRow& row) const {
    return static_cast<char*>(x_.out.data) + (row.head * x_.sq + row.query) * x_.dv * SizeOf(x_.dtype);
  }

  Attention x_;
  std::vector<Bytes> memory_;
  std::vector<reference::AttentionRow> rows_;
  std::vector<double> expected_, bounds_;
};

Problem::Problem(DType dtype, bool causal, const AttentionShape& shape)
    : x_{.dtype = dtype,
         .causal = causal,
         .heads = shape.heads,
         .kv_heads = shape.kv_heads,
         .sq = shape.sq(),
         .s = shape.s,
         .dqk = shape.dqk,
         .dr = shape.dr,
         .dv = shape.dv} {
  x_.q = Input(x_.heads, x_.sq, x_.dqk);
  x_.k = Input(x_.kv_heads, x_.s, x_.dqk);
  x_.v = Input(x_.kv_heads, x_.s, x_.dv);
  if (x_.dr > 0) x_.q_rope = Input(x_.heads, x_.sq, x_.dr), x_.k_rope = Input(1, x_.s, x_.dr);
  Input(x_.heads, x_.sq, x_.dv);
  x_.out = Tensor(memory_.back().data(), x_.dtype, {1, x_.heads, x_.sq, x_.dv});

  for (const std::int64_t row : Sample(x_.heads * x_.sq, 12)) rows_.push_back({0, row / x_.sq, row % x_.sq});
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

std::function<Status()> Problem::Own(int threads) const {
  return [this, device = Host({.threads = threads})] {
    return FlashAttention(device, {.q = x_.q,
                                   .k = x_.k,
                                   .v = x_.v,
                                   .q_rope = x_.q_rope,
                                   .k_rope = x_.k_rope,
                                   .out = x_.out,
                                   .causal = x_.causal ? Causal::kTopLeft : Causal::kNone});
  };
}

}  // namespace
}  // namespace cubist::bench

int main(int argc, char** argv) {
  cubist::bench::RegisterPeaks();
  cubist::bench::RegisterAttention<cubist::bench::Problem>("FlashAttention", /*forward=*/true);
  return cubist::bench::Main(argc, argv, "x8192x");
}
