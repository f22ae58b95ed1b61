// How the blocks of a layer run their kernels.
#ifndef CUBIST_KERNELS_BLOCK_STEPS_H_
#define CUBIST_KERNELS_BLOCK_STEPS_H_

#include <cstdint>
#include <initializer_list>
#include <utility>

#include "kernels/attention_arguments.h"
#include "kernels/block.h"
#include "kernels/validate.h"
#include "npu_model/device.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

// Runs a block's kernels one after the other until one fails, and collects their profiles.
class Steps {
 public:
  Steps(const Device& device, BlockProfile* profile) : device_(device), profile_(profile) {
    if (profile != nullptr) profile->kernels.clear();
  }

  // kernel(device, args, profile), unless a step has failed.
  template <class Kernel, class Args>
  void Run(const char* name, Kernel kernel, const Args& args) {
    if (!status_.ok()) return;
    const bool keeps = profile_ != nullptr && device_.kind() == Device::Kind::kNpu;
    Profile* of_step = keeps ? &profile_->kernels.emplace_back(name, Profile()).second : nullptr;
    status_ = kernel(device_, args, of_step);
  }
  const Status& status() const { return status_; }

 private:
  const Device& device_;
  BlockProfile* profile_;
  Status status_;
};

// The gradients of y = x * weights: dx = dy * weights^T, and dw = x^T * dy where it is given. `names` are their steps'.
struct ProjectionGradArgs {
  ConstTensor x, weights, dy;
  Tensor dx, dw = {};
};
void ProjectionGrad(Steps* steps, std::pair<const char*, const char*> names, const ProjectionGradArgs& args);

// A gradient, where it is given, is shaped like its weight: one of a norm (rank 1) in any float, others in fp32 or the weight's.
Status CheckGradient(const Argument& gradient, const ConstTensor& weight);

// A state that is there.
Status CheckState(const char* kernel, const BlockState* state);

// out (T, H) = a (+ b + c), in fp32, rounded once.
struct SumArgs {
  ConstTensor a, b = {}, c = {};
  Tensor out;
};
CUBIST_COMMAND_EXPORT Status Sum(const Device& device, const SumArgs& args, Profile* profile);

// A block's memory on a device: a tensor of that name, or, where the device does not compute, only its shape.
class BlockMemory {
 public:
  BlockMemory(const Device& device, BlockState* state) : state_(device.computes() ? state : nullptr) {}

  Tensor operator()(const char* name, DType dtype, std::initializer_list<std::int64_t> sizes) const {
    return state_ != nullptr ? state_->Take(name, dtype, sizes) : Tensor(nullptr, dtype, sizes);
  }

 private:
  BlockState* state_;
};

// A matrix (B * S, N * C), the heads one behind the other, as (B, N, S, `cols` of each C).
template <class AnyTensor>
AnyTensor Heads(const AnyTensor& x, std::int64_t batch, std::int64_t heads, Range cols) {
  const std::int64_t width = x.size(1) / heads, length = x.size(0) / batch;
  AnyTensor part = PartOf(x, 1, cols);
  part.rank = 4;
  part.sizes = {batch, heads, length, cols.size()};
  part.strides = {length * x.stride(0), width * x.stride(1), x.stride(0), x.stride(1)};
  return part;
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_BLOCK_STEPS_H_
