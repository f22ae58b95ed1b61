// CPUs that are told apart beyond their SIMD target, where measurements say that another way is the quicker one.
#ifndef CUBIST_NPU_MODEL_HOST_CPU_H_
#define CUBIST_NPU_MODEL_HOST_CPU_H_

#include <cstdint>

namespace cubist {

enum class Cpu : std::uint8_t {
  kOther,
  kZen3,  // AMD's family 19h without AVX-512,
  kZen4,  // and with it.
  kZen5,  // Family 1Ah.
  kIntel,
};

// By name and not by a clock: what a tiling is chosen by must be the same in every run.
Cpu ThisCpu();

// Whether L1 holds 48 KiB and two multiply-adds of 512 bits a cycle read from it: Zen 5, and Intel's cores since Ice Lake, which
// those before are taken for. Few rows meet B in rows by lines of it there, and packed panels by pieces.
inline bool HasRoomyL1() { return ThisCpu() == Cpu::kZen5 || ThisCpu() == Cpu::kIntel; }

// Whether operands of products are asked for into the first-level cache, rather than the second. On a Zen 5 loads wait for
// requests into the second: packed panels from memory pass 8 and 12 rows 1.1 times as fast, columns in place one to twelve rows
// 1.05 to 1.2 times. Rows of B in place, of which a line each is asked for, would take 1.1 to 1.3 times as long.
inline bool AsksNear() { return ThisCpu() == Cpu::kZen5; }

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_HOST_CPU_H_
