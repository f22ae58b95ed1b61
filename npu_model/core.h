// The instruction set: concepts that kernels are written against, and the typed
// front that both executors share.
//
// A kernel is a template over a core that satisfies CubeCore, VectorCore or AiCore.
// Each comment names the pipe and says what the instruction means; README.md says
// how pipes are ordered. An instruction on the wrong buffer does not compile.
#ifndef CUBIST_NPU_MODEL_CORE_H_
#define CUBIST_NPU_MODEL_CORE_H_

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <type_traits>
#include <utility>

#include "npu_model/instruction.h"
#include "npu_model/location.h"
#include "npu_model/tile.h"

namespace cubist {

// Every instruction takes its caller's place in the source (Loc) as a last, defaulted argument, so that reports can
// point there.

// Operands of StoreActivated. What is default-constructed is not given.
struct EpilogueTiles {
  UbTile<float> x;           // (r, c); lost
  UbTile<float> bias{};      // (1, c), or not given
  UbTile<float> residual{};  // (r, c), or not given
  std::array<UbTile<float>, EpilogueScalars::kMaxScratch>
      scratch{};  // of x's shape, as many as the activation needs
};

// A row of StoreScaledDots: GM = weight * x and sum (1, 1) += sum_j x_j * row_j, as far as `dst` and `row` are given.
template <class T>
struct ScaledDot {
  Gm dst{};
  float weight = 1;
  UbTile<float> sum{};
  UbTile<T> row{};
};

// What Histogram and Rank sort with: tiles of the ids' shape, and one of the bins'. Not given, they keep a table.
struct SortTiles {
  UbTile<std::int32_t> places{};   // 0, 1, 2, .. row by row
  UbTile<std::int32_t> offsets{};  // (1, bins)
  std::array<UbTile<float>, 2> keys{};
  std::array<UbTile<std::int32_t>, 2> values{};

  bool given() const { return places.slot != nullptr; }
};

// Cube core: the matrix unit and the movers that feed it. Operands are fp32, bf16 or fp16; sums are fp32.
template <class C>
concept CubeCore = requires(C& core, Gm gm, PackedGm packed, L1Tile<BF16> l1, L0ATile<BF16> a,
                            L0BTile<BF16> b, L0CTile<float> c, BtTile<float> bias, SlotRequest request) {
  { core.Allocate(request) } -> std::same_as<Slot*>;
  {
    core.index()
    } -> std::convertible_to<int>;  // This core's number within the phase, and how many there are.
  { core.count() } -> std::convertible_to<int>;
  core.Load(l1, gm);       // MTE2  GM -> L1, to the operand's layout (ND2NZ); either stride may be 1
  core.Load(l1, packed);   // MTE2  GM -> L1, already in the operand's layout
  core.Store(packed, l1);  // MTE3  L1 -> GM, in the operand's layout
  core.Load(a, l1, Transpose::kNo);     // MTE1  L1 -> L0A, as it stands or transposed
  core.Load(b, l1, Transpose::kNo);     // MTE1  L1 -> L0B, likewise
  core.Load(bias, gm);                  // MTE2, MTE1  one row GM -> L1 -> BT, widened to fp32
  core.Mmad(c, a, b, Accumulate::kNo);  // M     c (+)= a * b;  (m, n) (+)= (m, k) * (k, n);  k may be 0
  core.Mmad(c, a, b, bias);             // M     c = bias + a * b;  bias is (1, n), added to every row
  core.Store(gm, c);                    // FIX   L0C -> GM, cast to the view's dtype
  core.Store(gm, c, Accumulate::kYes);  // FIX   GM += L0C, atomically; the view is fp32
  core.Store(gm, c, FixOptions{});      // FIX   either, with a factor, and not below 0 where asked
  {
    core.ReadScalar(gm, std::int64_t{})
    } -> std::same_as<std::int64_t>;  // S  element j of a (1, c) integer view
};

// Vector core: rows in its UB. An operand b of (r, 1) is broadcast over the columns of a, one of (1, c) over its rows.
// Tiles may coincide, not overlap otherwise.
template <class V>
concept VectorCore = requires(V& core, Gm gm, UbTile<float> x, UbTile<BF16> narrow, UbTile<std::int32_t> ids,
                              UbTile<std::int64_t> wide_ids, UbTile<std::uint8_t> flags,
                              std::span<const UbTile<BF16>> rows, std::span<const float> weights,
                              std::span<const ScaledDot<BF16>> dots, SlotRequest request) {
  { core.Allocate(request) } -> std::same_as<Slot*>;
  { core.index() } -> std::convertible_to<int>;
  { core.count() } -> std::convertible_to<int>;
  core.Load(narrow, gm);       // MTE2  GM -> UB, same dtype
  core.Load(x, gm);            // MTE2  GM -> UB; V widens where the view's dtype is narrower
  core.Store(gm, narrow);      // MTE3  UB -> GM, same dtype
  core.Store(gm, x);           // MTE3  UB -> GM; V narrows first (x is lost) where the dtype is narrower
  core.Fill(x, 0.0f);          // V     x = value
  core.Cast(narrow, x);        // V     narrow = x, to nearest even; also 16-bit to float
  core.Cast(ids, wide_ids);    // V     int64 to int32
  core.Cast(ids, flags);       // V     booleans to 0 and 1; also to float
  core.MulScalar(x, x, 2.0f);  // V     dst = a * value
  core.MaxScalar(x, x, 2.0f);  // V     dst = max(a, value)
  core.AddScalar(x, x, 2.0f);  // V     dst = a + value
  core.Add(x, x, x);           // V     dst = a + b
  core.Sub(x, x, x);           // V     dst = a - b
  core.Mul(x, x, x);           // V     dst = a * b
  core.Div(x, x, x);           // V     dst = a / b
  core.Max(x, x, x);           // V     dst = max(a, b)
  core.Exp(x, x);              // V     dst = exp(a)
  core.Ln(x, x);               // V     dst = ln(a)
  core.Sqrt(x, x);             // V     dst = sqrt(a)
  core.RowMax(x, x);           // V     dst (r, 1) = maximum of each row; dst may be the first column of a
  core.RowSum(x, x);           // V     dst (r, 1) = sum of each row; likewise
  core.Transpose(x, x);        // V     dst (c, r) = a (r, c) turned; two tiles
  core.MaskOutside(x, std::int64_t{}, std::int64_t{},
                   0.0f);             // V  x(i, j) = value unless lowest <= j - i <= highest
  core.MaskWhere(x, flags, 0.0f);     // V     x(i, j) = value where flags(i, j) is true; also on 16-bit tiles
  core.Distances(x, std::int64_t{});  // V     x(i, j) = |first + i - j|
  core.DropFlags(flags, DropoutStream{}, std::int64_t{}, std::int64_t{},
                 false);     // V  (flags, stream, row, key, transposed): whether weight (row + i, key + j) is
                             //    dropped, or (row + j, key + i)
  core.Fill(ids, 0);         // V     the same on int32
  core.Add(ids, ids, ids);   // V     the same on int32
  core.ColumnSum(ids, ids);  // V     dst (1, c) = sum of the rows of a (r, c); r may be 0
  core.ExclusiveScan(ids, ids, std::int32_t{});  // V  dst (1, c + 1): dst[j] = initial + a[0] + .. + a[j - 1]
  core.AddScalar(ids, ids, std::int32_t{});      // V     dst = a + value
  { core.ReadScalar(ids, std::int64_t{}) } -> std::same_as<std::int64_t>;  // S  element j of a (1, c) tile
  { core.ReadScalar(x, std::int64_t{}) } -> std::same_as<float>;           // S

  // Composites: one body on the host, the expansion of composites.h on the model.
  core.SoftmaxStep(narrow, x, x, x, x, 1.0f);  // (p, s, m_new, m_old, l, scale); see ExpandSoftmaxStep
  core.AddAlibi(x, x, 1.0f, 1.0f, std::int64_t{},
                false);  // (s, scratch, scale, slope, first, root): s = s * scale - slope * |first + i - j|
  core.AttentionGradStep(narrow, narrow, x, x, x, x,
                         1.0f);  // (p, ds, s, dp, lse, delta, scale); see ExpandAttentionGradStep
  core.MulAdd(x, x, x);          // (acc, factor, x): acc = acc * factor + x
  core.WeightedSum(x, x, rows, weights,
                   Accumulate::kNo);  // (acc, scratch, rows, weights): acc (+)= sum_i w_i * row_i
  // s0 .. s3 are scratch tiles of the operands' shape.
  core.Abs(x, x);                   // V     dst = |a|
  core.SelectLe(x, x, 1.0f, x, x);  // V     dst = key <= limit ? a : b; NaN takes b, which may be (r, 1)
  core.TopK(x, ids,
            x);  // V     (values, ids, a): each row's highest, descending, of equals the lower column first
  core.GroupTop(x, x,
                std::int64_t{});  // V  (sums, a, n): sums (r, g): the n highest of each of g parts of a row
  core.KeepGroups(x, ids,
                  std::int64_t{});  // V  (a, ids, c): -inf outside the parts of c columns that ids name
  core.Gather(x, x, ids);           // V     dst(i, j) = a(i, ids(i, j)), 0 where that is negative
  core.Scatter(x, ids, x);          // S     dst(i, ids(i, j)) = values(i, j), nothing where that is negative
  core.Random(x, RandomStream{}, std::int64_t{},
              std::int64_t{});       // V  (u, stream, first, step): element (i, j) is
                                     //    number first + i * step + j, in (0, 1)
  core.DropRoutes(ids, x, x, 0.5f);  // V     (ids, weights, u, rate): -1 and 0 where u < rate
  core.MapRoutes(x, ids, x, x,
                 RouteFunction{});  // S  (out, ids, scores, d_weights, f): a caller's function, by rows;
                                    //    d_weights may be none
  core.Scores(ScoreFunction::kSoftmax, x, x, x, x);  // (function, n, s0, s1, column); see ExpandScores
  core.Repair(x, x, x, x, x, 1.0f, true);   // (x, bad, s0, s1, column, limit, by_mean); see ExpandRepair
  core.RowDot(x, x, x, narrow, narrow);     // (sum, s0, s1, a, b[, w]): sum (r, 1) += rowsum(a * b * w)
  core.ScaleRows(narrow, x, narrow, x, x);  // (dst, s0, a, factor, w): dst = a * factor * w
  core.NormGrad(narrow, x, x, narrow, narrow, x, x, x);  // (dx, s0, s1, dy, x, w, factor, shift[, more]):
                                                         // dx = dy * w * factor - x * shift + more
  core.AddColumnDots(x, x, x, narrow, narrow,
                     x);  // (acc, s0, s1, a, b, factor): acc (1, c) += colsum(a * b * factor)
  core.SwiGlu(narrow, x, x, narrow, narrow, x);  // (out, s0, s1, gate, up[, probs]); see ExpandSwiGlu
  core.SwiGluGrad(narrow, narrow, x, x, x, x, x, narrow, narrow, narrow, x);  // see ExpandSwiGluGrad
  core.StoreActivated(gm, EpilogueTiles{x},
                      EpilogueScalars{});  // GM = activation(alpha * x + bias + beta * residual)
  core.AddDot(x, x, x, narrow);            // (sum, scratch, x, row): sum (1, 1) += sum_j x_j * row_j
  core.StoreScaledDots(
      x, x, x, narrow, true,
      dots);  // (wide, s0, s1, x, widens, dots): GM = weight * x and AddDot of x, for several rows
  core.Gather(x, gm, ids, x);  // (dst, column, places, staging): dst(i, j) = column(places(i, j)), else 0
  core.Scatter(gm, ids, x,
               x);  // (column, places, src, staging): column(places(i, j)) = src(i, j); also int32
  core.Histogram(ids, ids,
                 IdBins{});  // (counts, ids, bins): ++counts[bin] of each id that has one of the bins
  core.Rank(ids, ids, ids, IdBins{});  // (ranks, next, ids, bins): row by row, next[bin]++, else -1
  core.Histogram(ids, ids, IdBins{},
                 SortTiles{});  // likewise, by Sort32 and MergeSort; see ExpandHistogramBySort
  core.Rank(ids, ids, ids, IdBins{}, SortTiles{});  // likewise; see ExpandRankBySort
  core.Sort32(x, ids, x,
              ids);  // V     (keys, values, from, values from): runs of 32 keys, row by row, descending and
                     //       stable, with their values
  core.MergeSort(x, ids, x, ids,
                 std::int64_t{});  // V  (keys, values, from, values from, run): runs of four times `run`
  core.RunOffsets(ids, ids,
                  x);  // S  (offsets, next, keys): offsets[id] = next[id] - place, next[id] += length for
                       //    each run of keys -id, which is `length` long and begins at a place
  core.RankWithin(ids, ids, ids, ids,
                  IdBins{});  // (ranks, next, limits, ids, bins): likewise below limits[bin], else -1
  core.RoundUp(ids, ids, std::int32_t{});  // S  dst (1, c) = a rounded up to a multiple of a number
  core.TrueColumns(ids, ids);  // V  (dst, flags): each row's columns that are not 0, ascending, then -1
  core.KeepWhere(ids, ids,
                 ids);  // V  (dst, a, flags): a where flags, which may be (r, 1), are not 0, else -1
  core.Lookup(
      ids, ids, ids,
      std::int32_t{});  // V  (dst, ids, table, first): dst = table[id - first] for each id in its range
};

// An AI core: one Cube core and its Vector cores, each with its own UB. Only here do tiles change hands. Where
// the chip has no direct path, a hand-over is FIX or MTE3 to a GM workspace, a cross-core flag, and MTE2.
template <class C>
concept AiCore = CubeCore<C> && requires(C& core, L1Tile<BF16> l1, L0CTile<float> c,
                                         HandOverTile<float> between, UbTile<float> x, UbTile<BF16> narrow) {
  { core.vectors().size() } -> std::convertible_to<std::size_t>;
  requires VectorCore<std::remove_cvref_t<decltype(core.vectors()[0])>>;
  core.Send(between, c);                  // Cube: hand-over slot = L0C, which is lost
  core.vectors()[0].Receive(x, between);  // Vector: UB = hand-over slot, which is lost
  core.vectors()[0].Move(x, c);           // both at once
  core.vectors()[0].Move(l1, narrow);     // Vector -> Cube: L1 (A operand) = UB, which is lost
};

// What a Cube core multiplies, and what UB tiles hold.
template <class T>
concept OperandType = std::same_as<T, float> || std::same_as<T, BF16> || std::same_as<T, F16>;
template <class T>
concept RowType = OperandType<T> || std::same_as<T, std::int32_t> || std::same_as<T, std::int64_t> ||
    std::same_as<T, std::uint8_t>;

// The typed front of a Cube core. `E` is an executor: it has one untyped method per instruction.
template <class E>
class CubeFront : protected E {
 public:
  using E::Allocate;
  using E::count;
  using E::E;
  using E::index;

  template <OperandType T>
  void Load(L1Tile<T> dst, const Gm& src, Loc loc = Loc::current()) {
    SameShape(dst, src);
    CUBIST_CHECK(src.dtype() == DTypeOf<T>(), "Load to L1 does not convert");
    E::LoadL1(dst, src, loc);
  }
  template <OperandType T>
  void Load(L1Tile<T> dst, const PackedGm& src, Loc loc = Loc::current()) {
    CUBIST_CHECK(dst.rows() == src.row_part.size() && dst.cols() == src.col_part.size(), "shapes differ");
    CUBIST_CHECK(src.dtype == DTypeOf<T>(), "Load to L1 does not convert");
    E::LoadL1Packed(dst, src, loc);
  }
  template <OperandType T>
  void Store(const PackedGm& dst, L1Tile<T> src, Loc loc = Loc::current()) {
    CUBIST_CHECK(src.rows() == dst.row_part.size() && src.cols() == dst.col_part.size(), "shapes differ");
    E::StorePacked(dst, src, loc);
  }
  template <OperandType T>
  void Load(L0ATile<T> dst, L1Tile<T> src, Loc loc = Loc::current()) {
    Load(dst, src, Transpose::kNo, loc);
  }
  template <OperandType T>
  void Load(L0BTile<T> dst, L1Tile<T> src, Loc loc = Loc::current()) {
    Load(dst, src, Transpose::kNo, loc);
  }
  template <OperandType T>
  void Load(L0ATile<T> dst, L1Tile<T> src, Transpose transpose, Loc loc = Loc::current()) {
    OperandShape(dst, src, transpose);
    E::LoadL0A(dst, src, transpose, loc);
  }
  template <OperandType T>
  void Load(L0BTile<T> dst, L1Tile<T> src, Transpose transpose, Loc loc = Loc::current()) {
    OperandShape(dst, src, transpose);
    E::LoadL0B(dst, src, transpose, loc);
  }
  void Load(BtTile<float> dst, const Gm& row, Loc loc = Loc::current()) {
    SameShape(dst, row);
    E::LoadBias(dst, row, loc);
  }
  template <OperandType T>
  void Mmad(L0CTile<float> c, L0ATile<T> a, L0BTile<T> b, Accumulate accumulate, Loc loc = Loc::current()) {
    ProductShape(c, a, b);
    E::Mmad(c, a, b, accumulate == Accumulate::kYes ? MmadStart::kAdd : MmadStart::kZero, TileRef(), loc);
  }
  template <OperandType T>
  void Mmad(L0CTile<float> c, L0ATile<T> a, L0BTile<T> b, BtTile<float> bias, Loc loc = Loc::current()) {
    ProductShape(c, a, b);
    CUBIST_CHECK(bias.cols() == c.cols(), "bias and accumulator differ in width");
    E::Mmad(c, a, b, MmadStart::kBias, bias, loc);
  }
  void Store(const Gm& dst, L0CTile<float> src, Loc loc = Loc::current()) {
    Store(dst, src, Accumulate::kNo, loc);
  }
  void Store(const Gm& dst, L0CTile<float> src, Accumulate accumulate, Loc loc = Loc::current()) {
    Store(dst, src, FixOptions{accumulate}, loc);
  }
  void Store(const Gm& dst, L0CTile<float> src, const FixOptions& options, Loc loc = Loc::current()) {
    SameShape(dst, src);
    CUBIST_CHECK(options.accumulate == Accumulate::kNo || dst.dtype() == DType::kF32,
                 "Store adds to fp32 memory alone");
    E::StoreL0C(dst, src, options, loc);
  }
  // What no phase of the launch has written: the scalar unit's cache does not see other cores' stores.
  std::int64_t ReadScalar(const Gm& src, std::int64_t j, Loc loc = Loc::current()) {
    CUBIST_CHECK(src.rows == 1 && j >= 0 && j < src.cols && !IsFloat(src.dtype()) && !src.tensor->writable,
                 "ReadScalar reads an integer of an input");
    return E::ReadGmInt(src.Cols({j, j + 1}), loc);
  }

  void Send(HandOverTile<float> dst, L0CTile<float> src, Loc loc = Loc::current()) {
    SameShape(dst, src);
    E::Send(dst, src, loc);
  }

 private:
  template <class X, class Y>
  static void SameShape(const X& x, const Y& y) {
    const auto shape = [](const auto& v) {
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(v)>, Gm>) {
        return std::pair(v.rows, v.cols);
      } else {
        return std::pair(v.rows(), v.cols());
      }
    };
    CUBIST_CHECK(shape(x) == shape(y), "shapes differ");
  }
  static void OperandShape(const TileRef& dst, const TileRef& src, Transpose transpose) {
    const bool turned = transpose == Transpose::kYes;
    CUBIST_CHECK(
        dst.rows() == (turned ? src.cols() : src.rows()) && dst.cols() == (turned ? src.rows() : src.cols()),
        "shapes differ");
  }
  static void ProductShape(const TileRef& c, const TileRef& a, const TileRef& b) {
    CUBIST_CHECK(c.rows() == a.rows() && c.cols() == b.cols() && a.cols() == b.rows(),
                 "shapes do not multiply");
  }
};

// The typed front of a Vector core.
template <class E>
class VectorFront : protected E {
 public:
  using E::Allocate;
  using E::count;
  using E::E;
  using E::index;

  template <RowType T>
  void Load(UbTile<T> dst, const Gm& src, Loc loc = Loc::current()) {
    CUBIST_CHECK(dst.rows() == src.rows && dst.cols() == src.cols, "shapes differ");
    CUBIST_CHECK(src.dtype() == DTypeOf<T>() || (std::is_same_v<T, float> && IsFloat(src.dtype())),
                 "Load to UB widens to float only");
    E::LoadUb(dst, src, loc);
  }
  template <RowType T>
  void Store(const Gm& dst, UbTile<T> src, Loc loc = Loc::current()) {
    CUBIST_CHECK(dst.rows == src.rows() && dst.cols == src.cols(), "shapes differ");
    CUBIST_CHECK(dst.dtype() == DTypeOf<T>() || (std::is_same_v<T, float> && IsFloat(dst.dtype())),
                 "Store from UB narrows floats only");
    E::StoreUb(dst, src, loc);
  }
  void Fill(UbTile<float> x, float value, Loc loc = Loc::current()) { E::Fill(x, value, loc); }
  void Fill(UbTile<std::int32_t> x, std::int32_t value, Loc loc = Loc::current()) {
    E::FillInt(x, value, loc);
  }
  // Floats among each other, int64 to int32, int32 to float, or booleans to 0 and 1 of either.
  template <RowType To, RowType From>
  void Cast(UbTile<To> dst, UbTile<From> a, Loc loc = Loc::current()) requires(
      (OperandType<To> && OperandType<From>) ||
      (std::same_as<To, std::int32_t> && std::same_as<From, std::int64_t>) ||
      (std::same_as<To, float> && std::same_as<From, std::int32_t>) ||
      ((std::same_as<To, float> || std::same_as<To, std::int32_t>)&&std::same_as<From, std::uint8_t>)) {
    CUBIST_CHECK(Same(dst, a), "shapes differ");
    E::Cast(dst, a, loc);
  }
  void MulScalar(UbTile<float> dst, UbTile<float> a, float value, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a), "shapes differ");
    E::Scalar(ScalarOp::kMul, dst, a, value, loc);
  }
  void MaxScalar(UbTile<float> dst, UbTile<float> a, float value, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a), "shapes differ");
    E::Scalar(ScalarOp::kMax, dst, a, value, loc);
  }
  void AddScalar(UbTile<float> dst, UbTile<float> a, float value, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a), "shapes differ");
    E::Scalar(ScalarOp::kAdd, dst, a, value, loc);
  }
  void Add(UbTile<float> dst, UbTile<float> a, UbTile<float> b, Loc loc = Loc::current()) {
    Binary(BinaryOp::kAdd, dst, a, b, loc);
  }
  void Sub(UbTile<float> dst, UbTile<float> a, UbTile<float> b, Loc loc = Loc::current()) {
    Binary(BinaryOp::kSub, dst, a, b, loc);
  }
  void Mul(UbTile<float> dst, UbTile<float> a, UbTile<float> b, Loc loc = Loc::current()) {
    Binary(BinaryOp::kMul, dst, a, b, loc);
  }
  void Div(UbTile<float> dst, UbTile<float> a, UbTile<float> b, Loc loc = Loc::current()) {
    Binary(BinaryOp::kDiv, dst, a, b, loc);
  }
  void Max(UbTile<float> dst, UbTile<float> a, UbTile<float> b, Loc loc = Loc::current()) {
    Binary(BinaryOp::kMax, dst, a, b, loc);
  }
  void Exp(UbTile<float> dst, UbTile<float> a, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a), "shapes differ");
    E::Unary(UnaryOp::kExp, dst, a, loc);
  }
  void Ln(UbTile<float> dst, UbTile<float> a, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a), "shapes differ");
    E::Unary(UnaryOp::kLn, dst, a, loc);
  }
  void Sqrt(UbTile<float> dst, UbTile<float> a, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a), "shapes differ");
    E::Unary(UnaryOp::kSqrt, dst, a, loc);
  }
  void Abs(UbTile<float> dst, UbTile<float> a, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a), "shapes differ");
    E::Unary(UnaryOp::kAbs, dst, a, loc);
  }
  void SelectLe(UbTile<float> dst, UbTile<float> key, float limit, UbTile<float> a, UbTile<float> b,
                Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, key) && Same(a, key) && (Same(b, key) || IsColumnOf(b, key)), "shapes differ");
    E::SelectLe(dst, key, limit, a, b, loc);
  }
  void TopK(UbTile<float> values, UbTile<std::int32_t> ids, UbTile<float> a, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(values, ids) && values.rows() == a.rows() && values.cols() <= a.cols(),
                 "shapes differ");
    E::TopK(values, ids, a, loc);
  }
  void GroupTop(UbTile<float> sums, UbTile<float> a, std::int64_t count, Loc loc = Loc::current()) {
    CUBIST_CHECK(sums.rows() == a.rows() && sums.cols() > 0 && a.cols() % sums.cols() == 0 && count >= 1 &&
                     count <= a.cols() / sums.cols(),
                 "shapes differ");
    E::GroupTop(sums, a, count, loc);
  }
  void KeepGroups(UbTile<float> a, UbTile<std::int32_t> ids, std::int64_t group_cols,
                  Loc loc = Loc::current()) {
    CUBIST_CHECK(a.rows() == ids.rows() && group_cols > 0, "shapes differ");
    E::KeepGroups(a, ids, group_cols, loc);
  }
  void Gather(UbTile<float> dst, UbTile<float> a, UbTile<std::int32_t> ids, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, ids) && dst.rows() == a.rows(), "shapes differ");
    E::Gather(dst, a, ids, loc);
  }
  void Scatter(UbTile<float> dst, UbTile<std::int32_t> ids, UbTile<float> values, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(values, ids) && dst.rows() == ids.rows(), "shapes differ");
    E::Scatter(dst, ids, values, loc);
  }
  void Random(UbTile<float> u, const RandomStream& stream, std::int64_t first, std::int64_t row_step,
              Loc loc = Loc::current()) {
    E::Random(u, stream, first, row_step, loc);
  }
  void DropRoutes(UbTile<std::int32_t> ids, UbTile<float> weights, UbTile<float> u, float rate,
                  Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(ids, weights) && Same(ids, u), "shapes differ");
    E::DropRoutes(ids, weights, u, rate, loc);
  }
  void MapRoutes(UbTile<float> out, UbTile<std::int32_t> ids, UbTile<float> scores, UbTile<float> d_weights,
                 const RouteFunction& function, Loc loc = Loc::current()) {
    const bool has_gradient = d_weights.slot != nullptr;
    CUBIST_CHECK(Same(ids, out) && Same(scores, out) && (!has_gradient || Same(d_weights, out)),
                 "shapes differ");
    E::MapRoutes(out, ids, scores, has_gradient ? TileRef(d_weights) : TileRef(), function, loc);
  }
  void Scores(ScoreFunction function, UbTile<float> n, UbTile<float> s0, UbTile<float> s1,
              UbTile<float> column, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(s0, n) && Same(s1, n) && IsColumnOf(column, n), "shapes differ");
    E::Scores(function, n, s0, s1, column, loc);
  }
  void Repair(UbTile<float> x, UbTile<float> bad, UbTile<float> s0, UbTile<float> s1, UbTile<float> column,
              float limit, bool by_mean, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(s0, x) && Same(s1, x) && IsColumnOf(bad, x) && IsColumnOf(column, x), "shapes differ");
    E::Repair(x, bad, s0, s1, column, limit, by_mean, loc);
  }
  void RowMax(UbTile<float> dst, UbTile<float> a, Loc loc = Loc::current()) {
    CUBIST_CHECK(IsColumnOf(dst, a), "shapes differ");
    E::Reduce(ReduceOp::kMax, dst, a, loc);
  }
  void RowSum(UbTile<float> dst, UbTile<float> a, Loc loc = Loc::current()) {
    CUBIST_CHECK(IsColumnOf(dst, a), "shapes differ");
    E::Reduce(ReduceOp::kSum, dst, a, loc);
  }
  void Transpose(UbTile<float> dst, UbTile<float> a, Loc loc = Loc::current()) {
    CUBIST_CHECK(dst.rows() == a.cols() && dst.cols() == a.rows(), "shapes differ");
    CUBIST_CHECK(dst.slot != a.slot, "a tile is not turned in its place");
    E::Transpose(dst, a, loc);
  }
  void MaskOutside(UbTile<float> x, std::int64_t lowest, std::int64_t highest, float value,
                   Loc loc = Loc::current()) {
    E::MaskOutside(x, lowest, highest, value, loc);
  }
  template <OperandType T>
  void MaskWhere(UbTile<T> x, UbTile<std::uint8_t> flags, float value, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(x, flags), "shapes differ");
    E::MaskWhere(x, flags, value, loc);
  }
  void Distances(UbTile<float> x, std::int64_t first, Loc loc = Loc::current()) {
    E::Distances(x, first, loc);
  }
  void DropFlags(UbTile<std::uint8_t> flags, const DropoutStream& stream, std::int64_t row, std::int64_t key,
                 bool transposed, Loc loc = Loc::current()) {
    E::DropFlags(flags, stream, row, key, transposed, loc);
  }
  void AddAlibi(UbTile<float> s, UbTile<float> scratch, float scale, float slope, std::int64_t first,
                bool root, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(s, scratch), "shapes differ");
    E::AddAlibi(s, scratch, scale, slope, first, root, loc);
  }
  void Add(UbTile<std::int32_t> dst, UbTile<std::int32_t> a, UbTile<std::int32_t> b,
           Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a) && Same(a, b), "shapes differ");
    E::AddInt(dst, a, b, loc);
  }
  void ColumnSum(UbTile<std::int32_t> dst, UbTile<std::int32_t> a, Loc loc = Loc::current()) {
    CUBIST_CHECK(dst.rows() == 1 && dst.cols() == a.cols(), "shapes differ");
    E::ColumnSum(dst, a, loc);
  }
  void ExclusiveScan(UbTile<std::int32_t> dst, UbTile<std::int32_t> a, std::int32_t initial,
                     Loc loc = Loc::current()) {
    CUBIST_CHECK(a.rows() == 1 && dst.rows() == 1 && dst.cols() == a.cols() + 1, "shapes differ");
    E::ExclusiveScan(dst, a, initial, loc);
  }
  void AddScalar(UbTile<std::int32_t> dst, UbTile<std::int32_t> a, std::int32_t value,
                 Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a), "shapes differ");
    E::AddScalarInt(dst, a, value, loc);
  }
  std::int64_t ReadScalar(UbTile<std::int32_t> a, std::int64_t j, Loc loc = Loc::current()) {
    return E::ReadInt(a, j, loc);
  }
  float ReadScalar(UbTile<float> a, std::int64_t j, Loc loc = Loc::current()) {
    return E::ReadFloat(a, j, loc);
  }

  template <OperandType T>
  void SoftmaxStep(UbTile<T> p, UbTile<float> s, UbTile<float> m_new, UbTile<float> m_old, UbTile<float> l,
                   float scale, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(p, s) && IsColumnOf(m_new, s) && IsColumnOf(m_old, s) && IsColumnOf(l, s),
                 "shapes differ");
    E::SoftmaxStep(p, s, m_new, m_old, l, scale, loc);
  }
  template <OperandType T>
  void AttentionGradStep(UbTile<T> p, UbTile<T> ds, UbTile<float> s, UbTile<float> dp, UbTile<float> lse,
                         UbTile<float> delta, float scale, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(p, s) && Same(ds, s) && Same(dp, s) && IsRowOf(lse, s) && IsRowOf(delta, s),
                 "shapes differ");
    E::AttentionGradStep(p, ds, s, dp, lse, delta, scale, loc);
  }
  void MulAdd(UbTile<float> acc, UbTile<float> factor, UbTile<float> x, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(acc, x) && (Same(acc, factor) || IsColumnOf(factor, acc)), "shapes differ");
    E::MulAdd(acc, factor, x, loc);
  }
  template <OperandType T>
  void WeightedSum(UbTile<float> acc, UbTile<float> scratch, std::span<const UbTile<T>> rows,
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
  void RowDot(UbTile<float> sum, UbTile<float> s0, UbTile<float> s1, UbTile<T> a, UbTile<T> b,
              Loc loc = Loc::current()) {
    CUBIST_CHECK(IsColumnOf(sum, a) && Same(a, b) && Same(s0, a) && Same(s1, a), "shapes differ");
    E::RowDot(sum, s0, s1, a, b, TileRef(), loc);
  }
  template <OperandType T>
  void RowDot(UbTile<float> sum, UbTile<float> s0, UbTile<float> s1, UbTile<T> a, UbTile<T> b,
              UbTile<float> weights, Loc loc = Loc::current()) {
    CUBIST_CHECK(IsColumnOf(sum, a) && Same(a, b) && Same(s0, a) && Same(s1, a) && IsRowOf(weights, a),
                 "shapes differ");
    E::RowDot(sum, s0, s1, a, b, weights, loc);
  }
  template <OperandType T>
  void ScaleRows(UbTile<T> dst, UbTile<float> s0, UbTile<T> a, UbTile<float> factor, UbTile<float> weights,
                 Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a) && Same(s0, a) && IsColumnOf(factor, a) && IsRowOf(weights, a),
                 "shapes differ");
    E::ScaleRows(dst, s0, a, factor, weights, loc);
  }
  template <OperandType T>
  void NormGrad(UbTile<T> dx, UbTile<float> s0, UbTile<float> s1, UbTile<T> dy, UbTile<T> x,
                UbTile<float> weights, UbTile<float> factor, UbTile<float> shift, Loc loc = Loc::current()) {
    NormGradShapes(dx, s0, s1, dy, x, weights, factor, shift);
    E::NormGrad(dx, s0, s1, dy, x, weights, factor, shift, TileRef(), loc);
  }
  template <OperandType T>
  void NormGrad(UbTile<T> dx, UbTile<float> s0, UbTile<float> s1, UbTile<T> dy, UbTile<T> x,
                UbTile<float> weights, UbTile<float> factor, UbTile<float> shift, UbTile<T> more,
                Loc loc = Loc::current()) {
    NormGradShapes(dx, s0, s1, dy, x, weights, factor, shift);
    CUBIST_CHECK(Same(more, x), "shapes differ");
    E::NormGrad(dx, s0, s1, dy, x, weights, factor, shift, more, loc);
  }
  template <OperandType T>
  void AddColumnDots(UbTile<float> acc, UbTile<float> s0, UbTile<float> s1, UbTile<T> a, UbTile<T> b,
                     UbTile<float> factor, Loc loc = Loc::current()) {
    CUBIST_CHECK(IsRowOf(acc, a) && Same(a, b) && Same(s0, a) && Same(s1, a) && IsColumnOf(factor, a),
                 "shapes differ");
    E::AddColumnDots(acc, s0, s1, a, b, factor, loc);
  }
  template <OperandType T>
  void SwiGlu(UbTile<T> out, UbTile<float> s0, UbTile<float> s1, UbTile<T> gate, UbTile<T> up,
              Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(out, gate) && Same(up, gate) && Same(s0, gate) && Same(s1, gate), "shapes differ");
    E::SwiGlu(out, s0, s1, gate, up, TileRef(), loc);
  }
  template <OperandType T>
  void SwiGlu(UbTile<T> out, UbTile<float> s0, UbTile<float> s1, UbTile<T> gate, UbTile<T> up,
              UbTile<float> probs, Loc loc = Loc::current()) {
    CUBIST_CHECK(
        Same(out, gate) && Same(up, gate) && Same(s0, gate) && Same(s1, gate) && IsColumnOf(probs, gate),
        "shapes differ");
    E::SwiGlu(out, s0, s1, gate, up, probs, loc);
  }
  template <OperandType T>
  void SwiGluGrad(UbTile<T> d_gate, UbTile<T> d_up, UbTile<float> d_probs, UbTile<float> s0, UbTile<float> s1,
                  UbTile<float> s2, UbTile<float> s3, UbTile<T> d_out, UbTile<T> gate, UbTile<T> up,
                  UbTile<float> probs, Loc loc = Loc::current()) {
    for (const TileRef& tile : {TileRef(d_gate), TileRef(d_up), TileRef(s0), TileRef(s1), TileRef(s2),
                                TileRef(s3), TileRef(d_out), TileRef(up)}) {
      CUBIST_CHECK(Same(tile, gate), "shapes differ");
    }
    CUBIST_CHECK(IsColumnOf(d_probs, gate) && IsColumnOf(probs, gate), "shapes differ");
    E::SwiGluGrad({d_gate, d_up, d_probs, s0, s1, s2, s3, d_out, gate, up, probs}, loc);
  }
  void StoreActivated(const Gm& dst, const EpilogueTiles& t, const EpilogueScalars& e,
                      Loc loc = Loc::current()) {
    const auto ref = [](const UbTile<float>& tile) {
      return tile.slot == nullptr ? TileRef() : TileRef(tile);
    };
    EpilogueRefs refs{ref(t.x), ref(t.bias), ref(t.residual), {}};
    CUBIST_CHECK(dst.rows == refs.x.rows() && dst.cols == refs.x.cols(), "shapes differ");
    CUBIST_CHECK(IsFloat(dst.dtype()), "Store from UB narrows floats only");
    CUBIST_CHECK(!refs.bias.given() || IsRowOf(refs.bias, refs.x), "shapes differ");
    CUBIST_CHECK(!refs.residual.given() || Same(refs.residual, refs.x), "shapes differ");
    for (std::size_t i = 0; i < static_cast<std::size_t>(e.scratch()); ++i) {
      refs.scratch[i] = ref(t.scratch[i]);
      CUBIST_CHECK(refs.scratch[i].given() && Same(refs.scratch[i], refs.x), "shapes differ");
    }
    E::StoreActivated(dst, refs, e, loc);
  }
  template <OperandType T>
  void AddDot(UbTile<float> sum, UbTile<float> scratch, UbTile<float> x, UbTile<T> row,
              Loc loc = Loc::current()) {
    CUBIST_CHECK(sum.rows() == 1 && sum.cols() == 1 && x.rows() == 1 && Same(scratch, x) && Same(row, x),
                 "shapes differ");
    E::AddDot(sum, scratch, x, row, loc);
  }
  // `wide` is x in fp32, made where `widens`; x that is fp32 needs none.
  template <OperandType T>
  void StoreScaledDots(UbTile<float> wide, UbTile<float> s0, UbTile<float> s1, UbTile<T> x, bool widens,
                       std::span<const ScaledDot<T>> dots, Loc loc = Loc::current()) {
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
      if (d.row.slot == nullptr) continue;
      ref.sum = d.sum, ref.row = d.row;
      CUBIST_CHECK(d.sum.rows() == 1 && d.sum.cols() == 1 && Same(d.row, x), "shapes differ");
    }
    E::StoreScaledDots(wide, s0, s1, x, widens, refs.all(), loc);
  }
  // Places outside [0, rows of the column) are passed over: a Gather leaves 0 there.
  void Gather(UbTile<float> dst, const Gm& column, UbTile<std::int32_t> places, UbTile<float> staging,
              Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, places) && column.cols == 1 && IsFloat(column.dtype()), "shapes differ");
    E::Gather(dst, column, places, staging, loc);
  }
  template <RowType T>
  void Scatter(const Gm& column, UbTile<std::int32_t> places, UbTile<T> src, UbTile<T> staging,
               Loc loc = Loc::current()) requires(std::same_as<T, float> || std::same_as<T, std::int32_t>) {
    CUBIST_CHECK(Same(src, places) && column.cols == 1, "shapes differ");
    CUBIST_CHECK(column.dtype() == DTypeOf<T>() || (std::is_same_v<T, float> && IsFloat(column.dtype())),
                 "Store from UB narrows floats only");
    E::Scatter(column, places, src, staging, loc);
  }
  void Histogram(UbTile<std::int32_t> counts, UbTile<std::int32_t> ids, const IdBins& bins,
                 Loc loc = Loc::current()) {
    E::Histogram(counts, ids, bins, loc);
  }
  void Rank(UbTile<std::int32_t> ranks, UbTile<std::int32_t> next, UbTile<std::int32_t> ids,
            const IdBins& bins, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(ranks, ids), "shapes differ");
    E::Rank(ranks, next, ids, bins, loc);
  }
  // By sorting: whole ids, each below 2^24 and either one of the bins' or below 0. Those have no rank, but -1.
  void Histogram(UbTile<std::int32_t> counts, UbTile<std::int32_t> ids, const IdBins& bins,
                 const SortTiles& sort, Loc loc = Loc::current()) {
    if (!sort.given()) return E::Histogram(counts, ids, bins, loc);
    E::HistogramBySort(counts, ids, RefsOf(sort, counts, ids, bins), loc);
  }
  void Rank(UbTile<std::int32_t> ranks, UbTile<std::int32_t> next, UbTile<std::int32_t> ids,
            const IdBins& bins, const SortTiles& sort, Loc loc = Loc::current()) {
    if (!sort.given()) return Rank(ranks, next, ids, bins, loc);
    CUBIST_CHECK(Same(ranks, ids), "shapes differ");
    E::RankBySort(ranks, next, ids, RefsOf(sort, next, ids, bins), loc);
  }
  void Sort32(UbTile<float> keys, UbTile<std::int32_t> values, UbTile<float> from,
              UbTile<std::int32_t> values_from, Loc loc = Loc::current()) {
    SortShapes(keys, values, from, values_from);
    E::Sort32(keys, values, from, values_from, loc);
  }
  void MergeSort(UbTile<float> keys, UbTile<std::int32_t> values, UbTile<float> from,
                 UbTile<std::int32_t> values_from, std::int64_t run, Loc loc = Loc::current()) {
    SortShapes(keys, values, from, values_from);
    CUBIST_CHECK(run > 0, "runs are empty");
    E::MergeSort(keys, values, from, values_from, run, loc);
  }
  void RunOffsets(UbTile<std::int32_t> offsets, UbTile<std::int32_t> next, UbTile<float> keys,
                  Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(offsets, next) && next.rows() == 1, "shapes differ");
    E::RunOffsets(offsets, next, keys, loc);
  }
  void RankWithin(UbTile<std::int32_t> ranks, UbTile<std::int32_t> next, UbTile<std::int32_t> limits,
                  UbTile<std::int32_t> ids, const IdBins& bins, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(ranks, ids) && Same(next, limits), "shapes differ");
    E::RankWithin(ranks, next, limits, ids, bins, loc);
  }
  void RoundUp(UbTile<std::int32_t> dst, UbTile<std::int32_t> a, std::int32_t multiple,
               Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a) && a.rows() == 1 && multiple > 0, "shapes differ");
    E::RoundUp(dst, a, multiple, loc);
  }
  void TrueColumns(UbTile<std::int32_t> dst, UbTile<std::int32_t> flags, Loc loc = Loc::current()) {
    CUBIST_CHECK(dst.rows() == flags.rows() && dst.cols() <= flags.cols(), "shapes differ");
    E::TrueColumns(dst, flags, loc);
  }
  void KeepWhere(UbTile<std::int32_t> dst, UbTile<std::int32_t> a, UbTile<std::int32_t> flags,
                 Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, a) && (Same(flags, a) || IsColumnOf(flags, a)), "shapes differ");
    E::KeepWhere(dst, a, flags, loc);
  }
  // Elements whose id is not in [first, first + columns of the table) stay as they are.
  void Lookup(UbTile<std::int32_t> dst, UbTile<std::int32_t> ids, UbTile<std::int32_t> table,
              std::int32_t first, Loc loc = Loc::current()) {
    CUBIST_CHECK(Same(dst, ids) && table.rows() == 1, "shapes differ");
    E::Lookup(dst, ids, table, first, loc);
  }
  void Receive(UbTile<float> dst, HandOverTile<float> src, Loc loc = Loc::current()) requires requires(E& e) {
    e.Receive(dst, src, loc);
  }
  {
    CUBIST_CHECK(dst.rows() == src.rows() && dst.cols() == src.cols(), "shapes differ");
    E::Receive(dst, src, loc);
  }
  void Move(UbTile<float> dst, L0CTile<float> src, Loc loc = Loc::current()) requires requires(E& e) {
    e.MoveToUb(dst, src, loc);
  }
  {
    CUBIST_CHECK(dst.rows() == src.rows() && dst.cols() == src.cols(), "shapes differ");
    E::MoveToUb(dst, src, loc);
  }
  template <OperandType T>
  void Move(L1Tile<T> dst, UbTile<T> src, Loc loc = Loc::current()) requires requires(E& e) {
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

  void Binary(BinaryOp op, UbTile<float> dst, UbTile<float> a, UbTile<float> b, Loc loc) {
    CUBIST_CHECK(Same(dst, a) && (Same(a, b) || IsColumnOf(b, a) || IsRowOf(b, a)), "shapes differ");
    E::Binary(op, dst, a, b, loc);
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
    const SortRefs refs{
        sort.places, sort.offsets, {sort.keys[0], sort.keys[1]}, {sort.values[0], sort.values[1]}};
    CUBIST_CHECK(Same(refs.offsets, bins_tile) && Same(refs.places, ids), "shapes differ");
    for (const TileRef* tile : {&refs.keys[0], &refs.keys[1], &refs.values[0], &refs.values[1]})
      CUBIST_CHECK(Same(*tile, ids), "shapes differ");
    return refs;
  }
  static void NormGradShapes(const TileRef& dx, const TileRef& s0, const TileRef& s1, const TileRef& dy,
                             const TileRef& x, const TileRef& weights, const TileRef& factor,
                             const TileRef& shift) {
    CUBIST_CHECK(Same(dx, x) && Same(dy, x) && Same(s0, x) && Same(s1, x) && IsRowOf(weights, x) &&
                     IsColumnOf(factor, x) && IsColumnOf(shift, x),
                 "shapes differ");
  }
};

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_CORE_H_
