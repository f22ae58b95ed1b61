// What every public kernel checks of its arguments before any work. Messages name
// the argument, its value and the limit.
#ifndef CUBIST_KERNELS_VALIDATE_H_
#define CUBIST_KERNELS_VALIDATE_H_

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "npu_model/device.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

// What a call gives where std::bad_alloc reached it; the text needs no memory of its own.
inline Status OutOfMemory() { return {StatusCode::kOutOfMemory, "out of memory"}; }

// A tensor argument and what it is called, e.g. {"matmul", "a", args.a}.
struct Argument {
  const char* kernel;
  const char* name;
  ConstTensor tensor;

  Status Error(const std::string& what) const {
    return InvalidArgument(std::string(kernel) + ": " + name + " " + what);
  }
};

// The fewest digits that tell a number from its neighbours, as "1e-20".
CUBIST_EXPORT std::string TextOf(float value);
// An option of a kernel that is no tensor: "route: scale is inf, needs a finite value".
CUBIST_EXPORT Status OptionError(const char* kernel, const char* name, const std::string& value,
                                 const std::string& needs);
CUBIST_EXPORT Status OptionError(const char* kernel, const char* name, float value, const std::string& needs);
CUBIST_EXPORT Status OptionError(const char* kernel, const char* name, std::int64_t value,
                                 const std::string& needs);

// An option that is one of several, numbered from 0 to `last`: "matmul: activation is 9, the last is 4".
template <class Choice>
Status CheckChoice(const char* kernel, const char* name, Choice value, Choice last) {
  const auto number = static_cast<std::int64_t>(value), most = static_cast<std::int64_t>(last);
  if (number >= 0 && number <= most) return {};
  return InvalidArgument(std::string(kernel) + ": " + name + " is " + std::to_string(number) +
                         ", the last is " + std::to_string(most));
}

// A dimension that must have a known size, and where that size comes from, e.g. {"K of a", 7}.
struct Dim {
  static constexpr std::int64_t kAny = -1;
  const char* meaning;
  std::int64_t size = kAny;
};

// Given, of this rank, with sizes >= 0 and as `dims` says.
CUBIST_EXPORT Status CheckShape(const Argument& arg, std::span<const Dim> dims);
inline Status CheckShape(const Argument& arg, std::initializer_list<Dim> dims) {
  return CheckShape(arg, std::span(dims.begin(), dims.size()));
}
CUBIST_EXPORT Status CheckDType(const Argument& arg, std::initializer_list<DType> allowed);
inline constexpr std::initializer_list<DType> kFloatTypes{DType::kF32, DType::kBF16, DType::kF16};
// No overflow of 64-bit byte offsets, nothing below address 0, data not null (where it is needed) and aligned to its
// elements.
CUBIST_EXPORT Status CheckStorage(const Argument& arg, bool needs_data);
// No two elements in one place.
CUBIST_EXPORT Status CheckWritable(const Argument& arg);
// An output shares no element with another argument. Tensors that interleave
// (columns of one matrix) may be apart.
CUBIST_EXPORT Status CheckApart(const Argument& output, const Argument& other);
// Outputs of a list share no element with each other; `name` is the list's.
CUBIST_EXPORT Status CheckListApart(const char* kernel, const char* name, std::span<const Tensor> outputs);
// All of the above for a call's tensors, given or not, whose data is needed where the device computes.
CUBIST_EXPORT Status CheckTensors(const Device& device, std::initializer_list<const Argument*> inputs,
                                  std::initializer_list<const Argument*> outputs);

}  // namespace cubist

#endif  // CUBIST_KERNELS_VALIDATE_H_
