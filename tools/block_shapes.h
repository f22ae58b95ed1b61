// What the forward and the backward case of a block have in common: sizes, inputs, arguments.
#ifndef CUBIST_TOOLS_BLOCK_SHAPES_H_
#define CUBIST_TOOLS_BLOCK_SHAPES_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/mla_block.h"
#include "kernels/moe_block.h"
#include "tools/cases.h"

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
  std::string shape() const;

  Workload workload;
  std::int64_t tokens, hidden, experts, top_k, width, shared, groups = 1, top_groups = 1;
};

// The inputs of a block, and its arguments with such inputs in this order.
std::vector<TensorSpec> InputsOf(const MlaSizes& s);
std::vector<TensorSpec> InputsOf(const MoeSizes& s);
MlaBlockArgs ArgsOf(const MlaSizes& s, std::span<const ConstTensor> in, Tensor out);
MoeBlockArgs ArgsOf(const MoeSizes& s, std::span<const ConstTensor> in, Tensor out);

}  // namespace cubist

#endif  // CUBIST_TOOLS_BLOCK_SHAPES_H_
