// What tests of RmsNorm, SwiGlu and their gradients share: calls with their tensors.
#ifndef CUBIST_TESTS_KERNELS_ROWS_CALL_H_
#define CUBIST_TESTS_KERNELS_ROWS_CALL_H_

#include <cstdint>
#include <string>

#include "kernels/rms_norm.h"
#include "kernels/swiglu.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {

struct RowsShape {
  std::int64_t rows, cols;
  std::string Name() const { return Join(rows, "x", cols); }
};

struct NormCall {
  NormCall(DType dtype, const RowsShape& s, const Layout& layout = {})
      : x(dtype, {s.rows, s.cols}, layout),
        residual(dtype, {s.rows, s.cols}, layout),
        sum(dtype, {s.rows, s.cols}, layout),
        out(dtype, {s.rows, s.cols}, layout),
        d_out(dtype, {s.rows, s.cols}, layout),
        d_sum(dtype, {s.rows, s.cols}, layout),
        d_x(dtype, {s.rows, s.cols}, layout),
        gamma(dtype, {s.cols}, layout),
        d_gamma(DType::kF32, {s.cols}, layout),
        rstd(DType::kF32, {s.rows}, layout) {
    Random random;
    for (Matrix* m : {&x, &residual, &d_out, &d_sum, &gamma}) m->FillNormal(random);
  }
  RmsNormArgs args() {
    return {.x = x.view(), .gamma = gamma.view(), .out = out.view(), .rstd = rstd.view()};
  }
  RmsNormGradArgs grad_args() {
    return {.d_out = d_out.view(),
            .x = x.view(),
            .rstd = rstd.view(),
            .gamma = gamma.view(),
            .d_x = d_x.view(),
            .d_gamma = d_gamma.view()};
  }

  Matrix x, residual, sum, out, d_out, d_sum, d_x, gamma, d_gamma, rstd;
};

struct GluCall {
  GluCall(DType dtype, const RowsShape& s, const Layout& layout = {})
      : gate(dtype, {s.rows, s.cols}, layout),
        up(dtype, {s.rows, s.cols}, layout),
        out(dtype, {s.rows, s.cols}, layout),
        d_out(dtype, {s.rows, s.cols}, layout),
        d_gate(dtype, {s.rows, s.cols}, layout),
        d_up(dtype, {s.rows, s.cols}, layout),
        probs(DType::kF32, {s.rows}, layout),
        d_probs(DType::kF32, {s.rows}, layout) {
    Random random;
    gate.FillNormal(random, 0, 3);
    for (Matrix* m : {&up, &d_out, &probs}) m->FillNormal(random);
  }
  SwiGluArgs args() {
    return {.gate = gate.view(), .up = up.view(), .probs = probs.view(), .out = out.view()};
  }
  SwiGluGradArgs grad_args() {
    return {.d_out = d_out.view(),
            .gate = gate.view(),
            .up = up.view(),
            .probs = probs.view(),
            .d_gate = d_gate.view(),
            .d_up = d_up.view(),
            .d_probs = d_probs.view()};
  }

  Matrix gate, up, out, d_out, d_gate, d_up, probs, d_probs;
};

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_KERNELS_ROWS_CALL_H_
