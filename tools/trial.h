// Trial: a case computed on the host, its answer checked, and its outputs watched for stray and missing writes.
#ifndef CUBIST_TOOLS_TRIAL_H_
#define CUBIST_TOOLS_TRIAL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "npu_model/device.h"
#include "npu_model/status.h"
#include "tools/cases.h"
#include "tools/comparison.h"
#include "tools/inputs.h"
#include "tools/owned_tensor.h"

namespace cubist {

// Memory for a case's inputs, filled, and for its outputs, not filled.
struct CaseTensors {
  CaseTensors(const Case& c, const Inputs& source);

  std::vector<ConstTensor> InputViews() const;
  std::vector<Tensor> OutputViews();

  std::vector<OwnedTensor> inputs, outputs;
};

struct Repetitions {
  int least = 3, most = 25;
  double seconds = 0.5;  // enough, once there were `least`
};

struct Trial {
  std::vector<double> seconds;  // of each timed run, ascending
  Comparison comparison;
  std::vector<std::string> problems;  // sentences; none when all is well

  double median() const { return seconds[seconds.size() / 2]; }
};

// Runs the case once to warm up and then timed. Every output begins as marks, of which the first run may
// leave none; the timed runs must give the same bits again; nothing beside an output may change. An error is
// the kernel's own.
Status ComputeTrial(const Case& c, const Device& host, const Repetitions& repetitions, CaseTensors* tensors,
                    Trial* trial);

// Compares what the last run left with the reference; `products` and `key` as in Case::check.
void CheckTrial(const Case& c, double products, std::uint64_t key, CaseTensors* tensors, Trial* trial);

}  // namespace cubist

#endif  // CUBIST_TOOLS_TRIAL_H_
