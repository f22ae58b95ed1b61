// Seeded random numbers, the same on every platform.
#ifndef CUBIST_TESTS_SUPPORT_RANDOM_H_
#define CUBIST_TESTS_SUPPORT_RANDOM_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>

namespace cubist::testing {

// The seed of this run: the environment's CUBIST_TEST_SEED, or a fixed number.
inline std::uint64_t RunSeed() {
  const char* text = std::getenv("CUBIST_TEST_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 0) : 20240607;
}

// SplitMix64 (Steele, Lea and Flood, 2014). While one lives on the stack, failures print its seed.
class Random {
 public:
  explicit Random(std::uint64_t seed = RunSeed())
      : trace_(__FILE__, __LINE__, ::testing::Message() << "seed " << seed), state_(seed) {}

  std::uint64_t Bits() {
    state_ += 0x9e3779b97f4a7c15u;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // In [low, high].
  std::int64_t Integer(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(Bits() % static_cast<std::uint64_t>(high - low + 1));
  }
  // In [low, high).
  double Uniform(double low = 0, double high = 1) {
    return low + (high - low) * (static_cast<double>(Bits() >> 11) * 0x1p-53);
  }
  // The sum of twelve uniform numbers: as good as normal within three deviations, never beyond six, and a tenth of the
  // time of logarithms and cosines.
  double Normal(double mean = 0, double stddev = 1) {
    constexpr int kParts = 4;  // of 16 bits
    std::uint64_t sum = 0;
    for (int word = 0; word < 3; ++word) {
      const std::uint64_t bits = Bits();
      for (int part = 0; part < kParts; ++part) sum += (bits >> (16 * part)) & 0xffff;
    }
    constexpr double kMiddle = 3 * kParts * 65535 / 2.0;
    return mean + stddev * ((static_cast<double>(sum) - kMiddle) / 65536);
  }

 private:
  ::testing::ScopedTrace trace_;
  std::uint64_t state_;
};

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_SUPPORT_RANDOM_H_
