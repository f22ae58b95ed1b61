// A call of Matmul with its tensors between guards, and the answer that it has to give.
#ifndef CUBIST_TESTS_KERNELS_MATMUL_CALL_H_
#define CUBIST_TESTS_KERNELS_MATMUL_CALL_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "kernels/matmul.h"
#include "reference/matmul.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {

// What a call asks for, besides its sizes.
struct MatmulOptions {
  DType in = DType::kF32, out = DType::kF32;
  std::optional<DType> bias = {};
  bool transpose_a = false, transpose_b = false;

  std::string Name() const {
    return Join(NameOf(in), transpose_a ? " T" : " N", transpose_b ? "T" : "N", " to ", NameOf(out),
                bias ? Join(", bias ", NameOf(*bias)) : "");
  }
};

// Every combination of outputs and biases that an input dtype allows.
inline std::vector<MatmulOptions> OutputsAndBiases(DType in) {
  std::vector<MatmulOptions> all;
  const std::vector<DType> kinds = in == DType::kF32 ? std::vector{in} : std::vector{DType::kF32, in};
  for (DType out : kinds) {
    all.push_back({.in = in, .out = out});
    for (DType bias : kinds) all.push_back({.in = in, .out = out, .bias = bias});
  }
  return all;
}

inline std::vector<MatmulOptions> AllOptions() {
  std::vector<MatmulOptions> all;
  for (DType in : kFloatTypes) {
    for (MatmulOptions options : OutputsAndBiases(in)) {
      for (int transposes = 0; transposes < 4; ++transposes) {
        options.transpose_a = (transposes & 1) != 0, options.transpose_b = (transposes & 2) != 0;
        all.push_back(options);
      }
    }
  }
  return all;
}

// Some of them, each dtype, transpose, bias and output among them.
inline std::vector<MatmulOptions> SomeOptions() {
  std::vector<MatmulOptions> some;
  const std::vector<MatmulOptions> all = AllOptions();
  for (std::size_t i = 0; i < all.size(); i += 5) some.push_back(all[i]);
  return some;
}

// Tensors of one call, each between guards at odd strides, made from row-major values.
struct MatmulCall {
  MatmulCall(const MatmulShape& s, const MatmulOptions& options, const Layout& layout = {})
      : options(options),
        a(options.in,
          options.transpose_a ? std::initializer_list<std::int64_t>{s.k, s.m}
                              : std::initializer_list<std::int64_t>{s.m, s.k},
          layout),
        b(options.in,
          options.transpose_b ? std::initializer_list<std::int64_t>{s.n, s.k}
                              : std::initializer_list<std::int64_t>{s.k, s.n},
          layout),
        bias(options.bias.value_or(DType::kF32), {s.n}, layout),
        c(options.out, {s.m, s.n}, layout) {}

  Tensor plain_a() { return options.transpose_a ? a.transposed() : a.view(); }
  Tensor plain_b() { return options.transpose_b ? b.transposed() : b.view(); }

  void FillUniform(Random& random) { a.FillUniform(random), b.FillUniform(random), bias.FillUniform(random); }
  void FillNormal(Random& random) { a.FillNormal(random), b.FillNormal(random), bias.FillNormal(random); }

  MatmulArgs args() {
    return {.a = a.view(),
            .b = b.view(),
            .bias = options.bias ? ConstTensor(bias.view()) : ConstTensor(),
            .c = c.view(),
            .transpose_a = options.transpose_a,
            .transpose_b = options.transpose_b};
  }
  reference::MatmulResult Reference() {
    const MatmulArgs x = args();
    return reference::Matmul(x.a, x.transpose_a, x.b, x.transpose_b, x.bias);
  }
  std::int64_t k() const { return a.size(options.transpose_a ? 0 : 1); }

  void ExpectGuards() {
    for (const Matrix* matrix : {&a, &b, &bias, &c}) testing::ExpectGuards(*matrix);
  }

  MatmulOptions options;
  Matrix a, b, bias, c;
};

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_KERNELS_MATMUL_CALL_H_
