// Matrix products as the benchmark gives them to a library.
#ifndef CUBIST_BENCH_SUPPORT_GEMM_H_
#define CUBIST_BENCH_SUPPORT_GEMM_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "npu_model/types.h"

namespace cubist::bench {

// c (m, n) = op(a) op(b), all row-major and contiguous. `b` holds equal copies of the right operand: runs
// take them in turn where the operand is to come from memory, not from the caches.
struct Gemm {
  DType input = DType::kF32, output = DType::kF32;
  bool transpose_a = false, transpose_b = false;
  std::int64_t m = 0, n = 0, k = 0;
  void* a = nullptr;
  std::vector<void*> b;
  void* c = nullptr;
};

// One library's product with the given copy of b. Everything that a caller does once is done.
using GemmRun = std::function<void(std::size_t copy)>;

struct GemmLibrary {
  std::string name;
  bool (*supports)(DType input, DType output);
  std::function<GemmRun(const Gemm& gemm, int threads)> prepare;
  // Puts the library's waiting threads to sleep.
  std::function<void()> rest;
};

// The peers that were found at configure time.
std::vector<GemmLibrary> GemmPeers();

}  // namespace cubist::bench

#endif  // CUBIST_BENCH_SUPPORT_GEMM_H_
