#include "bench/support/openblas.h"

#include <cblas.h>

#include <chrono>
#include <thread>

namespace cubist::bench {

GemmLibrary OpenBlas() {
  GemmLibrary library;
  library.name = "openblas";
  library.supports = [](DType input, DType output) { return input == DType::kF32 && output == DType::kF32; };
  library.prepare = [](const Gemm& gemm, int threads) -> GemmRun {
    openblas_set_num_threads(threads);
    return [gemm](std::size_t copy) {
      const auto m = static_cast<blasint>(gemm.m), n = static_cast<blasint>(gemm.n),
                 k = static_cast<blasint>(gemm.k);
      cblas_sgemm(CblasRowMajor, gemm.transpose_a ? CblasTrans : CblasNoTrans,
                  gemm.transpose_b ? CblasTrans : CblasNoTrans, m, n, k, 1.0f,
                  static_cast<const float*>(gemm.a), gemm.transpose_a ? m : k,
                  static_cast<const float*>(gemm.b[copy]), gemm.transpose_b ? k : n, 0.0f,
                  static_cast<float*>(gemm.c), n);
    };
  };
  // A worker spins for 2^26 clock ticks after its last task, then sleeps.
  library.rest = [] { std::this_thread::sleep_for(std::chrono::milliseconds(40)); };
  return library;
}

}  // namespace cubist::bench
