// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, 2011), word by word as the paper has it.
#ifndef CUBIST_REFERENCE_PHILOX_H_
#define CUBIST_REFERENCE_PHILOX_H_

#include <array>
#include <cstdint>

namespace cubist::reference {

// The four words of a counter, given by its lower and upper half.
inline std::array<std::uint32_t, 4> PhiloxWords(std::uint64_t seed, std::uint64_t low, std::uint64_t high) {
  std::uint64_t counter[4] = {low & 0xffffffffu, low >> 32, high & 0xffffffffu, high >> 32};
  std::uint64_t keys[2] = {seed & 0xffffffffu, seed >> 32};
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = counter[0] * 0xD2511F53u, b = counter[2] * 0xCD9E8D57u;
    counter[0] = (b >> 32) ^ counter[1] ^ keys[0];
    counter[1] = b & 0xffffffffu;
    counter[2] = (a >> 32) ^ counter[3] ^ keys[1];
    counter[3] = a & 0xffffffffu;
    keys[0] = (keys[0] + 0x9E3779B9u) & 0xffffffffu;
    keys[1] = (keys[1] + 0xBB67AE85u) & 0xffffffffu;
  }
  return {static_cast<std::uint32_t>(counter[0]), static_cast<std::uint32_t>(counter[1]),
          static_cast<std::uint32_t>(counter[2]), static_cast<std::uint32_t>(counter[3])};
}

}  // namespace cubist::reference

#endif  // CUBIST_REFERENCE_PHILOX_H_
