#include "bench/support/random_data.h"

#include <algorithm>
#include <cstddef>
#include <new>
#include <random>
#include <set>

#include "npu_model/pages.h"

namespace cubist::bench {
namespace {

constexpr std::align_val_t kPage{4096};

// splitmix64 (Steele, Lea and Flood, 2014).
std::uint64_t Next(std::uint64_t& state) {
  std::uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// An odd multiple of 2^-23 in (-1, 1). Its first eleven bits never round to zero.
float Uniform(std::uint64_t bits) {
  const auto odd = static_cast<std::int32_t>(bits >> 40) | 1;
  return static_cast<float>(odd - (1 << 23)) * 0x1p-23f;
}

template <class T>
void Fill(T* data, std::int64_t count, std::uint64_t state) {
  for (std::int64_t i = 0; i < count; ++i) data[i] = static_cast<T>(Uniform(Next(state)));
}

}  // namespace

Bytes::Bytes(std::int64_t size)
    : data_(static_cast<char*>(
          ::operator new(static_cast<std::size_t>(std::max<std::int64_t>(size, 1)), kPage))) {
  AskForHugePages(data(), size);
}

void Bytes::Free::operator()(char* data) const { ::operator delete(data, kPage); }

void FillRandom(void* data, DType dtype, std::int64_t count, std::uint64_t seed) {
  std::uint64_t state = seed << 32;
  switch (dtype) {
    case DType::kBF16:
      Fill(static_cast<BF16*>(data), count, state);
      break;
    case DType::kF16:
      Fill(static_cast<F16*>(data), count, state);
      break;
    default:
      Fill(static_cast<float*>(data), count, state);
      break;
  }
}

Bytes RandomBytes(DType dtype, std::int64_t count, std::uint64_t seed) {
  Bytes bytes(count * SizeOf(dtype));
  FillRandom(bytes.data(), dtype, count, seed);
  return bytes;
}

Bytes RandomBits(std::int64_t size, std::uint64_t seed) {
  Bytes bytes(RoundUp(size, 8));
  auto* words = reinterpret_cast<std::uint64_t*>(bytes.data());
  std::uint64_t state = seed << 32;
  for (std::int64_t i = 0; i < CeilDiv(size, 8); ++i) words[i] = Next(state);
  return bytes;
}

std::vector<std::int64_t> Sample(std::int64_t limit, std::int64_t count) {
  static std::mt19937_64 random{std::random_device{}()};
  std::set<std::int64_t> sample = {0, limit - 1};
  while (static_cast<std::int64_t>(sample.size()) < std::min(limit, count)) {
    sample.insert(std::uniform_int_distribution<std::int64_t>(0, limit - 1)(random));
  }
  return {sample.begin(), sample.end()};
}

}  // namespace cubist::bench
