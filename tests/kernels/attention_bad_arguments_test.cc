// What a caller of FlashAttention and its gradient can get wrong comes back as an error that names the argument, its value
// and the limit, and nothing is written.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"
#include "tests/kernels/bad_call.h"
#include "tests/kernels/call_fixtures.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

using BadAttention = BadCall<FlashAttentionArgs>;

constexpr std::int64_t kPrefixOfOne[] = {3}, kNegativePrefix[] = {0, -1}, kLongPrefix[] = {8, 0},
                       kPrefix[] = {7, 0}, kEnds[] = {3, 5};
constexpr std::int32_t kPositions[] = {0, 3, 3, 1, 7};

TEST(BadArgumentsTest, FlashAttentionShapes) {
  const std::string who = "flash_attention: ";
  const std::vector<BadAttention> calls = {
      {"q missing", [](auto& x) { x.q = {}; }, {who + "q is not given"}},
      {"k missing", [](auto& x) { x.k = {}; }, {who + "k is not given"}},
      {"v missing", [](auto& x) { x.v = {}; }, {who + "v is not given"}},
      {"out missing", [](auto& x) { x.out = {}; }, {who + "out is not given"}},
      {"q_rope missing", [](auto& x) { x.q_rope = {}; }, {who + "q_rope is not given"}},
      {"k_rope missing", [](auto& x) { x.k_rope = {}; }, {who + "k_rope is not given"}},
      {"q of rank 3", [](auto& x) { x.q.rank = 3; }, {who + "q", "rank 3", "4"}},
      {"k of rank 3", [](auto& x) { x.k.rank = 3; }, {who + "k", "rank 3", "4"}},
      {"v of rank 2", [](auto& x) { x.v.rank = 2; }, {who + "v", "rank 2", "4"}},
      {"q_rope of rank 3", [](auto& x) { x.q_rope.rank = 3; }, {who + "q_rope", "rank 3", "4"}},
      {"k_rope of rank 3", [](auto& x) { x.k_rope.rank = 3; }, {who + "k_rope", "rank 3", "4"}},
      {"out of rank 3", [](auto& x) { x.out.rank = 3; }, {who + "out", "rank 3", "4"}},
      {"lse of rank 4", [](auto& x) { x.lse.rank = 4; }, {who + "lse", "rank 4", "3"}},
      {"batch of k", [](auto& x) { x.k.sizes[0] = 1; }, {who + "k", "size 1", "dimension 0", "needs 2"}},
      {"batch of v", [](auto& x) { x.v.sizes[0] = 3; }, {who + "v", "size 3", "dimension 0", "needs 2"}},
      {"Dqk of k", [](auto& x) { x.k.sizes[3] = 7; }, {who + "k", "size 7", "Dqk", "needs 8"}},
      {"heads of v", [](auto& x) { x.v.sizes[1] = 2; }, {who + "v", "size 2", "Nkv", "needs 3"}},
      {"Skv of v", [](auto& x) { x.v.sizes[2] = 6; }, {who + "v", "size 6", "Skv", "needs 7"}},
      {"heads no multiple",
       [](auto& x) { x.q.sizes[1] = x.q_rope.sizes[1] = x.out.sizes[1] = x.lse.sizes[1] = 5; },
       {who + "q", "5 heads", "3"}},
      {"fewer heads than k",
       [](auto& x) { x.q.sizes[1] = x.q_rope.sizes[1] = x.out.sizes[1] = x.lse.sizes[1] = 2; },
       {who + "q", "2 heads", "3"}},
      {"no heads of k",
       [](auto& x) { x.k.sizes[1] = x.v.sizes[1] = x.k_rope.sizes[1] = 0; },
       {who + "q", "6 heads", "0"}},
      {"batch of q_rope", [](auto& x) { x.q_rope.sizes[0] = 1; }, {who + "q_rope", "size 1", "needs 2"}},
      {"heads of q_rope",
       [](auto& x) { x.q_rope.sizes[1] = 1; },
       {who + "q_rope", "size 1", "Nq", "needs 6"}},
      {"Sq of q_rope", [](auto& x) { x.q_rope.sizes[2] = 4; }, {who + "q_rope", "size 4", "Sq", "needs 5"}},
      {"Dr of k_rope", [](auto& x) { x.k_rope.sizes[3] = 1; }, {who + "k_rope", "size 1", "Dr", "needs 2"}},
      {"Skv of k_rope", [](auto& x) { x.k_rope.sizes[2] = 5; }, {who + "k_rope", "size 5", "Skv", "needs 7"}},
      {"heads of k_rope", [](auto& x) { x.k_rope.sizes[1] = 2; }, {who + "k_rope", "2 heads", "1", "3"}},
      {"Sq of out", [](auto& x) { x.out.sizes[2] = 7; }, {who + "out", "size 7", "Sq", "needs 5"}},
      {"Dv of out", [](auto& x) { x.out.sizes[3] = 8; }, {who + "out", "size 8", "Dv", "needs 4"}},
      {"heads of lse", [](auto& x) { x.lse.sizes[1] = 3; }, {who + "lse", "size 3", "Nq", "needs 6"}},
      {"Sq of lse", [](auto& x) { x.lse.sizes[2] = 1; }, {who + "lse", "size 1", "Sq", "needs 5"}},
      {"B negative", [](auto& x) { x.q.sizes[0] = -1; }, {who + "q", "-1", "B", "0"}},
      {"Sq negative", [](auto& x) { x.q.sizes[2] = -3; }, {who + "q", "-3", "Sq", "0"}},
      {"Skv negative", [](auto& x) { x.k.sizes[2] = x.v.sizes[2] = -7; }, {who + "k", "-7", "Skv", "0"}},
      {"Dv negative", [](auto& x) { x.v.sizes[3] = -4; }, {who + "v", "-4", "Dv", "0"}},
      {"scale infinite", [](auto& x) { x.scale = INFINITY; }, {who + "scale", "inf", "finite"}},
      {"scale -infinite", [](auto& x) { x.scale = -INFINITY; }, {who + "scale", "-inf", "finite"}},
      {"scale NaN", [](auto& x) { x.scale = NAN; }, {who + "scale", "nan", "finite"}},
      {"lengths of two batch entries",
       [](auto& x) {
         x.lengths = {kEnds, kEnds};
       },
       {who + "lengths", "B = 2"}},
      {"bias of other heads",
       [](auto& x) {
         x.bias = ConstTensor(x.q.data, x.q.dtype, {1, 3, 5, 7});
       },
       {who + "bias", "size 3", "dimension 1", "needs 1 or 6"}},
      {"bias of rank 3",
       [](auto& x) {
         x.bias = ConstTensor(x.q.data, x.q.dtype, {1, 5, 7});
       },
       {who + "bias", "rank 3", "4"}},
      {"sinks of other heads",
       [](auto& x) { x.sinks = ConstTensor(x.q.data, DType::kF32, {5}); },
       {who + "sinks", "size 5", "needs 6"}},
      {"sinks bf16",
       [](auto& x) { x.sinks = ConstTensor(x.q.data, DType::kBF16, {6}); },
       {who + "sinks", "bf16", "needs fp32"}},
      {"soft cap 0", [](auto& x) { x.soft_cap = 0.0f; }, {who + "soft_cap is 0,", "1.0842022e-19 to"}},
      {"soft cap NaN", [](auto& x) { x.soft_cap = NAN; }, {who + "soft_cap is nan", "1.0842022e-19 to"}},
      {"soft cap of infinite inverse",
       [](auto& x) { x.soft_cap = 1e-20f; },
       {who + "soft_cap is 1e-20,", "1.0842022e-19 to"}},
      {"rope without sin",
       [](auto& x) {
         x.rope.cos = ConstTensor(x.q.data, DType::kF32, {7, 1});
       },
       {who + "rope.sin is not given"}},
      {"rope of other columns",
       [](auto& x) {
         x.rope.cos = x.rope.sin = ConstTensor(x.q.data, DType::kF32, {7, 2});
       },
       {who + "rope.cos", "2 columns", "half the 2 of q_rope"}},
      {"rope of few positions",
       [](auto& x) {
         x.rope.cos = x.rope.sin = ConstTensor(x.q.data, DType::kF32, {6, 1});
       },
       {who + "rope.cos has 6 positions", "7 rows"}},
      {"rope offset negative",
       [](auto& x) {
         x.rope.cos = x.rope.sin = ConstTensor(x.q.data, DType::kF32, {9, 1});
         x.rope.q_offset = -1;
       },
       {who + "rope.q_offset is -1", "0 to 4"}},
      {"rope positions of other rows",
       [](auto& x) {
         x.rope.cos = x.rope.sin = ConstTensor(x.q.data, DType::kF32, {7, 1});
         x.rope.q_positions = ConstTensor(kPositions, {4});
       },
       {who + "rope.q_positions", "size 4", "needs 5"}},
      {"rope position beyond the tables",
       [](auto& x) {
         x.rope.cos = x.rope.sin = ConstTensor(x.q.data, DType::kF32, {7, 1});
         x.rope.q_positions = ConstTensor(kPositions, {5});
       },
       {who + "rope.q_positions has 7 at (4)", "[0, 7)"}},
      {"rope positions beside an offset",
       [](auto& x) {
         x.rope.cos = x.rope.sin = ConstTensor(x.q.data, DType::kF32, {8, 1});
         x.rope.q_positions = ConstTensor(kPositions, {5}), x.rope.q_offset = 1;
       },
       {who + "rope.q_offset is 1", "needs 0", "q_positions"}},
      {"rope positions without data",
       [](auto& x) {
         x.rope.cos = x.rope.sin = ConstTensor(x.q.data, DType::kF32, {8, 1});
         x.rope.q_positions = ConstTensor(nullptr, DType::kI32, {5});
       },
       {who + "rope.q_positions", "null"}},
      {"rope positions without tables",
       [](auto& x) { x.rope.q_positions = ConstTensor(kPositions, {5}); },
       {who + "rope.q_positions", "rope.cos is not"}},
      {"rope offset without tables",
       [](auto& x) { x.rope.k_offset = 2; },
       {who + "rope.k_offset is 2", "needs 0 without rope.cos"}},
      {"alibi offset without slopes",
       [](auto& x) { x.alibi.offset = 4; },
       {who + "alibi.offset is 4", "alibi.slopes"}},
      {"alibi offset too far",
       [](auto& x) {
         static const float kSlopes[8] = {};
         x.alibi.slopes = ConstTensor(kSlopes, {x.q.size(1)});
         x.alibi.offset = std::numeric_limits<std::int64_t>::min();
       },
       {who + "alibi.offset is -9223372036854775808", "-2^60 to 2^60"}},
      {"alibi root without slopes",
       [](auto& x) { x.alibi.root = true; },
       {who + "alibi.root", "alibi.slopes"}},
      {"causal unknown",
       [](auto& x) { x.causal = static_cast<Causal>(7); },
       {who + "causal is 7, the last is 2"}},
      {"causal negative",
       [](auto& x) { x.causal = static_cast<Causal>(-1); },
       {who + "causal is -1, the last is 2"}},
      {"anchor unknown",
       [](auto& x) { x.window = AttentionWindow{.left = 1, .anchor = static_cast<Causal>(9)}; },
       {who + "window.anchor is 9, the last is 2"}},
      {"rope layout unknown",
       [](auto& x) { x.rope.layout = static_cast<RopeLayout>(3); },
       {who + "rope.layout is 3, the last is 2"}},
      {"mask of other heads",
       [](auto& x) {
         x.mask = ConstTensor(x.q.data, DType::kBool, {1, 3, 5, 7});
       },
       {who + "mask", "size 3", "dimension 1", "needs 1 or 6"}},
      {"mask of rank 2",
       [](auto& x) {
         x.mask = ConstTensor(x.q.data, DType::kBool, {5, 7});
       },
       {who + "mask", "rank 2", "4"}},
      {"mask bf16",
       [](auto& x) {
         x.mask = ConstTensor(x.q.data, DType::kBF16, {1, 1, 5, 7});
       },
       {who + "mask", "bf16", "needs bool"}},
      {"mask null",
       [](auto& x) {
         x.mask = ConstTensor(nullptr, DType::kBool, {1, 1, 5, 7});
       },
       {who + "mask", "null"}},
      {"slopes of other heads",
       [](auto& x) { x.alibi.slopes = ConstTensor(x.q.data, DType::kF32, {5}); },
       {who + "alibi.slopes", "size 5", "needs 6"}},
      {"slopes of other sequences",
       [](auto& x) {
         x.alibi.slopes = ConstTensor(x.q.data, DType::kF32, {3, 6});
       },
       {who + "alibi.slopes", "size 3", "needs 2"}},
      {"slopes bf16",
       [](auto& x) { x.alibi.slopes = ConstTensor(x.q.data, DType::kBF16, {6}); },
       {who + "alibi.slopes", "bf16", "needs fp32"}},
      {"keep 0", [](auto& x) { x.dropout.keep = 0; }, {who + "dropout.keep is 0", "above 0, up to 1"}},
      {"keep above 1", [](auto& x) { x.dropout.keep = 1.5f; }, {who + "dropout.keep is 1.5", "up to 1"}},
      {"keep NaN", [](auto& x) { x.dropout.keep = NAN; }, {who + "dropout.keep is nan", "up to 1"}},
      {"workspace null",
       [](auto& x) {
         x.workspace = {nullptr, 1 << 30};
       },
       {who + "workspace", "1073741824 bytes", "null"}},
      {"prefix of one", [](auto& x) { x.prefix = kPrefixOfOne; }, {who + "prefix", "1 entries", "2 of B"}},
      {"prefix negative",
       [](auto& x) { x.prefix = kNegativePrefix; },
       {who + "prefix[1] is -1", "0 to the 7"}},
      {"prefix beyond Skv", [](auto& x) { x.prefix = kLongPrefix; }, {who + "prefix[0] is 8", "0 to the 7"}},
  };
  ExpectErrors<AttentionFixture>(calls, RunAttention);
}

TEST(BadArgumentsTest, FlashAttentionDTypes) {
  const std::string who = "flash_attention: ";
  const std::vector<BadAttention> calls = {
      {"q int32", [](auto& x) { x.q.dtype = DType::kI32; }, {who + "q", "int32", "fp32", "bf16", "fp16"}},
      {"q of no dtype", [](auto& x) { x.q.dtype = kNoDType; }, {who + "q", "no known dtype", "fp32", "bf16"}},
      {"out of no dtype", [](auto& x) { x.out.dtype = kNoDType; }, {who + "out", "no known dtype", "fp32"}},
      {"k fp16", [](auto& x) { x.k.dtype = DType::kF16; }, {who + "k", "fp16", "needs bf16"}},
      {"v fp32", [](auto& x) { x.v.dtype = DType::kF32; }, {who + "v", "fp32", "needs bf16"}},
      {"q_rope fp32", [](auto& x) { x.q_rope.dtype = DType::kF32; }, {who + "q_rope", "fp32", "needs bf16"}},
      {"k_rope int64",
       [](auto& x) { x.k_rope.dtype = DType::kI64; },
       {who + "k_rope", "int64", "needs bf16"}},
      {"out fp16", [](auto& x) { x.out.dtype = DType::kF16; }, {who + "out", "fp16", "fp32 or bf16"}},
      {"lse bf16", [](auto& x) { x.lse.dtype = DType::kBF16; }, {who + "lse", "bf16", "needs fp32"}},
  };
  ExpectErrors<AttentionFixture>(calls, RunAttention);
}

TEST(BadArgumentsTest, FlashAttentionStorage) {
  const std::string who = "flash_attention: ";
  std::vector<BadAttention> calls;
  const auto for_each_tensor = [&](auto&& add) {
    add(
        "q", [](FlashAttentionArgs & x) -> auto& { return x.q; });
    add(
        "k", [](FlashAttentionArgs & x) -> auto& { return x.k; });
    add(
        "v", [](FlashAttentionArgs & x) -> auto& { return x.v; });
    add(
        "q_rope", [](FlashAttentionArgs & x) -> auto& { return x.q_rope; });
    add(
        "k_rope", [](FlashAttentionArgs & x) -> auto& { return x.k_rope; });
    add(
        "out", [](FlashAttentionArgs & x) -> auto& { return x.out; });
    add(
        "lse", [](FlashAttentionArgs & x) -> auto& { return x.lse; });
  };
  for_each_tensor([&](const std::string& name, auto of) {
    calls.push_back({name + " null", [of](auto& x) { of(x) = WithoutData(of(x)); }, {who + name, "null"}});
    calls.push_back({name + " misaligned",
                     [of](auto& x) { of(x) = Misaligned(of(x)); },
                     {who + name, "aligned", name == "lse" ? "4 bytes" : "2 bytes"}});
    calls.push_back(
        {name + " far backwards", [of](auto& x) { of(x).strides[2] = -kHuge; }, {who + name, "2^56"}});
    calls.push_back(
        {name + " stride huge", [of](auto& x) { of(x).strides[1] = kHuge; }, {who + name, "2^56"}});
  });
  calls.push_back({"Skv huge",
                   [](auto& x) { x.k.sizes[2] = x.v.sizes[2] = x.k_rope.sizes[2] = kHuge; },
                   {who + "k", "2^56"}});
  calls.push_back({"B huge",
                   [](auto& x) {
                     for (ConstTensor* t : {&x.q, &x.k, &x.v, &x.q_rope, &x.k_rope}) t->sizes[0] = kHuge;
                     x.out.sizes[0] = x.lse.sizes[0] = kHuge;
                   },
                   {who + "q", "2^56"}});
  ExpectErrors<AttentionFixture>(calls, RunAttention);
}

TEST(BadArgumentsTest, FlashAttentionOverlaps) {
  const std::string who = "flash_attention: ";
  std::vector<BadAttention> calls;
  const auto onto = [&](const std::string& name, auto of) {
    calls.push_back({"out on " + name,
                     [of](auto& x) { x.out.data = const_cast<void*>(of(x).data); },
                     {who + "out", "overlaps " + name}});
    calls.push_back({"out ends in " + name,
                     [of](auto& x) { x.out.data = const_cast<BF16*>(Advanced<BF16>(of(x).data, -16)); },
                     {who + "out", "overlaps " + name}});
    calls.push_back({"lse on " + name,
                     [of](auto& x) {
                       // fp32 on bf16: aligned to four bytes.
                       const auto address = reinterpret_cast<std::uintptr_t>(of(x).data);
                       x.lse.data = const_cast<BF16*>(Advanced<BF16>(of(x).data, address % 4 == 0 ? 2 : 1));
                     },
                     {who + "lse", "overlaps " + name}});
  };
  onto("q", [](FlashAttentionArgs& x) { return x.q; });
  onto("k", [](FlashAttentionArgs& x) { return x.k; });
  onto("v", [](FlashAttentionArgs& x) { return x.v; });
  onto("q_rope", [](FlashAttentionArgs& x) { return x.q_rope; });
  onto("k_rope", [](FlashAttentionArgs& x) { return x.k_rope; });
  calls.push_back({"out repeated", [](auto& x) { x.out.strides[1] = 0; }, {who + "out", "overlap", "0"}});
  calls.push_back({"lse repeated", [](auto& x) { x.lse.strides[0] = 0; }, {who + "lse", "overlap", "0"}});
  calls.push_back({"out rows overlap", [](auto& x) { x.out.strides[2] = 3; }, {who + "out", "overlap", "3"}});
  calls.push_back({"lse in out",
                   [](auto& x) {
                     const auto address = reinterpret_cast<std::uintptr_t>(x.out.data);
                     x.lse.data = Advanced<BF16>(x.out.data, address % 4 == 0 ? 0 : 1);
                   },
                   {who, "out", "lse", "overlaps"}});
  ExpectErrors<AttentionFixture>(calls, RunAttention);
}

// ---- FlashAttentionGrad ----

struct AttentionGradFixture {
  AttentionGradFixture() {
    Random random;
    for (Matrix* x : {&q, &k, &v, &q_rope, &k_rope, &out, &lse, &dout, &bias, &sinks, &cos, &sin})
      x->FillUniform(random);
  }
  FlashAttentionGradArgs args() {
    return {.q = q.view(),
            .k = k.view(),
            .v = v.view(),
            .q_rope = q_rope.view(),
            .k_rope = k_rope.view(),
            .out = out.view(),
            .lse = lse.view(),
            .dout = dout.view(),
            .dq = dq.view(),
            .dk = dk.view(),
            .dv = dv.view(),
            .dq_rope = dq_rope.view(),
            .dk_rope = dk_rope.view(),
            .rope = {cos.view(), sin.view()},
            .bias = bias.view(),
            .sinks = sinks.view(),
            .soft_cap = 3.0f,
            .dbias = dbias.view(),
            .dsinks = dsinks.view()};
  }
  std::vector<const Matrix*> all() const {
    return {&q,  &k,       &v,       &q_rope, &k_rope, &out, &lse, &dout,  &dq,    &dk,
            &dv, &dq_rope, &dk_rope, &bias,   &sinks,  &cos, &sin, &dbias, &dsinks};
  }

  static constexpr DType kIn = DType::kBF16;
  Matrix q{kIn, {2, 6, 5, 8}}, k{kIn, {2, 3, 7, 8}}, v{kIn, {2, 3, 7, 4}}, q_rope{kIn, {2, 6, 5, 2}},
      k_rope{kIn, {2, 1, 7, 2}}, out{kIn, {2, 6, 5, 4}}, lse{DType::kF32, {2, 6, 5}}, dout{kIn, {2, 6, 5, 4}},
      dq{kIn, {2, 6, 5, 8}}, dk{DType::kF32, {2, 3, 7, 8}}, dv{kIn, {2, 3, 7, 4}}, dq_rope{kIn, {2, 6, 5, 2}},
      dk_rope{kIn, {2, 1, 7, 2}};
  Matrix bias{kIn, {2, 1, 5, 7}}, sinks{DType::kF32, {6}}, cos{DType::kF32, {9, 1}}, sin{DType::kF32, {9, 1}},
      dbias{kIn, {2, 1, 5, 7}}, dsinks{DType::kF32, {6}};
};
using BadAttentionGrad = BadCall<FlashAttentionGradArgs>;

TEST(BadArgumentsTest, FlashAttentionGrad) {
  const std::string who = "flash_attention_grad: ";
  const std::vector<BadAttentionGrad> calls = {
      {"q missing", [](auto& x) { x.q = {}; }, {who + "q is not given"}},
      {"out missing", [](auto& x) { x.out = {}; }, {who + "out is not given"}},
      {"lse missing", [](auto& x) { x.lse = {}; }, {who + "lse is not given"}},
      {"dout missing", [](auto& x) { x.dout = {}; }, {who + "dout is not given"}},
      {"dq missing", [](auto& x) { x.dq = {}; }, {who + "dq is not given"}},
      {"dv missing", [](auto& x) { x.dv = {}; }, {who + "dv is not given"}},
      {"k_rope missing", [](auto& x) { x.k_rope = {}; }, {who + "k_rope is not given"}},
      {"dk_rope missing", [](auto& x) { x.dk_rope = {}; }, {who + "dk_rope is not given"}},
      {"dq_rope without q_rope",
       [](auto& x) { x.q_rope = x.k_rope = {}; },
       {who + "dq_rope is given, but q_rope is not"}},
      {"dk of rank 3", [](auto& x) { x.dk.rank = 3; }, {who + "dk", "rank 3", "4"}},
      {"heads no multiple", [](auto& x) { x.q.sizes[1] = 5; }, {who + "q", "5 heads", "3"}},
      {"heads of k_rope", [](auto& x) { x.k_rope.sizes[1] = 2; }, {who + "k_rope", "2 heads", "1", "3"}},
      {"Dv of dout", [](auto& x) { x.dout.sizes[3] = 3; }, {who + "dout", "size 3", "Dv", "needs 4"}},
      {"Sq of lse", [](auto& x) { x.lse.sizes[2] = 1; }, {who + "lse", "size 1", "Sq", "needs 5"}},
      {"columns of dq", [](auto& x) { x.dq.sizes[3] = 7; }, {who + "dq", "size 7", "of q", "needs 8"}},
      {"rows of dv", [](auto& x) { x.dv.sizes[2] = 6; }, {who + "dv", "size 6", "of v", "needs 7"}},
      {"heads of dk_rope", [](auto& x) { x.dk_rope.sizes[1] = 3; }, {who + "dk_rope", "size 3", "needs 1"}},
      {"scale NaN", [](auto& x) { x.scale = NAN; }, {who + "scale", "nan", "finite"}},
      {"dout fp32", [](auto& x) { x.dout.dtype = DType::kF32; }, {who + "dout", "fp32", "needs bf16"}},
      {"lse bf16", [](auto& x) { x.lse.dtype = DType::kBF16; }, {who + "lse", "bf16", "needs fp32"}},
      {"dv fp16", [](auto& x) { x.dv.dtype = DType::kF16; }, {who + "dv", "fp16", "fp32 or bf16"}},
      {"prefix of one", [](auto& x) { x.prefix = kPrefixOfOne; }, {who + "prefix", "1 entries", "2 of B"}},
      {"prefix beyond Skv", [](auto& x) { x.prefix = kLongPrefix; }, {who + "prefix[0] is 8", "0 to the 7"}},
      {"bias of six keys", [](auto& x) { x.bias.sizes[3] = 6; }, {who + "bias", "size 6", "1 or 7"}},
      {"dbias of one row", [](auto& x) { x.dbias.sizes[2] = 1; }, {who + "dbias", "size 1", "of bias", "5"}},
      {"dbias without bias", [](auto& x) { x.bias = {}; }, {who + "dbias is given, but bias is not"}},
      {"dbias fp16", [](auto& x) { x.dbias.dtype = DType::kF16; }, {who + "dbias", "fp16", "fp32 or bf16"}},
      {"dsinks of five", [](auto& x) { x.dsinks.sizes[0] = 5; }, {who + "dsinks", "size 5", "of sinks", "6"}},
      {"dsinks without sinks", [](auto& x) { x.sinks = {}; }, {who + "dsinks is given, but sinks is not"}},
      {"dsinks bf16", [](auto& x) { x.dsinks.dtype = DType::kBF16; }, {who + "dsinks", "bf16", "fp32"}},
      {"soft_cap 0", [](auto& x) { x.soft_cap = 0.0f; }, {who + "soft_cap is 0,", "1.0842022e-19 to"}},
      {"rope of two pairs",
       [](auto& x) { x.rope.cos.sizes[1] = x.rope.sin.sizes[1] = 2; },
       {who + "rope.cos", "2 columns", "half the 2 of q_rope"}},
      {"k_offset", [](auto& x) { x.rope.k_offset = 3; }, {who + "rope.k_offset is 3", "0 to 2"}},
      {"lengths of two entries",
       [](auto& x) {
         x.lengths = {kPrefix, kPrefix};
       },
       {who + "lengths", "B = 2"}},
      {"dbias over bias",
       [](auto& x) { x.dbias.data = const_cast<void*>(x.bias.data); },
       {who + "dbias", "bias"}},
      {"dsinks null", [](auto& x) { x.dsinks = WithoutData(x.dsinks); }, {who + "dsinks", "null"}},
      {"dq null", [](auto& x) { x.dq = WithoutData(x.dq); }, {who + "dq", "null"}},
      {"out null", [](auto& x) { x.out = WithoutData(x.out); }, {who + "out", "null"}},
      {"dk misaligned", [](auto& x) { x.dk = Misaligned(x.dk); }, {who + "dk", "aligned", "4 bytes"}},
      {"dq over q", [](auto& x) { x.dq.data = const_cast<void*>(x.q.data); }, {who + "dq", "q"}},
      {"dv over dk", [](auto& x) { x.dv.data = x.dk.data; }, {who, "dk", "dv"}},
      {"dq in one row", [](auto& x) { x.dq.strides[2] = 0; }, {who + "dq"}},
  };
  ExpectErrors<AttentionGradFixture>(calls, [](const Device& device, const FlashAttentionGradArgs& args) {
    return FlashAttentionGrad(device, args);
  });
}

}  // namespace
}  // namespace cubist::testing
