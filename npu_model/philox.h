// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3, 2011): random numbers that
// are functions of their position alone, so that no order of work changes them.
#ifndef CUBIST_NPU_MODEL_PHILOX_H_
#define CUBIST_NPU_MODEL_PHILOX_H_

#include <array>
#include <cstdint>

#include "npu_model/instruction.h"

namespace cubist {

using PhiloxBlock = std::array<std::uint32_t, 4>;

// The block of the four elements 4 * block .. 4 * block + 3 of a stream.
inline PhiloxBlock Philox(const RandomStream& stream, std::uint64_t block) {
  PhiloxBlock x = {static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32), stream.stream,
                   0};
  auto key0 = static_cast<std::uint32_t>(stream.seed), key1 = static_cast<std::uint32_t>(stream.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * x[0], p1 = std::uint64_t{0xCD9E8D57u} * x[2];
    x = {static_cast<std::uint32_t>(p1 >> 32) ^ x[1] ^ key0, static_cast<std::uint32_t>(p1),
         static_cast<std::uint32_t>(p0 >> 32) ^ x[3] ^ key1, static_cast<std::uint32_t>(p0)};
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  return x;
}

// In (0, 1): odd multiples of 2^-24, which never round to an end.
inline float UniformOf(std::uint32_t bits) { return (static_cast<float>(bits >> 9) + 0.5f) * 0x1p-23f; }

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_PHILOX_H_
