#include "kernels/grouped_matmul.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <functional>
#include <new>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/choose_for.h"
#include "kernels/element_type.h"
#include "kernels/grouped_matmul_kernel.h"
#include "kernels/matmul_epilogue.h"
#include "kernels/pack.h"
#include "kernels/packed_input.h"
#include "kernels/validate.h"
#include "npu_model/launch.h"
#include "tiling/grouped_matmul_tiling.h"

namespace cubist {
namespace {

constexpr const char* kForward = "grouped_matmul";
constexpr const char* kGrad = "grouped_matmul_grad";

// ---- Validation ----

std::string At(std::int64_t i) { return "at (" + std::to_string(i) + ")"; }

// The groups' sizes: not negative, and within `rows`.
Status CheckGroups(const Argument& arg, GroupList list, std::int64_t rows) {
  CUBIST_RETURN_IF_ERROR(CheckChoice(arg.kernel, "group_list", list, GroupList::kEnds));
  CUBIST_RETURN_IF_ERROR(CheckShape(arg, {{"E"}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(arg, {DType::kI32, DType::kI64}));
  CUBIST_RETURN_IF_ERROR(CheckStorage(arg, /*needs_data=*/true));
  std::int64_t end = 0;
  for (std::int64_t g = 0; g < arg.tensor.size(0); ++g) {
    const std::int64_t value = LoadInt(arg.tensor.data, arg.tensor.dtype, g * arg.tensor.stride(0));
    const std::string has = "has " + std::to_string(value) + " " + At(g);
    if (list == GroupList::kEnds) {
      if (value < end) return arg.Error(has + " after " + std::to_string(end) + ", ends do not descend");
      if (value > rows) return arg.Error(has + ", M is " + std::to_string(rows));
      end = value;
    } else {
      if (value < 0) return arg.Error(has + ", the least is 0");
      if (value > rows - end) {
        return arg.Error(has + ", which with the " + std::to_string(end) + " rows before it exceeds M, " +
                         std::to_string(rows));
      }
      end += value;
    }
  }
  return {};
}

std::int64_t RowsOfGroup(const ConstTensor& groups, GroupList list, std::int64_t g) {
  const auto at = [&](std::int64_t i) { return LoadInt(groups.data, groups.dtype, i * groups.stride(0)); };
  return at(g) - (list == GroupList::kEnds && g > 0 ? at(g - 1) : 0);
}

// A call with groups of other rows.
template <class Args>
struct Batch {
  Batch(const Args& of, std::vector<std::int64_t> counts) : args(of), rows(std::move(counts)) {
    args.groups = ConstTensor(rows.data(), {std::ssize(rows)}), args.group_list = GroupList::kCounts;
  }
  Batch(const Batch&) = delete;

  Args args;
  std::vector<std::int64_t> rows;
};

// A call as its tiling is chosen on an NPU: with the batches that stand for the spread of its own, since the rows of each group are
// known to the cores alone. They look for their tiling; this launch, which sees what they will find, chooses no other.
template <class Args>
struct SpreadBatch {
  SpreadBatch(const ChipSpec& chip, const Args& args, std::int64_t all)
      : spreads(chip.pipes_overlap ? args.groups.size(0) : 0),
        spread(chip.pipes_overlap ? SpreadOf(args, all) : 0),
        by_power(args, spreads.RowsOf(spread, GroupSpreads::Law::kPower, all)),
        by_decay(args, spreads.RowsOf(spread, GroupSpreads::Law::kDecay, all)) {}

  GroupSpreads spreads;
  std::size_t spread;
  Batch<Args> by_power, by_decay;

 private:
  std::size_t SpreadOf(const Args& args, std::int64_t all) const {
    GroupSpreads::Meter meter(all);
    for (std::int64_t g = 0; g < args.groups.size(0); ++g)
      meter.Add(RowsOfGroup(args.groups, args.group_list, g));
    return meter.SpreadBy(spreads);
  }
};

// One matrix (rows, cols) per group, stored transposed where asked: a stack, or a list.
template <class AnyTensor>
struct Matrices {
  const char* kernel;
  const char* name;
  const char* list_name;
  AnyTensor stack;
  std::span<const AnyTensor> list;
  bool transposed = false;

  bool given() const { return stack.given() || !list.empty(); }
  Argument Stack() const { return {kernel, name, stack}; }
  // Calls check(argument, group) for the stack, with group -1, or for each of the list, until one is an error.
  template <class Check>
  Status ForEach(Check check) const {
    if (stack.given()) return check(Stack(), std::int64_t{-1});
    for (std::size_t g = 0; g < list.size(); ++g) {
      const std::string one = std::string(list_name) + "[" + std::to_string(g) + "]";
      CUBIST_RETURN_IF_ERROR(check(Argument{kernel, one.c_str(), list[g]}, static_cast<std::int64_t>(g)));
    }
    return {};
  }
};

// Shapes, types and storage.
template <class AnyTensor>
Status CheckMatrices(const Matrices<AnyTensor>& m, std::int64_t groups, Dim rows, Dim cols,
                     std::initializer_list<DType> dtypes, bool computes,
                     const std::function<bool(std::int64_t group)>& needs_data) {
  if (m.stack.given() && !m.list.empty()) {
    return InvalidArgument(std::string(m.kernel) + ": " + m.name + " and " + m.list_name + " are both given");
  }
  if (!m.stack.given() && static_cast<std::int64_t>(m.list.size()) != groups) {
    if (m.list.empty()) return m.Stack().Error("is not given");
    return InvalidArgument(std::string(m.kernel) + ": " + m.list_name + " has " +
                           std::to_string(m.list.size()) + " matrices, needs " + std::to_string(groups) +
                           " (E, of groups)");
  }
  const Dim first = m.transposed ? cols : rows, second = m.transposed ? rows : cols;
  return m.ForEach([&](const Argument& arg, std::int64_t group) -> Status {
    if (group < 0) {
      CUBIST_RETURN_IF_ERROR(CheckShape(arg, {{"E, of groups", groups}, first, second}));
    } else {
      CUBIST_RETURN_IF_ERROR(CheckShape(arg, {first, second}));
    }
    CUBIST_RETURN_IF_ERROR(CheckDType(arg, dtypes));
    return CheckStorage(arg, computes && (group < 0 || needs_data(group)));
  });
}

Matrices<ConstTensor> WeightsOf(const GroupedMatmulArgs& args) {
  return {kForward, "weights", "weight_list", args.weights, args.weight_list, args.transpose_weights};
}
Matrices<ConstTensor> WeightsOf(const GroupedMatmulGradArgs& args) {
  return {kGrad, "weights", "weight_list", args.weights, args.weight_list, args.transpose_weights};
}

template <class AnyTensor>
Status CheckMatricesApart(const Argument& output, const Matrices<AnyTensor>& m) {
  if (!m.given()) return {};
  return m.ForEach([&](const Argument& arg, std::int64_t) { return CheckApart(output, arg); });
}

// `groups` matrices (rows, cols) of dtype, in place of plain weights.
Status CheckPackedWeights(const Device& device, const char* kernel, const PackedOperand& packed,
                          bool plain_too, std::int64_t groups, std::int64_t rows, std::int64_t cols,
                          DType dtype, bool read) {
  const auto error = [&](const std::string& what) {
    return InvalidArgument(std::string(kernel) + ": packed_weights " + what);
  };
  if (plain_too) return error("and weights are both given");
  if (packed.side != Side::kB) return error("were packed for side a (c = a b), need side b");
  if (packed.matrices != groups || packed.rows != rows || packed.cols != cols || packed.dtype != dtype) {
    const auto text = [](std::int64_t e, std::int64_t r, std::int64_t c, DType type) {
      return std::to_string(e) + " matrices (" + std::to_string(r) + ", " + std::to_string(c) + ") of " +
             NameOf(type);
    };
    return error("hold " + text(packed.matrices, packed.rows, packed.cols, packed.dtype) + ", need " +
                 text(groups, rows, cols, dtype));
  }
  return read ? CheckPacked(device, kernel, "packed_weights", packed) : Status();
}

Status Validate(const Device& device, const GroupedMatmulArgs& args) {
  const Argument x{kForward, "x", args.x}, groups{kForward, "groups", args.groups},
      bias{kForward, "bias", args.bias}, out{kForward, "out", args.out};
  CUBIST_RETURN_IF_ERROR(CheckShape(x, {{"M"}, {"K"}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(x, kFloatTypes));
  const std::int64_t m = args.x.size(0), k = args.x.size(1);
  const bool multiplies = args.alpha != 0;
  CUBIST_RETURN_IF_ERROR(CheckGroups(groups, args.group_list, m));
  const std::int64_t e = args.groups.size(0);
  const Matrices<ConstTensor> weights = WeightsOf(args);
  CUBIST_RETURN_IF_ERROR(CheckShape(out, {{"M, of x", m}, {"N"}}));
  const std::int64_t n = args.out.size(1);
  if (args.packed_weights.given()) {
    if (args.transpose_weights) {
      return InvalidArgument(std::string(kForward) +
                             ": packed_weights are never transposed, but transpose_weights is set");
    }
    CUBIST_RETURN_IF_ERROR(CheckPackedWeights(device, kForward, args.packed_weights, weights.given(), e, k, n,
                                              args.x.dtype, multiplies));
  } else if (weights.given() || e > 0) {
    CUBIST_RETURN_IF_ERROR(CheckMatrices(
        weights, e, {"K, of x", k}, {"N, of out", n}, {args.x.dtype}, device.computes() && multiplies,
        [&](std::int64_t g) { return RowsOfGroup(args.groups, args.group_list, g) > 0; }));
  }
  CUBIST_RETURN_IF_ERROR(CheckDType(out, kFloatTypes));
  if (args.bias.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(bias, {{"E, of groups", e}, {"N, of out", n}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(bias, kFloatTypes));
  }
  const Argument residual{kForward, "residual", args.residual};
  if (args.residual.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(residual, {{"M, of x", m}, {"N, of out", n}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(residual, kFloatTypes));
  }
  CUBIST_RETURN_IF_ERROR(CheckActivation(kForward, args.activation));
  const Argument packed{kForward, "packed_weights", args.packed_weights.memory()};
  const std::array<const Argument*, 3> all{&bias, &x, &packed};
  const auto inputs =
      std::span(all).first(multiplies ? all.size() : 1);  // Those that are read, beside weights.
  for (const Argument* arg : inputs) CUBIST_RETURN_IF_ERROR(CheckStorage(*arg, device.computes()));
  if (args.beta != 0) CUBIST_RETURN_IF_ERROR(CheckStorage(residual, device.computes()));
  CUBIST_RETURN_IF_ERROR(CheckStorage(out, device.computes()));
  CUBIST_RETURN_IF_ERROR(CheckWritable(out));
  CUBIST_RETURN_IF_ERROR(CheckApart(out, groups));
  for (const Argument* arg : inputs) CUBIST_RETURN_IF_ERROR(CheckApart(out, *arg));
  if (args.beta != 0 && !SameView(args.residual, args.out)) CUBIST_RETURN_IF_ERROR(CheckApart(out, residual));
  return multiplies ? CheckMatricesApart(out, weights) : Status();
}

Status Validate(const Device& device, const GroupedMatmulGradArgs& args) {
  const Argument dy{kGrad, "dy", args.dy}, groups{kGrad, "groups", args.groups}, x{kGrad, "x", args.x},
      dx{kGrad, "dx", args.dx};
  const Matrices<ConstTensor> weights = WeightsOf(args);
  const Matrices<Tensor> dw{kGrad, "dw", "dw_list", args.dw, args.dw_list, args.transpose_weights};
  CUBIST_RETURN_IF_ERROR(CheckShape(dy, {{"M"}, {"N"}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(dy, kFloatTypes));
  const std::int64_t m = args.dy.size(0), n = args.dy.size(1);
  CUBIST_RETURN_IF_ERROR(CheckGroups(groups, args.group_list, m));
  const std::int64_t e = args.groups.size(0);
  const auto has_rows = [&](std::int64_t g) { return RowsOfGroup(args.groups, args.group_list, g) > 0; };
  if (!args.dx.given() && !dw.given()) return dx.Error("is not given, nor is dw");
  if (args.dx.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(dx, {{"M, of dy", m}, {"K"}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(dx, {DType::kF32, args.dy.dtype}));
    if (args.packed_weights.given()) {
      CUBIST_RETURN_IF_ERROR(CheckPackedWeights(device, kGrad, args.packed_weights, weights.given(), e, n,
                                                args.dx.size(1), args.dy.dtype, /*read=*/true));
    } else if (weights.given() || e > 0) {
      CUBIST_RETURN_IF_ERROR(CheckMatrices(weights, e, {"K, of dx", args.dx.size(1)}, {"N, of dy", n},
                                           {args.dy.dtype}, device.computes(), has_rows));
    }
  }
  if (dw.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(x, {{"M, of dy", m}, {"K"}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(x, {args.dy.dtype}));
    const auto written = [&](std::int64_t g) { return !args.accumulate_dw || has_rows(g); };
    const DType narrow = args.accumulate_dw ? DType::kF32 : args.dy.dtype;
    CUBIST_RETURN_IF_ERROR(CheckMatrices(dw, e, {"K, of x", args.x.size(1)}, {"N, of dy", n},
                                         {DType::kF32, narrow}, device.computes(), written));
    if (args.dx.given() && args.dx.size(1) != args.x.size(1)) {
      return dx.Error("has size " + std::to_string(args.dx.size(1)) + " in dimension 1 (K, of x), needs " +
                      std::to_string(args.x.size(1)));
    }
  }
  const Argument packed{kGrad, "packed_weights", args.packed_weights.memory()};
  for (const Argument* arg : {&dy, &x, &dx}) CUBIST_RETURN_IF_ERROR(CheckStorage(*arg, device.computes()));
  if (args.dx.given()) {
    CUBIST_RETURN_IF_ERROR(CheckWritable(dx));
    for (const Argument* arg : {&dy, &groups, &x, &packed}) CUBIST_RETURN_IF_ERROR(CheckApart(dx, *arg));
    CUBIST_RETURN_IF_ERROR(CheckMatricesApart(dx, weights));
    CUBIST_RETURN_IF_ERROR(CheckMatricesApart(dx, dw));
  }
  if (!dw.given()) return {};
  CUBIST_RETURN_IF_ERROR(dw.ForEach([&](const Argument& out, std::int64_t) -> Status {
    CUBIST_RETURN_IF_ERROR(CheckWritable(out));
    for (const Argument* arg : {&dy, &groups, &x, &packed}) CUBIST_RETURN_IF_ERROR(CheckApart(out, *arg));
    if (args.dx.given()) CUBIST_RETURN_IF_ERROR(CheckMatricesApart(out, weights));
    return {};
  }));
  return CheckListApart(kGrad, dw.list_name, dw.list);
}

// ---- Launch ----

// The groups' matrices as tensors of the launch. `tensors` keeps those of a list.
template <class AnyTensor, class Add>
GroupedMatrices AddMatrices(const AnyTensor& stack, std::span<const AnyTensor> list, bool transposed,
                            std::vector<const GmTensor*>* tensors, Add add) {
  GroupedMatrices matrices;
  if (stack.given()) {
    matrices.all = add(TransposedIf(transposed, stack));
    return matrices;
  }
  tensors->reserve(list.size());
  for (const AnyTensor& t : list) tensors->push_back(add(TransposedIf(transposed, t)));
  matrices.each = *tensors;
  return matrices;
}

GroupRows AddGroups(Launch& launch, const ConstTensor& groups, GroupList list, std::int64_t rows) {
  return {MatrixOf(*launch.Input("groups", groups)), list == GroupList::kEnds, rows};
}

// A product per group on rows of `x`; forward, and the gradient of x.
struct RowProducts {
  ConstTensor x, groups;
  GroupList group_list;
  ConstTensor weights;
  std::span<const ConstTensor> weight_list;
  PackedOperand packed_weights;
  bool transpose_weights = false;
  ConstTensor bias;
  Tensor out;
  const char *x_name, *out_name;
  EpilogueArgs epilogue = {};
};

// Bytes from row to row of the weights where their columns are adjacent, in all matrices, else 0; or with `columns`
// from column to column where their rows are.
std::int64_t StrideBytesOf(const RowProducts& p, bool columns) {
  if (p.packed_weights.given()) return 0;
  const auto of = [&](const ConstTensor& t) {
    const bool transposed = p.transpose_weights != columns;
    const int outer = t.rank - (transposed ? 1 : 2), inner = t.rank - (transposed ? 2 : 1);
    return t.stride(inner) == 1 && (!columns || t.stride(outer) != 1)
               ? std::abs(StepOf(t, outer)) * SizeOf(t.dtype)
               : 0;
  };
  if (p.weights.given()) return of(p.weights);
  std::int64_t bytes = 0;
  for (const ConstTensor& t : p.weight_list) {
    if (of(t) == 0) return 0;
    bytes = of(t);
  }
  return bytes;
}

// A call with a tiling given, as ChooseFor asks for it: of rows forward and for dx, of sums over rows for dw.
template <class T, class Args>
struct ReplayOf {
  static constexpr ShortListLimits kFamilies{.count = 96, .dearest = 2, .work = 220000},
      kWalks{.count = 32, .dearest = 2.5, .work = 100000, .alone = 300000};
  const SpreadBatch<Args>& of;

  Status operator()(const Device& model, const GroupedMatmulTiling& tiling, Profile* profile) const;
  void AddTo(ChoiceKey* key) const;
};

template <class T, class Replay>
Status AddRowProducts(const Device& device, const char* kernel, Launch& launch, const RowProducts& p,
                      const Replay& replay, const GroupedMatmulTiling* forced) {
  const GmTensor& x = *launch.Input(p.x_name, p.x);
  GroupedMatmulShape shape;
  shape.groups = p.groups.size(0);
  shape.rows = replay.of.by_power.rows;
  shape.product.m = p.x.size(0), shape.product.n = p.out.size(1), shape.product.k = p.x.size(1);
  shape.product.in = p.x.dtype, shape.product.out = p.out.dtype;
  GroupedMatmulOperands g;
  g.epilogue = EpilogueOf(p.epilogue, p.out, /*late=*/false);
  g.sum_epilogue = EpilogueOf(p.epilogue, p.out, /*late=*/true);
  shape.product.epilogue = g.epilogue.shape;
  shape.adds = g.epilogue.fix.accumulate == Accumulate::kYes;
  shape.product.bias = p.bias.given() && !g.epilogue.shape.bias;
  shape.product.b_packed = p.packed_weights.given();
  shape.product.a_row_bytes = p.x.stride(1) == 1 ? std::abs(StepOf(p.x, 0)) * SizeOf(p.x.dtype) : 0;
  shape.product.b_row_bytes = StrideBytesOf(p, /*columns=*/false);
  shape.product.b_col_bytes = StrideBytesOf(p, /*columns=*/true);
  GroupedMatmulTiling tiling;
  if (forced != nullptr) {
    tiling = *forced;
  } else {
    CUBIST_RETURN_IF_ERROR(ChooseFor(device, kernel, shape, &Candidates, &tiling, replay));
  }
  const GroupedTilings tilings{replay.of.spreads,
                               {launch.chip().pipes_overlap ? GroupSpreads::kCount : 1, tiling}};

  std::vector<const GmTensor*> list;
  g.groups = AddGroups(launch, p.groups, p.group_list, p.x.size(0));
  g.x.plain = MatrixOf(x);
  if (p.packed_weights.given()) g.packed_weights = PackedInput(launch, "packed_weights", p.packed_weights);
  g.weights = AddMatrices(p.weights, p.weight_list, p.transpose_weights, &list,
                          [&](const ConstTensor& t) { return launch.Input("weights", t); });
  g.late_bias = launch.Input("bias", p.bias);
  if (shape.product.bias) g.bias = g.late_bias;
  const ConstTensor& residual = p.epilogue.residual;
  const bool adds_to_out = residual.given() && SameView(residual, p.out);
  g.out = MatrixOf(adds_to_out ? *launch.InOut(p.out_name, p.out) : *launch.Output(p.out_name, p.out));
  if (g.sum_epilogue.shape.residual)
    g.residual = adds_to_out ? g.out : MatrixOf(*launch.Input("residual", residual));
  g.k = p.epilogue.alpha == 0 ? 0 : shape.product.k;
  if (tiling.block.pack_a) {
    g.x.packed = Pack<T>(launch, "x_packed", Role::kA, x);
    g.x.is_packed = true;
  }
  const std::int64_t most =
      (shape.groups + 1 + shape.product.m / tiling.block.m) * CeilDiv(shape.product.n, tiling.block.n);
  launch.OnAiCores(shape.product.m == 0 ? 0 : most,
                   [&](auto& core) { GroupedMatmulKernel<T>(core, g, tilings); });
  return {};
}

// With `forced` in place of the tiling of its choice, where that is given.
template <class T>
Status Run(const Device& device, const GroupedMatmulArgs& args, Profile* profile,
           const GroupedMatmulTiling* forced = nullptr) {
  Launch launch(device, kForward);
  launch.GiveThreadsRuns();
  const SpreadBatch batch(launch.chip(), args, args.x.size(0));
  CUBIST_RETURN_IF_ERROR(AddRowProducts<T>(device, kForward, launch,
                                           {args.x,
                                            args.groups,
                                            args.group_list,
                                            args.weights,
                                            args.weight_list,
                                            args.packed_weights,
                                            args.transpose_weights,
                                            args.bias,
                                            args.out,
                                            "x",
                                            "out",
                                            {args.alpha, args.beta, args.activation, args.bias.given(),
                                             args.beta == 0 ? ConstTensor() : args.residual}},
                                           ReplayOf<T, GroupedMatmulArgs>{batch}, forced));
  return launch.Finish(profile);
}

template <class T, class Replay>
Status AddGradWeights(const Device& device, const char* kernel, Launch& launch,
                      const GroupedMatmulGradArgs& args, const Replay& replay,
                      const GroupedMatmulTiling* forced) {
  GroupedMatmulShape shape;
  shape.groups = args.groups.size(0), shape.axis = GroupedAxis::kK, shape.adds = args.accumulate_dw;
  shape.rows = replay.of.by_power.rows;
  shape.product.m = args.x.size(1), shape.product.n = args.dy.size(1), shape.product.k = args.dy.size(0);
  shape.product.in = args.dy.dtype;
  shape.product.out = args.dw.given() ? args.dw.dtype : args.dw_list[0].dtype;
  // A host's choice has no use for it: a sum's blocks are packed as they are met.
  if (launch.chip().pipes_overlap && args.dy.stride(1) == 1)
    shape.product.b_row_bytes = std::abs(StepOf(args.dy, 0)) * SizeOf(args.dy.dtype);
  GroupedMatmulTiling tiling;
  if (forced != nullptr) {
    tiling = *forced;
  } else {
    CUBIST_RETURN_IF_ERROR(ChooseFor(device, kernel, shape, &Candidates, &tiling, replay));
  }
  const GroupedTilings tilings{replay.of.spreads,
                               {launch.chip().pipes_overlap ? GroupSpreads::kCount : 1, tiling}};

  std::vector<const GmTensor*> list;
  GroupedGradWeightsOperands g;
  g.groups = AddGroups(launch, args.groups, args.group_list, args.dy.size(0));
  g.x = MatrixOf(*launch.Input("x", args.x));
  g.dy = MatrixOf(*launch.Input("dy", args.dy));
  g.dw = AddMatrices(args.dw, args.dw_list, args.transpose_weights, &list, [&](const Tensor& t) {
    return args.accumulate_dw ? launch.InOut("dw", t) : launch.Output("dw", t);
  });
  g.accumulate = args.accumulate_dw ? Accumulate::kYes : Accumulate::kNo;
  g.epilogue.fix.accumulate = g.accumulate;
  g.sum_epilogue = EpilogueOf({.accumulate = args.accumulate_dw}, {}, /*late=*/true);
  g.k = shape.product.m, g.n = shape.product.n;
  const std::int64_t blocks =
      shape.groups * CeilDiv(shape.product.m, tiling.block.m) * CeilDiv(shape.product.n, tiling.block.n);
  launch.OnAiCores(blocks, [&](auto& core) { GroupedGradWeightsKernel<T>(core, g, tilings); });
  return {};
}

// `forced` is for a call of dx or of dw alone.
template <class T>
Status Run(const Device& device, const GroupedMatmulGradArgs& args, Profile* profile,
           const GroupedMatmulTiling* forced = nullptr) {
  Launch launch(device, kGrad);
  launch.GiveThreadsRuns();
  if (args.dx.given()) {
    GroupedMatmulGradArgs alone = args;
    alone.dw = {}, alone.dw_list = {};
    const SpreadBatch batch(launch.chip(), alone, args.dy.size(0));
    CUBIST_RETURN_IF_ERROR(AddRowProducts<T>(device, kGrad, launch,
                                             {args.dy,
                                              args.groups,
                                              args.group_list,
                                              args.weights,
                                              args.weight_list,
                                              args.packed_weights,
                                              !args.packed_weights.given() && !args.transpose_weights,
                                              {},
                                              args.dx,
                                              "dy",
                                              "dx",
                                              {}},
                                             ReplayOf<T, GroupedMatmulGradArgs>{batch}, forced));
  }
  if (args.dw.given() || !args.dw_list.empty()) {
    GroupedMatmulGradArgs alone = args;
    alone.dx = {};
    const SpreadBatch batch(launch.chip(), alone, args.dy.size(0));
    CUBIST_RETURN_IF_ERROR(
        AddGradWeights<T>(device, kGrad, launch, args, ReplayOf<T, GroupedMatmulGradArgs>{batch}, forced));
  }
  return launch.Finish(profile);
}

// The sum of both batches' times.
template <class T, class Args>
Status ReplayOf<T, Args>::operator()(const Device& model, const GroupedMatmulTiling& tiling,
                                     Profile* profile) const {
  CUBIST_RETURN_IF_ERROR(Run<T>(model, of.by_power.args, profile, &tiling));
  const double seconds = profile->time_s, left_s = model.npu().give_up_s - seconds;
  if (of.by_decay.rows == of.by_power.rows || left_s <= 0) return {};
  const Device rest = Npu(model.chip(), {.with_data = false, .give_up_s = left_s});
  CUBIST_RETURN_IF_ERROR(Run<T>(rest, of.by_decay.args, profile, &tiling));
  profile->time_s += seconds;
  return {};
}

// Tensors and lists that a call has.
template <class T, class Args>
void ReplayOf<T, Args>::AddTo(ChoiceKey* key) const {
  const Args& args = of.by_power.args;
  const auto add_all = [&](const auto& list) {
    key->Add(list.size());
    for (const auto& t : list) key->Add(ConstTensor(t));
  };
  key->Add(args.groups), key->Add(of.spread);
  key->Add(args.weights), add_all(args.weight_list);
  key->Add(args.packed_weights.matrices), key->Add(args.transpose_weights);
  if constexpr (std::is_same_v<Args, GroupedMatmulArgs>) {
    for (const ConstTensor& t : {args.x, args.bias, ConstTensor(args.out), args.residual}) key->Add(t);
    key->Add(SameView(args.residual, args.out)), key->Add(args.activation);
    key->Add(args.alpha), key->Add(args.beta);
  } else {
    for (const ConstTensor& t : {args.dy, args.x, ConstTensor(args.dx), ConstTensor(args.dw)}) key->Add(t);
    add_all(args.dw_list), key->Add(args.accumulate_dw);
  }
}

}  // namespace

Status GroupedMatmul(const Device& device, const GroupedMatmulArgs& args, Profile* profile) try {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  return WithFloatType(args.x.dtype, [&]<class T>(T) { return Run<T>(device, args, profile); });
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

Status GroupedMatmulGrad(const Device& device, const GroupedMatmulGradArgs& args, Profile* profile) try {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  return WithFloatType(args.dy.dtype, [&]<class T>(T) { return Run<T>(device, args, profile); });
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

}  // namespace cubist
