// Attention: tensors are (B, S, N, D), or (B, N, S, D).
#include <fmt/format.h>

#include <cstdint>
#include <string>

#include "kernels/flash_attention.h"
#include "tools/validation/rows.h"

namespace cubist {
namespace {

// pto-isa's kernels: a core takes a block of so many queries through all keys, loads, scores and weights have double
// buffers, and the scores of the next blocks of keys come first. 128 keys at a time: theirs, 256 in two halves, would leave
// no room in L0C here. Compiled for their shapes, they start at once.
void AttentionOfBlocks(RowRecorder& r, const FlashAttentionArgs& args, std::int64_t block) {
  r.out.group = kKnownBlocks;
  r.out.other_schedule = kOtherAttention;
  r.AddTuned(
      [args](const Device& device, Profile* profile) { return FlashAttention(device, args, profile); },
      fmt::format(
          "m={0},strip={0},n=128,k0=64,depth=2,kv_splits=1,v_parts=1,key_step=16,kv_stages=2,l0_stages=2,"
          "l0c_stages=1,s_stages=2,ub_stages=1,q_stages=1,pack_kv=0,by_head=0,mask_step=0",
          block));
}

}  // namespace

void AttentionRow(RowRecorder& r) {
  r.out.group = "attention";
  const bool mla = r.row.op == "mla";
  for (std::size_t i = 0; i < (mla ? 5u : 3u); ++i) {
    if (!r.HasRank(i, 4)) return;
  }
  const bool heads_first = r.row.attrs.value("inputLayout", std::string("BSND")) == "BNSD";
  const std::size_t s_at = heads_first ? 2 : 1, n_at = heads_first ? 1 : 2;
  const DType in = DTypeOfName(r.dtype(0));
  const auto view = [&](const Shape& x) {
    const std::int64_t b = x[0], s = x[s_at], n = x[n_at], d = x[3];
    return heads_first ? ConstTensor(nullptr, in, {b, n, s, d})
                       : ConstTensor(nullptr, in, {b, n, s, d}, {s * n * d, d, n * d, 1});
  };
  FlashAttentionArgs args;
  args.q = view(r.shape(0));
  args.k = view(r.shape(mla ? 2 : 1));
  args.v = view(r.shape(mla ? 4 : 2));
  if (r.TooLong(
          {args.q.size(0), args.q.size(1), args.q.size(2), args.k.size(2), args.q.size(3) + args.v.size(3)}))
    return;
  if (mla) args.q_rope = view(r.shape(1)), args.k_rope = view(r.shape(3));
  const std::int64_t group = args.k.size(1) > 0 ? args.q.size(1) / args.k.size(1) : 0;
  // Heads that share keys are rows of one matrix, as fused kernels have it for few queries. A causal mask is
  // left out: the vendor's kernel, given one without a sparse mode, computes what it hides (rows mha 7 and 9).
  if (group > 1 && args.q.size(2) <= 16) {
    for (ConstTensor* q : {&args.q, &args.q_rope}) {
      if (!q->given()) continue;
      *q = ConstTensor(nullptr, in, {q->size(0), args.k.size(1), group * q->size(2), q->size(3)});
    }
  }
  args.out = Tensor(nullptr, in, {args.q.size(0), args.q.size(1), args.q.size(2), args.v.size(3)});
  if (const std::int64_t block = r.row.attrs.value("block_q", std::int64_t{0}); block > 0)
    return AttentionOfBlocks(r, args, block);
  r.Add([&](const Device& device) { return FlashAttention(device, args); });
  r.StartsSlowly(kAttentionTiling);
  r.out.schedule = Schedule::kUnknown;
}

}  // namespace cubist
