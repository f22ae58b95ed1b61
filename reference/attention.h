// Attention, naively: what the kernel's answer is measured against.
#ifndef CUBIST_REFERENCE_ATTENTION_H_
#define CUBIST_REFERENCE_ATTENTION_H_

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "npu_model/types.h"

namespace cubist::reference {

// Which keys query i sees: all; j <= i; or j <= i + (Skv - Sq).
enum class Mask { kNone, kTopLeft, kBottomRight };

//   q (B, Nq, Sq, Dqk), k (B, Nkv, Skv, Dqk), v (B, Nkv, Skv, Dv)
//   q_rope (B, Nq, Sq, Dr), k_rope (B, Nkv or 1, Skv, Dr), or neither given
struct AttentionArgs {
  ConstTensor q, k, v;
  ConstTensor q_rope = {}, k_rope = {};
  std::optional<double> scale = {};  // 1 / sqrt(Dqk + Dr) by default
  Mask mask = Mask::kNone;
  // Besides, diagonal - left <= j <= diagonal + right, where the diagonal is i, or i + (Skv - Sq).
  std::optional<std::int64_t> left = {}, right = {};
  Mask window_anchor = Mask::kBottomRight;
  // Keys j < prefix[batch] are seen whatever mask and window say; none where empty.
  std::vector<std::int64_t> prefix = {};

  // Scores become soft_cap * tanh(s / soft_cap) where it is above 0; then bias (B, Nq, Sq, Skv) is added, sizes of 1
  // serving all. sinks (Nq): a key of that score, without a value.
  double soft_cap = 0;
  ConstTensor bias = {}, sinks = {};

  // Keys are hidden where `hidden` (B, Nq, Sq, Skv), bool, is true; sizes of 1 serve all. slopes, (Nq) or (B, Nq): scores
  // lose slope * |i + offset - j|, or slope times its root, before the bias; the offset is Skv - Sq by default.
  ConstTensor hidden = {}, slopes = {};
  std::optional<std::int64_t> alibi_offset = {};
  bool alibi_root = false;

  // Weights are kept with probability `keep` (of 65536) and divided by it. The numbers are those of a call of
  // dropout_sq rows and dropout_skv keys (Sq and Skv by default), whose row dropout_row is the first one here.
  std::int64_t kept = 65536;
  std::uint64_t seed = 0, dropout_offset = 0;
  std::optional<std::int64_t> dropout_sq = {}, dropout_skv = {};
  std::int64_t dropout_row = 0;

  // Turns pair i of a row at position p to (x1 c - x2 s, x2 c + x1 s), c = cos(p, i), s = sin(p, i): halves of
  // q_rope and k_rope, or of the first 2 * cos.size(1) columns of q and k; or neighbours. Row i stands at offset + i,
  // or where q_positions and k_positions, (B, S) or (S), say.
  ConstTensor cos = {}, sin = {};
  bool interleaved = false;
  std::int64_t q_offset = 0, k_offset = 0;
  ConstTensor q_positions = {}, k_positions = {};
};

// One row of the answer.
struct AttentionRow {
  std::int64_t batch = 0, head = 0, query = 0;
};

// Whether a query row may see a key.
bool Sees(const AttentionArgs& args, const AttentionRow& row, std::int64_t key);

// What dropout multiplies a weight by.
double DropoutFactor(const AttentionArgs& args, const AttentionRow& row, std::int64_t key);

// Where a row stands.
std::int64_t PositionOf(const ConstTensor& positions, std::int64_t offset, std::int64_t b, std::int64_t s);

// One entry, or one entry per output column, for each row asked for.
struct AttentionResult {
  std::vector<double> out;  // (rows, Dv)
  std::vector<double> lse;  // (rows)

  // What error bounds are made of; p_j is the weight of key j, and sums run over the keys that the row sees.
  std::vector<double> abs_out;  // (rows, Dv): sum of p_j |v_j|, v_j with its factor of dropout here and below
  std::vector<double> abs_v;    // (rows, Dv): sum of |v_j|
  std::vector<double> max_product;  // (rows): max of |scale| * (|q| . |k_j| + |q_rope| . |k_rope_j|)
  std::vector<double> max_score;   // (rows): max of that and the magnitudes of ALiBi and bias, or of the sink
  std::vector<std::int64_t> keys;  // (rows): how many keys the row sees
};

// With g = head / (Nq / Nkv), for the keys j that the row sees:
//   s(j) = scale * (q . k(g, j) + q_rope . k_rope(g, j));   lse = log(sum of exp(s(j)));   out = sum of
//   exp(s(j) - lse) * v(g, j), times its factor of dropout
// Two passes over the scores (maximum, then weights), in double. Masked keys and values are not read. A row
// that sees no key, or only scores of -inf, gives out = 0 and lse = -inf; NaN propagates, and a score of +inf
// gives NaN. With Dqk + Dr = 0 every score is 0.
AttentionResult Attention(const AttentionArgs& args, std::span<const AttentionRow> rows);

// All rows, in the order of a row-major (B, Nq, Sq).
std::vector<AttentionRow> AllRows(const AttentionArgs& args);

// How far each element of a kernel's out and lse may be from the reference's; see AttentionRowBound in
// bounds.h.
std::vector<double> OutBounds(const AttentionArgs& args, const AttentionResult& result, DType output);
std::vector<double> LseBounds(const AttentionArgs& args, const AttentionResult& result);

}  // namespace cubist::reference

#endif  // CUBIST_REFERENCE_ATTENTION_H_
