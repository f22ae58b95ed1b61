// What forward and backward of attention have in common: masks.
#ifndef CUBIST_KERNELS_ATTENTION_OPTIONS_H_
#define CUBIST_KERNELS_ATTENTION_OPTIONS_H_

#include <cstdint>
#include <optional>

namespace cubist {

// Which keys j a query row i may see: all; j <= i; or j <= i + (Skv - Sq), where the last query sees the last key.
enum class Causal { kNone, kTopLeft, kBottomRight };

// Keys around the row's own, diagonal(i) = i (kTopLeft) or i + Skv - Sq (kBottomRight), both ends included:
//   diagonal(i) - left <= j <= diagonal(i) + right.     A side that is not given is unbounded; negative is allowed.
// Ascend's sparse modes 0 (pre and next tokens, top-left) and 4 (band, bottom-right); FlashAttention's window_size.
struct AttentionWindow {
  std::optional<std::int64_t> left = {}, right = {};
  Causal anchor = Causal::kBottomRight;  // kNone counts as kTopLeft.
};

}  // namespace cubist

#endif  // CUBIST_KERNELS_ATTENTION_OPTIONS_H_
