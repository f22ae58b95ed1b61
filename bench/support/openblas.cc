#include "bench/support/openblas.h"

#include <cblas.h>

#include <cstdlib>
#include <string_view>

// Exported, but in no header of OpenBLAS's own: what it does before a fork, and how it takes up the kernels of a core,
// where it was built with those of several.
extern "C" {
int blas_thread_shutdown_();
[[gnu::weak]] void gotoblas_dynamic_init();
[[gnu::weak]] void gotoblas_dynamic_quit();
}

namespace cubist::bench {
namespace {

// OpenBLAS takes a CPU that is younger than itself for one of 2004, and is a sixth as fast there as with the kernels that
// the CPU can run. Unless the caller chose, it gets those.
void TakeKernelsOfThisCpu() {
#if defined(__x86_64__)
  if (gotoblas_dynamic_init == nullptr || gotoblas_dynamic_quit == nullptr) return;
  if (std::string_view(openblas_get_corename()) != "Prescott" || !__builtin_cpu_supports("avx2")) return;
  setenv("OPENBLAS_CORETYPE", __builtin_cpu_supports("avx512dq") ? "SkylakeX" : "Haswell", /*overwrite=*/0);
  blas_thread_shutdown_();
  gotoblas_dynamic_quit();
  gotoblas_dynamic_init();
#endif
}

}  // namespace

GemmLibrary OpenBlas() {
  TakeKernelsOfThisCpu();
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
