// Views with negative strides: every kernel gives, bit for bit, what it gives for contiguous copies.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"
#include "kernels/grouped_matmul.h"
#include "kernels/loss_scale.h"
#include "kernels/matmul.h"
#include "kernels/mla_block.h"
#include "kernels/moe_block.h"
#include "kernels/pack_operand.h"
#include "kernels/reorder_chunks.h"
#include "kernels/rms_norm.h"
#include "kernels/route.h"
#include "kernels/swiglu.h"
#include "kernels/token_permute.h"
#include "kernels/token_permute_grad.h"
#include "npu_model/sync/check.h"
#include "npu_model/sync/execute.h"
#include "npu_model/sync/plan.h"
#include "npu_model/sync/report.h"
#include "npu_model/tuning.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

// Which dimensions a tensor takes downwards: bit d that which is d-th from the last.
constexpr unsigned kFlips[] = {1, 2, 3, 4, 7, 8, 15};

template <class AnyTensor>
AnyTensor Flipped(AnyTensor x, unsigned flips) {
  using Byte = std::conditional_t<std::is_same_v<AnyTensor, Tensor>, std::byte, const std::byte>;
  for (int d = 0; d < x.rank; ++d) {
    if ((flips >> (x.rank - 1 - d) & 1) == 0 || x.size(d) == 0) continue;
    std::int64_t& stride = x.strides[static_cast<std::size_t>(d)];
    x.data = static_cast<Byte*>(x.data) + (x.size(d) - 1) * stride * SizeOf(x.dtype);
    stride = -stride;
  }
  return x;
}

// The tensors of a call: the same values however they are flipped.
class Tensors {
 public:
  explicit Tensors(unsigned flips) : flips_(flips) {}

  Tensor In(DType dtype, std::initializer_list<std::int64_t> sizes) {
    const Tensor x = Add(dtype, sizes);
    ForEachElement(x, [&](const auto&, std::int64_t at) { StoreFloat(x.data, dtype, at, Value()); });
    return x;
  }
  Tensor Ids(std::initializer_list<std::int64_t> sizes, const std::vector<std::int32_t>& values) {
    const Tensor x = Add(DType::kI32, sizes);
    std::size_t i = 0;
    ForEachElement(
        x, [&](const auto&, std::int64_t at) { static_cast<std::int32_t*>(x.data)[at] = values[i++]; });
    return x;
  }
  Tensor Flags(std::initializer_list<std::int64_t> sizes, const std::vector<bool>& values) {
    const Tensor x = Add(DType::kBool, sizes);
    std::size_t i = 0;
    ForEachElement(x, [&](const auto&, std::int64_t at) {
      static_cast<std::uint8_t*>(x.data)[at] = values[i++ % values.size()] ? 1 : 0;
    });
    return x;
  }
  Tensor Out(DType dtype, std::initializer_list<std::int64_t> sizes) {
    outputs_.push_back(IsFloat(dtype) ? In(dtype, sizes) : Add(dtype, sizes));
    return outputs_.back();
  }

  // Bytes of the outputs' elements, in order.
  std::vector<std::vector<std::byte>> outputs() const {
    std::vector<std::vector<std::byte>> all;
    for (const Tensor& x : outputs_) all.push_back(ElementsOf(static_cast<const std::byte*>(x.data), x));
    return all;
  }
  static std::vector<std::byte> ElementsOf(const std::byte* origin, const ConstTensor& x) {
    std::vector<std::byte> bytes;
    ForEachElement(x, [&](const auto&, std::int64_t at) {
      const std::byte* const element = origin + at * SizeOf(x.dtype);
      bytes.insert(bytes.end(), element, element + SizeOf(x.dtype));
    });
    return bytes;
  }
  const std::vector<Tensor>& views() const { return outputs_; }
  void CheckGuards() const {
    for (const Matrix& matrix : memory_) EXPECT_TRUE(matrix.CheckGuards());
  }

 private:
  Tensor Add(DType dtype, std::initializer_list<std::int64_t> sizes) {
    memory_.emplace_back(dtype, sizes, flips_ == 0 ? kContiguous : Layout());
    return Flipped(memory_.back().view(), flips_);
  }
  float Value() { return static_cast<float>(random_.Uniform(-1, 1)); }

  unsigned flips_;
  Random random_;
  std::deque<Matrix> memory_;
  std::vector<Tensor> outputs_;
};

using KernelRun = std::function<Status(const Device&)>;
// Makes the tensors of a call, and returns it.
using MakeCall = std::function<KernelRun(Tensors&, DType)>;

std::vector<std::vector<std::byte>> ResultOf(const MakeCall& make, DType dtype, unsigned flips,
                                             const Device& device) {
  Tensors tensors(flips);
  const KernelRun run = make(tensors, dtype);
  EXPECT_TRUE(IsOk(run(device)));
  tensors.CheckGuards();
  return tensors.outputs();
}

// The record of a flipped call keeps the bytes of its tensors, is proved, and computes in GM what it says.
void ExpectRecordRight(const MakeCall& make, DType dtype, unsigned flips) {
  Tensors tensors(flips);
  trace::Record record;
  ASSERT_TRUE(IsOk(make(tensors, dtype)(Npu(Ascend910B2(), {.record = &record}))));
  for (const trace::Phase& phase : record.phases) {
    for (const trace::CoreRecord& core : phase.cores) {
      for (const trace::GmAccess& access : core.accesses) {
        ASSERT_GE(access.offset, 0);
        ASSERT_TRUE(access.row_stride >= 0 && access.burst_stride >= 0);
        if (access.tensor < 0) continue;
        ASSERT_LE(access.end(), record.tensors[static_cast<std::size_t>(access.tensor)].bytes);
      }
    }
  }
  const sync::Plan plan = sync::PlanFlags(record, sync::Policy::kMinimal);
  const sync::CheckResult checked = sync::Check(record, plan);
  ASSERT_TRUE(checked.ok()) << sync::CheckText(checked);
  ASSERT_EQ(trace::UnknownTo(record), nullptr);

  trace::GmImage gm = trace::InitialGm(record, 5);
  ASSERT_TRUE(sync::Execute(record, plan, sync::Schedule::kRandom, flips, &gm));
  std::size_t output = 0;
  for (std::size_t t = 0; t < gm.size(); ++t) {
    if (record.tensors[t].input || output == tensors.views().size()) continue;
    const Tensor& view = tensors.views()[output++];
    const std::byte* const origin = gm[t].data() + view.origin() * SizeOf(view.dtype);
    ForEachElement(view, [&](const auto&, std::int64_t at) {
      const auto value = [&](const void* data) { return LoadElement({data, view.dtype, {}}, at); };
      // Composites round less often than their expansions.
      const double want = value(view.data), bound = IsFloat(view.dtype) ? 0x1p-6 : 0;
      EXPECT_NEAR(value(origin), want, bound * std::max(1.0, std::abs(want)));
    });
  }
}

// On the model both with the tilings of the contiguous call: it replays those of the views that it is given.
struct Devices {
  Device first, others;
};
Devices OnHost() { return {Host({.threads = 2}), Host({.threads = 2})}; }
Devices OnModel() {
  auto met = std::make_shared<Tuning>(), listening = std::make_shared<Tuning>();
  listening->on_choice = [met](const TilingChoice& choice) {
    met->Set(choice.kernel, choice.chip, choice.shape, choice.chosen);
  };
  return {Npu(Ascend910B2(), {.tuning = std::move(listening)}),
          Npu(Ascend910B2(), {.tuning = std::move(met)})};
}

void ExpectSame(const MakeCall& make, std::initializer_list<DType> dtypes = {DType::kF32, DType::kBF16}) {
  for (const DType dtype : dtypes) {
    for (const auto& [first, others] : {OnHost(), OnModel()}) {
      const auto right = ResultOf(make, dtype, 0, first);
      for (const unsigned flips : kFlips) {
        SCOPED_TRACE(Join(NameOf(dtype), " flipped ", flips, " on ", others.chip().name));
        EXPECT_EQ(ResultOf(make, dtype, flips, others), right);
      }
    }
  }
}
void ExpectRecordsRight(const MakeCall& make) {
  for (const unsigned flips : {1u, 2u, 15u}) {
    SCOPED_TRACE("record flipped " + std::to_string(flips));
    ExpectRecordRight(make, DType::kF32, flips);
  }
}

template <class Args>
KernelRun Call(Status (*kernel)(const Device&, const Args&, Profile*), const Args& args) {
  return [=](const Device& device) { return kernel(device, args, nullptr); };
}

TEST(FlippedViewsTest, Matmul) {
  for (const std::int64_t m : {1, 3, 37}) {
    for (const bool transposed : {false, true}) {
      const MakeCall make = [=](Tensors& t, DType dtype) {
        MatmulArgs args;
        const std::int64_t n = 70, k = 41;
        args.a = transposed ? t.In(dtype, {k, m}) : t.In(dtype, {m, k});
        args.b = transposed ? t.In(dtype, {n, k}) : t.In(dtype, {k, n});
        args.transpose_a = args.transpose_b = transposed;
        args.bias = t.In(dtype, {n}), args.residual = t.In(dtype, {m, n}), args.beta = 0.5f;
        args.c = t.Out(dtype, {m, n});
        return Call(&Matmul, args);
      };
      ExpectSame(make, {DType::kF32, DType::kBF16, DType::kF16});
      if (m < 9) ExpectRecordsRight(make);
    }
  }
}

TEST(FlippedViewsTest, MatmulAccumulatesInBatches) {
  ExpectSame([](Tensors& t, DType dtype) {
    MatmulArgs args;
    args.a = t.In(dtype, {2, 3, 17, 40}), args.b = t.In(dtype, {2, 3, 40, 33});
    args.c = t.Out(DType::kF32, {2, 3, 17, 33}), args.accumulate = true;
    return Call(&Matmul, args);
  });
  ExpectSame([](Tensors& t, DType dtype) {  // Rows of a batch that go on, and one b.
    MatmulArgs args;
    args.a = t.In(dtype, {4, 9, 40}), args.b = t.In(dtype, {40, 33});
    args.c = t.Out(dtype, {4, 9, 33});
    return Call(&Matmul, args);
  });
}

// A thread remembers small products by their strides; a flipped one begins elsewhere.
TEST(FlippedViewsTest, SmallProductsThatComeAgain) {
  const auto make = [](Tensors& t, DType dtype) {
    MatmulArgs args;
    args.a = t.In(dtype, {8, 16}), args.b = t.In(dtype, {16, 32}), args.c = t.Out(DType::kF32, {8, 32});
    return Call(&Matmul, args);
  };
  for (int again = 0; again < 3; ++again) ExpectSame(make);
}

TEST(FlippedViewsTest, PackOperand) {
  for (const Side side : {Side::kA, Side::kB}) {
    ExpectSame([side](Tensors& t, DType dtype) -> KernelRun {
      MatmulArgs args;
      args.a = t.In(dtype, {19, 40}), args.b = t.In(dtype, {40, 33}), args.c = t.Out(DType::kF32, {19, 33});
      return [=](const Device& device) -> Status {
        PackOperandArgs pack{.source = side == Side::kA ? args.a : args.b, .side = side};
        pack.bytes =
            PackedOperandBytes(device, side, pack.source.dtype, pack.source.size(0), pack.source.size(1));
        Matrix memory(DType::kF32, {pack.bytes / 4}, kContiguous);
        pack.data = memory.view().data;
        MatmulArgs with = args;
        CUBIST_RETURN_IF_ERROR(PackOperand(device, pack, side == Side::kA ? &with.packed_a : &with.packed_b));
        (side == Side::kA ? with.a : with.b) = {};
        return Matmul(device, with);
      };
    });
  }
}

TEST(FlippedViewsTest, GroupedMatmul) {
  const MakeCall forward = [](Tensors& t, DType dtype) {
    GroupedMatmulArgs args;
    args.x = t.In(dtype, {30, 24}), args.groups = t.Ids({4}, {5, 0, 12, 9});
    args.weights = t.In(dtype, {4, 24, 36}), args.bias = t.In(DType::kF32, {4, 36});
    args.residual = t.In(dtype, {30, 36}), args.activation = Activation::kSilu;
    args.out = t.Out(dtype, {30, 36});
    return Call(&GroupedMatmul, args);
  };
  ExpectSame(forward), ExpectRecordsRight(forward);
  const MakeCall backward = [](Tensors& t, DType dtype) {
    GroupedMatmulGradArgs args;
    args.dy = t.In(dtype, {30, 36}), args.groups = t.Ids({4}, {5, 0, 12, 9});
    args.weights = t.In(dtype, {4, 24, 36}), args.dx = t.Out(dtype, {30, 24});
    args.x = t.In(dtype, {30, 24}), args.dw = t.Out(DType::kF32, {4, 24, 36}), args.accumulate_dw = true;
    return Call(&GroupedMatmulGrad, args);
  };
  ExpectSame(backward), ExpectRecordsRight(backward);
}

// Every third pair hidden, and a block of them.
std::vector<bool> MaskOf(std::int64_t rows, std::int64_t keys) {
  std::vector<bool> hidden;
  for (std::int64_t i = 0; i < rows * keys; ++i) {
    const std::int64_t key = i % keys;
    hidden.push_back((key + i / keys) % 3 == 0 || (key >= 16 && key < 48));
  }
  return hidden;
}

template <class Args>
void SetAttention(Tensors& t, DType dtype, std::int64_t sq, std::int64_t skv, Args* args) {
  args->q = t.In(dtype, {2, 4, sq, 24}), args->k = t.In(dtype, {2, 2, skv, 24});
  args->v = t.In(dtype, {2, 2, skv, 16});
  args->rope.cos = t.In(DType::kF32, {skv, 8}), args->rope.sin = t.In(DType::kF32, {skv, 8});
  args->bias = t.In(dtype, {1, 4, sq, skv});
  args->mask = t.Flags({2, 1, sq, skv}, MaskOf(sq, skv));
  args->sinks = t.In(DType::kF32, {4}), args->alibi.slopes = t.In(DType::kF32, {4});
}

TEST(FlippedViewsTest, FlashAttention) {
  for (const auto& [sq, skv] : {std::pair<std::int64_t, std::int64_t>{30, 75}, {2, 2300}}) {
    const MakeCall make = [=, sq = sq, skv = skv](Tensors& t, DType dtype) {
      FlashAttentionArgs args;
      SetAttention(t, dtype, sq, skv, &args);
      args.out = t.Out(dtype, {2, 4, sq, 16}), args.lse = t.Out(DType::kF32, {2, 4, sq});
      return Call(&FlashAttention, args);
    };
    ExpectSame(make);
  }
  ExpectRecordsRight([](Tensors& t, DType dtype) {
    FlashAttentionArgs args;
    args.q = t.In(dtype, {1, 2, 9, 24}), args.k = t.In(dtype, {1, 1, 20, 24});
    args.v = t.In(dtype, {1, 1, 20, 16}), args.bias = t.In(dtype, {1, 1, 9, 20});
    args.out = t.Out(dtype, {1, 2, 9, 16}), args.lse = t.Out(DType::kF32, {1, 2, 9});
    return Call(&FlashAttention, args);
  });
}

TEST(FlippedViewsTest, FlashAttentionGrad) {
  ExpectSame([](Tensors& t, DType dtype) {
    FlashAttentionGradArgs args;
    SetAttention(t, dtype, 30, 75, &args);
    args.out = t.In(dtype, {2, 4, 30, 16}), args.lse = t.In(DType::kF32, {2, 4, 30});
    args.dout = t.In(dtype, {2, 4, 30, 16}), args.dq = t.Out(dtype, {2, 4, 30, 24});
    args.dk = t.Out(dtype, {2, 2, 75, 24}), args.dv = t.Out(dtype, {2, 2, 75, 16});
    args.dbias = t.Out(DType::kF32, {1, 4, 30, 75}), args.dsinks = t.Out(DType::kF32, {4});
    return Call(&FlashAttentionGrad, args);
  });
  ExpectRecordsRight([](Tensors& t, DType dtype) {
    FlashAttentionGradArgs args;
    args.q = t.In(dtype, {1, 2, 9, 24}), args.k = t.In(dtype, {1, 1, 20, 24});
    args.v = t.In(dtype, {1, 1, 20, 16}), args.out = t.In(dtype, {1, 2, 9, 16});
    args.lse = t.In(DType::kF32, {1, 2, 9}), args.dout = t.In(dtype, {1, 2, 9, 16});
    args.dq = t.Out(dtype, {1, 2, 9, 24}), args.dk = t.Out(dtype, {1, 1, 20, 24});
    args.dv = t.Out(dtype, {1, 1, 20, 16});
    return Call(&FlashAttentionGrad, args);
  });
}

const std::vector<std::int32_t> kTopK = {2, 0, 1, 3, 3, 1, 0, 2, 2, 1, 0, 3};  // (6, 2) of 4 experts
const std::vector<std::int32_t> kRows = {6, 0, 3, 9, 10, 4, 1, 7, 8, 5, 2, 11};

TEST(FlippedViewsTest, TokenPermute) {
  const MakeCall make = [](Tensors& t, DType dtype) {
    TokenPermuteArgs args;
    args.tokens = t.In(dtype, {6, 20}), args.topk_ids = t.Ids({6, 2}, kTopK), args.num_experts = 4;
    args.valid = t.Flags({6}, {true, true, false, true}), args.probs = t.In(dtype, {6, 2});
    args.expert_places = t.Ids({4}, {3, 1, 0, 2});
    args.permuted = t.Out(dtype, {12, 20}), args.sorted_indices = t.Out(DType::kI32, {12});
    args.permuted_probs = t.Out(dtype, {12}), args.row_tokens = t.Out(DType::kI32, {12});
    args.expert_counts = t.Out(DType::kI32, {4}), args.expert_offsets = t.Out(DType::kI32, {5});
    return Call(&TokenPermute, args);
  };
  ExpectSame(make);
  ExpectSame([](Tensors& t, DType dtype) {
    TokenPermuteArgs args;
    args.tokens = t.In(dtype, {6, 20}), args.num_experts = 4, args.top_k = 2;
    args.routing_map = t.Flags({6, 4}, {true, false, false, true, false, true, true, false});
    args.probs = t.In(dtype, {6, 4});
    args.permuted = t.Out(dtype, {12, 20}), args.sorted_indices = t.Out(DType::kI32, {12});
    args.permuted_probs = t.Out(dtype, {12});
    return Call(&TokenPermute, args);
  });
}

TEST(FlippedViewsTest, TokenUnpermuteAndGradients) {
  ExpectSame([](Tensors& t, DType dtype) {
    TokenUnpermuteArgs args;
    args.permuted = t.In(dtype, {12, 20}), args.sorted_indices = t.Ids({12}, kRows);
    args.probs = t.In(dtype, {6, 2}), args.bias = t.In(dtype, {4, 20}), args.topk_ids = t.Ids({6, 2}, kTopK);
    args.residual = t.In(dtype, {6, 20}), args.out = t.Out(dtype, {6, 20});
    return Call(&TokenUnpermute, args);
  });
  ExpectSame([](Tensors& t, DType dtype) {  // Rows that are added as they lie.
    TokenUnpermuteArgs args;
    args.permuted = t.In(dtype, {12, 20}), args.sorted_indices = t.Ids({12}, kRows), args.top_k = 2;
    args.out = t.Out(dtype, {6, 20});
    return Call(&TokenUnpermute, args);
  });
  ExpectSame([](Tensors& t, DType dtype) {
    TokenPermuteGradArgs args;
    args.permuted_grad = t.In(dtype, {12, 20}), args.sorted_indices = t.Ids({12}, kRows), args.top_k = 2;
    args.permuted_probs_grad = t.In(dtype, {12});
    args.tokens_grad = t.Out(dtype, {6, 20}), args.probs_grad = t.Out(dtype, {6, 2});
    return Call(&TokenPermuteGrad, args);
  });
  ExpectSame([](Tensors& t, DType dtype) {
    TokenUnpermuteGradArgs args;
    args.out_grad = t.In(dtype, {6, 20}), args.permuted = t.In(dtype, {12, 20});
    args.sorted_indices = t.Ids({12}, kRows), args.probs = t.In(dtype, {6, 2});
    args.permuted_grad = t.Out(dtype, {12, 20}), args.probs_grad = t.Out(dtype, {6, 2});
    return Call(&TokenUnpermuteGrad, args);
  });
}

TEST(FlippedViewsTest, ReorderChunks) {
  for (const bool inverse : {false, true}) {
    ExpectSame([=](Tensors& t, DType dtype) {
      ReorderChunksArgs args;
      args.tokens = t.In(dtype, {11, 20}), args.chunk_counts = t.Ids({2, 3}, {3, 0, 2, 1, 4, 1});
      args.probs = t.In(dtype, {11}), args.inverse = inverse;
      args.out = t.Out(dtype, {11, 20}), args.out_probs = t.Out(dtype, {11});
      args.row_ids = t.Out(DType::kI32, {11}), args.expert_counts = t.Out(DType::kI32, {3});
      return Call(&ReorderChunks, args);
    });
  }
}

TEST(FlippedViewsTest, Route) {
  const MakeCall forward = [](Tensors& t, DType dtype) {
    RouteArgs args;
    args.logits = t.In(dtype, {7, 12}), args.bias = t.In(dtype, {12}), args.options.renormalise = true;
    args.valid = t.Flags({7}, {true, false, true, true}), args.options.aux_coefficient = 1;
    args.weights = t.Out(dtype, {7, 3}), args.ids = t.Out(DType::kI32, {7, 3});
    args.scores = t.Out(DType::kF32, {7, 12}), args.counts = t.Out(DType::kI32, {12});
    args.aux_loss = t.Out(DType::kF32, {1});
    return Call(&Route, args);
  };
  ExpectSame(forward), ExpectRecordsRight(forward);
  const MakeCall backward = [](Tensors& t, DType dtype) {
    RouteGradArgs args;
    args.d_weights = t.In(dtype, {4, 3}), args.ids = t.Ids({4, 3}, {0, 5, 2, 1, 3, 4, 5, 4, 0, 2, 1, 3});
    args.scores = t.In(DType::kF32, {4, 6}), args.d_logits = t.Out(dtype, {4, 6});
    args.counts = t.Ids({6}, {2, 1, 3, 2, 2, 2}), args.valid = t.Flags({4}, {true, false, true, true});
    args.d_aux_loss = args.options.aux_coefficient = 1;
    ForEachElement(args.scores, [&](const auto&, std::int64_t at) {  // Their sums are divided by.
      auto* const score = static_cast<float*>(const_cast<void*>(args.scores.data)) + at;
      *score = 0.125f + std::abs(*score);
    });
    return Call(&RouteGrad, args);
  };
  ExpectSame(backward), ExpectRecordsRight(backward);
}

TEST(FlippedViewsTest, RmsNormAndSwiGlu) {
  const MakeCall norm = [](Tensors& t, DType dtype) {
    RmsNormArgs args;
    args.x = t.In(dtype, {9, 40}), args.residual = t.In(dtype, {9, 40}), args.gamma = t.In(dtype, {40});
    args.out = t.Out(dtype, {9, 40}), args.sum = t.Out(dtype, {9, 40}), args.rstd = t.Out(DType::kF32, {9});
    return Call(&RmsNorm, args);
  };
  ExpectSame(norm), ExpectRecordsRight(norm);
  ExpectSame([](Tensors& t, DType dtype) {
    RmsNormGradArgs args;
    args.d_out = t.In(dtype, {9, 40}), args.x = t.In(dtype, {9, 40}), args.rstd = t.In(DType::kF32, {9});
    args.gamma = t.In(dtype, {40}), args.d_sum = t.In(dtype, {9, 40});
    args.d_x = t.Out(dtype, {9, 40}), args.d_gamma = t.Out(dtype, {40});
    return Call(&RmsNormGrad, args);
  });
  ExpectSame([](Tensors& t, DType dtype) {
    SwiGluArgs args;
    args.gate = t.In(dtype, {9, 40}), args.up = t.In(dtype, {9, 40}), args.probs = t.In(dtype, {9});
    args.out = t.Out(dtype, {9, 40});
    return Call(&SwiGlu, args);
  });
  ExpectSame([](Tensors& t, DType dtype) {
    SwiGluGradArgs args;
    args.d_out = t.In(dtype, {9, 40}), args.gate = t.In(dtype, {9, 40}), args.up = t.In(dtype, {9, 40});
    args.probs = t.In(dtype, {9}), args.d_gate = t.Out(dtype, {9, 40}), args.d_up = t.Out(dtype, {9, 40});
    args.d_probs = t.Out(dtype, {9});
    return Call(&SwiGluGrad, args);
  });
}

TEST(FlippedViewsTest, LossScale) {
  ExpectSame([](Tensors& t, DType dtype) -> KernelRun {
    const Tensor gradient = t.Out(dtype, {3, 5, 4});
    return [=](const Device&) {
      bool apply = false;
      return LossScaler().Unscale({&gradient, 1}, &apply);
    };
  });
}

TEST(FlippedViewsTest, Blocks) {
  ExpectSame(
      [](Tensors& t, DType dtype) -> KernelRun {
        MoeBlockArgs args;
        args.x = t.In(dtype, {5, 8}), args.top_k = 2, args.out = t.Out(dtype, {5, 8});
        args.weights = {.norm = t.In(dtype, {8}),
                        .router = t.In(dtype, {8, 3}),
                        .gate_up = t.In(dtype, {3, 8, 8}),
                        .down = t.In(dtype, {3, 4, 8}),
                        .shared_gate_up = t.In(dtype, {8, 6}),
                        .shared_down = t.In(dtype, {3, 8}),
                        .post_norm = t.In(dtype, {8})};
        return [=](const Device& device) {
          BlockState state;
          return MoeBlock(device, args, &state);
        };
      },
      {DType::kF32});
  ExpectSame(
      [](Tensors& t, DType dtype) -> KernelRun {
        MlaBlockArgs args;
        args.x = t.In(dtype, {5, 8}), args.heads = 2, args.out = t.Out(dtype, {5, 8});
        args.weights = {.norm = t.In(dtype, {8}),
                        .q_down = t.In(dtype, {8, 3}),
                        .q_norm = t.In(dtype, {3}),
                        .q_up = t.In(dtype, {3, 8}),
                        .kv_down = t.In(dtype, {8, 5}),
                        .kv_norm = t.In(dtype, {3}),
                        .kv_up = t.In(dtype, {3, 10}),
                        .out = t.In(dtype, {6, 8}),
                        .post_norm = t.In(dtype, {8})};
        return [=](const Device& device) {
          BlockState state;
          return MlaBlock(device, args, &state);
        };
      },
      {DType::kF32});
}

// No move of a device steps downwards: rows are moved one by one then, elements too where columns are flipped.
TEST(FlippedViewsTest, AModelPaysAMoveForEachRow) {
  const auto time = [](std::int64_t row, std::int64_t col) {
    RmsNormArgs args;
    args.x = ConstTensor(nullptr, DType::kBF16, {4096, 256}, {row, col});
    args.out = Tensor(nullptr, DType::kBF16, {4096, 256});
    Profile profile;
    EXPECT_TRUE(IsOk(RmsNorm(NpuWithoutData(Ascend910B2()), args, &profile)));
    return profile.time_s;
  };
  EXPECT_GT(time(-256, 1), 1.01 * time(256, 1));
  EXPECT_GT(time(256, -1), 10 * time(-256, 1));
  EXPECT_EQ(time(-256, -1), time(256, -1));
}

}  // namespace
}  // namespace cubist::testing
