#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
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

void HostVector::LoadUb(TileRef dst, const Gm& src, Loc) {
  Slot& slot = *dst.slot;
  const std::int64_t bytes = SizeOf(src.dtype());
  if (slot.role == Role::kRelay && src.col_stride == 1 && src.dtype() == slot.dtype && Whole(dst)) {
    slot.shows = {.data = src.data(), .pitch = src.row_stride};
    if (dst.rows() == 1) Show(src.data(), dst.cols() * bytes);
    return;
  }
  slot.shows = OwnLayout(*context_, slot);
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

void HostVector::StoreUb(const Gm& dst, TileRef src, Loc) {
  const std::int64_t bytes = src.cols() * SizeOf(src.dtype());
  if (src.slot->destination.tensor != nullptr && RowsOf(src).data == dst.data()) return;  // See OutputRowsOf.
  if (src.slot->role == Role::kRelay && src.rows() == 1 && src.cols() > 1 && dst.tensor->stream &&
      dst.col_stride == 1 && dst.dtype() == src.dtype()) {
    const void* const row = RowsOf(src).data;
    if (const void* next = TakeShown(bytes, row))
      return context_->movement->copy_row(dst.data(), row, bytes, next);
  }
  StoreRows(*context_->vector, dst, RowsOf(src), src.dtype());
}

void HostVector::Fill(TileRef x, float value, Loc) { context_->vector->fill(WritableRowsOf(x), value); }

namespace {

template <class To, class From, class F>
void Transform(const TileRef& dst, const TileRef& a, F f) {
  for (std::int64_t i = 0; i < dst.rows(); ++i) {
    const From* in = RowAt<From>(a, i);
    std::transform(in, in + a.cols(), RowAt<To>(dst, i), f);
  }
}

}  // namespace

void HostVector::Cast(TileRef dst, TileRef a, Loc) {
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
      return context_->vector->cast(WritableRowsOf(dst), dst.dtype(), RowsOf(a), a.dtype(),
                                    /*stream=*/false);
  }
}

void HostVector::Scalar(ScalarOp op, TileRef dst, TileRef a, float value, Loc) {
  context_->vector->scalar(op, WritableRowsOf(dst), RowsOf(a), value);
}
void HostVector::Binary(BinaryOp op, TileRef dst, TileRef a, TileRef b, Loc) {
  Rows second = RowsOf(b);
  if (b.rows() == 1 && a.rows() > 1) second.pitch = 0, second.rows = a.rows();  // One row for all.
  context_->vector->binary(op, WritableRowsOf(dst), RowsOf(a), second);
}
void HostVector::Unary(UnaryOp op, TileRef dst, TileRef a, Loc) {
  context_->vector->unary(op, WritableRowsOf(dst), RowsOf(a));
}
void HostVector::Reduce(ReduceOp op, TileRef dst, TileRef a, Loc) {
  context_->vector->reduce(op, WritableRowsOf(dst), RowsOf(a));
}
// Squares of one cache line's columns: each line of either tile is fetched once.
void HostVector::Transpose(TileRef dst, TileRef a, Loc) {
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
void HostVector::MaskOutside(TileRef x, std::int64_t lowest, std::int64_t highest, float value, Loc) {
  context_->attention->mask_outside(WritableRowsOf(x), lowest, highest, value);
}

void HostVector::MaskWhere(TileRef x, TileRef flags, float value, Loc) {
  context_->attention->mask_where(x.dtype(), WritableRowsOf(x), RowsOf(flags), value);
}
void HostVector::Distances(TileRef x, std::int64_t first, Loc) {
  context_->attention->distances(WritableRowsOf(x), first);
}
void HostVector::DropFlags(TileRef flags, const DropoutStream& stream, std::int64_t row, std::int64_t key,
                           bool transposed, Loc) {
  const auto drop = transposed ? context_->attention->drop_flags_transposed : context_->attention->drop_flags;
  drop(WritableRowsOf(flags), stream, row, key);
}
void HostVector::AddAlibi(TileRef s, TileRef, float scale, float slope, std::int64_t first, bool root, Loc) {
  context_->attention->add_alibi(WritableRowsOf(s), scale, slope, first, root);
}

namespace {

// One row, where the rows of all the tiles follow one another.
template <class... Tiles>
bool InOneRow(const TileRef& tile, const Tiles&... tiles) {
  const auto joined = [&](const TileRef& t) {
    return t.slot->shows.pitch == tile.cols() && t.cols() == tile.cols();
  };
  return joined(tile) && (joined(tiles) && ...);
}

// Wraps, as a device does: too large a sum is the kernel's mistake, and none of the language's.
std::int32_t Sum(std::int32_t a, std::int32_t b) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(a) + static_cast<std::uint32_t>(b));
}

}  // namespace

void HostVector::FillInt(TileRef x, std::int32_t value, Loc) {
  if (InOneRow(x)) {
    std::fill_n(Ints(x), x.rows() * x.cols(), value);
    return;
  }
  for (std::int64_t i = 0; i < x.rows(); ++i) std::fill_n(Ints(x) + i * x.slot->shows.pitch, x.cols(), value);
}

void HostVector::AddInt(TileRef dst, TileRef a, TileRef b, Loc) {
  for (std::int64_t i = 0; i < dst.rows(); ++i) {
    auto* out = Ints(dst) + i * dst.slot->shows.pitch;
    const auto* left = Ints(a) + i * a.slot->shows.pitch;
    const auto* right = Ints(b) + i * b.slot->shows.pitch;
    for (std::int64_t j = 0; j < dst.cols(); ++j) out[j] = Sum(left[j], right[j]);
  }
}

void HostVector::ColumnSum(TileRef dst, TileRef a, Loc) {
  std::int32_t* sum = Ints(dst);
  std::fill_n(sum, dst.cols(), 0);
  for (std::int64_t i = 0; i < a.rows(); ++i) {
    const auto* row = Ints(a) + i * a.slot->shows.pitch;
    for (std::int64_t j = 0; j < dst.cols(); ++j) sum[j] = Sum(sum[j], row[j]);
  }
}

void HostVector::ExclusiveScan(TileRef dst, TileRef a, std::int32_t initial, Loc) {
  std::int32_t sum = initial;
  for (std::int64_t j = 0; j < a.cols(); ++j) {
    Ints(dst)[j] = sum;
    sum = Sum(sum, Ints(a)[j]);
  }
  Ints(dst)[a.cols()] = sum;
}

void HostVector::AddScalarInt(TileRef dst, TileRef a, std::int32_t value, Loc) {
  for (std::int64_t i = 0; i < dst.rows(); ++i) {
    auto* out = Ints(dst) + i * dst.slot->shows.pitch;
    const auto* in = Ints(a) + i * a.slot->shows.pitch;
    for (std::int64_t j = 0; j < dst.cols(); ++j) out[j] = Sum(in[j], value);
  }
}

void HostVector::CopyElement(TileRef dst, TileRef src, Loc) { *Ints(dst) = *Ints(src); }

void HostVector::SoftmaxStep(TileRef p, TileRef s, TileRef m_new, TileRef m_old, TileRef l, float scale,
                             Loc) {
  p.slot->shows = OwnLayout(*context_, *p.slot);
  context_->vector->softmax_step(RowsOf(p), p.dtype(), WritableRowsOf(s), RowsOf(m_new), RowsOf(m_old),
                                 RowsOf(l), scale);
  context_->Release(s);
}

namespace {

// An operand that may not be given: null data then.
Rows RowsIfGiven(const TileRef& tile) { return tile.given() ? RowsOf(tile) : Rows(); }

}  // namespace

void HostVector::RowDot(TileRef sum, TileRef, TileRef, TileRef a, TileRef b, TileRef weights, Loc) {
  context_->activation->row_dot(WritableRowsOf(sum), a.dtype(), RowsOf(a), RowsOf(b), RowsIfGiven(weights));
}

void HostVector::ScaleRows(TileRef dst, TileRef, TileRef a, TileRef factor, TileRef weights, Loc) {
  context_->activation->scale_rows(dst.dtype(), OutputRowsOf(*context_, dst), RowsOf(a), RowsOf(factor),
                                   RowsOf(weights));
}

void HostVector::NormRows(TileRef dst, TileRef factor, TileRef, TileRef, TileRef, TileRef a, TileRef weights,
                          float scale, float eps, Loc) {
  context_->activation->norm_rows(dst.dtype(), OutputRowsOf(*context_, dst), WritableRowsOf(factor),
                                  RowsOf(a), RowsOf(weights), scale, eps);
}

void HostVector::NormGrad(TileRef dx, TileRef, TileRef, TileRef dy, TileRef x, TileRef weights,
                          TileRef factor, TileRef shift, TileRef more, Loc) {
  context_->activation->norm_grad(dx.dtype(), OutputRowsOf(*context_, dx), RowsOf(dy), RowsOf(x),
                                  RowsOf(weights), RowsOf(factor), RowsOf(shift), RowsIfGiven(more));
}

void HostVector::AddColumnDots(TileRef acc, TileRef, TileRef, TileRef a, TileRef b, TileRef factor, Loc) {
  context_->activation->add_column_dots(WritableRowsOf(acc), a.dtype(), RowsOf(a), RowsOf(b), RowsOf(factor));
}

void HostVector::SwiGlu(TileRef out, TileRef, TileRef, TileRef gate, TileRef up, TileRef probs, Loc) {
  context_->activation->swiglu(out.dtype(), OutputRowsOf(*context_, out), RowsOf(gate), RowsOf(up),
                               RowsIfGiven(probs));
}

void HostVector::SwiGluGrad(const SwiGluGradTiles& t, Loc) {
  context_->activation->swiglu_grad(
      t.gate.dtype(),
      {OutputRowsOf(*context_, t.d_gate), OutputRowsOf(*context_, t.d_up), WritableRowsOf(t.d_probs),
       RowsOf(t.d_out), RowsOf(t.gate), RowsOf(t.up), RowsOf(t.probs)});
}

void HostVector::AttentionGradStep(TileRef p, TileRef ds, TileRef s, TileRef dp, TileRef lse, TileRef delta,
                                   float scale, Loc) {
  p.slot->shows = OwnLayout(*context_, *p.slot);
  ds.slot->shows = OwnLayout(*context_, *ds.slot);
  context_->attention_grad->step(RowsOf(p), RowsOf(ds), p.dtype(), WritableRowsOf(s), WritableRowsOf(dp),
                                 RowsOf(lse), RowsOf(delta), scale);
  context_->Release(s), context_->Release(dp);
}

// ---- Routing

void HostVector::SelectLe(TileRef dst, TileRef key, float limit, TileRef a, TileRef b, Loc) {
  context_->routing->select_le(WritableRowsOf(dst), RowsOf(key), limit, RowsOf(a), RowsOf(b));
}
void HostVector::TopK(TileRef values, TileRef ids, TileRef a, Loc) {
  context_->routing->top_k(WritableRowsOf(values), WritableRowsOf(ids), RowsOf(a));
}
void HostVector::GroupTop(TileRef sums, TileRef a, std::int64_t count, Loc) {
  context_->routing->group_top(WritableRowsOf(sums), RowsOf(a), count);
}
void HostVector::Scores(ScoreFunction function, TileRef n, TileRef, TileRef, TileRef, Loc) {
  context_->activation->scores(function, WritableRowsOf(n));
}
void HostVector::Repair(TileRef x, TileRef bad, TileRef, TileRef, TileRef, float limit, bool by_mean, Loc) {
  context_->routing->repair(WritableRowsOf(x), WritableRowsOf(bad), limit, by_mean);
}

void HostVector::KeepGroups(TileRef a, TileRef ids, std::int64_t group_cols, Loc) {
  context_->routing->keep_groups(WritableRowsOf(a), RowsOf(ids), group_cols);
}

void HostVector::Gather(TileRef dst, TileRef a, TileRef ids, Loc) {
  for (std::int64_t i = 0; i < dst.rows(); ++i) {
    const auto* at = RowAt<std::int32_t>(ids, i);
    const auto* from = RowAt<float>(a, i);
    float* to = RowAt<float>(dst, i);
    for (std::int64_t j = 0; j < dst.cols(); ++j) to[j] = at[j] < 0 ? 0.0f : from[at[j]];
  }
}

void HostVector::Scatter(TileRef dst, TileRef ids, TileRef values, Loc) {
  for (std::int64_t i = 0; i < ids.rows(); ++i) {
    const auto* at = RowAt<std::int32_t>(ids, i);
    const auto* from = RowAt<float>(values, i);
    for (std::int64_t j = 0; j < ids.cols(); ++j) {
      if (at[j] >= 0) RowAt<float>(dst, i)[at[j]] = from[j];
    }
  }
}

void HostVector::Random(TileRef u, const RandomStream& stream, std::int64_t first, std::int64_t row_step,
                        Loc) {
  for (std::int64_t i = 0; i < u.rows(); ++i) {
    PhiloxBlock block{};
    for (std::int64_t j = 0; j < u.cols(); ++j) {
      const auto element = static_cast<std::uint64_t>(first + i * row_step + j);
      if (j == 0 || element % 4 == 0) block = Philox(stream, element / 4);
      RowAt<float>(u, i)[j] = UniformOf(block[element % 4]);
    }
  }
}

void HostVector::DropRoutes(TileRef ids, TileRef weights, TileRef u, float rate, Loc) {
  for (std::int64_t i = 0; i < ids.rows(); ++i) {
    for (std::int64_t j = 0; j < ids.cols(); ++j) {
      if (RowAt<float>(u, i)[j] < rate) RowAt<std::int32_t>(ids, i)[j] = -1, RowAt<float>(weights, i)[j] = 0;
    }
  }
}

void HostVector::MapRoutes(TileRef out, TileRef ids, TileRef scores, TileRef d_weights,
                           const RouteFunction& function, Loc) {
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

void HostVector::MulAdd(TileRef acc, TileRef factor, TileRef x, Loc) {
  context_->vector->mul_add(WritableRowsOf(acc), RowsOf(factor), RowsOf(x));
}

void HostVector::WeightedSum(TileRef acc, TileRef, std::span<const TileRef> rows,
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
  if (!accumulates) acc.slot->shows = OwnLayout(*context_, *acc.slot);
  auto* const sum = reinterpret_cast<float*>(At(acc, 4));
  const Gm& to = acc.slot->destination;
  const bool streams = !accumulates && to.tensor != nullptr && to.data() != nullptr && to.tensor->stream &&
                       to.col_stride == 1 && to.dtype() == weighted.dtype && Whole(acc);
  if (!streams) return context_->movement->weighted_sum(sum, acc.cols(), weighted, accumulates);
  // Straight to where the sum goes, which writes while it reads.
  context_->movement->stream_weighted_sum(to.data(), sum, acc.cols(), weighted);
  acc.slot->shows.data = to.data();
}

namespace {

// visit(bin, row, column) for every id, row by row, or as one row; the bin is -1 where it is not one of `count`.
template <class BinOf, class Visit>
void ForEachId(const TileRef& ids, BinOf bin_of, std::int64_t count, bool in_one_row, Visit visit) {
  const std::int64_t rows = in_one_row ? 1 : ids.rows(),
                     cols = in_one_row ? ids.rows() * ids.cols() : ids.cols();
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int32_t* row = Ints(ids) + i * ids.slot->shows.pitch;
#pragma GCC unroll 4
    for (std::int64_t j = 0; j < cols; ++j) {
      const std::int64_t bin = bin_of(row[j]);
      visit(static_cast<std::uint64_t>(bin) < static_cast<std::uint64_t>(count) ? bin : -1, i, j);
    }
  }
}
template <class Visit>
void ForEachId(const TileRef& ids, const IdBins& bins, std::int64_t count, bool in_one_row, Visit visit) {
  if (bins.whole()) {
    const std::int64_t first = bins.first;
    return ForEachId(
        ids,
        [first](std::int32_t id) {
          return static_cast<std::int64_t>(static_cast<std::uint32_t>(id)) - first;
        },
        count, in_one_row, visit);
  }
  ForEachId(
      ids, [bins](std::int32_t id) { return bins.Of(id); }, count, in_one_row, visit);
}
// Likewise for those that have a bin.
template <class Visit>
void ForEachBin(const TileRef& ids, const IdBins& bins, std::int64_t count, bool in_one_row, Visit visit) {
  ForEachId(ids, bins, count, in_one_row, [&](std::int64_t bin, std::int64_t i, std::int64_t j) {
    if (bin >= 0) visit(bin, i, j);
  });
}

}  // namespace

void HostVector::Histogram(TileRef counts, TileRef ids, const IdBins& bins, Loc) {
  ForEachBin(ids, bins, counts.cols(), InOneRow(ids),
             [count = Ints(counts)](std::int64_t bin, std::int64_t, std::int64_t) { ++count[bin]; });
}

void HostVector::Rank(TileRef ranks, TileRef next, TileRef ids, const IdBins& bins, Loc) {
  ForEachId(ids, bins, next.cols(), InOneRow(ids, ranks),
            [at = Ints(next), rank = Ints(ranks), pitch = ranks.slot->shows.pitch](
                std::int64_t bin, std::int64_t i, std::int64_t j) {
              rank[i * pitch + j] = bin < 0 ? -1 : at[bin]++;
            });
}

void HostVector::RankWithin(TileRef ranks, TileRef next, TileRef limits, TileRef ids, const IdBins& bins,
                            Loc) {
  std::int32_t *at = Ints(next), *rank = Ints(ranks);
  const std::int32_t* limit = Ints(limits);
  const std::int64_t pitch = ranks.slot->shows.pitch;
  ForEachId(ids, bins, next.cols(), InOneRow(ids, ranks),
            [&](std::int64_t bin, std::int64_t i, std::int64_t j) {
              rank[i * pitch + j] = bin >= 0 && at[bin] < limit[bin] ? at[bin]++ : -1;
            });
}

namespace {

// The elements of a tile, row by row, from or to a vector.
template <class T>
std::vector<T> ElementsOf(const TileRef& tile) {
  std::vector<T> elements;
  for (std::int64_t i = 0; i < tile.rows(); ++i) {
    const T* const row = RowAt<T>(tile, i);
    elements.insert(elements.end(), row, row + tile.cols());
  }
  return elements;
}
template <class T>
void SetElements(const TileRef& tile, const std::vector<T>& elements) {
  auto next = elements.begin();
  for (std::int64_t i = 0; i < tile.rows(); ++i, next += tile.cols())
    std::copy_n(next, tile.cols(), RowAt<T>(tile, i));
}

// Each part of `count` keys in descending order, stable, with their values. Parts that are made of such are merged.
void SortParts(const TileRef& keys, const TileRef& values, const TileRef& from, const TileRef& values_from,
               std::int64_t count) {
  const auto key = ElementsOf<float>(from);
  const auto value = ElementsOf<std::int32_t>(values_from);
  std::vector<std::size_t> order(key.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (const Range part : Split(static_cast<std::int64_t>(order.size()), count)) {
    std::stable_sort(order.begin() + part.begin, order.begin() + part.end,
                     [&](std::size_t a, std::size_t b) { return key[a] > key[b]; });
  }
  std::vector<float> sorted_keys;
  std::vector<std::int32_t> sorted_values;
  for (const std::size_t i : order) sorted_keys.push_back(key[i]), sorted_values.push_back(value[i]);
  SetElements(keys, sorted_keys);
  SetElements(values, sorted_values);
}

}  // namespace

void HostVector::Sort32(TileRef keys, TileRef values, TileRef from, TileRef values_from, Loc) {
  SortParts(keys, values, from, values_from, 32);
}

void HostVector::MergeSort(TileRef keys, TileRef values, TileRef from, TileRef values_from, std::int64_t run,
                           Loc) {
  SortParts(keys, values, from, values_from, 4 * run);
}

void HostVector::RunOffsets(TileRef offsets, TileRef next, TileRef keys, Loc) {
  const auto sorted = ElementsOf<float>(keys);
  std::int32_t *const offset = Ints(offsets), *const at = Ints(next);
  for (std::size_t begin = 0, end = 0; begin < sorted.size(); begin = end) {
    while (end < sorted.size() && sorted[end] == sorted[begin]) ++end;
    const auto id = static_cast<std::int64_t>(-sorted[begin]);
    if (id < 0 || id >= next.cols()) continue;
    offset[id] = at[id] - static_cast<std::int32_t>(begin);
    at[id] += static_cast<std::int32_t>(end - begin);
  }
}

void HostVector::HistogramBySort(TileRef counts, TileRef ids, const SortRefs&, Loc loc) {
  Histogram(counts, ids, {}, loc);
}

void HostVector::RankBySort(TileRef ranks, TileRef next, TileRef ids, const SortRefs&, Loc loc) {
  Rank(ranks, next, ids, {}, loc);
}

void HostVector::RoundUp(TileRef dst, TileRef a, std::int32_t multiple, Loc) {
  for (std::int64_t j = 0; j < a.cols(); ++j) {
    Ints(dst)[j] = static_cast<std::int32_t>(cubist::RoundUp(std::int64_t{Ints(a)[j]}, multiple));
  }
}

void HostVector::TrueColumns(TileRef dst, TileRef flags, Loc) {
  for (std::int64_t i = 0; i < dst.rows(); ++i) {
    const std::int32_t* flag = RowAt<std::int32_t>(flags, i);
    std::int32_t* const columns = RowAt<std::int32_t>(dst, i);
    std::int64_t count = 0;
    for (std::int64_t j = 0; j < flags.cols() && count < dst.cols(); ++j) {
      columns[count] = static_cast<std::int32_t>(j);
      count += flag[j] != 0 ? 1 : 0;
    }
    std::fill(columns + count, columns + dst.cols(), -1);
  }
}

void HostVector::KeepWhere(TileRef dst, TileRef a, TileRef flags, Loc) {
  const std::int64_t step = flags.cols() == 1 ? 0 : 1;
  for (std::int64_t i = 0; i < dst.rows(); ++i) {
    const std::int32_t *flag = RowAt<std::int32_t>(flags, i), *from = RowAt<std::int32_t>(a, i);
    std::int32_t* const to = RowAt<std::int32_t>(dst, i);
    for (std::int64_t j = 0; j < dst.cols(); ++j) to[j] = flag[j * step] != 0 ? from[j] : -1;
  }
}

void HostVector::Lookup(TileRef dst, TileRef ids, TileRef table, std::int32_t first, Loc) {
  const std::int32_t* const entries = Ints(table);
  ForEachBin(ids, {.first = first}, table.cols(), InOneRow(ids, dst),
             [&](std::int64_t bin, std::int64_t i, std::int64_t j) {
               RowAt<std::int32_t>(dst, i)[j] = entries[bin];
             });
}

void HostVector::StoreActivated(const Gm& dst, const EpilogueRefs& t, const EpilogueScalars& e, Loc) {
  const float* bias = t.bias.given() ? static_cast<const float*>(RowsOf(t.bias).data) : nullptr;
  StoreEpilogue(*context_, dst, {RowsOf(t.x), bias, RowsIfGiven(t.residual)}, e);
}

void HostVector::AddDot(TileRef sum, TileRef, TileRef x, TileRef row, Loc) {
  const void* const data = RowsOf(row).data;
  Use(data);
  *reinterpret_cast<float*>(At(sum, 4)) +=
      context_->movement->dot(reinterpret_cast<const float*>(At(x, 4)), data, row.dtype(), x.cols());
}

void HostVector::StoreScaledDots(TileRef wide, TileRef s0, TileRef, TileRef x, bool,
                                 std::span<const ScaledDotRef> dots, Loc loc) {
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

void HostVector::Gather(TileRef dst, const Gm& column, TileRef places, TileRef, Loc loc) {
  Fill(dst, 0.0f, loc);
  auto* out = reinterpret_cast<float*>(At(dst, 4));
  const std::int64_t pitch = dst.slot->shows.pitch;
  ForEachPlaceWithin(places, column.rows, [&](std::int64_t place, std::int64_t i, std::int64_t j) {
    out[i * pitch + j] = LoadFloat(column.data(), column.dtype(), place * column.row_stride);
  });
}

void HostVector::Scatter(const Gm& column, TileRef places, TileRef src, TileRef, Loc) {
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
