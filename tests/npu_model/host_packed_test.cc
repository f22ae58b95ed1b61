// Products of operands that are packed in GM: the bits of plain ones, wherever their parts are.
#include "tests/npu_model/host_rig.h"

namespace cubist::host_test {
namespace {

class HostPackedTest : public SimdTargetTest {};
INSTANTIATE_TEST_SUITE_P(Simd, HostPackedTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);

// Packs `src` tile by tile: an even number of rows and whole panels each.
template <class T>
void PackInTiles(HostAiCore& core, const Gm& src, const PackedGm& packed, std::int64_t rows,
                 std::int64_t panels) {
  const std::int64_t cols = panels * HostChip().PackedStep(packed.role, packed.dtype);
  Ring<Buffer::kL1, T> ring(core, "tile", rows, cols, 2, packed.role);
  for (Range c : Split(src.cols, cols)) {
    for (Range r : Split(src.rows, rows)) {
      const L1Tile<T> tile = ring.Next(r.size(), c.size());
      core.Load(tile, src.Block(r, c));
      core.Store(packed.Block(r, c), tile);
    }
  }
}

// The product of blocks (m, k0) and (k0, n) of operands that are packed or not, accumulated over k0.
template <class T>
void MultiplyBlocks(HostAiCore& core, const Gm& a, const PackedGm* a_packed, const Gm& b,
                    const PackedGm* b_packed, Range m, Range n, std::int64_t k_step, const Gm& c) {
  const auto acc = NewTile<Buffer::kL0C, float>(core, m.size(), n.size());
  for (Range k0 : Split(a.cols, k_step)) {
    const auto a1 = NewTile<Buffer::kL1, T>(core, m.size(), k0.size(), Role::kA);
    const auto b1 = NewTile<Buffer::kL1, T>(core, k0.size(), n.size(), Role::kB);
    if (a_packed != nullptr) {
      core.Load(a1, a_packed->Block(m, k0));
    } else {
      core.Load(a1, a.Block(m, k0));
    }
    if (b_packed != nullptr) {
      core.Load(b1, b_packed->Block(k0, n));
    } else {
      core.Load(b1, b.Block(k0, n));
    }
    core.Mmad(acc, ToL0A(core, a1), ToL0B(core, b1), k0.begin == 0 ? Accumulate::kNo : Accumulate::kYes);
  }
  core.Store(c, acc);
}

TEST_P(HostPackedTest, PackedOperandsGiveTheSameBits) {
  Random random;
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    const std::int64_t a_step = HostChip().PackedStep(Role::kA, DTypeOf<T>()), b_step = BestCubeOps().nr;
    for (std::int64_t k : {a_step + 37, std::int64_t{29}, std::int64_t{1}}) {
      HostRig rig;
      const std::int64_t m = 23, n = 2 * b_step + 9;
      GmMatrix a(DTypeOf<T>(), m, k), b(DTypeOf<T>(), k, n, kColumnMajor);
      a->FillNormal(random), b->FillNormal(random);
      const PackedMatrix a_packed(Role::kA, DTypeOf<T>(), m, k, 1), b_packed(Role::kB, DTypeOf<T>(), k, n, 1);
      PackInTiles<T>(rig.core, a.gm(), a_packed.gm(), 8, 1);
      PackInTiles<T>(rig.core, b.gm(), b_packed.gm(), 30, 2);
      // Blocks: rows of A anywhere, columns of B at panels, k at pairs. The last walks k as one block of two
      // panels of A.
      for (const auto& [rows, cols, k_step] : {std::tuple(Range{0, m}, Range{0, n}, std::int64_t{64}),
                                               std::tuple(Range{5, 18}, Range{b_step, n}, std::int64_t{32}),
                                               std::tuple(Range{0, m}, Range{0, n}, k)}) {
        GmMatrix plain(DType::kF32, rows.size(), cols.size());
        MultiplyBlocks<T>(rig.core, a.gm(), nullptr, b.gm(), nullptr, rows, cols, k_step, plain.gm());
        for (int packing = 1; packing < 4; ++packing) {
          GmMatrix c(DType::kF32, rows.size(), cols.size());
          MultiplyBlocks<T>(rig.core, a.gm(), (packing & 1) != 0 ? &a_packed.gm() : nullptr, b.gm(),
                            (packing & 2) != 0 ? &b_packed.gm() : nullptr, rows, cols, k_step, c.gm());
          EXPECT_TRUE(testing::HasSameBits(c->view(), plain->view()))
              << NameOf(DTypeOf<T>()) << ", k " << k << " in steps of " << k_step
              << ", packed: " << ((packing & 1) != 0 ? "A " : "") << ((packing & 2) != 0 ? "B" : "");
        }
      }
    }
  });
}

TEST_P(HostPackedTest, SeveralPackedMatricesStandApart) {
  Random random;
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (Role role : {Role::kA, Role::kB}) {
      HostRig rig;
      const std::int64_t rows = 17, cols = 39, count = 3;
      const PackedMatrix packed(role, DTypeOf<T>(), rows, cols, count);
      std::array<std::unique_ptr<GmMatrix>, 3> matrices;
      for (std::int64_t i = count - 1; i >= 0; --i) {
        matrices[Index(i)] = std::make_unique<GmMatrix>(DTypeOf<T>(), rows, cols);
        (*matrices[Index(i)])->FillIntegers(random);
        PackInTiles<T>(rig.core, matrices[Index(i)]->gm(), packed.gm().Matrix(i), 6, 1);
      }
      GmMatrix other(DTypeOf<T>(), role == Role::kA ? cols : 11, role == Role::kA ? 11 : rows);
      other->FillIntegers(random);
      for (std::int64_t i = 0; i < count; ++i) {
        const GmMatrix &matrix = *matrices[Index(i)], &a = role == Role::kA ? matrix : other,
                       &b = role == Role::kA ? other : matrix;
        const PackedGm one = packed.gm().Matrix(i);
        GmMatrix c(DType::kF32, a.gm().rows, b.gm().cols);
        MultiplyBlocks<T>(rig.core, a.gm(), role == Role::kA ? &one : nullptr, b.gm(),
                          role == Role::kB ? &one : nullptr, {0, a.gm().rows}, {0, b.gm().cols}, a.gm().cols,
                          c.gm());
        ExpectExactly(c->view(), ProductOf(a, b));
      }
    }
  });
}

// A tile of L1 may be packed in parts.
TEST_P(HostPackedTest, PartsOfL1ArePacked) {
  Random random;
  const std::int64_t step = BestCubeOps().nr;
  HostRig rig;
  GmMatrix a(DType::kF32, 10, 12), b(DType::kF32, 12, 2 * step), c(DType::kF32, 10, 2 * step);
  a->FillIntegers(random), b->FillIntegers(random);
  const PackedMatrix a_packed(Role::kA, DType::kF32, 10, 12, 1),
      b_packed(Role::kB, DType::kF32, 12, 2 * step, 1);
  const Operands<float> operands(rig.core, a.gm(), b.gm());
  for (Range rows : Split(10, 4)) rig.core.Store(a_packed.gm().Block(rows, {0, 12}), operands.a1.Rows(rows));
  for (Range cols : Split(2 * step, step)) {
    for (Range rows : Split(12, 6)) {
      rig.core.Store(b_packed.gm().Block(rows, cols), operands.b1.Part(rows, cols));
    }
  }
  MultiplyBlocks<float>(rig.core, a.gm(), &a_packed.gm(), b.gm(), &b_packed.gm(), {0, 10}, {0, 2 * step}, 12,
                        c.gm());
  ExpectExactly(c->view(), ProductOf(a, b));
}

}  // namespace
}  // namespace cubist::host_test
