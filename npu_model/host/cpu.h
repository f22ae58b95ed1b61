// CPUs that are told apart beyond their SIMD target, where measurements say that another way is the quicker one.
#ifndef CUBIST_NPU_MODEL_HOST_CPU_H_
#define CUBIST_NPU_MODEL_HOST_CPU_H_

#include <cstdint>

namespace cubist {

enum class Cpu : std::uint8_t {
  kOther,
  kZen4,  // AMD's family 19h, whose members without AVX-512 are Zen 3.
  kZen5,  // Family 1Ah.
};

// By name and not by a clock: what a tiling is chosen by must be the same in every run.
Cpu ThisCpu();

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_HOST_CPU_H_
