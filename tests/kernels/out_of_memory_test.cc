// Every kernel with memory that ends at its first, second, .. allocation: the call says so, and the next one is right.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "kernels/loss_scale.h"
#include "kernels/mla_block.h"
#include "kernels/moe_block.h"
#include "kernels/pack_operand.h"
#include "npu_model/chip.h"
#include "npu_model/device.h"
#include "tests/support/limited_memory.h"
#include "tools/kernel_call.h"

namespace cubist::testing {
namespace {

std::vector<std::byte> BytesOf(const KernelCall& call) {
  std::vector<std::byte> bytes;
  for (const Tensor& out : call.outputs()) {
    std::int64_t count = 1;
    for (int d = 0; d < out.rank; ++d) count *= out.sizes[static_cast<std::size_t>(d)];
    const auto* data = static_cast<const std::byte*>(out.data);
    bytes.insert(bytes.end(), data, data + count * SizeOf(out.dtype));
  }
  return bytes;
}

struct NamedCall {
  std::string name;
  KernelCall call;
};

// Forward, then backward, with memory of their own between them.
KernelCall MoeBlockCall() {
  constexpr std::int64_t kTokens = 5, kHidden = 4, kExperts = 3, kWidth = 2, kShared = 3;
  KernelCall call(/*with_data=*/true);
  const auto in = [&](const Shape& shape) { return call.Input(DType::kF32, shape); };
  const auto out = [&](const Shape& shape) { return call.Output(DType::kF32, shape); };
  MoeBlockArgs args;
  args.x = in({kTokens, kHidden}), args.top_k = 2, args.out = out({kTokens, kHidden});
  args.weights = {.norm = in({kHidden}),
                  .router = in({kHidden, kExperts}),
                  .gate_up = in({kExperts, kHidden, 2 * kWidth}),
                  .down = in({kExperts, kWidth, kHidden}),
                  .shared_gate_up = in({kHidden, 2 * kShared}),
                  .shared_down = in({kShared, kHidden}),
                  .post_norm = in({kHidden})};
  MoeBlockGradArgs grad{.forward = args, .d_out = in({kTokens, kHidden}), .d_x = out({kTokens, kHidden})};
  grad.gradients = {.norm = out({kHidden}),
                    .router = out({kHidden, kExperts}),
                    .gate_up = out({kExperts, kHidden, 2 * kWidth}),
                    .down = out({kExperts, kWidth, kHidden}),
                    .shared_gate_up = out({kHidden, 2 * kShared}),
                    .shared_down = out({kShared, kHidden}),
                    .post_norm = out({kHidden})};
  call.set_run([grad](const Device& device, Profile*) -> Status {
    BlockState state;
    CUBIST_RETURN_IF_ERROR(MoeBlock(device, grad.forward, &state));
    return MoeBlockGrad(device, grad, &state);
  });
  return call;
}

KernelCall MlaBlockCall() {
  constexpr std::int64_t kTokens = 5, kHidden = 4, kRank = 3, kNope = 2, kRope = 2, kV = 3, kHeads = 2;
  KernelCall call(/*with_data=*/true);
  const auto in = [&](const Shape& shape) { return call.Input(DType::kF32, shape); };
  const auto out = [&](const Shape& shape) { return call.Output(DType::kF32, shape); };
  MlaBlockArgs args;
  args.x = in({kTokens, kHidden}), args.heads = kHeads, args.out = out({kTokens, kHidden});
  args.weights = {.norm = in({kHidden}),
                  .q_down = in({kHidden, kRank}),
                  .q_norm = in({kRank}),
                  .q_up = in({kRank, kHeads * (kNope + kRope)}),
                  .kv_down = in({kHidden, kRank + kRope}),
                  .kv_norm = in({kRank}),
                  .kv_up = in({kRank, kHeads * (kNope + kV)}),
                  .out = in({kHeads * kV, kHidden}),
                  .post_norm = in({kHidden})};
  MlaBlockGradArgs grad{.forward = args, .d_out = in({kTokens, kHidden}), .d_x = out({kTokens, kHidden})};
  grad.gradients = {.norm = out({kHidden}),
                    .q_down = out({kHidden, kRank}),
                    .q_norm = out({kRank}),
                    .q_up = out({kRank, kHeads * (kNope + kRope)}),
                    .kv_down = out({kHidden, kRank + kRope}),
                    .kv_norm = out({kRank}),
                    .kv_up = out({kRank, kHeads * (kNope + kV)}),
                    .out = out({kHeads * kV, kHidden}),
                    .post_norm = out({kHidden})};
  call.set_run([grad](const Device& device, Profile*) -> Status {
    BlockState state;
    CUBIST_RETURN_IF_ERROR(MlaBlock(device, grad.forward, &state));
    return MlaBlockGrad(device, grad, &state);
  });
  return call;
}

KernelCall PackOperandCall() {
  constexpr std::int64_t kBytes = 1 << 14;
  KernelCall call(/*with_data=*/true);
  PackOperandArgs args{.source = call.Input(DType::kF32, {7, 9})};
  args.data = call.Output(DType::kF32, {kBytes / 4}).data, args.bytes = kBytes;
  std::memset(args.data, 0, kBytes);
  call.set_run([args](const Device& device, Profile* profile) {
    PackedOperand packed;
    return PackOperand(device, args, &packed, profile);
  });
  return call;
}

KernelCall UnscaleCall() {
  KernelCall call(/*with_data=*/true);
  const ConstTensor given = call.Input(DType::kF32, {6});
  const Tensor gradient = call.Output(DType::kF32, {6});
  call.set_run([given, gradient](const Device&, Profile*) {
    std::memcpy(gradient.data, given.data, 6 * sizeof(float));
    bool apply = false;
    return LossScaler().Unscale({&gradient, 1}, &apply);
  });
  return call;
}

// All that allocates.
std::vector<NamedCall> Calls() {
  std::vector<NamedCall> calls;
  for (const KernelForm& form : KernelForms()) {
    KernelCallOptions options;
    options.kernel = form.name, options.shape = form.small, options.with_data = true;
    NamedCall& made = calls.emplace_back();
    made.name = form.name;
    EXPECT_TRUE(MakeKernelCall(options, &made.call).ok()) << form.name;
  }
  calls.push_back({"moe_block", MoeBlockCall()});
  calls.push_back({"mla_block", MlaBlockCall()});
  calls.push_back({"pack_operand", PackOperandCall()});
  calls.push_back({"loss_scale", UnscaleCall()});
  return calls;
}

// Runs with room for 0 allocations, then more, until one succeeds; `grow` is the factor between two limits.
void ExpectErrorsUntilThereIsRoom(const Device& device, const NamedCall& named, double grow) {
  SCOPED_TRACE(named.name + " on " + device.chip().name);
  const KernelCall& call = named.call;
  ASSERT_TRUE(call(device).ok());
  const std::vector<std::byte> right = BytesOf(call);

  std::int64_t failures = 0;
  for (std::int64_t room = 0;;
       room = std::max(room + 1, static_cast<std::int64_t>(static_cast<double>(room) * grow))) {
    ASSERT_LT(room, 100'000'000);
    Status status;
    // A thread of its own, which has no memory of earlier calls.
    std::thread([&] {
      const LimitedMemory limited(room);
      status = call(device);
    }).join();
    if (status.ok()) break;
    ++failures;
    ASSERT_EQ(status.code(), StatusCode::kOutOfMemory) << "room for " << room << ": " << status.message();
  }
  EXPECT_GT(failures, 0);
  ASSERT_TRUE(call(device).ok());
  EXPECT_EQ(BytesOf(call), right) << "after " << failures << " calls without memory";
}

// Blocks are many kernels, each of which is there alone.
double GrowthFor(const NamedCall& call, double of_kernels) {
  return call.name.ends_with("_block") ? std::max(of_kernels, 1.1) : of_kernels;
}

TEST(OutOfMemoryTest, HostKernelsSaySo) {
  for (const NamedCall& call : Calls()) {
    for (const int threads : {1, 2})
      ExpectErrorsUntilThereIsRoom(Host({.threads = threads}), call, GrowthFor(call, 1.0));
  }
}

TEST(OutOfMemoryTest, TheModelSaysSo) {
  for (const NamedCall& call : Calls())
    ExpectErrorsUntilThereIsRoom(Npu(Ascend910B2(), {}), call, GrowthFor(call, 1.3));
}

}  // namespace
}  // namespace cubist::testing
