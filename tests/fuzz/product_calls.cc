// Calls of the products.
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "kernels/grouped_matmul.h"
#include "kernels/matmul.h"
#include "kernels/pack_operand.h"
#include "tests/fuzz/caller.h"

namespace cubist::fuzz {

namespace {

constexpr Activation kActivations[] = {Activation::kNone, Activation::kRelu, Activation::kSilu,
                                       Activation::kGelu, Activation::kGeluTanh};

// What becomes of a product of shape `sizes`, which is written to `out`.
template <class Args>
void GiveEpilogue(Caller& in, std::initializer_list<std::int64_t> sizes, const Tensor& out, Args* args) {
  if (in.choose().Seldom()) args->alpha = in.choose().Number();
  if (in.choose().Seldom()) args->beta = in.choose().Number();
  args->activation = in.choose().Often() ? Activation::kNone : in.choose().Of(kActivations);
  if (in.choose().Often()) return;
  args->residual = in.choose().Below(2) == 0 ? ConstTensor(out) : in.Of(in.Float(), sizes);
}

}  // namespace

void CallMatmul(Caller& in) {
  const std::int64_t m = in.Size(), n = in.Size(), k = in.Size();
  const DType dtype = in.Float();
  MatmulArgs args;
  args.transpose_a = in.choose().Below(2) == 1;
  args.transpose_b = in.choose().Below(2) == 1;
  args.a = args.transpose_a ? in.Of(dtype, {k, m}) : in.Of(dtype, {m, k});
  args.b = args.transpose_b ? in.Of(dtype, {n, k}) : in.Of(dtype, {k, n});
  args.bias = in.Maybe(in.Float(), {n});
  args.accumulate = in.choose().Seldom();
  args.any_order = in.choose().Seldom();
  args.c = in.Of(args.accumulate ? DType::kF32 : in.Float(), {m, n});
  if (!args.accumulate) GiveEpilogue(in, {m, n}, args.c, &args);
  if (in.choose().Seldom()) {
    args.a = in.Of(dtype, {k}), args.transpose_a = false;
    args.c = in.Of(args.c.dtype, {n});
  } else if (in.choose().Seldom()) {
    args.b = in.Of(dtype, {k}), args.transpose_b = false, args.bias = {};
    args.c = in.Of(args.c.dtype, {m});
  }
  in.Run([&](const Device& device) { return Matmul(device, args); });
}

void CallBatchedMatmul(Caller& in) {
  const std::int64_t m = in.Size(), n = in.Size(), k = in.Size(), outer = in.choose().Below(3),
                     inner = in.choose().Below(4);
  const DType dtype = in.Float();
  MatmulArgs args;
  args.a = in.choose().Often() ? in.Of(dtype, {outer, inner, m, k}) : in.Of(dtype, {inner, m, k});
  args.b = in.choose().Often() ? in.Of(dtype, {1, inner, k, n}) : in.Of(dtype, {k, n});
  args.c = in.Of(in.Float(), {outer, inner, m, n});
  GiveEpilogue(in, {outer, inner, m, n}, args.c, &args);
  if (in.choose().Seldom()) {
    args.a = in.Of(dtype, {2, 1, outer, 1, m, k});
    args.c = in.Of(args.c.dtype, {2, 3, outer, inner, m, n});
  }
  in.Run([&](const Device& device) { return Matmul(device, args); });
}

void CallPackedMatmul(Caller& in) {
  const std::int64_t m = in.Size(), n = in.Size(), k = in.Size();
  const DType dtype = in.Float();
  PackOperandArgs pack;
  pack.source = in.Of(dtype, {k, n});
  pack.transpose = in.choose().Seldom();
  alignas(kPackedAlignment) static std::array<std::byte, 1 << 16> packed;
  pack.data = packed.data() + (in.choose().Seldom() ? 4 : 0);
  pack.bytes = in.choose().Seldom() ? in.Size() : std::int64_t{1} << 15;
  PackedOperand operand;
  if (!PackOperand(Host(), pack, &operand).ok()) return;
  MatmulArgs args;
  args.a = in.Of(dtype, {m, k});
  args.packed_b = operand;
  if (in.choose().Seldom()) args.packed_b.bytes = in.Size();
  if (in.choose().Seldom()) args.packed_b.rows = in.Size();
  args.c = in.Of(dtype, {m, n});
  in.Run([&](const Device&) { return Matmul(Host(), args); });
}

void CallGroupedMatmul(Caller& in) {
  const std::int64_t m = in.Size() * 4, n = in.Size(), k = in.Size(), e = in.Size();
  const DType dtype = in.Float();
  GroupedMatmulArgs args;
  args.group_list = in.choose().Seldom() ? GroupList::kEnds : GroupList::kCounts;
  args.groups = in.Of(in.choose().Of(kInts), {e});
  args.x = in.Of(dtype, {m, k});
  args.transpose_weights = in.choose().Below(2) == 1;
  args.weights = args.transpose_weights ? in.Of(dtype, {e, n, k}) : in.Of(dtype, {e, k, n});
  args.bias = in.Maybe(in.Float(), {e, n});
  args.out = in.Of(in.Float(), {m, n});
  GiveEpilogue(in, {m, n}, args.out, &args);
  std::vector<ConstTensor> list;
  if (in.choose().Seldom()) {
    for (std::int64_t i = in.Size(); i > 0; --i) list.push_back(in.Of(dtype, {k, n}));
    args.weights = {}, args.weight_list = list;
  }
  in.Run([&](const Device& device) { return GroupedMatmul(device, args); });
}

void CallGroupedMatmulGrad(Caller& in) {
  const std::int64_t m = in.Size() * 4, n = in.Size(), k = in.Size(), e = in.Size();
  const DType dtype = in.Float();
  GroupedMatmulGradArgs args;
  args.dy = in.Of(dtype, {m, n});
  args.groups = in.Of(in.choose().Of(kInts), {e});
  args.group_list = in.choose().Seldom() ? GroupList::kEnds : GroupList::kCounts;
  args.transpose_weights = in.choose().Seldom();
  const std::int64_t rows = args.transpose_weights ? n : k, cols = args.transpose_weights ? k : n;
  args.weights = in.Maybe(dtype, {e, rows, cols});
  args.dx = in.Maybe(dtype, {m, k});
  args.x = in.Maybe(dtype, {m, k});
  args.accumulate_dw = in.choose().Seldom();
  args.dw = in.Maybe(in.choose().Often() ? DType::kF32 : dtype, {e, rows, cols});
  in.Run([&](const Device& device) { return GroupedMatmulGrad(device, args); });
}

}  // namespace cubist::fuzz
