// What a caller of GroupedMatmul and GroupedMatmulGrad can get wrong.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/grouped_matmul.h"
#include "tests/kernels/bad_call.h"
#include "tests/support/random.h"

namespace cubist::testing {
namespace {

// (9, 5) rows in groups of 4, 0 and 3; two more.
struct ForwardFixture {
  ForwardFixture() {
    Random random;
    for (Matrix* m : {&x, &weights, &bias}) m->FillUniform(random);
    for (Matrix& m : each) m.FillUniform(random);
    Assign(counts.view(), std::array{4.0, 0.0, 3.0});
  }
  GroupedMatmulArgs args() {
    list = {each[0].view(), each[1].view(), each[2].view()};
    return {.x = x.view(),
            .groups = counts.view(),
            .weights = weights.view(),
            .bias = bias.view(),
            .out = out.view()};
  }
  std::vector<const Matrix*> all() const {
    return {&x, &counts, &weights, &bias, &out, &each[0], &each[1], &each[2]};
  }

  Matrix x{DType::kF32, {9, 5}}, counts{DType::kI64, {3}}, weights{DType::kF32, {3, 5, 7}},
      bias{DType::kF32, {3, 7}}, out{DType::kF32, {9, 7}};
  std::array<Matrix, 3> each = {Matrix(DType::kF32, {5, 7}), Matrix(DType::kF32, {5, 7}),
                                Matrix(DType::kF32, {5, 7})};
  static inline std::array<ConstTensor, 3> list;
};
using Forward = BadCall<GroupedMatmulArgs>;

Status RunForward(const Device& device, const GroupedMatmulArgs& args) { return GroupedMatmul(device, args); }

void UseList(GroupedMatmulArgs& x) { x.weights = {}, x.weight_list = ForwardFixture::list; }

// Other groups than the fixture's, at a place of their own.
template <class Args>
void SetGroups(Args& args, std::array<std::int64_t, 3> values) {
  static std::array<std::int64_t, 3> memory;
  memory = values;
  args.groups = ConstTensor(memory.data(), {3});
}

TEST(GroupedBadArgumentsTest, ForwardShapes) {
  const std::string who = "grouped_matmul: ";
  const std::vector<Forward> calls = {
      {"groups listed in no known way",
       [](auto& x) { x.group_list = static_cast<GroupList>(9); },
       {who + "group_list is 9, the last is 1"}},
      {"x missing", [](auto& x) { x.x = {}; }, {who + "x is not given"}},
      {"groups missing", [](auto& x) { x.groups = {}; }, {who + "groups is not given"}},
      {"weights missing", [](auto& x) { x.weights = {}; }, {who + "weights is not given"}},
      {"out missing", [](auto& x) { x.out = {}; }, {who + "out is not given"}},
      {"x of rank 3", [](auto& x) { x.x.rank = 3; }, {who + "x", "rank 3", "2"}},
      {"groups of rank 2", [](auto& x) { x.groups.rank = 2; }, {who + "groups", "rank 2", "1"}},
      {"weights of rank 2", [](auto& x) { x.weights.rank = 2; }, {who + "weights", "rank 2", "3"}},
      {"out of rank 1", [](auto& x) { x.out.rank = 1; }, {who + "out", "rank 1", "2"}},
      {"bias of rank 1", [](auto& x) { x.bias.rank = 1; }, {who + "bias", "rank 1", "2"}},
      {"both weights",
       [](auto& x) { x.weight_list = ForwardFixture::list; },
       {who + "weights and weight_list"}},
      {"a short list",
       [](auto& x) { UseList(x), x.weight_list = x.weight_list.first(2); },
       {who + "weight_list has 2", "3", "E"}},
      {"E of weights", [](auto& x) { x.weights.sizes[0] = 2; }, {who + "weights", "size 2", "E", "needs 3"}},
      {"K of weights", [](auto& x) { x.weights.sizes[1] = 4; }, {who + "weights", "size 4", "K", "needs 5"}},
      {"N of weights", [](auto& x) { x.weights.sizes[2] = 8; }, {who + "weights", "size 8", "N", "needs 7"}},
      {"transposed only",
       [](auto& x) { x.transpose_weights = true; },
       {who + "weights", "size 5", "N", "needs 7"}},
      {"K of one in the list",
       [](auto& x) {
         UseList(x);
         ForwardFixture::list[1].sizes[0] = 6;
       },
       {who + "weight_list[1]", "size 6", "K", "needs 5"}},
      {"M of out", [](auto& x) { x.out.sizes[0] = 8; }, {who + "out", "size 8", "M", "needs 9"}},
      {"E of bias", [](auto& x) { x.bias.sizes[0] = 1; }, {who + "bias", "size 1", "E", "needs 3"}},
      {"N of bias", [](auto& x) { x.bias.sizes[1] = 6; }, {who + "bias", "size 6", "N", "needs 7"}},
      {"M negative", [](auto& x) { x.x.sizes[0] = x.out.sizes[0] = -1; }, {who + "x", "-1", "M"}},
  };
  ExpectErrors<ForwardFixture>(calls, RunForward);
}

TEST(GroupedBadArgumentsTest, ForwardGroups) {
  const std::string who = "grouped_matmul: groups ";
  const std::vector<Forward> calls = {
      {"of no dtype", [](auto& x) { x.groups.dtype = kNoDType; }, {who, "no known dtype", "int32 or int64"}},
      {"fp32", [](auto& x) { x.groups.dtype = DType::kF32; }, {who, "fp32", "int32 or int64"}},
      {"null", [](auto& x) { x.groups = WithoutData(x.groups); }, {who, "null"}},
      {"negative count",
       [](auto& x) {
         SetGroups(x, {4, -2, 3});
       },
       {who, "-2 at (1)", "0"}},
      {"too many rows",
       [](auto& x) {
         SetGroups(x, {4, 0, 6});
       },
       {who, "6 at (2)", "4 rows before", "M, 9"}},
      {"counts that overflow",
       [](auto& x) {
         constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
         SetGroups(x, {1, kMost, kMost});
       },
       {who, "at (1)", "M, 9"}},
      {"ends descend",
       [](auto& x) {
         x.group_list = GroupList::kEnds, SetGroups(x, {4, 3, 9});
       },
       {who, "3 at (1) after 4"}},
      {"end negative",
       [](auto& x) {
         x.group_list = GroupList::kEnds, SetGroups(x, {-1, 3, 9});
       },
       {who, "-1 at (0)"}},
      {"end beyond M",
       [](auto& x) {
         x.group_list = GroupList::kEnds, SetGroups(x, {4, 4, 10});
       },
       {who, "10 at (2)", "M is 9"}},
  };
  ExpectErrors<ForwardFixture>(calls, RunForward);
}

TEST(GroupedBadArgumentsTest, ForwardTypesAndStorage) {
  const std::string who = "grouped_matmul: ";
  const std::vector<Forward> calls = {
      {"x int32", [](auto& x) { x.x.dtype = DType::kI32; }, {who + "x", "int32", "fp32", "bf16", "fp16"}},
      {"weights bf16",
       [](auto& x) { x.weights.dtype = DType::kBF16; },
       {who + "weights", "bf16", "needs fp32"}},
      {"x of no dtype", [](auto& x) { x.x.dtype = kNoDType; }, {who + "x", "no known dtype", "fp32", "bf16"}},
      {"out int32", [](auto& x) { x.out.dtype = DType::kI32; }, {who + "out", "int32", "needs fp32"}},
      {"bias int64", [](auto& x) { x.bias.dtype = DType::kI64; }, {who + "bias", "int64", "needs fp32"}},
      {"residual of x's width",
       [](auto& x) { x.residual = x.x; },
       {who + "residual", "size 5", "N, of out", "needs 7"}},
      {"activation unknown",
       [](auto& x) { x.activation = static_cast<Activation>(7); },
       {who + "activation is 7", "4"}},
      {"x null", [](auto& x) { x.x = WithoutData(x.x); }, {who + "x", "null"}},
      {"weights null", [](auto& x) { x.weights = WithoutData(x.weights); }, {who + "weights", "null"}},
      {"bias null", [](auto& x) { x.bias = WithoutData(x.bias); }, {who + "bias", "null"}},
      {"out null", [](auto& x) { x.out = WithoutData(x.out); }, {who + "out", "null"}},
      {"one of the list null",
       [](auto& x) {
         UseList(x);
         ForwardFixture::list[2].data = nullptr;
       },
       {who + "weight_list[2]", "null"}},
      {"weights misaligned",
       [](auto& x) { x.weights = Misaligned(x.weights); },
       {who + "weights", "aligned"}},
      {"weights far backwards", [](auto& x) { x.weights.strides[0] = -kHuge; }, {who + "weights", "2^56"}},
      {"rows of out overlap", [](auto& x) { x.out.strides[0] = 6; }, {who + "out", "overlap", "6"}},
      {"out on x", [](auto& x) { x.out.data = const_cast<void*>(x.x.data); }, {who + "out", "overlaps x"}},
      {"out on weights",
       [](auto& x) { x.out.data = Advanced<float>(const_cast<void*>(x.weights.data), 3); },
       {who + "out", "overlaps weights"}},
      {"out on one of the list",
       [](auto& x) {
         UseList(x);
         x.out.data = const_cast<void*>(ForwardFixture::list[1].data);
       },
       {who + "out", "overlaps weight_list[1]"}},
      {"out on bias",
       [](auto& x) { x.out.data = const_cast<void*>(x.bias.data); },
       {who + "out", "overlaps bias"}},
  };
  ExpectErrors<ForwardFixture>(calls, RunForward);
}

TEST(GroupedBadArgumentsTest, ForwardPackedWeights) {
  const std::string who = "grouped_matmul: packed_weights ";
  const auto packed = [](GroupedMatmulArgs& x) {
    alignas(kPackedAlignment) static std::byte memory[1 << 16];
    x.packed_weights = {.data = memory,
                        .bytes = sizeof memory,
                        .side = Side::kB,
                        .dtype = DType::kF32,
                        .matrices = 3,
                        .rows = 5,
                        .cols = 7};
    x.weights = {};
  };
  const std::vector<Forward> calls = {
      {"both",
       [&](auto& x) {
         const auto w = x.weights;
         packed(x), x.weights = w;
       },
       {who + "and weights are both"}},
      {"of the other side",
       [&](auto& x) { packed(x), x.packed_weights.side = Side::kA; },
       {who, "packed for side a (c = a b), need side b"}},
      {"transposed", [&](auto& x) { packed(x), x.transpose_weights = true; }, {who, "transpose_weights"}},
      {"E",
       [&](auto& x) { packed(x), x.packed_weights.matrices = 2; },
       {who + "hold 2 matrices (5, 7)", "need 3"}},
      {"K",
       [&](auto& x) { packed(x), x.packed_weights.rows = 6; },
       {who + "hold 3 matrices (6, 7)", "(5, 7)"}},
      {"bf16",
       [&](auto& x) { packed(x), x.packed_weights.dtype = DType::kBF16; },
       {who, "of bf16", "of fp32"}},
      {"too small", [&](auto& x) { packed(x), x.packed_weights.bytes = 100; }, {who, "100 bytes"}},
      {"never packed", [&](auto& x) { packed(x); }, {who, "holds no packed operand"}},
  };
  ExpectErrors<ForwardFixture>(calls, RunForward);
}

struct GradFixture {
  GradFixture() {
    Random random;
    for (Matrix* m : {&dy, &x, &weights, &dw}) m->FillUniform(random);
    for (Matrix& m : each) m.FillUniform(random);
    Assign(counts.view(), std::array{4.0, 0.0, 3.0});
  }
  GroupedMatmulGradArgs args() {
    list = {each[0].view(), each[1].view(), each[2].view()};
    return {.dy = dy.view(),
            .groups = counts.view(),
            .weights = weights.view(),
            .dx = dx.view(),
            .x = x.view(),
            .dw = dw.view(),
            .accumulate_dw = true};
  }
  std::vector<const Matrix*> all() const {
    return {&dy, &x, &counts, &weights, &dx, &dw, &each[0], &each[1], &each[2]};
  }

  Matrix dy{DType::kBF16, {9, 7}}, x{DType::kBF16, {9, 5}}, counts{DType::kI32, {3}},
      weights{DType::kBF16, {3, 5, 7}}, dx{DType::kBF16, {9, 5}}, dw{DType::kF32, {3, 5, 7}};
  std::array<Matrix, 3> each = {Matrix(DType::kF32, {5, 7}), Matrix(DType::kF32, {5, 7}),
                                Matrix(DType::kF32, {5, 7})};
  static inline std::array<Tensor, 3> list;
};
using Grad = BadCall<GroupedMatmulGradArgs>;

Status RunGrad(const Device& device, const GroupedMatmulGradArgs& args) {
  return GroupedMatmulGrad(device, args);
}

TEST(GroupedBadArgumentsTest, Grad) {
  const std::string who = "grouped_matmul_grad: ";
  const auto use_list = [](GroupedMatmulGradArgs& x) { x.dw = {}, x.dw_list = GradFixture::list; };
  const std::vector<Grad> calls = {
      {"dy missing", [](auto& x) { x.dy = {}; }, {who + "dy is not given"}},
      {"no gradient wanted", [](auto& x) { x.dx = {}, x.dw = {}; }, {who + "dx is not given, nor is dw"}},
      {"dx without weights", [](auto& x) { x.weights = {}; }, {who + "weights is not given"}},
      {"dw without x", [](auto& x) { x.x = {}; }, {who + "x is not given"}},
      {"both dw", [](auto& x) { x.dw_list = GradFixture::list; }, {who + "dw and dw_list"}},
      {"a short list",
       [&](auto& x) { use_list(x), x.dw_list = x.dw_list.first(1); },
       {who + "dw_list has 1", "needs 3"}},
      {"too many rows", [](auto& x) { x.dy.sizes[0] = 6; }, {who + "groups", "3 at (2)", "M, 6"}},
      {"M of dx", [](auto& x) { x.dx.sizes[0] = 8; }, {who + "dx", "size 8", "M", "needs 9"}},
      {"M of x", [](auto& x) { x.x.sizes[0] = 8; }, {who + "x", "size 8", "M", "needs 9"}},
      {"N of weights", [](auto& x) { x.weights.sizes[2] = 6; }, {who + "weights", "size 6", "N", "needs 7"}},
      {"K of weights", [](auto& x) { x.weights.sizes[1] = 6; }, {who + "weights", "size 6", "K", "needs 5"}},
      {"K of dw", [](auto& x) { x.dw.sizes[1] = 4; }, {who + "dw", "size 4", "K", "needs 5"}},
      {"K of dx",
       [](auto& x) { x.dx.sizes[1] = x.weights.sizes[1] = 4; },
       {who + "dx", "size 4", "K", "needs 5"}},
      {"E of dw", [](auto& x) { x.dw.sizes[0] = 4; }, {who + "dw", "size 4", "E", "needs 3"}},
      {"x fp32", [](auto& x) { x.x.dtype = DType::kF32; }, {who + "x", "fp32", "needs bf16"}},
      {"dx fp16", [](auto& x) { x.dx.dtype = DType::kF16; }, {who + "dx", "fp16", "needs fp32 or bf16"}},
      {"dw bf16 accumulated", [](auto& x) { x.dw.dtype = DType::kBF16; }, {who + "dw", "bf16", "needs fp32"}},
      {"dw fp16 written",
       [](auto& x) { x.dw.dtype = DType::kF16, x.accumulate_dw = false; },
       {who + "dw", "fp16", "needs fp32 or bf16"}},
      {"dw null", [](auto& x) { x.dw = WithoutData(x.dw); }, {who + "dw", "null"}},
      {"dw of an empty group null, but written",
       [&](auto& x) {
         use_list(x), x.accumulate_dw = false;
         GradFixture::list[1].data = nullptr;
       },
       {who + "dw_list[1]", "null"}},
      {"two of the list in one place",
       [&](auto& x) {
         use_list(x);
         GradFixture::list[2].data = GradFixture::list[0].data;
       },
       {who + "dw_list[2]", "overlaps dw_list[0]"}},
      {"dw overlaps itself", [](auto& x) { x.dw.strides[0] = 1; }, {who + "dw", "overlap"}},
      {"dw on dy",
       [](auto& x) { x.dw.data = Advanced<BF16>(const_cast<void*>(x.dy.data), 1); },
       {who + "dw", "overlaps dy"}},
      {"dx on x", [](auto& x) { x.dx.data = const_cast<void*>(x.x.data); }, {who + "dx", "overlaps x"}},
      {"dx on weights",
       [](auto& x) { x.dx.data = const_cast<void*>(x.weights.data); },
       {who + "dx", "overlaps weights"}},
  };
  ExpectErrors<GradFixture>(calls, RunGrad);
}

}  // namespace
}  // namespace cubist::testing
