// The instruction set: concepts that kernels are written against. cube_front.h and vector_front.h give them to executors.
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
#include <span>
#include <type_traits>

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

// Operands of NormRows, and of NormGrad and NormRowsGrad. What is default-constructed is not given.
template <class T>
struct NormTiles {
  UbTile<T> out;                // (r, c)
  UbTile<float> rstd, one;      // (r, 1): result, scratch
  UbTile<float> s0, s1;         // (r, c): scratch
  UbTile<T> x;                  // (r, c)
  UbTile<float> gamma;          // (1, c)
  UbTile<T> residual{}, sum{};  // (r, c), both or none: operand, result
};
template <class T>
struct NormGradTiles {
  UbTile<T> d_x;                // (r, c)
  UbTile<float> d_gamma{};      // (1, c), added to; or not given
  UbTile<float> shift, s0, s1;  // (r, 1), and scratch (r, c)
  UbTile<T> d_out, x;           // (r, c)
  UbTile<float> gamma, rstd;    // (1, c), (r, 1)
  UbTile<T> more{};             // (r, c), or not given
};

// Operands of GroupedTopK: of each row's g groups of columns p are kept.
struct GroupedTopKTiles {
  UbTile<float> values;        // (r, k)
  UbTile<std::int32_t> ids;    // (r, k)
  UbTile<float> a;             // (r, c)
  UbTile<float> bias{};        // (1, c), or not given
  UbTile<float> choice;        // (r, c): scratch
  UbTile<float> worths, best;  // (r, g), (r, p): scratch
  UbTile<std::int32_t> kept;   // (r, p): scratch
};

// A row of StoreScaledDots: GM = weight * x and sum (1, 1) += sum_j x_j * row_j, as far as `dst` and `row` are given.
template <class T>
struct ScaledDot {
  Gm dst{};
  float weight = 1;
  UbTile<float> sum{};
  UbTile<T> row{};
};

// What Histogram and Rank sort with: tiles of the ids' shape, and (1, bins + 1) ones. Not given, they keep a table.
struct SortTiles {
  UbTile<std::int32_t> places{};        // 0, 1, 2, .. row by row
  UbTile<float> bins{};                 // 0, 1, 2, ..
  std::array<UbTile<float>, 2> keys{};  // Scratch of the ids' shape
  std::array<UbTile<std::int32_t>, 2> values{};
  UbTile<float> starts{}, probes{}, found{};  // Scratch of the bins' shape
  UbTile<std::int32_t> at{};

  bool given() const { return places.given(); }
};

// Cube core: the matrix unit and the movers that feed it. Operands are fp32, bf16 or fp16; sums are fp32.
// clang-format off
template <class C>
concept CubeCore = requires(C& core, Gm gm, PackedGm packed, L1Tile<BF16> l1, L0ATile<BF16> a,
                            L0BTile<BF16> b, L0CTile<float> c, BtTile<float> bias, SlotRequest request,
                            std::int64_t n) {
  { core.Allocate(request) } -> std::same_as<Slot*>;
  { core.index() } -> std::convertible_to<int>;  // This core's number within the phase,
  { core.count() } -> std::convertible_to<int>;  // and how many there are.
  core.Load(l1, gm);                        // MTE2  GM -> L1, to the operand's layout (ND2NZ); either stride
                                            //       may be 1
  core.Load(l1, packed);                    // MTE2  GM -> L1, already in the operand's layout
  core.Store(packed, l1);                   // MTE3  L1 -> GM, in the operand's layout
  core.Load(a, l1, Transpose::kNo);         // MTE1  L1 -> L0A, as it stands or transposed
  core.Load(b, l1, Transpose::kNo);         // MTE1  L1 -> L0B, likewise
  core.Load(bias, gm);                      // MTE2, MTE1  one row GM -> L1 -> BT, widened to fp32
  core.Mmad(c, a, b, Accumulate::kNo);      // M     c (+)= a * b; (m, n) (+)= (m, k) * (k, n); k may be 0
  core.Mmad(c, a, b, bias);                 // M     c = bias + a * b; bias is (1, n), added to every row
  core.Store(gm, c);                        // FIX   L0C -> GM, cast to the view's dtype
  core.Store(gm, c, Accumulate::kYes);      // FIX   GM += L0C, atomically; the view is fp32
  core.Store(gm, c, FixOptions{});          // FIX   either, with a factor, and not below 0 where asked
  // These two on Vector cores that have buffers, too.
  { core.ReadScalar(gm, n) } -> std::same_as<std::int64_t>;  // S     element j of a (1, c) integer view
  core.Spend(n);                            // S     time for n steps of the kernel's own loops
};
// clang-format on

// Vector core: rows in its UB. An operand b of (r, 1) is broadcast over the columns of a, one of (1, c) over its rows.
// Tiles may coincide, not overlap otherwise.
// clang-format off
template <class V>
concept VectorCore = requires(V& core, Gm gm, UbTile<float> x, UbTile<BF16> narrow, UbTile<std::int32_t> ids,
                              UbTile<std::int64_t> wide_ids, UbTile<std::uint8_t> flags,
                              std::span<const UbTile<BF16>> rows, std::span<const float> weights,
                              std::span<const ScaledDot<BF16>> dots, std::span<const Gm> gms,
                              SlotRequest request, std::int64_t n) {
  { core.Allocate(request) } -> std::same_as<Slot*>;
  { core.index() } -> std::convertible_to<int>;
  { core.count() } -> std::convertible_to<int>;
  core.Load(narrow, gm);                    // MTE2  GM -> UB, same dtype
  core.Load(x, gm);                         // MTE2  GM -> UB; V widens where the view's dtype is narrower
  core.Store(gm, narrow);                   // MTE3  UB -> GM, same dtype
  core.Store(gm, x);                        // MTE3  UB -> GM; V narrows first (x is lost) where the dtype is
                                            //       narrower
  core.Fill(x, 0.0f);                       // V     x = value
  core.Cast(narrow, x);                     // V     narrow = x, to nearest even; also 16-bit to float
  core.Cast(ids, wide_ids);                 // V     int64 to int32
  core.Cast(ids, flags);                    // V     booleans to 0 and 1; also to float
  core.MulScalar(x, x, 2.0f);               // V     dst = a * value
  core.MaxScalar(x, x, 2.0f);               // V     dst = max(a, value)
  core.AddScalar(x, x, 2.0f);               // V     dst = a + value
  core.Add(x, x, x);                        // V     dst = a + b
  core.Sub(x, x, x);                        // V     dst = a - b
  core.Mul(x, x, x);                        // V     dst = a * b
  core.Div(x, x, x);                        // V     dst = a / b
  core.Max(x, x, x);                        // V     dst = max(a, b)
  core.Exp(x, x);                           // V     dst = exp(a)
  core.Ln(x, x);                            // V     dst = ln(a)
  core.Sqrt(x, x);                          // V     dst = sqrt(a)
  core.RowMax(x, x);                        // V     dst (r, 1) = maximum of each row; dst may be the first
                                            //       column of a
  core.RowSum(x, x);                        // V     dst (r, 1) = sum of each row; likewise
  core.Transpose(x, x);                     // V     dst (c, r) = a (r, c) turned; two tiles
  core.Unzip(narrow, narrow, 1);            // V     (dst, a, first): dst(i, j) = a(i, 2 j + first), first 0 or 1
  core.Unzip(x, x, 0);                      // V     the same on fp32
  core.Zip(x, x, x);                        // V     dst(i, 2 j) = a(i, j), dst(i, 2 j + 1) = b(i, j)
  core.MaskOutside(x, n, n, 0.0f);          // V     x(i, j) = value unless lowest <= j - i <= highest
  core.MaskWhere(x, flags, 0.0f);           // V     x(i, j) = value where flags(i, j) is true; also on 16-bit
                                            //       tiles
  core.Distances(x, n);                     // V     x(i, j) = |first + i - j|
  core.DropFlags(flags, DropoutStream{}, n, n, false);
                                            // V     (flags, stream, row, key, transposed): whether weight
                                            //       (row + i, key + j) is dropped, or (row + j, key + i)
  core.Fill(ids, 0);                        // V     the same on int32
  core.Add(ids, ids, ids);                  // V     the same on int32
  core.ColumnSum(ids, ids);                 // V     dst (1, c) = sum of the rows of a (r, c); r may be 0
  core.CountTrue(ids, ids, flags);          // (dst, scratch, flags): dst (1, c) = how many rows of flags (r, c)
                                            // are true, column by column; r may be 0
  core.ExclusiveScan(ids, ids, n);          // V     dst (1, c + 1): dst[j] = initial + a[0] + .. + a[j - 1]
  core.AddScalar(ids, ids, n);              // V     dst = a + value
  { core.ReadScalar(ids, n) } -> std::same_as<std::int64_t>;  // S     element j of a (1, c) tile
  { core.ReadScalar(x, n) } -> std::same_as<float>;  // S
  core.Spend(n);                            // S     time for n steps of the kernel's own loops

  // Composites: one body on the host, the expansion of composites.h on the model.
  core.SoftmaxStep(narrow, x, x, x, x, 1.0f);  // (p, s, m_new, m_old, l, scale); see ExpandSoftmaxStep
  core.AddAlibi(x, x, 1.0f, 1.0f, n, false);
                                            // (s, scratch, scale, slope, first, root): s = s * scale - slope
                                            // * |first + i - j|
  core.AttentionGradStep(narrow, narrow, x, x, x, x, 1.0f);
                                            // (p, ds, s, dp, lse, delta, scale); see ExpandAttentionGradStep
  core.MulAdd(x, x, x);                     // (acc, factor, x): acc = acc * factor + x
  core.WeightedSum(x, x, rows, weights, Accumulate::kNo);
                                            // (acc, scratch, rows, weights): acc (+)= sum_i w_i * row_i

  // s0 .. s3 are scratch tiles of the operands' shape.
  core.Abs(x, x);                           // V     dst = |a|
  core.SelectLe(x, x, 1.0f, x, x);          // V     dst = key <= limit ? a : b; NaN takes b, which may be (r,
                                            //       1)
  core.TopK(x, ids, x);                     // V     (values, ids, a): each row's highest, descending, of
                                            //       equals the lower column first
  core.GroupTop(x, x, n);                   // V     (sums, a, n): sums (r, g): the n highest of each of g
                                            //       parts of a row
  core.KeepGroups(x, ids, n);               // V     (a, ids, c): -inf outside the parts of c columns that ids
                                            //       name
  core.GroupedTopK(GroupedTopKTiles{}, n);  // (tiles, n): TopK of a + bias in the groups whose n highest add up
                                            // to most; see ExpandGroupedTopK
  core.Gather(x, x, ids);                   // V     dst(i, j) = a(i, ids(i, j)), 0 where that is negative
  core.Scatter(x, ids, x);                  // S     dst(i, ids(i, j)) = values(i, j), nothing where there is
                                            //       no such column
  core.Random(x, RandomStream{}, n, n);     // V     (u, stream, first, step): element (i, j) is number first
                                            //       + i * step + j, in (0, 1)
  core.DropRoutes(ids, x, x, 0.5f);         // V     (ids, weights, u, rate): -1 and 0 where u < rate
  core.MapRoutes(x, ids, x, x, RouteFunction{});
                                            // S     (out, ids, scores, d_weights, f): a caller's function, by
                                            //       rows; d_weights may be none
  core.Scores(ScoreFunction::kSoftmax, x, x, x, x);  // (function, n, s0, s1, column); see ExpandScores
  core.Repair(x, x, x, x, x, 1.0f, true);   // (x, bad, s0, s1, column, limit, by_mean); see ExpandRepair
  core.RowDot(x, x, x, narrow, narrow);     // (sum, s0, s1, a, b[, w]): sum (r, 1) += rowsum(a * b * w)
  core.ScaleRows(narrow, x, narrow, x, x);  // (dst, s0, a, factor, w): dst = a * factor * w
  core.NormRows(NormTiles<BF16>{}, 1.0f, 1.0f);  // (tiles, scale, eps); see ExpandNormRows
  core.NormGrad(NormGradTiles<BF16>{});     // d_x = d_out * gamma * rstd - x * shift (+ more)
  core.NormRowsGrad(NormGradTiles<BF16>{}, 1.0f);  // (tiles, scale); see ExpandNormRowsGrad
  core.AddColumnDots(x, x, x, narrow, narrow, x);
                                            // (acc, s0, s1, a, b, factor): acc (1, c) += colsum(a * b *
                                            // factor)
  core.SwiGlu(narrow, x, x, narrow, narrow, x);  // (out, s0, s1, gate, up[, probs]); see ExpandSwiGlu
  core.SwiGluGrad(narrow, narrow, x, x, x, x, x, narrow, narrow, narrow, x);  // see ExpandSwiGluGrad
  core.StoreActivated(gm, EpilogueTiles{x}, EpilogueScalars{});
                                            // GM = activation(alpha * x + bias + beta * residual)
  core.AddDot(x, x, x, narrow);             // (sum, scratch, x, row): sum (1, 1) += sum_j x_j * row_j
  core.StoreScaledDots(x, x, x, narrow, true, dots);
                                            // (wide, s0, s1, x, widens, dots): GM = weight * x and AddDot of
                                            // x, for several rows
  core.StoreEach(gms, narrow);              // (gms, row): each of several rows of GM = row, of its dtype
  core.Gather(x, gm, ids, x);               // (dst, column, places, staging): dst(i, j) = column(places(i,
                                            // j)), else 0
  core.Scatter(gm, ids, x, x);              // (column, places, src, staging): column(places(i, j)) = src(i,
                                            // j); also int32
  core.Histogram(ids, ids, IdBins{});       // (counts, ids, bins): ++counts[bin] of each id that has one of
                                            // the bins
  core.Rank(ids, ids, ids, IdBins{});       // (ranks, next, ids, bins): row by row, next[bin]++, else -1
  core.Histogram(ids, ids, IdBins{}, SortTiles{});
                                            // likewise, by Sort32 and MergeSort; see ExpandHistogramBySort
  core.Rank(ids, ids, ids, IdBins{}, SortTiles{});  // likewise; see ExpandRankBySort
  core.Sort32(x, ids, x, ids);              // V     (keys, values, from, values from): runs of 32 keys, row
                                            //       by row, descending and stable, with their values
  core.MergeSort(x, ids, x, ids, n);        // V     (keys, values, from, values from, run): runs of four
                                            //       times `run`
  core.RankWithin(ids, ids, ids, ids, IdBins{});
                                            // (ranks, next, limits, ids, bins): likewise below limits[bin],
                                            // else -1
  core.RoundUp(ids, ids, n);                // S     dst (1, c) = a rounded up to a multiple of a number
  core.TrueColumns(ids, ids);               // V     (dst, flags): each row's columns that are not 0,
                                            //       ascending, then -1
  core.KeepWhere(ids, ids, ids);            // V     (dst, a, flags): a where flags, which may be (r, 1), are
                                            //       not 0, else -1
  core.Lookup(ids, ids, ids, n);            // V     (dst, ids, table, first): dst = table[id - first] for
                                            //       each id in its range
};
// clang-format on

// An AI core: one Cube core and its Vector cores, each with its own UB. Only here do tiles change hands. Where
// the chip has no direct path, a hand-over is FIX or MTE3 to a GM workspace, a cross-core flag, and MTE2.
// clang-format off
template <class C>
concept AiCore = CubeCore<C> && requires(C& core, L1Tile<BF16> l1, L0CTile<float> c,
                                         HandOverTile<float> between, UbTile<float> x, UbTile<BF16> narrow) {
  { core.vectors().size() } -> std::convertible_to<std::size_t>;
  requires VectorCore<std::remove_cvref_t<decltype(core.vectors()[0])>>;
  core.Send(between, c);                    // Cube: hand-over slot = L0C, which is lost
  core.vectors()[0].Receive(x, between);    // Vector: UB = hand-over slot, which is lost
  core.vectors()[0].Move(x, c);             // both at once
  core.vectors()[0].Move(l1, narrow);       // Vector -> Cube: L1 (A operand) = UB, which is lost
};
// clang-format on

// What a Cube core multiplies, and what UB tiles hold.
template <class T>
concept OperandType = std::same_as<T, float> || std::same_as<T, BF16> || std::same_as<T, F16>;
template <class T>
concept RowType = OperandType<T> || std::same_as<T, std::int32_t> || std::same_as<T, std::int64_t> ||
    std::same_as<T, std::uint8_t>;

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_CORE_H_
