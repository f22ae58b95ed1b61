// What the benchmarks of attention and of its gradient have in common: shapes, and the calls that are set side by side.
#ifndef CUBIST_BENCH_SUPPORT_ATTENTION_CASES_H_
#define CUBIST_BENCH_SUPPORT_ATTENTION_CASES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/support/harness.h"
#include "bench/support/square_attention.h"
#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist::bench {

// Of as many queries as keys, or of one query a head, which is a step of decoding.
struct AttentionShape {
  std::int64_t heads = 0, kv_heads = 0, s = 0, dqk = 0, dr = 0, dv = 0;
  bool decodes = false;

  std::int64_t sq() const { return decodes ? 1 : s; }
};

inline std::string TextOf(const AttentionShape& x) {
  std::string text = std::to_string(x.heads);
  if (x.decodes) text.append("on").append(std::to_string(x.kv_heads));
  text.append("x").append(std::to_string(x.s)).append("x").append(std::to_string(x.dqk));
  if (x.dr > 0) text.append("r").append(std::to_string(x.dr));
  return text + "x" + std::to_string(x.dv);
}

// 2 for a multiplication and an addition of every pair that sees each other, of each head, in each of `columns`; causal
// counts half, as is customary.
inline double PairFlops(const AttentionShape& x, bool causal, std::int64_t columns) {
  return static_cast<double>(2 * x.heads * columns) * static_cast<double>(x.sq()) * static_cast<double>(x.s) /
         (causal ? 2 : 1);
}

// Of all keys and values.
inline double KeyBytes(const AttentionShape& x, DType dtype) {
  return static_cast<double>(x.kv_heads * x.s * (x.dqk + x.dv) * SizeOf(dtype));
}

// Every case of a shape, under the benchmark's name `kernel`. A Problem(dtype, causal, shape) has its memory, and
//   Flops(shape, causal)     static
//   SpoilAnswer()            before a timing; CheckAnswer() after it: what is wrong
//   Own(threads)             a call of this library, as a function of a Status
//   Square(detour, threads)  the same without its ideas, where shape.dr > 0
//   Composed(threads)        the peer, where HasComposed(dtype, shape), static
template <class Problem>
class AttentionCases {
 public:
  AttentionCases(std::string kernel, DType dtype, bool causal, const AttentionShape& shape)
      : kernel_(std::move(kernel)), dtype_(dtype), causal_(causal), shape_(shape) {}

  void RegisterAll() const {
    for (const int threads : ThreadCounts()) {
      Add("cubist", threads, [threads](Problem& problem) { return problem.Own(threads); });
      if (shape_.dr > 0) {
        AddSquare("cubist_conventional", Detour::kPadded, threads);
        AddSquare("cubist_rectangular", Detour::kJoined, threads);
      }
      if (Problem::HasComposed(dtype_, shape_)) {
        Add("composed", threads, [threads](Problem& problem) {
          return [run = problem.Composed(threads)] {
            run();
            return Status();
          };
        });
      }
    }
  }

 private:
  void AddSquare(const char* library, Detour detour, int threads) const {
    Add(library, threads, [=](Problem& problem) { return problem.Square(detour, threads); });
  }

  // `make(problem)` makes the function of a Status that is timed.
  template <class Make>
  void Add(const char* library, int threads, Make make) const {
    const std::string text = std::string(shape_.decodes ? "decode/"
                                         : causal_      ? "causal/"
                                                        : "full/") +
                             TextOf(shape_);
    const double flops = Problem::Flops(shape_, causal_);
    Register(
        CaseName(kernel_, library, NameOf(dtype_), text, threads),
        [made = made_, dtype = dtype_, causal = causal_, shape = shape_, flops, threads,
         make](benchmark::State& state) {
          if (!*made) *made = std::make_unique<Problem>(dtype, causal, shape);
          Problem& problem = **made;
          const std::function<Status()> call = make(problem);
          std::string error;
          problem.SpoilAnswer();
          const auto run = [&] {
            if (const Status status = call(); !status.ok()) error = status.message();
          };
          const auto check = [&] { return error.empty() ? problem.CheckAnswer() : error; };
          if (shape.decodes)
            TimeRoofline(state, threads, ArithmeticOf(dtype), flops, KeyBytes(shape, dtype), {run, check});
          else
            TimeCompute(state, threads, ArithmeticOf(dtype), flops, {run, check});
        });
  }

  std::string kernel_;
  DType dtype_;
  bool causal_;
  AttentionShape shape_;
  // Made by the first case that runs, then shared by all libraries, thread counts and repetitions.
  std::shared_ptr<std::unique_ptr<Problem>> made_ = std::make_shared<std::unique_ptr<Problem>>();
};

// Every shape that is measured, with both masks and in every dtype; forward also `absorbed` ones of one KV head and 576
// columns, and decoding: heads of four sequences, several to a KV head, whose keys come from memory.
template <class Problem>
void RegisterAttention(const std::string& kernel, bool forward) {
  std::vector<AttentionShape> shapes;
  for (const std::int64_t s : {1024, 2048, 4096, 8192}) {
    shapes.push_back({8, 8, s, 128, 0, 128});
    shapes.push_back({8, 8, s, 192, 0, 128});
    shapes.push_back({8, 8, s, 128, 64, 128});
    if (forward) shapes.push_back({2, 1, s, 576, 0, 512});
  }
  for (const std::int64_t d : {64, 72, 80, 177, 192}) shapes.push_back({8, 8, 1000, d, 0, d});
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF16}) {
    for (const AttentionShape& shape : shapes) {
      for (const bool causal : {false, true})
        AttentionCases<Problem>(kernel, dtype, causal, shape).RegisterAll();
    }
    if (!forward) continue;
    for (const AttentionShape& shape : {AttentionShape{32, 32, 4096, 128, 0, 128, /*decodes=*/true},
                                        AttentionShape{128, 32, 4096, 128, 0, 128, /*decodes=*/true},
                                        AttentionShape{64, 4, 8192, 576, 0, 512, /*decodes=*/true}})
      AttentionCases<Problem>(kernel, dtype, /*causal=*/false, shape).RegisterAll();
  }
}

}  // namespace cubist::bench

#endif  // CUBIST_BENCH_SUPPORT_ATTENTION_CASES_H_
