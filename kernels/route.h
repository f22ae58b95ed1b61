// Route: the router of a Mixture-of-Experts layer after its projection (scores, selection, weights), and its gradient.
#ifndef CUBIST_KERNELS_ROUTE_H_
#define CUBIST_KERNELS_ROUTE_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <span>

#include "npu_model/device.h"
#include "npu_model/instruction.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

// What becomes of logits that are NaN or beyond +-RouteOptions::limit.
enum class BadLogits : std::uint8_t {
  kError,  // the call fails, names the first and how many there are, and writes nothing
  kZero,   // they count as 0
  kMean,   // as the mean of their row's other logits; 0 where there are none
};

// A caller's own weights, of the scores of a token's K routes (descending by what selected them) instead of these scores
// themselves; renormalise and scale come after it.
//   forward: weights(j) of scores(j) and the experts ids(j)
//   backward: d_scores(j) of the same and d_weights(j); needed for RouteGrad alone
// Both are called for one token at a time, from several threads at once and in any order, and must give the same for the
// same arguments; they may not throw, nor keep the spans. Routes that were dropped have id -1 and score 0, and weigh 0
// whatever forward says. On an NPU it is work of the scalar unit.
struct RouteWeighting {
  std::function<void(std::span<const std::int32_t> ids, std::span<const float> scores,
                     std::span<float> weights)>
      forward = {};
  std::function<void(std::span<const std::int32_t> ids, std::span<const float> scores,
                     std::span<const float> d_weights, std::span<float> d_scores)>
      backward = {};

  bool given() const { return forward != nullptr || backward != nullptr; }
};

struct RouteOptions {
  ScoreFunction score = ScoreFunction::kSoftmax;
  // Weights of a token are divided by their sum + eps, then all are multiplied by scale.
  bool renormalise = false;
  float eps = 1e-20f, scale = 1;
  // With groups > 1, experts are `groups` equal neighbouring parts. A part is worth the sum of its `group_top` highest
  // selection scores; only the `top_groups` best parts are selected from.
  std::int64_t groups = 1, top_groups = 1, group_top = 2;
  // Gumbel-softmax sampling (Jang, Gu and Poole, 2017) where not 0, from 2^-20 on: logits become (logits + g) / temperature
  // with g = -ln(-ln(u)), u random.
  float temperature = 0;
  // Every selected route is dropped with this probability: its id becomes -1 and its weight 0. Before renormalisation.
  float dropout = 0;
  // Every expert is left out of the whole call with this probability: tokens choose among the others, and where those are
  // too few (of the best groups) the last routes' ids are -1, their weights 0. Scores know no difference, nothing is
  // scaled up, and the gradients of the kept experts are those of the formula.
  float expert_dropout = 0;
  // Random numbers are functions of seed, token and expert (or route): runs repeat, whatever the threads and the chip.
  std::uint64_t seed = 0;
  // Under a temperature below 1 logits near the largest number overflow unless `limit` is lower.
  BadLogits bad_logits = BadLogits::kError;
  float limit = std::numeric_limits<float>::max();
  // Load-balance loss (Fedus, Zoph and Shazeer, Switch Transformers, 2021), with S the sum of a token's scores, 2^-126 at
  // least (sigmoid and sqrt-softplus of logits far below 0 are 0, and so are their shares then), and V the number of
  // valid tokens, T without a mask:
  //   aux_loss = aux_coefficient * E / (K * V) * sum over e of counts(e) * sum over valid t of scores(t, e) / S(t) / V
  // It is 0 where V is.
  float aux_coefficient = 0;
  RouteWeighting weighting = {};
};

// In fp32: scores n = score(logits); the K highest of n + bias in each row, descending, of equals the lower expert first;
// weights = n of those (or what `weighting` makes of them), renormalised and scaled as the options say. The bias selects
// and does not weigh.
//
//   logits   (T, E)   fp32, bf16 or fp16
//   bias     (E)      optional, any float dtype: finite, or -inf for an expert that is left out as by expert_dropout
//   valid    (T)      optional, bool or uint8: a token that is not valid (padding) is routed nowhere. Whatever its logits
//                     are, NaN too, its ids are -1, its weights, scores and bad are 0, and it counts neither in counts nor
//                     in aux_loss. The other tokens' results are those without a mask, bit for bit, their random numbers
//                     too.
//   weights  (T, K)   any float dtype
//   ids      (T, K)   int32; distinct in a row, -1 where dropped
//   scores   (T, E)   optional, fp32: n, which the gradient needs
//   counts   (E)      optional, int32: routes of each expert, without dropped ones; the gradient of aux_loss needs it
//   aux_loss (1)      optional, fp32; with counts
//   bad      (T)      optional, fp32: how many bad logits each row had (see BadLogits)
//
// Semantics of aclnnMoeGatingTopK, aclnnMoeGatingTopKSoftmax and Megatron's topk_routing_with_score_function, renormalised
// over the selected experts. 1 <= K <= E, K <= E / groups * top_groups. Any T and E; where a token's experts do not fit
// UB, an NPU takes K, top_groups and group_top up to 4088. Outputs may not overlap anything.
struct RouteArgs {
  ConstTensor logits;
  ConstTensor bias = {};
  ConstTensor valid = {};
  RouteOptions options = {};
  Tensor weights, ids;
  Tensor scores = {}, counts = {}, aux_loss = {}, bad = {};
};

// The gradient of sum of d_weights * weights + d_aux_loss * aux_loss with respect to the logits; selection, dropout,
// counts and random numbers are constants, bad logits' replacements take the gradient.
//
//   d_weights (T, K)  any float dtype
//   ids, scores       of the forward call, with its options
//   counts    (E)     of the forward call; needed where d_aux_loss is not 0
//   valid     (T)     of the forward call; needed where d_aux_loss is not 0, of whose mean it tells the number of tokens.
//                     That a token is not valid is in its ids and scores: its d_logits are 0 with `valid` and without
//   d_logits  (T, E)  fp32, bf16 or fp16
struct RouteGradArgs {
  ConstTensor d_weights, ids, scores;
  ConstTensor counts = {};
  ConstTensor valid = {};
  RouteOptions options = {};
  float d_aux_loss = 0;
  Tensor d_logits;
};

// Errors name the argument, its value and the limit; nothing is written then. On Npu devices `profile` is filled.
CUBIST_EXPORT Status Route(const Device& device, const RouteArgs& args, Profile* profile = nullptr);
CUBIST_EXPORT Status RouteGrad(const Device& device, const RouteGradArgs& args, Profile* profile = nullptr);

}  // namespace cubist

#endif  // CUBIST_KERNELS_ROUTE_H_
