#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "npu_model/host/host_core.h"
#include "npu_model/host/tile_layout-inl.h"
#include "npu_model/philox.h"

namespace cubist {

void HostVector::Show(const void* data, std::int64_t bytes) {
  if (shown_end_ == kMostShown) {
    const std::size_t begin = std::max<std::size_t>(shown_begin_, 1);
    std::move(shown_.begin() + static_cast<std::ptrdiff_t>(begin), shown_.end(), shown_.begin());
    shown_begin_ = 0, shown_end_ -= begin;
  }
  shown_[shown_end_++] = {data, bytes};
}

void HostVector::Use(const void* data) {
  if (shown_count() > 0 && shown_[shown_begin_].data == data) {  // As shown, so used.
    ++shown_begin_;
    return;
  }
  const auto begin = shown_.begin() + static_cast<std::ptrdiff_t>(shown_begin_),
             end = shown_.begin() + static_cast<std::ptrdiff_t>(shown_end_);
  const auto kept = std::remove_if(begin, end, [&](const Shown& row) { return row.data == data; });
  shown_end_ = static_cast<std::size_t>(kept - shown_.begin());
}

const void* HostVector::TakeShown(std::int64_t bytes, const void* own) {
  if (shown_count() == 0) return nullptr;
  const Shown row = shown_[--shown_end_];
  return row.bytes == bytes && row.data != own ? row.data : nullptr;
}

void HostVector::LoadUb(const TileRef& dst, const Gm& src, Loc) {
  Slot& slot = *dst.slot;
  const std::int64_t bytes = SizeOf(src.dtype());
  if (slot.role == Role::kRelay && src.col_stride == 1 && src.dtype() == slot.dtype && Whole(dst)) {
    slot.shows = {.data = src.data(), .pitch = src.row_stride};
    if (dst.rows() == 1) Show(src.data(), dst.cols() * bytes);
    return;
  }
  ShowOwn(*context_, slot);
  const Rows rows = RowsOf(dst);
  if (rows.rows == 0 || rows.cols == 0) return;
  if (src.col_stride != 1 || rows.cols == 1) {
    CopyStrided(static_cast<std::byte*>(rows.data), slot.dtype, rows.pitch, 1, src.data(), src.dtype(),
                src.row_stride, src.col_stride, rows.rows, rows.cols);
  } else if (src.dtype() == slot.dtype) {
    context_->vector->copy(rows.data, rows.pitch * bytes, src.data(), src.row_stride * bytes, rows.rows,
                           rows.cols * bytes, /*stream=*/false);
  } else {
    context_->vector->cast(rows, slot.dtype, {src.data(), src.row_stride, rows.rows, rows.cols}, src.dtype(),
                           /*stream=*/false);
  }
}

bool HostVector::CopyShownRow(std::span<const Gm> dsts, const TileRef& src) {
  if (src.slot->role != Role::kRelay || src.rows() != 1 || src.cols() == 1) return false;
  std::array<void*, HostVectorCore::kMaxSummands> to;
  for (std::size_t i = 0; i < dsts.size(); ++i) {
    const Gm& dst = dsts[i];
    if (!dst.tensor->stream || dst.col_stride != 1 || dst.dtype() != src.dtype()) return false;
    to[i] = dst.data();
  }
  const void* const row = RowsOf(src).data;
  const std::int64_t bytes = src.cols() * SizeOf(src.dtype());
  context_->movement->copy_rows(to.data(), static_cast<std::int64_t>(dsts.size()), row, bytes,
                                TakeShown(bytes, row));
  return true;
}

void HostVector::StoreUb(const Gm& dst, const TileRef& src, Loc) {
  if (src.slot->destination.tensor != nullptr && RowsOf(src).data == dst.data()) return;  // See OutputRowsOf.
  if (CopyShownRow({&dst, 1}, src)) return;
  StoreRows(*context_->vector, dst, RowsOf(src), src.dtype());
}

void HostVector::StoreEach(std::span<const Gm> dsts, const TileRef& src, Loc loc) {
  if (CopyShownRow(dsts, src)) return;
  for (const Gm& dst : dsts) StoreUb(dst, src, loc);
}

void HostVector::Fill(const TileRef& x, float value, Loc) {
  context_->vector->fill(WritableRowsOf(x), value);
}

namespace {

template <class To, class From, class F>
void Transform(const TileRef& dst, const TileRef& a, F f) {
  for (std::int64_t i = 0; i < dst.rows(); ++i) {
    const From* in = RowAt<From>(a, i);
    std::transform(in, in + a.cols(), RowAt<To>(dst, i), f);
  }
}

}  // namespace

void HostVector::Cast(const TileRef& dst, const TileRef& a, Loc) {
  switch (a.dtype()) {
    case DType::kI32:
      return Transform<float, std::int32_t>(dst, a, [](std::int32_t v) { return static_cast<float>(v); });
    case DType::kI64:
      return Transform<std::int32_t, std::int64_t>(
          dst, a, [](std::int64_t v) { return static_cast<std::int32_t>(v); });
    case DType::kBool:
      if (dst.dtype() == DType::kI32) {
        return Transform<std::int32_t, std::uint8_t>(dst, a, [](std::uint8_t v) { return v != 0 ? 1 : 0; });
      }
      return Transform<float, std::uint8_t>(dst, a, [](std::uint8_t v) { return v != 0 ? 1.0f : 0.0f; });
    default:
      if (dst.dtype() == DType::kI32)  // Whole numbers.
        return Transform<std::int32_t, float>(dst, a, [](float v) { return static_cast<std::int32_t>(v); });
      return context_->vector->cast(WritableRowsOf(dst), dst.dtype(), RowsOf(a), a.dtype(),
                                    /*stream=*/false);
  }
}

void HostVector::Scalar(ScalarOp op, const TileRef& dst, const TileRef& a, float value, Loc) {
  context_->vector->scalar(op, WritableRowsOf(dst), RowsOf(a), value);
}
void HostVector::Binary(BinaryOp op, const TileRef& dst, const TileRef& a, const TileRef& b, Loc) {
  Rows second = RowsOf(b);
  if (b.rows() == 1 && a.rows() > 1) second.pitch = 0, second.rows = a.rows();  // One row for all.
  const Rows first = RowsOf(a);
  context_->vector->binary(op, OwnRowsOf(*context_, dst), first, second);
}
void HostVector::Unary(UnaryOp op, const TileRef& dst, const TileRef& a, Loc) {
  context_->vector->unary(op, WritableRowsOf(dst), RowsOf(a));
}
void HostVector::Reduce(ReduceOp op, const TileRef& dst, const TileRef& a, Loc) {
  context_->vector->reduce(op, WritableRowsOf(dst), RowsOf(a));
}
// Squares of one cache line's columns: each line of either tile is fetched once.
void HostVector::Transpose(const TileRef& dst, const TileRef& a, Loc) {
  constexpr std::int64_t kSquare = 16;
  const Rows to = WritableRowsOf(dst), from = RowsOf(a);
  auto* const out = static_cast<float*>(to.data);
  const auto* const in = static_cast<const float*>(from.data);
  for (const Range i : Split(a.rows(), kSquare)) {
    for (const Range j : Split(a.cols(), kSquare)) {
      for (std::int64_t c = j.begin; c < j.end; ++c) {
        for (std::int64_t r = i.begin; r < i.end; ++r) out[c * to.pitch + r] = in[r * from.pitch + c];
      }
    }
  }
}

namespace {

template <class Word>
void UnzipRows(const Rows& to, const Rows& from, int first) {
  for (std::int64_t i = 0; i < to.rows; ++i) {
    Word* const out = static_cast<Word*>(to.data) + i * to.pitch;
    const Word* const in = static_cast<const Word*>(from.data) + i * from.pitch + first;
    for (std::int64_t j = 0; j < to.cols; ++j) out[j] = in[2 * j];
  }
}

}  // namespace

void HostVector::Unzip(const TileRef& dst, const TileRef& a, int first, Loc) {
  const Rows to = WritableRowsOf(dst), from = RowsOf(a);
  if (SizeOf(a.dtype()) == 2) return UnzipRows<std::uint16_t>(to, from, first);
  UnzipRows<std::uint32_t>(to, from, first);
}
void HostVector::Zip(const TileRef& dst, const TileRef& a, const TileRef& b, Loc) {
  for (std::int64_t i = 0; i < a.rows(); ++i) {
    float* const out = RowAt<float>(dst, i);
    const float *const even = RowAt<float>(a, i), *const odd = RowAt<float>(b, i);
    for (std::int64_t j = 0; j < a.cols(); ++j) out[2 * j] = even[j], out[2 * j + 1] = odd[j];
  }
}
void HostVector::MaskOutside(const TileRef& x, std::int64_t lowest, std::int64_t highest, float value, Loc) {
  context_->attention->mask_outside(WritableRowsOf(x), lowest, highest, value);
}

void HostVector::MaskWhere(const TileRef& x, const TileRef& flags, float value, Loc) {
  context_->attention->mask_where(x.dtype(), WritableRowsOf(x), RowsOf(flags), value);
}
void HostVector::Distances(const TileRef& x, std::int64_t first, Loc) {
  context_->attention->distances(WritableRowsOf(x), first);
}
void HostVector::DropFlags(const TileRef& flags, const DropoutStream& stream, std::int64_t row,
                           std::int64_t key, bool transposed, Loc) {
  const auto drop = transposed ? context_->attention->drop_flags_transposed : context_->attention->drop_flags;
  drop(WritableRowsOf(flags), stream, row, key);
}
void HostVector::AddAlibi(const TileRef& s, const TileRef&, float scale, float slope, std::int64_t first,
                          bool root, Loc) {
  context_->attention->add_alibi(WritableRowsOf(s), scale, slope, first, root);
}

namespace {

// `lost` is read for the last time while `dst` is written, which stands in its place where the two are alike: one tile less in
// the caches. Narrower elements would lie over some that a row with NaN reads twice. Returns where `lost` is read.
Rows TakePlace(const HostContext& context, const TileRef& dst, const TileRef& lost) {
  const Rows from = WritableRowsOf(lost);
  if (dst.dtype() == lost.dtype() && Alike(dst, lost)) {
    std::swap(dst.slot->storage, lost.slot->storage);
    ShowOwn(context, *lost.slot);
  }
  ShowOwn(context, *dst.slot);
  return from;
}

}  // namespace

void HostVector::SoftmaxStep(const TileRef& p, const TileRef& s, const TileRef& m_new, const TileRef& m_old,
                             const TileRef& l, float scale, Loc) {
  const Rows scores = TakePlace(*context_, p, s);
  context_->vector->softmax_step(RowsOf(p), p.dtype(), scores, RowsOf(m_new), RowsOf(m_old), RowsOf(l),
                                 scale);
  context_->Release(s);
}

namespace {

// An operand that may not be given: null data then.
Rows RowsIfGiven(const TileRef& tile) { return tile.given() ? RowsOf(tile) : Rows(); }

}  // namespace

void HostVector::RowDot(const TileRef& sum, const TileRef&, const TileRef&, const TileRef& a,
                        const TileRef& b, const TileRef& weights, Loc) {
  context_->norm->row_dot(WritableRowsOf(sum), a.dtype(), RowsOf(a), RowsOf(b), RowsIfGiven(weights));
}

void HostVector::ScaleRows(const TileRef& dst, const TileRef&, const TileRef& a, const TileRef& factor,
                           const TileRef& weights, Loc) {
  context_->norm->scale_rows(dst.dtype(), OutputRowsOf(*context_, dst), RowsOf(a), RowsOf(factor),
                             RowsOf(weights));
}

void HostVector::NormRows(const NormRefs& t, float scale, float eps, Loc) {
  context_->norm->norm_rows(t.x.dtype(),
                            {OutputRowsOf(*context_, t.out), WritableRowsOf(t.rstd), RowsOf(t.x),
                             RowsOf(t.gamma), RowsIfGiven(t.residual),
                             t.sum.given() ? OutputRowsOf(*context_, t.sum) : Rows(), WritableRowsOf(t.s0)},
                            scale, eps);
}

namespace {

NormRowsGradRows GradRowsOf(HostContext& context, const NormGradRefs& t) {
  return {OutputRowsOf(context, t.d_x),
          t.d_gamma.given() ? WritableRowsOf(t.d_gamma) : Rows(),
          RowsOf(t.d_out),
          RowsOf(t.x),
          RowsOf(t.gamma),
          RowsOf(t.rstd),
          RowsIfGiven(t.more),
          RowsOf(t.shift)};
}

}  // namespace

void HostVector::NormRowsGrad(const NormGradRefs& t, float scale, Loc) {
  context_->norm->norm_rows_grad(t.x.dtype(), GradRowsOf(*context_, t), scale);
}

void HostVector::NormGrad(const NormGradRefs& t, Loc) {
  context_->norm->norm_grad(t.x.dtype(), GradRowsOf(*context_, t));
}

void HostVector::AddColumnDots(const TileRef& acc, const TileRef&, const TileRef&, const TileRef& a,
                               const TileRef& b, const TileRef& factor, Loc) {
  context_->norm->add_column_dots(WritableRowsOf(acc), a.dtype(), RowsOf(a), RowsOf(b), RowsOf(factor));
}

void HostVector::SwiGlu(const TileRef& out, const TileRef&, const TileRef&, const TileRef& gate,
                        const TileRef& up, const TileRef& probs, Loc) {
  context_->activation->swiglu(out.dtype(), OutputRowsOf(*context_, out), RowsOf(gate), RowsOf(up),
                               RowsIfGiven(probs));
}

void HostVector::SwiGluGrad(const SwiGluGradTiles& t, Loc) {
  context_->activation->swiglu_grad(t.gate.dtype(),
                                    {OutputRowsOf(*context_, t.d_gate), OutputRowsOf(*context_, t.d_up),
                                     t.d_probs.given() ? WritableRowsOf(t.d_probs) : Rows(), RowsOf(t.d_out),
                                     RowsOf(t.gate), RowsOf(t.up), RowsIfGiven(t.probs)});
}

void HostVector::AttentionGradStep(const TileRef& p, const TileRef& ds, const TileRef& s, const TileRef& dp,
                                   const TileRef& lse, const TileRef& delta, float scale, Loc) {
  const Rows scores = TakePlace(*context_, p, s), gradients = TakePlace(*context_, ds, dp);
  context_->attention_grad->step(RowsOf(p), RowsOf(ds), p.dtype(), scores, gradients, RowsOf(lse),
                                 RowsOf(delta), scale);
  context_->Release(s), context_->Release(dp);
}

// ---- Routing

void HostVector::SelectLe(const TileRef& dst, const TileRef& key, float limit, const TileRef& a,
                          const TileRef& b, Loc) {
  context_->routing->select_le(WritableRowsOf(dst), RowsOf(key), limit, RowsOf(a), RowsOf(b));
}
void HostVector::TopK(const TileRef& values, const TileRef& ids, const TileRef& a, Loc) {
  context_->routing->top_k(WritableRowsOf(values), WritableRowsOf(ids), RowsOf(a));
}
void HostVector::GroupTop(const TileRef& sums, const TileRef& a, std::int64_t count, Loc) {
  context_->routing->group_top(WritableRowsOf(sums), RowsOf(a), count);
}
void HostVector::Scores(ScoreFunction function, const TileRef& n, const TileRef&, const TileRef&,
                        const TileRef&, Loc) {
  const Rows logits = RowsOf(n);
  context_->activation->scores(function, OwnRowsOf(*context_, n), logits);
}
// A tile that shows GM goes on to while all of it is good.
void HostVector::Repair(const TileRef& x, const TileRef& bad, const TileRef&, const TileRef&, const TileRef&,
                        float limit, bool by_mean, Loc loc) {
  const Rows from = RowsOf(x);
  if (context_->routing->all_within(from, limit)) return Fill(bad, 0.0f, loc);
  const Rows to = OwnRowsOf(*context_, x);
  if (to.data != from.data) {
    context_->vector->copy(to.data, to.pitch * 4, from.data, from.pitch * 4, to.rows, to.cols * 4,
                           /*stream=*/false);
  }
  context_->routing->repair(to, WritableRowsOf(bad), limit, by_mean);
}

void HostVector::KeepGroups(const TileRef& a, const TileRef& ids, std::int64_t group_cols, Loc) {
  context_->routing->keep_groups(WritableRowsOf(a), RowsOf(ids), group_cols);
}

void HostVector::GroupedTopK(const GroupedTopKRefs& t, std::int64_t count, Loc) {
  context_->routing->grouped_top_k(
      {WritableRowsOf(t.values), WritableRowsOf(t.ids), RowsOf(t.a), RowsIfGiven(t.bias),
       WritableRowsOf(t.choice), WritableRowsOf(t.worths), WritableRowsOf(t.best), WritableRowsOf(t.kept)},
      count);
}

void HostVector::Gather(const TileRef& dst, const TileRef& a, const TileRef& ids, Loc) {
  if (dst.rows() == 1 && a.rows() > 1) {  // All of a, row by row.
    const auto* at = RowAt<std::int32_t>(ids, 0);
    for (std::int64_t j = 0; j < dst.cols(); ++j)
      RowAt<float>(dst, 0)[j] = at[j] < 0 ? 0.0f : RowAt<float>(a, at[j] / a.cols())[at[j] % a.cols()];
    return;
  }
  for (std::int64_t i = 0; i < dst.rows(); ++i) {
    const auto* at = RowAt<std::int32_t>(ids, i);
    const auto* from = RowAt<float>(a, i);
    float* to = RowAt<float>(dst, i);
    for (std::int64_t j = 0; j < dst.cols(); ++j) to[j] = at[j] < 0 ? 0.0f : from[at[j]];
  }
}

void HostVector::Scatter(const TileRef& dst, const TileRef& ids, const TileRef& values, Loc) {
  for (std::int64_t i = 0; i < ids.rows(); ++i) {
    const auto* at = RowAt<std::int32_t>(ids, i);
    const auto* from = RowAt<float>(values, i);
    for (std::int64_t j = 0; j < ids.cols(); ++j) {
      // Negative columns are beyond any tile's, as unsigned numbers.
      if (static_cast<std::uint32_t>(at[j]) < static_cast<std::uint64_t>(dst.cols()))
        RowAt<float>(dst, i)[at[j]] = from[j];
    }
  }
}

void HostVector::Random(const TileRef& u, const RandomStream& stream, std::int64_t first,
                        std::int64_t row_step, Loc) {
  for (std::int64_t i = 0; i < u.rows(); ++i) {
    PhiloxBlock block{};
    for (std::int64_t j = 0; j < u.cols(); ++j) {
      const auto element = static_cast<std::uint64_t>(first + i * row_step + j);
      if (j == 0 || element % 4 == 0) block = Philox(stream, element / 4);
      RowAt<float>(u, i)[j] = UniformOf(block[element % 4]);
    }
  }
}

void HostVector::DropRoutes(const TileRef& ids, const TileRef& weights, const TileRef& u, float rate, Loc) {
  for (std::int64_t i = 0; i < ids.rows(); ++i) {
    for (std::int64_t j = 0; j < ids.cols(); ++j) {
      if (RowAt<float>(u, i)[j] < rate) RowAt<std::int32_t>(ids, i)[j] = -1, RowAt<float>(weights, i)[j] = 0;
    }
  }
}

void HostVector::MapRoutes(const TileRef& out, const TileRef& ids, const TileRef& scores,
                           const TileRef& d_weights, const RouteFunction& function, Loc) {
  const auto count = static_cast<std::size_t>(out.cols());
  std::vector<float> inputs(2 * count), results(count);
  const std::span<float> n(inputs.data(), count), d(inputs.data() + count, d_weights.given() ? count : 0);
  for (std::int64_t i = 0; i < out.rows(); ++i) {
    const std::span<const std::int32_t> experts(RowAt<std::int32_t>(ids, i), count);
    const auto kept = [&](const TileRef& tile, std::size_t j) {
      return experts[j] < 0 ? 0.0f : RowAt<float>(tile, i)[j];
    };
    for (std::size_t j = 0; j < count; ++j) n[j] = kept(scores, j);
    for (std::size_t j = 0; j < d.size(); ++j) d[j] = kept(d_weights, j);
    function(experts, n, d, results);
    for (std::size_t j = 0; j < count; ++j) RowAt<float>(out, i)[j] = experts[j] < 0 ? 0.0f : results[j];
  }
}

void HostVector::MulAdd(const TileRef& acc, const TileRef& factor, const TileRef& x, Loc) {
  context_->vector->mul_add(WritableRowsOf(acc), RowsOf(factor), RowsOf(x));
}

void HostVector::WeightedSum(const TileRef& acc, const TileRef&, std::span<const TileRef> rows,
                             std::span<const float> weights, Accumulate accumulate, Loc) {
  using Sources = std::array<const void*, kMostShown>;
  static_assert(kMostShown >= HostVectorCore::kMaxSummands);
  Sources sources, upcoming;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    sources[i] = RowsOf(rows[i]).data;
    Use(sources[i]);
  }
  const std::size_t shown = shown_count();
  for (std::size_t i = 0; i < shown; ++i) upcoming[i] = shown_[shown_begin_ + i].data;
  const WeightedRows weighted{.dtype = rows.empty() ? DType::kF32 : rows[0].dtype(),
                              .rows = sources.data(),
                              .weights = weights.data(),
                              .count = static_cast<std::int64_t>(rows.size()),
                              .upcoming = upcoming.data(),
                              .upcoming_count = static_cast<std::int64_t>(shown)};
  const bool accumulates = accumulate == Accumulate::kYes;
  if (!accumulates) ShowOwn(*context_, *acc.slot);
  auto* const sum = reinterpret_cast<float*>(At(acc, 4));
  const Gm& to = acc.slot->destination;
  const bool streams = !accumulates && to.tensor != nullptr && to.data() != nullptr && to.tensor->stream &&
                       to.col_stride == 1 && to.dtype() == weighted.dtype && Whole(acc);
  if (!streams) return context_->movement->weighted_sum(sum, acc.cols(), weighted, accumulates);
  // Straight to where the sum goes, which writes while it reads.
  context_->movement->stream_weighted_sum(to.data(), sum, acc.cols(), weighted);
  acc.slot->shows.data = to.data();
}

void HostVector::StoreActivated(const Gm& dst, const EpilogueRefs& t, const EpilogueScalars& e, Loc) {
  const float* bias = t.bias.given() ? static_cast<const float*>(RowsOf(t.bias).data) : nullptr;
  StoreEpilogue(*context_, dst, {RowsOf(t.x), bias, RowsIfGiven(t.residual)}, e);
}

void HostVector::AddDot(const TileRef& sum, const TileRef&, const TileRef& x, const TileRef& row, Loc) {
  const void* const data = RowsOf(row).data;
  Use(data);
  *reinterpret_cast<float*>(At(sum, 4)) +=
      context_->movement->dot(reinterpret_cast<const float*>(At(x, 4)), data, row.dtype(), x.cols());
}

void HostVector::StoreScaledDots(const TileRef& wide, const TileRef& s0, const TileRef&, const TileRef& x,
                                 bool, std::span<const ScaledDotRef> dots, Loc loc) {
  if (dots.empty()) return;
  using Sources = std::array<const void*, HostVectorCore::kMaxSummands>;
  Sources rows{}, upcoming;
  std::array<void*, HostVectorCore::kMaxSummands> out{};
  std::array<float, HostVectorCore::kMaxSummands> weights{}, sums{};
  const auto goes_directly = [&](const ScaledDotRef& d) {
    return d.dst.col_stride == 1 && d.dst.dtype() == x.dtype();
  };
  const void* const data = RowsOf(x).data;
  bool stream = true;
  Use(data);
  for (std::size_t i = 0; i < dots.size(); ++i) {
    const ScaledDotRef& d = dots[i];
    weights[i] = d.weight;
    if (d.dst.tensor != nullptr && goes_directly(d)) {
      out[i] = d.dst.data();
      stream = stream && d.dst.tensor->stream;
    }
    if (!d.row.given()) continue;
    rows[i] = RowsOf(d.row).data;
    Use(rows[i]);
  }
  const std::size_t shown = std::min(shown_count(), upcoming.size());
  for (std::size_t i = 0; i < shown; ++i) upcoming[i] = shown_[shown_begin_ + i].data;
  const WeightedRows weighted{.dtype = x.dtype(),
                              .rows = rows.data(),
                              .weights = weights.data(),
                              .count = static_cast<std::int64_t>(dots.size()),
                              .upcoming = upcoming.data(),
                              .upcoming_count = static_cast<std::int64_t>(shown)};
  context_->movement->scale_dots(out.data(), sums.data(), data, x.cols(), weighted, stream);
  for (std::size_t i = 0; i < dots.size(); ++i) {
    const ScaledDotRef& d = dots[i];
    if (d.row.given()) *reinterpret_cast<float*>(At(d.sum, 4)) += sums[i];
    if (d.dst.tensor == nullptr || goes_directly(d)) continue;
    if (x.dtype() != DType::kF32) Cast(wide, x, loc);
    Scalar(ScalarOp::kMul, s0, x.dtype() == DType::kF32 ? x : wide, d.weight, loc);
    StoreUb(d.dst, s0, loc);
  }
}

namespace {

// visit(place, row, column) for every place in [0, limit).
template <class Visit>
void ForEachPlaceWithin(const TileRef& places, std::int64_t limit, Visit visit) {
  for (std::int64_t i = 0; i < places.rows(); ++i) {
    const std::int32_t* row = Ints(places) + i * places.slot->shows.pitch;
    for (std::int64_t j = 0; j < places.cols(); ++j) {
      if (row[j] >= 0 && row[j] < limit) visit(std::int64_t{row[j]}, i, j);
    }
  }
}

}  // namespace

void HostVector::Gather(const TileRef& dst, const Gm& column, const TileRef& places, const TileRef&,
                        Loc loc) {
  Fill(dst, 0.0f, loc);
  auto* out = reinterpret_cast<float*>(At(dst, 4));
  const std::int64_t pitch = dst.slot->shows.pitch;
  ForEachPlaceWithin(places, column.rows, [&](std::int64_t place, std::int64_t i, std::int64_t j) {
    out[i * pitch + j] = LoadFloat(column.data(), column.dtype(), place * column.row_stride);
  });
}

void HostVector::Scatter(const Gm& column, const TileRef& places, const TileRef& src, const TileRef&, Loc) {
  const std::int64_t pitch = src.slot->shows.pitch;
  if (column.dtype() == DType::kI32) {
    auto* out = reinterpret_cast<std::int32_t*>(column.data());
    ForEachPlaceWithin(places, column.rows, [&](std::int64_t place, std::int64_t i, std::int64_t j) {
      out[place * column.row_stride] = Ints(src)[i * pitch + j];
    });
    return;
  }
  const auto* values = reinterpret_cast<const float*>(At(src, 4));
  ForEachPlaceWithin(places, column.rows, [&](std::int64_t place, std::int64_t i, std::int64_t j) {
    StoreFloat(column.data(), column.dtype(), place * column.row_stride, values[i * pitch + j]);
  });
}

}  // namespace cubist
