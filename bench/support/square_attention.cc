#include "bench/support/square_attention.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "bench/support/arena.h"
#include "bench/support/random_data.h"
#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"
#include "npu_model/host/movement_ops.h"
#include "npu_model/host/tile_ops.h"

namespace cubist::bench {
namespace {

// Tensors of one call in memory of their own, and how rows move between them and the caller's.
class Square {
 public:
  Square(const Attention& attention, Detour detour, int threads)
      : x_(attention),
        wide_(x_.dqk + x_.dr),
        d_v_(detour == Detour::kPadded ? wide_ : x_.dv),
        arena_(threads) {}

  std::int64_t wide() const { return wide_; }
  std::int64_t d_v() const { return d_v_; }
  bool pads() const { return d_v_ != x_.dv; }

  // (1, heads, s, cols)
  Tensor Make(std::int64_t heads, std::int64_t cols) {
    memory_.push_back(RandomBytes(x_.dtype, heads * x_.s * cols, memory_.size() + 1));
    return {memory_.back().data(), x_.dtype, {1, heads, x_.s, cols}};
  }
  // dst = (left, right) column by column; a right of one head serves all. Zeros on the right where it is not given.
  void Join(const Tensor& dst, const ConstTensor& left, const ConstTensor& right) {
    const std::size_t first = RowBytes(left), rest = RowBytes(dst) - first;
    ForEach(arena_, Rows(dst), [&](std::int64_t i) {
      std::memcpy(RowOf(dst, i), RowOf(left, i), first);
      if (right.given()) {
        std::memcpy(RowOf(dst, i) + first, RowOf(right, i % Rows(right)), rest);
      } else {
        std::memset(RowOf(dst, i) + first, 0, rest);
      }
    });
  }
  // dst = columns of src from `first` on; summed over the heads that dst has not.
  void Cut(const Tensor& dst, const ConstTensor& src, std::int64_t first) {
    if (Rows(dst) != Rows(src)) return CutSum(dst, src, first);
    const std::int64_t offset = first * SizeOf(x_.dtype);
    ForEach(arena_, Rows(dst),
            [&](std::int64_t i) { std::memcpy(RowOf(dst, i), RowOf(src, i) + offset, RowBytes(dst)); });
  }

 private:
  static std::int64_t Rows(const ConstTensor& x) { return x.size(1) * x.size(2); }
  static std::size_t RowBytes(const ConstTensor& x) {
    return static_cast<std::size_t>(x.size(3) * SizeOf(x.dtype));
  }
  static char* RowOf(const ConstTensor& x, std::int64_t i) {
    return static_cast<char*>(const_cast<void*>(x.data)) + i * x.size(3) * SizeOf(x.dtype);
  }
  void CutSum(const Tensor& dst, const ConstTensor& src, std::int64_t first) {
    const std::vector<float> ones(static_cast<std::size_t>(src.size(1)), 1.0f);
    ForEach(arena_, Rows(dst), [&](std::int64_t i) {
      std::vector<float> sum(static_cast<std::size_t>(dst.size(3)));
      std::vector<const void*> rows;
      for (std::int64_t head = 0; head < src.size(1); ++head)
        rows.push_back(RowOf(src, head * Rows(dst) + i) + first * SizeOf(x_.dtype));
      BestMovementOps().weighted_sum(sum.data(), dst.size(3),
                                     {x_.dtype, rows.data(), ones.data(), src.size(1)}, /*accumulate=*/false);
      BestVectorOps().cast({RowOf(dst, i), dst.size(3), 1, dst.size(3)}, x_.dtype,
                           {sum.data(), dst.size(3), 1, dst.size(3)}, DType::kF32, false);
    });
  }

  Attention x_;
  std::int64_t wide_, d_v_;
  oneapi::tbb::task_arena arena_;
  std::vector<Bytes> memory_;
};

Causal CausalOf(const Attention& x) { return x.causal ? Causal::kTopLeft : Causal::kNone; }

}  // namespace

std::function<Status()> SquareAttention(const Attention& x, Detour detour, int threads) {
  auto square = std::make_shared<Square>(x, detour, threads);
  const Tensor q = square->Make(x.heads, square->wide()), k = square->Make(x.kv_heads, square->wide()),
               v = square->pads() ? square->Make(x.kv_heads, square->d_v()) : Tensor(),
               out = square->pads() ? square->Make(x.heads, square->d_v()) : x.out;
  return [=]() -> Status {
    square->Join(q, x.q, x.q_rope), square->Join(k, x.k, x.k_rope);
    if (square->pads()) square->Join(v, x.v, {});
    FlashAttentionArgs args = {.q = q, .k = k, .v = x.v, .out = out, .causal = CausalOf(x)};
    if (square->pads()) args.v = v;
    CUBIST_RETURN_IF_ERROR(FlashAttention(Host({.threads = threads}), args));
    if (square->pads()) square->Cut(x.out, out, 0);
    return {};
  };
}

std::function<Status()> SquareAttentionGrad(const AttentionGrad& grad, Detour detour, int threads) {
  const Attention& x = grad.forward;
  auto square = std::make_shared<Square>(x, detour, threads);
  const std::int64_t wide = square->wide(), d_v = square->d_v();
  const Tensor q = square->Make(x.heads, wide), k = square->Make(x.kv_heads, wide),
               dq = square->Make(x.heads, wide), dk = square->Make(x.kv_heads, wide);
  struct Padded {
    Tensor v, out, dout, dv;
  };
  Padded padded;
  if (square->pads()) {
    padded = {square->Make(x.kv_heads, d_v), square->Make(x.heads, d_v), square->Make(x.heads, d_v),
              square->Make(x.kv_heads, d_v)};
  }
  return [=]() -> Status {
    square->Join(q, x.q, x.q_rope), square->Join(k, x.k, x.k_rope);
    FlashAttentionGradArgs args = {.q = q,
                                   .k = k,
                                   .v = x.v,
                                   .out = x.out,
                                   .lse = grad.lse,
                                   .dout = grad.dout,
                                   .dq = dq,
                                   .dk = dk,
                                   .dv = grad.dv,
                                   .causal = CausalOf(x)};
    if (square->pads()) {
      square->Join(padded.v, x.v, {}), square->Join(padded.out, x.out, {}),
          square->Join(padded.dout, grad.dout, {});
      args.v = padded.v, args.out = padded.out, args.dout = padded.dout, args.dv = padded.dv;
    }
    CUBIST_RETURN_IF_ERROR(FlashAttentionGrad(Host({.threads = threads}), args));
    if (square->pads()) square->Cut(grad.dv, padded.dv, 0);
    square->Cut(grad.dq, dq, 0), square->Cut(grad.dq_rope, dq, x.dqk);
    square->Cut(grad.dk, dk, 0), square->Cut(grad.dk_rope, dk, x.dqk);
    return {};
  };
}

}  // namespace cubist::bench
