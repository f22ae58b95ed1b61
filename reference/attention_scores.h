// Rows in double, and the scores of their pairs: what attention and its gradients are both made of.
#ifndef CUBIST_REFERENCE_ATTENTION_SCORES_H_
#define CUBIST_REFERENCE_ATTENTION_SCORES_H_

#include <cstdint>
#include <vector>

#include "npu_model/types.h"
#include "reference/attention.h"

namespace cubist::reference {

// A row, turned or not. An element is a sum, of one term or of two; its magnitude is the sum of their magnitudes.
struct DoubleRow {
  std::vector<double> values, magnitudes;
};

// The rows of x (B, N, S, D), each read when it is asked for. Of one head they are kept, or the last kMostKept of them:
// every query asks for the same keys.
class DoubleRows {
 public:
  explicit DoubleRows(const ConstTensor& x) : x_(x) {}
  // Row s turned by the first 2 * cos.size(1) columns to offset + s, or to where `positions` says.
  DoubleRows(const ConstTensor& x, const AttentionArgs& args, const ConstTensor& positions,
             std::int64_t offset)
      : x_(x),
        positions_(positions),
        cos_(args.cos),
        sin_(args.sin),
        offset_(offset),
        interleaved_(args.interleaved) {}

  // Valid until the next is asked for.
  const DoubleRow& At(std::int64_t b, std::int64_t n, std::int64_t s);

 private:
  static constexpr std::int64_t kMostKept = 8192;
  struct Kept {
    std::int64_t s = -1;
    DoubleRow row;
  };

  void Read(std::int64_t s, DoubleRow& row) const;
  void Turn(std::int64_t position, DoubleRow& row) const;

  ConstTensor x_, positions_ = {}, cos_ = {}, sin_ = {};
  std::int64_t offset_ = 0;
  bool interleaved_ = false;
  std::int64_t b_ = -1, n_ = -1;  // The head that is kept.
  std::vector<Kept> kept_;        // Row s at s % its size.
};

// All rows of a call.
struct AttentionRows {
  explicit AttentionRows(const AttentionArgs& args);

  DoubleRows q, k, v, q_rope, k_rope;
};

// Where (b, n, i, j) stands in a tensor whose sizes of 1 serve all.
std::int64_t OffsetOf(const ConstTensor& x, const AttentionRow& row, std::int64_t key);

// The head of k and v that a row's head sees, and of k_rope.
std::int64_t KvHead(const AttentionArgs& args, const AttentionRow& row);
std::int64_t KRopeHead(const AttentionArgs& args, const AttentionRow& row);

// The score of a pair: scaled, then capped, then biased.
struct AttentionScore {
  double scaled = 0, value = 0;
  double product = 0;    // Sum of the magnitudes of the scaled product's terms.
  double magnitude = 0;  // The same and those of what is added: ALiBi, bias.
  double slope = 1;      // Of the cap: the derivative of value by scaled.
};
AttentionScore ScoreOf(const AttentionArgs& args, AttentionRows& rows, const AttentionRow& row,
                       std::int64_t key);

// Terms of a score's product, and what it is multiplied by.
std::int64_t ScoreTerms(const AttentionArgs& args);
double ScoreScale(const AttentionArgs& args);

}  // namespace cubist::reference

#endif  // CUBIST_REFERENCE_ATTENTION_SCORES_H_
