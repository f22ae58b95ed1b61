// Keyword arguments of a call from Python, read into the fields of a kernel's Args.
#ifndef CUBIST_PYTHON_ARGUMENTS_H_
#define CUBIST_PYTHON_ARGUMENTS_H_

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/pack_operand.h"
#include "kernels/route.h"
#include "npu_model/device.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist::python {

namespace nb = nanobind;

// What a Status says, as the exception that Python knows: ValueError, or MemoryError.
void Raise(const Status& status);

// Sizes and an element type without memory: what a model that does not compute takes in place of an array.
struct Spec {
  std::vector<std::int64_t> shape;
  DType dtype = DType::kF32;
};
// "fp32", "bf16", "fp16", "int32", "int64", "bool"; anything else is a ValueError.
DType DTypeNamed(const std::string& name);
nb::dlpack::dtype DlpackOf(DType dtype);

// Memory as kernels like it: zeroed, on a cache line's boundary.
std::shared_ptr<std::byte[]> AlignedMemory(std::size_t bytes);

// An operand packed into memory of its own.
struct Packed {
  std::shared_ptr<std::byte[]> memory;
  PackedOperand operand;
};

// A value given by keyword is taken once, by the name of the field; None counts as not given and leaves the field as it
// is. Arrays come through DLPack or the buffer protocol and are never copied; they stay alive as long as this does.
class Arguments {
 public:
  Arguments(std::string kernel, nb::dict values) : kernel_(std::move(kernel)), values_(std::move(values)) {}

  Arguments& operator()(const char* name, ConstTensor& field);
  Arguments& operator()(const char* name, Tensor& field);
  Arguments& operator()(const char* name, PackedOperand& field);
  Arguments& operator()(const char* name, bool& field);
  Arguments& operator()(const char* name, float& field);
  Arguments& operator()(const char* name, std::int64_t& field);
  Arguments& operator()(const char* name, std::uint64_t& field);
  Arguments& operator()(const char* name, std::optional<float>& field);
  Arguments& operator()(const char* name, std::optional<std::int64_t>& field);
  Arguments& operator()(const char* name, std::optional<Range>& field);
  Arguments& operator()(const char* name, std::span<const std::int64_t>& field);
  Arguments& operator()(const char* name, CallerWorkspace& field);
  Arguments& operator()(const char* name, std::span<const ConstTensor>& field);
  Arguments& operator()(const char* name, std::span<const Tensor>& field);
  // A function of Python, or (forward, backward): each takes and gives arrays of one token's routes.
  Arguments& operator()(const char* name, RouteWeighting& field);

  // One of the texts given, each with its value.
  template <class Value>
  Arguments& operator()(const char* name, Value& field,
                        std::initializer_list<std::pair<const char*, Value>> choices) {
    const nb::handle value = Take(name);
    if (!value.is_valid()) return *this;
    std::string text, known;
    const bool is_text = nb::try_cast(value, text);
    for (const auto& [choice, meaning] : choices) {
      if (is_text && text == choice) {
        field = meaning;
        return *this;
      }
      known += (known.empty() ? "'" : ", '") + std::string(choice) + "'";
    }
    Wrong(name, value, "one of " + known);
  }

  // Names of the fields so far.
  const std::set<std::string>& taken() const { return taken_; }
  // Throws a TypeError that names what no field has taken.
  void Finish() const;
  // Throws what the first function of the caller's that failed had thrown: none may throw through a kernel.
  void RethrowFailure() const;

 private:
  // Written by the threads of a call.
  struct Failure {
    std::mutex mutex;
    std::exception_ptr first;
  };
  // `function` of arrays, as a kernel calls it: without the interpreter's lock. What cannot be had becomes zeros.
  template <class... Inputs>
  auto Callback(nb::object function) const;

  // Null where the name is not among the values, or None.
  nb::handle Take(const char* name);
  [[noreturn]] void Wrong(const char* name, nb::handle value, const std::string& needs) const;
  template <class Value>
  Value Cast(const char* name, nb::handle value, const char* needs) const;
  template <class Number>
  Arguments& Read(const char* name, Number& field, const char* needs);
  // The view of an array, which `writable` says is written.
  Tensor View(const std::string& name, nb::handle value, bool writable);
  template <class AnyTensor>
  Arguments& ReadList(const char* name, std::span<const AnyTensor>& field,
                      std::deque<std::vector<AnyTensor>>& lists, bool writable);

  std::string kernel_;
  nb::dict values_;
  std::set<std::string> taken_;
  std::deque<nb::ndarray<nb::ro>> kept_;
  std::deque<std::vector<std::int64_t>> integers_;
  std::deque<std::vector<ConstTensor>> inputs_;
  std::deque<std::vector<Tensor>> outputs_;
  std::shared_ptr<Failure> failure_ = std::make_shared<Failure>();
};

}  // namespace cubist::python

#endif  // CUBIST_PYTHON_ARGUMENTS_H_
