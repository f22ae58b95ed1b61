// Every kernel's header, one product computed, one refused, and one predicted.
#include <cstdio>
#include <cstring>
#include <vector>

#include "cubist/cubist.h"
#include "kernels/matmul.h"

int main() {
  if (OwnMatmul() != 42) return 1;
  const std::vector<float> a(64 * 96, 1.0f), b(96 * 80, 0.5f);
  std::vector<float> c(64 * 80);
  cubist::MatmulArgs args;
  args.a = cubist::ConstTensor(a.data(), {64, 96});
  args.b = cubist::ConstTensor(b.data(), {96, 80});
  args.c = cubist::Tensor(c.data(), {64, 80});
  if (const cubist::Status status = cubist::Matmul(cubist::Host(), args); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  }
  for (const float x : c) {
    if (x != 48.0f) return 1;
  }
  cubist::Profile profile;
  if (!cubist::Matmul(cubist::Npu(cubist::Ascend910B2(), {.with_data = false}), args, &profile).ok())
    return 1;
  if (!(profile.time_s > 0)) return 1;
  args.b = cubist::ConstTensor(b.data(), {95, 80});
  if (cubist::Matmul(cubist::Host(), args).ok()) return 1;
  // The other kernels link, and say what they lack.
  using cubist::Host;
  return cubist::GroupedMatmul(Host(), {}).ok() || cubist::GroupedMatmulGrad(Host(), {}).ok() ||
         cubist::FlashAttention(Host(), {}).ok() || cubist::FlashAttentionGrad(Host(), {}).ok() ||
         cubist::TokenPermute(Host(), {}).ok() || cubist::TokenUnpermute(Host(), {}).ok() ||
         cubist::TokenPermuteGrad(Host(), {}).ok() || cubist::TokenUnpermuteGrad(Host(), {}).ok() ||
         cubist::Route(Host(), {}).ok() || cubist::RouteGrad(Host(), {}).ok() ||
         cubist::RmsNorm(Host(), {}).ok() || cubist::RmsNormGrad(Host(), {}).ok() ||
         cubist::SwiGlu(Host(), {}).ok() || cubist::SwiGluGrad(Host(), {}).ok() ||
         cubist::PackOperand(Host(), {}, nullptr).ok() ||
         std::strcmp(cubist::Version(), CUBIST_VERSION_STRING) != 0;
}
