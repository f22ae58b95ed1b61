// Root-mean-square norms, compiled once per Highway target.
#include "npu_model/host/norm_ops.h"

#include <cstdint>
#include <cstring>

#include "npu_model/host/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "npu_model/host/norm_ops.cc"  // NOLINT
#include "hwy/foreach_target.h"                          // IWYU pragma: keep
#include "npu_model/host/rows-inl.h"
#include "npu_model/host/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

// Four chains of sums, folded in one order.
HWY_INLINE float SumOf(const Vec (&chain)[kSideBySide]) {
  return hn::GetLane(
      hn::SumOfLanes(FloatTag(), hn::Add(hn::Add(chain[0], chain[1]), hn::Add(chain[2], chain[3]))));
}

// Sum of function(in[j]...) over j < n. The function of zeros is zero.
template <class Function, class... In>
HWY_INLINE float SumRow(Function function, std::int64_t n, const In*... in) {
  Vec chain[kSideBySide] = {Set(0.0f), Set(0.0f), Set(0.0f), Set(0.0f)};
  std::int64_t j = 0;
  const auto add = [&](const auto&... several) HWY_ATTR {
#pragma GCC unroll 4
    for (int c = 0; c < kSideBySide; ++c) chain[c] = function(chain[c], several.v[c]...);
  };
  for (; j + kSideBySide * kLanes <= n; j += kSideBySide * kLanes)
    add(LoadSeveral<kSideBySide, kOrderOf<Narrowing::kAny, In...>>(in + j)...);
  for (; j + kLanes <= n; j += kLanes) chain[0] = function(chain[0], Load(in + j)...);
  if (j < n) chain[1] = function(chain[1], Load(in + j, n - j)...);
  return SumOf(chain);
}

struct Plus {
  HWY_INLINE Vec operator()(Vec a, Vec b) const { return hn::Add(a, b); }
};
struct AddSquare {
  HWY_INLINE Vec operator()(Vec sum, Vec a) const { return hn::MulAdd(a, a, sum); }
};
struct AddProduct {
  HWY_INLINE Vec operator()(Vec sum, Vec a, Vec b) const { return hn::MulAdd(a, b, sum); }
  HWY_INLINE Vec operator()(Vec sum, Vec a, Vec b, Vec w) const { return hn::MulAdd(hn::Mul(a, b), w, sum); }
};

template <class T>
void RowDotOf(const Rows& sum, const Rows& a, const Rows& b, const Rows& weights) {
  for (std::int64_t i = 0; i < a.rows; ++i) {
    const T *left = RowAs<T>(a, i), *right = RowAs<T>(b, i);
    const auto* w = static_cast<const float*>(weights.data);
    At(sum, i) += w != nullptr    ? SumRow(AddProduct{}, a.cols, left, right, w)
                  : left == right ? SumRow(AddSquare{}, a.cols, left)
                                  : SumRow(AddProduct{}, a.cols, left, right);
  }
}

struct Scaled {
  Vec factor;
  HWY_INLINE Vec operator()(Vec a, Vec w) const { return hn::Mul(hn::Mul(a, factor), w); }
};
template <Narrowing kNarrowing, class T>
void ScaleRowsOf(const Rows& dst, const Rows& a, const Rows& factor, const Rows& weights) {
  for (std::int64_t i = 0; i < a.rows; ++i) {
    // The row itself has been read for its sum: all of the next one, which is read twice too, comes meanwhile.
    const PrefetchRows<T> next{RowAs<T>(a, i), nullptr, a.rows * RowBytes<T>(a), 0};
    ZipRow<kNarrowing>(next, Each<Scaled>{{Set(At(factor, i))}}, a.cols, dst.stream, RowAs<T>(dst, i),
                       RowAs<T>(a, i), RowAs<float>(weights, 0));
  }
}

// sum = a + b, rounded; returns the squares of what is rounded, summed up as SumRow does.
template <Narrowing kNarrowing, class T>
float AddRowsOf(T* sum, const T* a, const T* b, std::int64_t n) {
  constexpr Order kOrder = kOrderOf<kNarrowing, T>;
  Vec chain[kSideBySide] = {Set(0.0f), Set(0.0f), Set(0.0f), Set(0.0f)};
  ForRow(
      n, /*stream=*/false, sum,
      [&]<bool>(std::int64_t j) HWY_ATTR {
        const auto x = LoadSeveral<kSideBySide, kOrder>(a + j), y = LoadSeveral<kSideBySide, kOrder>(b + j);
        StoreSeveral<kNarrowing, /*kStream=*/false, kOrder>(Each<Plus>()(x, y), sum + j);
        const auto rounded = LoadSeveral<kSideBySide, kOrder>(sum + j);
#pragma GCC unroll 4
        for (int c = 0; c < kSideBySide; ++c) chain[c] = AddSquare()(chain[c], rounded.v[c]);
      },
      [&](std::int64_t j, std::int64_t count) HWY_ATTR {
        StoreSome<kNarrowing>(Plus()(LoadSome(a + j, count).v[0], LoadSome(b + j, count).v[0]), sum + j,
                              count);
        Vec& one = chain[count == kLanes ? 0 : 1];
        one = AddSquare()(one, LoadSome(sum + j, count).v[0]);
      });
  return SumOf(chain);
}

// out[j] = in[j] for j < n, byte for byte; prefetch(j) as for ZipRow.
template <class Prefetch, class T>
void CopyRow(Prefetch prefetch, std::int64_t n, bool stream, T* out, const T* in) {
  constexpr std::int64_t kBytes = kSideBySide * kLanes * static_cast<std::int64_t>(sizeof(T));
  ForRow(
      n, stream, out,
      [&]<bool kStream>(std::int64_t j) HWY_ATTR {
        prefetch(j);
        const ByteTag d;
        auto* const to = reinterpret_cast<std::uint8_t*>(out + j);
        const auto* const from = reinterpret_cast<const std::uint8_t*>(in + j);
        for (std::int64_t b = 0; b < kBytes; b += kByteLanes) {
          const auto bytes = hn::LoadU(d, from + b);
          kStream ? hn::Stream(bytes, d, to + b) : hn::StoreU(bytes, d, to + b);
        }
      },
      [&](std::int64_t j, std::int64_t count)
          HWY_ATTR { std::memcpy(out + j, in + j, static_cast<std::size_t>(count) * sizeof(T)); });
}

// Row by row: each is read for its sum and, from the first-level cache, to be scaled, while the next one comes near. No
// other store stands between the last ones of a row, which take their time to leave, and the next row's first.
template <Narrowing kNarrowing, class T>
void NormRowsOf(const NormRowsRows& t, float scale, float eps) {
  const std::int64_t n = t.x.cols;
  const bool adds = t.residual.data != nullptr;
  for (std::int64_t i = 0; i < t.x.rows; ++i) {
    const T *const x = RowAs<T>(t.x, i), *z = x;
    float square = 0;
    if (adds) {
      T* const row = static_cast<T*>(t.row.data);
      const T* const residual = RowAs<T>(t.residual, i);
      square = AddRowsOf<kNarrowing>(row, x, residual, n);
      z = row;
      const PrefetchRows<T> next{residual, nullptr, RowBytes<T>(t.residual), 0};
      CopyRow(next, n, t.sum.stream, RowAs<T>(t.sum, i), z);
    } else {
      square = SumRow(AddSquare{}, n, x);
    }
    const Vec root = hn::Sqrt(hn::MulAdd(Set(square), Set(scale), Set(eps)));
    const Vec by = hn::Div(Set(1.0f), root);
    At(t.rstd, i) = hn::GetLane(by);
    const PrefetchRows<T> next{x, nullptr, RowBytes<T>(t.x), 0};
    ZipRow<kNarrowing>(next, Each<Scaled>{{by}}, n, t.out.stream, RowAs<T>(t.out, i), z,
                       RowAs<float>(t.gamma, 0));
  }
}

struct NormGradient {
  Vec factor, shift;
  HWY_INLINE Vec operator()(Vec dy, Vec x, Vec w) const {
    return hn::NegMulAdd(x, shift, hn::Mul(hn::Mul(dy, w), factor));
  }
  HWY_INLINE Vec operator()(Vec dy, Vec x, Vec w, Vec more) const {
    return hn::Add(operator()(dy, x, w), more);
  }
};
// Several rows are walked in strips of columns, so that what is (1, c) is read from memory once for all of them.
constexpr std::int64_t kStripCols = 1024;

struct AddScaledProduct {
  Vec factor;
  HWY_INLINE Vec operator()(Vec acc, Vec a, Vec b) const { return hn::MulAdd(hn::Mul(a, b), factor, acc); }
};
template <class T>
void AddColumnDotsOf(const Rows& acc, const Rows& a, const Rows& b, const Rows& factor) {
  for (const Range cols : Split(a.cols, a.rows > 1 ? kStripCols : a.cols)) {
    float* sum = RowAs<float>(acc, 0) + cols.begin;
    for (std::int64_t i = 0; i < a.rows; ++i) {
      const T *const left = RowAs<T>(a, i) + cols.begin, *const right = RowAs<T>(b, i) + cols.begin;
      ZipRow<Narrowing::kAny>(NoPrefetch(), Each<AddScaledProduct>{{Set(At(factor, i))}}, cols.size(),
                              /*stream=*/false, sum, sum, left, right);
    }
  }
}

// kRows rows of NormRowsGrad from row `first` on, side by side: what is (1, c) stands in registers for all of them. They are
// read for their sums first, and again for d_x, when those behind them are asked for: sums that did so too were slower.
template <int kRows, class T>
struct NormGradBlock {
  const NormRowsGradRows& t;
  std::int64_t first;

  HWY_INLINE const T* Row(const Rows& rows, int r) const { return RowAs<T>(rows, first + r); }
  // sums[r] = sum of d_out * x * gamma over row r, and d_gamma += d_out * x * rstd where it is given.
  HWY_INLINE void Sums(float* sums) const {
    const std::int64_t n = t.x.cols;
    Vec chain[kRows][2];
    for (int r = 0; r < kRows; ++r) chain[r][0] = chain[r][1] = Set(0.0f);
    const auto part = [&]<int kCount>(std::int64_t j, std::int64_t count) HWY_ATTR {
      float* const total = t.d_gamma.data == nullptr ? nullptr : RowAs<float>(t.d_gamma, 0) + j;
      const Several<kCount> w = LoadPart<kCount>(RowAs<float>(t.gamma, 0) + j, count);
      Several<kCount> of_columns = w;
      if (total != nullptr) of_columns = LoadPart<kCount>(static_cast<const float*>(total), count);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const auto d = LoadPart<kCount>(Row(t.d_out, r) + j, count),
                   x = LoadPart<kCount>(Row(t.x, r) + j, count);
        const Vec rstd = Set(At(t.rstd, first + r));
#pragma GCC unroll 4
        for (int c = 0; c < kCount; ++c) {
          const Vec product = hn::Mul(d.v[c], x.v[c]);
          chain[r][c % 2] = hn::MulAdd(product, w.v[c], chain[r][c % 2]);
          of_columns.v[c] = hn::MulAdd(product, rstd, of_columns.v[c]);
        }
      }
      if (total != nullptr) StorePart<Narrowing::kAny, /*kStream=*/false>(of_columns, total, count);
    };
    ForRow(
        n, /*stream=*/false, static_cast<const float*>(nullptr),
        [&]<bool>(std::int64_t j) HWY_ATTR { part.template operator()<kSideBySide>(j, kLanes); },
        [&](std::int64_t j, std::int64_t count) HWY_ATTR { part.template operator()<1>(j, count); });
    for (int r = 0; r < kRows; ++r)
      sums[r] = hn::GetLane(hn::SumOfLanes(FloatTag(), hn::Add(chain[r][0], chain[r][1])));
  }

  // d_x of the rows; they are streamed where their lines begin together.
  template <Narrowing kNarrowing>
  HWY_INLINE void Gradients(const float* shifts, bool stream) const {
    const std::int64_t n = t.x.cols;
    const auto part = [&]<int kCount, bool kStream>(std::int64_t j, std::int64_t count) HWY_ATTR {
      const Several<kCount> w = LoadPart<kCount>(RowAs<float>(t.gamma, 0) + j, count);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        if (kCount > 1) {
          PrefetchSeveral(Row(t.d_out, r) + j, kRows * RowBytes<T>(t.d_out));
          PrefetchSeveral(Row(t.x, r) + j, kRows * RowBytes<T>(t.x));
        }
        const Each<NormGradient> gradient{{Set(At(t.rstd, first + r)), Set(shifts[r])}};
        const auto d = LoadPart<kCount>(Row(t.d_out, r) + j, count),
                   x = LoadPart<kCount>(Row(t.x, r) + j, count);
        T* const to = RowAs<T>(t.d_x, first + r) + j;
        if (t.more.data == nullptr) {
          StorePart<kNarrowing, kStream>(gradient(d, x, w), to, count);
        } else {
          const T* const more = Row(t.more, r) + j;
          if (kCount > 1) PrefetchSeveral(more, kAhead);
          StorePart<kNarrowing, kStream>(gradient(d, x, w, LoadPart<kCount>(more, count)), to, count);
        }
      }
    };
    ForRow(
        n, stream, Row(t.d_x, 0),
        [&]<bool kStream>(std::int64_t j)
            HWY_ATTR { part.template operator()<kSideBySide, kStream>(j, kLanes); },
        [&](std::int64_t j, std::int64_t count) HWY_ATTR { part.template operator()<1, false>(j, count); });
  }

  template <Narrowing kNarrowing>
  HWY_INLINE void operator()(float scale) const {
    float shifts[kRows];
    Sums(shifts);
    for (int r = 0; r < kRows; ++r) {
      const float rstd = At(t.rstd, first + r);
      shifts[r] = shifts[r] * scale * rstd * rstd * rstd;
    }
    Gradients<kNarrowing>(shifts, t.d_x.stream);
  }
};

template <Narrowing kNarrowing, class T>
void NormRowsGradOf(const NormRowsGradRows& t, float scale) {
  // Where a store is half a line, those of four rows in turn take three times as long as those of two.
  constexpr int kRows = HWY_TARGET <= HWY_AVX3 ? 4 : CUBIST_OLD_CPU ? 1 : 2;
  // Lines of all rows begin together.
  const bool alike = !t.d_x.stream || RowBytes<T>(t.d_x) % static_cast<std::int64_t>(kLineBytes) == 0;
  std::int64_t i = 0;
  for (; alike && i + kRows <= t.x.rows; i += kRows)
    NormGradBlock<kRows, T>{t, i}.template operator()<kNarrowing>(scale);
  for (; i < t.x.rows; ++i) NormGradBlock<1, T>{t, i}.template operator()<kNarrowing>(scale);
}

// ---- The table

void RowDot(const Rows& sum, DType dtype, const Rows& a, const Rows& b, const Rows& weights) {
  WithType(dtype, [&]<Narrowing, class T>() HWY_ATTR { RowDotOf<T>(sum, a, b, weights); });
}
void ScaleRows(DType dtype, const Rows& dst, const Rows& a, const Rows& factor, const Rows& weights) {
  WithType(dtype, [&]<Narrowing kHow, class T>() HWY_ATTR { ScaleRowsOf<kHow, T>(dst, a, factor, weights); });
}
void NormRows(DType dtype, const NormRowsRows& t, float scale, float eps) {
  WithType(dtype, [&]<Narrowing kHow, class T>() HWY_ATTR { NormRowsOf<kHow, T>(t, scale, eps); });
}
void NormRowsGrad(DType dtype, const NormRowsGradRows& t, float scale) {
  WithType(dtype, [&]<Narrowing kHow, class T>() HWY_ATTR { NormRowsGradOf<kHow, T>(t, scale); });
}
void NormGrad(DType dtype, const NormRowsGradRows& t) {
  WithType(dtype, [&]<Narrowing kHow, class T>() HWY_ATTR {
    for (std::int64_t i = 0; i < t.x.rows; ++i)
      NormGradBlock<1, T>{t, i}.template Gradients<kHow>(&At(t.shift, i), t.d_x.stream);
  });
}
void AddColumnDots(const Rows& acc, DType dtype, const Rows& a, const Rows& b, const Rows& factor) {
  WithType(dtype, [&]<Narrowing, class T>() HWY_ATTR { AddColumnDotsOf<T>(acc, a, b, factor); });
}

}  // namespace

const NormOps* GetNormOps() {
  static constexpr NormOps kOps{.row_dot = &RowDot,
                                .scale_rows = &ScaleRows,
                                .norm_rows = &NormRows,
                                .norm_rows_grad = &NormRowsGrad,
                                .norm_grad = &NormGrad,
                                .add_column_dots = &AddColumnDots};
  return &kOps;
}

}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cubist {

HWY_EXPORT(GetNormOps);
const NormOps& BestNormOps() { return *HWY_DYNAMIC_DISPATCH(GetNormOps)(); }

}  // namespace cubist
#endif  // HWY_ONCE
