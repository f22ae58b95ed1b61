// Inputs: the tensors that cases ask for, generated from a seed or read from the user's .npy files.
#ifndef CUBIST_TOOLS_INPUTS_H_
#define CUBIST_TOOLS_INPUTS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "npu_model/status.h"
#include "tools/cases.h"
#include "tools/owned_tensor.h"

namespace cubist {

class Inputs {
 public:
  // `scaled` gives the number of experts, the sum of probabilities and the rotary angles.
  Inputs(const ScaledWorkload& scaled, std::uint64_t seed) : scaled_(scaled), seed_(seed) {}

  // Reads the file of "name=file.npy" in place of the tensor of that name. Its shape must be the one that the
  // cases ask for; floats of any dtype are rounded to the dtype asked for, ids may be int32 or int64 and must
  // name an expert.
  Status Replace(const std::string& name_and_file, const std::vector<Case>& cases);

  // The tensor, contiguous. The same name gives the same numbers, whatever the dtype.
  OwnedTensor Make(const TensorSpec& spec) const;

 private:
  OwnedTensor MakeSortedIndices(const TensorSpec& spec) const;

  ScaledWorkload scaled_;
  std::uint64_t seed_;
  std::map<std::string, OwnedTensor> given_;
};

// Specifications of the inputs that a user may replace, one of each name.
std::vector<TensorSpec> ReplaceableInputs(const std::vector<Case>& cases);

}  // namespace cubist

#endif  // CUBIST_TOOLS_INPUTS_H_
