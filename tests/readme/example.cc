#include <cstdio>
#include <vector>

#include "cubist/matmul.h"

int main() {
  const std::vector<float> a(256 * 512, 1.0f), b(512 * 128, 0.5f);
  std::vector<float> c(256 * 128);
  cubist::MatmulArgs args;
  args.a = cubist::ConstTensor(a.data(), {256, 512});
  args.b = cubist::ConstTensor(b.data(), {512, 128});
  args.c = cubist::Tensor(c.data(), {256, 128});

  // On this machine.
  if (const cubist::Status status = Matmul(cubist::Host(), args); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  }
  std::printf("c(0, 0) = %g\n", c[0]);

  // The same kernel, as the model sees it on an Ascend 910B2.
  cubist::Profile profile;
  if (!Matmul(cubist::Npu(cubist::Ascend910B2()), args, &profile).ok()) return 1;
  std::printf("%.1f us on %s, bound by %s, Cube busy %.0f %%\n", profile.time_s * 1e6, profile.chip.c_str(),
              profile.bound.c_str(), 100 * profile.cube_utilisation);
  return c[0] == 256.0f ? 0 : 1;
}
