#include "tools/trial.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstddef>

namespace cubist {
namespace {

using Clock = std::chrono::steady_clock;

std::uint64_t Digest(const std::vector<OwnedTensor>& tensors) {
  std::uint64_t digest = 0;
  for (const OwnedTensor& tensor : tensors) digest = digest * 0x100000001b3u + tensor.Digest();
  return digest;
}

}  // namespace

CaseTensors::CaseTensors(const Case& c, const Inputs& source) {
  for (const TensorSpec& spec : c.inputs) inputs.push_back(source.Make(spec));
  for (const TensorSpec& spec : c.outputs) outputs.emplace_back(spec.dtype, spec.shape);
}

std::vector<ConstTensor> CaseTensors::InputViews() const {
  std::vector<ConstTensor> views;
  for (const OwnedTensor& tensor : inputs) views.push_back(tensor.view());
  return views;
}

std::vector<Tensor> CaseTensors::OutputViews() {
  std::vector<Tensor> views;
  for (OwnedTensor& tensor : outputs) views.push_back(tensor.view());
  return views;
}

Status ComputeTrial(const Case& c, const Device& host, const Repetitions& repetitions, CaseTensors* tensors,
                    Trial* trial) {
  const auto inputs = tensors->InputViews();
  const auto outputs = tensors->OutputViews();
  for (OwnedTensor& output : tensors->outputs) output.Mark();
  if (c.prepare) CUBIST_RETURN_IF_ERROR(c.prepare(host, inputs));
  CUBIST_RETURN_IF_ERROR(c.run(host, inputs, outputs, nullptr));
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const OwnedTensor& output = tensors->outputs[i];
    if (const std::int64_t marked = output.CountMarked(); marked > 0) {
      trial->problems.push_back(
          fmt::format("{} of {} elements of {} were not written", marked, output.count(), c.outputs[i].name));
    }
  }
  const std::uint64_t first_digest = Digest(tensors->outputs);

  double total = 0;
  for (int runs = 0; runs < repetitions.least || (runs < repetitions.most && total < repetitions.seconds);
       ++runs) {
    const auto start = Clock::now();
    CUBIST_RETURN_IF_ERROR(c.run(host, inputs, outputs, nullptr));
    trial->seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    total += trial->seconds.back();
  }
  std::sort(trial->seconds.begin(), trial->seconds.end());

  if (Digest(tensors->outputs) != first_digest) trial->problems.push_back("two runs gave different bits");
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!tensors->outputs[i].GuardsIntact()) {
      trial->problems.push_back(fmt::format("memory beside {} was overwritten", c.outputs[i].name));
    }
  }
  return {};
}

void CheckTrial(const Case& c, double products, std::uint64_t key, CaseTensors* tensors, Trial* trial) {
  trial->comparison = c.check(tensors->InputViews(), tensors->OutputViews(), products, key);
  if (const Comparison& comparison = trial->comparison; !comparison.ok()) {
    trial->problems.push_back(fmt::format("{} of {} elements are beyond their bounds; {}", comparison.beyond,
                                          comparison.elements, comparison.first_beyond));
  }
}

}  // namespace cubist
