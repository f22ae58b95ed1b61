#include "bench/support/gemm.h"
#ifdef CUBIST_BENCH_ONEDNN
#include "bench/support/onednn.h"
#endif
#ifdef CUBIST_BENCH_OPENBLAS
#include "bench/support/openblas.h"
#endif

namespace cubist::bench {

std::vector<GemmLibrary> GemmPeers() {
  std::vector<GemmLibrary> peers;
#ifdef CUBIST_BENCH_ONEDNN
  peers.push_back(OneDnn());
  peers.push_back(OneDnnPacked());
#endif
#ifdef CUBIST_BENCH_OPENBLAS
  peers.push_back(OpenBlas());
#endif
  return peers;
}

}  // namespace cubist::bench
