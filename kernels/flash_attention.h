// FlashAttention (RECT-FA), forward.
#ifndef CUBIST_KERNELS_FLASH_ATTENTION_H_
#define CUBIST_KERNELS_FLASH_ATTENTION_H_

#include <cstdint>
#include <optional>
#include <span>

#include "kernels/attention_options.h"
#include "npu_model/device.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

// For every batch b and query head h, with KV head g = h / (Nq / Nkv):
//   s(i, j) = scale * (q(i) . k(j) + q_rope(i) . k_rope(j)), then soft_cap * tanh(s / soft_cap), then + bias(i, j);
//             - slope * |i + offset - j| with `alibi`; -inf where masked. With `rope` the rope parts are turned
//             to their positions first, each row once a call (keys that no query sees not at all), and rounded to the
//             input dtype.
//   lse(i)  = log(exp(sink) + sum over j of exp(s(i, j)));   out(i) = sum over j of exp(s(i, j) - lse(i)) * v(j)
//
//   q       (B, Nq, Sq, Dqk)        fp32, bf16 or fp16; all inputs share it
//   k       (B, Nkv, Skv, Dqk)      Nq is a multiple of Nkv
//   v       (B, Nkv, Skv, Dv)       Dv may differ from Dqk. May be a view of k, its first columns (absorbed MLA): then an
//                                   NPU has both from one tile, where at most 128 query rows share the keys.
//   q_rope  (B, Nq, Sq, Dr)         optional, both or neither; never concatenated: the products add up in place
//   k_rope  (B, Nkv or 1, Skv, Dr)  one head serves all where there is one
//   bias    (B, Nq, Sq, Skv)        optional, fp32 or the input dtype; any of its sizes may be 1 and serves all. With
//                                   lengths as the mask has it.
//   sinks   (Nq)                    optional, fp32: a key of that score, without a value, for each head
//   mask    (B, Nq, Sq, Skv)        optional, bool (any byte but 0 is true): true hides the key from the query, as
//                                   Ascend's attenMask has it (a boolean attn_mask of PyTorch says the opposite); any
//                                   of its sizes may be 1 and serves all. With lengths, its entry b is of sequence b,
//                                   and rows and keys count within that. Blocks of scores that it hides whole are not
//                                   computed, nor on a host hidden keys at the ends of others: what it hides is
//                                   counted before, 4 bytes of workspace for each column and block of rows that
//                                   differ (each row, of joined heads). On a model without data it hides nothing.
//   out     (B, Nq, Sq, Dv)         fp32 or the input dtype
//   lse     (B, Nq, Sq)             optional, fp32
//
// Layouts are strides: a BSND tensor is passed as (B, N, S, D) with its own strides. Any sizes >= 0 (head dims on
// an NPU as far as 16 rows of them fit its UB; the error says how far). Sums and softmax are fp32; exp(s - max) is
// rounded to the input dtype before it meets v. A row that sees no key gives out = 0 and lse = -inf. What a hidden
// key or its value holds, NaN or Inf, reaches no row; in v it costs time, as rows close to it are walked again by
// themselves. scale defaults to 1 / sqrt(Dqk + Dr). Where few query rows meet many keys, cores take parts of the keys, as
// many as shape and lengths say, and their outputs are combined in order. Where no sequence has more than 16 query rows,
// the heads of a group meet their keys together, as rows of one matrix; in a call with longer ones, each head reads them
// for itself. Dropout divides the weights that it keeps; lse is of all. Outputs may overlap neither each other nor an
// input.
// After FlashAttention-2 (Dao, 2023); operator contract: aclnnFlashAttentionScore.
struct FlashAttentionArgs {
  ConstTensor q, k, v;
  ConstTensor q_rope = {}, k_rope = {};
  Tensor out;
  Tensor lse = {};
  std::optional<float> scale = {};
  Causal causal = Causal::kNone;
  std::optional<AttentionWindow> window = {};  // A key is seen where both let it be,
  std::span<const std::int64_t> prefix =
      {};  // and keys j < prefix[b] always, whatever window and causal order say; B entries.
  AttentionLengths lengths = {};  // Masks and positions count within a sequence.
  AttentionRope rope = {};
  ConstTensor bias = {}, sinks = {}, mask = {};
  AttentionAlibi alibi = {};
  AttentionDropout dropout = {};
  // 2^-63 to 2^126. In bf16 and fp16 with caps from 1 to 64 scores keep the last places of the cap, in all else their own.
  std::optional<float> soft_cap = {};
  CallerWorkspace workspace = {};  // Of at least FlashAttentionWorkspace's bytes, or none.
};

// Errors name the argument, its value and the limit; nothing is written then. On Npu devices `profile` is filled.
CUBIST_EXPORT Status FlashAttention(const Device& device, const FlashAttentionArgs& args,
                                    Profile* profile = nullptr);

// The bytes of GM that the call works in besides its tensors: packed and turned keys, outputs of parts of the keys.
// Threads of a host keep the tiles of one core besides, whatever the shape.
CUBIST_EXPORT Status FlashAttentionWorkspace(const Device& device, const FlashAttentionArgs& args,
                                             std::int64_t* bytes);

}  // namespace cubist

#endif  // CUBIST_KERNELS_FLASH_ATTENTION_H_
