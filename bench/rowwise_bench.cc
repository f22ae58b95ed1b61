// RmsNorm and SwiGlu with their gradients, and the router, as shares of what memory allows.
//
// <kernel>/cubist/<dtype>/<rows>x<cols>/threads:<n>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bench/support/answer.h"
#include "bench/support/harness.h"
#include "bench/support/random_data.h"
#include "kernels/rms_norm.h"
#include "kernels/route.h"
#include "kernels/swiglu.h"
#include "reference/activations.h"
#include "reference/route.h"

namespace cubist::bench {
namespace {

struct Shape {
  std::int64_t rows, cols;
};
// Tokens by hidden size, and routed rows by the width of an expert.
constexpr Shape kNorm{4096, 7168}, kGlu{8192, 2048};

// Matrices of one shape, and fp32 vectors along their sides.
class Operands {
 public:
  Operands(DType dtype, const Shape& shape)
      : dtype_(dtype),
        shape_(shape),
        rows_(RandomBytes(DType::kF32, shape.rows, 6)),
        more_rows_(RandomBytes(DType::kF32, shape.rows, 7)),
        cols_(RandomBytes(DType::kF32, shape.cols, 8)),
        more_cols_(RandomBytes(DType::kF32, shape.cols, 9)) {
    for (std::uint64_t i = 0; i < 5; ++i)
      matrices_.push_back(RandomBytes(dtype, shape.rows * shape.cols, i + 1));
  }
  Tensor matrix(std::size_t i) { return {matrices_[i].data(), dtype_, {shape_.rows, shape_.cols}}; }
  Tensor of_rows() { return {rows_.data(), DType::kF32, {shape_.rows}}; }
  Tensor more_of_rows() { return {more_rows_.data(), DType::kF32, {shape_.rows}}; }
  Tensor of_cols() { return {cols_.data(), DType::kF32, {shape_.cols}}; }
  Tensor more_of_cols() { return {more_cols_.data(), DType::kF32, {shape_.cols}}; }
  double bytes() const { return static_cast<double>(shape_.rows * shape_.cols * SizeOf(dtype_)); }

 private:
  DType dtype_;
  Shape shape_;
  std::vector<Bytes> matrices_;
  Bytes rows_, more_rows_, cols_, more_cols_;
};

template <class AnyTensor>
AnyTensor FirstRows(AnyTensor x, std::int64_t rows) {
  x.sizes[0] = rows;
  return x;
}

// The first rows of `out` against the reference's.
std::string Compare(const Tensor& out, const reference::Bounded& expected) {
  return Mismatch("row 0", out.data, out.dtype, 1, expected.values, expected.bounds);
}
constexpr std::int64_t kChecked = 4;

struct Benchmark {
  std::string name;
  Shape shape;
  double read, written;  // matrices
  std::function<Status(const Device&, Operands&)> run;
  std::function<std::string(DType, Operands&)> check;
};

const std::vector<Benchmark>& Benchmarks() {
  static const std::vector<Benchmark> benchmarks = {
      {"RmsNorm", kNorm, 1, 1,
       [](const Device& device, Operands& x) {
         return RmsNorm(device,
                        {.x = x.matrix(0), .gamma = x.of_cols(), .out = x.matrix(1), .rstd = x.of_rows()});
       },
       [](DType dtype, Operands& x) {
         return Compare(x.matrix(1),
                        reference::RmsNorm(FirstRows(x.matrix(0), kChecked), x.of_cols(), 1e-6f, dtype).out);
       }},
      {"AddRmsNorm", kNorm, 2, 2,
       [](const Device& device, Operands& x) {
         return RmsNorm(device, {.x = x.matrix(0),
                                 .residual = x.matrix(1),
                                 .gamma = x.of_cols(),
                                 .out = x.matrix(2),
                                 .sum = x.matrix(3),
                                 .rstd = x.of_rows()});
       },
       [](DType dtype, Operands& x) {
         return Compare(x.matrix(2),
                        reference::RmsNorm(FirstRows(x.matrix(3), kChecked), x.of_cols(), 1e-6f, dtype).out);
       }},
      {"RmsNormGrad", kNorm, 2, 1,
       [](const Device& device, Operands& x) {
         return RmsNormGrad(device, {.d_out = x.matrix(0),
                                     .x = x.matrix(1),
                                     .rstd = x.of_rows(),
                                     .gamma = x.of_cols(),
                                     .d_x = x.matrix(2),
                                     .d_gamma = x.more_of_cols()});
       },
       [](DType dtype, Operands& x) {
         const auto first = [](const Tensor& t) { return FirstRows(t, kChecked); };
         return Compare(x.matrix(2),
                        reference::RmsNormGrad(first(x.matrix(0)), first(x.matrix(1)), first(x.of_rows()),
                                               x.of_cols(), {}, dtype, DType::kF32)
                            .d_x);
       }},
      {"SwiGlu", kGlu, 2, 1,
       [](const Device& device, Operands& x) {
         return SwiGlu(device,
                       {.gate = x.matrix(0), .up = x.matrix(1), .probs = x.of_rows(), .out = x.matrix(2)});
       },
       [](DType dtype, Operands& x) {
         const auto first = [](const Tensor& t) { return FirstRows(t, kChecked); };
         return Compare(x.matrix(2),
                        reference::SwiGlu(first(x.matrix(0)), first(x.matrix(1)), first(x.of_rows()), dtype));
       }},
      {"SwiGluGrad", kGlu, 3, 2,
       [](const Device& device, Operands& x) {
         return SwiGluGrad(device, {.d_out = x.matrix(0),
                                    .gate = x.matrix(1),
                                    .up = x.matrix(2),
                                    .probs = x.of_rows(),
                                    .d_gate = x.matrix(3),
                                    .d_up = x.matrix(4),
                                    .d_probs = x.more_of_rows()});
       },
       [](DType dtype, Operands& x) {
         const auto first = [](const Tensor& t) { return FirstRows(t, kChecked); };
         return Compare(x.matrix(3),
                        reference::SwiGluGrad(first(x.matrix(0)), first(x.matrix(1)), first(x.matrix(2)),
                                              first(x.of_rows()), dtype, DType::kF32)
                            .d_gate);
       }}};
  return benchmarks;
}

// DeepSeek-V3's router after its projection: sigmoid scores, bias, 4 of 8 groups, 8 of 256 experts.
struct Router {
  static constexpr std::int64_t kTokens = 4096, kExperts = 256, kTopK = 8;

  Router() {
    args.logits = ConstTensor(logits.data(), DType::kF32, {kTokens, kExperts});
    args.bias = ConstTensor(bias.data(), DType::kF32, {kExperts});
    args.options = {.score = ScoreFunction::kSigmoid,
                    .renormalise = true,
                    .scale = 2.5f,
                    .groups = 8,
                    .top_groups = 4,
                    .group_top = 2,
                    .bad_logits = BadLogits::kZero};
    args.weights = Tensor(weights.data(), DType::kF32, {kTokens, kTopK});
    args.ids = Tensor(ids.data(), {kTokens, kTopK});
  }
  // Where the reference's choices were clear.
  std::string Check() const {
    reference::RouterOptions o{.score = reference::Score::kSigmoid,
                               .renormalise = true,
                               .eps = 1e-20,
                               .scale = 2.5,
                               .groups = 8,
                               .top_groups = 4,
                               .group_top = 2};
    for (std::int64_t t = 0; t < kTokens; t += 97) {
      ConstTensor row = args.logits;
      row.data = static_cast<const float*>(row.data) + t * kExperts, row.sizes[0] = 1;
      const auto expected = reference::Route(row, args.bias, kTopK, o);
      if (expected.smallest_gap < 1e-5) continue;
      for (std::int64_t j = 0; j < kTopK; ++j) {
        if (ids[static_cast<std::size_t>(t * kTopK + j)] != expected.ids[static_cast<std::size_t>(j)])
          return "token " + std::to_string(t) + ", route " + std::to_string(j);
      }
    }
    return {};
  }

  Bytes logits = RandomBytes(DType::kF32, kTokens*kExperts, 1), bias = RandomBytes(DType::kF32, kExperts, 2),
        weights = RandomBytes(DType::kF32, kTokens*kTopK, 3);
  std::vector<std::int32_t> ids = std::vector<std::int32_t>(static_cast<std::size_t>(kTokens * kTopK), -1);
  RouteArgs args;
};

void RegisterRouter() {
  for (int threads : ThreadCounts()) {
    Register(CaseName("Route", "cubist", "fp32", "4096x256/top8/4of8groups", threads),
             [threads](benchmark::State& state) {
               Router router;
               const Device device = Host({.threads = threads});
               std::string error;
               TimeMovement(state, threads, 4.0 * Router::kTokens * Router::kExperts,
                            8.0 * Router::kTokens * Router::kTopK,
                            {.run =
                                 [&] {
                                   if (const Status status = Route(device, router.args); !status.ok())
                                     error = status.message();
                                 },
                             .check = [&] { return error.empty() ? router.Check() : error; }});
             });
  }
}

void RegisterCases() {
  RegisterRouter();
  for (const Benchmark& b : Benchmarks()) {
    for (DType dtype : {DType::kBF16, DType::kF32}) {
      for (int threads : ThreadCounts()) {
        const std::string text = std::to_string(b.shape.rows) + "x" + std::to_string(b.shape.cols);
        Register(CaseName(b.name, "cubist", NameOf(dtype), text, threads),
                 [&b, dtype, threads](benchmark::State& state) {
                   Operands operands(dtype, b.shape);
                   const Device device = Host({.threads = threads});
                   std::string error;
                   TimeMovement(state, threads, b.read * operands.bytes(), b.written * operands.bytes(),
                                {.run =
                                     [&] {
                                       if (const Status status = b.run(device, operands); !status.ok())
                                         error = status.message();
                                     },
                                 .check = [&] { return error.empty() ? b.check(dtype, operands) : error; }});
                 });
      }
    }
  }
}

}  // namespace
}  // namespace cubist::bench

int main(int argc, char** argv) {
  cubist::bench::RegisterPeaks();
  cubist::bench::RegisterCases();
  return cubist::bench::Main(argc, argv, "");
}
