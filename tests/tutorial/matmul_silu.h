// The tutorial's kernel as a call. See kernels/TUTORIAL.md.
#ifndef CUBIST_TESTS_TUTORIAL_MATMUL_SILU_H_
#define CUBIST_TESTS_TUTORIAL_MATMUL_SILU_H_

#include <concepts>
#include <type_traits>
#include <vector>

#include "npu_model/device.h"
#include "npu_model/status.h"
#include "npu_model/types.h"
#include "tests/tutorial/matmul_silu_kernel.h"

namespace tutorial {

// [contract]
// out(i, j) = silu(sum over p of a(i, p) b(p, j) + bias(j))
//
//   a (M, K), b (K, N)   one dtype: fp32, bf16 or fp16;   bias (N)   fp32 or that dtype
//   out (M, N)           fp32 or that dtype
struct MatmulSiluArgs {
  ConstTensor a, b, bias;
  Tensor out;
};

Status MatmulSilu(const Device& device, const MatmulSiluArgs& args, Profile* profile = nullptr);
// [contract]

// Problems of one tile, on one core.
Status OneTile(const Device& device, const MatmulSiluArgs& args, Profile* profile = nullptr);

// [fields]
// The tiling as named numbers, for tunings; and what ChooseFor asks of it.
template <class Tiling, class Visit>
requires std::same_as<std::remove_const_t<Tiling>, MatmulSiluTiling>
void VisitFields(const ChipSpec& chip, const MatmulShape& shape, Tiling& t, Visit&& visit) {
  VisitFields(chip, shape, t.product, visit);
  visit({"strip", 1, 1 << 20}, t.strip);
}
inline void Complete(const ChipSpec& chip, const MatmulShape& shape, MatmulSiluTiling& t) {
  Complete(chip, shape, t.product);
}

std::vector<MatmulSiluTiling> Tilings(const ChipSpec& chip, const MatmulShape& shape);
bool Fits(const ChipSpec& chip, const MatmulShape& shape, const MatmulSiluTiling& tiling);
double Price(const ChipSpec& chip, const MatmulShape& shape, const MatmulSiluTiling& tiling);
Status Choose(const ChipSpec& chip, const MatmulShape& shape, MatmulSiluTiling* tiling);
// [fields]

}  // namespace tutorial

#endif  // CUBIST_TESTS_TUTORIAL_MATMUL_SILU_H_
