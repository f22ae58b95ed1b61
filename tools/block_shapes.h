// What the forward and the backward case of a block have in common: sizes, inputs, arguments.
#ifndef CUBIST_TOOLS_BLOCK_SHAPES_H_
#define CUBIST_TOOLS_BLOCK_SHAPES_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/mla_block.h"
#include "kernels/moe_block.h"
#include "tools/case_checks.h"
#include "tools/cases.h"
#include "tools/noisy.h"

namespace cubist {

struct MlaSizes {
  explicit MlaSizes(const ScaledWorkload& s);

  std::int64_t rows() const { return batch * sequence; }
  double KeyProducts() const;
  double QueryProducts() const;
  double ProductsOfProjections() const;
  // Of all queries with the keys they see, for each column of a head.
  double ProductsOfScores() const;
  std::string shape() const;

  Workload workload;
  std::int64_t batch, sequence, heads, hidden, q_rank, kv_rank, nope, rope, v;
};

// What the sum of a group's scores that ranks it is made of.
inline constexpr std::int64_t kGroupTop = 2;

struct MoeSizes {
  explicit MoeSizes(const ScaledWorkload& s);

  double ProductsOfRouter() const { return static_cast<double>(hidden * experts); }
  double ProductsOfToken() const {
    return ProductsOfRouter() + 3.0 * static_cast<double>(hidden * (top_k * width + shared));
  }
  std::int64_t rows() const { return tokens; }
  std::string shape() const;

  Workload workload;
  std::int64_t tokens, hidden, experts, top_k, width, shared, groups = 1, top_groups = 1;
};

// The inputs of a block, and its arguments with such inputs in this order.
std::vector<TensorSpec> InputsOf(const MlaSizes& s);
std::vector<TensorSpec> InputsOf(const MoeSizes& s);
MlaBlockArgs ArgsOf(const MlaSizes& s, std::span<const ConstTensor> in, Tensor out);
MoeBlockArgs ArgsOf(const MoeSizes& s, std::span<const ConstTensor> in, Tensor out);

// A block's backward pass, which the forward one runs before: with grad_args(s, in, out, out of the forward pass) and
// check(s, those, products, key, state).
template <class Sizes, class Forward, class Backward, class GradArgs, class Check>
Case BackwardCase(Case c, const Sizes& s, Forward forward, Backward backward, GradArgs grad_args,
                  Check check) {
  const auto state = std::make_shared<BlockState>();
  const auto forward_out = [s, state] {
    return state->Take("forward's out", DType::kBF16, {s.rows(), s.hidden});
  };
  c.prepare = [=](const Device& device, std::span<const ConstTensor> in) {
    return forward(device, ArgsOf(s, in, forward_out()), state.get(), nullptr);
  };
  c.run = [=](const Device& device, std::span<const ConstTensor> in, std::span<const Tensor> out,
              Profile* profile) {
    return RunBlock(backward, device, grad_args(s, in, out, forward_out()), state.get(), profile);
  };
  c.check = [=](std::span<const ConstTensor> in, std::span<const Tensor> out, double products,
                std::uint64_t key) {
    return check(s, grad_args(s, in, out, forward_out()), products, key, state.get());
  };
  return WithTraffic(std::move(c));
}

}  // namespace cubist

#endif  // CUBIST_TOOLS_BLOCK_SHAPES_H_
