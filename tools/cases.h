// Cases: the kernel calls that a workload comes down to on one device. A case knows its tensors, its work,
// how to run itself on a device and how to check itself against the reference.
#ifndef CUBIST_TOOLS_CASES_H_
#define CUBIST_TOOLS_CASES_H_

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "npu_model/device.h"
#include "npu_model/profile.h"
#include "npu_model/status.h"
#include "npu_model/types.h"
#include "tools/comparison.h"
#include "tools/generate.h"
#include "tools/owned_tensor.h"
#include "tools/workload.h"

namespace cubist {

// A workload as one device of its training split sees it, with tokens and heads divided by the scales.
struct ScaledWorkload {
  Workload workload;
  std::int64_t token_scale = 1, head_scale = 1;
  std::int64_t batch = 1, sequence = 1, heads = 1;

  std::int64_t tokens() const { return batch * sequence; }
  // Experts on the device, and the rows that reach it: tensor-parallel devices share their tokens, so tokens
  // * top_k / tensor_parallel on average.
  std::int64_t local_experts() const { return workload.moe.experts / workload.training.expert_shards; }
  std::int64_t expert_rows() const {
    return CeilDiv(tokens() * workload.moe.top_k, workload.training.tensor_parallel);
  }
};

// Rounds down, to at least one token and one head.
ScaledWorkload Scale(const Workload& workload, std::int64_t token_scale, std::int64_t head_scale);

struct TensorSpec {
  enum class Fill {
    kNormal,         // of `deviation`
    kTopkIds,        // of `skew`
    kSortedIndices,  // where TokenPermute puts the slots of `<skew>.topk_ids`; cannot be given by the user
    kProbabilities,
    kCosines,  // (positions, pairs of a row) of the workload's rotary angles
    kSines,
    kNone,  // an output
  };

  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  Fill fill = Fill::kNone;
  double deviation = 1;
  Skew skew = Skew::kUniform;
};

struct Case {
  std::string name, kernel, shape;
  DType dtype = DType::kF32;
  std::vector<TensorSpec> inputs = {}, outputs = {};

  double flops = 0;                          // of the Cube, unpadded
  double bytes_read = 0, bytes_written = 0;  // every input and output element once

  // What has to run once before `run` does, on a device that computes and untimed: the forward pass of a backward one.
  std::function<Status(const Device& device, std::span<const ConstTensor> inputs)> prepare = {};
  // Inputs and outputs as specified above. On an Npu device without data, float tensors are null; what steers such a
  // run may come from one on the host before it.
  std::function<Status(const Device& device, std::span<const ConstTensor> inputs,
                       std::span<const Tensor> outputs, Profile* profile)>
      run = {};
  // Compares with the reference: everything where that takes about `products` multiply-adds or fewer,
  // otherwise rows drawn with `key`.
  std::function<Comparison(std::span<const ConstTensor> inputs, std::span<const Tensor> outputs,
                           double products, std::uint64_t key)>
      check = {};
};

// In the order of a layer: projections, attention, router, shared expert; then for each routing permute,
// experts and unpermute; then the two blocks, whole, forward and backward.
std::vector<Case> MakeCases(const ScaledWorkload& scaled, const std::vector<Skew>& routings);

}  // namespace cubist

#endif  // CUBIST_TOOLS_CASES_H_
