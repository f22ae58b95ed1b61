#include "kernels/route.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <string>

#include "kernels/choose_for.h"
#include "kernels/element_type.h"
#include "kernels/route_kernel.h"
#include "kernels/route_options.h"
#include "kernels/route_parts_kernel.h"
#include "kernels/rowwise.h"
#include "kernels/validate.h"
#include "npu_model/launch.h"
#include "tiling/cost.h"

namespace cubist {
namespace {

constexpr const char* kRoute = "route";
constexpr const char* kGrad = "route_grad";

// Whether all logits of a row are within the limit. NaN is not.
bool IsWithin(const ConstTensor& x, std::int64_t row, float limit) {
  return WithFloatType(x.dtype, [&]<class T>(T) {
    const T* const from = static_cast<const T*>(x.data) + row * x.stride(0);
    // As wide as a logit: a counter of 64 bits makes the vectors that find it twice as many.
    std::uint32_t beyond = 0;
    for (std::int64_t e = 0; e < x.size(1); ++e)
      beyond |= std::abs(static_cast<float>(from[e * x.stride(1)])) <= limit ? 0 : 1;
    return beyond == 0;
  });
}

// Logits of valid tokens that are NaN or beyond the limit, as an error that names the first and counts them.
Status CheckLogits(const Argument& logits, const ConstTensor& valid, float limit) {
  const ConstTensor& x = logits.tensor;
  const auto left_out = [&](std::int64_t t) {
    return valid.given() && static_cast<const std::uint8_t*>(valid.data)[t * valid.stride(0)] == 0;
  };
  std::int64_t bad = 0;
  std::string first;
  for (std::int64_t t = 0; t < x.size(0); ++t) {
    if (left_out(t) || IsWithin(x, t, limit)) continue;
    for (std::int64_t e = 0; e < x.size(1); ++e) {
      const float value = LoadFloat(x.data, x.dtype, t * x.stride(0) + e * x.stride(1));
      if (std::abs(value) <= limit || ++bad > 1) continue;
      first = TextOf(value) + " at (" + std::to_string(t) + ", " + std::to_string(e) + ")";
    }
  }
  if (bad == 0) return {};
  return logits.Error("has " + first + ", the first of " + std::to_string(bad) + ", needs values within +-" +
                      TextOf(limit));
}

Status CheckIfGiven(const Argument& arg, std::initializer_list<Dim> dims,
                    std::initializer_list<DType> dtypes) {
  if (!arg.tensor.given()) return {};
  CUBIST_RETURN_IF_ERROR(CheckShape(arg, dims));
  return CheckDType(arg, dtypes);
}

Status Validate(const Device& device, const RouteArgs& args) {
  const Argument logits{kRoute, "logits", args.logits}, bias{kRoute, "bias", args.bias};
  const Argument weights{kRoute, "weights", args.weights}, ids{kRoute, "ids", args.ids};
  const Argument scores{kRoute, "scores", args.scores}, counts{kRoute, "counts", args.counts};
  const Argument aux_loss{kRoute, "aux_loss", args.aux_loss}, bad{kRoute, "bad", args.bad};
  const Argument valid{kRoute, "valid", args.valid};
  CUBIST_RETURN_IF_ERROR(CheckShape(logits, {{"T"}, {"E"}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(logits, kFloatTypes));
  const Dim t{"T, of logits", args.logits.size(0)}, e{"E, of logits", args.logits.size(1)};
  CUBIST_RETURN_IF_ERROR(CheckShape(weights, {t, {"K"}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(weights, kFloatTypes));
  CUBIST_RETURN_IF_ERROR(CheckShape(ids, {t, {"K, of weights", args.weights.size(1)}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(ids, {DType::kI32}));
  CUBIST_RETURN_IF_ERROR(CheckIfGiven(bias, {e}, kFloatTypes));
  CUBIST_RETURN_IF_ERROR(CheckIfGiven(valid, {t}, {DType::kBool}));
  CUBIST_RETURN_IF_ERROR(CheckIfGiven(scores, {t, e}, {DType::kF32}));
  CUBIST_RETURN_IF_ERROR(CheckIfGiven(counts, {e}, {DType::kI32}));
  CUBIST_RETURN_IF_ERROR(CheckIfGiven(aux_loss, {{"1", 1}}, {DType::kF32}));
  CUBIST_RETURN_IF_ERROR(CheckIfGiven(bad, {t}, {DType::kF32}));
  if (aux_loss.tensor.given() && !counts.tensor.given()) return counts.Error("is not given, and aux_loss is");
  CUBIST_RETURN_IF_ERROR(
      CheckRouteOptions(kRoute, args.options, args.logits.size(1), args.weights.size(1), /*backward=*/false));
  CUBIST_RETURN_IF_ERROR(
      CheckTensors(device, {&logits, &bias, &valid}, {&weights, &ids, &scores, &counts, &aux_loss, &bad}));
  if (bias.tensor.given() && device.computes()) CUBIST_RETURN_IF_ERROR(CheckSelectionBias(bias));
  const bool strict = args.options.bad_logits == BadLogits::kError && device.computes();
  return strict ? CheckLogits(logits, args.valid, args.options.limit) : Status();
}

Status Validate(const Device& device, const RouteGradArgs& args) {
  const Argument d_weights{kGrad, "d_weights", args.d_weights}, ids{kGrad, "ids", args.ids};
  const Argument scores{kGrad, "scores", args.scores}, counts{kGrad, "counts", args.counts};
  const Argument d_logits{kGrad, "d_logits", args.d_logits}, valid{kGrad, "valid", args.valid};
  CUBIST_RETURN_IF_ERROR(CheckShape(scores, {{"T"}, {"E"}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(scores, {DType::kF32}));
  const Dim t{"T, of scores", args.scores.size(0)}, e{"E, of scores", args.scores.size(1)};
  CUBIST_RETURN_IF_ERROR(CheckShape(ids, {t, {"K"}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(ids, {DType::kI32}));
  CUBIST_RETURN_IF_ERROR(CheckShape(d_weights, {t, {"K, of ids", args.ids.size(1)}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(d_weights, kFloatTypes));
  CUBIST_RETURN_IF_ERROR(CheckShape(d_logits, {t, e}));
  CUBIST_RETURN_IF_ERROR(CheckDType(d_logits, kFloatTypes));
  CUBIST_RETURN_IF_ERROR(CheckIfGiven(counts, {e}, {DType::kI32}));
  CUBIST_RETURN_IF_ERROR(CheckIfGiven(valid, {t}, {DType::kBool}));
  if (!std::isfinite(args.d_aux_loss))
    return OptionError(kGrad, "d_aux_loss", args.d_aux_loss, "a finite value");
  if (args.d_aux_loss != 0 && !counts.tensor.given())
    return counts.Error("is not given, and d_aux_loss is not 0");
  CUBIST_RETURN_IF_ERROR(
      CheckRouteOptions(kGrad, args.options, args.scores.size(1), args.ids.size(1), /*backward=*/true));
  CUBIST_RETURN_IF_ERROR(CheckTensors(device, {&d_weights, &scores, &counts, &ids, &valid}, {&d_logits}));
  CUBIST_RETURN_IF_ERROR(CheckStorage(ids, /*needs_data=*/true));
  const std::int64_t experts = args.scores.size(1);
  for (std::int64_t i = 0; i < args.ids.size(0); ++i) {
    for (std::int64_t j = 0; j < args.ids.size(1); ++j) {
      const std::int64_t id =
          LoadInt(args.ids.data, DType::kI32, i * args.ids.stride(0) + j * args.ids.stride(1));
      if (id >= -1 && id < experts) continue;
      return ids.Error("has " + std::to_string(id) + " at (" + std::to_string(i) + ", " + std::to_string(j) +
                       "), needs values in [-1, " + std::to_string(experts) + ")");
    }
  }
  return {};
}

// Whether some expert's bias is as low as the choice of experts that are left out of the call.
bool LeavesOut(const ConstTensor& bias) {
  for (std::int64_t e = 0; bias.given() && e < bias.size(0); ++e) {
    if (LoadFloat(bias.data, bias.dtype, e * bias.stride(0)) <= kLeftOut) return true;
  }
  return false;
}

// What the loss's sum over the experts is multiplied by, and `times`.
LossFactor FactorOf(const ChipSpec& chip, const RouteOptions& o, float times, std::int64_t tokens,
                    std::int64_t experts, std::int64_t top_k, const GmTensor* valid) {
  constexpr std::int64_t kQuarter = 4, kBytes = 6;  // Two flags and a number.
  const std::int64_t fit = chip.buffer(Buffer::kUB).capacity / kQuarter / kBytes / kBlockBytes * kBlockBytes;
  return {.of = static_cast<float>(static_cast<double>(times) * static_cast<double>(o.aux_coefficient) *
                                   static_cast<double>(experts) / static_cast<double>(top_k)),
          .all = tokens,
          .valid = valid,
          .tokens = std::clamp(std::min(tokens, fit), kBlockBytes, kCountedTokens)};
}

// Of RouteTotalsKernel: seven tiles of them fit, beside two of one number and what counts valid tokens.
std::int64_t SummedExperts(const ChipSpec& chip, std::int64_t experts, const LossFactor& factor) {
  std::int64_t blocks = chip.buffer(Buffer::kUB).capacity / kBlockBytes - 2;
  if (factor.valid != nullptr) blocks -= 6 * CeilDiv(factor.tokens, kBlockBytes) + 2;
  return std::min({experts, kSummedExperts, std::max<std::int64_t>(blocks / 7, 1) * kBlockBytes / 4});
}

RouteFunction ForwardOf(const RouteWeighting& weighting) {
  return
      [&weighting](std::span<const std::int32_t> ids, std::span<const float> scores, std::span<const float>,
                   std::span<float> weights) { weighting.forward(ids, scores, weights); };
}

// Of ValidRows.
int ColumnsOf(const ConstTensor& valid) { return valid.given() ? 4 : 0; }

// The rings of route_kernel.h.
RowwiseShape ShapeOf(const RouteArgs& args) {
  const RouteOptions& o = args.options;
  return {.rows = args.logits.size(0),
          .cols = args.logits.size(1),
          .dtype = DType::kF32,
          .loads = 1,
          .scratch = 2,
          .row_vectors = o.expert_dropout > 0 ? 5 : 3,
          .column_vectors = 3 + ColumnsOf(args.valid),
          .side_tiles = 8,
          .side_cols = std::max(args.weights.size(1), o.groups),
          .vector_passes = 20,
          .whole_rows = true,
          .uncut_rows = true};
}
RowwiseShape ShapeOf(const RouteGradArgs& args) {
  return {.rows = args.scores.size(0),
          .cols = args.scores.size(1),
          .dtype = DType::kF32,
          .loads = 2,
          .scratch = 2,
          .row_vectors = 2,
          .column_vectors = args.valid.given() ? 3 : 2,  // A factor, of one row.
          .side_tiles = 6,
          .side_cols = args.ids.size(1),
          .vector_passes = 12,
          .whole_rows = true,
          .uncut_rows = true};
}

// The rings of route_parts_kernel.h.
RowwiseShape PartsOf(const RouteArgs& args) {
  const RouteOptions& o = args.options;
  const bool grouped = o.groups > 1;
  RowwiseShape s = ShapeOf(args);
  s.scratch = grouped ? 3 : 2;
  s.row_vectors = o.expert_dropout > 0 ? 7 : 5;
  s.column_vectors = 10 + ColumnsOf(args.valid);
  s.side_tiles = grouped ? 3 : 2, s.side_cols = std::max(args.weights.size(1), grouped ? o.top_groups : 0);
  s.vector_passes = 40;
  s.kept = {args.weights.size(1), grouped ? o.top_groups : 0, grouped ? o.group_top : 0};
  s.uncut_rows = false, s.cut_rows = true;
  return s;
}
RowwiseShape PartsOf(const RouteGradArgs& args) {
  RowwiseShape s = ShapeOf(args);
  s.column_vectors = args.valid.given() ? 7 : 6;
  s.side_tiles = 5;
  s.vector_passes = 30;
  s.uncut_rows = false, s.cut_rows = true;
  return s;
}

// How the rows of a call are cut: whole where one of them fits.
template <class Args>
Status ChooseRows(const Device& device, const char* kernel, const Args& args, RowwiseTiling* tiling) {
  const RowwiseShape whole = ShapeOf(args);
  RowwiseTiling one_row;
  one_row.rows = 1, one_row.cols = whole.cols, one_row.stages = 1;
  if (!device.status().ok() || Fits(device.chip(), whole, one_row))
    return ChooseFor(device, kernel, whole, &RowwiseCandidates, tiling);
  const RowwiseShape parts = PartsOf(args);
  const char* const names[] = {"K", "top_groups", "group_top"};
  for (std::size_t i = 0; i < parts.kept.size(); ++i) {
    if (parts.kept[i] > kMergedBlocks) {
      return {StatusCode::kUnsupported,
              std::string(kernel) + ": " + names[i] + " is " + std::to_string(parts.kept[i]) +
                  ", needs at most " + std::to_string(kMergedBlocks) + " where " +
                  std::to_string(whole.cols) + " experts do not fit UB, of which " + device.chip().name +
                  " has " + std::to_string(device.chip().buffer(Buffer::kUB).capacity) + " bytes"};
    }
  }
  return ChooseFor(device, kernel, parts, &RowwiseCandidates, tiling);
}

}  // namespace

Status CheckRouteOptions(const char* kernel, const RouteOptions& o, std::int64_t experts, std::int64_t top_k,
                         bool backward) {
  const auto text = [](std::int64_t value) { return std::to_string(value); };
  if (experts < 1) return OptionError(kernel, "E", experts, "at least 1");
  if (top_k < 1 || top_k > experts) return OptionError(kernel, "K", top_k, "1 to E, " + text(experts));
  if (o.groups < 1 || experts % o.groups != 0)
    return OptionError(kernel, "groups", o.groups, "a divisor of E, " + text(experts));
  if (o.top_groups < 1 || o.top_groups > o.groups) {
    return OptionError(kernel, "top_groups", o.top_groups, "1 to groups, " + text(o.groups));
  }
  const std::int64_t width = experts / o.groups;
  if (o.groups > 1 && (o.group_top < 1 || o.group_top > width)) {
    return OptionError(kernel, "group_top", o.group_top, "1 to the experts of a group, " + text(width));
  }
  if (top_k > width * o.top_groups) {
    return OptionError(kernel, "K", top_k,
                       "at most the experts of top_groups groups, " + text(width * o.top_groups));
  }
  CUBIST_RETURN_IF_ERROR(CheckChoice(kernel, "score", o.score, ScoreFunction::kSqrtSoftplus));
  CUBIST_RETURN_IF_ERROR(CheckChoice(kernel, "bad_logits", o.bad_logits, BadLogits::kMean));
  if (!(o.eps >= 0) || std::isinf(o.eps)) return OptionError(kernel, "eps", o.eps, "a finite value >= 0");
  if (!std::isfinite(o.scale)) return OptionError(kernel, "scale", o.scale, "a finite value");
  constexpr float kLeastTemperature = 0x1p-20f;  // By less, logits that are none too large become infinite.
  if (o.temperature != 0 && (!(o.temperature >= kLeastTemperature) || std::isinf(o.temperature))) {
    return OptionError(kernel, "temperature", o.temperature,
                       "0, or a finite value from " + TextOf(kLeastTemperature) + " on");
  }
  if (!(o.dropout >= 0 && o.dropout <= 1)) return OptionError(kernel, "dropout", o.dropout, "0 to 1");
  if (!(o.expert_dropout >= 0 && o.expert_dropout <= 0.5f))
    return OptionError(kernel, "expert_dropout", o.expert_dropout, "0 to 0.5");
  if (!(o.limit > 0) || std::isinf(o.limit))
    return OptionError(kernel, "limit", o.limit, "a finite value above 0");
  if (o.weighting.given() && o.weighting.forward == nullptr)
    return InvalidArgument(std::string(kernel) + ": weighting has no forward function");
  if (backward && o.weighting.given() && o.weighting.backward == nullptr)
    return InvalidArgument(std::string(kernel) + ": weighting has no backward function");
  if (!std::isfinite(o.aux_coefficient))
    return OptionError(kernel, "aux_coefficient", o.aux_coefficient, "a finite value");
  return {};
}

Status CheckSelectionBias(const Argument& bias) {
  const ConstTensor& b = bias.tensor;
  for (std::int64_t e = 0; e < b.size(0); ++e) {
    const float value = LoadFloat(b.data, b.dtype, e * b.stride(0));
    if (value < std::numeric_limits<float>::infinity()) continue;
    return bias.Error("has " + TextOf(value) + " at (" + std::to_string(e) +
                      "), needs finite values, or -inf for experts that are left out");
  }
  return {};
}

Status Route(const Device& device, const RouteArgs& args, Profile* profile) try {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  Launch launch(device, kRoute);
  RowwiseTiling tiling;
  CUBIST_RETURN_IF_ERROR(ChooseRows(device, kRoute, args, &tiling));
  const RouteOptions& o = args.options;
  const std::int64_t experts = args.logits.size(1);
  RouteOperands g;
  g.logits = MatrixOf(*launch.Input("logits", args.logits));
  g.bias = launch.Input("bias", args.bias);
  g.valid = launch.Input("valid", AsColumn(args.valid));
  g.weights = MatrixOf(*launch.Output("weights", args.weights));
  g.ids = MatrixOf(*launch.Output("ids", args.ids));
  g.scores = launch.Output("scores", args.scores);
  g.bad = launch.Output("bad", AsColumn(args.bad));
  const GmTensor* counts = launch.Output("counts", args.counts);
  const GmTensor* aux_loss = launch.Output("aux_loss", args.aux_loss);
  g.chunk_counts = MatrixOf(
      *launch.Workspace("chunk_counts", DType::kI32, {tiling.chunks, counts == nullptr ? 0 : experts}));
  g.chunk_shares = MatrixOf(
      *launch.Workspace("chunk_shares", DType::kF32, {tiling.chunks, aux_loss == nullptr ? 0 : experts}));
  g.score = o.score, g.renormalise = o.renormalise, g.mean_for_bad = o.bad_logits == BadLogits::kMean;
  g.eps = o.eps, g.scale = o.scale, g.temperature = o.temperature, g.dropout = o.dropout, g.limit = o.limit;
  g.expert_dropout = o.expert_dropout;
  g.leaves_out = o.expert_dropout > 0 || (device.computes() && LeavesOut(args.bias));
  g.groups = o.groups, g.top_groups = o.top_groups, g.group_top = o.group_top, g.seed = o.seed;
  const RouteFunction weighting = ForwardOf(o.weighting);
  if (o.weighting.given()) g.weighting = &weighting;
  if (tiling.cols < experts) {
    if (g.scores == nullptr) {
      g.row_scores =
          MatrixOf(*launch.Workspace("row_scores", DType::kF32, {tiling.chunks * tiling.rows, experts}));
    }
    launch.OnVectorCores(tiling.chunks, [&](auto& core) { RoutePartsKernel(core, g, tiling); });
  } else {
    launch.OnVectorCores(tiling.chunks, [&](auto& core) { RouteKernel(core, g, tiling); });
  }
  if (counts != nullptr) {
    RouteTotals totals{g.chunk_counts, g.chunk_shares, MatrixOf(*counts), aux_loss};
    totals.factor =
        FactorOf(launch.chip(), o, 1, args.logits.size(0), experts, args.weights.size(1), g.valid);
    if (aux_loss == nullptr) totals.factor.valid = nullptr;
    totals.experts = SummedExperts(launch.chip(), experts, totals.factor);
    launch.OnVectorCores(1, [&](auto& core) { RouteTotalsKernel(core, totals); });
  }
  return launch.Finish(profile);
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

Status RouteGrad(const Device& device, const RouteGradArgs& args, Profile* profile) try {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  Launch launch(device, kGrad);
  RowwiseTiling tiling;
  CUBIST_RETURN_IF_ERROR(ChooseRows(device, kGrad, args, &tiling));
  const RouteOptions& o = args.options;
  RouteGradOperands g;
  g.d_weights = MatrixOf(*launch.Input("d_weights", args.d_weights));
  g.ids = MatrixOf(*launch.Input("ids", args.ids));
  g.scores = MatrixOf(*launch.Input("scores", args.scores));
  const GmTensor* valid = nullptr;
  if (args.d_aux_loss != 0) {
    g.counts = launch.Input("counts", args.counts);
    valid = launch.Input("valid", AsColumn(args.valid));
  }
  g.d_logits = MatrixOf(*launch.Output("d_logits", args.d_logits));
  g.score = o.score, g.renormalise = o.renormalise;
  g.eps = o.eps, g.scale = o.scale, g.temperature = o.temperature;
  const LossFactor factor = FactorOf(launch.chip(), o, args.d_aux_loss, args.scores.size(0),
                                     args.scores.size(1), args.ids.size(1), valid);
  if (valid == nullptr) {
    g.aux_factor = factor.OfAll();
  } else {
    g.loss_factor = launch.Workspace("loss_factor", DType::kF32, {1, 1});
    launch.OnVectorCores(1, [&](auto& core) { LossFactorKernel(core, factor, MatrixOf(*g.loss_factor)); });
  }
  const RouteFunction weighting = ForwardOf(o.weighting);
  if (o.weighting.given()) g.weighting = &weighting, g.weighting_grad = &o.weighting.backward;
  if (tiling.cols < args.scores.size(1)) {
    launch.OnVectorCores(tiling.chunks, [&](auto& core) { RouteGradPartsKernel(core, g, tiling); });
  } else {
    launch.OnVectorCores(tiling.chunks, [&](auto& core) { RouteGradKernel(core, g, tiling); });
  }
  return launch.Finish(profile);
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

}  // namespace cubist
