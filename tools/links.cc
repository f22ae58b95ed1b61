#include "tools/links.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "reference/bounds.h"
#include "tools/case_checks.h"
#include "tools/generate.h"
#include "tools/views.h"

namespace cubist {
namespace {

std::int64_t Affordable(double products, double cost, std::int64_t most) {
  return static_cast<std::int64_t>(
      std::clamp(products / std::max(cost, 1.0), 1.0, std::max(static_cast<double>(most), 1.0)));
}

// Element (i, j) of a * b, and what it may be off.
void AddProduct(const ConstTensor& out, const ConstTensor& a, const ConstTensor& b, std::int64_t i,
                std::int64_t j, Comparison* part) {
  const std::int64_t k = a.size(1);
  double sum = 0, magnitude = 0, largest = 1;
  for (std::int64_t p = 0; p < k; ++p) {
    const double x = At(a, i, p), y = At(b, p, j);
    sum += x * y, magnitude += std::abs(x * y);
    largest = std::max({largest, std::abs(x), std::abs(y)});
  }
  part->Add(At(out, i, j), sum, reference::MatmulBound(k, a.dtype, out.dtype, sum, magnitude, largest),
            out.dtype, i, j);
}

// One row, or one column, as a matrix; of a vector one element.
ConstTensor RowOnly(const ConstTensor& x, std::int64_t i) { return RowsOf(x, {i, i + 1}); }
ConstTensor ColumnOnly(const ConstTensor& x, std::int64_t j) { return ColumnsOf(x, {j, j + 1}); }

// A vector as a column.
ConstTensor AsColumn(ConstTensor x) {
  x.rank = 2;
  x.sizes = {x.size(0), 1}, x.strides = {x.stride(0), 1};
  return x;
}

}  // namespace

std::uint64_t Links::KeyOf(const std::string& name) const { return StreamKey(key_, name); }

void Links::Merge(const std::string& name, Comparison part, double share) {
  least_share_ = std::min(least_share_, share);
  if (part.beyond > 0) part.first_beyond = name + ": " + part.first_beyond;
  part.rows = part.all_rows = 0;
  all_.Merge(part);
}

Comparison Links::Result(std::int64_t all_rows) const {
  Comparison result = all_;
  result.all_rows = all_rows;
  result.rows =
      std::max<std::int64_t>(static_cast<std::int64_t>(least_share_ * static_cast<double>(all_rows)), 1);
  return result;
}

void Links::Product(const std::string& name, const ConstTensor& out, const ConstTensor& a,
                    const ConstTensor& b, double share) {
  const std::int64_t m = out.size(0), n = out.size(1);
  if (m == 0 || n == 0) return;
  const auto cost = static_cast<double>(a.size(1));
  const double elements = std::max(share * products_ / std::max(cost, 1.0), 1.0);
  // As square a grid as fits.
  const std::int64_t square = Affordable(std::sqrt(elements), 1, m);
  const std::int64_t cols = Affordable(elements, static_cast<double>(square), n),
                     rows = Affordable(elements, static_cast<double>(cols), m);
  const std::vector<std::int64_t> at_rows = SampleRows(m, rows, KeyOf(name + " rows")),
                                  at_cols = SampleRows(n, cols, KeyOf(name + " columns"));
  const Comparison part = CompareParts(std::ssize(at_rows), [&](std::int64_t i) {
    Comparison row;
    for (const std::int64_t j : at_cols) AddProduct(out, a, b, at_rows[static_cast<std::size_t>(i)], j, &row);
    return row;
  });
  Merge(name, part, static_cast<double>(part.elements) / static_cast<double>(out.count()));
}

void Links::Projection(const std::string& name, const Gradients& g, double share) {
  Product("what reaches " + name, g.dx, g.dy, Transposed(g.weights), share);
  Product(name, g.dw, Transposed(g.x), g.dy, share);
}

void Links::Rows(const std::string& name, const ConstTensor& out, double cost, const Row& row) {
  const std::vector<std::int64_t> rows =
      SampleRows(out.size(0), Affordable(products_, cost, out.size(0)), KeyOf(name));
  const Comparison part = CompareParts(std::ssize(rows), [&](std::int64_t i) {
    const std::int64_t at = rows[static_cast<std::size_t>(i)];
    const reference::Bounded expected = row(at);
    Comparison of_row;
    for (std::size_t j = 0; j < expected.values.size(); ++j) {
      const auto col = static_cast<std::int64_t>(j);
      of_row.Add(At(out, at, col), expected.values[j], expected.bounds[j], out.dtype, at, col);
    }
    return of_row;
  });
  Merge(name, part, static_cast<double>(rows.size()) / static_cast<double>(out.size(0)));
}

void Links::Norm(const std::string& name, const RmsNormGradArgs& x) {
  const auto rows = static_cast<double>(x.x.size(0)), cols = static_cast<double>(x.x.size(1));
  const auto gradients = [&](const RmsNormGradArgs& a) {
    return reference::RmsNormGrad(a.d_out, a.x, a.rstd, a.gamma, a.d_sum, x.d_x.dtype, x.d_gamma.dtype);
  };
  Rows("what reaches " + name, x.d_x, 3 * cols, [&](std::int64_t i) {
    RmsNormGradArgs row = x;
    row.d_out = RowOnly(x.d_out, i), row.x = RowOnly(x.x, i), row.rstd = RowOnly(x.rstd, i);
    if (x.d_sum.given()) row.d_sum = RowOnly(x.d_sum, i);
    return gradients(row).d_x;
  });
  Rows(name, AsColumn(x.d_gamma), 3 * rows, [&](std::int64_t j) {
    RmsNormGradArgs col = x;
    col.d_out = ColumnOnly(x.d_out, j), col.x = ColumnOnly(x.x, j), col.gamma = RowOnly(x.gamma, j);
    col.d_sum = {};
    return gradients(col).d_gamma;
  });
}

void Links::Sum(const std::string& name, const ConstTensor& out, const std::vector<ConstTensor>& terms) {
  const std::int64_t cols = out.size(1), count = std::ssize(terms);
  Rows(name, out, static_cast<double>(cols * count), [&](std::int64_t i) {
    reference::Bounded expected;
    for (std::int64_t j = 0; j < cols; ++j) {
      double sum = 0, magnitude = 0;
      for (const ConstTensor& term : terms) sum += At(term, i, j), magnitude += std::abs(At(term, i, j));
      expected.values.push_back(sum);
      expected.bounds.push_back(reference::WeightedSumBound(count, out.dtype, sum, magnitude));
    }
    return expected;
  });
}

void Links::Activation(const std::string& name, const SwiGluGradArgs& x) {
  const auto row_of = [&](std::int64_t i) {
    return reference::SwiGluGrad(RowOnly(x.d_out, i), RowOnly(x.gate, i), RowOnly(x.up, i), {},
                                 x.d_gate.dtype, DType::kF32);
  };
  const double cost = 30 * static_cast<double>(x.gate.size(1));  // An exponential is worth some products.
  Rows(name + ", gate", x.d_gate, cost, [&](std::int64_t i) { return row_of(i).d_gate; });
  Rows(name + ", up", x.d_up, cost, [&](std::int64_t i) { return row_of(i).d_up; });
}

}  // namespace cubist
