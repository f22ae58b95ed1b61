// A layer with conventional kernels beside the layer with ours: every kernel of its two blocks, one after the other, on one
// device of the workload's split. Tokens and heads are divided as `cubist run` divides them; other dimensions are true.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/block_steps.h"
#include "kernels/route.h"
#include "tools/ablate/ablation.h"
#include "tools/ablate/chain_ops.h"
#include "tools/cases.h"
#include "tools/kernel_call.h"

namespace cubist {
namespace {

// What a step of the ablation turns from its conventional form to ours.
enum Idea { kNone, kMatmul, kAttention, kPermute };

class Layer {
 public:
  explicit Layer(const ScaledWorkload& s) : s_(s) {}

  AblationCase Case(const char* direction) const {
    AblationCase c{fmt::format("{} {}x{} {} heads {} of {} experts", direction, s_.tokens(),
                               s_.workload.hidden, s_.heads, s_.local_experts(), s_.workload.moe.experts),
                   direction,
                   {}};
    const std::pair<Idea, const char*> ideas[] = {
        {kNone, "conventional"}, {kMatmul, "AscendP-MM"}, {kAttention, "RECT-FA"}, {kPermute, "VectorSort"}};
    for (const auto& [idea, name] : ideas) {
      AblationStep step{.name = name};
      for (const Part& part : parts_) step.parts.push_back(part.idea <= idea ? part.ours : part.conventional);
      c.steps.push_back(std::move(step));
    }
    return c;
  }

  void Forward() {
    const Workload& w = s_.workload;
    const std::int64_t tokens = s_.tokens(), rows = s_.expert_rows(), ffn = w.moe.ffn;
    ForEachProjection([&](const char* name, std::int64_t n, std::int64_t k) { Matmul(name, tokens, n, k); });
    for (const std::int64_t cols : NormWidths()) Kernel("rms_norm", {tokens, cols});
    From("attention", kAttention, FlashAttentionCase(s_.heads, s_.sequence, w.attention, true, false),
         batch());
    Residual(), Residual();
    // The shared expert's rows join the routed ones before the norm of both.
    if (w.sandwich_norm && w.moe.shared_experts > 0) Residual();
    Router();
    From("permute", kPermute, PermuteCase(tokens, w.hidden, w.moe.top_k, w.moe.experts));
    Experts("experts up", 2 * ffn, w.hidden);
    Kernel("swiglu", {rows, ffn});
    Experts("experts down", w.hidden, ffn);
    From("unpermute", kPermute, UnpermuteCase(tokens, w.hidden, w.moe.top_k, w.moe.experts));
    if (const std::int64_t shared = w.moe.shared_experts * ffn; shared > 0)
      Kernel("swiglu", {tokens, shared});
  }

  void Backward() {
    const Workload& w = s_.workload;
    const std::int64_t tokens = s_.tokens(), rows = s_.expert_rows(), ffn = w.moe.ffn;
    ForEachProjection([&](const char* name, std::int64_t n, std::int64_t k) {
      Matmul(fmt::format("{} dx", name), tokens, k, n);
      Matmul(fmt::format("{} dw", name), k, n, tokens);
    });
    for (const std::int64_t cols : NormWidths()) Kernel("rms_norm_grad", {tokens, cols});
    From("attention", kAttention, FlashAttentionCase(s_.heads, s_.sequence, w.attention, true, true),
         batch());
    Residual(), Residual();
    RouterGradient();
    PermuteGradients();
    ExpertsGradient("experts down", w.hidden, ffn);
    Kernel("swiglu_grad", {rows, ffn});
    ExpertsGradient("experts up", 2 * ffn, w.hidden);
    if (const std::int64_t shared = w.moe.shared_experts * ffn; shared > 0)
      Kernel("swiglu_grad", {tokens, shared});
  }

 private:
  struct Part {
    Idea idea;
    AblationStep conventional, ours;
  };

  int batch() const { return static_cast<int>(s_.batch); }
  std::vector<std::int64_t> NormWidths() const {
    const Workload& w = s_.workload;
    std::vector<std::int64_t> widths = {w.hidden, w.attention.q_rank, w.attention.kv_rank, w.hidden};
    if (w.sandwich_norm) widths.insert(widths.end(), 2, w.hidden);
    return widths;
  }
  RouteOptions RouterOptions() const {
    const Workload::Moe& moe = s_.workload.moe;
    return {.score = moe.score,
            .renormalise = true,
            .scale = static_cast<float>(moe.routed_scale),
            .groups = moe.groups,
            .top_groups = moe.top_groups};
  }
  // visit(name, n, k): the products of all tokens with weights (k, n).
  template <class Visit>
  void ForEachProjection(Visit visit) const {
    const Workload& w = s_.workload;
    const Workload::Attention& a = w.attention;
    visit("q down", a.q_rank, w.hidden);
    visit("q up", s_.heads * a.qk_dim(), a.q_rank);
    visit("kv down", a.kv_rank + a.rope_dim, w.hidden);
    visit("kv up", s_.heads * (a.nope_dim + a.v_dim), a.kv_rank);
    visit("out", w.hidden, s_.heads * a.v_dim);
    visit("router", w.moe.experts, w.hidden);
    const std::int64_t shared = w.moe.shared_experts * w.moe.ffn;
    if (shared == 0) return;
    visit("shared up", 2 * shared, w.hidden);
    visit("shared down", w.hidden, shared);
  }

  void Add(const std::string& name, Idea idea, AblationStep conventional, AblationStep ours, int times = 1,
           int ours_times = 1) {
    conventional.name = ours.name = name;
    conventional.times = times, ours.times = ours_times;
    ours.idea = idea;
    parts_.push_back({idea, std::move(conventional), std::move(ours)});
  }
  // The same in every step.
  void Fixed(const std::string& name, const Call& call, int times = 1) {
    const AblationStep step{.call = call};
    Add(name, kNone, step, step, times, times);
  }
  void From(const std::string& name, Idea idea, const AblationCase& c, int times = 1) {
    Add(name, idea, c.steps.front(), c.steps.back(), times, times);
  }

  static Call CallOf(const std::string& kernel, const Shape& shape) {
    KernelCallOptions options;
    options.kernel = kernel;
    for (const std::int64_t size : shape)
      options.shape += fmt::format("{}{}", options.shape.empty() ? "" : "x", size);
    return [options](const Device& device, Profile* profile) {
      KernelCall call;
      CUBIST_RETURN_IF_ERROR(MakeKernelCall(options, &call));
      return call(device, profile);
    };
  }
  void Kernel(const std::string& kernel, const Shape& shape) {
    std::string name = kernel;
    for (const std::int64_t size : shape) name += fmt::format(" {}", size);
    Fixed(name, CallOf(kernel, shape));
  }
  void Matmul(const std::string& name, std::int64_t m, std::int64_t n, std::int64_t k) {
    From(name, kMatmul, MatmulCase("", m, n, k));
  }
  // A product for each expert, or one for all.
  void Experts(const std::string& name, std::int64_t n, std::int64_t k) {
    const std::int64_t rows = s_.expert_rows(), experts = s_.local_experts();
    const AblationCase one = MatmulCase("", CeilDiv(rows, experts), n, k);
    Add(name, kMatmul, one.steps.front(), {.call = CallOf("grouped_matmul", {rows, n, k, experts})},
        static_cast<int>(experts));
  }
  void ExpertsGradient(const std::string& name, std::int64_t n, std::int64_t k) {
    const std::int64_t rows = s_.expert_rows(), experts = s_.local_experts();
    const std::int64_t of_one = CeilDiv(rows, experts);
    const auto each = static_cast<int>(experts);
    Add(name + " dx", kMatmul, MatmulCase("", of_one, k, n).steps.front(),
        {.call = CallOf("grouped_matmul_grad", {rows, n, k, experts})}, each);
    // Ours gives both at once.
    const AblationStep dw = MatmulCase("", k, n, of_one).steps.front();
    Add(name + " dw", kMatmul, dw, dw, each, 0);
  }

  void Residual() {
    const std::int64_t tokens = s_.tokens(), hidden = s_.workload.hidden;
    Fixed("residual", [=](const Device& device, Profile* profile) {
      const ConstTensor x(nullptr, DType::kBF16, {tokens, hidden});
      return Sum(device, {.a = x, .b = x, .out = Tensor(nullptr, DType::kBF16, {tokens, hidden})}, profile);
    });
  }

  void Router() {
    const Workload::Moe& moe = s_.workload.moe;
    const std::int64_t tokens = s_.tokens(), experts = moe.experts, top_k = moe.top_k;
    Fixed(fmt::format("route {} {} {} {}", tokens, experts, top_k, moe.groups),
          [=, bias = moe.router_bias, options = RouterOptions()](const Device& device, Profile* profile) {
            RouteArgs args;
            args.logits = ConstTensor(nullptr, DType::kF32, {tokens, experts});
            if (bias) args.bias = ConstTensor(nullptr, DType::kF32, {experts});
            args.options = options;
            args.weights = Tensor(nullptr, DType::kF32, {tokens, top_k});
            args.ids = Tensor(nullptr, DType::kI32, {tokens, top_k});
            args.scores = Tensor(nullptr, DType::kF32, {tokens, experts});
            args.counts = Tensor(nullptr, DType::kI32, {experts});
            return Route(device, args, profile);
          });
  }

  void RouterGradient() {
    const Workload::Moe& moe = s_.workload.moe;
    const std::int64_t tokens = s_.tokens(), experts = moe.experts, top_k = moe.top_k;
    auto ids = std::make_shared<std::vector<std::int32_t>>(static_cast<std::size_t>(tokens * top_k));
    for (std::size_t i = 0; i < ids->size(); ++i)
      (*ids)[i] = static_cast<std::int32_t>(static_cast<std::int64_t>(i) % experts);
    Fixed("route_grad", [=, options = RouterOptions()](const Device& device, Profile* profile) {
      RouteGradArgs args;
      args.d_weights = ConstTensor(nullptr, DType::kF32, {tokens, top_k});
      args.ids = ConstTensor(ids->data(), {tokens, top_k});
      args.scores = ConstTensor(nullptr, DType::kF32, {tokens, experts});
      args.d_logits = Tensor(nullptr, DType::kBF16, {tokens, experts});
      args.options = options;
      return RouteGrad(device, args, profile);
    });
  }

  // Conventionally the gradient of unpermute repeats rows, weights them and rounds (the dots of its probabilities not
  // counted), and that of permute is what unpermute is: gather, widen, sum, round.
  void PermuteGradients() {
    const Workload& w = s_.workload;
    const std::int64_t tokens = s_.tokens(), hidden = w.hidden, top_k = w.moe.top_k, slots = tokens * top_k;
    std::vector<std::int32_t> repeated(static_cast<std::size_t>(slots));
    for (std::size_t i = 0; i < repeated.size(); ++i)
      repeated[i] = static_cast<std::int32_t>(static_cast<std::int64_t>(i) % tokens);
    const auto weighted = [=](const Device& device, Profile* profile) {
      CUBIST_RETURN_IF_ERROR(GatherRows(device, tokens, hidden, repeated, profile));
      CUBIST_RETURN_IF_ERROR(ScaleRows(device, slots, hidden, profile));
      return NarrowRows(device, slots, hidden, profile);
    };
    Add("unpermute_grad", kPermute, {.call = weighted},
        {.call = CallOf("token_unpermute_grad", {tokens, hidden, top_k})});
    Add("permute_grad", kPermute, UnpermuteCase(tokens, hidden, top_k, w.moe.experts).steps.front(),
        {.call = CallOf("token_permute_grad", {tokens, hidden, top_k})});
  }

  ScaledWorkload s_;
  std::vector<Part> parts_;
};

}  // namespace

std::vector<AblationCase> LayerAblation(const Workload& workload) {
  const ScaledWorkload scaled = Scale(workload, workload.run.token_scale, workload.run.head_scale);
  Layer forward(scaled), backward(scaled);
  forward.Forward(), backward.Backward();
  return {forward.Case("forward"), backward.Case("backward")};
}

}  // namespace cubist
