// The native bf16 bodies of the Cube table: AVX512-BF16, which Highway 1.0.3 cannot express.
#ifndef CUBIST_NPU_MODEL_HOST_CUBE_BF16_AVX512_H_
#define CUBIST_NPU_MODEL_HOST_CUBE_BF16_AVX512_H_

#include <cstdint>

#include "npu_model/types.h"

namespace cubist {

// One register tile of a Mmad, operands in the layouts of MmadArgs. The sums start from row i of `start`, at
// start + i * start_pitch, or from zero where it is null.
template <class T>
struct MmadTile {
  std::int64_t words = 0;  // Steps of k: elements of fp32, pairs of bf16.
  const T* a = nullptr;
  std::int64_t a_pitch = 0;
  const T* b = nullptr;
  std::int64_t b_step = 0;      // Elements of b from word to word.
  const T* prefetch = nullptr;  // As long as b: what to bring into L2 meanwhile, a word of k per step.
  float* c = nullptr;
  std::int64_t c_pitch = 0;
  const float* start = nullptr;
  std::int64_t start_pitch = 0;
};
template <class T>
using MmadTileFunction = void (*)(const MmadTile<T>&);

// The tile of VDPBF16PS, as large as that of fp32 on AVX-512: kBF16TilesAvx512[r - 1] computes r <= 12 rows
// of 32 columns. Each step adds two products per lane; denormal operands and results count as zero. Only
// where HasBF16Avx512().
bool HasBF16Avx512();
extern const MmadTileFunction<BF16> kBF16TilesAvx512[12];
std::int64_t PeakDotBF16Avx512(std::int64_t rounds);

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_HOST_CUBE_BF16_AVX512_H_
