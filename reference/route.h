// The router of a Mixture-of-Experts layer, naively, in double: scores, group-limited top-k, weights, gradient.
#ifndef CUBIST_REFERENCE_ROUTE_H_
#define CUBIST_REFERENCE_ROUTE_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "npu_model/types.h"

namespace cubist::reference {

enum class Score { kSoftmax, kSigmoid, kSqrtSoftplus };

struct RouterOptions {
  Score score = Score::kSoftmax;
  bool renormalise = false;
  double eps = 0, scale = 1;
  std::int64_t groups = 1, top_groups = 1, group_top = 1;
  double temperature = 0;     // Gumbel noise where above 0,
  double dropout = 0;         // and dropped routes,
  double expert_dropout = 0;  // and experts that none chooses, all by Philox4x32-10 of this seed
  std::uint64_t seed = 0;
  bool repairs = false, mean_for_bad = false;
  double limit = 0;
  double aux_coefficient = 0;    // A token's scores count as shares of their sum, 2^-126 at least.
  std::vector<bool> valid = {};  // (T), or none: all tokens. The others have ids -1, and 0 for all numbers.
  // Weights of a token's selected scores in place of these, and the gradient of the scores; of kept routes alone.
  using Weights =
      std::function<std::vector<double>(const std::vector<std::int32_t>& ids, const std::vector<double>& n)>;
  using WeightsGrad = std::function<std::vector<double>(
      const std::vector<std::int32_t>& ids, const std::vector<double>& n, const std::vector<double>& d)>;
  Weights weighting = {};
  WeightsGrad weighting_grad = {};
};

struct RouterResult {
  std::vector<double> scores;        // (T, E)
  std::vector<std::int32_t> ids;     // (T, K), -1 where dropped
  std::vector<double> weights;       // (T, K)
  std::vector<std::int64_t> counts;  // (E)
  std::vector<double> bad;           // (T)
  double aux_loss = 0;
  double smallest_gap =
      0;  // between selection scores that decided, of experts or of groups: ids may differ below it
};

// logits (T, E), bias (E) or not given.
RouterResult Route(ConstTensor logits, ConstTensor bias, std::int64_t top_k, const RouterOptions& options);

// d_logits (T, E) for sum of d_weights * weights + d_aux * aux_loss, from what the forward call gave.
std::vector<double> RouteGrad(const std::vector<double>& d_weights, const RouterResult& forward,
                              std::int64_t tokens, std::int64_t experts, std::int64_t top_k, double d_aux,
                              const RouterOptions& options);

// Number `element` of a stream: (the upper 23 of 32 random bits + 1/2) / 2^23.
double UniformNumber(std::uint64_t seed, std::uint32_t stream, std::uint64_t element);

}  // namespace cubist::reference

#endif  // CUBIST_REFERENCE_ROUTE_H_
