// OpenBLAS as a peer. Only where CUBIST_BENCH_OPENBLAS is defined.
#ifndef CUBIST_BENCH_SUPPORT_OPENBLAS_H_
#define CUBIST_BENCH_SUPPORT_OPENBLAS_H_

#include "bench/support/gemm.h"

namespace cubist::bench {

// cblas_sgemm; fp32 alone. A CPU that OpenBLAS does not know gets kernels that it can run.
GemmLibrary OpenBlas();

}  // namespace cubist::bench

#endif  // CUBIST_BENCH_SUPPORT_OPENBLAS_H_
