// How composites walk the rows of a matrix, several vectors at a time. Included once per Highway target, after
// vector-inl.h.
#include <cstdint>

#include "npu_model/host/tile_ops.h"

#if defined(CUBIST_NPU_MODEL_HOST_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUBIST_NPU_MODEL_HOST_ROWS_INL_H_
#undef CUBIST_NPU_MODEL_HOST_ROWS_INL_H_
#else
#define CUBIST_NPU_MODEL_HOST_ROWS_INL_H_
#endif

#include "npu_model/host/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

// Tiles are read where they lie in GM. What an instruction reads for the first time it asks for this many bytes ahead,
// which is the same row's rest or, most often, the next row: the machine's own prefetching ends with every page.
constexpr std::int64_t kAhead = 4096;

// Vectors on which one chain of operations runs side by side: the next one would wait for too many steps of the first.
template <int kCount>
struct Several {
  HWY_ATTR Several() {}  // Of the target, as on NEON a vector's own constructor is.
  Vec v[kCount];
};
constexpr int kSideBySide = 4;

template <int kCount, Order kOrder = Order::kRow, class T>
HWY_INLINE Several<kCount> LoadSeveral(const T* p) {
  Several<kCount> x;
#pragma GCC unroll 4
  for (int c = 0; c < kCount; c += 2) LoadTwo<kOrder>(p + c * kLanes, x.v[c], x.v[c + 1]);
  return x;
}
template <class T>
HWY_INLINE Several<1> LoadSome(const T* p, std::int64_t count) {
  Several<1> x;
  x.v[0] = count == kLanes ? Load(p) : Load(p, count);
  return x;
}
template <Narrowing kNarrowing, bool kStream, Order kOrder = Order::kRow, int kCount, class T>
HWY_INLINE void StoreSeveral(const Several<kCount>& x, T* p) {
#pragma GCC unroll 4
  for (int c = 0; c < kCount; c += 2) {
    if constexpr (kStream) {
      StreamTwo<kNarrowing, kOrder>(x.v[c], x.v[c + 1], p + c * kLanes);
    } else {
      StoreTwo<kNarrowing, kOrder>(x.v[c], x.v[c + 1], p + c * kLanes);
    }
  }
}

// Asks for what stands `bytes` behind the kSideBySide vectors at `p`, which may lie beyond any tensor; into the second-level
// cache, however soon and often it is read: asked into the first one, or past both, a Zen 4 took 1.1 to 1.5 times as long.
template <class T>
HWY_INLINE void PrefetchSeveral(const T* p, std::int64_t bytes) {
  constexpr std::int64_t kBytes = kSideBySide * kLanes * static_cast<std::int64_t>(sizeof(T));
  const auto* from = reinterpret_cast<const char*>(p) + bytes;
  for (std::int64_t b = 0; b < kBytes; b += static_cast<std::int64_t>(kLineBytes)) {
    __builtin_prefetch(from + b, 0, 2);
  }
}

// Calls several<stream>(j) for the whole kSideBySide vectors of n elements, and some(j, count) for what is before the
// first line of the output, where that is streamed, and behind the last ones.
template <class Out, class Several, class Some>
HWY_INLINE void ForRow(std::int64_t n, bool stream, const Out* out, Several several, Some some) {
  std::int64_t j = 0;
  for (const std::int64_t begin = stream ? BeforeLine(out, n) : 0; j < begin;) {
    const std::int64_t count = Min(begin - j, kLanes);
    some(j, count);
    j += count;
  }
  constexpr std::int64_t kStep = kSideBySide * kLanes;
  if (stream) {
    for (; j + kStep <= n; j += kStep) several.template operator()<true>(j);
  } else {
    for (; j + kStep <= n; j += kStep) several.template operator()<false>(j);
  }
  for (; j < n; j += kLanes) some(j, Min(n - j, kLanes));
}

// out[j] = function(in[j]...) for j < n, function taking Several and elements in any order; prefetch(j) goes before each.
template <Narrowing kNarrowing, class Prefetch, class Function, class Out, class... In>
HWY_INLINE void ZipRow(Prefetch prefetch, Function function, std::int64_t n, bool stream, Out* out,
                       const In*... in) {
  constexpr Order kOrder = kOrderOf<kNarrowing, Out, In...>;
  ForRow(
      n, stream, out,
      [&]<bool kStream>(std::int64_t j) HWY_ATTR {
        prefetch(j);
        StoreSeveral<kNarrowing, kStream, kOrder>(function(LoadSeveral<kSideBySide, kOrder>(in + j)...),
                                                  out + j);
      },
      [&](std::int64_t j, std::int64_t count)
          HWY_ATTR { StoreSome<kNarrowing>(function(LoadSome(in + j, count)...).v[0], out + j, count); });
}
// A function of single vectors as one of several.
template <class Function>
struct Each {
  Function function;
  template <int kCount, class... In>
  HWY_INLINE Several<kCount> operator()(const Several<kCount>& a, const In&... in) const {
    Several<kCount> out;
#pragma GCC unroll 4
    for (int c = 0; c < kCount; ++c) out.v[c] = function(a.v[c], in.v[c]...);
    return out;
  }
};
struct NoPrefetch {
  HWY_INLINE void operator()(std::int64_t) const {}
};
// Of two rows of T, or of one, `bytes` ahead.
template <class T>
struct PrefetchRows {
  const T *a, *b;
  std::int64_t bytes_a, bytes_b;
  HWY_INLINE void operator()(std::int64_t j) const {
    PrefetchSeveral(a + j, bytes_a);
    if (b != nullptr) PrefetchSeveral(b + j, bytes_b);
  }
};
template <class T>
HWY_INLINE std::int64_t RowBytes(const Rows& rows) {
  return rows.pitch * static_cast<std::int64_t>(sizeof(T));
}

// Several vectors at p, or the first `count` elements of one.
template <int kCount, class T>
HWY_INLINE Several<kCount> LoadPart(const T* p, std::int64_t count) {
  if constexpr (kCount == 1) {
    return LoadSome(p, count);
  } else {
    return LoadSeveral<kCount>(p);
  }
}
template <Narrowing kNarrowing, bool kStream, int kCount, class T>
HWY_INLINE void StorePart(const Several<kCount>& x, T* p, std::int64_t count) {
  if constexpr (kCount == 1) {
    StoreSome<kNarrowing>(x.v[0], p, count);
  } else {
    StoreSeveral<kNarrowing, kStream>(x, p);
  }
}

HWY_INLINE float& At(const Rows& column, std::int64_t i) { return *RowAs<float>(column, i); }

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#endif  // CUBIST_NPU_MODEL_HOST_ROWS_INL_H_
