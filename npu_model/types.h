// The vocabulary that every folder shares: element types, strided tensors, ranges. It depends on nothing.
#ifndef CUBIST_NPU_MODEL_TYPES_H_
#define CUBIST_NPU_MODEL_TYPES_H_

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "npu_model/export.h"

namespace cubist {

// bfloat16: the upper half of a float. Conversion rounds to nearest, ties to even; NaN stays (quiet) NaN.
struct BF16 {
  std::uint16_t bits = 0;

  BF16() = default;
  explicit BF16(float value) {
    const auto u = std::bit_cast<std::uint32_t>(value);
    const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
    bits = static_cast<std::uint16_t>(is_nan ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
};

// IEEE binary16, with subnormals. Conversion rounds to nearest, ties to even; NaN stays (quiet) NaN.
struct F16 {
  std::uint16_t bits = 0;

  F16() = default;
  explicit F16(float value) {
    const auto u = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (u >> 16) & 0x8000u;
    const std::uint32_t magnitude = u & 0x7fffffffu;
    std::uint32_t half;
    if (magnitude > 0x7f800000u) {
      half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    } else if (magnitude >= 0x47800000u) {  // 65536 and above; 65520..65535 round up to infinity below.
      half = 0x7c00u;
    } else if (magnitude >= 0x38800000u) {  // Normal in binary16: rebias the exponent by 127 - 15.
      half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    } else {  // Subnormal or zero: adding 0.5 aligns the last mantissa bit with 2^-24 and rounds in hardware.
      const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
      half = std::bit_cast<std::uint32_t>(aligned) - 0x3f000000u;
    }
    bits = static_cast<std::uint16_t>(sign | half);
  }
  explicit operator float() const {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
    const std::uint32_t exponent = (bits >> 10) & 0x1fu, mantissa = bits & 0x3ffu;
    if (exponent == 0) {
      const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
      return sign != 0 ? -magnitude : magnitude;
    }
    const std::uint32_t rebased = exponent == 31 ? 0xffu : exponent + 112u;
    return std::bit_cast<float>(sign | (rebased << 23) | (mantissa << 13));
  }
};

// kBool is a byte that is true where it is not 0, whatever its value: bool and uint8 tensors alike.
enum class DType : std::uint8_t { kF32, kBF16, kF16, kI32, kI64, kBool };

// Of numbers that are no dtype, which a caller's cast can make, the size is 1: validation has to live to name them.
constexpr std::int64_t SizeOf(DType dtype) {
  constexpr std::int64_t kSizes[] = {4, 2, 2, 4, 8, 1};
  return dtype <= DType::kBool ? kSizes[static_cast<int>(dtype)] : 1;
}
constexpr bool IsFloat(DType dtype) { return dtype <= DType::kF16; }
constexpr const char* NameOf(DType dtype) {
  constexpr const char* kNames[] = {"fp32", "bf16", "fp16", "int32", "int64", "bool"};
  return dtype <= DType::kBool ? kNames[static_cast<int>(dtype)] : "of no known dtype";
}

template <class T>
constexpr DType DTypeOf() {
  using U = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<U, float>) return DType::kF32;
  if constexpr (std::is_same_v<U, BF16>) return DType::kBF16;
  if constexpr (std::is_same_v<U, F16>) return DType::kF16;
  if constexpr (std::is_same_v<U, std::int32_t>) return DType::kI32;
  if constexpr (std::is_same_v<U, std::int64_t>) return DType::kI64;
  if constexpr (std::is_same_v<U, bool> || std::is_same_v<U, std::uint8_t>) return DType::kBool;
}

// The rounding error of one operation, as a share of its result.
constexpr double UnitRoundoff(DType dtype) {
  return dtype == DType::kBF16 ? 0x1p-8 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-24;
}

// A non-owning view of up to six dimensions: element (i, j, ..) stands at data + i*strides[0] + j*strides[1]
// + .. Strides count elements; negative ones step down. A default-constructed tensor means "not given".
template <class Void>
struct BasicTensor {
  static constexpr int kMaxRank = 6;
  using Sizes = std::array<std::int64_t, kMaxRank>;

  Void* data = nullptr;
  DType dtype = DType::kF32;
  int rank = 0;
  Sizes sizes{};
  Sizes strides{};

  BasicTensor() = default;

  // A contiguous tensor, the last dimension innermost.
  BasicTensor(Void* data, DType dtype, std::initializer_list<std::int64_t> size_list)
      : data(data), dtype(dtype), rank(static_cast<int>(size_list.size())) {
    Copy(size_list, &sizes);
    std::uint64_t stride = 1;  // Unsigned: an absurd size must not overflow before validation names it.
    for (int d = std::min(rank, kMaxRank) - 1; d >= 0; --d) {
      strides[static_cast<std::size_t>(d)] = static_cast<std::int64_t>(stride);
      stride *= static_cast<std::uint64_t>(std::max<std::int64_t>(sizes[static_cast<std::size_t>(d)], 1));
    }
  }
  BasicTensor(Void* data, DType dtype, std::initializer_list<std::int64_t> size_list,
              std::initializer_list<std::int64_t> stride_list)
      : BasicTensor(data, dtype, size_list) {
    Copy(stride_list, &strides);
  }
  // A contiguous tensor of a known element type.
  template <class T>
  requires(!std::is_void_v<T> && std::is_convertible_v<T*, Void*>)
      BasicTensor(T* data, std::initializer_list<std::int64_t> size_list)
      : BasicTensor(data, DTypeOf<T>(), size_list) {}
  template <class T>
  requires(!std::is_void_v<T> && std::is_convertible_v<T*, Void*>)
      BasicTensor(T* data, std::initializer_list<std::int64_t> size_list,
                  std::initializer_list<std::int64_t> stride_list)
      : BasicTensor(data, DTypeOf<T>(), size_list, stride_list) {}

  // A writable tensor reads as a constant one.
  operator BasicTensor<const void>() const requires(!std::is_const_v<Void>) {
    BasicTensor<const void> view;
    view.data = data, view.dtype = dtype, view.rank = rank, view.sizes = sizes, view.strides = strides;
    return view;
  }

  bool given() const { return rank > 0; }
  std::int64_t size(int d) const { return sizes[static_cast<std::size_t>(d)]; }
  std::int64_t stride(int d) const { return strides[static_cast<std::size_t>(d)]; }
  std::int64_t count() const {
    std::int64_t n = 1;
    for (int d = 0; d < rank; ++d) n *= size(d);
    return n;
  }
  // Elements from the lowest to the highest one, and from the lowest to the one at index 0; of sizes that a call admits.
  std::int64_t extent() const { return Reach(1) + Reach(-1) + 1; }
  std::int64_t origin() const { return Reach(-1); }

 private:
  // How far elements stand from the one at index 0, upwards (1) or downwards (-1).
  std::int64_t Reach(std::int64_t sign) const {
    std::int64_t reach = 0;
    for (int d = 0; d < rank; ++d)
      if (size(d) > 1 && sign * stride(d) > 0) reach += (size(d) - 1) * sign * stride(d);
    return reach;
  }
  // What is beyond kMaxRank is left out: validation names the rank.
  static void Copy(std::initializer_list<std::int64_t> list, Sizes* to) {
    std::copy_n(list.begin(), std::min<std::size_t>(list.size(), kMaxRank), to->begin());
  }
};
using Tensor = BasicTensor<void>;
using ConstTensor = BasicTensor<const void>;

// Element of a tensor of any float type, as float. For code that is read more often than it is run.
inline float LoadFloat(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::kBF16:
      return static_cast<float>(static_cast<const BF16*>(data)[index]);
    case DType::kF16:
      return static_cast<float>(static_cast<const F16*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}
inline void StoreFloat(void* data, DType dtype, std::int64_t index, float value) {
  switch (dtype) {
    case DType::kBF16:
      static_cast<BF16*>(data)[index] = BF16(value);
      break;
    case DType::kF16:
      static_cast<F16*>(data)[index] = F16(value);
      break;
    default:
      static_cast<float*>(data)[index] = value;
  }
}
// Element of an integer tensor; of a boolean one 0 or 1.
inline std::int64_t LoadInt(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::kI64:
      return static_cast<const std::int64_t*>(data)[index];
    case DType::kBool:
      return static_cast<const std::uint8_t*>(data)[index] != 0 ? 1 : 0;
    default:
      return static_cast<const std::int32_t*>(data)[index];
  }
}

constexpr std::int64_t CeilDiv(std::int64_t a, std::int64_t b) { return a / b + (a % b > 0 ? 1 : 0); }
constexpr std::int64_t RoundUp(std::int64_t a, std::int64_t b) { return CeilDiv(a, b) * b; }

// Half-open interval [begin, end).
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  constexpr std::int64_t size() const { return end - begin; }
  constexpr bool empty() const { return end <= begin; }
  constexpr Range From(std::int64_t origin) const { return {begin - origin, end - origin}; }
  friend constexpr bool operator==(const Range&, const Range&) = default;
};

// The pieces of a range, each `step` long but the last; iterate with `for (Range r : Split(n, step))`.
class Split {
 public:
  constexpr Split(Range whole, std::int64_t step) : whole_(whole), step_(std::max<std::int64_t>(step, 1)) {}
  constexpr Split(std::int64_t size, std::int64_t step) : Split(Range{0, size}, step) {}

  class Iterator {
   public:
    constexpr Iterator(const Split* split, std::int64_t i) : split_(split), i_(i) {}
    constexpr Range operator*() const { return (*split_)[i_]; }
    constexpr Iterator& operator++() {
      ++i_;
      return *this;
    }
    constexpr bool operator!=(const Iterator& other) const { return i_ != other.i_; }

   private:
    const Split* split_;
    std::int64_t i_;
  };
  constexpr Iterator begin() const { return {this, 0}; }
  constexpr Iterator end() const { return {this, count()}; }
  constexpr std::int64_t count() const {
    return std::max(at_least_, CeilDiv(std::max<std::int64_t>(whole_.size(), 0), step_));
  }
  constexpr Range operator[](std::int64_t i) const {
    const std::int64_t begin = whole_.begin + i * step_;
    return {begin, step_ < whole_.end - begin ? begin + step_ : whole_.end};
  }

 private:
  friend constexpr Split AtLeastOnce(Split split);

  Range whole_;
  std::int64_t step_;
  std::int64_t at_least_ = 0;
};

// The same pieces, but an empty range is walked as one empty piece.
constexpr Split AtLeastOnce(Split split) {
  split.at_least_ = 1;
  return split;
}

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_TYPES_H_
