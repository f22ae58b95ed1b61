// What forward and backward of attention have in common: masks, lengths of sequences, rotary positions.
#ifndef CUBIST_KERNELS_ATTENTION_OPTIONS_H_
#define CUBIST_KERNELS_ATTENTION_OPTIONS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>

#include "npu_model/types.h"

namespace cubist {

// Which keys j a query row i may see: all; j <= i; or j <= i + (Skv - Sq), where the last query sees the last key.
enum class Causal { kNone, kTopLeft, kBottomRight };

// Keys around the row's own, diagonal(i) = i (kTopLeft) or i + Skv - Sq (kBottomRight), both ends included:
//   diagonal(i) - left <= j <= diagonal(i) + right.     A side that is not given is unbounded; negative is allowed.
// Ascend's sparse modes 0 (pre and next tokens, top-left) and 4 (band, bottom-right); FlashAttention's window_size.
struct AttentionWindow {
  std::optional<std::int64_t> left = {}, right = {};
  Causal anchor = Causal::kBottomRight;  // kNone counts as kTopLeft.
};

// Several sequences, one behind the other along S of one batch entry (B = 1): sequence i ends before row q_ends[i] and
// key kv_ends[i] and begins where i - 1 ends. Ends ascend; equal ones are an empty sequence; rows and keys behind the
// last end belong to none and are not touched. No ends are no packing: a packed batch without sequences has one that is
// empty, {0}. The arrays are read by the call itself, on the host, as tilings are made from them. Ascend's TND with
// actual_seq_qlen and actual_seq_kvlen.
struct AttentionLengths {
  std::span<const std::int64_t> q_ends = {}, kv_ends = {};
  bool given() const { return !q_ends.empty() || !kv_ends.empty(); }
};

// Which columns of a row form the pairs (x1, x2) that a rotation turns, of R columns: halves (i, i + R / 2), or
// neighbours (2 i, 2 i + 1). Both operands of a score are turned alike, so it does not matter where the turned pairs
// stand: Ascend's interleave and interleave-half layouts give the same attention.
enum class RopeLayout { kHalf, kInterleaved, kInterleavedToHalf };

// Rotary positions: pair i of a row at position p becomes (x1 c - x2 s, x2 c + x1 s), c = cos(p, i), s = sin(p, i).
//   cos, sin  (P, R / 2)  fp32 or the input dtype; any strides, so a table with each angle twice is a view
// The pairs are the columns of q_rope and k_rope (R = Dr), or, without those, the first R columns of q and k.
// Row i of a sequence's queries stands at position q_offset + i, key j at k_offset + j; or where the positions say:
//   q_positions, k_positions  (Sq) and (Skv), or (B, Sq) and (B, Skv); int32 or int64, from 0 to P - 1. Rows and keys of
//                             packed sequences count through all of them. They are read by the call itself as well.
struct AttentionRope {
  ConstTensor cos = {}, sin = {};
  RopeLayout layout = RopeLayout::kHalf;
  std::int64_t q_offset = 0, k_offset = 0;
  ConstTensor q_positions = {}, k_positions = {};
  bool given() const { return cos.given() || sin.given(); }
};

// Linear biases by distance (ALiBi): the score of query i and key j loses slope * |i + offset - j|, or slope times the
// square root of that. Ascend's pse types 2 and 3; FlashAttention's alibi_slopes.
//   slopes  (Nq), or (B, Nq), where B counts sequences if there are lengths; fp32
struct AttentionAlibi {
  ConstTensor slopes = {};
  // -2^60 to 2^60; by default Skv - Sq of its sequence: the last query stands at the last key.
  std::optional<std::int64_t> offset = {};
  bool root = false;
  bool given() const { return slopes.given(); }
};

// Dropout of weights behind the softmax: each is kept with a probability of `keep`, which counts in steps of 2^-16, and
// divided by it. Whether one is kept depends on the seed, the offset and its place alone: of weight (b, n, i, j) the
// 16 bits j % 8 (lower ones first) of block ((b * Nq + n) * Sq + i) * ceil(Skv / 8) + j / 8 of Philox4x32-10 with the
// seed as key, the block as the lower and the offset as the upper half of the counter, are below keep * 2^16. Rows of
// packed sequences count through all of them, keys within their own.
struct AttentionDropout {
  float keep = 1;
  std::uint64_t seed = 0, offset = 0;
  bool given() const { return keep != 1; }
  // Of 65536.
  std::uint32_t kept() const {
    return static_cast<std::uint32_t>(std::clamp(std::lround(static_cast<double>(keep) * 65536), 1L, 65536L));
  }
  // What a kept weight is multiplied by.
  float factor() const { return 65536.0f / static_cast<float>(kept()); }
};

}  // namespace cubist

#endif  // CUBIST_KERNELS_ATTENTION_OPTIONS_H_
