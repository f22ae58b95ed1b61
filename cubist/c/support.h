// What the C functions share: handles, arguments read into their C++ counterparts, errors kept for cubist_last_error.
#ifndef CUBIST_CUBIST_C_SUPPORT_H_
#define CUBIST_CUBIST_C_SUPPORT_H_

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <deque>
#include <exception>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "cubist/c.h"
#include "kernels/block.h"
#include "kernels/pack_operand.h"
#include "npu_model/device.h"
#include "npu_model/profile.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

struct cubist_device {
  cubist::Device device;
};
struct cubist_profile {
  cubist::Profile profile;
};
struct cubist_packed {
  cubist_packed() = default;
  cubist_packed(const cubist_packed&) = delete;
  cubist_packed& operator=(const cubist_packed&) = delete;
  ~cubist_packed();
  cubist::PackedOperand view;
  void* memory = nullptr;
};
struct cubist_block_state {
  cubist::BlockState state;
};

namespace cubist::c {

// Thrown and caught inside a call.
struct BadInput {
  std::string message;
};

// Keeps the message, without memory of its own, and gives the code back.
cubist_status Fail(cubist_status code, const char* message) noexcept;
cubist_status StatusOf(const Status& status) noexcept;

// Runs what a function does; nothing that it throws goes further.
template <class Run>
cubist_status Guarded(Run run) noexcept {
  try {
    return StatusOf(run());
  } catch (const BadInput& bad) {
    return Fail(CUBIST_INVALID_ARGUMENT, bad.message.c_str());
  } catch (const std::bad_alloc&) {
    return Fail(CUBIST_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    return Fail(CUBIST_INTERNAL, error.what());
  } catch (...) {
    return Fail(CUBIST_INTERNAL, "unknown error");
  }
}

// Where the fields of a struct stand, in bytes from its begin. Something that turns into a field of any type learns their types
// as a struct is made of it, one for each field.
class FieldPlaces {
 public:
  template <class Struct>
  static constexpr FieldPlaces Of() {
    FieldPlaces places;
    places.Make<Struct>();
    return places;
  }
  // Whether so many bytes are whole fields.
  constexpr bool AreWhole(std::size_t bytes) const {
    for (int i = 0; i < count_; ++i) {
      if (begins_[i] < bytes && bytes < ends_[i]) return false;
    }
    return true;
  }
  constexpr std::size_t last() const { return ends_[count_ - 1]; }

 private:
  struct Any {
    FieldPlaces* places;
    template <class Field>
    constexpr operator Field() const {             // NOLINT(google-explicit-constructor)
      places->Add(sizeof(Field), alignof(Field));  // NOLINT(bugprone-sizeof-expression)
      return {};
    }
  };
  template <class Struct, class... Anys>
  constexpr void Make(Anys... fields) {
    if constexpr (requires { Struct{fields..., Any{}}; }) {
      Make<Struct>(fields..., Any{this});
    } else {
      static_cast<void>(Struct{fields...});
    }
  }
  constexpr void Add(std::size_t bytes, std::size_t alignment) {
    const std::size_t begin = count_ == 0 ? 0 : (last() + alignment - 1) / alignment * alignment;
    begins_[count_] = begin, ends_[count_++] = begin + bytes;
  }

  int count_ = 0;
  std::size_t begins_[64] = {}, ends_[64] = {};
};

// The struct as this library knows it: what an earlier one lacked is as in `defaults`.
template <class Args>
Args Complete(const char* function, const Args* given, Args defaults, const std::string& name = "args") {
  const auto error = [&](const std::string& what) {
    return BadInput{std::string(function) + ": " + name + what};
  };
  static constexpr FieldPlaces kFields = FieldPlaces::Of<Args>();
  static_assert(kFields.last() <= sizeof(Args) && sizeof(Args) < kFields.last() + alignof(Args));
  if (given == nullptr) throw error(" is null");
  if (given->size < sizeof(std::size_t) * 2 || given->size > sizeof(Args) || !kFields.AreWhole(given->size)) {
    throw error(".size is " + std::to_string(given->size) + ", needs " + std::to_string(sizeof(Args)) +
                " or an earlier version's, where a field ends: initialise " + name +
                " with the macro beside its type");
  }
  std::memcpy(&defaults, given, given->size);
  return defaults;
}

// Reads arguments of one function. Lists live as long as the reader.
class Reader {
 public:
  explicit Reader(const char* function) : function_(function) {}

  const char* function() const { return function_; }

  template <class T>
  const T& NotNull(const char* name, const T* pointer) const {
    if (pointer == nullptr) throw Error(name, "is null");
    return *pointer;
  }

  Tensor Output(const char* name, const cubist_tensor& t) const {
    if (t.rank < 0 || t.rank > CUBIST_MAX_RANK)
      throw Error(name,
                  "has rank " + std::to_string(t.rank) + ", needs 0 to " + std::to_string(CUBIST_MAX_RANK));
    Tensor tensor;
    if (t.rank == 0) return tensor;
    tensor.data = t.data;
    tensor.dtype = Enum<DType>(std::string(name) + ".dtype", t.dtype, CUBIST_BOOL);
    tensor.rank = t.rank;
    std::copy_n(t.sizes, CUBIST_MAX_RANK, tensor.sizes.begin());
    std::copy_n(t.strides, CUBIST_MAX_RANK, tensor.strides.begin());
    return tensor;
  }

  // Of an enumeration whose values are 0 to `last`, in C as in C++. A caller may have put anything there: the bytes are
  // looked at before they count as an enumerator.
  template <class E, class CEnum>
  E Enum(const std::string& name, const CEnum& value, int last) const {
    static_assert(sizeof(CEnum) == sizeof(std::int32_t));
    std::int32_t number = 0;
    std::memcpy(&number, &value, sizeof number);
    if (number < 0 || number > last) {
      throw Error(name.c_str(), "is " + std::to_string(number) + ", which is none of the values 0 to " +
                                    std::to_string(last));
    }
    return static_cast<E>(number);
  }

  std::span<const Tensor> Outputs(const char* name, const cubist_tensor* list, std::size_t count) {
    return List(name, list, count, &outputs_);
  }

  // reader(name, from, to): a field of the struct in C, read into its counterpart.
  Reader& operator()(const char* name, const cubist_tensor& from, Tensor& to) {
    to = Output(name, from);
    return *this;
  }
  Reader& operator()(const char* name, const cubist_tensor& from, ConstTensor& to) {
    to = Output(name, from);
    return *this;
  }
  template <class T>
  requires std::is_arithmetic_v<T> Reader& operator()(const char*, const T& from, T& to) {
    to = from;
    return *this;
  }
  template <class T>
  Reader& operator()(const char*, const T* from, std::optional<T>& to) {
    if (from != nullptr) to = *from;
    return *this;
  }
  Reader& operator()(const char*, const cubist_range* from, std::optional<Range>& to) {
    if (from != nullptr) to = Range{from->begin, from->end};
    return *this;
  }
  Reader& operator()(const char*, const cubist_packed* from, PackedOperand& to) {
    if (from != nullptr) to = from->view;
    return *this;
  }
  Reader& operator()(const char*, const cubist_workspace& from, CallerWorkspace& to) {
    to = {from.data, from.bytes};
    return *this;
  }
  template <class CEnum, class E>
  Reader& operator()(const char* name, const CEnum& from, E& to, CEnum last) {
    to = Enum<E>(name, from, last);
    return *this;
  }
  // Of lists, with their counts.
  Reader& operator()(const char* name, const cubist_tensor* from, std::size_t count,
                     std::span<const ConstTensor>& to) {
    to = List(name, from, count, &inputs_);
    return *this;
  }
  Reader& operator()(const char* name, const cubist_tensor* from, std::size_t count,
                     std::span<const Tensor>& to) {
    to = List(name, from, count, &outputs_);
    return *this;
  }
  Reader& operator()(const char* name, const std::int64_t* from, std::size_t count,
                     std::span<const std::int64_t>& to) {
    CheckList(name, from, count);
    to = {from, count};
    return *this;
  }

  BadInput Error(const char* name, const std::string& what) const {
    return {std::string(function_) + ": " + name + " " + what};
  }

 private:
  void CheckList(const char* name, const void* list, std::size_t count) const {
    if (count > 0 && list == nullptr) throw Error(name, "is null, with a count of " + std::to_string(count));
  }
  template <class T>
  std::span<const T> List(const char* name, const cubist_tensor* list, std::size_t count,
                          std::deque<std::vector<T>>* kept) {
    CheckList(name, list, count);
    std::vector<T>& tensors = kept->emplace_back();
    for (std::size_t i = 0; i < count; ++i) tensors.push_back(Output(name, list[i]));
    return tensors;
  }

  const char* function_;
  std::deque<std::vector<ConstTensor>> inputs_;
  std::deque<std::vector<Tensor>> outputs_;
};

}  // namespace cubist::c

#endif  // CUBIST_CUBIST_C_SUPPORT_H_
