#include "tools/inputs.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "npu_model/nearest.h"
#include "npu_model/parallel.h"
#include "reference/token_permute.h"
#include "tools/generate.h"
#include "tools/npy.h"

namespace cubist {
namespace {

// The tensor in another float dtype, rounded to nearest.
OwnedTensor Converted(const OwnedTensor& from, DType dtype) {
  OwnedTensor to(dtype, from.shape());
  ForEachPart(from.count(), 1 << 14, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      if (IsFloat(dtype)) {
        StoreFloat(to.data(), dtype, i, LoadFloat(from.data(), from.dtype(), i));
      } else {
        std::memcpy(to.data() + i * SizeOf(dtype), from.data() + i * SizeOf(dtype),
                    static_cast<std::size_t>(SizeOf(dtype)));
      }
    }
  });
  return to;
}

Status CheckIds(const OwnedTensor& ids, std::int64_t experts) {
  for (std::int64_t i = 0; i < ids.count(); ++i) {
    const std::int64_t id = LoadInt(ids.data(), ids.dtype(), i);
    if (id >= 0 && id < experts) continue;
    const std::int64_t k = ids.shape()[1];
    return InvalidArgument(
        fmt::format("the id at ({}, {}) is {}; expert ids go from 0 to {}", i / k, i % k, id, experts - 1));
  }
  return {};
}

Status CheckFits(const OwnedTensor& tensor, const TensorSpec& spec, std::int64_t experts) {
  if (tensor.shape() != spec.shape) {
    return InvalidArgument(
        fmt::format("has shape {}, expected {}", ToString(tensor.shape()), ToString(spec.shape)));
  }
  if (IsFloat(tensor.dtype()) != IsFloat(spec.dtype)) {
    return InvalidArgument(fmt::format("has dtype {}, expected {}", NameOf(tensor.dtype()),
                                       IsFloat(spec.dtype) ? "fp32, bf16 or fp16" : "int32 or int64"));
  }
  return spec.fill == TensorSpec::Fill::kTopkIds ? CheckIds(tensor, experts) : Status();
}

}  // namespace

std::vector<TensorSpec> ReplaceableInputs(const std::vector<Case>& cases) {
  std::vector<TensorSpec> specs;
  for (const Case& c : cases) {
    for (const TensorSpec& spec : c.inputs) {
      const auto same_name = [&](const TensorSpec& other) { return other.name == spec.name; };
      if (spec.fill == TensorSpec::Fill::kSortedIndices || std::any_of(specs.begin(), specs.end(), same_name))
        continue;
      specs.push_back(spec);
    }
  }
  return specs;
}

Status Inputs::Replace(const std::string& name_and_file, const std::vector<Case>& cases) {
  const std::size_t equals = name_and_file.find('=');
  if (equals == std::string::npos) {
    return InvalidArgument(fmt::format("--input is '{}', expected name=file.npy", name_and_file));
  }
  const std::string name = name_and_file.substr(0, equals), file = name_and_file.substr(equals + 1);
  const std::vector<TensorSpec> specs = ReplaceableInputs(cases);
  const auto spec =
      std::find_if(specs.begin(), specs.end(), [&](const TensorSpec& s) { return s.name == name; });
  if (spec == specs.end()) {
    std::vector<std::string> names;
    for (const TensorSpec& s : specs) names.push_back(s.name);
    return InvalidArgument(
        fmt::format("--input: no tensor is named '{}'; {}", name, KnownAndNearest(name, names)));
  }
  if (given_.count(name) != 0) return InvalidArgument(fmt::format("--input: '{}' is given twice", name));

  OwnedTensor tensor;
  CUBIST_RETURN_IF_ERROR(ReadNpy(file, &tensor));
  if (const Status fits = CheckFits(tensor, *spec, scaled_.workload.moe.experts); !fits.ok()) {
    return InvalidArgument(fmt::format("{}: as {}, {}", file, name, fits.message()));
  }
  given_.emplace(name, std::move(tensor));
  return {};
}

OwnedTensor Inputs::MakeSortedIndices(const TensorSpec& spec) const {
  const std::int64_t k = scaled_.workload.moe.top_k;
  const OwnedTensor ids = Make({.name = fmt::format("{}.topk_ids", NameOf(spec.skew)),
                                .dtype = DType::kI32,
                                .shape = {spec.shape[0] / k, k},
                                .fill = TensorSpec::Fill::kTopkIds,
                                .skew = spec.skew});
  const auto routing = reference::Route(ids.view(), scaled_.workload.moe.experts, 0);
  OwnedTensor indices(DType::kI32, spec.shape);
  std::memcpy(indices.data(), routing.sorted_indices.data(), static_cast<std::size_t>(indices.bytes()));
  return indices;
}

OwnedTensor Inputs::Make(const TensorSpec& spec) const {
  if (const auto given = given_.find(spec.name); given != given_.end()) {
    return Converted(given->second, IsFloat(spec.dtype) ? spec.dtype : given->second.dtype());
  }
  if (spec.fill == TensorSpec::Fill::kSortedIndices) return MakeSortedIndices(spec);
  OwnedTensor tensor(spec.dtype, spec.shape);
  const std::uint64_t key = StreamKey(seed_, spec.name);
  switch (spec.fill) {
    case TensorSpec::Fill::kTopkIds:
      FillTopkIds(tensor.view(), spec.skew, scaled_.workload.moe.experts, key);
      break;
    case TensorSpec::Fill::kProbabilities:
      FillProbabilities(tensor.view(), scaled_.workload.moe.routed_scale, key);
      break;
    case TensorSpec::Fill::kCosines:
    case TensorSpec::Fill::kSines:
      FillRotary(tensor.view(), scaled_.workload.attention.rope_theta, spec.fill == TensorSpec::Fill::kSines);
      break;
    default:
      FillNormal(tensor.view(), spec.deviation, key);
  }
  return tensor;
}

}  // namespace cubist
