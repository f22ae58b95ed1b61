// Untyped operands and operation kinds: what the typed instruction set (core.h) hands to an executor.
#ifndef CUBIST_NPU_MODEL_INSTRUCTION_H_
#define CUBIST_NPU_MODEL_INSTRUCTION_H_

#include <bit>
#include <cstdint>
#include <functional>
#include <span>

#include "npu_model/tile.h"

namespace cubist {

// Whether a Mmad adds to its accumulator or starts it at zero.
enum class Accumulate : std::uint8_t { kNo, kYes };

// Whether an operand goes from L1 to L0 as its transpose.
enum class Transpose : std::uint8_t { kNo, kYes };

// How a Mmad starts its accumulator.
enum class MmadStart : std::uint8_t { kZero, kAdd, kBias };

enum class BinaryOp : std::uint8_t { kAdd, kSub, kMul, kDiv, kMax };
enum class UnaryOp : std::uint8_t { kExp, kLn, kSqrt, kAbs };
enum class ScalarOp : std::uint8_t { kMul, kMax, kAdd };
enum class ReduceOp : std::uint8_t { kMax, kSum };

// What becomes of a sum at last, element by element: max(x, 0); x / (1 + exp(-x)); x Phi(x), with Phi the normal
// distribution; and the approximation of that by tanh (Hendrycks and Gimpel, 2016). NaN stays NaN.
enum class Activation : std::uint8_t { kNone, kRelu, kSilu, kGelu, kGeluTanh };

// What FIX does to an accumulator on its way to GM: dst (+)= scale * src, at least 0 with relu. NaN stays NaN.
struct FixOptions {
  Accumulate accumulate = Accumulate::kNo;
  float scale = 1;
  bool relu = false;
};

// Numbers and operands of StoreActivated; see ExpandStoreActivated in composites.h.
struct EpilogueScalars {
  float alpha = 1, beta = 1;
  Activation activation = Activation::kNone;

  // How many scratch tiles the activation's expansion needs.
  int scratch() const {
    return activation == Activation::kNone ? 0 : activation == Activation::kGelu ? kMaxScratch : 1;
  }
  static constexpr int kMaxScratch = 3;
};
struct EpilogueRefs {
  TileRef x, bias, residual, scratch[EpilogueScalars::kMaxScratch];
};

// How a router turns logits into scores.
enum class ScoreFunction : std::uint8_t { kSoftmax, kSigmoid, kSqrtSoftplus };

// A caller's own function of the routes of one token: weights from scores, or with `d_weights` (else empty) the gradient of
// the scores. Routes without an expert have id -1 and a score (and d_weight) of 0, and what it gives them is taken as 0.
using RouteFunction = std::function<void(std::span<const std::int32_t> ids, std::span<const float> scores,
                                         std::span<const float> d_weights, std::span<float> out)>;

// Random numbers are functions of a seed, a stream and the number of the element; see npu_model/philox.h.
struct RandomStream {
  std::uint64_t seed = 0;
  std::uint32_t stream = 0;
};

// Which bin of a table an id falls into: some of its bits, as an unsigned number, less `first`. Whole ids below 0 have
// none, and in a radix sort they come last.
struct IdBins {
  std::int32_t first = 0;
  int shift = 0, bits = 32;

  constexpr std::int64_t Of(std::int32_t id) const {
    const std::uint64_t mask = (std::uint64_t{1} << bits) - 1;
    return static_cast<std::int64_t>(static_cast<std::uint32_t>(id) >> shift & mask) - first;
  }
  constexpr bool whole() const { return shift == 0 && bits == 32; }
};

// Which attention weights are dropped: a function of the seed, the offset and the weight's row and key; see
// npu_model/philox.h. `kept` of 65536 are kept, and a row of weights takes `row_blocks` blocks of eight numbers.
struct DropoutStream {
  std::uint64_t seed = 0, offset = 0;
  std::uint32_t kept = 65536;
  std::int64_t row_blocks = 0;
};

// Operands of SwiGluGrad; see ExpandSwiGluGrad in composites.h.
struct SwiGluGradTiles {
  TileRef d_gate, d_up, d_probs;
  TileRef s0, s1, s2, s3;
  TileRef d_out, gate, up, probs;
};

// Operands of NormRows, and of NormGrad and NormRowsGrad; see NormTiles and NormGradTiles in core.h.
struct NormRefs {
  TileRef out, rstd, one, s0, s1, x, gamma, residual, sum;
};
struct NormGradRefs {
  TileRef d_x, d_gamma, shift, s0, s1, d_out, x, gamma, rstd, more;
};

// Operands of GroupedTopK; see GroupedTopKTiles in core.h.
struct GroupedTopKRefs {
  TileRef values, ids, a, bias, choice, worths, best, kept;
};

// A row of StoreScaledDots; see ExpandStoreScaledDots in composites.h.
struct ScaledDotRef {
  Gm dst{};
  float weight = 1;
  TileRef sum{}, row{};
};

// What ExpandRankBySort in composites.h works in; see SortTiles in core.h.
struct SortRefs {
  TileRef places, bins;
  TileRef keys[2], values[2];
  TileRef starts, probes, found, at;
};

// A power of two: n numbers up to a limit, each times this, have a sum below it, however it is rounded.
inline float MeanScale(std::int64_t n) {
  return 0.5f / static_cast<float>(std::bit_ceil(static_cast<std::uint64_t>(n)));
}

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_INSTRUCTION_H_
