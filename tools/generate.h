// Seeded inputs: the same bits on every machine and for every number of threads.
#ifndef CUBIST_TOOLS_GENERATE_H_
#define CUBIST_TOOLS_GENERATE_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "npu_model/types.h"

namespace cubist {

// A tensor's stream of random numbers: number `index` is Random(key, index), in any order.
std::uint64_t StreamKey(std::uint64_t seed, std::string_view tensor_name);
std::uint64_t Random(std::uint64_t key, std::uint64_t index);

// Sums of four uniform 16-bit numbers, centred and scaled to the standard deviation: normal but for the
// tails, which end at 3.46 deviations. Contiguous float tensors.
void FillNormal(const Tensor& x, double deviation, std::uint64_t key);

// (T, K) fp32, positive; each row adds up to `sum`.
void FillProbabilities(const Tensor& probs, double sum, std::uint64_t key);

// (P, R / 2) fp32: the cosine, or the sine, of p * theta^(-2 i / R) at (p, i) (Su et al., RoFormer, 2021).
void FillRotary(const Tensor& table, double theta, bool sine);

enum class Skew { kSkewed, kUniform };
constexpr const char* NameOf(Skew skew) { return skew == Skew::kSkewed ? "skewed" : "uniform"; }

// How often each of E experts is chosen, as integers of equal sum for the first E: [0, 3/16) of the experts
// take 60 % evenly, [3/16, 11/16) take 30 %, the last 5/16 take 10 %. An expert across a boundary takes its
// share of both parts.
std::vector<std::int64_t> ExpertLoads(Skew skew, std::int64_t experts);

// Splits `rows` by the loads, to within one row each.
std::vector<std::int64_t> SplitRows(const std::vector<std::int64_t>& loads, std::int64_t rows);

// (T, K) int32 or int64: K different experts for each token, K <= E. Expert loads are as above, in an order
// that the key shuffles; an expert whose share exceeds 1/K of all routes is chosen by every token and the
// others share the rest.
void FillTopkIds(const Tensor& ids, Skew skew, std::int64_t experts, std::uint64_t key);

}  // namespace cubist

#endif  // CUBIST_TOOLS_GENERATE_H_
