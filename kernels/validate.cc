#include "kernels/validate.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

namespace cubist {
namespace {

struct Axis {
  std::int64_t size, stride;
};

// The same elements, every step of them upwards.
ConstTensor Upwards(ConstTensor t) {
  const auto lowest =
      reinterpret_cast<std::uintptr_t>(t.data) - static_cast<std::uintptr_t>(t.origin() * SizeOf(t.dtype));
  t.data = reinterpret_cast<const void*>(lowest);  // NOLINT(performance-no-int-to-ptr)
  for (int d = 0; d < t.rank; ++d) {
    std::int64_t& stride = t.strides[static_cast<std::size_t>(d)];
    if (t.size(d) > 1) stride = std::abs(stride);
  }
  return t;
}

// The dimensions that move, innermost (smallest stride) first; of a tensor whose steps are upwards, as are those of all that
// follows.
int SortedAxes(const ConstTensor& t, std::array<Axis, ConstTensor::kMaxRank>* axes) {
  int count = 0;
  for (int d = 0; d < t.rank; ++d) {
    if (t.size(d) <= 1) continue;
    auto at = static_cast<std::size_t>(count++);
    for (; at > 0 && (*axes)[at - 1].stride > t.stride(d); --at) (*axes)[at] = (*axes)[at - 1];
    (*axes)[at] = {t.size(d), t.stride(d)};
  }
  return count;
}

// Elements from the first to the last, inclusive, of the innermost `count` axes.
std::int64_t Extent(const std::array<Axis, ConstTensor::kMaxRank>& axes, int count) {
  std::int64_t last = 0;
  for (int d = 0; d < count; ++d) {
    last += (axes[static_cast<std::size_t>(d)].size - 1) * axes[static_cast<std::size_t>(d)].stride;
  }
  return last + 1;
}

struct Bytes {
  std::uintptr_t begin, end;
};
Bytes BytesOf(const ConstTensor& t) {
  const auto begin = reinterpret_cast<std::uintptr_t>(t.data);
  return {begin, begin + static_cast<std::uintptr_t>(t.extent() * SizeOf(t.dtype))};
}

// Whether both tensors have an axis of the same step in bytes, steps of their outer axes are multiples of it, and what
// their inner axes reach lies in different columns of it.
bool InterleaveApart(const ConstTensor& x, const ConstTensor& y) {
  std::array<Axis, ConstTensor::kMaxRank> x_axes, y_axes;
  const int x_count = SortedAxes(x, &x_axes), y_count = SortedAxes(y, &y_axes);
  const auto step = [](const std::array<Axis, ConstTensor::kMaxRank>& axes, int d, DType dtype) {
    return axes[static_cast<std::size_t>(d)].stride * SizeOf(dtype);
  };
  const auto distance = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(y.data) -
                                                  reinterpret_cast<std::uintptr_t>(x.data));
  for (int i = 0; i < x_count; ++i) {
    const std::int64_t period = step(x_axes, i, x.dtype);
    int j = 0;
    while (j < y_count && step(y_axes, j, y.dtype) < period) ++j;
    if (period <= 0 || j == y_count || step(y_axes, j, y.dtype) != period) continue;
    bool multiples = true;
    for (int d = i; d < x_count; ++d) multiples = multiples && step(x_axes, d, x.dtype) % period == 0;
    for (int d = j; d < y_count; ++d) multiples = multiples && step(y_axes, d, y.dtype) % period == 0;
    const std::int64_t x_inner = Extent(x_axes, i) * SizeOf(x.dtype),
                       y_inner = Extent(y_axes, j) * SizeOf(y.dtype);
    const std::int64_t shift = ((distance % period) + period) % period;
    if (multiples && x_inner <= shift && shift + y_inner <= period) return true;
  }
  return false;
}

}  // namespace

std::string TextOf(float value) {
  std::array<char, 32> digits;  // A sign, nine digits, a point and an exponent at most.
  return {digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr};
}

Status OptionError(const char* kernel, const char* name, const std::string& value, const std::string& needs) {
  return InvalidArgument(std::string(kernel) + ": " + name + " is " + value + ", needs " + needs);
}
Status OptionError(const char* kernel, const char* name, float value, const std::string& needs) {
  return OptionError(kernel, name, TextOf(value), needs);
}
Status OptionError(const char* kernel, const char* name, std::int64_t value, const std::string& needs) {
  return OptionError(kernel, name, std::to_string(value), needs);
}

Status CheckShape(const Argument& arg, std::span<const Dim> dims) {
  const ConstTensor& t = arg.tensor;
  if (!t.given()) return arg.Error("is not given");
  if (t.rank != static_cast<int>(dims.size())) {
    return arg.Error("has rank " + std::to_string(t.rank) + ", needs " + std::to_string(dims.size()));
  }
  int d = 0;
  for (const Dim& dim : dims) {
    // Texts are made of what is wrong alone: those of a few right sizes take as long as a small product.
    const auto error = [&](const std::string& needs) {
      return arg.Error("has size " + std::to_string(t.size(d)) + " in dimension " + std::to_string(d) + " (" +
                       dim.meaning + "), " + needs);
    };
    if (t.size(d) < 0) return error("the least is 0");
    if (dim.size != Dim::kAny && t.size(d) != dim.size) return error("needs " + std::to_string(dim.size));
    ++d;
  }
  return {};
}

Status CheckDType(const Argument& arg, std::initializer_list<DType> allowed) {
  if (std::find(allowed.begin(), allowed.end(), arg.tensor.dtype) != allowed.end()) return {};
  std::string names;
  for (DType dtype : allowed) {
    const std::string name = NameOf(dtype);
    if (names.find(name) == std::string::npos) names += (names.empty() ? "" : " or ") + name;
  }
  return arg.Error(std::string("is ") + NameOf(arg.tensor.dtype) + ", needs " + names);
}

Status CheckStorage(const Argument& arg, bool needs_data) {
  const ConstTensor& t = arg.tensor;
  if (!t.given()) return {};
  // Half of the widest address space; what only the model sees may be larger.
  const int bits = needs_data ? 56 : 62;
  const std::int64_t most = std::int64_t{1} << bits;
  std::int64_t highest = 0, lowest = 0, count = 1;
  bool overflow = false, empty = false;
  for (int d = 0; d < t.rank; ++d) {
    empty = empty || t.size(d) == 0;
    std::int64_t reach = 0;
    std::int64_t* const end = t.stride(d) < 0 ? &lowest : &highest;
    overflow = overflow ||
               __builtin_mul_overflow(std::max<std::int64_t>(t.size(d) - 1, 0), t.stride(d), &reach) ||
               __builtin_add_overflow(*end, reach, end) ||
               __builtin_mul_overflow(count, std::max<std::int64_t>(t.size(d), 1), &count);
  }
  // No division: it would take longer than all else.
  const std::int64_t size = SizeOf(t.dtype);
  std::int64_t bytes = 0;
  if (overflow || highest >= most || lowest <= -most ||
      __builtin_mul_overflow(std::max(highest - lowest + 1, count), size, &bytes) || bytes > most) {
    return arg.Error("spans more than 2^" + std::to_string(bits) + " bytes");
  }
  if (empty || !needs_data) return {};
  if (t.data == nullptr) return arg.Error("has null data");
  const auto at = reinterpret_cast<std::uintptr_t>(t.data),
             below = static_cast<std::uintptr_t>(-lowest * size);
  if (at < below) {
    return arg.Error("begins " + std::to_string(below) + " bytes before its data at address " +
                     std::to_string(at) + ", the lowest address is 0");
  }
  // Sizes are powers of two.
  if ((at & static_cast<std::uintptr_t>(size - 1)) != 0) {
    return arg.Error("is not aligned to its elements of " + std::to_string(SizeOf(t.dtype)) + " bytes");
  }
  return {};
}

Status CheckWritable(const Argument& arg) {
  std::array<Axis, ConstTensor::kMaxRank> axes;
  const int count = SortedAxes(Upwards(arg.tensor), &axes);
  for (int d = 0; d < count; ++d) {
    const std::int64_t stride = axes[static_cast<std::size_t>(d)].stride, inner = Extent(axes, d);
    if (stride < inner && arg.tensor.count() > 0) {
      return arg.Error("is written, but its elements overlap: a stride of " + std::to_string(stride) +
                       " spans " + std::to_string(inner) + " elements");
    }
  }
  return {};
}

Status CheckApart(const Argument& output, const Argument& other) {
  const auto nowhere = [](const ConstTensor& t) { return !t.given() || t.data == nullptr || t.count() == 0; };
  if (nowhere(output.tensor) || nowhere(other.tensor)) return {};
  const ConstTensor x = Upwards(output.tensor), y = Upwards(other.tensor);
  const Bytes a = BytesOf(x), b = BytesOf(y);
  if (a.end <= b.begin || b.end <= a.begin || InterleaveApart(x, y) || InterleaveApart(y, x)) return {};
  return output.Error(std::string("overlaps ") + other.name + " in memory");
}

// In the order of their first bytes, so that each meets only those before it that reach as far as its first.
Status CheckListApart(const char* kernel, const char* name, std::span<const Tensor> outputs) {
  struct Placed {
    std::size_t index;
    Bytes bytes;
  };
  std::vector<Placed> placed, open;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].data != nullptr && outputs[i].count() > 0)
      placed.push_back({i, BytesOf(Upwards(outputs[i]))});
  }
  std::sort(placed.begin(), placed.end(),
            [](const Placed& x, const Placed& y) { return x.bytes.begin < y.bytes.begin; });
  for (const Placed& next : placed) {
    std::erase_if(open, [&](const Placed& before) { return before.bytes.end <= next.bytes.begin; });
    for (const Placed& before : open) {
      const auto one = [&](std::size_t i) { return std::string(name) + "[" + std::to_string(i) + "]"; };
      const std::size_t i = std::max(before.index, next.index), j = std::min(before.index, next.index);
      const std::string later = one(i), earlier = one(j);
      CUBIST_RETURN_IF_ERROR(
          CheckApart({kernel, later.c_str(), outputs[i]}, {kernel, earlier.c_str(), outputs[j]}));
    }
    open.push_back(next);
  }
  return {};
}

Status CheckTensors(const Device& device, std::initializer_list<const Argument*> inputs,
                    std::initializer_list<const Argument*> outputs) {
  for (const auto& list : {inputs, outputs}) {
    for (const Argument* arg : list) CUBIST_RETURN_IF_ERROR(CheckStorage(*arg, device.computes()));
  }
  for (const Argument* output : outputs) {
    CUBIST_RETURN_IF_ERROR(CheckWritable(*output));
    for (const Argument* input : inputs) CUBIST_RETURN_IF_ERROR(CheckApart(*output, *input));
    for (const Argument* other : outputs) {
      if (other != output) CUBIST_RETURN_IF_ERROR(CheckApart(*output, *other));
    }
  }
  return {};
}

}  // namespace cubist
