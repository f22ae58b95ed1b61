// KernelCall: any kernel of the library, made callable from its name and a shape. What `cubist check`, `profile`,
// `tune` and the like are given on the command line.
#ifndef CUBIST_TOOLS_KERNEL_CALL_H_
#define CUBIST_TOOLS_KERNEL_CALL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "npu_model/device.h"
#include "npu_model/profile.h"
#include "npu_model/status.h"
#include "npu_model/types.h"
#include "tools/owned_tensor.h"

namespace cubist {

struct KernelCallOptions {
  std::string kernel;
  std::string shape;  // sizes with 'x' between them, as the kernel's form says; empty: the form's example
  std::string dtype = "bf16";
  bool causal = false;
  bool any_order = false;  // matmul: sums may begin anywhere along k
  bool with_data = false;  // float tensors have memory, inputs random values
};

// What the sizes of a kernel's shape mean. The last ones may be left out; they are then the example's.
struct KernelForm {
  const char* name;
  const char* dims;      // "MxNxK"
  const char* example;   // "1024x1024x1024"
  const char* small;     // an awkward one that is computed number by number in no time
  std::size_t required;  // sizes that must be given
  bool masks = false;    // whether KernelCallOptions::causal means anything to it
};
std::vector<KernelForm> KernelForms();
// Lines of name, dims and example, aligned.
std::string KernelFormsText();

// A call with its tensors. Index inputs always have values, because kernels steer by them.
class KernelCall {
 public:
  Status operator()(const Device& device, Profile* profile = nullptr) const { return run_(device, profile); }

  const std::vector<OwnedTensor>& inputs() const { return inputs_; }
  // In the order in which the kernel names its tensors.
  const std::vector<Tensor>& outputs() const { return outputs_; }

  // Multiply-adds that the result asks for; 0 where moving the tensors is all that counts.
  double products() const { return products_; }

  // For those who make calls.
  ConstTensor Input(DType dtype, const Shape& shape);
  ConstTensor Ids(const std::vector<std::int32_t>& values, const Shape& shape);
  ConstTensor Flags(const Shape& shape);  // booleans, a quarter of them true
  ConstTensor Flags(const std::vector<std::uint8_t>& values, const Shape& shape);
  Tensor Output(DType dtype, const Shape& shape);
  void set_run(std::function<Status(const Device&, Profile*)> run) { run_ = std::move(run); }
  void set_products(double products) { products_ = products; }
  explicit KernelCall(bool with_data = false) : with_data_(with_data) {}

 private:
  // Throws std::bad_alloc where all tensors together are more than the machine has.
  OwnedTensor& Add(std::vector<OwnedTensor>& tensors, DType dtype, const Shape& shape);

  bool with_data_;
  std::uint32_t seed_ = 17;
  double bytes_ = 0;
  double products_ = 0;
  std::vector<OwnedTensor> inputs_, output_memory_;
  std::vector<Tensor> outputs_;
  std::function<Status(const Device&, Profile*)> run_;
};

// Makes a call of the given sizes, as many as the form's example has; any may be 0.
using MakeCall =
    std::function<void(const Shape& shape, DType dtype, const KernelCallOptions& options, KernelCall* call)>;

// Adds a kernel to those that are known by name; the texts of `form` must stay. Before any command runs, from one
// thread. An error says which part of the form is wrong, or that the name is taken.
Status RegisterKernel(const KernelForm& form, MakeCall make);

// Errors name the kernel, the size or the dtype that is wrong, and what would be right.
Status MakeKernelCall(const KernelCallOptions& options, KernelCall* call);

}  // namespace cubist

#endif  // CUBIST_TOOLS_KERNEL_CALL_H_
