// The `cubist` command with the tutorial's kernel beside the library's.
#include "cubist/command.h"
#include "tests/tutorial/matmul_silu.h"
#include "tools/kernel_call.h"

// [register]
namespace {

void MakeMatmulSilu(const cubist::Shape& s, cubist::DType dtype, const cubist::KernelCallOptions&,
                    cubist::KernelCall* call) {
  tutorial::MatmulSiluArgs args;
  args.a = call->Input(dtype, {s[0], s[2]});
  args.b = call->Input(dtype, {s[2], s[1]});
  args.bias = call->Input(cubist::DType::kF32, {s[1]});
  args.out = call->Output(dtype, {s[0], s[1]});
  call->set_run([args](const cubist::Device& device, cubist::Profile* profile) {
    return tutorial::MatmulSilu(device, args, profile);
  });
}

}  // namespace

int main(int argc, char** argv) {
  const cubist::Status status =
      cubist::RegisterKernel({"matmul_silu", "MxNxK", "2048x4096x1024", "100x90x70", 3}, &MakeMatmulSilu);
  return status.ok() ? cubist::CommandMain(argc, argv) : 2;
}
// [register]
