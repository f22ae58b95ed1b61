// The Vector instructions of core.h with their types, in front of an executor: shapes and dtypes are checked here.
#ifndef CUBIST_NPU_MODEL_VECTOR_FRONT_H_
#define CUBIST_NPU_MODEL_VECTOR_FRONT_H_

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <type_traits>
#include <utility>

#include "npu_model/core.h"
#include "npu_model/instruction.h"
#include "npu_model/location.h"
#include "npu_model/tile.h"

namespace cubist {

// The typed front of a Vector core.
template <class E>
class VectorFront : protected E {
 public:
  using E::Allocate;
  using E::count;
  using E::E;
  using E::index;

  template <RowType T>
  void Load(const UbTile<T>& dst, const Gm& src, Loc loc = Loc::current()) {
    CUBIST_CHECK(dst.rows() == src.rows && dst.cols() == src.cols, "shapes differ");
    CUBIST_CHECK(src.dtype() == DTypeOf<T>() || (std::is_same_v<T, float> && IsFloat(src.dtype())),
                 "Load to UB widens to float only");
    E::LoadUb(dst, src, loc);
  }
  template <RowType T>
  void Store(const Gm& dst, const UbTile<T>& src, Loc loc = Loc::current()) {
    CUBIST_CHECK(dst.rows == src.rows() && dst.cols == src.cols(), "shapes differ");
    CUBIST_CHECK(dst.dtype() == DTypeOf<T>() || (std::is_same_v<T, float> && IsFloat(dst.dtype())),
                 "Store from UB narrows floats only");
    E::StoreUb(dst, src, loc);
  }
  void Fill(const UbTile<float>& x, float value, Loc loc = Loc::current()) { E::Fill(x, value, loc); }
  void Fill(const UbTile<std::int32_t>& x, std::int32_t value, Loc loc = Loc::current()) {
    E::FillInt(x, value, loc);
  }
  // Floats among each other, int64 to int32, int32 to float, or booleans to 0 and 1 of either.
  template <RowType To, RowType From>
  void Cast(const UbTile<To>& dst, const UbTile<From>& a, Loc loc = Loc::current()) requires(
      (OperandType<To> && OperandType<From>) ||
      (std::same_as<To, std::int32_t> && std::same_as<From, std::int64_t>) ||
      (std::same_as<To, float> && std::same_as<From, std::int32_t>) ||
      ((std::same_as<To, float> || std::same_as<To, std::int32_t>)&&std::same_as<From, std::uint8_t>)) {
    CUBIST_CHECK(Same(dst, a), "shapes differ");
    E::Cast(dst, a, loc);
  }
  void MulScalar(const UbTile<float>& dst, const UbTile<float>& a, float value, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a), "shapes differ");
    E::Scalar(ScalarOp::kMul, dst, a, value, loc);
  }
  void MaxScalar(const UbTile<float>& dst, const UbTile<float>& a, float value, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a), "shapes differ");
    E::Scalar(ScalarOp::kMax, dst, a, value, loc);
  }
  void AddScalar(const UbTile<float>& dst, const UbTile<float>& a, float value, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a), "shapes differ");
    E::Scalar(ScalarOp::kAdd, dst, a, value, loc);
  }
  void Add(const UbTile<float>& dst, const UbTile<float>& a, const UbTile<float>& b,
           Loc loc = Loc::current()) {
    Binary(BinaryOp::kAdd, dst, a, b, loc);
  }
  void Sub(const UbTile<float>& dst, const UbTile<float>& a, const UbTile<float>& b,
           Loc loc = Loc::current()) {
    Binary(BinaryOp::kSub, dst, a, b, loc);
  }
  void Mul(const UbTile<float>& dst, const UbTile<float>& a, const UbTile<float>& b,
           Loc loc = Loc::current()) {
    Binary(BinaryOp::kMul, dst, a, b, loc);
  }
  void Div(const UbTile<float>& dst, const UbTile<float>& a, const UbTile<float>& b,
           Loc loc = Loc::current()) {
    Binary(BinaryOp::kDiv, dst, a, b, loc);
  }
  void Max(const UbTile<float>& dst, const UbTile<float>& a, const UbTile<float>& b,
           Loc loc = Loc::current()) {
    Binary(BinaryOp::kMax, dst, a, b, loc);
  }
  void Exp(const UbTile<float>& dst, const UbTile<float>& a, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a), "shapes differ");
    E::Unary(UnaryOp::kExp, dst, a, loc);
  }
  void Ln(const UbTile<float>& dst, const UbTile<float>& a, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a), "shapes differ");
    E::Unary(UnaryOp::kLn, dst, a, loc);
  }
  void Sqrt(const UbTile<float>& dst, const UbTile<float>& a, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a), "shapes differ");
    E::Unary(UnaryOp::kSqrt, dst, a, loc);
  }
  void Abs(const UbTile<float>& dst, const UbTile<float>& a, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a), "shapes differ");
    E::Unary(UnaryOp::kAbs, dst, a, loc);
  }
  void SelectLe(const UbTile<float>& dst, const UbTile<float>& key, float limit, const UbTile<float>& a,
                const UbTile<float>& b, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, key) && Same(a, key) && (Same(b, key) || IsColumnOf(b, key)), "shapes differ");
    E::SelectLe(dst, key, limit, a, b, loc);
  }
  void TopK(const UbTile<float>& values, const UbTile<std::int32_t>& ids, const UbTile<float>& a,
            Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(values, ids) && values.rows() == a.rows() && values.cols() <= a.cols(),
                 "shapes differ");
    E::TopK(values, ids, a, loc);
  }
  void GroupTop(const UbTile<float>& sums, const UbTile<float>& a, std::int64_t count,
                Loc loc = Loc::current()) {
    CUBIST_CHECK(sums.rows() == a.rows() && sums.cols() > 0 && a.cols() % sums.cols() == 0 && count >= 1 &&
                     count <= a.cols() / sums.cols(),
                 "shapes differ");
    E::GroupTop(sums, a, count, loc);
  }
  void KeepGroups(const UbTile<float>& a, const UbTile<std::int32_t>& ids, std::int64_t group_cols,
                  Loc loc = Loc::current()) {
    CUBIST_CHECK(a.rows() == ids.rows() && group_cols > 0, "shapes differ");
    E::KeepGroups(a, ids, group_cols, loc);
  }
  void GroupedTopK(const GroupedTopKTiles& t, std::int64_t count, Loc loc = Loc::current()) {
    const GroupedTopKRefs refs{t.values, t.ids, t.a, RefIfGiven(t.bias), t.choice, t.worths, t.best, t.kept};
    const std::int64_t rows = t.a.rows(), cols = t.a.cols(), groups = t.worths.cols();
    CUBIST_CHECK(Same(refs.choice, refs.a) && (!refs.bias.given() || IsRowOf(refs.bias, refs.a)) &&
                     Same(refs.values, refs.ids) && t.ids.rows() == rows && t.ids.cols() <= cols &&
                     t.worths.rows() == rows && groups > 0 && cols % groups == 0 && count >= 1 &&
                     count <= cols / groups && Same(refs.best, refs.kept) && t.kept.rows() == rows &&
                     t.kept.cols() <= groups,
                 "shapes differ");
    E::GroupedTopK(refs, count, loc);
  }
  void Gather(const UbTile<float>& dst, const UbTile<float>& a, const UbTile<std::int32_t>& ids,
              Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, ids) && dst.rows() == a.rows(), "shapes differ");
    E::Gather(dst, a, ids, loc);
  }
  void Scatter(const UbTile<float>& dst, const UbTile<std::int32_t>& ids, const UbTile<float>& values,
               Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(values, ids) && dst.rows() == ids.rows(), "shapes differ");
    E::Scatter(dst, ids, values, loc);
  }
  void Random(const UbTile<float>& u, const RandomStream& stream, std::int64_t first, std::int64_t row_step,
              Loc loc = Loc::current()) {
    E::Random(u, stream, first, row_step, loc);
  }
  void DropRoutes(const UbTile<std::int32_t>& ids, const UbTile<float>& weights, const UbTile<float>& u,
                  float rate, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(ids, weights) && Same(ids, u), "shapes differ");
    E::DropRoutes(ids, weights, u, rate, loc);
  }
  void MapRoutes(const UbTile<float>& out, const UbTile<std::int32_t>& ids, const UbTile<float>& scores,
                 const UbTile<float>& d_weights, const RouteFunction& function, Loc loc = Loc::current()) {
    const bool has_gradient = d_weights.given();
    CUBIST_CHECK(Same(ids, out) && Same(scores, out) && (!has_gradient || Same(d_weights, out)),
                 "shapes differ");
    E::MapRoutes(out, ids, scores, has_gradient ? TileRef(d_weights) : TileRef(), function, loc);
  }
  void Scores(ScoreFunction function, const UbTile<float>& n, const UbTile<float>& s0,
              const UbTile<float>& s1, const UbTile<float>& column, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(s0, n) && Same(s1, n) && IsColumnOf(column, n), "shapes differ");
    E::Scores(function, n, s0, s1, column, loc);
  }
  void Repair(const UbTile<float>& x, const UbTile<float>& bad, const UbTile<float>& s0,
              const UbTile<float>& s1, const UbTile<float>& column, float limit, bool by_mean,
              Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(s0, x) && Same(s1, x) && IsColumnOf(bad, x) && IsColumnOf(column, x), "shapes differ");
    E::Repair(x, bad, s0, s1, column, limit, by_mean, loc);
  }
  void RowMax(const UbTile<float>& dst, const UbTile<float>& a, Loc loc = Loc::current()) {
    CUBIST_CHECK(IsColumnOf(dst, a), "shapes differ");
    E::Reduce(ReduceOp::kMax, dst, a, loc);
  }
  void RowSum(const UbTile<float>& dst, const UbTile<float>& a, Loc loc = Loc::current()) {
    CUBIST_CHECK(IsColumnOf(dst, a), "shapes differ");
    E::Reduce(ReduceOp::kSum, dst, a, loc);
  }
  void Transpose(const UbTile<float>& dst, const UbTile<float>& a, Loc loc = Loc::current()) {
    CUBIST_CHECK(dst.rows() == a.cols() && dst.cols() == a.rows(), "shapes differ");
    CUBIST_CHECK(dst.slot() != a.slot(), "a tile is not turned in its place");
    E::Transpose(dst, a, loc);
  }
  template <OperandType T>
  void Unzip(const UbTile<T>& dst, const UbTile<T>& a, int first, Loc loc = Loc::current()) {
    CUBIST_CHECK(dst.rows() == a.rows() && 2 * dst.cols() == a.cols(), "shapes differ");
    CUBIST_CHECK(first == 0 || first == 1, "a pair has two elements");
    CUBIST_CHECK(dst.slot() != a.slot(), "a tile is not taken apart in its place");
    E::Unzip(dst, a, first, loc);
  }
  void Zip(const UbTile<float>& dst, const UbTile<float>& a, const UbTile<float>& b,
           Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(a, b) && dst.rows() == a.rows() && dst.cols() == 2 * a.cols(), "shapes differ");
    CUBIST_CHECK(dst.slot() != a.slot() && dst.slot() != b.slot(), "tiles are not joined in their place");
    E::Zip(dst, a, b, loc);
  }
  void MaskOutside(const UbTile<float>& x, std::int64_t lowest, std::int64_t highest, float value,
                   Loc loc = Loc::current()) {
    E::MaskOutside(x, lowest, highest, value, loc);
  }
  template <OperandType T>
  void MaskWhere(const UbTile<T>& x, const UbTile<std::uint8_t>& flags, float value,
                 Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(x, flags), "shapes differ");
    E::MaskWhere(x, flags, value, loc);
  }
  void Distances(const UbTile<float>& x, std::int64_t first, Loc loc = Loc::current()) {
    E::Distances(x, first, loc);
  }
  void DropFlags(const UbTile<std::uint8_t>& flags, const DropoutStream& stream, std::int64_t row,
                 std::int64_t key, bool transposed, Loc loc = Loc::current()) {
    E::DropFlags(flags, stream, row, key, transposed, loc);
  }
  void AddAlibi(const UbTile<float>& s, const UbTile<float>& scratch, float scale, float slope,
                std::int64_t first, bool root, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(s, scratch), "shapes differ");
    E::AddAlibi(s, scratch, scale, slope, first, root, loc);
  }
  void Add(const UbTile<std::int32_t>& dst, const UbTile<std::int32_t>& a, const UbTile<std::int32_t>& b,
           Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a) && Same(a, b), "shapes differ");
    E::AddInt(dst, a, b, loc);
  }
  void ColumnSum(const UbTile<std::int32_t>& dst, const UbTile<std::int32_t>& a, Loc loc = Loc::current()) {
    CUBIST_CHECK(dst.rows() == 1 && dst.cols() == a.cols(), "shapes differ");
    E::ColumnSum(dst, a, loc);
  }
  void CountTrue(const UbTile<std::int32_t>& dst, const UbTile<std::int32_t>& scratch,
                 const UbTile<std::uint8_t>& flags, Loc loc = Loc::current()) {
    CUBIST_CHECK(dst.rows() == 1 && dst.cols() == flags.cols() && Same(scratch, flags), "shapes differ");
    E::CountTrue(dst, scratch, flags, loc);
  }
  void ExclusiveScan(const UbTile<std::int32_t>& dst, const UbTile<std::int32_t>& a, std::int32_t initial,
                     Loc loc = Loc::current()) {
    CUBIST_CHECK(a.rows() == 1 && dst.rows() == 1 && dst.cols() == a.cols() + 1, "shapes differ");
    E::ExclusiveScan(dst, a, initial, loc);
  }
  void AddScalar(const UbTile<std::int32_t>& dst, const UbTile<std::int32_t>& a, std::int32_t value,
                 Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a), "shapes differ");
    E::AddScalarInt(dst, a, value, loc);
  }
  std::int64_t ReadScalar(const UbTile<std::int32_t>& a, std::int64_t j, Loc loc = Loc::current()) {
    return E::ReadInt(a, j, loc);
  }
  float ReadScalar(const UbTile<float>& a, std::int64_t j, Loc loc = Loc::current()) {
    return E::ReadFloat(a, j, loc);
  }
  void Spend(std::int64_t steps, Loc loc = Loc::current()) { E::Spend(steps, loc); }

  template <OperandType T>
  void SoftmaxStep(const UbTile<T>& p, const UbTile<float>& s, const UbTile<float>& m_new,
                   const UbTile<float>& m_old, const UbTile<float>& l, float scale,
                   Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(p, s) && IsColumnOf(m_new, s) && IsColumnOf(m_old, s) && IsColumnOf(l, s),
                 "shapes differ");
    E::SoftmaxStep(p, s, m_new, m_old, l, scale, loc);
  }
  template <OperandType T>
  void AttentionGradStep(const UbTile<T>& p, const UbTile<T>& ds, const UbTile<float>& s,
                         const UbTile<float>& dp, const UbTile<float>& lse, const UbTile<float>& delta,
                         float scale, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(p, s) && Same(ds, s) && Same(dp, s) && IsRowOf(lse, s) && IsRowOf(delta, s),
                 "shapes differ");
    E::AttentionGradStep(p, ds, s, dp, lse, delta, scale, loc);
  }
  void MulAdd(const UbTile<float>& acc, const UbTile<float>& factor, const UbTile<float>& x,
              Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(acc, x) && (Same(acc, factor) || IsColumnOf(factor, acc)), "shapes differ");
    E::MulAdd(acc, factor, x, loc);
  }
  template <OperandType T>
  void WeightedSum(const UbTile<float>& acc, const UbTile<float>& scratch, std::span<const UbTile<T>> rows,
                   std::span<const float> weights, Accumulate accumulate, Loc loc = Loc::current()) {
    CUBIST_CHECK(acc.rows() == 1 && Same(acc, scratch) && rows.size() == weights.size(), "shapes differ");
    CUBIST_CHECK(rows.size() <= kMaxSummands, "more rows than one WeightedSum takes");
    AFew<TileRef> refs;
    for (const UbTile<T>& row : rows) {
      CUBIST_CHECK(Same(row, acc), "shapes differ");
      refs.Add(row);
    }
    E::WeightedSum(acc, scratch, refs.all(), weights, accumulate, loc);
  }
  template <OperandType T>
  void RowDot(const UbTile<float>& sum, const UbTile<float>& s0, const UbTile<float>& s1, const UbTile<T>& a,
              const UbTile<T>& b, Loc loc = Loc::current()) {
    CUBIST_CHECK(IsColumnOf(sum, a) && Same(a, b) && Same(s0, a) && Same(s1, a), "shapes differ");
    E::RowDot(sum, s0, s1, a, b, TileRef(), loc);
  }
  template <OperandType T>
  void RowDot(const UbTile<float>& sum, const UbTile<float>& s0, const UbTile<float>& s1, const UbTile<T>& a,
              const UbTile<T>& b, const UbTile<float>& weights, Loc loc = Loc::current()) {
    CUBIST_CHECK(IsColumnOf(sum, a) && Same(a, b) && Same(s0, a) && Same(s1, a) && IsRowOf(weights, a),
                 "shapes differ");
    E::RowDot(sum, s0, s1, a, b, weights, loc);
  }
  template <OperandType T>
  void ScaleRows(const UbTile<T>& dst, const UbTile<float>& s0, const UbTile<T>& a,
                 const UbTile<float>& factor, const UbTile<float>& weights, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a) && Same(s0, a) && IsColumnOf(factor, a) && IsRowOf(weights, a),
                 "shapes differ");
    E::ScaleRows(dst, s0, a, factor, weights, loc);
  }
  template <OperandType T>
  void NormRows(const NormTiles<T>& t, float scale, float eps, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(t.out, t.x) && Same(t.s0, t.x) && Same(t.s1, t.x) && IsColumnOf(t.rstd, t.x) &&
                     IsColumnOf(t.one, t.x) && IsRowOf(t.gamma, t.x),
                 "shapes differ");
    const TileRef residual = RefIfGiven(t.residual), sum = RefIfGiven(t.sum);
    CUBIST_CHECK(residual.given() == sum.given(), "residual and sum are given together");
    CUBIST_CHECK(!sum.given() || (Same(residual, t.x) && Same(sum, t.x)), "shapes differ");
    E::NormRows({t.out, t.rstd, t.one, t.s0, t.s1, t.x, t.gamma, residual, sum}, scale, eps, loc);
  }
  template <OperandType T>
  void NormRowsGrad(const NormGradTiles<T>& t, float scale, Loc loc = Loc::current()) {
    E::NormRowsGrad(NormGradRefsOf(t), scale, loc);
  }
  template <OperandType T>
  void NormGrad(const NormGradTiles<T>& t, Loc loc = Loc::current()) {
    E::NormGrad(NormGradRefsOf(t), loc);
  }
  template <OperandType T>
  void AddColumnDots(const UbTile<float>& acc, const UbTile<float>& s0, const UbTile<float>& s1,
                     const UbTile<T>& a, const UbTile<T>& b, const UbTile<float>& factor,
                     Loc loc = Loc::current()) {
    CUBIST_CHECK(IsRowOf(acc, a) && Same(a, b) && Same(s0, a) && Same(s1, a) && IsColumnOf(factor, a),
                 "shapes differ");
    E::AddColumnDots(acc, s0, s1, a, b, factor, loc);
  }
  template <OperandType T>
  void SwiGlu(const UbTile<T>& out, const UbTile<float>& s0, const UbTile<float>& s1, const UbTile<T>& gate,
              const UbTile<T>& up, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(out, gate) && Same(up, gate) && Same(s0, gate) && Same(s1, gate), "shapes differ");
    E::SwiGlu(out, s0, s1, gate, up, TileRef(), loc);
  }
  template <OperandType T>
  void SwiGlu(const UbTile<T>& out, const UbTile<float>& s0, const UbTile<float>& s1, const UbTile<T>& gate,
              const UbTile<T>& up, const UbTile<float>& probs, Loc loc = Loc::current()) {
    CUBIST_CHECK(
        Same(out, gate) && Same(up, gate) && Same(s0, gate) && Same(s1, gate) && IsColumnOf(probs, gate),
        "shapes differ");
    E::SwiGlu(out, s0, s1, gate, up, probs, loc);
  }
  template <OperandType T>
  void SwiGluGrad(const UbTile<T>& d_gate, const UbTile<T>& d_up, const UbTile<float>& d_probs,
                  const UbTile<float>& s0, const UbTile<float>& s1, const UbTile<float>& s2,
                  const UbTile<float>& s3, const UbTile<T>& d_out, const UbTile<T>& gate, const UbTile<T>& up,
                  const UbTile<float>& probs, Loc loc = Loc::current()) {
    for (const TileRef& tile : {TileRef(d_gate), TileRef(d_up), TileRef(s0), TileRef(s1), TileRef(s2),
                                TileRef(s3), TileRef(d_out), TileRef(up)}) {
      CUBIST_CHECK(Same(tile, gate), "shapes differ");
    }
    const TileRef d_factor = RefIfGiven(d_probs), factor = RefIfGiven(probs);
    for (const TileRef& column : {d_factor, factor})
      CUBIST_CHECK(!column.given() || IsColumnOf(column, gate), "shapes differ");
    E::SwiGluGrad({d_gate, d_up, d_factor, s0, s1, s2, s3, d_out, gate, up, factor}, loc);
  }
  void StoreActivated(const Gm& dst, const EpilogueTiles& t, const EpilogueScalars& e,
                      Loc loc = Loc::current()) {
    EpilogueRefs refs{t.x, RefIfGiven(t.bias), RefIfGiven(t.residual), {}};
    CUBIST_CHECK(dst.rows == refs.x.rows() && dst.cols == refs.x.cols(), "shapes differ");
    CUBIST_CHECK(IsFloat(dst.dtype()), "Store from UB narrows floats only");
    CUBIST_CHECK(!refs.bias.given() || IsRowOf(refs.bias, refs.x), "shapes differ");
    CUBIST_CHECK(!refs.residual.given() || Same(refs.residual, refs.x), "shapes differ");
    for (std::size_t i = 0; i < static_cast<std::size_t>(e.scratch()); ++i) {
      refs.scratch[i] = RefIfGiven(t.scratch[i]);
      CUBIST_CHECK(refs.scratch[i].given() && Same(refs.scratch[i], refs.x), "shapes differ");
    }
    E::StoreActivated(dst, refs, e, loc);
  }
  template <OperandType T>
  void AddDot(const UbTile<float>& sum, const UbTile<float>& scratch, const UbTile<float>& x,
              const UbTile<T>& row, Loc loc = Loc::current()) {
    CUBIST_CHECK(sum.rows() == 1 && sum.cols() == 1 && x.rows() == 1 && Same(scratch, x) && Same(row, x),
                 "shapes differ");
    E::AddDot(sum, scratch, x, row, loc);
  }
  // `wide` is x in fp32, made where `widens`; x that is fp32 needs none.
  template <OperandType T>
  void StoreScaledDots(const UbTile<float>& wide, const UbTile<float>& s0, const UbTile<float>& s1,
                       const UbTile<T>& x, bool widens, std::span<const ScaledDot<T>> dots,
                       Loc loc = Loc::current()) {
    CUBIST_CHECK(x.rows() == 1 && Same(s0, x) && Same(s1, x), "shapes differ");
    CUBIST_CHECK((std::same_as<T, float> || Same(wide, x)), "shapes differ");
    CUBIST_CHECK(dots.size() <= kMaxSummands, "more rows than one StoreScaledDots takes");
    AFew<ScaledDotRef> refs;
    for (const ScaledDot<T>& d : dots) {
      ScaledDotRef& ref = refs.Add();
      ref.dst = d.dst, ref.weight = d.weight;
      if (d.dst.tensor != nullptr) {
        CUBIST_CHECK(d.dst.rows == 1 && d.dst.cols == x.cols(), "shapes differ");
        CUBIST_CHECK(IsFloat(d.dst.dtype()), "Store from UB narrows floats only");
      }
      if (!d.row.given()) continue;
      ref.sum = d.sum, ref.row = d.row;
      CUBIST_CHECK(d.sum.rows() == 1 && d.sum.cols() == 1 && Same(d.row, x), "shapes differ");
    }
    E::StoreScaledDots(wide, s0, s1, x, widens, refs.all(), loc);
  }
  template <RowType T>
  void StoreEach(std::span<const Gm> dsts, const UbTile<T>& src, Loc loc = Loc::current()) {
    CUBIST_CHECK(src.rows() == 1 && dsts.size() <= kMaxSummands, "more rows than one StoreEach takes");
    for (const Gm& dst : dsts) {
      CUBIST_CHECK(dst.rows == 1 && dst.cols == src.cols(), "shapes differ");
      CUBIST_CHECK(dst.dtype() == DTypeOf<T>(), "StoreEach keeps the dtype");
    }
    E::StoreEach(dsts, src, loc);
  }
  // Places outside [0, rows of the column) are passed over: a Gather leaves 0 there.
  void Gather(const UbTile<float>& dst, const Gm& column, const UbTile<std::int32_t>& places,
              const UbTile<float>& staging, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, places) && column.cols == 1 && IsFloat(column.dtype()), "shapes differ");
    E::Gather(dst, column, places, staging, loc);
  }
  template <RowType T>
  void Scatter(const Gm& column, const UbTile<std::int32_t>& places, const UbTile<T>& src,
               const UbTile<T>& staging,
               Loc loc = Loc::current()) requires(std::same_as<T, float> || std::same_as<T, std::int32_t>) {
    CUBIST_CHECK(Same(src, places) && column.cols == 1, "shapes differ");
    CUBIST_CHECK(column.dtype() == DTypeOf<T>() || (std::is_same_v<T, float> && IsFloat(column.dtype())),
                 "Store from UB narrows floats only");
    E::Scatter(column, places, src, staging, loc);
  }
  void Histogram(const UbTile<std::int32_t>& counts, const UbTile<std::int32_t>& ids, const IdBins& bins,
                 Loc loc = Loc::current()) {
    E::Histogram(counts, ids, bins, loc);
  }
  void Rank(const UbTile<std::int32_t>& ranks, const UbTile<std::int32_t>& next,
            const UbTile<std::int32_t>& ids, const IdBins& bins, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(ranks, ids), "shapes differ");
    E::Rank(ranks, next, ids, bins, loc);
  }
  // By sorting: whole ids, each below 2^24 and either one of the bins' or below 0. Those have no rank, but -1.
  void Histogram(const UbTile<std::int32_t>& counts, const UbTile<std::int32_t>& ids, const IdBins& bins,
                 const SortTiles& sort, Loc loc = Loc::current()) {
    if (!sort.given()) return E::Histogram(counts, ids, bins, loc);
    E::HistogramBySort(counts, ids, RefsOf(sort, counts, ids, bins), loc);
  }
  void Rank(const UbTile<std::int32_t>& ranks, const UbTile<std::int32_t>& next,
            const UbTile<std::int32_t>& ids, const IdBins& bins, const SortTiles& sort,
            Loc loc = Loc::current()) {
    if (!sort.given()) return Rank(ranks, next, ids, bins, loc);
    CUBIST_CHECK(Same(ranks, ids), "shapes differ");
    E::RankBySort(ranks, next, ids, RefsOf(sort, next, ids, bins), loc);
  }
  void Sort32(const UbTile<float>& keys, const UbTile<std::int32_t>& values, const UbTile<float>& from,
              const UbTile<std::int32_t>& values_from, Loc loc = Loc::current()) {
    SortShapes(keys, values, from, values_from);
    E::Sort32(keys, values, from, values_from, loc);
  }
  void MergeSort(const UbTile<float>& keys, const UbTile<std::int32_t>& values, const UbTile<float>& from,
                 const UbTile<std::int32_t>& values_from, std::int64_t run, Loc loc = Loc::current()) {
    SortShapes(keys, values, from, values_from);
    CUBIST_CHECK(run > 0, "runs are empty");
    E::MergeSort(keys, values, from, values_from, run, loc);
  }
  void RankWithin(const UbTile<std::int32_t>& ranks, const UbTile<std::int32_t>& next,
                  const UbTile<std::int32_t>& limits, const UbTile<std::int32_t>& ids, const IdBins& bins,
                  Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(ranks, ids) && Same(next, limits), "shapes differ");
    E::RankWithin(ranks, next, limits, ids, bins, loc);
  }
  void RoundUp(const UbTile<std::int32_t>& dst, const UbTile<std::int32_t>& a, std::int32_t multiple,
               Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a) && a.rows() == 1 && multiple > 0, "shapes differ");
    E::RoundUp(dst, a, multiple, loc);
  }
  void TrueColumns(const UbTile<std::int32_t>& dst, const UbTile<std::int32_t>& flags,
                   Loc loc = Loc::current()) {
    CUBIST_CHECK(dst.rows() == flags.rows() && dst.cols() <= flags.cols(), "shapes differ");
    E::TrueColumns(dst, flags, loc);
  }
  void KeepWhere(const UbTile<std::int32_t>& dst, const UbTile<std::int32_t>& a,
                 const UbTile<std::int32_t>& flags, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a) && (Same(flags, a) || IsColumnOf(flags, a)), "shapes differ");
    E::KeepWhere(dst, a, flags, loc);
  }
  // Elements whose id is not in [first, first + columns of the table) stay as they are.
  void Lookup(const UbTile<std::int32_t>& dst, const UbTile<std::int32_t>& ids,
              const UbTile<std::int32_t>& table, std::int32_t first, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, ids) && table.rows() == 1, "shapes differ");
    E::Lookup(dst, ids, table, first, loc);
  }
  void Receive(const UbTile<float>& dst, const HandOverTile<float>& src, Loc loc = Loc::current()) requires
      requires(E& e) {
    e.Receive(dst, src, loc);
  }
  {
    CUBIST_CHECK(dst.rows() == src.rows() && dst.cols() == src.cols(), "shapes differ");
    E::Receive(dst, src, loc);
  }
  void Move(const UbTile<float>& dst, const L0CTile<float>& src, Loc loc = Loc::current()) requires
      requires(E& e) {
    e.MoveToUb(dst, src, loc);
  }
  {
    CUBIST_CHECK(dst.rows() == src.rows() && dst.cols() == src.cols(), "shapes differ");
    E::MoveToUb(dst, src, loc);
  }
  template <OperandType T>
  void Move(const L1Tile<T>& dst, const UbTile<T>& src, Loc loc = Loc::current()) requires requires(E& e) {
    e.MoveToL1(dst, src, loc);
  }
  {
    CUBIST_CHECK(dst.rows() == src.rows() && dst.cols() == src.cols(), "shapes differ");
    E::MoveToL1(dst, src, loc);
  }

  static constexpr std::size_t kMaxSummands = 16;

 private:
  // Up to kMaxSummands operands, of which only those that are added are made.
  template <class T>
  class AFew {
   public:
    template <class... From>
    T& Add(const From&... from) {
      return *new (bytes_ + sizeof(T) * count_++) T(from...);
    }
    std::span<const T> all() const { return {reinterpret_cast<const T*>(bytes_), count_}; }

   private:
    static_assert(std::is_trivially_destructible_v<T>);
    alignas(T) std::byte bytes_[sizeof(T) * kMaxSummands];
    std::size_t count_ = 0;
  };

  void Binary(BinaryOp op, const UbTile<float>& dst, const UbTile<float>& a, const UbTile<float>& b,
              Loc loc) {
    CUBIST_CHECK(Same(dst, a) && (Same(a, b) || IsColumnOf(b, a) || IsRowOf(b, a)), "shapes differ");
    E::Binary(op, dst, a, b, loc);
  }
  template <class T>
  static TileRef RefIfGiven(const UbTile<T>& tile) {
    return tile.given() ? TileRef(tile) : TileRef();
  }
  static bool Same(const TileRef& x, const TileRef& y) {
    return x.rows() == y.rows() && x.cols() == y.cols();
  }
  static bool IsColumnOf(const TileRef& column, const TileRef& x) {
    return column.cols() == 1 && column.rows() == x.rows();
  }
  static bool IsRowOf(const TileRef& row, const TileRef& x) {
    return row.rows() == 1 && row.cols() == x.cols();
  }
  // The tiles are read and written in turn: none is sorted into itself.
  static void SortShapes(const TileRef& keys, const TileRef& values, const TileRef& from,
                         const TileRef& values_from) {
    CUBIST_CHECK(Same(keys, from) && Same(values, from) && Same(values_from, from), "shapes differ");
    CUBIST_CHECK(keys.slot != from.slot && values.slot != values_from.slot,
                 "a tile is not sorted in its place");
  }
  static SortRefs RefsOf(const SortTiles& sort, const TileRef& bins_tile, const TileRef& ids,
                         const IdBins& bins) {
    CUBIST_CHECK(bins.whole() && bins.first == 0, "sorting takes whole ids from 0 on");
    const SortRefs refs{sort.places,
                        sort.bins,
                        {sort.keys[0], sort.keys[1]},
                        {sort.values[0], sort.values[1]},
                        sort.starts,
                        sort.probes,
                        sort.found,
                        sort.at};
    for (const TileRef* tile : {&refs.places, &refs.keys[0], &refs.keys[1], &refs.values[0], &refs.values[1]})
      CUBIST_CHECK(Same(*tile, ids), "shapes differ");
    for (const TileRef* tile : {&refs.bins, &refs.starts, &refs.probes, &refs.found, &refs.at})
      CUBIST_CHECK(tile->rows() == 1 && tile->cols() == bins_tile.cols() + 1, "shapes differ");
    return refs;
  }
  template <class T>
  static NormGradRefs NormGradRefsOf(const NormGradTiles<T>& t) {
    const NormGradRefs refs{t.d_x,  RefIfGiven(t.d_gamma), t.shift, t.s0, t.s1, t.d_out, t.x, t.gamma,
                            t.rstd, RefIfGiven(t.more)};
    for (const TileRef& tile : {refs.d_x, refs.s0, refs.s1, refs.d_out, refs.more})
      CUBIST_CHECK(!tile.given() || Same(tile, refs.x), "shapes differ");
    for (const TileRef& row : {refs.gamma, refs.d_gamma})
      CUBIST_CHECK(!row.given() || IsRowOf(row, refs.x), "shapes differ");
    CUBIST_CHECK(IsColumnOf(refs.rstd, refs.x) && IsColumnOf(refs.shift, refs.x), "shapes differ");
    return refs;
  }
};

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_VECTOR_FRONT_H_
