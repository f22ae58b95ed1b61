// Instructions on integers: ids, counts and places, in plain loops.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "npu_model/host/host_core.h"
#include "npu_model/host/tile_layout-inl.h"

namespace cubist {

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

void HostVector::FillInt(const TileRef& x, std::int32_t value, Loc) {
  if (InOneRow(x)) {
    std::fill_n(Ints(x), x.rows() * x.cols(), value);
    return;
  }
  for (std::int64_t i = 0; i < x.rows(); ++i) std::fill_n(Ints(x) + i * x.slot->shows.pitch, x.cols(), value);
}

void HostVector::AddInt(const TileRef& dst, const TileRef& a, const TileRef& b, Loc) {
  for (std::int64_t i = 0; i < dst.rows(); ++i) {
    auto* out = Ints(dst) + i * dst.slot->shows.pitch;
    const auto* left = Ints(a) + i * a.slot->shows.pitch;
    const auto* right = Ints(b) + i * b.slot->shows.pitch;
    for (std::int64_t j = 0; j < dst.cols(); ++j) out[j] = Sum(left[j], right[j]);
  }
}

void HostVector::ColumnSum(const TileRef& dst, const TileRef& a, Loc) {
  std::int32_t* sum = Ints(dst);
  std::fill_n(sum, dst.cols(), 0);
  for (std::int64_t i = 0; i < a.rows(); ++i) {
    const auto* row = Ints(a) + i * a.slot->shows.pitch;
    for (std::int64_t j = 0; j < dst.cols(); ++j) sum[j] = Sum(sum[j], row[j]);
  }
}

// A strip of columns at a time, whose counts stay in registers for as many rows as a byte can count.
void HostVector::CountTrue(const TileRef& dst, const TileRef&, const TileRef& flags, Loc) {
  constexpr std::int64_t kColumns = 64, kRows = 255;
  std::int32_t* const count = Ints(dst);
  std::fill_n(count, dst.cols(), 0);
  for (const Range rows : Split(flags.rows(), kRows)) {
    for (const Range cols : Split(flags.cols(), kColumns)) {
      std::array<std::uint8_t, kColumns> some{};
      const auto add = [&](std::int64_t width) {
        for (std::int64_t i = rows.begin; i < rows.end; ++i) {
          const std::uint8_t* const row = RowAt<std::uint8_t>(flags, i) + cols.begin;
          for (std::int64_t j = 0; j < width; ++j) {
            std::uint8_t& column = some[static_cast<std::size_t>(j)];
            column = static_cast<std::uint8_t>(column + (row[j] != 0 ? 1 : 0));
          }
        }
      };
      cols.size() == kColumns ? add(kColumns) : add(cols.size());
      for (std::int64_t j = 0; j < cols.size(); ++j)
        count[cols.begin + j] += some[static_cast<std::size_t>(j)];
    }
  }
}

void HostVector::ExclusiveScan(const TileRef& dst, const TileRef& a, std::int32_t initial, Loc) {
  std::int32_t sum = initial;
  for (std::int64_t j = 0; j < a.cols(); ++j) {
    Ints(dst)[j] = sum;
    sum = Sum(sum, Ints(a)[j]);
  }
  Ints(dst)[a.cols()] = sum;
}

void HostVector::AddScalarInt(const TileRef& dst, const TileRef& a, std::int32_t value, Loc) {
  for (std::int64_t i = 0; i < dst.rows(); ++i) {
    auto* out = Ints(dst) + i * dst.slot->shows.pitch;
    const auto* in = Ints(a) + i * a.slot->shows.pitch;
    for (std::int64_t j = 0; j < dst.cols(); ++j) out[j] = Sum(in[j], value);
  }
}

void HostVector::CopyElement(const TileRef& dst, const TileRef& src, Loc) { *Ints(dst) = *Ints(src); }

namespace {

// visit(bin, row, column) for every id of one of `count` bins and rest(row, column) for every other, row by row, or as one row.
// Four ids at a time, which nearly always have bins: a test and a jump around each one would take as long as the rest.
template <class BinOf, class Visit, class Rest>
void ForEachId(const TileRef& ids, BinOf bin_of, std::int64_t count, bool in_one_row, Visit visit,
               Rest rest) {
  constexpr std::int64_t kTogether = 4;
  const std::int64_t rows = in_one_row ? 1 : ids.rows(),
                     cols = in_one_row ? ids.rows() * ids.cols() : ids.cols();
  const auto is_bin =
      [count](std::int64_t bin) {  // A negative one is beyond any count, as an unsigned number.
        return static_cast<std::uint64_t>(bin) < static_cast<std::uint64_t>(count);
      };
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int32_t* row = Ints(ids) + i * ids.slot->shows.pitch;
    const auto one = [&](std::int64_t j) {
      const std::int64_t bin = bin_of(row[j]);
      is_bin(bin) ? visit(bin, i, j) : rest(i, j);
    };
    std::int64_t j = 0;
    for (; j + kTogether <= cols; j += kTogether) {
      const std::int64_t bins[kTogether] = {bin_of(row[j]), bin_of(row[j + 1]), bin_of(row[j + 2]),
                                            bin_of(row[j + 3])};
      if (is_bin(bins[0]) && is_bin(bins[1]) && is_bin(bins[2]) && is_bin(bins[3])) [[likely]] {
#pragma GCC unroll 4
        for (std::int64_t n = 0; n < kTogether; ++n) visit(bins[n], i, j + n);
      } else {
        for (std::int64_t n = 0; n < kTogether; ++n) one(j + n);
      }
    }
    for (; j < cols; ++j) one(j);
  }
}
template <class Visit, class Rest>
void ForEachId(const TileRef& ids, const IdBins& bins, std::int64_t count, bool in_one_row, Visit visit,
               Rest rest) {
  if (bins.whole()) {
    const std::int64_t first = bins.first;
    return ForEachId(
        ids,
        [first](std::int32_t id) {
          return static_cast<std::int64_t>(static_cast<std::uint32_t>(id)) - first;
        },
        count, in_one_row, visit, rest);
  }
  ForEachId(
      ids, [bins](std::int32_t id) { return bins.Of(id); }, count, in_one_row, visit, rest);
}
// Of those that have a bin.
template <class Visit>
void ForEachBin(const TileRef& ids, const IdBins& bins, std::int64_t count, bool in_one_row, Visit visit) {
  ForEachId(ids, bins, count, in_one_row, visit, [](std::int64_t, std::int64_t) {});
}

}  // namespace

void HostVector::Histogram(const TileRef& counts, const TileRef& ids, const IdBins& bins, Loc) {
  ForEachBin(ids, bins, counts.cols(), InOneRow(ids),
             [count = Ints(counts)](std::int64_t bin, std::int64_t, std::int64_t) { ++count[bin]; });
}

void HostVector::Rank(const TileRef& ranks, const TileRef& next, const TileRef& ids, const IdBins& bins,
                      Loc) {
  const auto rank = [to = Ints(ranks), pitch = ranks.slot->shows.pitch](
                        std::int64_t i, std::int64_t j) -> std::int32_t& { return to[i * pitch + j]; };
  ForEachId(
      ids, bins, next.cols(), InOneRow(ids, ranks),
      [rank, at = Ints(next)](std::int64_t bin, std::int64_t i, std::int64_t j) { rank(i, j) = at[bin]++; },
      [rank](std::int64_t i, std::int64_t j) { rank(i, j) = -1; });
}

void HostVector::RankWithin(const TileRef& ranks, const TileRef& next, const TileRef& limits,
                            const TileRef& ids, const IdBins& bins, Loc) {
  std::int32_t *at = Ints(next), *rank = Ints(ranks);
  const std::int32_t* limit = Ints(limits);
  const std::int64_t pitch = ranks.slot->shows.pitch;
  ForEachId(
      ids, bins, next.cols(), InOneRow(ids, ranks),
      [&](std::int64_t bin, std::int64_t i, std::int64_t j) {
        rank[i * pitch + j] = at[bin] < limit[bin] ? at[bin]++ : -1;
      },
      [&](std::int64_t i, std::int64_t j) { rank[i * pitch + j] = -1; });
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

void HostVector::Sort32(const TileRef& keys, const TileRef& values, const TileRef& from,
                        const TileRef& values_from, Loc) {
  SortParts(keys, values, from, values_from, kSortedRun);
}

void HostVector::MergeSort(const TileRef& keys, const TileRef& values, const TileRef& from,
                           const TileRef& values_from, std::int64_t run, Loc) {
  SortParts(keys, values, from, values_from, kMergedRuns * run);
}

void HostVector::HistogramBySort(const TileRef& counts, const TileRef& ids, const SortRefs&, Loc loc) {
  Histogram(counts, ids, {}, loc);
}

void HostVector::RankBySort(const TileRef& ranks, const TileRef& next, const TileRef& ids, const SortRefs&,
                            Loc loc) {
  Rank(ranks, next, ids, {}, loc);
}

void HostVector::RoundUp(const TileRef& dst, const TileRef& a, std::int32_t multiple, Loc) {
  for (std::int64_t j = 0; j < a.cols(); ++j) {
    Ints(dst)[j] = static_cast<std::int32_t>(cubist::RoundUp(std::int64_t{Ints(a)[j]}, multiple));
  }
}

void HostVector::TrueColumns(const TileRef& dst, const TileRef& flags, Loc) {
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

void HostVector::KeepWhere(const TileRef& dst, const TileRef& a, const TileRef& flags, Loc) {
  const std::int64_t step = flags.cols() == 1 ? 0 : 1;
  for (std::int64_t i = 0; i < dst.rows(); ++i) {
    const std::int32_t *flag = RowAt<std::int32_t>(flags, i), *from = RowAt<std::int32_t>(a, i);
    std::int32_t* const to = RowAt<std::int32_t>(dst, i);
    for (std::int64_t j = 0; j < dst.cols(); ++j) to[j] = flag[j * step] != 0 ? from[j] : -1;
  }
}

void HostVector::Lookup(const TileRef& dst, const TileRef& ids, const TileRef& table, std::int32_t first,
                        Loc) {
  const std::int32_t* const entries = Ints(table);
  ForEachBin(ids, {.first = first}, table.cols(), InOneRow(ids, dst),
             [&](std::int64_t bin, std::int64_t i, std::int64_t j) {
               RowAt<std::int32_t>(dst, i)[j] = entries[bin];
             });
}

}  // namespace cubist
