#include "src/arguments.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace cubist::python {
namespace {

constexpr DType kAllTypes[] = {DType::kF32, DType::kBF16, DType::kF16,
                               DType::kI32, DType::kI64,  DType::kBool};

std::string TextOf(nb::handle value) { return nb::str(value).c_str(); }

// numpy has no bf16 of its own: that of ml_dtypes has a name, but goes neither through DLPack nor as a buffer.
bool IsNumpyBF16(nb::handle value) {
  return nb::hasattr(value, "__array_interface__") && nb::hasattr(value, "dtype") &&
         TextOf(value.attr("dtype")) == "bfloat16";
}

// Of PyTorch, whose autograd follows what becomes of such a tensor where it is enabled.
bool RequiresGradient(nb::handle value) {
  bool requires_grad = false;
  return nb::hasattr(value, "requires_grad") && nb::try_cast(value.attr("requires_grad"), requires_grad) &&
         requires_grad;
}

// A copy of one's own: what a kernel lends ends with the call.
template <class T>
nb::object ArrayOf(std::span<const T> values) {
  return nb::cast(nb::ndarray<nb::numpy, const T, nb::ndim<1>>(values.data(), {values.size()}),
                  nb::rv_policy::copy);
}

}  // namespace

void Raise(const Status& status) {
  if (status.ok()) return;
  if (status.code() == StatusCode::kOutOfMemory) {
    PyErr_SetString(PyExc_MemoryError, status.message().c_str());
    throw nb::python_error();
  }
  throw nb::value_error(status.message().c_str());
}

nb::dlpack::dtype DlpackOf(DType dtype) {
  using Code = nb::dlpack::dtype_code;
  const Code code = dtype == DType::kBF16   ? Code::Bfloat
                    : dtype == DType::kBool ? Code::Bool
                    : IsFloat(dtype)        ? Code::Float
                                            : Code::Int;
  return {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(8 * SizeOf(dtype)), 1};
}

DType DTypeNamed(const std::string& name) {
  std::string known;
  for (const DType dtype : kAllTypes) {
    if (name == NameOf(dtype)) return dtype;
    known += (known.empty() ? "" : ", ") + std::string(NameOf(dtype));
  }
  throw nb::value_error(("dtype is '" + name + "', needs one of " + known).c_str());
}

std::shared_ptr<std::byte[]> AlignedMemory(std::size_t bytes) {
  constexpr std::align_val_t kLine{64};
  auto* memory = static_cast<std::byte*>(::operator new[](std::max<std::size_t>(bytes, 1), kLine));
  std::memset(memory, 0, bytes);
  return {memory, [](std::byte* p) { ::operator delete[](p, kLine); }};
}

nb::handle Arguments::Take(const char* name) {
  taken_.insert(name);
  if (!values_.contains(name)) return {};
  const nb::handle value = values_[name];
  return value.is_none() ? nb::handle() : value;
}

void Arguments::Wrong(const char* name, nb::handle value, const std::string& needs) const {
  throw nb::value_error(
      (kernel_ + ": " + name + " is " + nb::repr(value).c_str() + ", needs " + needs).c_str());
}

template <class Value>
Value Arguments::Cast(const char* name, nb::handle value, const char* needs) const {
  Value result;
  if (!nb::try_cast(value, result)) Wrong(name, value, needs);
  return result;
}

template <class Number>
Arguments& Arguments::Read(const char* name, Number& field, const char* needs) {
  if (const nb::handle value = Take(name); value.is_valid()) field = Cast<Number>(name, value, needs);
  return *this;
}

Tensor Arguments::View(const std::string& name, nb::handle value, bool writable) {
  const std::string what = kernel_ + ": " + name;
  Tensor tensor;
  const auto set_size = [&](std::size_t d, std::int64_t size, std::int64_t stride) {
    tensor.sizes[d] = size, tensor.strides[d] = stride;
  };
  const auto check_rank = [&](std::size_t rank) {
    if (rank >= 1 && rank <= Tensor::kMaxRank) return;
    throw nb::value_error((what + " has " + std::to_string(rank) + " dimensions, needs 1 to " +
                           std::to_string(Tensor::kMaxRank))
                              .c_str());
  };
  if (nb::isinstance<Spec>(value)) {
    const Spec& spec = nb::cast<const Spec&>(value);
    check_rank(spec.shape.size());
    tensor.rank = static_cast<int>(spec.shape.size());
    tensor.dtype = spec.dtype;
    std::int64_t stride = 1;
    for (std::size_t d = spec.shape.size(); d-- > 0;) {
      set_size(d, spec.shape[d], stride);
      if (__builtin_mul_overflow(stride, std::max<std::int64_t>(spec.shape[d], 1), &stride)) stride = 0;
    }
    return tensor;
  }

  nb::object source = nb::borrow(value);
  if (RequiresGradient(value)) {
    if (nb::cast<bool>(nb::module_::import_("torch").attr("is_grad_enabled")())) {
      throw nb::value_error((what + " requires a gradient, which this function does not give: pass " + name +
                             ".detach(), or call the function of cubist.torch")
                                .c_str());
    }
    source = value.attr("detach")();
  }
  const bool is_bf16 = IsNumpyBF16(value);
  if (is_bf16) source = value.attr("view")("uint16");
  const auto take = [&](const auto& array) {
    check_rank(array.ndim());
    if (array.device_type() != nb::device::cpu::value) {
      throw nb::value_error((what + " is not in the CPU's memory").c_str());
    }
    tensor.rank = static_cast<int>(array.ndim());
    for (std::size_t d = 0; d < array.ndim(); ++d) {
      set_size(d, static_cast<std::int64_t>(array.shape(d)), array.stride(d));
    }
    constexpr nb::dlpack::dtype kByte = {static_cast<std::uint8_t>(nb::dlpack::dtype_code::UInt), 8, 1};
    const DType* known = std::find_if(std::begin(kAllTypes), std::end(kAllTypes),
                                      [&](DType dtype) { return DlpackOf(dtype) == array.dtype(); });
    if (is_bf16) {
      tensor.dtype = DType::kBF16;
    } else if (array.dtype() == kByte) {
      tensor.dtype = DType::kBool;
    } else if (known != std::end(kAllTypes)) {
      tensor.dtype = *known;
    } else {
      throw nb::value_error(
          (what + " is " + TextOf(value.attr("dtype")) + ", needs fp32, bf16, fp16, int32, int64 or bool")
              .c_str());
    }
    kept_.emplace_back(array);
  };
  // A writable view first: a const one is all that a read-only array gives.
  if (nb::ndarray<> array; nb::try_cast(source, array)) {
    take(array);
    tensor.data = static_cast<std::byte*>(array.data_handle()) + array.byte_offset();
    return tensor;
  }
  nb::ndarray<nb::ro> array;
  if (!nb::try_cast(source, array)) {
    throw nb::type_error((what + " is " + TextOf(value.type().attr("__name__")) +
                          ", needs an array in the CPU's memory (numpy, or anything with __dlpack__)")
                             .c_str());
  }
  if (writable) throw nb::value_error((what + " is read-only, and would be written").c_str());
  take(array);
  // Inputs become const again at once.
  tensor.data = static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(array.data_handle()))) +
                array.byte_offset();
  return tensor;
}

Arguments& Arguments::operator()(const char* name, ConstTensor& field) {
  if (const nb::handle value = Take(name); value.is_valid()) field = View(name, value, /*writable=*/false);
  return *this;
}

Arguments& Arguments::operator()(const char* name, Tensor& field) {
  if (const nb::handle value = Take(name); value.is_valid()) field = View(name, value, /*writable=*/true);
  return *this;
}

Arguments& Arguments::operator()(const char* name, PackedOperand& field) {
  const nb::handle value = Take(name);
  if (!value.is_valid()) return *this;
  if (!nb::isinstance<Packed>(value)) Wrong(name, value, "what cubist.pack gave");
  field = nb::cast<const Packed&>(value).operand;
  return *this;
}

Arguments& Arguments::operator()(const char* name, bool& field) { return Read(name, field, "True or False"); }
Arguments& Arguments::operator()(const char* name, float& field) { return Read(name, field, "a number"); }
Arguments& Arguments::operator()(const char* name, std::int64_t& field) {
  return Read(name, field, "a whole number");
}
Arguments& Arguments::operator()(const char* name, std::uint64_t& field) {
  return Read(name, field, "a whole number >= 0");
}

Arguments& Arguments::operator()(const char* name, std::optional<float>& field) {
  if (const nb::handle value = Take(name); value.is_valid()) field = Cast<float>(name, value, "a number");
  return *this;
}

Arguments& Arguments::operator()(const char* name, std::optional<std::int64_t>& field) {
  if (const nb::handle value = Take(name); value.is_valid()) {
    field = Cast<std::int64_t>(name, value, "a whole number");
  }
  return *this;
}

Arguments& Arguments::operator()(const char* name, std::optional<Range>& field) {
  const nb::handle value = Take(name);
  if (!value.is_valid()) return *this;
  const auto ends = Cast<std::vector<std::int64_t>>(name, value, "(begin, end)");
  if (ends.size() != 2) Wrong(name, value, "(begin, end)");
  field = Range{ends[0], ends[1]};
  return *this;
}

Arguments& Arguments::operator()(const char* name, std::span<const std::int64_t>& field) {
  const nb::handle value = Take(name);
  if (!value.is_valid()) return *this;
  constexpr const char* kNeeds = "whole numbers";
  nb::object list = nb::borrow(value);
  if (nb::hasattr(value, "tolist")) list = value.attr("tolist")();
  field = integers_.emplace_back(Cast<std::vector<std::int64_t>>(name, list, kNeeds));
  return *this;
}

// All bytes of an array of any shape, without gaps.
Arguments& Arguments::operator()(const char* name, CallerWorkspace& field) {
  const nb::handle value = Take(name);
  if (!value.is_valid()) return *this;
  const Tensor room = View(name, value, /*writable=*/true);
  std::int64_t elements = 1;
  for (int d = room.rank - 1; d >= 0; --d) {
    if (room.size(d) > 1 && room.stride(d) != elements) Wrong(name, value, "an array without gaps");
    elements *= room.size(d);
  }
  field = {room.data, elements * SizeOf(room.dtype)};
  return *this;
}

template <class AnyTensor>
Arguments& Arguments::ReadList(const char* name, std::span<const AnyTensor>& field,
                               std::deque<std::vector<AnyTensor>>& lists, bool writable) {
  const nb::handle value = Take(name);
  if (!value.is_valid()) return *this;
  if (!nb::isinstance<nb::sequence>(value)) Wrong(name, value, "a list of arrays");
  std::vector<AnyTensor>& list = lists.emplace_back();
  for (const nb::handle item : nb::borrow<nb::sequence>(value)) {
    list.push_back(View(std::string(name) + "[" + std::to_string(list.size()) + "]", item, writable));
  }
  field = list;
  return *this;
}

Arguments& Arguments::operator()(const char* name, std::span<const ConstTensor>& field) {
  return ReadList(name, field, inputs_, /*writable=*/false);
}

Arguments& Arguments::operator()(const char* name, std::span<const Tensor>& field) {
  return ReadList(name, field, outputs_, /*writable=*/true);
}

template <class... Inputs>
auto Arguments::Callback(nb::object function) const {
  return [function = std::move(function), failure = failure_, kernel = kernel_](
             std::span<const Inputs>... inputs, std::span<float> out) {
    const nb::gil_scoped_acquire locked;
    try {
      const nb::object result = nb::module_::import_("numpy").attr("ascontiguousarray")(
          function(ArrayOf(inputs)...), nb::arg("dtype") = "float32");
      const auto values = nb::cast<nb::ndarray<const float, nb::ndim<1>, nb::c_contig>>(result);
      if (values.shape(0) != out.size()) {
        throw nb::value_error((kernel + ": weighting gave " + std::to_string(values.shape(0)) +
                               " values for " + std::to_string(out.size()) + " routes")
                                  .c_str());
      }
      std::copy_n(values.data(), out.size(), out.data());
    } catch (...) {
      std::fill(out.begin(), out.end(), 0.0f);
      const std::lock_guard guard(failure->mutex);
      if (!failure->first) failure->first = std::current_exception();
    }
  };
}

Arguments& Arguments::operator()(const char* name, RouteWeighting& field) {
  const nb::handle value = Take(name);
  if (!value.is_valid()) return *this;
  constexpr const char* kNeeds = "a function, or the pair of it and its gradient";
  std::vector<nb::object> functions = {nb::borrow(value)};
  if (nb::isinstance<nb::sequence>(value)) functions = Cast<std::vector<nb::object>>(name, value, kNeeds);
  const bool callable = std::all_of(functions.begin(), functions.end(),
                                    [](const nb::object& f) { return PyCallable_Check(f.ptr()) != 0; });
  if (!callable || functions.empty() || functions.size() > 2) Wrong(name, value, kNeeds);
  field.forward = Callback<std::int32_t, float>(functions[0]);
  if (functions.size() == 2) field.backward = Callback<std::int32_t, float, float>(functions[1]);
  return *this;
}

void Arguments::RethrowFailure() const {
  if (failure_->first) std::rethrow_exception(failure_->first);
}

void Arguments::Finish() const {
  for (const auto& [key, value] : values_) {
    if (taken_.contains(TextOf(key))) continue;
    throw nb::type_error((kernel_ + ": there is no argument '" + TextOf(key) + "'").c_str());
  }
}

}  // namespace cubist::python
