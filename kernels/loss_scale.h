// LossScaler: dynamic loss scaling for fp16 gradients (Micikevicius et al., Mixed precision training, 2018).
#ifndef CUBIST_KERNELS_LOSS_SCALE_H_
#define CUBIST_KERNELS_LOSS_SCALE_H_

#include <cstdint>
#include <span>

#include "npu_model/device.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

struct LossScaleOptions {
  float initial = 65536;
  float growth = 2, backoff = 0.5f;     // growth > 1, 0 < backoff < 1
  std::int64_t growth_interval = 2000;  // clean steps before the scale grows
  float least = 1, most = 16777216;
};

// The scale that a loss is multiplied by, so that its fp16 gradients neither vanish nor overflow.
class CUBIST_EXPORT LossScaler {
 public:
  explicit LossScaler(const LossScaleOptions& options = {}) : options_(options), scale_(options.initial) {}

  // What is wrong with the options, if anything; Unscale says so too.
  Status status() const;
  float scale() const { return scale_; }
  std::int64_t clean_steps() const { return clean_steps_; }

  // One step: every gradient (any rank, fp32, bf16 or fp16; none may overlap another) is divided by the scale in place, in
  // fp32, rounded once; with any NaN or infinity among them none is changed, *apply becomes false and the scale backs off.
  // After growth_interval clean steps in a row it grows. Where a quotient by a scale below 1 does not fit its dtype, none is
  // changed and *apply is false as well; no other scale would help, so it stays, but the clean steps are counted anew.
  Status Unscale(std::span<const Tensor> gradients, bool* apply);

 private:
  LossScaleOptions options_;
  float scale_;
  std::int64_t clean_steps_ = 0;
};

}  // namespace cubist

#endif  // CUBIST_KERNELS_LOSS_SCALE_H_
