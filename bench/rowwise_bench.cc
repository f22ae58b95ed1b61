// RmsNorm and SwiGlu with their gradients, and the router, as shares of what memory allows.
//
// <kernel>/cubist/<dtype>/<rows>x<cols>/threads:<n>
#include <cstdint>
#include <string>
#include <utility>
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
  DType dtype() const { return dtype_; }
  Tensor matrix(std::size_t i) const { return {matrices_[i].data(), dtype_, {shape_.rows, shape_.cols}}; }
  Tensor of_rows() const { return {rows_.data(), DType::kF32, {shape_.rows}}; }
  Tensor more_of_rows() const { return {more_rows_.data(), DType::kF32, {shape_.rows}}; }
  Tensor of_cols() const { return {cols_.data(), DType::kF32, {shape_.cols}}; }
  Tensor more_of_cols() const { return {more_cols_.data(), DType::kF32, {shape_.cols}}; }
  double bytes() const { return static_cast<double>(shape_.rows * shape_.cols * SizeOf(dtype_)); }

 private:
  DType dtype_;
  Shape shape_;
  std::vector<Bytes> matrices_;
  Bytes rows_, more_rows_, cols_, more_cols_;
};

// Element `i` of a dimension alone.
Tensor Slice(Tensor x, int d, std::int64_t i) {
  x.data = static_cast<char*>(x.data) + i * x.stride(d) * SizeOf(x.dtype);
  x.sizes[static_cast<std::size_t>(d)] = 1;
  return x;
}
Tensor Row(const Tensor& x, std::int64_t row) { return Slice(x, 0, row); }
Tensor Column(const Tensor& matrix, std::int64_t column) { return Slice(matrix, 1, column); }

// A part of an output, of adjacent elements, and what the reference makes of it.
struct Part {
  std::string name;
  Tensor out;
  reference::Bounded expected;
};

struct Benchmark {
  std::string name;
  Shape shape;
  double read, written;  // matrices
  Status (*run)(const Device&, const Operands&);
  // Of every output the part at a row, or at a column.
  using PartsAt = std::vector<Part> (*)(const Operands&, std::int64_t i);
  PartsAt at_row, at_column = nullptr;
};

// A row of x + residual, added in fp32 and rounded once; `z` gets its numbers.
reference::Bounded AddedRow(const Tensor& x, const Tensor& residual, const Tensor& z) {
  reference::Bounded sum;
  for (std::int64_t i = 0; i < z.count(); ++i) {
    StoreFloat(z.data, z.dtype, i,
               LoadFloat(x.data, x.dtype, i) + LoadFloat(residual.data, residual.dtype, i));
    sum.values.push_back(LoadFloat(z.data, z.dtype, i)), sum.bounds.push_back(0);
  }
  return sum;
}

const std::vector<Benchmark>& Benchmarks() {
  static const std::vector<Benchmark> benchmarks = {
      {"RmsNorm", kNorm, 1, 1,
       [](const Device& device, const Operands& x) {
         return RmsNorm(device,
                        {.x = x.matrix(0), .gamma = x.of_cols(), .out = x.matrix(1), .rstd = x.of_rows()});
       },
       [](const Operands& x, std::int64_t t) -> std::vector<Part> {
         const auto expected = reference::RmsNorm(Row(x.matrix(0), t), x.of_cols(), 1e-6f, x.dtype());
         return {{"out", Row(x.matrix(1), t), expected.out}, {"rstd", Row(x.of_rows(), t), expected.rstd}};
       }},
      {"AddRmsNorm", kNorm, 2, 2,
       [](const Device& device, const Operands& x) {
         return RmsNorm(device, {.x = x.matrix(0),
                                 .residual = x.matrix(1),
                                 .gamma = x.of_cols(),
                                 .out = x.matrix(2),
                                 .sum = x.matrix(3),
                                 .rstd = x.of_rows()});
       },
       [](const Operands& x, std::int64_t t) -> std::vector<Part> {
         const Tensor sum = Row(x.matrix(3), t);
         const Bytes memory(sum.count() * SizeOf(sum.dtype));
         const Tensor z(memory.data(), sum.dtype, {1, sum.size(1)});
         const auto added = AddedRow(Row(x.matrix(0), t), Row(x.matrix(1), t), z);
         const auto expected = reference::RmsNorm(z, x.of_cols(), 1e-6f, x.dtype());
         return {{"sum", sum, added},
                 {"out", Row(x.matrix(2), t), expected.out},
                 {"rstd", Row(x.of_rows(), t), expected.rstd}};
       }},
      {"RmsNormGrad", kNorm, 2, 1,
       [](const Device& device, const Operands& x) {
         return RmsNormGrad(device, {.d_out = x.matrix(0),
                                     .x = x.matrix(1),
                                     .rstd = x.of_rows(),
                                     .gamma = x.of_cols(),
                                     .d_x = x.matrix(2),
                                     .d_gamma = x.more_of_cols()});
       },
       [](const Operands& x, std::int64_t t) -> std::vector<Part> {
         const auto expected =
             reference::RmsNormGrad(Row(x.matrix(0), t), Row(x.matrix(1), t), Row(x.of_rows(), t),
                                    x.of_cols(), {}, x.dtype(), DType::kF32);
         return {{"d_x", Row(x.matrix(2), t), expected.d_x}};
       },
       [](const Operands& x, std::int64_t h) -> std::vector<Part> {
         const auto expected =
             reference::RmsNormGrad(Column(x.matrix(0), h), Column(x.matrix(1), h), x.of_rows(),
                                    Row(x.of_cols(), h), {}, x.dtype(), DType::kF32);
         return {{"d_gamma", Row(x.more_of_cols(), h), expected.d_gamma}};
       }},
      {"SwiGlu", kGlu, 2, 1,
       [](const Device& device, const Operands& x) {
         return SwiGlu(device,
                       {.gate = x.matrix(0), .up = x.matrix(1), .probs = x.of_rows(), .out = x.matrix(2)});
       },
       [](const Operands& x, std::int64_t m) -> std::vector<Part> {
         return {
             {"out", Row(x.matrix(2), m),
              reference::SwiGlu(Row(x.matrix(0), m), Row(x.matrix(1), m), Row(x.of_rows(), m), x.dtype())}};
       }},
      {"SwiGluGrad", kGlu, 3, 2,
       [](const Device& device, const Operands& x) {
         return SwiGluGrad(device, {.d_out = x.matrix(0),
                                    .gate = x.matrix(1),
                                    .up = x.matrix(2),
                                    .probs = x.of_rows(),
                                    .d_gate = x.matrix(3),
                                    .d_up = x.matrix(4),
                                    .d_probs = x.more_of_rows()});
       },
       [](const Operands& x, std::int64_t m) -> std::vector<Part> {
         const auto expected =
             reference::SwiGluGrad(Row(x.matrix(0), m), Row(x.matrix(1), m), Row(x.matrix(2), m),
                                   Row(x.of_rows(), m), x.dtype(), DType::kF32);
         return {{"d_gate", Row(x.matrix(3), m), expected.d_gate},
                 {"d_up", Row(x.matrix(4), m), expected.d_up},
                 {"d_probs", Row(x.more_of_rows(), m), expected.d_probs}};
       }}};
  return benchmarks;
}

// Parts of every output, spoilt until the call writes them.
class Answer {
 public:
  Answer(const Benchmark& b, const Operands& x) {
    for (std::int64_t row : Sample(b.shape.rows, 32)) Add(b.at_row(x, row), "row", row);
    if (b.at_column == nullptr) return;
    for (std::int64_t column : Sample(b.shape.cols, 32)) Add(b.at_column(x, column), "from column", column);
  }
  std::string Check() const {
    for (const Part& part : parts_) {
      const std::string wrong =
          Mismatch(part.name, part.out.data, part.out.dtype, 1, part.expected.values, part.expected.bounds);
      if (!wrong.empty()) return wrong;
    }
    return {};
  }

 private:
  void Add(std::vector<Part> parts, const char* where, std::int64_t i) {
    for (Part& part : parts) {
      Spoil(part.out.data, part.out.dtype, part.out.count());
      part.name += std::string(" ") + where + " " + std::to_string(i);
      parts_.push_back(std::move(part));
    }
  }

  std::vector<Part> parts_;
};

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
    Spoil(weights.data(), DType::kF32, kTokens * kTopK);
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
    for (std::int64_t t : Sample(kTokens, 48)) {
      ConstTensor row = args.logits;
      row.data = static_cast<const float*>(row.data) + t * kExperts, row.sizes[0] = 1;
      const auto expected = reference::Route(row, args.bias, kTopK, o);
      if (expected.smallest_gap < 1e-5) continue;
      for (std::int64_t j = 0; j < kTopK; ++j) {
        if (ids[static_cast<std::size_t>(t * kTopK + j)] != expected.ids[static_cast<std::size_t>(j)])
          return "token " + std::to_string(t) + ", route " + std::to_string(j);
      }
      // Scores err by some units in the last place, and a weight by those of all that its sum has.
      std::vector<double> bounds;
      for (double weight : expected.weights) bounds.push_back(0x1p-17 * weight);
      const std::string wrong =
          Mismatch("weights of token " + std::to_string(t), weights.data() + t * kTopK * 4, DType::kF32, 1,
                   expected.weights, bounds);
      if (!wrong.empty()) return wrong;
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
                   const Operands operands(dtype, b.shape);
                   const Answer answer(b, operands);
                   const Device device = Host({.threads = threads});
                   std::string error;
                   TimeMovement(state, threads, b.read * operands.bytes(), b.written * operands.bytes(),
                                {.run =
                                     [&] {
                                       if (const Status status = b.run(device, operands); !status.ok())
                                         error = status.message();
                                     },
                                 .check = [&] { return error.empty() ? answer.Check() : error; }});
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
