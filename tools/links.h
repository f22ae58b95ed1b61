// Links: the steps of a block's backward pass, each against its definition in double.
#ifndef CUBIST_TOOLS_LINKS_H_
#define CUBIST_TOOLS_LINKS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/rms_norm.h"
#include "kernels/swiglu.h"
#include "npu_model/types.h"
#include "reference/activations.h"
#include "tools/comparison.h"

namespace cubist {

// A step's result is what the next one starts from, and is met as the block left it: nothing but a step's own sums and its
// last rounding is excused, and a gradient that every step on the way to it agrees with is the right one.
class Links {
 public:
  // About `products` multiply-adds for each link; where all of one takes more, its rows and columns are drawn with `key`.
  Links(double products, std::uint64_t key) : products_(products), key_(key) {}

  // out (M, N) = a (M, K) * b (K, N), views of any strides; for a `share` of the multiply-adds.
  void Product(const std::string& name, const ConstTensor& out, const ConstTensor& a, const ConstTensor& b,
               double share = 1);
  // Of y = x * weights: dx = dy * weights^T, dw = x^T * dy.
  struct Gradients {
    ConstTensor x, weights, dy, dx, dw;
  };
  void Projection(const std::string& name, const Gradients& g, double share = 1);
  // Rows of `out` (M, N) against row(i), `cost` multiply-adds each.
  using Row = std::function<reference::Bounded(std::int64_t)>;
  void Rows(const std::string& name, const ConstTensor& out, double cost, const Row& row);
  void Norm(const std::string& name, const RmsNormGradArgs& args);
  void Activation(const std::string& name, const SwiGluGradArgs& args);
  // out (M, N) = the sum of `terms`, in fp32, rounded once.
  void Sum(const std::string& name, const ConstTensor& out, const std::vector<ConstTensor>& terms);
  // What was compared elsewhere, a `share` of all that the link has.
  void Merge(const std::string& name, Comparison part, double share);

  // All links; of so many rows as many as the link that met the smallest share of its own would have.
  Comparison Result(std::int64_t all_rows) const;

 private:
  std::uint64_t KeyOf(const std::string& name) const;

  double products_;
  std::uint64_t key_;
  double least_share_ = 1;
  Comparison all_;
};

}  // namespace cubist

#endif  // CUBIST_TOOLS_LINKS_H_
