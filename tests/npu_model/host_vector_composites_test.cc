// Composites of Vector instructions: the host's body and the expansion on equal inputs.
#include <functional>

#include "tests/npu_model/host_vector_rig.h"

namespace cubist::host_test {
namespace {

// exp(x) in fp32 where x carries an absolute error: |e^(x + error) - e^x| and 2 ulp (4 eps) of Exp.
// Results below the normal range may flush to zero.
double ExpBound(double exact, double argument_error) {
  if (exact == 0.0) return 0x1p-126;
  return exact * (std::expm1(argument_error) + 4 * kEps) * kSecondOrder + 0x1p-126;
}

struct SoftmaxValues {
  Values p, m_new, alpha, l;
};

template <class T, class Run>
SoftmaxValues RunSoftmax(HostRig& rig, const GmMatrix& s, const GmMatrix& m_old, const GmMatrix& l, Run run) {
  const Gm gm = s.gm();
  const auto scores = LoadRows<float>(rig.vector, gm, gm.rows, gm.cols);
  const auto old = LoadRows<float>(rig.vector, m_old.gm(), gm.rows, 1);
  const auto sums = LoadRows<float>(rig.vector, l.gm(), gm.rows, 1);
  const auto m_new = NewTile<Buffer::kUB, float>(rig.vector, gm.rows, 1);
  const auto p = NewTile<Buffer::kUB, T>(rig.vector, gm.rows, gm.cols);
  run(p, scores, m_new, old, sums);
  const auto values = [&](auto tile) {
    GmMatrix out(tile.slot()->dtype, tile.rows(), tile.cols());
    rig.vector.Store(out.gm(), tile);
    return out->ToDoubles();
  };
  return {values(p), values(m_new), values(old), values(sums)};
}

// One rounding each of scale * s and of the difference move the argument by eps (|scale s| + |scale s - m|), the product
// with a rounded log2(e) by 1.25 eps |scale s - m| more; the fused forms round less. A sum of c terms rounds c + 1 times.
template <class T>
void CheckSoftmax(const SoftmaxValues& got, const GmMatrix& s, const GmMatrix& m_old, const GmMatrix& l,
                  float scale, const char* what) {
  const std::int64_t rows = s->size(0), cols = s->size(1);
  for (std::int64_t i = 0; i < rows; ++i) {
    SCOPED_TRACE(std::string(what) + ", row " + std::to_string(i));
    double m = m_old->at({i, 0});
    for (std::int64_t j = 0; j < cols; ++j)
      m = std::max<double>(m, static_cast<float>(s->at({i, j})) * scale);
    ASSERT_EQ(got.m_new[Index(i)], m);
    const double old = m_old->at({i, 0}), alpha = std::exp(old - m);
    const double alpha_bound = ExpBound(alpha, kEps * std::abs(old - m));
    ASSERT_NEAR(got.alpha[Index(i)], alpha, alpha_bound);
    double sum = 0, sum_bound = 0;
    for (std::int64_t j = 0; j < cols; ++j) {
      const double scaled = s->at({i, j}) * static_cast<double>(scale), exact = std::exp(scaled - m);
      const double bound =
          ExpBound(exact, std::isinf(scaled) ? 0 : kEps * (std::abs(scaled) + 2.25 * std::abs(scaled - m)));
      const double unit = DTypeOf<T>() == DType::kF32 ? 0 : UnitRoundoff(DTypeOf<T>());
      const double subnormal = DTypeOf<T>() == DType::kF16 ? 0x1p-25 : 0;
      ASSERT_NEAR(got.p[Index(i * cols + j)], exact, bound + unit * (exact + bound) + subnormal)
          << "column " << j;
      sum += exact, sum_bound += bound;
    }
    const double total = l->at({i, 0}) * alpha + sum;
    const double bound =
        sum_bound + l->at({i, 0}) * alpha_bound + static_cast<double>(cols + 2) * kEps * total;
    ASSERT_NEAR(got.l[Index(i)], total, kSecondOrder * bound);
  }
}

TEST_P(HostVectorTest, SoftmaxStepIsItsExpansion) {
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (const auto& [rows, cols] : {Shape{1, 1}, Shape{3, 33}, Shape{5, 64}, Shape{2, 300}}) {
      HostRig rig;
      GmMatrix s(DType::kF32, rows, cols), m_old(DType::kF32, rows, 1), l(DType::kF32, rows, 1);
      s->FillNormal(random_, 0, 20), m_old->FillNormal(random_, 0, 5), l->FillUniform(random_, 1, 9);
      s->set({0, cols - 1}, -kInfinity);
      if (rows > 1) {  // A first step, all masked.
        m_old->set({1, 0}, std::numeric_limits<float>::lowest()), l->set({1, 0}, 0);
        for (std::int64_t j = 0; j < cols; ++j) s->set({1, j}, -kInfinity);
      }
      if (rows > 2) m_old->set({2, 0}, std::numeric_limits<float>::lowest()), l->set({2, 0}, 0);
      constexpr float kScale = 0.3f;
      const SoftmaxValues body =
          RunSoftmax<T>(rig, s, m_old, l, [&](auto p, auto x, auto m_new, auto m, auto sum) {
            rig.vector.SoftmaxStep(p, x, m_new, m, sum, kScale);
          });
      HostVector executor(rig.context, 0);
      const SoftmaxValues expansion =
          RunSoftmax<T>(rig, s, m_old, l, [&](auto p, auto x, auto m_new, auto m, auto sum) {
            ExpandSoftmaxStep(executor, p, x, m_new, m, sum, kScale, Loc::current());
          });
      CheckSoftmax<T>(body, s, m_old, l, kScale, "body");
      CheckSoftmax<T>(expansion, s, m_old, l, kScale, "expansion");
      EXPECT_EQ(body.m_new, expansion.m_new);
    }
  });
}

TEST_P(HostVectorTest, MulAddIsItsExpansion) {
  for (const auto& [rows, cols] : kVectorShapes) {
    for (bool column : {true, false}) {
      GmMatrix acc(DType::kF32, rows, cols), x(DType::kF32, rows, cols),
          factor(DType::kF32, rows, column ? 1 : cols);
      acc->FillNormal(random_), x->FillNormal(random_), factor->FillNormal(random_);
      const auto factor_tile = [&] { return column ? ColumnOf(factor) : TileOf(factor); };
      const auto body = TileOf(acc), expansion = TileOf(acc);
      vector_.MulAdd(body, factor_tile(), TileOf(x));
      HostVector executor(rig_.context, 0);
      ExpandMulAdd(executor, expansion, factor_tile(), TileOf(x), Loc::current());
      const Values fused = ValuesOf(body), separate = ValuesOf(expansion);
      for (std::int64_t i = 0; i < rows * cols; ++i) {
        const double f = factor->at({i / cols, column ? 0 : i % cols});
        const double product = acc->at({i / cols, i % cols}) * f, sum = product + x->at({i / cols, i % cols});
        ASSERT_NEAR(fused[Index(i)], sum, kSecondOrder * kEps * (std::abs(product) + std::abs(sum)));
        ASSERT_NEAR(separate[Index(i)], sum, kSecondOrder * kEps * (std::abs(product) + std::abs(sum)));
      }
    }
  }
}

TEST_P(HostVectorTest, WeightedSumIsItsExpansion) {
  ForEachFloatType([&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t count : {0, 1, 3, 8, 16}) {
      for (std::int64_t cols : {1, 40, 131}) {
        for (Accumulate accumulate : {Accumulate::kNo, Accumulate::kYes}) {
          HostRig rig;
          GmMatrix x(DTypeOf<T>(), count, cols), acc(DType::kF32, 1, cols);
          x->FillNormal(random_), acc->FillNormal(random_);
          std::vector<float> weights;
          std::vector<UbTile<T>> rows;
          std::vector<TileRef> refs;
          for (std::int64_t i = 0; i < count; ++i) {
            weights.push_back(static_cast<float>(random_.Normal()));
            const Role role = i % 2 == 0 ? Role::kRelay : Role::kRows;
            rows.push_back(NewTile<Buffer::kUB, T>(rig.vector, 1, cols, role));
            rig.vector.Load(rows.back(), x.gm().Rows({i, i + 1}));
            refs.emplace_back(rows.back());
          }
          const auto run = [&](auto body) {
            const auto sum = LoadRows<float>(rig.vector, acc.gm(), 1, cols);
            body(sum, NewTile<Buffer::kUB, float>(rig.vector, 1, cols));
            GmMatrix out(DType::kF32, 1, cols);
            rig.vector.Store(out.gm(), sum);
            return out->ToDoubles();
          };
          const Values body = run([&](auto sum, auto scratch) {
            rig.vector.WeightedSum(sum, scratch, std::span<const UbTile<T>>(rows),
                                   std::span<const float>(weights), accumulate);
          });
          HostVector executor(rig.context, 0);
          const Values expansion = run([&](auto sum, auto scratch) {
            ExpandWeightedSum(executor, sum, scratch, refs, weights, accumulate, Loc::current());
          });
          for (std::int64_t j = 0; j < cols; ++j) {
            double sum = accumulate == Accumulate::kYes ? acc->at({0, j}) : 0, magnitude = std::abs(sum);
            for (std::int64_t i = 0; i < count; ++i) {
              const double term = static_cast<double>(weights[Index(i)]) * x->at({i, j});
              sum += term, magnitude += std::abs(term);
            }
            // Every term is rounded once as a product and at most count + 1 times in the sum.
            const double bound = kSecondOrder * static_cast<double>(count + 2) * kEps * magnitude;
            ASSERT_NEAR(body[Index(j)], sum, bound) << count << " rows, column " << j;
            ASSERT_NEAR(expansion[Index(j)], sum, bound) << count << " rows, column " << j;
          }
        }
      }
    }
  });
}

// A relay tile that was given for a block of GM: what is written there is what a plain tile stores.
TEST_P(HostVectorTest, RelayTilesAreWrittenWhereTheyGo) {
  using Ubs = UbTile<float>;
  ForEachFloatType([&]<class T>(T) {
    for (const auto& [rows, cols] : {Shape{1, 5}, {3, 64}, {2, 130}, {4, 2101}}) {
      GmMatrix gate(DTypeOf<T>(), rows, cols), up(DTypeOf<T>(), rows, cols), d_out(DTypeOf<T>(), rows, cols);
      GmMatrix of_rows(DType::kF32, rows, 1), of_cols(DType::kF32, 1, cols);
      for (GmMatrix* x : {&gate, &up, &d_out, &of_rows, &of_cols}) (*x)->FillNormal(random_);
      const auto load = [&]<class U>(U, const GmMatrix& from) {
        const auto tile = NewTile<Buffer::kUB, U>(vector_, from.gm().rows, from.gm().cols);
        vector_.Load(tile, from.gm());
        return tile;
      };
      const auto scratch = [&, rows = rows, cols = cols] {
        return NewTile<Buffer::kUB, float>(vector_, rows, cols);
      };
      const UbTile<T> g = load(T(), gate), u = load(T(), up), d = load(T(), d_out);
      const Ubs column = load(0.0f, of_rows), weights = load(0.0f, of_cols);
      // The two outputs of each instruction, the second one not written by most.
      const std::function<void(UbTile<T>, UbTile<T>)> instructions[] = {
          [&](UbTile<T> out, UbTile<T>) { vector_.SwiGlu(out, scratch(), scratch(), g, u, column); },
          [&](UbTile<T> out, UbTile<T>) { vector_.ScaleRows(out, scratch(), g, column, weights); },
          [&](UbTile<T> out, UbTile<T>) {
            vector_.NormGrad(
                NormGradTiles<T>{out, {}, column, scratch(), scratch(), g, u, weights, column, d});
          },
          [&](UbTile<T> out, UbTile<T> more) {
            const Ubs sums = load(0.0f, of_rows);
            vector_.SwiGluGrad(out, more, sums, scratch(), scratch(), scratch(), scratch(), d, g, u, column);
          },
          [&](UbTile<T> out, UbTile<T>) {
            const Ubs factor = load(0.0f, of_rows), one = load(0.0f, of_rows);
            vector_.NormRows(NormTiles<T>{out, factor, one, scratch(), scratch(), g, weights}, 0.5f, 0.25f);
          },
          [&](UbTile<T> out, UbTile<T> sum) {
            const Ubs factor = load(0.0f, of_rows), one = load(0.0f, of_rows);
            vector_.NormRows(NormTiles<T>{out, factor, one, scratch(), scratch(), g, weights, u, sum}, 0.5f,
                             0.25f);
          },
          [&](UbTile<T> out, UbTile<T>) {
            const Ubs shift = load(0.0f, of_rows), sum = load(0.0f, of_cols);
            vector_.NormRowsGrad(
                NormGradTiles<T>{out, sum, shift, scratch(), scratch(), g, u, weights, column, d}, 0.5f);
          }};
      const auto two = [](std::size_t k) { return k == 3 || k == 5; };
      for (std::size_t k = 0; k < std::size(instructions); ++k) {
        GmMatrix plain(DTypeOf<T>(), rows, cols), more_plain(DTypeOf<T>(), rows, cols);
        const auto out = NewTile<Buffer::kUB, T>(vector_, rows, cols),
                   more = NewTile<Buffer::kUB, T>(vector_, rows, cols);
        instructions[k](out, more);
        vector_.Store(plain.gm(), out);
        if (two(k)) vector_.Store(more_plain.gm(), more);
        for (const Layout& layout : kLayouts) {
          for (bool stream : {false, true}) {
            GmMatrix to(DTypeOf<T>(), rows, cols, layout), more_to(DTypeOf<T>(), rows, cols, layout);
            to.tensor().stream = more_to.tensor().stream = stream;
            Ring<Buffer::kUB, T> ring(vector_, "relay", rows + 1, cols + 2, 2, Role::kRelay);
            const UbTile<T> there = ring.Next(to.gm()), more_there = ring.Next(more_to.gm());
            instructions[k](there, more_there);
            vector_.Store(to.gm(), there);
            if (two(k)) vector_.Store(more_to.gm(), more_there);
            FlushStreams();
            ASSERT_EQ(to->ToDoubles(), plain->ToDoubles())
                << "instruction " << k << ", " << rows << " x " << cols;
            if (two(k)) {
              ASSERT_EQ(more_to->ToDoubles(), more_plain->ToDoubles()) << rows << " x " << cols;
            }
          }
        }
      }
    }
  });
}

// The same of a weighted sum, which is rounded on its way; and where it has two parts, the first stays in the tile.
TEST_P(HostVectorTest, WeightedSumsAreWrittenWhereTheyGo) {
  ForEachFloatType([&]<class T>(T) {
    for (std::int64_t cols : {1, 40, 2048, 5003}) {
      GmMatrix x(DTypeOf<T>(), 3, cols);
      x->FillNormal(random_);
      std::vector<UbTile<T>> rows;
      for (std::int64_t i = 0; i < 3; ++i) {
        rows.push_back(NewTile<Buffer::kUB, T>(vector_, 1, cols));
        vector_.Load(rows.back(), x.gm().Rows({i, i + 1}));
      }
      const std::vector<float> weights{0.5f, -2.25f, 1.125f};
      const auto add = [&](UbTile<float> sum, std::size_t first, std::size_t count, Accumulate accumulate) {
        vector_.WeightedSum(sum, NewTile<Buffer::kUB, float>(vector_, 1, cols),
                            std::span<const UbTile<T>>(rows).subspan(first, count),
                            std::span<const float>(weights).subspan(first, count), accumulate);
      };
      for (std::size_t count : {std::size_t{0}, std::size_t{3}}) {
        GmMatrix plain(DTypeOf<T>(), 1, cols);
        const auto sum = NewTile<Buffer::kUB, float>(vector_, 1, cols);
        add(sum, 0, count, Accumulate::kNo);
        vector_.Store(plain.gm(), sum);
        for (const Layout& layout : kLayouts) {
          GmMatrix to(DTypeOf<T>(), 1, cols, layout), in_parts(DTypeOf<T>(), 1, cols, layout);
          to.tensor().stream = true;
          Ring<Buffer::kUB, float> ring(vector_, "relay", 1, cols, 1, Role::kRelay);
          const auto there = ring.Next(to.gm());
          add(there, 0, count, Accumulate::kNo);
          vector_.Store(to.gm(), there);
          FlushStreams();
          ASSERT_EQ(to->ToDoubles(), plain->ToDoubles()) << cols << " columns";
          if (count == 0) continue;
          const auto again = ring.Next(1, cols);
          add(again, 0, 1, Accumulate::kNo), add(again, 1, 2, Accumulate::kYes);
          vector_.Store(in_parts.gm(), again);
          ASSERT_EQ(in_parts->ToDoubles(), plain->ToDoubles()) << cols << " columns";
        }
      }
    }
  });
}

}  // namespace
}  // namespace cubist::host_test
