// The normalisation and activation composites: the host's body of each against its expansion into primitive
// instructions, on every SIMD target and float type.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "npu_model/composites.h"
#include "npu_model/host/host_core.h"
#include "tests/support/random.h"
#include "tests/support/simd_targets.h"

namespace cubist::testing {
namespace {

// One Vector core, and tiles of random numbers on it.
class Rig {
 public:
  HostVectorCore& core() { return ai_core_.vectors()[0]; }
  HostVector& executor() { return executor_; }

  template <class T>
  UbTile<T> Tile(std::int64_t rows, std::int64_t cols) {
    return Ring<Buffer::kUB, T>(core(), "tile", rows, cols, 1).Next(rows, cols);
  }
  template <class T>
  UbTile<T> Random(std::int64_t rows, std::int64_t cols, cubist::testing::Random& random) {
    const UbTile<T> tile = Tile<T>(rows, cols);
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < cols; ++j) {
        StoreFloat(tile.slot()->shows.data, DTypeOf<T>(), i * tile.slot()->shows.pitch + j,
                   static_cast<float>(random.Normal()));
      }
    }
    return tile;
  }
  // A second tile of the same values.
  template <class T>
  UbTile<T> Copy(UbTile<T> from) {
    const UbTile<T> to = Tile<T>(from.rows(), from.cols());
    core().Cast(to, from);
    return to;
  }

 private:
  Scratch scratch_;
  HostContext context_{HostChip(), scratch_, 0, 1};
  HostAiCore ai_core_{context_};
  HostVector executor_{context_, 0};
};

// Both tiles hold the same but for some roundings of values of about `size`, and one of T.
template <class T>
void ExpectNear(UbTile<T> body, UbTile<T> expansion, double size) {
  for (std::int64_t i = 0; i < body.rows(); ++i) {
    for (std::int64_t j = 0; j < body.cols(); ++j) {
      const auto at = [&](const UbTile<T>& tile) {
        return LoadFloat(tile.slot()->shows.data, DTypeOf<T>(), i * tile.slot()->shows.pitch + j);
      };
      const double bound = 0x1p-20 * size + 2 * UnitRoundoff(DTypeOf<T>()) * std::abs(at(expansion));
      ASSERT_NEAR(at(body), at(expansion), bound) << i << ", " << j;
    }
  }
}

struct TileShape {
  std::int64_t rows, cols;
};

class ActivationOpsTest : public SimdTargetTest {
 protected:
  // test(rig, T(), rows, cols) for every float type and shape.
  template <class Test>
  void ForEach(Test test) {
    for (const TileShape& s : {TileShape{1, 1}, {3, 1}, {2, 15}, {4, 16}, {3, 33}, {2, 64}, {3, 161}}) {
      SCOPED_TRACE(::testing::Message() << s.rows << " x " << s.cols);
      const auto run = [&](auto zero) {
        Rig rig;
        test(rig, zero, s.rows, s.cols);
      };
      run(0.0f), run(BF16()), run(F16());
    }
  }
  Random random_;
};
INSTANTIATE_TEST_SUITE_P(Simd, ActivationOpsTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);

TEST_P(ActivationOpsTest, RowDotIsItsExpansion) {
  ForEach([&]<class T>(Rig& rig, T, std::int64_t rows, std::int64_t cols) {
    const auto a = rig.Random<T>(rows, cols, random_), b = rig.Random<T>(rows, cols, random_);
    const auto weights = rig.Random<float>(1, cols, random_);
    const auto s0 = rig.Tile<float>(rows, cols), s1 = rig.Tile<float>(rows, cols);
    for (int form = 0; form < 3; ++form) {
      const auto body = rig.Random<float>(rows, 1, random_), expansion = rig.Copy(body);
      if (form == 0) rig.core().RowDot(body, s0, s1, a, a);
      if (form == 1) rig.core().RowDot(body, s0, s1, a, b);
      if (form == 2) rig.core().RowDot(body, s0, s1, a, b, weights);
      ExpandRowDot(rig.executor(), expansion, s0, s1, a, form == 0 ? a : b,
                   form == 2 ? TileRef(weights) : TileRef(), Loc::current());
      ExpectNear(body, expansion, static_cast<double>(cols));
    }
  });
}

TEST_P(ActivationOpsTest, ScaleRowsIsItsExpansion) {
  ForEach([&]<class T>(Rig& rig, T, std::int64_t rows, std::int64_t cols) {
    const auto a = rig.Random<T>(rows, cols, random_);
    const auto factor = rig.Random<float>(rows, 1, random_), weights = rig.Random<float>(1, cols, random_);
    const auto body = rig.Tile<T>(rows, cols), expansion = rig.Tile<T>(rows, cols);
    const auto s0 = rig.Tile<float>(rows, cols);
    rig.core().ScaleRows(body, s0, a, factor, weights);
    ExpandScaleRows(rig.executor(), expansion, s0, a, factor, weights, Loc::current());
    ExpectNear(body, expansion, 0);
  });
}

TEST_P(ActivationOpsTest, NormRowsIsItsExpansion) {
  ForEach([&]<class T>(Rig& rig, T, std::int64_t rows, std::int64_t cols) {
    const auto a = rig.Random<T>(rows, cols, random_);
    const auto weights = rig.Random<float>(1, cols, random_);
    const auto body = rig.Tile<T>(rows, cols), expansion = rig.Tile<T>(rows, cols);
    const auto factor = rig.Tile<float>(rows, 1), its_factor = rig.Tile<float>(rows, 1),
               one = rig.Tile<float>(rows, 1);
    const auto s0 = rig.Tile<float>(rows, cols), s1 = rig.Tile<float>(rows, cols);
    const float scale = 1.0f / static_cast<float>(cols), eps = 0.125f;
    rig.core().NormRows(NormTiles<T>{body, factor, one, s0, s1, a, weights}, scale, eps);
    ExpandNormRows(rig.executor(), {expansion, its_factor, one, s0, s1, a, weights, {}, {}}, scale, eps,
                   Loc::current());
    ExpectNear(factor, its_factor, 10);
    ExpectNear(body, expansion, 10);
    const auto residual = rig.Random<T>(rows, cols, random_);
    const auto sum = rig.Tile<T>(rows, cols), its_sum = rig.Tile<T>(rows, cols);
    rig.core().NormRows(NormTiles<T>{body, factor, one, s0, s1, a, weights, residual, sum}, scale, eps);
    ExpandNormRows(rig.executor(), {expansion, its_factor, one, s0, s1, a, weights, residual, its_sum}, scale,
                   eps, Loc::current());
    ExpectNear(factor, its_factor, 10);
    ExpectNear(sum, its_sum, 10);
    ExpectNear(body, expansion, 10);
  });
}

TEST_P(ActivationOpsTest, NormGradIsItsExpansion) {
  ForEach([&]<class T>(Rig& rig, T, std::int64_t rows, std::int64_t cols) {
    const auto dy = rig.Random<T>(rows, cols, random_), x = rig.Random<T>(rows, cols, random_),
               more = rig.Random<T>(rows, cols, random_);
    const auto weights = rig.Random<float>(1, cols, random_);
    const auto factor = rig.Random<float>(rows, 1, random_), shift = rig.Random<float>(rows, 1, random_);
    const auto body = rig.Tile<T>(rows, cols), expansion = rig.Tile<T>(rows, cols);
    const auto s0 = rig.Tile<float>(rows, cols), s1 = rig.Tile<float>(rows, cols);
    NormGradTiles<T> t{body, {}, shift, s0, s1, dy, x, weights, factor};
    NormGradRefs its{expansion, {}, shift, s0, s1, dy, x, weights, factor, {}};
    for (int form = 0; form < 2; ++form) {
      if (form == 1) t.more = more, its.more = more;
      rig.core().NormGrad(t);
      ExpandNormGrad(rig.executor(), its, Loc::current());
      ExpectNear(body, expansion, 10);
    }
  });
}

// Any number of rows: some are walked side by side, and what remains one by one.
TEST_P(ActivationOpsTest, NormRowsGradIsItsExpansion) {
  ForEach([&]<class T>(Rig& rig, T, std::int64_t few, std::int64_t cols) {
    for (const std::int64_t rows : {few, few + 4}) {
      const auto dy = rig.Random<T>(rows, cols, random_), x = rig.Random<T>(rows, cols, random_),
                 more = rig.Random<T>(rows, cols, random_);
      const auto weights = rig.Random<float>(1, cols, random_), factor = rig.Random<float>(rows, 1, random_);
      const auto body = rig.Tile<T>(rows, cols), expansion = rig.Tile<T>(rows, cols);
      const auto shift = rig.Tile<float>(rows, 1);
      const auto s0 = rig.Tile<float>(rows, cols), s1 = rig.Tile<float>(rows, cols);
      NormGradTiles<T> t{body, {}, shift, s0, s1, dy, x, weights, factor};
      NormGradRefs its{expansion, {}, shift, s0, s1, dy, x, weights, factor, {}};
      for (int form = 0; form < 3; ++form) {
        const auto total = rig.Random<float>(1, cols, random_), its_total = rig.Copy(total);
        if (form >= 1) t.d_gamma = total, its.d_gamma = its_total;
        if (form == 2) t.more = more, its.more = more;
        const float scale = 1.0f / static_cast<float>(cols);
        rig.core().NormRowsGrad(t, scale);
        ExpandNormRowsGrad(rig.executor(), its, scale, Loc::current());
        ExpectNear(body, expansion, 100);
        ExpectNear(total, its_total, 30);
      }
    }
  });
}

TEST_P(ActivationOpsTest, AddColumnDotsIsItsExpansion) {
  ForEach([&]<class T>(Rig& rig, T, std::int64_t rows, std::int64_t cols) {
    const auto a = rig.Random<T>(rows, cols, random_), b = rig.Random<T>(rows, cols, random_);
    const auto factor = rig.Random<float>(rows, 1, random_);
    const auto body = rig.Random<float>(1, cols, random_), expansion = rig.Copy(body);
    const auto s0 = rig.Tile<float>(rows, cols), s1 = rig.Tile<float>(rows, cols);
    rig.core().AddColumnDots(body, s0, s1, a, b, factor);
    ExpandAddColumnDots(rig.executor(), expansion, s0, s1, a, b, factor, Loc::current());
    ExpectNear(body, expansion, 10);
  });
}

TEST_P(ActivationOpsTest, SwiGluIsItsExpansion) {
  ForEach([&]<class T>(Rig& rig, T, std::int64_t rows, std::int64_t cols) {
    const auto gate = rig.Random<T>(rows, cols, random_), up = rig.Random<T>(rows, cols, random_);
    const auto probs = rig.Random<float>(rows, 1, random_);
    const auto body = rig.Tile<T>(rows, cols), expansion = rig.Tile<T>(rows, cols);
    const auto s0 = rig.Tile<float>(rows, cols), s1 = rig.Tile<float>(rows, cols);
    rig.core().SwiGlu(body, s0, s1, gate, up);
    ExpandSwiGlu(rig.executor(), expansion, s0, s1, gate, up, TileRef(), Loc::current());
    ExpectNear(body, expansion, 1);
    rig.core().SwiGlu(body, s0, s1, gate, up, probs);
    ExpandSwiGlu(rig.executor(), expansion, s0, s1, gate, up, probs, Loc::current());
    ExpectNear(body, expansion, 1);
  });
}

TEST_P(ActivationOpsTest, SwiGluGradIsItsExpansion) {
  ForEach([&]<class T>(Rig& rig, T, std::int64_t rows, std::int64_t cols) {
    const auto gate = rig.Random<T>(rows, cols, random_), up = rig.Random<T>(rows, cols, random_),
               d_out = rig.Random<T>(rows, cols, random_);
    const auto probs = rig.Random<float>(rows, 1, random_);
    const auto d_gate = rig.Tile<T>(rows, cols), d_up = rig.Tile<T>(rows, cols),
               gate_expanded = rig.Tile<T>(rows, cols), up_expanded = rig.Tile<T>(rows, cols);
    const auto d_probs = rig.Random<float>(rows, 1, random_), probs_expanded = rig.Copy(d_probs);
    const auto scratch = [&] { return rig.Tile<float>(rows, cols); };
    const auto s0 = scratch(), s1 = scratch(), s2 = scratch(), s3 = scratch();
    for (const bool weighted : {true, false}) {
      const auto factor = weighted ? probs : UbTile<float>();
      for (const bool sums : {true, false}) {
        rig.core().SwiGluGrad(d_gate, d_up, sums ? d_probs : UbTile<float>(), s0, s1, s2, s3, d_out, gate, up,
                              factor);
        ExpandSwiGluGrad(rig.executor(),
                         {gate_expanded, up_expanded, sums ? TileRef(probs_expanded) : TileRef(), s0, s1, s2,
                          s3, d_out, gate, up, weighted ? TileRef(probs) : TileRef()},
                         Loc::current());
        ExpectNear(d_gate, gate_expanded, 10);
        ExpectNear(d_up, up_expanded, 10);
        ExpectNear(d_probs, probs_expanded, static_cast<double>(cols));
      }
    }
  });
}

}  // namespace
}  // namespace cubist::testing
