#include "tools/kernel_call.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <map>
#include <new>
#include <random>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "npu_model/nearest.h"
#include "tools/library_calls.h"

namespace cubist {
namespace {

// Those of the library, and those that were registered.
std::vector<NamedKernel>& Kernels() {
  static std::vector<NamedKernel> kernels = LibraryKernels();
  return kernels;
}

// Names of those that have masks.
std::string MaskedKernels() {
  std::string names;
  for (const NamedKernel& kernel : Kernels()) {
    if (kernel.form.masks) names += (names.empty() ? "" : ", ") + std::string(kernel.form.name);
  }
  return names;
}

// "4x5x6" as numbers, each from 0 to 2^24; empty where it is anything else.
Shape ParseShape(const std::string& text) {
  constexpr std::int64_t kLargest = 1 << 24;
  Shape shape;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (true) {
    std::int64_t size = -1;
    const auto [next, error] = std::from_chars(at, end, size);
    if (error != std::errc() || size < 0 || size > kLargest) return {};
    shape.push_back(size);
    if (next == end) return shape;
    if (*next != 'x') return {};
    at = next + 1;
  }
}

}  // namespace

OwnedTensor& KernelCall::Add(std::vector<OwnedTensor>& tensors, DType dtype, const Shape& shape) {
  // The system may promise what it does not have, and end who uses it.
  const std::int64_t bytes = BytesOf(dtype, shape);
  bytes_ += bytes < 0 ? 0x1p63 : static_cast<double>(bytes);
  if (bytes_ > MachineBytes()) throw std::bad_alloc();
  return tensors.emplace_back(dtype, shape);
}

ConstTensor KernelCall::Input(DType dtype, const Shape& shape) {
  if (!with_data_) return ContiguousView(nullptr, dtype, shape);
  OwnedTensor& tensor = Add(inputs_, dtype, shape);
  std::mt19937 random(++seed_);
  for (std::int64_t i = 0; i < tensor.count(); ++i)
    StoreFloat(tensor.data(), dtype, i, static_cast<float>(random() % 2048) / 1024 - 1);
  return tensor.view();
}

ConstTensor KernelCall::Ids(const std::vector<std::int32_t>& values, const Shape& shape) {
  OwnedTensor& tensor = Add(inputs_, DType::kI32, shape);
  std::copy(values.begin(), values.end(), reinterpret_cast<std::int32_t*>(tensor.data()));
  return tensor.view();
}

ConstTensor KernelCall::Flags(const Shape& shape) {
  OwnedTensor& tensor = Add(inputs_, DType::kBool, shape);
  std::mt19937 random(++seed_);
  for (std::int64_t i = 0; i < tensor.count(); ++i)
    tensor.data()[i] = static_cast<std::byte>(random() % 4 == 0);
  return tensor.view();
}

ConstTensor KernelCall::Flags(const std::vector<std::uint8_t>& values, const Shape& shape) {
  OwnedTensor& tensor = Add(inputs_, DType::kBool, shape);
  std::copy(values.begin(), values.end(), reinterpret_cast<std::uint8_t*>(tensor.data()));
  return tensor.view();
}

Tensor KernelCall::Output(DType dtype, const Shape& shape) {
  outputs_.push_back(with_data_ ? Add(output_memory_, dtype, shape).view()
                                : ContiguousView(nullptr, dtype, shape));
  return outputs_.back();
}

std::vector<KernelForm> KernelForms() {
  std::vector<KernelForm> forms;
  for (const NamedKernel& kernel : Kernels()) forms.push_back(kernel.form);
  return forms;
}

Status RegisterKernel(const KernelForm& form, MakeCall make) {
  const auto error = [&](const std::string& what) {
    return InvalidArgument(fmt::format("kernel '{}': {}", form.name, what));
  };
  const std::string_view name = form.name;
  if (name.empty() || !std::all_of(name.begin(), name.end(), [](unsigned char c) {
        return std::islower(c) != 0 || std::isdigit(c) != 0 || c == '_';
      })) {
    return error("a name has small letters, digits and '_'");
  }
  const std::string_view dims = form.dims;
  const auto sizes = 1 + static_cast<std::size_t>(std::count(dims.begin(), dims.end(), 'x'));
  for (const char* shape : {form.example, form.small}) {
    if (ParseShape(shape).size() != sizes)
      return error(fmt::format("shape '{}' is not {} sizes from 0 to 2^24, as {} has", shape, sizes, dims));
  }
  if (form.required > sizes) return error(fmt::format("{} of {} sizes are required", form.required, sizes));
  if (!make) return error("there is no function that makes a call");
  for (const NamedKernel& kernel : Kernels()) {
    if (name == kernel.form.name) return error("there is one of that name already");
  }
  Kernels().push_back({form, std::move(make)});
  return {};
}

std::string KernelFormsText() {
  std::string text;
  for (const KernelForm& form : KernelForms())
    text += fmt::format("  {:<30}{:<42} {}\n", form.name, form.dims, form.example);
  return text;
}

Status MakeKernelCall(const KernelCallOptions& options, KernelCall* call) {
  const auto kernel = std::find_if(Kernels().begin(), Kernels().end(),
                                   [&](const NamedKernel& k) { return options.kernel == k.form.name; });
  if (kernel == Kernels().end()) {
    std::vector<std::string> known;
    for (const KernelForm& form : KernelForms()) known.emplace_back(form.name);
    return InvalidArgument(
        fmt::format("no kernel is named '{}'; {}", options.kernel, KnownAndNearest(options.kernel, known)));
  }
  const KernelForm& form = kernel->form;
  const Shape example = ParseShape(form.example);
  Shape shape = options.shape.empty() ? example : ParseShape(options.shape);
  if (shape.size() < form.required || shape.size() > example.size()) {
    return InvalidArgument(fmt::format("shape '{}' of {} needs {}, each from 0 to 2^24, such as {}",
                                       options.shape, form.name, form.dims, form.example));
  }
  if (options.causal && !form.masks)
    return InvalidArgument(fmt::format("--causal: {} has no mask; {} have one", form.name, MaskedKernels()));
  for (std::size_t d = shape.size(); d < example.size(); ++d) shape.push_back(example[d]);
  const std::map<std::string, DType> dtypes = {
      {"fp32", DType::kF32}, {"bf16", DType::kBF16}, {"fp16", DType::kF16}};
  const auto dtype = dtypes.find(options.dtype);
  if (dtype == dtypes.end())
    return InvalidArgument(fmt::format("dtype '{}' is not fp32, bf16 or fp16", options.dtype));
  *call = KernelCall(options.with_data);
  bool fits = true;
  try {
    kernel->make(shape, dtype->second, options, call);
  } catch (const std::bad_alloc&) {
    fits = false;
  } catch (const std::length_error&) {  // Of a vector of ids.
    fits = false;
  }
  if (!fits) {
    return {StatusCode::kOutOfMemory,
            fmt::format("the tensors of {} {} do not fit in this machine's {:.1f} GiB", form.name,
                        options.shape, MachineBytes() / 0x1p30)};
  }
  return {};
}

}  // namespace cubist
