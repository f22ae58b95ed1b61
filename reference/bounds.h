// How far a right answer may be from the reference: bounds derived from the roundings that a kernel's
// contract allows.
//
// Notation (Higham, Accuracy and Stability of Numerical Algorithms, chapter 3): one operation rounds by a
// factor (1 + d), |d| <= u; n of them in a row by a factor (1 + t), |t| <= gamma(n) = n u / (1 - n u). A sum
// of k products, added in any order with or without fused multiply-add, puts at most k roundings on each
// product, hence
//   |computed - exact| <= gamma(k) * sum of |a| |b|.
// The reference's own error (the same with u = 2^-53) is covered by one more operation than a kernel needs.
#ifndef CUBIST_REFERENCE_BOUNDS_H_
#define CUBIST_REFERENCE_BOUNDS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "npu_model/types.h"

namespace cubist::reference {

inline constexpr double kSmallestNormal = 0x1p-126;  // of fp32 and bf16

// Largest relative error of the Vector instructions Exp and Ln: two units in the last place of fp32, which
// their own tests hold them to.
inline constexpr double kExpError = 0x1p-22;
inline constexpr double kLnError = 0x1p-22;

// gamma(n); infinite where n u >= 1, as nothing can be said then.
inline double Gamma(std::int64_t n, double u) {
  const double nu = static_cast<double>(n) * u;
  return nu < 1 ? nu / (1 - nu) : std::numeric_limits<double>::infinity();
}

// u of one addition inside the Cube. Native bf16 dot products add a pair of products at a time, and may round
// the pair's sum before they add it (to odd on some machines, which errs by up to 2^-23).
inline double CubeRoundoff(DType input) { return input == DType::kBF16 ? 0x1p-23 : 0x1p-24; }

// Absolute error of one operation near zero. Native bf16 dot products flush denormal operands and sums to
// zero: a flushed operand errs by up to 2^-126 times the other one. Everything else underflows gradually, by
// 2^-150.
inline double CubeUnderflow(DType input, double largest_operand) {
  return input == DType::kBF16 ? kSmallestNormal * (1 + largest_operand) : 0x1p-150;
}

// Rounding of an fp32 value, itself known to +-error, to the output dtype: relative, or half a subnormal's
// spacing.
inline double OutputRounding(DType output, double value, double error) {
  if (output == DType::kF32) return 0;
  return UnitRoundoff(output) * (std::abs(value) + error) + (output == DType::kF16 ? 0x1p-25 : 0x1p-134);
}

// c = bias + sum of k products: k + 1 roundings with the bias, one on output.
//   magnitude        |bias| + sum of |a| |b|
//   largest_operand  largest |a| or |b|; matters only where bf16 operands hold denormals beside numbers above
//   1
inline double MatmulBound(std::int64_t k, DType input, DType output, double c, double magnitude,
                          double largest_operand = 1) {
  const double error = Gamma(k + 1, CubeRoundoff(input)) * magnitude +
                       static_cast<double>(k) * CubeUnderflow(input, largest_operand);
  return error + OutputRounding(output, c, error);
}

// out = sum of k weighted rows on the Vector core, in fp32: k + 1 roundings, one on output.
inline double WeightedSumBound(std::int64_t k, DType output, double out, double magnitude) {
  const double error = Gamma(k + 1, 0x1p-24) * magnitude + static_cast<double>(k) * 0x1p-149;
  return error + OutputRounding(output, out, error);
}

// What the soft cap adds to the error of a score of at most `most`; see ArgumentError. Narrow inputs under caps up to 64 may
// lose the last places of the cap, 2^-14 at most: a quarter of what rounds their weights.
inline double SoftCapError(DType input, double cap, double most) {
  const bool coarse = input != DType::kF32 && cap <= 64;
  return 9 * 0x1p-24 * (coarse ? cap : std::min(cap, 3 * most));
}

// One row of attention, as the bounds see it.
struct AttentionRowBound {
  std::int64_t score_terms = 0;  // Dqk + Dr
  std::int64_t keys = 0;         // keys that the row sees
  DType input = DType::kF32;
  double max_product = 0;       // max over those keys of |scale| * (|q| . |k| + |q_rope| . |k_rope|)
  double max_score = 0;         // S: max over those keys of the same and what is added to it (ALiBi, bias)
  bool turned = false;          // q and k are turned to their positions and rounded to the input dtype
  double soft_cap = 0;          // 0: none
  bool dropout = false;         // The output is multiplied by its factor.
  std::int64_t key_block = 16;  // fewest keys that one step of the online softmax takes, but for the last

  // Steps of the online softmax, T.
  std::int64_t steps() const { return CeilDiv(keys, key_block); }

  // Error of the argument of exp, absolute. In units of u S: score_terms for the dot product; 3 for scale
  // (its own rounding, log2(e) folded in, the product); 2 for s - m, which is at most 2 S; 2 for the
  // differences of successive maxima, which add up to at most 2 S; 1 for the reference.
  //
  // A turned element takes three roundings in fp32 (angles are exact) and one to the input dtype, in q and in k. The
  // soft cap is cap - 2 cap / (e + 1), e = exp(x), x = 2 s / cap: its slope in s is at most 1, so the error of s stays.
  // Three roundings of x move it by at most 2 cap * 3 u * max of x e / (e + 1)^2 < 2 u cap, exp's error by cap * 2^-23,
  // the sum, quotient and difference by 5 u cap: 9 * 2^-24 cap in all. Where |s| < 0.35 cap it is s + s z p(z), and
  // |z p(z)| < 0.04: the polynomial is off by u, its roundings by less, the last sum by u. Either is within
  // SoftCapError.
  double ArgumentError() const {
    double error = Gamma(score_terms + 8, CubeRoundoff(input)) * max_score;
    if (turned) {
      const double one = Gamma(3, 0x1p-24) + (input == DType::kF32 ? 0 : UnitRoundoff(input) * (1 + 0x1p-20));
      error += (2 * one + one * one) * max_product;
    }
    return error + SoftCapError(input, soft_cap, max_product);
  }

  // Logarithm of the factor by which a weight exp(s - m) may be off, in l as in the numerator: the argument's
  // error, one exp for the weight and one for each step's exp(m_old - m_new).
  double LogWeightError() const {
    return ArgumentError() + static_cast<double>(steps() + 1) * std::log1p(kExpError);
  }

  // Rounding of a sum over the keys: one operation per key, two per step (rescale, add), one for the
  // reference.
  double SumError() const { return Gamma(keys + 2 * steps() + 1, CubeRoundoff(input)); }

  // Bound on out(d) = sum of p_j v_j(d), sum of p_j = 1.
  //   abs_out  sum of p_j |v_j(d)|;   abs_v  sum of |v_j(d)| over the keys
  //
  // Computed are N = sum p_j (1 + a_j)(1 + r_j) v_j and L = sum p_j (1 + a_j)(1 + t_j): a_j is the weight's
  // error, common to both (|a| <= E); r_j has the rounding of p to the input dtype, which only the numerator
  // sees, and the summation's; t_j the summation's alone (G). As sum p_j (v_j - out) = 0,
  //   N / L - out = sum p_j (a_j (v_j - out) + (1 + a_j)(r_j v_j - t_j out)) / L,
  //   |N / L - out| <= (E (A + |out|) + (1 + E)(R A + G |out|)) / ((1 - E)(1 - G)),   A = abs_out.
  // Small p err absolutely: by half a subnormal's spacing in fp16, by 2^-126 where exp or a dot product
  // flushes. They are relative to the running maximum, so that the row's largest p is 1 and l >= 1. The
  // division by l is two roundings.
  double Out(DType output, double out, double abs_out, double abs_v) const {
    if (keys == 0) return 0;
    const double e = std::expm1(LogWeightError()), g = SumError();
    if (!(e < 1 && g < 1)) return std::numeric_limits<double>::infinity();
    const double p_roundoff = input == DType::kF32 ? 0 : UnitRoundoff(input);
    const double r = (1 + p_roundoff) * (1 + g) - 1;
    const double small_p = input == DType::kF16 ? 0x1p-25 : kSmallestNormal;
    const double small = small_p * abs_v + static_cast<double>(keys) * kSmallestNormal * (2 + std::abs(out));
    const double numerator =
        e * (abs_out + std::abs(out)) + (1 + e) * (r * abs_out + g * std::abs(out) + small);
    const double ratio = numerator / ((1 - e) * (1 - g));
    const double error = ratio + Gamma(dropout ? 3 : 2, 0x1p-24) * (std::abs(out) + ratio);
    return error + OutputRounding(output, out, error);
  }

  // Bound on lse = m + ln(l), fp32. log-sum-exp moves by no more than its largest argument does; a relative
  // error of l adds its logarithm; ln errs relatively, with |ln l| <= ln(keys); three roundings of terms no
  // larger than S + |lse|.
  double Lse(double lse) const {
    if (keys == 0 || std::isinf(lse)) return 0;
    const double g = SumError();
    if (!(g < 1)) return std::numeric_limits<double>::infinity();
    return LogWeightError() - std::log1p(-g) + kLnError * std::log(static_cast<double>(keys)) +
           Gamma(3, 0x1p-24) * (max_score + std::abs(lse)) + static_cast<double>(keys) * kSmallestNormal;
  }
};

}  // namespace cubist::reference

#endif  // CUBIST_REFERENCE_BOUNDS_H_
