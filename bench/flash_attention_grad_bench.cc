// Attention's backward pass beside the assembly of oneDNN products and this library's Vector bodies ("composed").
//
// FlashAttentionGrad/<library>/<dtype>/<full|causal>/<heads>x<S>x<Dqk>x<Dv>/threads:<n>, as in flash_attention_bench.cc.
#include <cmath>
#include <cstdint>
#include <cstdlib>
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
#include "kernels/flash_attention_grad.h"
#ifdef CUBIST_BENCH_ONEDNN
#include "bench/support/onednn.h"
#endif

namespace cubist::bench {
namespace {

// A backward problem with its memory; out and lse are this library's forward answer.
class Problem {
 public:
  Problem(DType dtype, bool causal, const AttentionShape& shape);

  static double Flops(const AttentionShape& x, bool causal) {
    return PairFlops(x, causal, 3 * (x.dqk + x.dr) + 2 * x.dv);
  }
  static bool HasComposed([[maybe_unused]] DType dtype, [[maybe_unused]] const AttentionShape& shape) {
#ifdef CUBIST_BENCH_ONEDNN
    return shape.dr == 0 && OneDnnMultiplies(dtype, DType::kF32);
#else
    return false;
#endif
  }
  std::function<Status()> Own(int threads) const;
  std::function<Status()> Square(Detour detour, int threads) const {
    return SquareAttentionGrad(x_, detour, threads);
  }
  std::function<void()> Composed([[maybe_unused]] int threads) const {
#ifdef CUBIST_BENCH_ONEDNN
    return ComposedAttentionGrad(x_, threads);
#else
    return {};
#endif
  }
  void SpoilAnswer() const {
    for (const Tensor& t : {x_.dq, x_.dk, x_.dv}) Spoil(t.data, t.dtype, t.count());
  }
  // Some rows of dq, dk and dv against sums in double over all keys or queries.
  std::string CheckAnswer() const;

 private:
  char* Room(DType dtype, std::int64_t count) {
    memory_.push_back(RandomBytes(dtype, count, memory_.size() + 1));
    return memory_.back().data();
  }
  Tensor Rows(std::int64_t heads, std::int64_t cols) {
    return {Room(x_.forward.dtype, heads * x_.forward.s * cols),
            x_.forward.dtype,
            {1, heads, x_.forward.s, cols}};
  }
  double At(const ConstTensor& t, std::int64_t head, std::int64_t row, std::int64_t col) const {
    return LoadFloat(t.data, t.dtype, head * t.stride(1) + row * t.stride(2) + col);
  }
  double Dot(const ConstTensor& a, std::int64_t row_a, const ConstTensor& b, std::int64_t row_b,
             std::int64_t head) const {
    double sum = 0;
    for (std::int64_t d = 0; d < a.size(3); ++d)
      sum += At(a, head, row_a, d) * At(b, b.size(1) == 1 ? 0 : head, row_b, d);
    return sum;
  }
  // The weight of a pair and the gradient of its score; the latter's error is some roundings of `size`.
  struct Pair {
    double p, ds, size;
  };
  Pair PairOf(std::int64_t head, std::int64_t query, std::int64_t key) const;

  AttentionGrad x_;
  std::vector<Bytes> memory_;
};

Problem::Problem(DType dtype, bool causal, const AttentionShape& shape) {
  Attention& f = x_.forward;
  f = {.dtype = dtype,
       .causal = causal,
       .heads = shape.heads,
       .kv_heads = shape.heads,
       .sq = shape.s,
       .s = shape.s,
       .dqk = shape.dqk,
       .dr = shape.dr,
       .dv = shape.dv};
  f.q = Rows(f.heads, f.dqk), f.k = Rows(f.heads, f.dqk), f.v = Rows(f.heads, f.dv);
  if (f.dr > 0) f.q_rope = Rows(f.heads, f.dr), f.k_rope = Rows(1, f.dr);
  f.out = Rows(f.heads, f.dv), x_.dout = Rows(f.heads, f.dv);
  x_.lse = Tensor(Room(DType::kF32, f.heads * f.s), DType::kF32, {1, f.heads, f.s});
  x_.dq = Rows(f.heads, f.dqk), x_.dk = Rows(f.heads, f.dqk), x_.dv = Rows(f.heads, f.dv);
  if (f.dr > 0) x_.dq_rope = Rows(f.heads, f.dr), x_.dk_rope = Rows(1, f.dr);
  FlashAttentionArgs args{
      .q = f.q, .k = f.k, .v = f.v, .q_rope = f.q_rope, .k_rope = f.k_rope, .out = f.out, .lse = x_.lse};
  args.causal = causal ? Causal::kTopLeft : Causal::kNone;
  if (const Status status = FlashAttention(Host(), args); !status.ok()) std::abort();
}

Problem::Pair Problem::PairOf(std::int64_t head, std::int64_t query, std::int64_t key) const {
  const Attention& f = x_.forward;
  const double scale = 1 / std::sqrt(static_cast<double>(f.dqk + f.dr));
  double score = Dot(f.q, query, f.k, key, head);
  if (f.dr > 0) score += Dot(f.q_rope, query, f.k_rope, key, head);
  const double lse = LoadFloat(x_.lse.data, DType::kF32, head * f.s + query);
  const double p = std::exp(scale * score - lse);
  const double dp = Dot(x_.dout, query, f.v, key, head), delta = Dot(x_.dout, query, f.out, query, head);
  return {p, scale * p * (dp - delta), std::abs(scale) * p * (std::abs(dp) + std::abs(delta))};
}

std::string Problem::CheckAnswer() const {
  const Attention& f = x_.forward;
  const double roundoff = 4 * UnitRoundoff(f.dtype) + 0x1p-16;
  std::int64_t sample = 0;
  for (const std::int64_t row : Sample(f.s, 6)) {
    const std::int64_t head = sample++ % f.heads;
    std::vector<double> dq(static_cast<std::size_t>(f.dqk)), dk(dq), dv(static_cast<std::size_t>(f.dv));
    std::vector<double> dq_bound(dq), dk_bound(dq), dv_bound(dv);
    const auto add = [&](std::vector<double>& sum, std::vector<double>& bound, double factor, double size,
                         const ConstTensor& of, std::int64_t of_row) {
      for (std::size_t d = 0; d < sum.size(); ++d) {
        const double x = At(of, head, of_row, static_cast<std::int64_t>(d));
        sum[d] += factor * x, bound[d] += roundoff * (size + std::abs(factor)) * std::abs(x);
      }
    };
    for (std::int64_t other = 0; other < f.s; ++other) {
      if (!f.causal || other <= row) {
        const Pair pair = PairOf(head, row, other);
        add(dq, dq_bound, pair.ds, pair.size, f.k, other);
      }
      if (!f.causal || other >= row) {
        const Pair pair = PairOf(head, other, row);
        add(dk, dk_bound, pair.ds, pair.size, f.q, other);
        add(dv, dv_bound, pair.p, pair.p, x_.dout, other);
      }
    }
    const auto wrong = [&](const char* name, const Tensor& t, const std::vector<double>& sum,
                           const std::vector<double>& bound) {
      const char* at =
          static_cast<const char*>(t.data) + (head * t.stride(1) + row * t.stride(2)) * SizeOf(t.dtype);
      return Mismatch(name + (" head " + std::to_string(head)) + " row " + std::to_string(row), at, t.dtype,
                      1, sum, bound);
    };
    for (const std::string& text : {wrong("dq", x_.dq, dq, dq_bound), wrong("dk", x_.dk, dk, dk_bound),
                                    wrong("dv", x_.dv, dv, dv_bound)}) {
      if (!text.empty()) return text;
    }
  }
  return {};
}

std::function<Status()> Problem::Own(int threads) const {
  return [this, device = Host({.threads = threads})] {
    const Attention& f = x_.forward;
    return FlashAttentionGrad(device, {.q = f.q,
                                       .k = f.k,
                                       .v = f.v,
                                       .q_rope = f.q_rope,
                                       .k_rope = f.k_rope,
                                       .out = f.out,
                                       .lse = x_.lse,
                                       .dout = x_.dout,
                                       .dq = x_.dq,
                                       .dk = x_.dk,
                                       .dv = x_.dv,
                                       .dq_rope = x_.dq_rope,
                                       .dk_rope = x_.dk_rope,
                                       .causal = f.causal ? Causal::kTopLeft : Causal::kNone});
  };
}

}  // namespace
}  // namespace cubist::bench

int main(int argc, char** argv) {
  cubist::bench::RegisterPeaks();
  cubist::bench::RegisterAttention<cubist::bench::Problem>("FlashAttentionGrad", /*forward=*/false);
  return cubist::bench::Main(argc, argv, "x8192x");
}
