// Computes with the kernel on this machine and on the modelled chip, then is a `cubist` command that knows it.
#include <cstdio>
#include <vector>

#include "cubist/command.h"
#include "scaled_add.h"

namespace {

int Fail(const char* what) {
  std::fprintf(stderr, "own_kernel: %s\n", what);
  return 1;
}

// out = 2 x + y on both executors, with the same bits.
int Compute() {
  constexpr std::int64_t kRows = 67, kCols = 130;
  std::vector<float> x(kRows * kCols), y(x.size()), host(x.size()), modelled(x.size());
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = static_cast<float>(i % 251), y[i] = static_cast<float>(i % 7);
  own::ScaledAddArgs args;
  args.x = cubist::ConstTensor(x.data(), {kRows, kCols});
  args.y = cubist::ConstTensor(y.data(), {kRows, kCols});
  args.alpha = 2;
  args.out = cubist::Tensor(host.data(), {kRows, kCols});
  if (const cubist::Status status = own::ScaledAdd(cubist::Host(), args); !status.ok())
    return Fail(status.message().c_str());
  args.out = cubist::Tensor(modelled.data(), {kRows, kCols});
  cubist::Profile profile;
  if (const cubist::Status status = own::ScaledAdd(cubist::Npu(cubist::Ascend910B2()), args, &profile);
      !status.ok())
    return Fail(status.message().c_str());
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (host[i] != 2 * x[i] + y[i]) return Fail("wrong on the host");
  }
  if (modelled != host) return Fail("other bits on the model");
  if (!(profile.time_s > 0)) return Fail("no time on the model");
  args.y = cubist::ConstTensor(y.data(), {kRows, kCols - 1});
  const cubist::Status refused = own::ScaledAdd(cubist::Host(), args);
  if (refused.ok() || refused.message().find("129") == std::string::npos) return Fail("a wrong shape passed");
  return 0;
}

void MakeScaledAdd(const cubist::Shape& s, cubist::DType dtype, const cubist::KernelCallOptions&,
                   cubist::KernelCall* call) {
  own::ScaledAddArgs args;
  args.x = call->Input(dtype, {s[0], s[1]});
  args.y = call->Input(dtype, {s[0], s[1]});
  args.out = call->Output(dtype, {s[0], s[1]});
  args.alpha = 0.5f;
  call->set_run([args](const cubist::Device& device, cubist::Profile* profile) {
    return own::ScaledAdd(device, args, profile);
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 1) return Compute();
  const cubist::Status status =
      cubist::RegisterKernel({"scaled_add", "ROWSxCOLS", "4096x7168", "50x33", 2}, &MakeScaledAdd);
  if (!status.ok()) return Fail(status.message().c_str());
  return cubist::CommandMain(argc, argv);
}
