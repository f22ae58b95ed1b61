#include "bench/support/openblas.h"

#include <cblas.h>

// What OpenBLAS does before a fork. Exported, but in no header of its own.
extern "C" int blas_thread_shutdown_();

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
  // A worker spins for a tenth of a second after its last task, and after it was made, when the library was loaded. This
  // ends them; the next product starts new ones.
  library.rest = [] { blas_thread_shutdown_(); };
  return library;
}

}  // namespace cubist::bench
