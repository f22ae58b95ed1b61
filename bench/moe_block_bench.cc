// MoeBlock, forward, beside its matrix products alone.
//
// MoeBlock/<library>/bf16/<what>/threads:<n>. Libraries: cubist, the whole block; products, its products alone, of the same
// tensors. `of_products` of the first is the share of its time that the second's last run took. Shapes: a device's part of a
// DeepSeek-V3 layer, 256 tokens for each of eight experts, four of which a token reaches, and the shared expert.
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bench/support/harness.h"
#include "bench/support/random_data.h"
#include "kernels/grouped_matmul.h"
#include "kernels/matmul.h"
#include "kernels/moe_block.h"

namespace cubist::bench {
namespace {

constexpr std::int64_t kHidden = 7168, kWidth = 2048, kExperts = 8, kTopK = 4,
                       kTokens = 256 * kExperts / kTopK, kRows = kTokens * kTopK;
constexpr DType kType = DType::kBF16;

double Silu(double g) { return g / (1 + std::exp(-g)); }

class Problem {
 public:
  Problem() {
    // Values that keep their size from layer to layer.
    for (const auto& [matrix, fan_in] : {std::pair{router(), kHidden},
                                         {gate_up(), kHidden},
                                         {down(), kWidth},
                                         {shared_gate_up(), kHidden},
                                         {shared_down(), kWidth}}) {
      auto* values = static_cast<BF16*>(matrix.data);
      const float scale = 1.7f / std::sqrt(static_cast<float>(fan_in));
      for (std::int64_t i = 0; i < matrix.count(); ++i)
        values[i] = BF16(scale * static_cast<float>(values[i]));
    }
    args.x = x();
    args.weights = {.norm = ConstTensor(norm_.data(), DType::kF32, {kHidden}),
                    .router = router(),
                    .gate_up = gate_up(),
                    .down = down(),
                    .shared_gate_up = shared_gate_up(),
                    .shared_down = shared_down()};
    args.route = {.score = ScoreFunction::kSigmoid, .renormalise = true, .scale = 2.5f};
    args.top_k = kTopK, args.out = Tensor(out_.data(), kType, {kTokens, kHidden});
  }

  Status Block(const Device& device) { return MoeBlock(device, args, &state); }

  // On what a block has left behind.
  Status Products(const Device& device) {
    const auto kept = [&](const char* name, DType dtype, std::initializer_list<std::int64_t> sizes) {
      return state.Take(name, dtype, sizes);
    };
    const Tensor normed = kept("normed", kType, {kTokens, kHidden}),
                 counts = kept("counts", DType::kI32, {kExperts});
    Status status =
        Matmul(device, {.a = normed, .b = router(), .c = kept("logits", DType::kF32, {kTokens, kExperts})});
    const auto run = [&](auto kernel, const auto& call) {
      if (status.ok()) status = kernel(device, call, nullptr);
    };
    run(&GroupedMatmul, GroupedMatmulArgs{.x = kept("permuted", kType, {kRows, kHidden}),
                                          .groups = counts,
                                          .weights = gate_up(),
                                          .out = kept("gate_up", kType, {kRows, 2 * kWidth})});
    run(&GroupedMatmul, GroupedMatmulArgs{.x = kept("act", kType, {kRows, kWidth}),
                                          .groups = counts,
                                          .weights = down(),
                                          .out = kept("down", kType, {kRows, kHidden})});
    run(&Matmul,
        MatmulArgs{
            .a = normed, .b = shared_gate_up(), .c = kept("shared_gate_up", kType, {kTokens, 2 * kWidth})});
    run(&Matmul, MatmulArgs{.a = kept("shared_act", kType, {kTokens, kWidth}),
                            .b = shared_down(),
                            .c = kept("shared", kType, {kTokens, kHidden})});
    return status;
  }

  static double Flops() {
    const double expert = 3.0 * kHidden * kWidth;
    return 2.0 * (static_cast<double>(kTokens) * kHidden * kExperts +
                  static_cast<double>(kRows + kTokens) * expert);
  }

  // Some columns of the last token, in double, along the routes that were taken.
  std::string Check() {
    const std::int64_t t = kTokens - 1;
    const auto* ids = static_cast<const std::int32_t*>(state.Take("ids", DType::kI32, {kTokens, kTopK}).data);
    double squares = 0;
    for (std::int64_t h = 0; h < kHidden; ++h) squares += std::pow(At(x(), t * kHidden + h), 2);
    std::vector<double> normed;
    for (std::int64_t h = 0; h < kHidden; ++h) {
      normed.push_back(At(x(), t * kHidden + h) / std::sqrt(squares / kHidden + 1e-6) *
                       LoadFloat(norm_.data(), DType::kF32, h));
    }
    std::vector<double> scores;
    double total = 0;
    for (std::int64_t j = 0; j < kTopK; ++j) {
      double logit = 0;
      for (std::int64_t h = 0; h < kHidden; ++h)
        logit += normed[static_cast<std::size_t>(h)] * At(router(), h * kExperts + ids[t * kTopK + j]);
      scores.push_back(1 / (1 + std::exp(-logit)));
      total += scores.back();
    }
    const std::vector<std::int64_t> columns = Sample(kHidden, 8);
    std::vector<double> expected;
    for (std::int64_t h : columns) expected.push_back(At(x(), t * kHidden + h));
    const auto add = [&](std::int64_t expert, double weight, const Tensor& in, const Tensor& back) {
      for (std::int64_t f = 0; f < kWidth; ++f) {
        double gate = 0, up = 0;
        for (std::int64_t h = 0; h < kHidden; ++h) {
          const std::int64_t row = (expert * kHidden + h) * 2 * kWidth;
          gate += normed[static_cast<std::size_t>(h)] * At(in, row + f);
          up += normed[static_cast<std::size_t>(h)] * At(in, row + kWidth + f);
        }
        for (std::size_t c = 0; c < columns.size(); ++c)
          expected[c] += weight * Silu(gate) * up * At(back, (expert * kWidth + f) * kHidden + columns[c]);
      }
    };
    for (std::int64_t j = 0; j < kTopK; ++j)
      add(ids[t * kTopK + j], 2.5 * scores[static_cast<std::size_t>(j)] / total, gate_up(), down());
    add(0, 1, shared_gate_up(), shared_down());
    for (std::size_t c = 0; c < columns.size(); ++c) {
      const double found = At(args.out, t * kHidden + columns[c]);
      // A dozen roundings of intermediate results, of values about one.
      if (std::abs(found - expected[c]) <= 24 * 0x1p-9 * (2 + std::abs(expected[c]))) continue;
      return "column " + std::to_string(columns[c]) + " is " + std::to_string(found) + ", expected " +
             std::to_string(expected[c]);
    }
    return {};
  }

  MoeBlockArgs args;
  BlockState state;

 private:
  static double At(const ConstTensor& matrix, std::int64_t i) { return LoadFloat(matrix.data, kType, i); }

  Tensor x() const { return {x_.data(), kType, {kTokens, kHidden}}; }
  Tensor router() const { return {router_.data(), kType, {kHidden, kExperts}}; }
  Tensor gate_up() const { return {gate_up_.data(), kType, {kExperts, kHidden, 2 * kWidth}}; }
  Tensor down() const { return {down_.data(), kType, {kExperts, kWidth, kHidden}}; }
  Tensor shared_gate_up() const { return {shared_gate_up_.data(), kType, {kHidden, 2 * kWidth}}; }
  Tensor shared_down() const { return {shared_down_.data(), kType, {kWidth, kHidden}}; }

  Bytes x_ = RandomBytes(kType, kTokens*kHidden, 1), norm_ = RandomBytes(DType::kF32, kHidden, 2),
        router_ = RandomBytes(kType, kHidden*kExperts, 3),
        gate_up_ = RandomBytes(kType, kExperts*kHidden * 2 * kWidth, 4),
        down_ = RandomBytes(kType, kExperts*kWidth*kHidden, 5),
        shared_gate_up_ = RandomBytes(kType, kHidden * 2 * kWidth, 6),
        shared_down_ = RandomBytes(kType, kWidth*kHidden, 7), out_ = RandomBytes(kType, kTokens*kHidden, 8);
};

// Seconds of the last run of `products` by threads.
std::map<int, double>& SecondsOfProducts() {
  static std::map<int, double> seconds;
  return seconds;
}

void RegisterLibrary(const std::string& library, int threads, Status (Problem::*run)(const Device&)) {
  Register(CaseName("MoeBlock", library, "bf16", "512x7168/top4of8/2048", threads),
           [=](benchmark::State& state) {
             static Problem problem;
             const Device device = Host({.threads = threads});
             std::string error;
             const auto once = [&](Status status) {
               if (!status.ok()) error = status.message();
             };
             once(problem.Block(device));  // The products read what it leaves.
             TimeCompute(state, threads, ArithmeticOf(DType::kBF16), Problem::Flops(),
                         {.run = [&] { once((problem.*run)(device)); },
                          .check = [&] { return error.empty() ? problem.Check() : error; }});
             const double seconds = Problem::Flops() / state.counters["FLOPS"];
             if (library == "products") SecondsOfProducts()[threads] = seconds;
             if (library == "cubist" && SecondsOfProducts().count(threads) > 0)
               state.counters["of_products"] = SecondsOfProducts()[threads] / seconds;
           });
}

void RegisterCases() {
  for (const int threads : ThreadCounts()) {
    RegisterLibrary("products", threads, &Problem::Products);
    RegisterLibrary("cubist", threads, &Problem::Block);
  }
}

}  // namespace
}  // namespace cubist::bench

int main(int argc, char** argv) {
  cubist::bench::RegisterPeaks();
  cubist::bench::RegisterCases();
  return cubist::bench::Main(argc, argv, "");
}
