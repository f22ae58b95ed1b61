// Calls of attention.
#include <cstdint>
#include <vector>

#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"
#include "tests/fuzz/caller.h"

namespace cubist::fuzz {

namespace {

// Lists that the arguments of attention point to.
struct AttentionLists {
  std::vector<std::int64_t> prefix, q_ends, kv_ends;
};

struct AttentionShape {
  std::int64_t b, groups, kv_heads, heads, sq, skv, qk, v, rope;
  DType dtype;
};
AttentionShape ShapeOf(Caller& in) {
  AttentionShape s{};
  s.b = in.choose().Below(3), s.groups = 1 + in.choose().Below(2), s.kv_heads = in.choose().Below(3);
  s.heads = s.groups * s.kv_heads;
  s.sq = in.Size(), s.skv = in.Size(), s.qk = in.Size(), s.v = in.Size(),
  s.rope = in.choose().Below(2) * 2 * in.choose().Below(3);
  s.dtype = in.Float();
  return s;
}

template <class Args>
void GiveMasks(Caller& in, const AttentionShape& s, Args* args, AttentionLists* lists) {
  args->causal = in.choose().Of(kCausal);
  if (in.choose().Seldom()) {
    args->window = AttentionWindow{};
    if (in.choose().Often()) args->window->left = in.Size() - 2;
    if (in.choose().Often()) args->window->right = in.Size() - 2;
    args->window->anchor = in.choose().Of(kCausal);
  }
  if (in.choose().Seldom()) {
    for (std::int64_t i = in.choose().Below(3); i > 0; --i) lists->prefix.push_back(in.Size() - 1);
    args->prefix = lists->prefix;
  }
  if (in.choose().Seldom()) {
    for (std::int64_t i = in.choose().Below(4); i > 0; --i) {
      lists->q_ends.push_back(in.Size());
      lists->kv_ends.push_back(in.Size());
    }
    args->lengths = {lists->q_ends, lists->kv_ends};
  }
  if (in.choose().Seldom()) {
    const auto or_one = [&](std::int64_t size) { return in.choose().Often() ? size : 1; };
    args->mask = in.Of(DType::kBool, {or_one(s.b), or_one(s.heads), or_one(s.sq), or_one(s.skv)});
  }
}

template <class Args>
void GiveRope(Caller& in, const AttentionShape& s, Args* args) {
  const std::int64_t positions = in.Size() * 2, turned = s.rope > 0 ? s.rope : s.qk;
  args->rope.cos = in.Of(DType::kF32, {positions, turned / 2});
  args->rope.sin = in.Of(DType::kF32, {positions, turned / 2});
  args->rope.layout = static_cast<RopeLayout>(in.choose().Below(3));
  args->rope.q_offset = in.Size() - 1;
  args->rope.k_offset = in.Size() - 1;
  if (in.choose().Seldom()) args->rope.q_positions = in.Of(in.choose().Of(kInts), {s.sq});
  if (in.choose().Seldom()) args->rope.k_positions = in.Of(in.choose().Of(kInts), {s.b, s.skv});
}

// What both passes of attention are given alike, but for out and lse.
template <class Args>
void GiveAttention(Caller& in, const AttentionShape& s, Args* args, AttentionLists* lists) {
  args->q = in.Of(s.dtype, {s.b, s.heads, s.sq, s.qk});
  args->k = in.Of(s.dtype, {s.b, s.kv_heads, s.skv, s.qk});
  args->v = in.Of(s.dtype, {s.b, s.kv_heads, s.skv, s.v});
  if (s.rope > 0) {
    args->q_rope = in.Of(s.dtype, {s.b, s.heads, s.sq, s.rope});
    args->k_rope = in.Of(s.dtype, {s.b, in.choose().Below(2) == 0 ? 1 : s.kv_heads, s.skv, s.rope});
  }
  GiveMasks(in, s, args, lists);
  if (in.choose().Seldom()) GiveRope(in, s, args);
  if (in.choose().Seldom()) args->scale = in.choose().Number();
  if (in.choose().Seldom()) args->bias = in.Of(DType::kF32, {1, s.heads, s.sq, s.skv});
  if (in.choose().Seldom()) args->sinks = in.Of(DType::kF32, {s.heads});
  if (in.choose().Seldom()) args->soft_cap = in.choose().Number();
  if (in.choose().Seldom()) {
    args->alibi.slopes =
        in.choose().Often() ? in.Of(DType::kF32, {s.heads}) : in.Of(DType::kF32, {s.b, s.heads});
    args->alibi.root = in.choose().Below(2) == 1;
    if (in.choose().Seldom()) args->alibi.offset = in.Size() - 4;
  }
  if (in.choose().Seldom())
    args->dropout = {.keep = in.choose().Number(), .seed = in.choose().Byte(), .offset = in.choose().Byte()};
  if (in.choose().Seldom()) {
    const Tensor room = in.Of(DType::kF32, {1});
    args->workspace = {room.data, in.choose().Often() ? kPart : in.Size() - 1};
  }
}

}  // namespace

void CallFlashAttention(Caller& in) {
  const AttentionShape s = ShapeOf(in);
  FlashAttentionArgs args;
  AttentionLists lists;
  GiveAttention(in, s, &args, &lists);
  args.out = in.Of(s.dtype, {s.b, s.heads, s.sq, s.v});
  args.lse = in.Maybe(DType::kF32, {s.b, s.heads, s.sq});
  in.Run([&](const Device& device) { return FlashAttention(device, args); });
}

void CallFlashAttentionGrad(Caller& in) {
  const AttentionShape s = ShapeOf(in);
  FlashAttentionGradArgs args;
  AttentionLists lists;
  GiveAttention(in, s, &args, &lists);
  args.out = in.Of(s.dtype, {s.b, s.heads, s.sq, s.v});
  args.dout = in.Of(s.dtype, {s.b, s.heads, s.sq, s.v});
  args.lse = in.Of(DType::kF32, {s.b, s.heads, s.sq});
  const auto like = [&](const ConstTensor& t, DType dtype, Tensor* gradient) {
    if (t.given()) *gradient = in.Of(dtype, {t.size(0), t.size(1), t.size(2), t.size(3)});
  };
  like(args.q, s.dtype, &args.dq), like(args.k, s.dtype, &args.dk), like(args.v, s.dtype, &args.dv);
  like(args.q_rope, s.dtype, &args.dq_rope), like(args.k_rope, s.dtype, &args.dk_rope);
  if (in.choose().Often()) like(args.bias, DType::kF32, &args.dbias);
  if (args.sinks.given() && in.choose().Often()) args.dsinks = in.Of(DType::kF32, {s.heads});
  in.Run([&](const Device& device) { return FlashAttentionGrad(device, args); });
}

}  // namespace cubist::fuzz
