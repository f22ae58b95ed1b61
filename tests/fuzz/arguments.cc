// Calls made from bytes: most are right but for a field or two.
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"
#include "kernels/grouped_matmul.h"
#include "kernels/matmul.h"
#include "kernels/pack_operand.h"
#include "kernels/rms_norm.h"
#include "kernels/route.h"
#include "kernels/swiglu.h"
#include "kernels/token_permute.h"
#include "kernels/token_permute_grad.h"
#include "tests/fuzz/targets.h"

namespace cubist::fuzz {
namespace {

// Choices from the input; zeros once it ends.
class Choices {
 public:
  explicit Choices(Bytes input) : input_(input) {}

  unsigned Byte() {
    if (next_ == input_.size()) return 0;
    return static_cast<unsigned>(input_[next_++]);
  }
  bool Often() { return Byte() % 4 != 3; }
  bool Seldom() { return Byte() % 32 == 31; }
  std::int64_t Below(std::int64_t n) { return static_cast<std::int64_t>(Byte()) % n; }
  float Number() {
    constexpr float kNumbers[] = {1.0f, 0.0f, 0.5f, -1.0f, 1e30f, -0.0f, 1e-30f, 3.0f};
    return kNumbers[Byte() % std::size(kNumbers)];
  }
  template <class T, std::size_t n>
  T Of(const T (&values)[n]) {
    return values[Byte() % n];
  }

 private:
  Bytes input_;
  std::size_t next_ = 0;
};

constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr DType kInts[] = {DType::kI32, DType::kI64};

// Where all tensors lie: every one has a part of its own that holds any view that a spoilt size or stride may ask for.
constexpr std::int64_t kMost = 8;  // of a size
constexpr std::int64_t kPart = 64 * 1024, kParts = 24;

class Memory {
 public:
  Memory() : bytes_(kPart * kParts) {}

  // Floats of size about 1, integers from -1 to 6: `salt` varies them.
  void Fill(unsigned salt) {
    for (std::size_t i = 0; i < bytes_.size(); i += 4) {
      const auto noise = static_cast<std::uint32_t>((i / 4 + salt) * 2654435761u);
      const float value = static_cast<float>(noise >> 16) / 32768.0f - 1.0f;
      std::memcpy(&bytes_[i], &value, 4);
    }
    used_ = 0;
  }
  void FillIntegers(std::byte* part, DType dtype, unsigned salt) {
    for (std::int64_t i = 0; i < kPart / SizeOf(dtype); ++i) {
      const std::int64_t value = static_cast<std::int64_t>((i * 7 + salt) % 8) - (salt % 5 == 4 ? 1 : 0);
      if (dtype == DType::kI64) {
        std::memcpy(part + i * 8, &value, 8);
      } else {
        const auto narrow = static_cast<std::int32_t>(value);
        std::memcpy(part + i * 4, &narrow, 4);
      }
    }
  }
  std::byte* NextPart() { return &bytes_[static_cast<std::size_t>(kPart * (used_++ % kParts))]; }
  std::byte* Part(std::int64_t i) { return &bytes_[static_cast<std::size_t>(kPart * i)]; }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
  std::int64_t used_ = 0;
};

class Caller {
 public:
  explicit Caller(Bytes input) : choose_(input) { memory().Fill(choose_.Byte()); }

  Choices& choose() { return choose_; }
  std::int64_t Size() { return choose_.Below(kMost); }
  DType Float() { return choose_.Of(kFloats); }

  // A right view, contiguous or with gaps, and seldom a spoilt one.
  Tensor Of(DType dtype, std::initializer_list<std::int64_t> sizes) {
    Tensor t(memory().NextPart(), dtype, sizes);
    if (!IsFloat(dtype)) memory().FillIntegers(static_cast<std::byte*>(t.data), dtype, choose_.Byte());
    if (choose_.Seldom() && t.rank > 1) std::swap(t.strides[0], t.strides[1]);
    if (choose_.Seldom()) {
      for (auto& stride : t.strides) stride *= 2;
    }
    if (choose_.Seldom()) Spoil(&t);
    return t;
  }
  Tensor Maybe(DType dtype, std::initializer_list<std::int64_t> sizes) {
    return choose_.Byte() % 2 == 0 ? Tensor() : Of(dtype, sizes);
  }

  // Runs a call; where it is refused, nothing may have been written.
  template <class Call>
  void Run(const Call& call) {
    static std::vector<std::byte> before;
    before = memory().bytes();
    HostOptions host;
    host.threads = static_cast<int>(1 + choose_.Below(2));
    NpuOptions npu;
    npu.with_data = choose_.Byte() % 2 == 0;
    const bool on_host = choose_.Byte() % 4 != 3;
    const Status status = call(on_host ? Host(host) : Npu(Ascend910B2(), npu));
    if (status.ok()) return;
    if (status.message().empty() || before != memory().bytes()) {
      std::fprintf(stderr, "refused (%s), and %s\n", status.message().c_str(),
                   status.message().empty() ? "does not say why" : "wrote");
      std::abort();
    }
  }

 private:
  static Memory& memory() {
    static Memory memory;
    return memory;
  }

  void Spoil(Tensor* t) {
    const auto d = static_cast<std::size_t>(choose_.Below(std::max(t->rank, 1)));
    constexpr std::int64_t kStrides[] = {-1, 0, 1, 3, std::int64_t{1} << 61};
    switch (choose_.Byte() % 7) {
      case 0:
        t->sizes[d] = choose_.Below(kMost + 1) - 1;
        break;
      case 1:
        t->strides[d] = choose_.Of(kStrides);
        break;
      case 2:
        t->dtype = static_cast<DType>(choose_.Byte() % 5);
        break;
      case 3:
        t->rank = static_cast<int>(choose_.Below(5));
        break;
      case 4:
        t->data = static_cast<std::byte*>(t->data) + 1;
        break;
      case 5:
        t->data = nullptr;
        break;
      default:
        t->data = memory().Part(choose_.Below(kParts));  // another tensor's
    }
  }

  Choices choose_;
};

void CallMatmul(Caller& in) {
  const std::int64_t m = in.Size(), n = in.Size(), k = in.Size();
  const DType dtype = in.Float();
  MatmulArgs args;
  args.transpose_a = in.choose().Below(2) == 1;
  args.transpose_b = in.choose().Below(2) == 1;
  args.a = args.transpose_a ? in.Of(dtype, {k, m}) : in.Of(dtype, {m, k});
  args.b = args.transpose_b ? in.Of(dtype, {n, k}) : in.Of(dtype, {k, n});
  args.bias = in.Maybe(dtype, {n});
  args.accumulate = in.choose().Seldom();
  args.any_order = in.choose().Seldom();
  args.c = in.Of(args.accumulate ? DType::kF32 : dtype, {m, n});
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
  args.bias = in.Maybe(dtype, {e, n});
  args.out = in.Of(dtype, {m, n});
  in.Run([&](const Device& device) { return GroupedMatmul(device, args); });
}

void CallGroupedMatmulGrad(Caller& in) {
  const std::int64_t m = in.Size() * 4, n = in.Size(), k = in.Size(), e = in.Size();
  const DType dtype = in.Float();
  GroupedMatmulGradArgs args;
  args.dy = in.Of(dtype, {m, n});
  args.groups = in.Of(in.choose().Of(kInts), {e});
  args.weights = in.Maybe(dtype, {e, k, n});
  args.dx = in.Maybe(dtype, {m, k});
  args.x = in.Maybe(dtype, {m, k});
  args.accumulate_dw = in.choose().Seldom();
  args.dw = in.Maybe(DType::kF32, {e, k, n});
  in.Run([&](const Device& device) { return GroupedMatmulGrad(device, args); });
}

// What both passes of attention are given alike.
struct AttentionShape {
  std::int64_t b, groups, kv_heads, heads, sq, skv, qk, v, rope;
  DType dtype;
};
AttentionShape ShapeOf(Caller& in) {
  AttentionShape s{};
  s.b = in.choose().Below(3), s.groups = 1 + in.choose().Below(2), s.kv_heads = in.choose().Below(3);
  s.heads = s.groups * s.kv_heads;
  s.sq = in.Size(), s.skv = in.Size(), s.qk = in.Size(), s.v = in.Size(),
  s.rope = in.choose().Below(2) * 2 * in.choose().Below(3);
  s.dtype = in.Float();
  return s;
}

template <class Args>
void GiveInputs(Caller& in, const AttentionShape& s, Args* args, std::vector<std::int64_t>* prefix) {
  args->q = in.Of(s.dtype, {s.b, s.heads, s.sq, s.qk});
  args->k = in.Of(s.dtype, {s.b, s.kv_heads, s.skv, s.qk});
  args->v = in.Of(s.dtype, {s.b, s.kv_heads, s.skv, s.v});
  if (s.rope > 0) {
    args->q_rope = in.Of(s.dtype, {s.b, s.heads, s.sq, s.rope});
    args->k_rope = in.Of(s.dtype, {s.b, in.choose().Below(2) == 0 ? 1 : s.kv_heads, s.skv, s.rope});
  }
  constexpr Causal kCausal[] = {Causal::kNone, Causal::kTopLeft, Causal::kBottomRight};
  args->causal = in.choose().Of(kCausal);
  if (in.choose().Seldom()) args->scale = in.choose().Number();
  if (in.choose().Seldom()) {
    args->window = AttentionWindow{};
    if (in.choose().Often()) args->window->left = in.Size() - 2;
    if (in.choose().Often()) args->window->right = in.Size() - 2;
    args->window->anchor = in.choose().Of(kCausal);
  }
  if (in.choose().Seldom()) {
    for (std::int64_t i = in.choose().Below(3); i > 0; --i) prefix->push_back(in.Size() - 1);
    args->prefix = *prefix;
  }
}

void CallFlashAttention(Caller& in) {
  const AttentionShape s = ShapeOf(in);
  FlashAttentionArgs args;
  std::vector<std::int64_t> prefix, q_ends, kv_ends;
  GiveInputs(in, s, &args, &prefix);
  args.out = in.Of(s.dtype, {s.b, s.heads, s.sq, s.v});
  args.lse = in.Maybe(DType::kF32, {s.b, s.heads, s.sq});
  if (in.choose().Seldom()) args.bias = in.Of(DType::kF32, {1, s.heads, s.sq, s.skv});
  if (in.choose().Seldom()) args.sinks = in.Of(DType::kF32, {s.heads});
  if (in.choose().Seldom()) args.soft_cap = in.choose().Number();
  if (in.choose().Seldom()) {
    for (std::int64_t i = in.choose().Below(4); i > 0; --i) {
      q_ends.push_back(in.Size());
      kv_ends.push_back(in.Size());
    }
    args.lengths = {q_ends, kv_ends};
  }
  if (in.choose().Seldom()) {
    const std::int64_t positions = in.Size() * 2, turned = s.rope > 0 ? s.rope : s.qk;
    args.rope.cos = in.Of(DType::kF32, {positions, turned / 2});
    args.rope.sin = in.Of(DType::kF32, {positions, turned / 2});
    args.rope.layout = static_cast<RopeLayout>(in.choose().Below(3));
    args.rope.q_offset = in.Size() - 1;
    args.rope.k_offset = in.Size() - 1;
  }
  in.Run([&](const Device& device) { return FlashAttention(device, args); });
}

void CallFlashAttentionGrad(Caller& in) {
  const AttentionShape s = ShapeOf(in);
  FlashAttentionGradArgs args;
  std::vector<std::int64_t> prefix;
  GiveInputs(in, s, &args, &prefix);
  args.out = in.Of(s.dtype, {s.b, s.heads, s.sq, s.v});
  args.dout = in.Of(s.dtype, {s.b, s.heads, s.sq, s.v});
  args.lse = in.Of(DType::kF32, {s.b, s.heads, s.sq});
  const auto like = [&](const ConstTensor& t, Tensor* gradient) {
    if (t.given()) *gradient = in.Of(s.dtype, {t.size(0), t.size(1), t.size(2), t.size(3)});
  };
  like(args.q, &args.dq), like(args.k, &args.dk), like(args.v, &args.dv);
  like(args.q_rope, &args.dq_rope), like(args.k_rope, &args.dk_rope);
  in.Run([&](const Device& device) { return FlashAttentionGrad(device, args); });
}

void CallTokenPermute(Caller& in) {
  const std::int64_t t = in.Size(), h = in.Size(), k = in.choose().Below(4), e = 1 + in.Size();
  const DType dtype = in.Float();
  TokenPermuteArgs args;
  args.tokens = in.Of(dtype, {t, h});
  args.topk_ids = in.Of(in.choose().Of(kInts), {t, k});
  args.num_experts = in.choose().Seldom() ? in.Size() - 1 : std::max<std::int64_t>(e, 7);
  std::int64_t rows = t * k;
  if (in.choose().Seldom()) args.num_out_tokens = in.Size() - 4;
  if (in.choose().Seldom()) args.capacity = in.Size() - 1;
  if (in.choose().Seldom()) args.row_multiple = in.Size() - 1;
  if (args.capacity > 0) rows = args.num_experts * args.capacity;
  if (args.num_out_tokens != 0 && args.capacity == 0) {
    rows = args.num_out_tokens > 0 ? std::min(args.num_out_tokens, rows)
                                   : std::max<std::int64_t>(rows + args.num_out_tokens, 0);
  }
  if (in.choose().Seldom()) {
    args.rows = Range{in.Size(), in.Size()};
    rows = std::max<std::int64_t>(args.rows->size(), 0);
  }
  args.permuted = in.Of(dtype, {rows, h});
  args.sorted_indices = in.Of(DType::kI32, {t * k});
  if (in.choose().Seldom()) {
    args.probs = in.Of(DType::kF32, {t, k});
    args.permuted_probs = in.Of(DType::kF32, {rows});
  }
  args.expert_counts = in.Maybe(DType::kI32, {args.num_experts});
  args.expert_offsets = in.Maybe(DType::kI32, {args.num_experts + 1});
  in.Run([&](const Device& device) { return TokenPermute(device, args); });
}

void CallTokenUnpermute(Caller& in) {
  const std::int64_t t = in.Size(), h = in.Size(), k = in.choose().Below(4), rows = in.Size();
  const DType dtype = in.Float();
  TokenUnpermuteArgs args;
  args.permuted = in.Of(dtype, {rows, h});
  args.sorted_indices = in.Of(DType::kI32, {t * k});
  args.probs = in.Maybe(DType::kF32, {t, k});
  args.top_k = k;
  if (in.choose().Seldom()) args.rows = Range{in.Size(), in.Size()};
  args.out = in.Of(dtype, {t, h});
  in.Run([&](const Device& device) { return TokenUnpermute(device, args); });
}

void CallTokenPermuteGrad(Caller& in) {
  const std::int64_t t = in.Size(), h = in.Size(), k = in.choose().Below(4), rows = in.Size();
  const DType dtype = in.Float();
  TokenPermuteGradArgs args;
  args.permuted_grad = in.Of(dtype, {rows, h});
  args.sorted_indices = in.Of(DType::kI32, {t * k});
  args.top_k = k;
  if (in.choose().Seldom()) {
    args.permuted_probs_grad = in.Of(DType::kF32, {rows});
    args.probs_grad = in.Of(DType::kF32, {t, k});
  }
  args.tokens_grad = in.Of(dtype, {t, h});
  in.Run([&](const Device& device) { return TokenPermuteGrad(device, args); });
}

void CallTokenUnpermuteGrad(Caller& in) {
  const std::int64_t t = in.Size(), h = in.Size(), k = in.choose().Below(4), rows = in.Size();
  const DType dtype = in.Float();
  TokenUnpermuteGradArgs args;
  args.out_grad = in.Of(dtype, {t, h});
  args.sorted_indices = in.Of(DType::kI32, {t * k});
  args.top_k = k;
  args.probs = in.Maybe(DType::kF32, {t, k});
  args.permuted = in.Maybe(dtype, {rows, h});
  args.permuted_grad = in.Of(dtype, {rows, h});
  args.probs_grad = in.Maybe(DType::kF32, {t, k});
  in.Run([&](const Device& device) { return TokenUnpermuteGrad(device, args); });
}

RouteOptions OptionsOf(Caller& in) {
  RouteOptions o;
  o.score = static_cast<ScoreFunction>(in.choose().Below(3));
  o.renormalise = in.choose().Below(2) == 1;
  if (in.choose().Seldom()) o.scale = in.choose().Number();
  if (in.choose().Seldom()) o.temperature = in.choose().Number();
  if (in.choose().Seldom()) o.dropout = in.choose().Number();
  if (in.choose().Seldom())
    o.groups = in.Size() - 1, o.top_groups = in.Size() - 1, o.group_top = in.Size() - 1;
  o.bad_logits = static_cast<BadLogits>(in.choose().Below(3));
  if (in.choose().Seldom()) o.limit = in.choose().Number();
  return o;
}

void CallRoute(Caller& in) {
  const std::int64_t t = in.Size(), e = in.Size(), k = in.choose().Below(5);
  RouteArgs args;
  args.logits = in.Of(in.Float(), {t, e});
  args.bias = in.Maybe(in.Float(), {e});
  args.options = OptionsOf(in);
  args.weights = in.Of(in.Float(), {t, k});
  args.ids = in.Of(DType::kI32, {t, k});
  args.scores = in.Maybe(DType::kF32, {t, e});
  args.counts = in.Maybe(DType::kI32, {e});
  args.bad = in.Maybe(DType::kF32, {t});
  if (in.choose().Seldom()) args.aux_loss = in.Of(DType::kF32, {1});
  in.Run([&](const Device& device) { return Route(device, args); });
}

void CallRouteGrad(Caller& in) {
  const std::int64_t t = in.Size(), e = in.Size(), k = in.choose().Below(5);
  RouteGradArgs args;
  args.d_weights = in.Of(in.Float(), {t, k});
  args.ids = in.Of(DType::kI32, {t, k});
  args.scores = in.Of(DType::kF32, {t, e});
  args.counts = in.Maybe(DType::kI32, {e});
  args.options = OptionsOf(in);
  if (in.choose().Seldom()) args.d_aux_loss = in.choose().Number();
  args.d_logits = in.Of(in.Float(), {t, e});
  in.Run([&](const Device& device) { return RouteGrad(device, args); });
}

void CallRmsNorm(Caller& in) {
  const std::int64_t t = in.Size(), h = in.Size();
  const DType dtype = in.Float();
  RmsNormArgs args;
  args.x = in.Of(dtype, {t, h});
  args.gamma = in.Maybe(in.Float(), {h});
  if (in.choose().Seldom()) args.residual = in.Of(dtype, {t, h}), args.sum = in.Of(dtype, {t, h});
  if (in.choose().Seldom()) args.eps = in.choose().Number();
  args.out = in.Of(dtype, {t, h});
  args.rstd = in.Maybe(DType::kF32, {t});
  in.Run([&](const Device& device) { return RmsNorm(device, args); });
}

void CallRmsNormGrad(Caller& in) {
  const std::int64_t t = in.Size(), h = in.Size();
  const DType dtype = in.Float();
  RmsNormGradArgs args;
  args.d_out = in.Of(dtype, {t, h});
  args.x = in.Of(dtype, {t, h});
  args.rstd = in.Of(DType::kF32, {t});
  args.gamma = in.Maybe(in.Float(), {h});
  args.d_sum = in.Maybe(dtype, {t, h});
  args.d_x = in.Of(dtype, {t, h});
  args.d_gamma = in.Maybe(in.Float(), {h});
  in.Run([&](const Device& device) { return RmsNormGrad(device, args); });
}

void CallSwiGlu(Caller& in) {
  const std::int64_t m = in.Size(), n = in.Size();
  const DType dtype = in.Float();
  SwiGluArgs args;
  args.gate = in.Of(dtype, {m, n});
  args.up = in.Of(dtype, {m, n});
  args.probs = in.Maybe(in.Float(), {m});
  args.out = in.Of(dtype, {m, n});
  in.Run([&](const Device& device) { return SwiGlu(device, args); });
}

void CallSwiGluGrad(Caller& in) {
  const std::int64_t m = in.Size(), n = in.Size();
  const DType dtype = in.Float();
  SwiGluGradArgs args;
  args.d_out = in.Of(dtype, {m, n});
  args.gate = in.Of(dtype, {m, n});
  args.up = in.Of(dtype, {m, n});
  args.probs = in.Maybe(in.Float(), {m});
  args.d_gate = in.Of(dtype, {m, n});
  args.d_up = in.Of(dtype, {m, n});
  if (args.probs.given()) args.d_probs = in.Maybe(in.Float(), {m});
  in.Run([&](const Device& device) { return SwiGluGrad(device, args); });
}

constexpr void (*kCalls[])(Caller&) = {
    CallMatmul,           CallPackedMatmul,       CallGroupedMatmul, CallGroupedMatmulGrad,
    CallFlashAttention,   CallFlashAttentionGrad, CallTokenPermute,  CallTokenUnpermute,
    CallTokenPermuteGrad, CallTokenUnpermuteGrad, CallRoute,         CallRouteGrad,
    CallRmsNorm,          CallRmsNormGrad,        CallSwiGlu,        CallSwiGluGrad};

}  // namespace

void Arguments(Bytes input) {
  if (input.empty()) return;
  Caller caller(input.subspan(1));
  kCalls[static_cast<std::size_t>(input[0]) % std::size(kCalls)](caller);
}

}  // namespace cubist::fuzz
