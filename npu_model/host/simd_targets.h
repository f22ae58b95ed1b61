// The SIMD targets of the host's bodies: Highway's for x86, of which SSSE3 would serve CPUs of before 2010 alone, for a sixth of
// the time to compile them; of Arm's, NEON, since arrays of vectors need vectors of a known size. A source that has bodies for
// Ice Lake's bytes defines HWY_WANT_AVX3_DL above. Before any header of Highway.
#ifndef CUBIST_NPU_MODEL_HOST_SIMD_TARGETS_H_
#define CUBIST_NPU_MODEL_HOST_SIMD_TARGETS_H_

// Whether vectors are those of CPUs built before 2013: their bodies have fewer cases of their own, for the time to compile them.
#define CUBIST_OLD_CPU (HWY_TARGET == HWY_SSE4 || HWY_TARGET == HWY_SCALAR)

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SVE | HWY_SVE_256 | HWY_SVE2 | HWY_SVE2_128 | HWY_RVV)

#endif  // CUBIST_NPU_MODEL_HOST_SIMD_TARGETS_H_
