#include "kernels/flash_attention_grad.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "kernels/attention_sequences.h"
#include "kernels/choose_for.h"
#include "kernels/flash_attention_grad_kernel.h"
#include "kernels/pack.h"
#include "kernels/validate.h"
#include "npu_model/launch.h"

namespace cubist {
namespace {

constexpr const char* kName = "flash_attention_grad";

FlashAttentionGradShape ShapeOf(const FlashAttentionGradArgs& args) {
  FlashAttentionGradShape s;
  s.batches = args.q.size(0), s.heads = args.q.size(1), s.sq = args.q.size(2), s.d_qk = args.q.size(3);
  s.kv_heads = args.k.size(1), s.skv = args.k.size(2), s.d_v = args.v.size(3);
  if (args.q_rope.given()) s.d_rope = args.q_rope.size(3), s.rope_heads = args.k_rope.size(1);
  s.in = args.q.dtype;
  const std::int64_t prefix =
      args.prefix.empty() ? 0 : *std::max_element(args.prefix.begin(), args.prefix.end());
  s.band = BandOf(args.causal, args.window, s.sq, s.skv, prefix);
  return s;
}

// The arguments by name, in the order of their messages.
struct Arguments {
  explicit Arguments(const FlashAttentionGradArgs& args)
      : q{kName, "q", args.q},
        k{kName, "k", args.k},
        v{kName, "v", args.v},
        q_rope{kName, "q_rope", args.q_rope},
        k_rope{kName, "k_rope", args.k_rope},
        out{kName, "out", args.out},
        lse{kName, "lse", args.lse},
        dout{kName, "dout", args.dout},
        dq{kName, "dq", args.dq},
        dk{kName, "dk", args.dk},
        dv{kName, "dv", args.dv},
        dq_rope{kName, "dq_rope", args.dq_rope},
        dk_rope{kName, "dk_rope", args.dk_rope} {}

  std::vector<const Argument*> inputs() const { return {&q, &k, &v, &q_rope, &k_rope, &out, &lse, &dout}; }
  std::vector<const Argument*> outputs() const { return {&dq, &dk, &dv, &dq_rope, &dk_rope}; }

  Argument q, k, v, q_rope, k_rope, out, lse, dout, dq, dk, dv, dq_rope, dk_rope;
};

// Shaped like `like`.
Status CheckLike(const Argument& arg, const Argument& like) {
  const std::string dims[4] = {std::string("B, of ") + like.name, std::string("heads, of ") + like.name,
                               std::string("rows, of ") + like.name, std::string("columns, of ") + like.name};
  return CheckShape(arg, {{dims[0].c_str(), like.tensor.size(0)},
                          {dims[1].c_str(), like.tensor.size(1)},
                          {dims[2].c_str(), like.tensor.size(2)},
                          {dims[3].c_str(), like.tensor.size(3)}});
}

Status CheckShapes(const Arguments& x) {
  CUBIST_RETURN_IF_ERROR(CheckShape(x.q, {{"B"}, {"Nq"}, {"Sq"}, {"Dqk"}}));
  const std::int64_t b = x.q.tensor.size(0), nq = x.q.tensor.size(1), sq = x.q.tensor.size(2);
  CUBIST_RETURN_IF_ERROR(
      CheckShape(x.k, {{"B, of q", b}, {"Nkv"}, {"Skv"}, {"Dqk, of q", x.q.tensor.size(3)}}));
  const std::int64_t nkv = x.k.tensor.size(1), skv = x.k.tensor.size(2);
  CUBIST_RETURN_IF_ERROR(CheckShape(x.v, {{"B, of q", b}, {"Nkv, of k", nkv}, {"Skv, of k", skv}, {"Dv"}}));
  if (nkv == 0 ? nq != 0 : nq % nkv != 0) {
    return x.q.Error("has " + std::to_string(nq) + " heads, needs a multiple of the " + std::to_string(nkv) +
                     " heads of k");
  }
  if (x.q_rope.tensor.given() != x.k_rope.tensor.given()) {
    return (x.q_rope.tensor.given() ? x.k_rope : x.q_rope).Error("is not given, but the other rope part is");
  }
  if (x.q_rope.tensor.given()) {
    CUBIST_RETURN_IF_ERROR(
        CheckShape(x.q_rope, {{"B, of q", b}, {"Nq, of q", nq}, {"Sq, of q", sq}, {"Dr"}}));
    CUBIST_RETURN_IF_ERROR(CheckShape(
        x.k_rope,
        {{"B, of q", b}, {"heads"}, {"Skv, of k", skv}, {"Dr, of q_rope", x.q_rope.tensor.size(3)}}));
    const std::int64_t heads = x.k_rope.tensor.size(1);
    if (heads != 1 && heads != nkv) {
      return x.k_rope.Error("has " + std::to_string(heads) + " heads, needs 1 or the " + std::to_string(nkv) +
                            " of k");
    }
  }
  for (const Argument* arg : {&x.out, &x.dout}) {
    CUBIST_RETURN_IF_ERROR(CheckShape(
        *arg, {{"B, of q", b}, {"Nq, of q", nq}, {"Sq, of q", sq}, {"Dv, of v", x.v.tensor.size(3)}}));
  }
  CUBIST_RETURN_IF_ERROR(CheckShape(x.lse, {{"B, of q", b}, {"Nq, of q", nq}, {"Sq, of q", sq}}));
  CUBIST_RETURN_IF_ERROR(CheckLike(x.dq, x.q));
  CUBIST_RETURN_IF_ERROR(CheckLike(x.dk, x.k));
  CUBIST_RETURN_IF_ERROR(CheckLike(x.dv, x.v));
  for (const auto& [gradient, of] : {std::pair(&x.dq_rope, &x.q_rope), std::pair(&x.dk_rope, &x.k_rope)}) {
    if (of->tensor.given()) {
      CUBIST_RETURN_IF_ERROR(CheckLike(*gradient, *of));
    } else if (gradient->tensor.given()) {
      return gradient->Error(std::string("is given, but ") + of->name + " is not");
    }
  }
  return {};
}

Status CheckPrefix(const FlashAttentionGradArgs& args) {
  if (args.prefix.empty()) return {};
  const std::string who = std::string(kName) + ": prefix ";
  const std::int64_t batches = args.q.size(0), skv = args.k.size(2);
  if (static_cast<std::int64_t>(args.prefix.size()) != batches) {
    return InvalidArgument(who + "has " + std::to_string(args.prefix.size()) + " entries, needs the " +
                           std::to_string(batches) + " of B");
  }
  for (const std::int64_t keys : args.prefix) {
    if (keys < 0 || keys > skv) {
      return InvalidArgument(who + "is " + std::to_string(keys) + ", needs 0 to the " + std::to_string(skv) +
                             " of Skv");
    }
  }
  if (args.window && args.window->left) {
    return InvalidArgument(who + "goes with no left side of window, which is " +
                           std::to_string(*args.window->left));
  }
  return {};
}

Status Validate(const Device& device, const FlashAttentionGradArgs& args) {
  const Arguments x(args);
  CUBIST_RETURN_IF_ERROR(CheckShapes(x));
  const DType in = args.q.dtype;
  CUBIST_RETURN_IF_ERROR(CheckDType(x.q, {DType::kF32, DType::kBF16, DType::kF16}));
  for (const Argument* arg : {&x.k, &x.v, &x.q_rope, &x.k_rope, &x.dout}) {
    if (arg->tensor.given()) CUBIST_RETURN_IF_ERROR(CheckDType(*arg, {in}));
  }
  CUBIST_RETURN_IF_ERROR(CheckDType(x.out, {DType::kF32, in}));
  CUBIST_RETURN_IF_ERROR(CheckDType(x.lse, {DType::kF32}));
  for (const Argument* arg : x.outputs()) {
    if (arg->tensor.given()) CUBIST_RETURN_IF_ERROR(CheckDType(*arg, {DType::kF32, in}));
  }
  if (!std::isfinite(args.scale.value_or(1.0f))) {
    return InvalidArgument(std::string(kName) + ": scale is " + std::to_string(*args.scale) +
                           ", needs a finite number");
  }
  CUBIST_RETURN_IF_ERROR(CheckPrefix(args));
  for (const std::vector<const Argument*>& all : {x.inputs(), x.outputs()}) {
    for (const Argument* arg : all) {
      if (arg->tensor.given()) CUBIST_RETURN_IF_ERROR(CheckStorage(*arg, device.computes()));
    }
  }
  const std::vector<const Argument*> outputs = x.outputs();
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i]->tensor.given()) continue;
    CUBIST_RETURN_IF_ERROR(CheckWritable(*outputs[i]));
    for (const Argument* input : x.inputs()) CUBIST_RETURN_IF_ERROR(CheckApart(*outputs[i], *input));
    for (std::size_t j = i + 1; j < outputs.size(); ++j)
      CUBIST_RETURN_IF_ERROR(CheckApart(*outputs[i], *outputs[j]));
  }
  return {};
}

// lse (b, n, s) as (b, n, s, 1), so that its matrix at (b, n) is a column.
ConstTensor AsColumns(const ConstTensor& lse) {
  ConstTensor columns = lse;
  columns.rank = 4, columns.sizes[3] = 1, columns.strides[3] = 1;
  return columns;
}

// Rows that two rings of two stages hold in half of UB; a power of two.
std::int64_t RowsAtOnce(const ChipSpec& chip, std::int64_t columns) {
  constexpr std::int64_t kMost = 128;
  const std::int64_t row = 4 * 4 * RoundUp(std::max<std::int64_t>(columns, 1) + 1, 8);
  std::int64_t rows = kMost;
  while (rows > 1 &&
         rows * row > std::min(chip.buffer(Buffer::kUB).fast, chip.buffer(Buffer::kUB).capacity) / 2)
    rows /= 2;
  return rows;
}

FlashAttentionGradOperands AddTensors(Launch& launch, const FlashAttentionGradArgs& args,
                                      const FlashAttentionGradShape& s, const FlashAttentionGradTiling& t) {
  FlashAttentionGradOperands g;
  g.q = launch.Input("q", args.q), g.q_rope = launch.Input("q_rope", args.q_rope);
  g.k = launch.Input("k", args.k), g.k_rope = launch.Input("k_rope", args.k_rope);
  g.v = launch.Input("v", args.v);
  g.out = launch.Input("out", args.out), g.dout = launch.Input("dout", args.dout);
  g.lse = launch.Input("lse", AsColumns(args.lse));
  g.dq = launch.Output("dq", args.dq), g.dk = launch.Output("dk", args.dk);
  g.dv = launch.Output("dv", args.dv);
  g.dq_rope = launch.Output("dq_rope", args.dq_rope), g.dk_rope = launch.Output("dk_rope", args.dk_rope);
  const auto columns = static_cast<float>(std::max<std::int64_t>(s.d_qk + s.d_rope, 1));
  g.scale = args.scale.value_or(1.0f / std::sqrt(columns));

  const auto workspace = [&](const char* name, std::int64_t i, std::int64_t j, std::int64_t rows,
                             std::int64_t cols) {
    return launch.Workspace(name, DType::kF32, {i, j, rows, cols});
  };
  g.row_lse = workspace("row_lse", s.batches, s.heads, s.sq, 1);
  g.delta = workspace("delta", s.batches, s.heads, s.sq, 1);
  g.dq_parts = workspace("dq_parts", t.chunks, s.batches * s.heads, s.sq, s.d_qk);
  g.dk_sums = workspace("dk_sums", s.batches, s.kv_heads, s.skv, s.d_qk);
  g.dv_sums = workspace("dv_sums", s.batches, s.kv_heads, s.skv, s.d_v);
  if (s.rope_heads > 0 || args.q_rope.given()) {
    g.dq_rope_parts = workspace("dq_rope_parts", t.chunks, s.batches * s.heads, s.sq, s.d_rope);
    g.dk_rope_sums = workspace("dk_rope_sums", s.batches, s.kv_heads, s.skv, s.d_rope);
  }
  return g;
}

template <class T>
Status Run(const Device& device, const FlashAttentionGradArgs& args, Profile* profile) {
  Launch launch(device, kName);
  const FlashAttentionGradShape s = ShapeOf(args);
  FlashAttentionGradTiling t;
  CUBIST_RETURN_IF_ERROR(ChooseFor(device, kName, s, &Candidates, &t));
  FlashAttentionGradOperands g = AddTensors(launch, args, s, t);
  std::vector<AttentionBand> bands;
  for (const std::int64_t prefix : args.prefix)
    bands.push_back(BandOf(args.causal, args.window, s.sq, s.skv, prefix));
  g.bands = bands;

  const std::int64_t rows = RowsAtOnce(launch.chip(), s.d_v);
  launch.OnVectorCores(s.batches * s.heads * CeilDiv(s.sq, rows),
                       [&](auto& core) { FlashAttentionGradRowsKernel(core, g, s, rows); });
  if (t.pack_queries) {
    const auto pack = [&](const char* name, const GmTensor* source) {
      return Pack<T>(launch, name, Role::kB, *source, /*transposed=*/false, Role::kBTransposed);
    };
    g.q_packed = pack("q_packed", g.q), g.dout_packed = pack("dout_packed", g.dout);
    if (s.d_rope > 0) g.q_rope_packed = pack("q_rope_packed", g.q_rope);
  }
  launch.OnAiCores(t.tasks(s), [&](auto& core) { FlashAttentionGradKernel<T>(core, g, s, t); });

  using Sum = FlashAttentionGradSum;
  const bool shared_rope = s.rope_heads == 1 && s.kv_heads > 1;
  for (const Sum& sum :
       {Sum{g.dq, g.dq_parts, g.scale, Sum::Of::kChunks},
        Sum{g.dq_rope, g.dq_rope_parts, g.scale, Sum::Of::kChunks},
        Sum{g.dk, g.dk_sums, g.scale, Sum::Of::kOne},
        Sum{g.dk_rope, g.dk_rope_sums, g.scale, shared_rope ? Sum::Of::kHeads : Sum::Of::kOne},
        Sum{g.dv, g.dv_sums, 1.0f, Sum::Of::kOne}}) {
    if (sum.gradient == nullptr) continue;
    const auto& sizes = sum.gradient->sizes;
    const std::int64_t at_once = RowsAtOnce(launch.chip(), sizes[3]);
    launch.OnVectorCores(sizes[0] * sizes[1] * CeilDiv(sizes[2], at_once),
                         [&](auto& core) { FlashAttentionGradSumKernel(core, sum, g, s, t, at_once); });
  }
  return launch.Finish(profile);
}

}  // namespace

Status FlashAttentionGrad(const Device& device, const FlashAttentionGradArgs& args, Profile* profile) try {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  switch (args.q.dtype) {
    case DType::kBF16:
      return Run<BF16>(device, args, profile);
    case DType::kF16:
      return Run<F16>(device, args, profile);
    default:
      return Run<float>(device, args, profile);
  }
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

}  // namespace cubist
