// Matmul beside OpenBLAS and oneDNN, and Mmad alone.
//
// Matmul/<library>/<dtype>/<transposes>/<MxNxK>/threads:<n>: dtype is that of A and B, C is fp32; bf16_bf16
// has C in bf16. cubist_packed and onednn_packed have B packed beforehand. Where M <= 64, B comes from memory: runs take
// copies of it in turn. Mmad/cubist/<dtype>/<MxNxK>/threads:<n>: one tile in the caches of each thread, through the host
// core.
#include <atomic>
#include <barrier>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench/support/answer.h"
#include "bench/support/gemm.h"
#include "bench/support/harness.h"
#include "bench/support/random_data.h"
#include "kernels/matmul.h"
#include "npu_model/host/host_core.h"
#include "reference/matmul.h"

namespace cubist::bench {
namespace {

struct Shape {
  std::int64_t m, n, k;
};

struct Layout {
  const char* name;
  bool transpose_a, transpose_b;
};
constexpr Layout kNN = {"NN", false, false}, kNT = {"NT", false, true}, kTN = {"TN", true, false},
                 kTT = {"TT", true, true};

struct Types {
  const char* name;
  DType input, output;
};
constexpr Types kTypes[] = {{"fp32", DType::kF32, DType::kF32},
                            {"bf16", DType::kBF16, DType::kF32},
                            {"fp16", DType::kF16, DType::kF32},
                            {"bf16_bf16", DType::kBF16, DType::kBF16}};

std::string TextOf(const Shape& s) {
  return std::to_string(s.m) + "x" + std::to_string(s.n) + "x" + std::to_string(s.k);
}

constexpr std::int64_t kSmallM = 64;

// A product and its expected answer on sampled rows. Operands of one type and size are one allocation,
// whatever their layout; the expected answer is computed when it is first needed.
class Problem {
 public:
  Problem(const Types& types, const Layout& layout, const Shape& shape);

  const Gemm& gemm() const { return gemm_; }
  ConstTensor a() const { return View(gemm_.a, gemm_.transpose_a, gemm_.m, gemm_.k); }
  ConstTensor b(std::size_t copy) const { return View(gemm_.b[copy], gemm_.transpose_b, gemm_.k, gemm_.n); }
  Tensor c() const { return {gemm_.c, gemm_.output, {gemm_.m, gemm_.n}}; }

  void SpoilAnswer() const {
    for (std::int64_t row : rows_) Spoil(Row(row), gemm_.output, gemm_.n);
  }
  std::string CheckAnswer();

 private:
  ConstTensor View(const void* data, bool transposed, std::int64_t rows, std::int64_t cols) const {
    return transposed ? ConstTensor(data, gemm_.input, {cols, rows})
                      : ConstTensor(data, gemm_.input, {rows, cols});
  }
  char* Row(std::int64_t row) const {
    return static_cast<char*>(gemm_.c) + row * gemm_.n * SizeOf(gemm_.output);
  }

  Gemm gemm_;
  std::vector<std::int64_t> rows_;
  std::vector<double> expected_, bounds_;
};

// Memory of one operand: copies of (type, elements).
std::vector<void*> Operand(char name, DType dtype, std::int64_t count, int copies) {
  static std::map<std::tuple<char, DType, std::int64_t, int>, std::vector<Bytes>> pool;
  std::vector<Bytes>& memory = pool[{name, dtype, count, copies}];
  if (memory.empty()) {
    for (int i = 0; i < copies; ++i)
      memory.push_back(RandomBytes(dtype, count, static_cast<std::uint64_t>(name)));
  }
  std::vector<void*> pointers;
  for (const Bytes& bytes : memory) pointers.push_back(bytes.data());
  return pointers;
}

// As many copies of B as it takes to find none of it in the caches.
int CopiesOf(const Types& types, const Shape& shape) {
  const std::int64_t bytes = shape.n * shape.k * SizeOf(types.input);
  return shape.m <= kSmallM && bytes >= (4 << 20) ? static_cast<int>(CeilDiv(BeyondLastCache(2), bytes)) : 1;
}

Problem::Problem(const Types& types, const Layout& layout, const Shape& shape)
    : gemm_{.input = types.input,
            .output = types.output,
            .transpose_a = layout.transpose_a,
            .transpose_b = layout.transpose_b,
            .m = shape.m,
            .n = shape.n,
            .k = shape.k,
            .a = Operand('a', types.input, shape.m * shape.k, 1)[0],
            .b = Operand('b', types.input, shape.k * shape.n, CopiesOf(types, shape)),
            .c = Operand('c', types.output, shape.m * shape.n, 1)[0]} {
  // A reference row is N * K multiply-adds in double.
  constexpr std::int64_t kReferenceWork = 40'000'000;
  rows_ = Sample(gemm_.m, std::clamp<std::int64_t>(kReferenceWork / (gemm_.n * gemm_.k), 2, 32));
}

std::string Problem::CheckAnswer() {
  if (expected_.empty()) {
    const auto result =
        reference::Matmul(a(), gemm_.transpose_a, b(0), gemm_.transpose_b, ConstTensor(), rows_);
    expected_ = result.c;
    bounds_ = reference::MatmulBounds(result, gemm_.k, gemm_.input, gemm_.output);
  }
  const auto n = static_cast<std::size_t>(gemm_.n);
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const std::string wrong =
        Mismatch("row " + std::to_string(rows_[i]), Row(rows_[i]), gemm_.output, 1,
                 std::span(expected_).subspan(i * n, n), std::span(bounds_).subspan(i * n, n));
    if (!wrong.empty()) return wrong;
  }
  return {};
}

// Cubist as one more library.
GemmRun PrepareCubist(const Problem& problem, int threads, std::string& error) {
  return [&problem, &error, device = Host({.threads = threads})](std::size_t copy) {
    const Status status = Matmul(device, {.a = problem.a(),
                                          .b = problem.b(copy),
                                          .c = problem.c(),
                                          .transpose_a = problem.gemm().transpose_a,
                                          .transpose_b = problem.gemm().transpose_b});
    if (!status.ok()) error = status.message();
  };
}

// The same with B packed beforehand, a copy for each of B's.
struct PackedCopies {
  std::vector<Bytes> memory;
  std::vector<PackedOperand> operands;
};
GemmRun PreparePacked(const Problem& problem, int threads, std::string& error) {
  const Device device = Host({.threads = threads});
  auto packed = std::make_shared<PackedCopies>();
  for (std::size_t copy = 0; copy < problem.gemm().b.size(); ++copy) {
    const Gemm& g = problem.gemm();
    const std::int64_t bytes = PackedOperandBytes(device, Side::kB, g.input, g.k, g.n);
    packed->memory.push_back(RandomBytes(DType::kF32, CeilDiv(bytes, 4), 1));
    const PackOperandArgs args{.source = problem.b(copy),
                               .transpose = g.transpose_b,
                               .data = packed->memory.back().data(),
                               .bytes = bytes};
    const Status status = PackOperand(device, args, &packed->operands.emplace_back());
    if (!status.ok()) error = status.message();
  }
  return [&problem, &error, device, packed](std::size_t copy) {
    const Status status = Matmul(device, {.a = problem.a(),
                                          .c = problem.c(),
                                          .transpose_a = problem.gemm().transpose_a,
                                          .packed_b = packed->operands[copy]});
    if (!status.ok()) error = status.message();
  };
}

void TimeGemm(benchmark::State& state, Problem& problem, int threads, const GemmRun& run,
              const std::string& error, const std::function<void()>& rest) {
  const Gemm& gemm = problem.gemm();
  const auto m = static_cast<double>(gemm.m), n = static_cast<double>(gemm.n),
             k = static_cast<double>(gemm.k);
  problem.SpoilAnswer();
  const Call call = {.run =
                         [&, copy = std::size_t{0}]() mutable {
                           run(copy);
                           if (++copy == gemm.b.size()) copy = 0;
                         },
                     .check = [&] { return error.empty() ? problem.CheckAnswer() : error; },
                     .rest = rest};
  const Arithmetic arithmetic = ArithmeticOf(gemm.input);
  if (gemm.b.size() > 1) {
    TimeRoofline(state, threads, arithmetic, 2 * m * n * k, n * k * static_cast<double>(SizeOf(gemm.input)),
                 call);
  } else {
    TimeCompute(state, threads, arithmetic, 2 * m * n * k, call);
  }
}

void RegisterMatmul(const Types& types, const Layout& layout, const Shape& shape) {
  // Made by the first case that runs, then shared by all libraries, thread counts and repetitions.
  auto problem = std::make_shared<std::unique_ptr<Problem>>();
  const auto made = [=]() -> Problem& {
    if (!*problem) *problem = std::make_unique<Problem>(types, layout, shape);
    return **problem;
  };
  const std::string text = std::string(layout.name) + "/" + TextOf(shape);
  for (int threads : ThreadCounts()) {
    Register(CaseName("Matmul", "cubist", types.name, text, threads), [=](benchmark::State& state) {
      std::string error;
      TimeGemm(state, made(), threads, PrepareCubist(made(), threads, error), error, {});
    });
    Register(CaseName("Matmul", "cubist_packed", types.name, text, threads), [=](benchmark::State& state) {
      std::string error;
      TimeGemm(state, made(), threads, PreparePacked(made(), threads, error), error, {});
    });
    for (const GemmLibrary& peer : GemmPeers()) {
      if (!peer.supports(types.input, types.output)) continue;
      Register(CaseName("Matmul", peer.name, types.name, text, threads), [=](benchmark::State& state) {
        TimeGemm(state, made(), threads, peer.prepare(made().gemm(), threads), "", peer.rest);
      });
    }
  }
}

void RegisterMatmuls() {
  const std::vector<Shape> all_layouts = {{1024, 1024, 1024}, {2048, 2048, 2048}};
  const std::vector<Shape> both_b = {
      {64, 64, 64},       {128, 128, 128},  {256, 256, 256},    {512, 512, 512},   {4096, 4096, 4096},
      {4096, 1536, 7168}, {127, 4099, 513}, {1000, 1001, 1003}, {512, 4096, 2048}, {1, 7168, 2048},
      {8, 7168, 2048},    {64, 7168, 2048}, {128, 1024, 2048}};
  // A gate, and the two halves of a product of low rank.
  const std::vector<Shape> long_and_narrow = {{4096, 256, 7168}, {4096, 16, 7168}, {4096, 7168, 16}};
  for (const Types& types : kTypes) {
    for (const Shape& shape : all_layouts) {
      for (const Layout& layout : {kNN, kNT, kTN, kTT}) RegisterMatmul(types, layout, shape);
    }
    for (const std::vector<Shape>& shapes : {both_b, long_and_narrow}) {
      for (const Shape& shape : shapes) {
        for (const Layout& layout : {kNN, kNT}) RegisterMatmul(types, layout, shape);
      }
    }
  }
}

// ---- Mmad alone ----

// One operand pair and its product in the buffers of one core.
template <class T>
class MmadTile {
 public:
  explicit MmadTile(const Shape& shape)
      : shape_(shape),
        context_(HostChip(), ThreadScratch(), 0, 1),
        core_(context_),
        a_(RandomBytes(DTypeOf<T>(), shape.m * shape.k, 1)),
        b_(RandomBytes(DTypeOf<T>(), shape.k * shape.n, 2)),
        c_(RandomBytes(DType::kF32, shape.m * shape.n, 3)),
        a_gm_(Matrix(a_, DTypeOf<T>(), shape.m, shape.k)),
        b_gm_(Matrix(b_, DTypeOf<T>(), shape.k, shape.n)),
        c_gm_(Matrix(c_, DType::kF32, shape.m, shape.n)),
        a_l1_(core_, "a_l1", shape.m, shape.k, 1, Role::kA),
        b_l1_(core_, "b_l1", shape.k, shape.n, 1, Role::kB),
        a_l0_(core_, "a_l0", shape.m, shape.k, 1, Role::kA),
        b_l0_(core_, "b_l0", shape.k, shape.n, 1, Role::kB),
        c_l0_(core_, "c_l0", shape.m, shape.n, 1),
        a0_(a_l0_.Next(shape.m, shape.k)),
        b0_(b_l0_.Next(shape.k, shape.n)),
        acc_(c_l0_.Next(shape.m, shape.n)) {
    const auto a1 = a_l1_.Next(shape.m, shape.k), b1 = b_l1_.Next(shape.k, shape.n);
    core_.Load(a1, MatrixOf(a_gm_));
    core_.Load(b1, MatrixOf(b_gm_));
    core_.Load(a0_, a1);
    core_.Load(b0_, b1);
  }

  const std::string& finding() const { return context_.arena.finding(); }
  void Run(int times) {
    for (int i = 0; i < times; ++i) core_.Mmad(acc_, a0_, b0_, Accumulate::kNo);
  }
  std::string Check() {
    core_.Store(MatrixOf(c_gm_), acc_);
    const ConstTensor a(a_.data(), DTypeOf<T>(), {shape_.m, shape_.k}),
        b(b_.data(), DTypeOf<T>(), {shape_.k, shape_.n});
    const auto result = reference::Matmul(a, false, b, false, ConstTensor());
    return Mismatch("flat", c_.data(), DType::kF32, 1, result.c,
                    reference::MatmulBounds(result, shape_.k, DTypeOf<T>(), DType::kF32));
  }

 private:
  static GmTensor Matrix(const Bytes& bytes, DType dtype, std::int64_t rows, std::int64_t cols) {
    GmTensor tensor;
    tensor.data = reinterpret_cast<std::byte*>(bytes.data());
    tensor.dtype = dtype, tensor.writable = true, tensor.bytes = rows * cols * SizeOf(dtype);
    tensor.sizes = {1, 1, rows, cols}, tensor.strides = {0, 0, cols, 1};
    return tensor;
  }

  Shape shape_;
  HostContext context_;
  HostAiCore core_;
  Bytes a_, b_, c_;
  GmTensor a_gm_, b_gm_, c_gm_;
  Ring<Buffer::kL1, T> a_l1_, b_l1_;
  Ring<Buffer::kL0A, T> a_l0_;
  Ring<Buffer::kL0B, T> b_l0_;
  Ring<Buffer::kL0C, float> c_l0_;
  L0ATile<T> a0_;
  L0BTile<T> b0_;
  L0CTile<float> acc_;
};

constexpr int kMmadsPerRun = 64;

// Each thread has a core and a tile of its own, and runs when the barrier opens. The caller is one of them.
template <class T>
void TimeMmad(benchmark::State& state, const Shape& shape, int threads) {
  std::barrier<> gate(threads);
  std::vector<std::string> wrong(static_cast<std::size_t>(threads));
  std::atomic<bool> more = true;  // Changed by the caller before it opens the gate.
  const auto work = [&](std::size_t thread, auto&& body) {
    ThreadScratch().Reset();
    MmadTile<T> tile(shape);
    wrong[thread] = tile.finding();
    body(tile);
  };
  std::vector<std::jthread> others;
  for (std::size_t t = 1; t < static_cast<std::size_t>(threads); ++t) {
    others.emplace_back([&, t] {
      work(t, [&](MmadTile<T>& tile) {
        for (gate.arrive_and_wait(); more; gate.arrive_and_wait()) {
          tile.Run(kMmadsPerRun);
          gate.arrive_and_wait();
        }
        if (wrong[t].empty()) wrong[t] = tile.Check();
      });
    });
  }
  work(0, [&](MmadTile<T>& tile) {
    const double flops = 2.0 * static_cast<double>(shape.m * shape.n * shape.k) * kMmadsPerRun * threads;
    const Call call = {.run =
                           [&] {
                             gate.arrive_and_wait();
                             tile.Run(kMmadsPerRun);
                             gate.arrive_and_wait();
                           },
                       .check =
                           [&] {
                             more = false;
                             gate.arrive_and_wait();
                             if (wrong[0].empty()) wrong[0] = tile.Check();
                             others.clear();
                             for (const std::string& text : wrong) {
                               if (!text.empty()) return text;
                             }
                             return std::string();
                           }};
    TimeCompute(state, threads, ArithmeticOf(DTypeOf<T>()), flops, call);
  });
}

template <class T>
void RegisterMmad(const Shape& shape) {
  for (int threads : ThreadCounts()) {
    Register(CaseName("Mmad", "cubist", NameOf(DTypeOf<T>()), TextOf(shape), threads),
             [=](benchmark::State& state) { TimeMmad<T>(state, shape, threads); });
  }
}

// 252 rows are a multiple of every register tile in use; the three tiles of a core fit a 1 MiB L2.
void RegisterMmads() {
  RegisterMmad<float>({252, 256, 256});
  RegisterMmad<F16>({252, 256, 256});
  RegisterMmad<BF16>({252, 256, 256});
  RegisterMmad<BF16>({252, 256, 512});
}

}  // namespace
}  // namespace cubist::bench

int main(int argc, char** argv) {
  cubist::bench::RegisterPeaks();
  cubist::bench::RegisterMmads();
  cubist::bench::RegisterMatmuls();
  return cubist::bench::Main(argc, argv, "");
}
