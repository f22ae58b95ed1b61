// RmsNorm: root-mean-square norm (Zhang and Sennrich, 2019), with the residual addition before it, and its gradient.
#ifndef CUBIST_KERNELS_RMS_NORM_H_
#define CUBIST_KERNELS_RMS_NORM_H_

#include "npu_model/device.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

// With z = x, or z = x + residual rounded to the dtype of x:
//   rstd(t) = 1 / sqrt(sum over h of z(t, h)^2 / H + eps);   out(t, h) = z(t, h) * rstd(t) * gamma(h)
// in fp32, rounded once.
//
//   x, out     (T, H)   fp32, bf16 or fp16
//   residual   (T, H)   optional, the dtype of x
//   sum        (T, H)   z, the dtype of x; with residual, and only then
//   gamma      (H)      optional, any float dtype; absent means 1
//   rstd       (T)      optional, fp32: what the gradient needs
//
// Semantics of aclnnRmsNorm and aclnnAddRmsNorm. eps >= 0; with eps = 0 a row of zeros gives NaN. Any T, H >= 0.
// Outputs may not overlap anything.
struct RmsNormArgs {
  ConstTensor x;
  ConstTensor residual = {}, gamma = {};
  float eps = 1e-6f;
  Tensor out;
  Tensor sum = {}, rstd = {};
};

// Gradients of RmsNorm; z as above, d_out the gradient of out:
//   d_x(t, h) = rstd(t) * gamma(h) * d_out(t, h) - z(t, h) * rstd(t)^3 * mean over j of gamma(j) d_out(t, j) z(t, j)
//               + d_sum(t, h)
//   d_gamma(h) = sum over t of d_out(t, h) * z(t, h) * rstd(t)
// d_x is the gradient of x and of residual alike.
//
//   d_out, x, d_x   (T, H)   one dtype: fp32, bf16 or fp16; x is z, that is sum where there was a residual
//   d_sum           (T, H)   optional, the same dtype: what else reaches sum, as the residual stream does
//   rstd            (T)      fp32, of the forward call
//   gamma           (H)      optional, any float dtype
//   d_gamma         (H)      optional, any float dtype; summed in fp32 in an order that shape and device alone decide
struct RmsNormGradArgs {
  ConstTensor d_out, x, rstd;
  ConstTensor gamma = {}, d_sum = {};
  Tensor d_x;
  Tensor d_gamma = {};
};

// Errors name the argument, its value and the limit; nothing is written then. On Npu devices `profile` is filled.
CUBIST_EXPORT Status RmsNorm(const Device& device, const RmsNormArgs& args, Profile* profile = nullptr);
CUBIST_EXPORT Status RmsNormGrad(const Device& device, const RmsNormGradArgs& args,
                                 Profile* profile = nullptr);

}  // namespace cubist

#endif  // CUBIST_KERNELS_RMS_NORM_H_
