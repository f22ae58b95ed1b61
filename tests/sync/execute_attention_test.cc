// Attention's phases around the products executed on real bytes: rows turned to their positions, and packed keys.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>

#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"
#include "npu_model/device.h"
#include "npu_model/tuning.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/shapes.h"
#include "tests/sync/executed_call.h"

namespace cubist::testing {
namespace {

// Attention, forward or backward, of 4 heads that share one of keys, whose rows are turned: parts of their own, or the
// first columns of q and k.
struct TurnedCase {
  bool grad = false;
  std::int64_t sq = 40, rope = 0;
  bool apart = true;
  DType dtype = DType::kF32;
  RopeLayout layout = RopeLayout::kHalf;
};

template <class Args>
Args TurnedInputs(const TurnedCase& c, KernelCall* call) {
  Args args;
  args.q = call->Input(c.dtype, {1, 4, c.sq, 44}), args.k = call->Input(c.dtype, {1, 1, 50, 44});
  args.v = call->Input(c.dtype, {1, 1, 50, 24});
  if (c.apart) {
    args.q_rope = call->Input(c.dtype, {1, 4, c.sq, c.rope});
    args.k_rope = call->Input(c.dtype, {1, 1, 50, c.rope});
  }
  // Every third of the tables has each angle twice, side by side, up to the last.
  const std::int64_t half = c.rope / 2, step = half % 3 == 1 ? 2 : 1;
  const auto table = [&] {
    const ConstTensor all = call->Input(DType::kF32, {90 * step * half});
    return ConstTensor(all.data, DType::kF32, {90, half}, {step * half, step});
  };
  args.rope.cos = table(), args.rope.sin = table();
  args.rope.layout = c.layout, args.rope.q_offset = 7;
  return args;
}

NamedCall TurnedCall(const TurnedCase& c) {
  NamedCall made{Join(c.grad ? "gradient" : "attention", " of ", c.sq, " rows, ", NameOf(c.dtype),
                      ", turned ", c.rope, c.apart ? " apart" : "", ", layout ", static_cast<int>(c.layout)),
                 KernelCall(/*with_data=*/true)};
  KernelCall& call = made.call;
  if (!c.grad) {
    auto args = TurnedInputs<FlashAttentionArgs>(c, &call);
    args.out = call.Output(c.dtype, {1, 4, c.sq, 24});
    call.set_run([=](const Device& device, Profile* p) { return FlashAttention(device, args, p); });
    return made;
  }
  auto args = TurnedInputs<FlashAttentionGradArgs>(c, &call);
  args.out = call.Input(c.dtype, {1, 4, c.sq, 24}), args.dout = call.Input(c.dtype, {1, 4, c.sq, 24});
  args.lse = call.Input(DType::kF32, {1, 4, c.sq});
  args.dq = call.Output(c.dtype, {1, 4, c.sq, 44}), args.dk = call.Output(c.dtype, {1, 1, 50, 44});
  args.dv = call.Output(c.dtype, {1, 1, 50, 24});
  if (c.apart) {
    args.dq_rope = call.Output(c.dtype, {1, 4, c.sq, c.rope});
    args.dk_rope = call.Output(c.dtype, {1, 1, 50, c.rope});
  }
  call.set_run([=](const Device& device, Profile* p) { return FlashAttentionGrad(device, args, p); });
  return made;
}

// Of any width: halves that are no whole blocks of UB have a gap behind the first.
TEST(ExecuteAttentionTest, RowsTurnedByAnyWidthComputeTheSame) {
  for (const std::int64_t rope : {6, 10, 20, 32, 40}) {
    for (const DType dtype : kFloatTypes) {
      for (const bool apart : {false, true}) {
        const auto layout = static_cast<RopeLayout>((rope / 2 + (apart ? 1 : 0)) % 3);
        // Many rows, and few, whose heads are rows of one matrix; and backward, where each output is one tensor.
        for (const std::int64_t sq : {40, 2}) {
          for (const bool grad : {false, true}) {
            if (grad && !apart) continue;
            ExpectRightOn(Ascend910B2(), TurnedCall({grad, sq, rope, apart, dtype, layout}));
          }
        }
      }
    }
  }
}

// The device, but that attention's keys are packed before it.
Device Packing(const Device& device, const FlashAttentionArgs& args) {
  if (device.kind() == Device::Kind::kHost) return device;
  TilingChoice choice;
  auto asked = std::make_shared<Tuning>(), packing = std::make_shared<Tuning>();
  asked->on_choice = [&](const TilingChoice& c) { choice = c; };
  NpuOptions options{.with_data = false, .tuning = asked};
  EXPECT_TRUE(FlashAttention(Npu(device.chip(), options), args).ok());
  packing->Set(choice.kernel, choice.chip, choice.shape, "pack_kv=1");
  options = device.npu(), options.tuning = packing;
  return Npu(device.chip(), options);
}

// Heads are columns of a token's row, as of many keys: those are packed.
TEST(ExecuteAttentionTest, PackedKeysOfHeadsSideBySideComputeTheSame) {
  static constexpr std::int64_t kSequences[] = {17, 40};
  for (const DType dtype : kFloatTypes) {
    for (const std::int64_t rope : {0, 16}) {
      for (const int kind : {0, 1, 2}) {  // All keys, a window, two sequences.
        NamedCall made{Join("packed, ", NameOf(dtype), " rope ", rope, " kind ", kind),
                       KernelCall(/*with_data=*/true)};
        KernelCall& call = made.call;
        const auto turned = [](auto x, std::int64_t heads, std::int64_t cols) {
          return decltype(x)(x.data, x.dtype, {1, heads, 40, cols},
                             {40 * heads * cols, cols, heads * cols, 1});
        };
        const auto input = [&](std::int64_t heads, std::int64_t cols) {
          return turned(call.Input(dtype, {1, 40, heads, cols}), heads, cols);
        };
        FlashAttentionArgs args;
        args.q = input(4, 24), args.k = input(2, 24), args.v = input(2, 40);
        if (rope > 0) args.q_rope = input(4, rope), args.k_rope = input(1, rope);
        args.out = turned(call.Output(dtype, {1, 40, 4, 40}), 4, 40);
        if (kind == 1) args.window = AttentionWindow{9, 3};
        if (kind == 2) args.lengths = {kSequences, kSequences};
        call.set_run(
            [=](const Device& device, Profile* p) { return FlashAttention(Packing(device, args), args, p); });
        ExpectRightOn(Ascend910B2(), made, "pack_kernel.h");
      }
    }
  }
}

}  // namespace
}  // namespace cubist::testing
