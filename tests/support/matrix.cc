#include "tests/support/matrix.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>

namespace cubist::testing {
namespace {

// Byte i of the pattern. The high byte of each 16-bit group is 0xff and the low one lies in [0x81, 0xfe],
// which makes every aligned bf16, fp16 and fp32 a NaN. The low bytes differ from place to place, so that a
// block which was moved by a few elements does not go unnoticed.
constexpr std::size_t kPeriod = 2 * 0x7e;
constexpr auto kPattern = [] {
  std::array<std::byte, kPeriod> pattern{};
  for (std::size_t i = 0; i < kPeriod; ++i)
    pattern[i] = i % 2 == 1 ? std::byte{0xff} : static_cast<std::byte>(0x81 + (i / 2 * 37) % 0x7e);
  return pattern;
}();

// The pattern's bytes from byte `at` on.
void PutPattern(std::byte* to, std::size_t at, std::size_t count) {
  for (std::size_t done = 0; done < count;) {
    const std::size_t place = (at + done) % kPeriod, part = std::min(count - done, kPeriod - place);
    std::memcpy(to + done, &kPattern[place], part);
    done += part;
  }
}

void StoreElement(const Tensor& x, std::int64_t offset, double value) {
  switch (x.dtype) {
    case DType::kI32:
      static_cast<std::int32_t*>(x.data)[offset] = static_cast<std::int32_t>(value);
      break;
    case DType::kBool:
      static_cast<std::uint8_t*>(x.data)[offset] = value != 0 ? 1 : 0;
      break;
    case DType::kI64:
      static_cast<std::int64_t*>(x.data)[offset] = static_cast<std::int64_t>(value);
      break;
    default:
      StoreFloat(x.data, x.dtype, offset, static_cast<float>(value));
      break;
  }
}

std::int64_t OffsetOf(const ConstTensor& x, std::initializer_list<std::int64_t> index) {
  std::int64_t offset = 0;
  int d = 0;
  for (std::int64_t i : index) offset += i * x.stride(d++);
  return offset;
}

template <class AnyTensor>
AnyTensor ExchangeLastTwo(AnyTensor x) {
  const auto last = static_cast<std::size_t>(x.rank - 1);
  std::swap(x.sizes[last - 1], x.sizes[last]);
  std::swap(x.strides[last - 1], x.strides[last]);
  return x;
}

}  // namespace

Matrix::Matrix(DType dtype, std::initializer_list<std::int64_t> sizes, const Layout& layout)
    : shape_(nullptr, dtype, sizes), offset_(layout.offset) {
  std::int64_t stride = layout.step;
  for (auto d = layout.order.rbegin(); d != layout.order.rend(); ++d) {
    if (*d >= shape_.rank) continue;
    shape_.strides[static_cast<std::size_t>(*d)] = stride;
    stride = stride * std::max<std::int64_t>(shape_.size(*d), 1) + layout.gap;
  }
  const std::int64_t bytes = (offset_ + stride) * SizeOf(dtype);
  lines_.resize(static_cast<std::size_t>(2 * kGuardLines + CeilDiv(bytes, 64)));
  PutPattern(lines_[0].bytes, 0, lines_.size() * 64);
}

std::byte* Matrix::data() { return lines_[kGuardLines].bytes + offset_ * SizeOf(shape_.dtype); }
const std::byte* Matrix::data() const { return lines_[kGuardLines].bytes + offset_ * SizeOf(shape_.dtype); }

Tensor Matrix::view() {
  Tensor view;
  view.data = data(), view.dtype = shape_.dtype, view.rank = shape_.rank;
  view.sizes = shape_.sizes, view.strides = shape_.strides;
  return view;
}

ConstTensor Matrix::view() const {
  ConstTensor view = shape_;
  view.data = data();
  return view;
}

Tensor Matrix::transposed() { return ExchangeLastTwo(view()); }
ConstTensor Matrix::transposed() const { return ExchangeLastTwo(view()); }

template <class F>
void Matrix::FillFrom(F next) {
  const Tensor x = view();
  ForEachElement(shape_, [&](const auto&, std::int64_t offset) { StoreElement(x, offset, next()); });
}

void Matrix::Fill(double value) {
  FillFrom([&] { return value; });
}

void Matrix::FillIntegers(Random& random, std::int64_t low, std::int64_t high) {
  FillFrom([&] { return static_cast<double>(random.Integer(low, high)); });
}

void Matrix::FillUniform(Random& random, double low, double high) {
  FillFrom([&] { return random.Uniform(low, high); });
}

void Matrix::FillNormal(Random& random, double mean, double stddev) {
  FillFrom([&] { return random.Normal(mean, stddev); });
}

void Matrix::FillNaN() { Fill(std::numeric_limits<double>::quiet_NaN()); }

double Matrix::at(std::initializer_list<std::int64_t> index) const {
  return LoadElement(view(), OffsetOf(shape_, index));
}

void Matrix::set(std::initializer_list<std::int64_t> index, double value) {
  StoreElement(view(), OffsetOf(shape_, index), value);
}

std::vector<double> Matrix::ToDoubles() const { return testing::ToDoubles(view()); }

::testing::AssertionResult Matrix::CheckGuards() const {
  const auto size = static_cast<std::size_t>(SizeOf(shape_.dtype));
  const auto first = static_cast<std::size_t>(data() - lines_[0].bytes);  // Byte of element 0.
  // The whole, its elements as they were made.
  std::vector<Line> found = lines_, made(lines_.size());
  std::byte *const found_bytes = found[0].bytes, *const made_bytes = made[0].bytes;
  ForEachElement(shape_, [&](const auto&, std::int64_t offset) {
    const std::size_t at = first + static_cast<std::size_t>(offset) * size;
    for (std::size_t b = at; b < at + size; ++b) found_bytes[b] = kPattern[b % kPeriod];
  });
  const std::size_t bytes = made.size() * sizeof(Line);
  PutPattern(made_bytes, 0, bytes);
  if (std::memcmp(found_bytes, made_bytes, bytes) == 0) return ::testing::AssertionSuccess();
  const auto at =
      static_cast<std::size_t>(std::mismatch(made_bytes, made_bytes + bytes, found_bytes).first - made_bytes);
  const std::int64_t byte = static_cast<std::int64_t>(at) - static_cast<std::int64_t>(first);
  return ::testing::AssertionFailure()
         << "a guard was overwritten: byte " << byte << " from element 0 (place "
         << byte / SizeOf(shape_.dtype) << " in elements of " << NameOf(shape_.dtype) << ") holds "
         << std::to_integer<int>(lines_[at / 64].bytes[at % 64]) << " instead of "
         << std::to_integer<int>(kPattern[at % kPeriod]);
}

double LoadElement(const ConstTensor& x, std::int64_t offset) {
  return IsFloat(x.dtype) ? LoadFloat(x.data, x.dtype, offset)
                          : static_cast<double>(LoadInt(x.data, x.dtype, offset));
}

std::vector<double> ToDoubles(const ConstTensor& x) {
  std::vector<double> values;
  values.reserve(static_cast<std::size_t>(x.count()));
  ForEachElement(x, [&](const auto&, std::int64_t offset) { values.push_back(LoadElement(x, offset)); });
  return values;
}

double RoundTo(DType dtype, double value) {
  float storage[2];  // Large and aligned enough for any float type.
  StoreFloat(storage, dtype, 0, static_cast<float>(value));
  return LoadFloat(storage, dtype, 0);
}

}  // namespace cubist::testing
