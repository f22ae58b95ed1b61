// Numbers in double with the variances of what a block in bf16 makes of them, and what a block's cases have in common.
#ifndef CUBIST_TOOLS_NOISY_H_
#define CUBIST_TOOLS_NOISY_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/block.h"
#include "npu_model/profile.h"
#include "npu_model/status.h"
#include "npu_model/types.h"
#include "tools/case_checks.h"
#include "tools/comparison.h"

namespace cubist {

inline constexpr double kUnit = 0x1p-9;  // Of the type's roundings.
// How many standard deviations a result may be off.
inline constexpr double kDeviations = 8;

inline std::size_t Index(std::int64_t i) { return static_cast<std::size_t>(i); }

// Numbers in double and the variances of what a block in bf16 makes of them: every rounding of an intermediate result errs
// by up to the unit, in a way that has nothing to do with the others.
struct Noisy {
  explicit Noisy(std::int64_t n) : value(Index(n)), variance(Index(n)) {}
  std::int64_t size() const { return static_cast<std::int64_t>(value.size()); }

  void Round() {
    for (std::size_t i = 0; i < value.size(); ++i) variance[i] += std::pow(kUnit * value[i], 2);
  }
  void Add(const Noisy& x, double factor = 1) {
    for (std::size_t i = 0; i < value.size(); ++i) {
      value[i] += factor * x.value[i], variance[i] += factor * factor * x.variance[i];
    }
  }
  Noisy Part(Range part) const {
    Noisy x(part.size());
    std::copy_n(value.begin() + part.begin, part.size(), x.value.begin());
    std::copy_n(variance.begin() + part.begin, part.size(), x.variance.begin());
    return x;
  }

  std::vector<double> value, variance;
};

Noisy RowOf(const ConstTensor& x, std::int64_t row);

// RmsNorm, rounded. With m = sum of x^2 + N eps the derivative of y(i) by x(j) is gamma(i) rstd (1 if i = j - x(i) x(j) / m).
Noisy Normed(const Noisy& x, const ConstTensor& gamma, double eps);

// x * weights (K, N), not yet rounded.
Noisy Times(const Noisy& x, const ConstTensor& weights);
Noisy RoundedTimes(const Noisy& x, const ConstTensor& weights);

// down(silu(gate) * up), of gate and up side by side.
Noisy Expert(const Noisy& x, const ConstTensor& gate_up, const ConstTensor& down);

// All of a row of `out` against what is expected of it.
void Compare(const Noisy& expected, const ConstTensor& out, std::int64_t row, Comparison* all);

// compare(i) for i < count, a row each.
template <class Body>
Comparison CompareRows(std::int64_t count, std::int64_t all_rows, const Body& compare) {
  Comparison all = CompareParts(count, compare);
  all.rows = count, all.all_rows = all_rows;
  return all;
}

// A weight that keeps the size of what it multiplies.
TensorSpec Weight(const char* name, Shape shape, std::int64_t fan_in);
TensorSpec Normal(const char* name, Shape shape);

// The block's kernels one behind the other.
template <class Block, class Args>
Status RunBlock(Block block, const Device& device, const Args& args, BlockState* state, Profile* profile) {
  BlockProfile parts;
  CUBIST_RETURN_IF_ERROR(block(device, args, state, &parts));
  for (const auto& [name, part] : parts.kernels) {
    if (profile != nullptr) profile->Append(part);
  }
  return {};
}

}  // namespace cubist

#endif  // CUBIST_TOOLS_NOISY_H_
