// Records of random work.
#ifndef CUBIST_TESTS_NPU_MODEL_RANDOM_RECORD_H_
#define CUBIST_TESTS_NPU_MODEL_RANDOM_RECORD_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>

#include "npu_model/pipeline.h"
#include "tests/npu_model/trace_support.h"

namespace cubist::testing {

// Work of both sides of an AI core on parts of tiles: loads, products, hand-overs, element-wise work, stores. Every store
// of a core has bytes of its own, for up to 64 steps.
template <class Core>
void RandomWork(Core& core, unsigned seed, int steps) {
  std::mt19937 random(seed + 977u * static_cast<unsigned>(core.index()));
  const auto below = [&](std::int64_t n) {
    return static_cast<std::int64_t>(random() % static_cast<unsigned>(n));
  };
  const auto part = [&](std::int64_t n) {
    const std::int64_t begin = below(n);
    return Range{begin, begin + 1 + below(n - begin)};
  };
  static const GmTensor source = TensorOf(0, DType::kBF16, 512, 512),
                        sums = TensorOf(1, DType::kF32, 4096, 512);
  Ring<Buffer::kL1, BF16> a_l1(core, "a1", 64, 64, 2, Role::kA), b_l1(core, "b1", 64, 64, 2, Role::kB);
  Ring<Buffer::kL0A, BF16> a_l0(core, "a0", 64, 64, 2, Role::kA);
  Ring<Buffer::kL0B, BF16> b_l0(core, "b0", 64, 64, 1, Role::kB);
  Ring<Buffer::kL0C, float> c_l0(core, "c0", 64, 64, 2);
  auto vectors = core.vectors();
  Ring<Buffer::kUB, float> s0(vectors[0], "s", 32, 64, 2), s1(vectors[1], "s", 32, 64, 1);
  Ring<Buffer::kUB, BF16> p0(vectors[0], "p", 32, 64, 1), p1(vectors[1], "p", 32, 64, 1);
  for (int step = 0; step < steps; ++step) {
    const std::int64_t at = below(448);
    const Range rows{64 * step, 64 * step + 64}, from{at, at + 64};
    const auto a1 = a_l1.Next(64, 64);
    const auto b1 = b_l1.Next(64, 64);
    core.Load(a1, MatrixOf(source).Block(from, {0, 64}));
    core.Load(b1, MatrixOf(source).Block({64, 128}, from));
    const auto m = 16 * (1 + below(4));
    const auto acc = c_l0.Next(m, 64);
    Accumulate accumulate = Accumulate::kNo;
    for (Range k : Split(64, 16 * (1 + below(3)))) {
      const auto a0 = a_l0.Next(m, k.size());
      const auto b0 = b_l0.Next(k.size(), 64);
      core.Load(a0, a1.Part({0, m}, k));
      core.Load(b0, b1.Rows(k));
      core.Mmad(acc, a0, b0, accumulate);
      accumulate = Accumulate::kYes;
    }
    if (below(3) == 0) core.Store(MatrixOf(sums).Block({rows.begin, rows.begin + m}, {128, 192}), acc);
    const std::int64_t half = std::min<std::int64_t>(m, 32);
    const auto s = below(2) == 0 ? s0.Next(half, 64) : s1.Next(half, 64);
    const int lane = s.slot()->lane;
    auto& vector = vectors[static_cast<std::size_t>(lane)];
    vector.Move(s, acc.Rows({m - half, m}));
    for (int i = 0; i < 3; ++i) {
      const auto piece = s.Part(part(half), part(64));
      if (below(2) == 0) {
        vector.Exp(piece, piece);
      } else {
        vector.ReadScalar(piece.Rows({0, 1}), 0);
      }
    }
    const auto p = lane == 0 ? p0.Next(half, 64) : p1.Next(half, 64);
    vector.Cast(p, s);
    if (below(2) == 0) vector.Move(a_l1.Next(half, 64), p);
    if (below(2) == 0) vector.Store(MatrixOf(sums).Block({rows.begin, rows.begin + half}, {0, 64}), s);
  }
}

// Of the same seeds the same; cores differ.
inline trace::Record RandomRecord(const ChipSpec& chip, int cores, unsigned seed, int steps) {
  return RecordOf<TraceAiCore>(chip, cores, [&](auto& core) { RandomWork(core, seed, steps); });
}

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_NPU_MODEL_RANDOM_RECORD_H_
