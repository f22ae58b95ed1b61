// GroupedMatmul beside a loop of OpenBLAS or oneDNN products, one per group.
//
// GroupedMatmul/<library>/<dtype>/<transpose of the weights>/<groups>/<N>x<K>/threads:<n>: dtype is that of x and the
// weights, out is fp32. <groups> is <rows>of<experts> with as many rows for each, or skewed<rows>of<experts>: a tenth of
// the experts has 60 % of the rows. The packed libraries have the weights packed beforehand. of_roofline is the share of
// min(peak, read bandwidth * operations / bytes of weights, x and out).
#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "bench/support/answer.h"
#include "bench/support/gemm.h"
#include "bench/support/harness.h"
#include "bench/support/random_data.h"
#include "kernels/grouped_matmul.h"
#include "reference/grouped_matmul.h"

namespace cubist::bench {
namespace {

struct Shape {
  std::string groups;
  std::vector<std::int64_t> counts;
  std::int64_t n, k;
};

std::vector<std::int64_t> Even(std::int64_t rows, std::int64_t experts) {
  return std::vector<std::int64_t>(static_cast<std::size_t>(experts), rows);
}

// A tenth of the experts, spread among the others, has 60 % of the rows.
std::vector<std::int64_t> Skewed(std::int64_t rows, std::int64_t experts) {
  const std::int64_t busy = std::max<std::int64_t>(experts / 10, 1), quiet = experts - busy;
  std::vector<std::int64_t> counts;
  const std::int64_t many = rows * 6 / 10;
  std::int64_t busy_seen = 0, quiet_seen = 0;
  const auto share = [](std::int64_t total, std::int64_t i, std::int64_t parts) {
    return total * (i + 1) / parts - total * i / parts;
  };
  for (std::int64_t e = 0; e < experts; ++e) {
    if (e % 10 == 5 && busy_seen < busy) {
      counts.push_back(share(many, busy_seen++, busy));
    } else {
      counts.push_back(share(rows - many, quiet_seen++, quiet));
    }
  }
  return counts;
}

struct Weights {
  const char* name;
  bool transposed;
};
constexpr Weights kNN = {"NN", false}, kNT = {"NT", true};

// One call's tensors, and its answer on sampled rows.
class Problem {
 public:
  Problem(DType dtype, const Weights& weights, const Shape& shape)
      : dtype_(dtype),
        transposed_(weights.transposed),
        shape_(shape),
        rows_(std::accumulate(shape.counts.begin(), shape.counts.end(), std::int64_t{0})),
        x_(RandomBytes(dtype, rows_ * shape.k, 'x')),
        weights_(RandomBytes(dtype, experts() * shape.k * shape.n, 'w')),
        out_(RandomBytes(DType::kF32, rows_ * shape.n, 'o')) {
    // A reference row is N * K multiply-adds in double.
    constexpr std::int64_t kReferenceWork = 60'000'000;
    sample_ = Sample(rows_, std::clamp<std::int64_t>(kReferenceWork / (shape.n * shape.k), 3, 32));
  }

  std::int64_t experts() const { return static_cast<std::int64_t>(shape_.counts.size()); }
  GroupedMatmulArgs args() const {
    return {.x = ConstTensor(x_.data(), dtype_, {rows_, shape_.k}),
            .groups = ConstTensor(shape_.counts.data(), {experts()}),
            .weights = WeightsView(),
            .out = Tensor(out_.data(), DType::kF32, {rows_, shape_.n}),
            .transpose_weights = transposed_};
  }
  // Group g as a product of its own.
  Gemm Product(std::size_t g, std::int64_t first_row) const {
    const auto at = [](const Bytes& bytes, std::int64_t element, DType dtype) {
      return static_cast<void*>(bytes.data() + element * SizeOf(dtype));
    };
    return {.input = dtype_,
            .output = DType::kF32,
            .transpose_b = transposed_,
            .m = shape_.counts[g],
            .n = shape_.n,
            .k = shape_.k,
            .a = at(x_, first_row * shape_.k, dtype_),
            .b = {at(weights_, static_cast<std::int64_t>(g) * shape_.k * shape_.n, dtype_)},
            .c = at(out_, first_row * shape_.n, DType::kF32)};
  }
  const Shape& shape() const { return shape_; }
  DType dtype() const { return dtype_; }
  double flops() const {
    return 2.0 * static_cast<double>(rows_) * static_cast<double>(shape_.n) * static_cast<double>(shape_.k);
  }
  double bytes() const {
    const std::int64_t used =
        std::count_if(shape_.counts.begin(), shape_.counts.end(), [](std::int64_t n) { return n > 0; });
    return static_cast<double>(used * shape_.n * shape_.k + rows_ * shape_.k) *
               static_cast<double>(SizeOf(dtype_)) +
           static_cast<double>(rows_ * shape_.n) * 4;
  }

  void SpoilAnswer() const {
    for (std::int64_t row : sample_) Spoil(Row(row), DType::kF32, shape_.n);
  }
  std::string CheckAnswer() {
    if (expected_.empty()) {
      const GroupedMatmulArgs a = args();
      const std::vector<Range> ranges = reference::GroupRows(a.groups, false);
      const auto result = reference::GroupedMatmul(
          a.x, ranges,
          [&](std::int64_t g) {
            ConstTensor one = a.weights;
            one.data = static_cast<const char*>(one.data) + g * one.stride(0) * SizeOf(one.dtype);
            one.rank = 2, one.sizes = {one.size(1), one.size(2)},
            one.strides = {one.stride(1), one.stride(2)};
            return one;
          },
          transposed_, shape_.n, {}, sample_);
      expected_ = result.c;
      bounds_ = reference::MatmulBounds(result, shape_.k, dtype_, DType::kF32);
    }
    const auto n = static_cast<std::size_t>(shape_.n);
    for (std::size_t i = 0; i < sample_.size(); ++i) {
      const std::string wrong =
          Mismatch("row " + std::to_string(sample_[i]), Row(sample_[i]), DType::kF32, 1,
                   std::span(expected_).subspan(i * n, n), std::span(bounds_).subspan(i * n, n));
      if (!wrong.empty()) return wrong;
    }
    return {};
  }

 private:
  ConstTensor WeightsView() const {
    return transposed_ ? ConstTensor(weights_.data(), dtype_, {experts(), shape_.n, shape_.k})
                       : ConstTensor(weights_.data(), dtype_, {experts(), shape_.k, shape_.n});
  }
  void* Row(std::int64_t row) const { return out_.data() + row * shape_.n * 4; }

  DType dtype_;
  bool transposed_;
  Shape shape_;
  std::int64_t rows_;
  Bytes x_, weights_, out_;
  std::vector<std::int64_t> sample_;
  std::vector<double> expected_, bounds_;
};

// The last problem alone is kept: their weights are gigabytes.
Problem& ProblemOf(DType dtype, const Weights& weights, const Shape& shape) {
  static std::unique_ptr<Problem> problem;
  static std::string made;
  const std::string name = std::string(NameOf(dtype)) + weights.name + shape.groups +
                           std::to_string(shape.n) + "x" + std::to_string(shape.k);
  if (made != name) {
    problem.reset();
    problem = std::make_unique<Problem>(dtype, weights, shape);
    made = name;
  }
  return *problem;
}

void Time(benchmark::State& state, Problem& problem, int threads, const std::function<void()>& run,
          const std::string& error, const std::function<void()>& rest) {
  problem.SpoilAnswer();
  TimeRoofline(
      state, threads, ArithmeticOf(problem.dtype()), problem.flops(), problem.bytes(),
      {.run = run, .check = [&] { return error.empty() ? problem.CheckAnswer() : error; }, .rest = rest});
}

void TimeCubist(benchmark::State& state, Problem& problem, int threads, bool pack) {
  const Device device = Host({.threads = threads});
  std::string error;
  GroupedMatmulArgs args = problem.args();
  std::unique_ptr<Bytes> packed;
  if (pack) {
    PackOperandArgs weights{.source = args.weights, .side = Side::kB, .transpose = args.transpose_weights};
    weights.bytes = PackedOperandBytes(device, Side::kB, problem.dtype(), problem.shape().k,
                                       problem.shape().n, problem.experts());
    packed = std::make_unique<Bytes>(weights.bytes);
    weights.data = packed->data();
    const Status status = PackOperand(device, weights, &args.packed_weights);
    if (!status.ok()) error = status.message();
    args.weights = {}, args.transpose_weights = false;
  }
  Time(state, problem, threads,
       [&] {
         const Status status = GroupedMatmul(device, args);
         if (!status.ok()) error = status.message();
       },
       error, {});
}

void TimePeer(benchmark::State& state, Problem& problem, int threads, const GemmLibrary& peer) {
  std::vector<GemmRun> products;
  std::int64_t row = 0;
  for (std::size_t g = 0; g < problem.shape().counts.size(); ++g) {
    if (problem.shape().counts[g] > 0) products.push_back(peer.prepare(problem.Product(g, row), threads));
    row += problem.shape().counts[g];
  }
  Time(
      state, problem, threads,
      [&] {
        for (const GemmRun& product : products) product(0);
      },
      "", peer.rest);
}

void RegisterGroupedMatmul(DType dtype, const Weights& weights, const Shape& shape) {
  const std::string text = std::string(weights.name) + "/" + shape.groups + "/" + std::to_string(shape.n) +
                           "x" + std::to_string(shape.k);
  const auto name = [&](const std::string& library, int threads) {
    return CaseName("GroupedMatmul", library, NameOf(dtype), text, threads);
  };
  for (int threads : ThreadCounts()) {
    for (bool pack : {false, true}) {
      Register(name(pack ? "cubist_packed" : "cubist", threads), [=](benchmark::State& state) {
        TimeCubist(state, ProblemOf(dtype, weights, shape), threads, pack);
      });
    }
    for (const GemmLibrary& peer : GemmPeers()) {
      if (!peer.supports(dtype, DType::kF32)) continue;
      Register(name(peer.name, threads), [=](benchmark::State& state) {
        TimePeer(state, ProblemOf(dtype, weights, shape), threads, peer);
      });
    }
  }
}

}  // namespace
}  // namespace cubist::bench

int main(int argc, char** argv) {
  using namespace cubist;         // NOLINT: a main of a few lines.
  using namespace cubist::bench;  // NOLINT
  RegisterPeaks();
  const std::vector<Shape> shapes = {{"skewed4096of32", Skewed(4096, 32), 2048, 7168},
                                     {"skewed4096of32", Skewed(4096, 32), 1024, 2048},
                                     {"128of32", Even(128, 32), 1024, 2048},
                                     {"64of64", Even(64, 64), 1024, 2048},
                                     {"8of64", Even(8, 64), 1024, 2048}};
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Shape& shape : shapes) {
      for (const Weights& weights : {kNN, kNT}) RegisterGroupedMatmul(dtype, weights, shape);
    }
  }
  return Main(argc, argv, "");
}
