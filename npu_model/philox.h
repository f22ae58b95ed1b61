// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3, 2011): random numbers that
// are functions of their position alone, so that no order of work changes them.
#ifndef CUBIST_NPU_MODEL_PHILOX_H_
#define CUBIST_NPU_MODEL_PHILOX_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "npu_model/instruction.h"

namespace cubist {

using PhiloxBlock = std::array<std::uint32_t, 4>;

inline constexpr int kPhiloxRounds = 10;
inline constexpr std::uint32_t kPhiloxFactors[] = {0xD2511F53u, 0xCD9E8D57u};
inline constexpr std::uint32_t kPhiloxSteps[] = {0x9E3779B9u,
                                                 0xBB67AE85u};  // Of the key, from round to round.

// The block of a 128-bit counter, lower half first.
inline PhiloxBlock PhiloxOf(std::uint64_t seed, std::uint64_t low, std::uint64_t high) {
  PhiloxBlock x = {static_cast<std::uint32_t>(low), static_cast<std::uint32_t>(low >> 32),
                   static_cast<std::uint32_t>(high), static_cast<std::uint32_t>(high >> 32)};
  auto key0 = static_cast<std::uint32_t>(seed), key1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const std::uint64_t p0 = std::uint64_t{kPhiloxFactors[0]} * x[0],
                        p1 = std::uint64_t{kPhiloxFactors[1]} * x[2];
    x = {static_cast<std::uint32_t>(p1 >> 32) ^ x[1] ^ key0, static_cast<std::uint32_t>(p1),
         static_cast<std::uint32_t>(p0 >> 32) ^ x[3] ^ key1, static_cast<std::uint32_t>(p0)};
    key0 += kPhiloxSteps[0], key1 += kPhiloxSteps[1];
  }
  return x;
}

// The block of the four elements 4 * block .. 4 * block + 3 of a stream.
inline PhiloxBlock Philox(const RandomStream& stream, std::uint64_t block) {
  return PhiloxOf(stream.seed, block, stream.stream);
}

// Whether the weight of a row and a key is dropped. Eight keys share a block, 16 bits each, the lower ones first; it is
// kept where they are below stream.kept.
inline bool IsDropped(const DropoutStream& stream, std::int64_t row, std::int64_t key) {
  const std::int64_t block = row * stream.row_blocks + key / 8;
  const PhiloxBlock x = PhiloxOf(stream.seed, static_cast<std::uint64_t>(block), stream.offset);
  return (x[static_cast<std::size_t>(key % 8 / 2)] >> (key % 2 * 16) & 0xffffu) >= stream.kept;
}

// In (0, 1): odd multiples of 2^-24, which never round to an end.
inline float UniformOf(std::uint32_t bits) { return (static_cast<float>(bits >> 9) + 0.5f) * 0x1p-23f; }

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_PHILOX_H_
