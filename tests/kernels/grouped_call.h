// A call of GroupedMatmul with its tensors between guards, and the answer that it has to give.
#ifndef CUBIST_TESTS_KERNELS_GROUPED_CALL_H_
#define CUBIST_TESTS_KERNELS_GROUPED_CALL_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/grouped_matmul.h"
#include "reference/grouped_matmul.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {

// Rows of each group, and rows after the last.
struct Groups {
  std::vector<std::int64_t> counts;
  std::int64_t after = 0;

  std::int64_t rows() const { return std::accumulate(counts.begin(), counts.end(), after); }
  std::int64_t count() const { return static_cast<std::int64_t>(counts.size()); }
  std::string Name() const {
    std::string name;
    for (std::int64_t n : counts) name += std::to_string(n) + "_";
    return name + "and" + std::to_string(after);
  }
};

// Empty groups first, last and among others; one row; one below and above the tiles; a group that has nearly all.
inline std::vector<Groups> SomeGroups() {
  return {{{}, 0},
          {{}, 5},
          {{0}, 0},
          {{0, 0, 0}, 7},
          {{1}, 0},
          {{5, 0, 3}, 2},
          {{0, 12, 13, 0, 1, 24, 0}, 0},
          {{15, 16, 17}, 33},
          {{130, 1, 0, 127, 2}, 70},
          {{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, 1},
          {{3, 301, 2}, 0}};
}

// Rows of a matrix.
inline Tensor RowsOf(Tensor t, Range rows) {
  t.data = static_cast<char*>(t.data) + rows.begin * t.stride(0) * SizeOf(t.dtype);
  t.sizes[0] = rows.size();
  return t;
}

struct GroupedOptions {
  DType in = DType::kF32, out = DType::kF32;
  std::optional<DType> bias = {};
  bool transpose = false;  // weights (E, N, K)
  bool list = false;       // each group's weights a matrix of its own
  bool ends = false;
  DType groups = DType::kI64;

  std::string Name() const {
    return Join(NameOf(in), " to ", NameOf(out), transpose ? " transposed" : "", list ? " list" : "",
                ends ? " ends " : " counts ", NameOf(groups), bias ? Join(" bias ", NameOf(*bias)) : "");
  }
};

inline std::vector<GroupedOptions> AllOptions() {
  std::vector<GroupedOptions> all;
  for (int i = 0; i < 48; ++i) {
    GroupedOptions o;
    o.in = kFloatTypes[i % 3];
    o.out = i / 3 % 2 == 0 ? DType::kF32 : o.in;
    o.transpose = i / 6 % 2 == 1, o.list = i / 12 % 2 == 1, o.ends = i / 24 == 1;
    o.groups = (i + i / 7) % 2 == 0 ? DType::kI64 : DType::kI32;
    if (i % 4 == 1) o.bias = DType::kF32;
    if (i % 4 == 2) o.bias = o.in;
    all.push_back(o);
  }
  return all;
}

// One matrix per group between guards: a stack, or matrices at places of their own.
class GroupedStack {
 public:
  GroupedStack(DType dtype, std::int64_t groups, std::int64_t rows, std::int64_t cols, bool transpose,
               bool list)
      : transpose_(transpose) {
    const std::int64_t first = transpose ? cols : rows, second = transpose ? rows : cols;
    if (list) {
      // Each with a pitch of its own.
      for (std::int64_t g = 0; g < groups; ++g)
        matrices_.push_back(std::make_unique<Matrix>(dtype,
                                                     std::initializer_list<std::int64_t>{first, second},
                                                     Layout{.gap = 1 + g % 3, .offset = g % 4}));
    } else {
      matrices_.push_back(
          std::make_unique<Matrix>(dtype, std::initializer_list<std::int64_t>{groups, first, second}));
      stacked_ = true;
    }
  }

  Tensor stack() { return stacked_ ? matrices_[0]->view() : Tensor(); }
  std::vector<Tensor> list() {
    std::vector<Tensor> views;
    if (!stacked_) {
      for (const auto& matrix : matrices_) views.push_back(matrix->view());
    }
    return views;
  }
  std::vector<ConstTensor> const_list() {
    const std::vector<Tensor> views = list();
    return {views.begin(), views.end()};
  }
  // As it is stored, (rows, cols) or (cols, rows).
  Tensor Stored(std::int64_t g) {
    if (!stacked_) return matrices_[static_cast<std::size_t>(g)]->view();
    Tensor t = matrices_[0]->view();
    Tensor one = t;
    one.data = static_cast<char*>(t.data) + g * t.stride(0) * SizeOf(t.dtype);
    one.rank = 2, one.sizes = {t.size(1), t.size(2)}, one.strides = {t.stride(1), t.stride(2)};
    return one;
  }
  Tensor Plain(std::int64_t g) {
    Tensor t = Stored(g);
    if (transpose_) std::swap(t.sizes[0], t.sizes[1]), std::swap(t.strides[0], t.strides[1]);
    return t;
  }
  template <class F>
  void Each(F f) {
    for (const auto& matrix : matrices_) f(*matrix);
  }

 private:
  bool transpose_, stacked_ = false;
  std::vector<std::unique_ptr<Matrix>> matrices_;
};

// Tensors of a forward call and of its gradients.
struct GroupedCall {
  GroupedCall(const Groups& g, std::int64_t n, std::int64_t k, const GroupedOptions& o)
      : groups(g),
        options(o),
        n(n),
        k(k),
        list(o.groups, {g.count()}, {.step = 3}),
        x(o.in, {g.rows(), k}),
        weights(o.in, g.count(), k, n, o.transpose, o.list),
        bias(o.bias.value_or(DType::kF32), {g.count(), n}),
        out(o.out, {g.rows(), n}),
        weight_list(weights.const_list()) {
    std::vector<double> values(g.counts.begin(), g.counts.end());
    if (o.ends) std::partial_sum(values.begin(), values.end(), values.begin());
    Assign(list.view(), values);
  }

  template <class Fill>
  void FillWith(Fill fill) {
    fill(x), fill(bias), weights.Each(fill);
  }
  GroupedMatmulArgs args() {
    return {.x = x.view(),
            .groups = list.view(),
            .group_list = options.ends ? GroupList::kEnds : GroupList::kCounts,
            .weights = weights.stack(),
            .weight_list = weight_list,
            .bias = options.bias ? ConstTensor(bias.view()) : ConstTensor(),
            .out = out.view(),
            .transpose_weights = options.transpose};
  }
  std::vector<Range> ranges() { return reference::GroupRows(list.view(), options.ends); }
  reference::MatmulResult Reference() {
    const ConstTensor given_bias = options.bias ? ConstTensor(bias.view()) : ConstTensor();
    return reference::GroupedMatmul(
        x.view(), ranges(), [&](std::int64_t g) { return weights.Stored(g); }, options.transpose, n,
        given_bias);
  }
  void ExpectGuards() {
    for (const Matrix* m : {&list, &x, &bias, &out}) testing::ExpectGuards(*m);
    weights.Each([](const Matrix& m) { testing::ExpectGuards(m); });
  }

  Groups groups;
  GroupedOptions options;
  std::int64_t n, k;
  Matrix list, x;
  GroupedStack weights;
  Matrix bias, out;
  std::vector<ConstTensor> weight_list;
};

struct alignas(kPackedAlignment) PackedBlock {
  std::byte bytes[kPackedAlignment];
};

inline void FillIntegers(GroupedCall& call) {
  Random random;
  call.FillWith([&](Matrix& m) { m.FillIntegers(random); });
}
inline void FillUniform(GroupedCall& call) {
  Random random;
  call.FillWith([&](Matrix& m) { m.FillUniform(random); });
}

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_KERNELS_GROUPED_CALL_H_
