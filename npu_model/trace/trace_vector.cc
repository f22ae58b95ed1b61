#include <algorithm>
#include <cstdint>
#include <string>

#include "npu_model/composites.h"
#include "npu_model/host/tile_layout-inl.h"
#include "npu_model/trace/recording.h"
#include "npu_model/trace/trace_core.h"

namespace cubist::trace {

void TraceVector::LoadUb(const TileRef& dst, const Gm& src, Loc loc) {
  const bool masks = src.dtype() == DType::kBool && src.data() == nullptr;  // Without data nothing is masked.
  if (masks) {
    for (std::int64_t i = 0; i < dst.rows(); ++i) std::fill_n(RowAt<std::uint8_t>(dst, i), dst.cols(), 0);
  } else if (state_->Computes(dst)) {
    CUBIST_CHECK(Empty(dst) || src.data() != nullptr,
                 std::string("no data in index tensor ") + src.tensor->name);
    host_.LoadUb(dst, src, loc);
  }
  record_.LoadUb(dst, src, loc);
}

void TraceVector::StoreUb(const Gm& dst, const TileRef& src, Loc loc) {
  if (state_->Computes(src) && dst.data() != nullptr) host_.StoreUb(dst, src, loc);
  record_.StoreUb(dst, src, loc);
}

void TraceVector::Fill(const TileRef& x, float value, Loc loc) {
  if (state_->with_data) host_.Fill(x, value, loc);
  record_.Fill(x, value, loc);
}

void TraceVector::Cast(const TileRef& dst, const TileRef& a, Loc loc) {
  if (state_->Computes(dst)) host_.Cast(dst, a, loc);
  record_.Cast(dst, a, loc);
}

void TraceVector::Scalar(ScalarOp op, const TileRef& dst, const TileRef& a, float value, Loc loc) {
  if (state_->with_data) host_.Scalar(op, dst, a, value, loc);
  record_.Scalar(op, dst, a, value, loc);
}

void TraceVector::Binary(BinaryOp op, const TileRef& dst, const TileRef& a, const TileRef& b, Loc loc) {
  if (state_->with_data) host_.Binary(op, dst, a, b, loc);
  record_.Binary(op, dst, a, b, loc);
}

void TraceVector::Unary(UnaryOp op, const TileRef& dst, const TileRef& a, Loc loc) {
  if (state_->with_data) host_.Unary(op, dst, a, loc);
  record_.Unary(op, dst, a, loc);
}

void TraceVector::Reduce(ReduceOp op, const TileRef& dst, const TileRef& a, Loc loc) {
  if (state_->with_data) host_.Reduce(op, dst, a, loc);
  record_.Reduce(op, dst, a, loc);
}

void TraceVector::Transpose(const TileRef& dst, const TileRef& a, Loc loc) {
  if (state_->with_data) host_.Transpose(dst, a, loc);
  record_.Transpose(dst, a, loc);
}
void TraceVector::Unzip(const TileRef& dst, const TileRef& a, int first, Loc loc) {
  if (state_->with_data) host_.Unzip(dst, a, first, loc);
  record_.Unzip(dst, a, first, loc);
}
void TraceVector::Zip(const TileRef& dst, const TileRef& a, const TileRef& b, Loc loc) {
  if (state_->with_data) host_.Zip(dst, a, b, loc);
  record_.Zip(dst, a, b, loc);
}

void TraceVector::MaskOutside(const TileRef& x, std::int64_t lowest, std::int64_t highest, float value,
                              Loc loc) {
  if (state_->with_data) host_.MaskOutside(x, lowest, highest, value, loc);
  record_.MaskOutside(x, lowest, highest, value, loc);
}

void TraceVector::MaskWhere(const TileRef& x, const TileRef& flags, float value, Loc loc) {
  if (state_->with_data) host_.MaskWhere(x, flags, value, loc);
  record_.MaskWhere(x, flags, value, loc);
}

void TraceVector::Distances(const TileRef& x, std::int64_t first, Loc loc) {
  if (state_->with_data) host_.Distances(x, first, loc);
  record_.Distances(x, first, loc);
}

void TraceVector::DropFlags(const TileRef& flags, const DropoutStream& stream, std::int64_t row,
                            std::int64_t key, bool transposed, Loc loc) {
  if (state_->with_data) host_.DropFlags(flags, stream, row, key, transposed, loc);
  record_.DropFlags(flags, {stream, row, key, transposed}, loc);
}

void TraceVector::AddAlibi(const TileRef& s, const TileRef& scratch, float scale, float slope,
                           std::int64_t first, bool root, Loc loc) {
  if (state_->with_data) host_.AddAlibi(s, scratch, scale, slope, first, root, loc);
  ExpandAddAlibi(record_, s, scratch, scale, slope, first, root, loc);
}

void TraceVector::FillInt(const TileRef& x, std::int32_t value, Loc loc) {
  host_.FillInt(x, value, loc);
  record_.FillInt(x, value, loc);
}

void TraceVector::AddInt(const TileRef& dst, const TileRef& a, const TileRef& b, Loc loc) {
  host_.AddInt(dst, a, b, loc);
  record_.AddInt(dst, a, b, loc);
}

void TraceVector::ColumnSum(const TileRef& dst, const TileRef& a, Loc loc) {
  host_.ColumnSum(dst, a, loc);
  record_.ColumnSum(dst, a, loc);
}

void TraceVector::CountTrue(const TileRef& dst, const TileRef& scratch, const TileRef& flags, Loc loc) {
  host_.CountTrue(dst, scratch, flags, loc);
  ExpandCountTrue(record_, dst, scratch, flags, loc);
}

void TraceVector::ExclusiveScan(const TileRef& dst, const TileRef& a, std::int32_t initial, Loc loc) {
  host_.ExclusiveScan(dst, a, initial, loc);
  record_.ExclusiveScan(dst, a, initial, loc);
}

void TraceVector::AddScalarInt(const TileRef& dst, const TileRef& a, std::int32_t value, Loc loc) {
  host_.AddScalarInt(dst, a, value, loc);
  record_.AddScalarInt(dst, a, value, loc);
}

void TraceVector::Spend(std::int64_t steps, Loc loc) { record_.Spend(steps, loc); }

std::int64_t TraceVector::ReadInt(const TileRef& a, std::int64_t j, Loc loc) {
  record_.ReadScalar(a, j, loc);
  return host_.ReadInt(a, j, loc);
}

float TraceVector::ReadFloat(const TileRef& a, std::int64_t j, Loc loc) {
  record_.ReadScalar(a, j, loc);
  return state_->with_data ? host_.ReadFloat(a, j, loc) : 1.0f;
}

void TraceVector::SoftmaxStep(const TileRef& p, const TileRef& s, const TileRef& m_new, const TileRef& m_old,
                              const TileRef& l, float scale, Loc loc) {
  if (state_->with_data) host_.SoftmaxStep(p, s, m_new, m_old, l, scale, loc);
  if (!Empty(s)) ExpandSoftmaxStep(record_, p, s, m_new, m_old, l, scale, loc);
}

void TraceVector::RowDot(const TileRef& sum, const TileRef& s0, const TileRef& s1, const TileRef& a,
                         const TileRef& b, const TileRef& weights, Loc loc) {
  if (state_->with_data) host_.RowDot(sum, s0, s1, a, b, weights, loc);
  if (!Empty(a)) ExpandRowDot(record_, sum, s0, s1, a, b, weights, loc);
}

void TraceVector::ScaleRows(const TileRef& dst, const TileRef& s0, const TileRef& a, const TileRef& factor,
                            const TileRef& weights, Loc loc) {
  if (state_->with_data) host_.ScaleRows(dst, s0, a, factor, weights, loc);
  if (!Empty(a)) ExpandScaleRows(record_, dst, s0, a, factor, weights, loc);
}

void TraceVector::NormRows(const NormRefs& t, float scale, float eps, Loc loc) {
  if (state_->with_data) host_.NormRows(t, scale, eps, loc);
  if (!Empty(t.x)) ExpandNormRows(record_, t, scale, eps, loc);
}

void TraceVector::NormRowsGrad(const NormGradRefs& t, float scale, Loc loc) {
  if (state_->with_data) host_.NormRowsGrad(t, scale, loc);
  if (!Empty(t.x)) ExpandNormRowsGrad(record_, t, scale, loc);
}

void TraceVector::NormGrad(const NormGradRefs& t, Loc loc) {
  if (state_->with_data) host_.NormGrad(t, loc);
  if (!Empty(t.x)) ExpandNormGrad(record_, t, loc);
}

void TraceVector::AddColumnDots(const TileRef& acc, const TileRef& s0, const TileRef& s1, const TileRef& a,
                                const TileRef& b, const TileRef& factor, Loc loc) {
  if (state_->with_data) host_.AddColumnDots(acc, s0, s1, a, b, factor, loc);
  if (!Empty(a)) ExpandAddColumnDots(record_, acc, s0, s1, a, b, factor, loc);
}

void TraceVector::SwiGlu(const TileRef& out, const TileRef& s0, const TileRef& s1, const TileRef& gate,
                         const TileRef& up, const TileRef& probs, Loc loc) {
  if (state_->with_data) host_.SwiGlu(out, s0, s1, gate, up, probs, loc);
  if (!Empty(gate)) ExpandSwiGlu(record_, out, s0, s1, gate, up, probs, loc);
}

void TraceVector::SwiGluGrad(const SwiGluGradTiles& t, Loc loc) {
  if (state_->with_data) host_.SwiGluGrad(t, loc);
  if (!Empty(t.gate)) ExpandSwiGluGrad(record_, t, loc);
}

void TraceVector::AttentionGradStep(const TileRef& p, const TileRef& ds, const TileRef& s, const TileRef& dp,
                                    const TileRef& lse, const TileRef& delta, float scale, Loc loc) {
  if (state_->with_data) host_.AttentionGradStep(p, ds, s, dp, lse, delta, scale, loc);
  if (!Empty(s)) ExpandAttentionGradStep(record_, p, ds, s, dp, lse, delta, scale, loc);
}

void TraceVector::SelectLe(const TileRef& dst, const TileRef& key, float limit, const TileRef& a,
                           const TileRef& b, Loc loc) {
  if (state_->with_data) host_.SelectLe(dst, key, limit, a, b, loc);
  record_.SelectLe(dst, key, limit, a, b, loc);
}

// Without data the first of a row stand for the highest.
void TraceVector::TopK(const TileRef& values, const TileRef& ids, const TileRef& a, Loc loc) {
  if (state_->with_data) {
    host_.TopK(values, ids, a, loc);
  } else {
    host_.FillInt(ids, 0, loc);
  }
  record_.TopK(values, ids, a, loc);
}

void TraceVector::GroupTop(const TileRef& sums, const TileRef& a, std::int64_t count, Loc loc) {
  if (state_->with_data) host_.GroupTop(sums, a, count, loc);
  record_.GroupTop(sums, a, count, loc);
}

void TraceVector::KeepGroups(const TileRef& a, const TileRef& ids, std::int64_t group_cols, Loc loc) {
  if (state_->with_data) host_.KeepGroups(a, ids, group_cols, loc);
  record_.KeepGroups(a, ids, group_cols, loc);
}

void TraceVector::GroupedTopK(const GroupedTopKRefs& t, std::int64_t count, Loc loc) {
  if (state_->with_data) {
    host_.GroupedTopK(t, count, loc);
  } else {
    host_.FillInt(t.ids, 0, loc);
  }
  ExpandGroupedTopK(record_, t, count, loc);
}

void TraceVector::Gather(const TileRef& dst, const TileRef& a, const TileRef& ids, Loc loc) {
  if (state_->with_data) host_.Gather(dst, a, ids, loc);
  record_.Gather(dst, a, ids, loc);
}

void TraceVector::Scatter(const TileRef& dst, const TileRef& ids, const TileRef& values, Loc loc) {
  if (state_->with_data) host_.Scatter(dst, ids, values, loc);
  record_.Scatter(dst, ids, values, loc);
}

void TraceVector::Random(const TileRef& u, const RandomStream& stream, std::int64_t first,
                         std::int64_t row_step, Loc loc) {
  if (state_->with_data) host_.Random(u, stream, first, row_step, loc);
  record_.Random(u, loc);
}

void TraceVector::DropRoutes(const TileRef& ids, const TileRef& weights, const TileRef& u, float rate,
                             Loc loc) {
  if (state_->with_data) host_.DropRoutes(ids, weights, u, rate, loc);
  record_.DropRoutes(ids, weights, u, rate, loc);
}

void TraceVector::MapRoutes(const TileRef& out, const TileRef& ids, const TileRef& scores,
                            const TileRef& d_weights, const RouteFunction& function, Loc loc) {
  if (state_->with_data) host_.MapRoutes(out, ids, scores, d_weights, function, loc);
  record_.MapRoutes(out, ids, scores, d_weights, loc);
}

void TraceVector::Scores(ScoreFunction function, const TileRef& n, const TileRef& s0, const TileRef& s1,
                         const TileRef& column, Loc loc) {
  if (state_->with_data) host_.Scores(function, n, s0, s1, column, loc);
  if (!Empty(n)) ExpandScores(record_, function, n, s0, s1, column, loc);
}

void TraceVector::Repair(const TileRef& x, const TileRef& bad, const TileRef& s0, const TileRef& s1,
                         const TileRef& column, float limit, bool by_mean, Loc loc) {
  if (state_->with_data) host_.Repair(x, bad, s0, s1, column, limit, by_mean, loc);
  if (!Empty(x)) ExpandRepair(record_, x, bad, s0, s1, column, limit, by_mean, loc);
}

void TraceVector::MulAdd(const TileRef& acc, const TileRef& factor, const TileRef& x, Loc loc) {
  if (state_->with_data) host_.MulAdd(acc, factor, x, loc);
  ExpandMulAdd(record_, acc, factor, x, loc);
}

void TraceVector::WeightedSum(const TileRef& acc, const TileRef& scratch, std::span<const TileRef> rows,
                              std::span<const float> weights, Accumulate accumulate, Loc loc) {
  if (state_->with_data) host_.WeightedSum(acc, scratch, rows, weights, accumulate, loc);
  ExpandWeightedSum(record_, acc, scratch, rows, weights, accumulate, loc);
}

void TraceVector::StoreEach(std::span<const Gm> dsts, const TileRef& src, Loc loc) {
  if (state_->with_data) host_.StoreEach(dsts, src, loc);
  ExpandStoreEach(record_, dsts, src, loc);
}

void TraceVector::StoreActivated(const Gm& dst, const EpilogueRefs& t, const EpilogueScalars& e, Loc loc) {
  if (state_->with_data) host_.StoreActivated(dst, t, e, loc);
  if (!Empty(t.x)) ExpandStoreActivated(record_, dst, t, e, loc);
}

void TraceVector::AddDot(const TileRef& sum, const TileRef& scratch, const TileRef& x, const TileRef& row,
                         Loc loc) {
  if (state_->with_data) host_.AddDot(sum, scratch, x, row, loc);
  if (!Empty(x)) ExpandAddDot(record_, sum, scratch, x, row, loc);
}

void TraceVector::StoreScaledDots(const TileRef& wide, const TileRef& s0, const TileRef& s1, const TileRef& x,
                                  bool widens, std::span<const ScaledDotRef> dots, Loc loc) {
  if (state_->with_data) host_.StoreScaledDots(wide, s0, s1, x, widens, dots, loc);
  if (!Empty(x)) ExpandStoreScaledDots(record_, wide, s0, s1, x, widens, dots, loc);
}

void TraceVector::Gather(const TileRef& dst, const Gm& column, const TileRef& places, const TileRef& staging,
                         Loc loc) {
  if (state_->with_data) host_.Gather(dst, column, places, staging, loc);
  ExpandGather(record_, dst, column, places, staging, loc);
}

void TraceVector::Scatter(const Gm& column, const TileRef& places, const TileRef& src, const TileRef& staging,
                          Loc loc) {
  if (state_->Computes(src) && column.data() != nullptr) host_.Scatter(column, places, src, staging, loc);
  ExpandScatter(record_, column, places, src, staging, loc);
}

void TraceVector::Histogram(const TileRef& counts, const TileRef& ids, const IdBins& bins, Loc loc) {
  host_.Histogram(counts, ids, bins, loc);
  record_.Histogram(counts, ids, bins, loc);
}

void TraceVector::Rank(const TileRef& ranks, const TileRef& next, const TileRef& ids, const IdBins& bins,
                       Loc loc) {
  host_.Rank(ranks, next, ids, bins, loc);
  record_.Rank(ranks, next, ids, bins, loc);
}

void TraceVector::RankWithin(const TileRef& ranks, const TileRef& next, const TileRef& limits,
                             const TileRef& ids, const IdBins& bins, Loc loc) {
  host_.RankWithin(ranks, next, limits, ids, bins, loc);
  record_.RankWithin(ranks, next, limits, ids, bins, loc);
}

void TraceVector::HistogramBySort(const TileRef& counts, const TileRef& ids, const SortRefs& sort, Loc loc) {
  host_.HistogramBySort(counts, ids, sort, loc);
  if (!Empty(ids)) ExpandHistogramBySort(record_, counts, ids, sort, loc);
}

void TraceVector::RankBySort(const TileRef& ranks, const TileRef& next, const TileRef& ids,
                             const SortRefs& sort, Loc loc) {
  host_.RankBySort(ranks, next, ids, sort, loc);
  if (!Empty(ids)) ExpandRankBySort(record_, ranks, next, ids, sort, loc);
}

void TraceVector::Sort32(const TileRef& keys, const TileRef& values, const TileRef& from,
                         const TileRef& values_from, Loc loc) {
  if (state_->with_data) host_.Sort32(keys, values, from, values_from, loc);
  record_.Sort32(keys, values, from, values_from, loc);
}

void TraceVector::MergeSort(const TileRef& keys, const TileRef& values, const TileRef& from,
                            const TileRef& values_from, std::int64_t run, Loc loc) {
  if (state_->with_data) {
    host_.MergeSort(keys, values, from, values_from, run, loc);
  } else {
    host_.FillInt(values, 0, loc);
  }
  record_.MergeSort(keys, values, from, values_from, run, loc);
}

void TraceVector::TrueColumns(const TileRef& dst, const TileRef& flags, Loc loc) {
  host_.TrueColumns(dst, flags, loc);
  record_.TrueColumns(dst, flags, loc);
}

void TraceVector::KeepWhere(const TileRef& dst, const TileRef& a, const TileRef& flags, Loc loc) {
  host_.KeepWhere(dst, a, flags, loc);
  record_.KeepWhere(dst, a, flags, loc);
}

void TraceVector::Lookup(const TileRef& dst, const TileRef& ids, const TileRef& table, std::int32_t first,
                         Loc loc) {
  host_.Lookup(dst, ids, table, first, loc);
  record_.Lookup(dst, ids, table, first, loc);
}

void TraceVector::RoundUp(const TileRef& dst, const TileRef& a, std::int32_t multiple, Loc loc) {
  host_.RoundUp(dst, a, multiple, loc);
  record_.RoundUp(dst, a, multiple, loc);
}

void TraceVector::Receive(const TileRef& dst, const TileRef& src, Loc loc) {
  if (state_->with_data) host_.Receive(dst, src, loc);
  record_.Receive(dst, src, loc);
}

void TraceVector::MoveToUb(const TileRef& dst, const TileRef& src, Loc loc) {
  if (state_->with_data) host_.MoveToUb(dst, src, loc);
  record_.MoveToUb(dst, src, loc);
}

void TraceVector::MoveToL1(const TileRef& dst, const TileRef& src, Loc loc) {
  if (state_->with_data) host_.MoveToL1(dst, src, loc);
  record_.MoveToL1(dst, src, loc);
}

}  // namespace cubist::trace
