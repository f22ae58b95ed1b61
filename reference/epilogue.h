// What becomes of a product's sums, naively.
#ifndef CUBIST_REFERENCE_EPILOGUE_H_
#define CUBIST_REFERENCE_EPILOGUE_H_

#include <cstdint>
#include <vector>

#include "npu_model/types.h"
#include "reference/matmul.h"

namespace cubist::reference {

// max(x, 0); x / (1 + exp(-x)); x Phi(x), Phi the normal distribution; its approximation by tanh.
enum class Activation : std::uint8_t { kNone, kRelu, kSilu, kGelu, kGeluTanh };
double Activate(Activation activation, double x);

struct Epilogue {
  double alpha = 1, beta = 1;
  ConstTensor bias = {}, residual = {};  // (N), (M, N), or not given
  Activation activation = Activation::kNone;
};

// activation(alpha * product + bias + beta * residual), row-major, and how far a kernel may be from it that works in
// fp32 and rounds to `output`.
struct EpilogueResult {
  std::vector<double> c, bounds;
};
EpilogueResult ApplyEpilogue(const MatmulResult& product, std::int64_t k, DType input, DType output,
                             const Epilogue& epilogue, std::int64_t n);

}  // namespace cubist::reference

#endif  // CUBIST_REFERENCE_EPILOGUE_H_
