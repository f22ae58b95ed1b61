#include "tools/owned_tensor.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <new>
#include <utility>

#include "npu_model/pages.h"
#include "npu_model/parallel.h"

namespace cubist {
namespace {

constexpr std::int64_t kGrain = 1 << 16;
constexpr std::align_val_t kAlignment{4096};
constexpr std::byte kGuard{0xa5};

template <class Word>
void FillWords(void* data, std::int64_t count, Word mark) {
  ForEachPart(count, kGrain, [&](std::int64_t begin, std::int64_t end) {
    std::fill(static_cast<Word*>(data) + begin, static_cast<Word*>(data) + end, mark);
  });
}

template <class Word>
std::int64_t CountWords(const void* data, std::int64_t count, Word mark) {
  const auto* words = static_cast<const Word*>(data);
  return ReduceParts(
      count, kGrain, std::int64_t{0},
      [&](std::int64_t begin, std::int64_t end) {
        return static_cast<std::int64_t>(std::count(words + begin, words + end, mark));
      },
      std::plus<>());
}

// Calls body with the bit pattern that marks elements of the dtype.
template <class Body>
auto WithMark(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kBF16:
      return body(std::uint16_t{0x7fd3});
    case DType::kF16:
      return body(std::uint16_t{0x7ed3});
    case DType::kBool:
      return body(std::uint8_t{0xd3});
    case DType::kI64:
      return body(std::uint64_t{0x7fd3a5c37fd3a5c3});
    default:
      return body(std::uint32_t{0x7fd3a5c3});
  }
}

}  // namespace

std::string ToString(const Shape& shape) { return fmt::format("({})", fmt::join(shape, ", ")); }

double MachineBytes() {
  return static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
}

std::int64_t BytesOf(DType dtype, const Shape& shape) {
  bool empty = false;
  std::int64_t bytes = SizeOf(dtype);
  for (std::int64_t size : shape) {  // Strides, too, must fit: sizes beside a 0 count.
    empty |= size == 0;
    if (size < 0 || __builtin_mul_overflow(bytes, std::max<std::int64_t>(size, 1), &bytes)) return -1;
  }
  return empty ? 0 : bytes;
}

Tensor ContiguousView(void* data, DType dtype, const Shape& shape) {
  CUBIST_CHECK(shape.size() <= Tensor::kMaxRank, fmt::format("rank {}", shape.size()));
  Tensor view;
  view.data = data, view.dtype = dtype, view.rank = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (std::size_t d = shape.size(); d-- > 0;) {
    view.sizes[d] = shape[d];
    view.strides[d] = stride;
    stride *= std::max<std::int64_t>(shape[d], 1);
  }
  return view;
}

void OwnedTensor::AlignedDelete::operator()(std::byte* data) const { ::operator delete[](data, kAlignment); }

OwnedTensor::OwnedTensor(DType dtype, Shape shape)
    : dtype_(dtype), shape_(std::move(shape)), bytes_(BytesOf(dtype, shape_)) {
  if (bytes_ < 0) throw std::bad_alloc();
  memory_.reset(static_cast<std::byte*>(
      ::operator new[](static_cast<std::size_t>(bytes_ + 2 * kGuardBytes), kAlignment)));
  AskForHugePages(memory_.get(), bytes_ + 2 * kGuardBytes);
}

void OwnedTensor::Mark() {
  WithMark(dtype_, [&](auto mark) { FillWords(data(), count(), mark); });
  std::fill_n(data() - kGuardBytes, kGuardBytes, kGuard);
  std::fill_n(data() + bytes_, kGuardBytes, kGuard);
}

std::int64_t OwnedTensor::CountMarked() const {
  return WithMark(dtype_, [&](auto mark) { return CountWords(data(), count(), mark); });
}

bool OwnedTensor::GuardsIntact() const {
  const auto intact = [](const std::byte* from) {
    return std::all_of(from, from + kGuardBytes, [](std::byte b) { return b == kGuard; });
  };
  return intact(data() - kGuardBytes) && intact(data() + bytes_);
}

std::uint64_t OwnedTensor::Digest() const {
  constexpr std::int64_t kBlock = 1 << 20;  // Blocks are digested side by side, and their digests summed.
  return ReduceParts(
      bytes_, kBlock, std::uint64_t{0},
      [&](std::int64_t begin, std::int64_t end) {
        std::uint64_t digest = 0xcbf29ce484222325u ^ static_cast<std::uint64_t>(begin / kBlock);
        for (std::int64_t at = begin; at < end; at += 8) {
          std::uint64_t word = 0;
          std::memcpy(&word, data() + at, static_cast<std::size_t>(std::min<std::int64_t>(8, end - at)));
          digest = (digest ^ word) * 0x100000001b3u;
        }
        return digest;
      },
      std::plus<>());
}

}  // namespace cubist
