#include "kernels/matmul.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <new>
#include <span>
#include <string>
#include <utility>

#include "kernels/choose_for.h"
#include "kernels/element_type.h"
#include "kernels/matmul_epilogue.h"
#include "kernels/matmul_kernel.h"
#include "kernels/pack.h"
#include "kernels/packed_input.h"
#include "kernels/small_products.h"
#include "kernels/validate.h"
#include "npu_model/launch.h"
#include "tiling/matmul_tiling.h"

namespace cubist {
namespace {

constexpr const char* kKernel = "matmul";

template <class AnyTensor>
std::int64_t RowsOf(const AnyTensor& t) {
  return t.size(t.rank - 2);
}
template <class AnyTensor>
std::int64_t ColsOf(const AnyTensor& t) {
  return t.size(t.rank - 1);
}

DType InputType(const MatmulArgs& args) { return args.packed_a.given() ? args.packed_a.dtype : args.a.dtype; }

// ---- Validation ----

// Operands of one dimension: a row as a, a column as b, which c and residual have no dimension for.
struct Vectors {
  explicit Vectors(const MatmulArgs& args)
      : a(!args.packed_a.given() && args.a.rank == 1), b(!args.packed_b.given() && args.b.rank == 1) {}

  bool any() const { return a || b; }
  bool both() const { return a && b; }

  bool a, b;
};

// The dimensions behind the batch.
struct Inner {
  Inner(Dim only) : dims{only}, count(1) {}
  Inner(Dim rows, Dim cols) : dims{rows, cols}, count(2) {}

  std::array<Dim, 2> dims;
  int count;
};

Inner InnerOfA(const MatmulArgs& args, Vectors vectors) {
  if (vectors.a) return {{"K"}};
  return args.transpose_a ? Inner({"K"}, {"M"}) : Inner({"M"}, {"K"});
}
Inner InnerOfB(const MatmulArgs& args, Vectors vectors, std::int64_t k) {
  if (vectors.b) return {{"K, of a", k}};
  return args.transpose_b ? Inner({"N"}, {"K, of a", k}) : Inner({"K, of a", k}, {"N"});
}
// Of two vectors there is one number, and a tensor of no dimensions is none.
Inner InnerOfC(Vectors vectors, std::int64_t m, std::int64_t n) {
  if (vectors.both()) return {{"of two vectors", 1}};
  if (vectors.a) return {{"N, of b", n}};
  if (vectors.b) return {{"M, of a", m}};
  return {{"M, of a", m}, {"N, of b", n}};
}

int BatchRank(const Tensor& c, Vectors vectors) {
  return std::clamp(c.rank - InnerOfC(vectors, 0, 0).count, 0, Tensor::kMaxRank - 2);
}

// Matrices: the dimensions in front are those of c, or 1, or missing.
Status CheckMatrices(const Argument& arg, const Inner& inner, const Tensor& c, Vectors vectors) {
  std::array<Dim, ConstTensor::kMaxRank> dims{};
  const int of_c = BatchRank(c, vectors), batch = std::clamp(arg.tensor.rank - inner.count, 0, of_c);
  for (int d = 0; d < batch; ++d) {
    const std::int64_t size = c.size(of_c - batch + d);
    dims[static_cast<std::size_t>(d)] = {"batch, of c", arg.tensor.size(d) == 1 ? Dim::kAny : size};
  }
  std::copy_n(inner.dims.begin(), inner.count, dims.begin() + batch);
  return CheckShape(arg, std::span(dims).first(static_cast<std::size_t>(batch + inner.count)));
}

// -1 where they are too many to count: sizes are checked later.
std::int64_t BatchesOf(const Tensor& c, Vectors vectors) {
  std::int64_t batches = 1;
  for (int d = 0; d < BatchRank(c, vectors); ++d) {
    if (__builtin_mul_overflow(batches, c.size(d), &batches)) return -1;
  }
  return batches;
}

Status PackedError(const char* name, const std::string& what) {
  return InvalidArgument(std::string("matmul: ") + name + " " + what);
}

// Before all sizes: an operand packed for the other side has none that fit.
Status CheckSide(const char* name, const PackedOperand& packed, Side side, const Argument& plain) {
  if (!packed.given()) return {};
  if (plain.tensor.given()) return PackedError(name, std::string("and ") + plain.name + " are both given");
  CUBIST_RETURN_IF_ERROR(CheckChoice(kKernel, (std::string(name) + ".side").c_str(), packed.side, Side::kB));
  if (packed.side == side) return {};
  return PackedError(name, side == Side::kA ? "was packed for side b (c = a b), needs side a"
                                            : "was packed for side a (c = a b), needs side b");
}

Status CheckPackedMatrices(const Device& device, const MatmulArgs& args, const char* name,
                           const PackedOperand& packed, const char* plain, bool transposed) {
  if (const std::int64_t batches = BatchesOf(args.c, Vectors(args));
      packed.matrices != 1 && packed.matrices != batches) {
    return PackedError(name, "holds " + std::to_string(packed.matrices) + " matrices, needs 1" +
                                 (batches == 1  ? ""
                                  : batches < 0 ? " or those of c's batch, which are too many"
                                                : " or " + std::to_string(batches) + " (batch, of c)"));
  }
  if (transposed)
    return PackedError(name, std::string("is never transposed, but transpose_") + plain + " is set");
  if (!IsFloat(packed.dtype))
    return PackedError(name, std::string("is ") + NameOf(packed.dtype) + ", needs fp32 or bf16 or fp16");
  return args.alpha == 0 ? Status() : CheckPacked(device, kKernel, name, packed);
}

Status CheckVector(const Argument& arg, bool is_vector, bool transposed) {
  if (!is_vector || !transposed) return {};
  return arg.Error("is a vector, which is never transposed, but transpose_" + std::string(arg.name) +
                   " is set");
}

// Shape and dtype of both operands, plain or packed.
Status ValidateOperands(const Device& device, const MatmulArgs& args, const Argument& a, const Argument& b,
                        std::int64_t* m, std::int64_t* n) {
  const Vectors vectors(args);
  const DType in = InputType(args);
  std::int64_t k = 0;
  CUBIST_RETURN_IF_ERROR(CheckSide("packed_a", args.packed_a, Side::kA, a));
  CUBIST_RETURN_IF_ERROR(CheckSide("packed_b", args.packed_b, Side::kB, b));
  if (args.packed_a.given()) {
    CUBIST_RETURN_IF_ERROR(
        CheckPackedMatrices(device, args, "packed_a", args.packed_a, "a", args.transpose_a));
    *m = args.packed_a.rows, k = args.packed_a.cols;
  } else {
    CUBIST_RETURN_IF_ERROR(CheckMatrices(a, InnerOfA(args, vectors), args.c, vectors));
    CUBIST_RETURN_IF_ERROR(CheckVector(a, vectors.a, args.transpose_a));
    *m = vectors.a ? 1 : args.transpose_a ? ColsOf(args.a) : RowsOf(args.a);
    k = args.transpose_a ? RowsOf(args.a) : ColsOf(args.a);
    CUBIST_RETURN_IF_ERROR(CheckDType(a, kFloatTypes));
  }
  if (args.packed_b.given()) {
    const PackedOperand& packed = args.packed_b;
    CUBIST_RETURN_IF_ERROR(CheckPackedMatrices(device, args, "packed_b", packed, "b", args.transpose_b));
    if (packed.rows != k || packed.dtype != in) {
      return PackedError("packed_b", "has " + std::to_string(packed.rows) + " rows of " +
                                         NameOf(packed.dtype) + ", needs " + std::to_string(k) +
                                         " (K, of a) of " + NameOf(in));
    }
    *n = packed.cols;
    return {};
  }
  CUBIST_RETURN_IF_ERROR(CheckMatrices(b, InnerOfB(args, vectors, k), args.c, vectors));
  CUBIST_RETURN_IF_ERROR(CheckVector(b, vectors.b, args.transpose_b));
  *n = vectors.b ? 1 : args.transpose_b ? RowsOf(args.b) : ColsOf(args.b);
  return CheckDType(b, {in});
}

Status ValidateEpilogue(const MatmulArgs& args, const Argument& bias, const Argument& residual,
                        std::int64_t m, std::int64_t n) {
  const Vectors vectors(args);
  if (args.bias.given()) {
    CUBIST_RETURN_IF_ERROR(CheckShape(bias, {{"N, of b", n}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(bias, kFloatTypes));
  }
  if (args.residual.given()) {
    CUBIST_RETURN_IF_ERROR(CheckMatrices(residual, InnerOfC(vectors, m, n), args.c, vectors));
    CUBIST_RETURN_IF_ERROR(CheckDType(residual, kFloatTypes));
  }
  CUBIST_RETURN_IF_ERROR(CheckActivation(kKernel, args.activation));
  if (!args.accumulate) return {};
  if (args.residual.given()) return residual.Error("is given, but accumulate adds to c");
  if (args.activation != Activation::kNone)
    return InvalidArgument("matmul: activation is set, but accumulate adds to c");
  return {};
}

Status Validate(const Device& device, const MatmulArgs& args) {
  std::int64_t m = 0, n = 0;
  const Argument a{kKernel, "a", args.a}, b{kKernel, "b", args.b}, bias{kKernel, "bias", args.bias},
      residual{kKernel, "residual", args.residual}, c{kKernel, "c", args.c};
  CUBIST_RETURN_IF_ERROR(ValidateOperands(device, args, a, b, &m, &n));
  const Vectors vectors(args);
  CUBIST_RETURN_IF_ERROR(CheckMatrices(c, InnerOfC(vectors, m, n), args.c, vectors));
  if (args.accumulate) {
    CUBIST_RETURN_IF_ERROR(CheckDType(c, {DType::kF32}));
  } else {
    CUBIST_RETURN_IF_ERROR(CheckDType(c, kFloatTypes));
  }
  CUBIST_RETURN_IF_ERROR(ValidateEpilogue(args, bias, residual, m, n));
  const Argument packed_a{kKernel, "packed_a", args.packed_a.memory()},
      packed_b{kKernel, "packed_b", args.packed_b.memory()};
  const std::array<const Argument*, 5> all{&bias, &a, &b, &packed_a, &packed_b};
  const auto inputs = std::span(all).first(args.alpha == 0 ? 1 : all.size());  // Those that are read.
  for (const Argument* input : inputs) CUBIST_RETURN_IF_ERROR(CheckStorage(*input, device.computes()));
  if (args.beta != 0) CUBIST_RETURN_IF_ERROR(CheckStorage(residual, device.computes()));
  CUBIST_RETURN_IF_ERROR(CheckStorage(c, device.computes()));
  CUBIST_RETURN_IF_ERROR(CheckWritable(c));
  for (const Argument* input : inputs) CUBIST_RETURN_IF_ERROR(CheckApart(c, *input));
  return args.beta == 0 || SameView(args.residual, args.c) ? Status() : CheckApart(c, residual);
}

// ---- Launch ----

// A dimension of one element more, as number `d`, with the stride that contiguous tensors have there.
template <class AnyTensor>
void InsertDimension(AnyTensor* t, int d) {
  const auto at = static_cast<std::size_t>(d);
  const std::int64_t stride = d < t->rank ? t->size(d) * t->stride(d) : 1;
  std::shift_right(t->sizes.begin() + d, t->sizes.end(), 1), t->sizes[at] = 1;
  std::shift_right(t->strides.begin() + d, t->strides.end(), 1), t->strides[at] = stride;
  ++t->rank;
}

// The same call with vectors as matrices.
MatmulArgs WithMatrices(MatmulArgs args) {
  const Vectors vectors(args);
  const auto insert = [&](auto* t) {
    if (t->given()) InsertDimension(t, vectors.a && !vectors.b ? t->rank - 1 : t->rank);
  };
  insert(&args.c), insert(&args.residual);
  if (vectors.a) InsertDimension(&args.a, 0);
  if (vectors.b) InsertDimension(&args.b, 1);
  return args;
}

// The same call with alpha = 0: nothing is added up.
MatmulArgs WithEmptySum(MatmulArgs args) {
  const DType in = InputType(args);
  args.a = ConstTensor(nullptr, in, {RowsOf(args.c), 0});
  args.b = ConstTensor(nullptr, in, {0, ColsOf(args.c)});
  args.packed_a = args.packed_b = {};
  args.transpose_a = args.transpose_b = false;
  return args;
}

// Takes the last dimension of the batch into the rows, where that is the same product: b serves all of it, and the
// rows of the others go on from matrix to matrix.
bool MergeBatch(MatmulArgs* args) {
  const auto goes_on = [](const auto& t) {
    const std::int64_t rows = t.size(t.rank - 2);
    return t.size(t.rank - 3) == 1 || rows == 1 || t.stride(t.rank - 3) == rows * t.stride(t.rank - 2);
  };
  const auto merge = [](auto* t) {
    const auto last = static_cast<std::size_t>(t->rank - 3);
    if (t->sizes[last + 1] != 1) t->strides[last] = t->strides[last + 1];
    t->sizes[last] *= t->sizes[last + 1];
    t->sizes[last + 1] = t->sizes[last + 2], t->strides[last + 1] = t->strides[last + 2];
    --t->rank;
  };
  Tensor& c = args->c;
  ConstTensor &a = args->a, &b = args->b, &r = args->residual;
  if (c.rank < 3) return false;
  while (b.rank > 2 && b.size(0) == 1) {
    std::shift_left(b.sizes.begin(), b.sizes.end(), 1),
        std::shift_left(b.strides.begin(), b.strides.end(), 1);
    --b.rank;
  }
  const std::int64_t batch = c.size(c.rank - 3);
  const auto whole = [&](const ConstTensor& t) {
    return t.rank >= 3 && t.size(t.rank - 3) == batch && goes_on(t);
  };
  const bool b_serves_all = args->packed_b.given() ? args->packed_b.matrices == 1 : b.rank == 2;
  if (args->packed_a.given() || args->transpose_a || !b_serves_all || !whole(a) || !goes_on(c)) return false;
  if (r.given() && !whole(r)) return false;
  merge(&a), merge(&c);
  if (r.given()) merge(&r);
  return true;
}

// Dimensions of a batch that repeat one matrix have one.
ConstTensor OncePerRepeat(ConstTensor t) {
  for (int d = 0; d < t.rank - 2; ++d) {
    auto& size = t.sizes[static_cast<std::size_t>(d)];
    if (t.stride(d) == 0) size = std::min<std::int64_t>(size, 1);
  }
  return t;
}

// An operand as a kernel loads it: packed by the caller, or plain.
OperandStack OperandOf(Launch& launch, const char* name, const ConstTensor& plain, bool transposed,
                       const char* packed_name, const PackedOperand& packed, const Tensor& c) {
  OperandStack stack;
  if (!packed.given()) {
    stack.plain = launch.Input(name, OncePerRepeat(TransposedIf(transposed, plain)));
    return stack;
  }
  stack.packed = PackedInput(launch, packed_name, packed);
  if (packed.matrices == 1) return stack;
  const int batch = c.rank - 2;
  std::copy_n(c.sizes.begin(), batch, stack.packed_sizes.end() - batch);
  return stack;
}

// The same once the tiling is known: packed whole by a phase before, where it says so.
template <class T>
void PackWhere(bool pack, Launch& launch, const char* name, Role role, OperandStack* operand) {
  if (!pack) return;
  const GmTensor& plain = *operand->plain;
  operand->packed = Pack<T>(launch, name, role, plain);
  operand->packed_sizes = BatchOf(plain);
}

// Bytes from row to row where columns are adjacent, else 0.
std::int64_t RowBytesOf(const OperandStack& operand) {
  if (operand.is_packed() || operand.plain->strides[3] != 1) return 0;
  return std::abs(operand.plain->strides[2]) * SizeOf(operand.plain->dtype);
}
// Bytes from column to column where rows are adjacent and columns are not, else 0.
std::int64_t ColBytesOf(const OperandStack& operand) {
  if (operand.is_packed() || operand.plain->strides[2] != 1 || operand.plain->strides[3] == 1) return 0;
  return std::abs(operand.plain->strides[3]) * SizeOf(operand.plain->dtype);
}

MatmulShape ShapeOf(const MatmulArgs& args, const MatmulOperands& operands) {
  MatmulShape shape;
  shape.m = operands.a.rows(), shape.n = operands.b.cols(), shape.k = operands.k;
  shape.in = InputType(args), shape.out = args.c.dtype;
  shape.a_packed = operands.a.is_packed(), shape.b_packed = operands.b.is_packed();
  shape.a_row_bytes = RowBytesOf(operands.a), shape.b_row_bytes = RowBytesOf(operands.b);
  shape.b_col_bytes = ColBytesOf(operands.b);
  shape.batches = BatchesOf(args.c, Vectors(args));
  return shape;
}

// A valid call as it is made, and the same product as it is run.
struct Call {
  const MatmulArgs& made;
  MatmulArgs run;
  bool turned = false;  // c^T = b^T a^T

  // Whether one b serves the whole batch, however it is stored.
  bool HasOneB() const {
    if (made.packed_b.given()) return made.packed_b.matrices == 1;
    return std::all_of(made.b.sizes.begin(), made.b.sizes.begin() + std::max(made.b.rank - 2, 0),
                       [](std::int64_t size) { return size == 1; });
  }
};

// The same call with a tiling given, as ChooseFor asks for it. Of large products orders are replayed, too: the one of least
// price loses up to 4 % where weights are larger than L2, and the call's own replay takes a good part of that time anyway.
template <class T>
struct ReplayOf {
  static constexpr ShortListLimits kFamilies{.count = 48, .work = 180000},
      kWalks{.count = 24, .work = 100000, .alone = 1500000};
  const Call& call;

  Status operator()(const Device& model, const MatmulTiling& tiling, Profile* profile) const;
  void AddTo(ChoiceKey* key) const {
    const MatmulArgs& args = call.run;
    for (const ConstTensor& t : {args.a, args.b, args.bias, ConstTensor(args.c), args.residual}) key->Add(t);
    for (const PackedOperand* packed : {&args.packed_a, &args.packed_b}) key->Add(packed->matrices);
    key->Add(SameView(args.residual, args.c)), key->Add(args.accumulate), key->Add(args.activation);
    key->Add(args.alpha), key->Add(args.beta);
  }
};

// With `forced` in place of the tiling of its choice, where that is given.
template <class T>
Status Run(const Device& device, const Call& call, Profile* profile, const MatmulTiling* forced = nullptr) {
  const MatmulArgs& args = call.run;
  Launch launch(device, kKernel);
  launch.GiveThreadsRuns();
  MatmulOperands operands;
  operands.a = OperandOf(launch, "a", args.a, args.transpose_a, "packed_a", args.packed_a, args.c);
  operands.b = OperandOf(launch, "b", args.b, args.transpose_b, "packed_b", args.packed_b, args.c);
  operands.k = operands.a.cols();

  MatmulShape shape = ShapeOf(args, operands);
  shape.any_order = args.any_order;
  if (shape.batches > 1 && call.HasOneB()) (call.turned ? shape.cols_of_batch : shape.rows_of_batch) = true;
  const bool split = PartsOf(launch.chip(), shape).count > 1;
  const EpilogueArgs epilogue{args.alpha,
                              args.beta,
                              args.activation,
                              args.bias.given(),
                              args.beta == 0 ? ConstTensor() : args.residual,
                              args.accumulate};
  operands.epilogue = EpilogueOf(epilogue, args.c, split);
  shape.epilogue = operands.epilogue.shape;
  shape.bias = args.bias.given() && !shape.epilogue.bias;
  MatmulTiling tiling;
  if (forced != nullptr) {
    tiling = *forced;
  } else {
    CUBIST_RETURN_IF_ERROR(ChooseFor(device, kKernel, shape, &Candidates, &tiling, ReplayOf<T>{call}));
  }

  Tape tape;
  const bool keeps = IsSmallProduct(device, call.made, shape.m, shape.n, shape.k);
  if (keeps) launch.Keep(DataOf(args), &tape);
  (shape.bias ? operands.bias : operands.late_bias) = launch.Input("bias", args.bias);
  const bool adds_to_c =
      args.accumulate || (epilogue.residual.given() && SameView(epilogue.residual, args.c));
  operands.c = adds_to_c ? launch.InOut("c", args.c) : launch.Output("c", args.c);
  if (shape.epilogue.residual) {
    operands.residual = adds_to_c ? operands.c : launch.Input("residual", OncePerRepeat(epilogue.residual));
  }
  if (tiling.splits > 1) {
    operands.parts = launch.Workspace("parts", DType::kF32, {tiling.splits, shape.batches, shape.m, shape.n});
  }
  PackWhere<T>(tiling.pack_a, launch, "a_packed", Role::kA, &operands.a);
  PackWhere<T>(tiling.pack_b, launch, "b_packed", Role::kB, &operands.b);
  launch.OnAiCores(tiling.tasks(shape.batches), [&](auto& core) { MatmulKernel<T>(core, operands, tiling); });
  if (tiling.splits > 1) {
    launch.OnVectorCores(shape.batches * CeilDiv(shape.m, tiling.ub_rows) * tiling.grid.cols,
                         [&](auto& core) { AddParts(core, operands, tiling); });
  }
  CUBIST_RETURN_IF_ERROR(launch.Finish(profile));
  if (keeps && tape.whole()) KeepSmallProduct(device, call.made, call.turned, std::move(tape));
  return {};
}

template <class T>
Status ReplayOf<T>::operator()(const Device& model, const MatmulTiling& tiling, Profile* profile) const {
  return Run<T>(model, call, profile, &tiling);
}

// ---- Columns as rows

// c^T = b^T a^T: the same products, added up in the same order.
MatmulArgs Turned(const MatmulArgs& args) {
  MatmulArgs turned = args;
  turned.a = args.b, turned.transpose_a = !args.transpose_b;
  turned.b = args.a, turned.transpose_b = !args.transpose_a;
  turned.c = TransposedIf(true, args.c);
  if (args.residual.given()) turned.residual = TransposedIf(true, args.residual);
  return turned;
}

// Whether elements of a column are adjacent, and those of a row are not.
template <class AnyTensor>
bool LiesInColumns(const AnyTensor& t) {
  return t.stride(t.rank - 2) == 1 && t.stride(t.rank - 1) != 1;
}

// Whether a host had better turn a product around: where C lies in columns, as its transpose lies in rows, and where B's are few.
bool HadBetterTurn(const Device& device, const MatmulArgs& args) {
  if (device.chip().pipes_overlap || args.packed_a.given() || args.packed_b.given() || args.bias.given())
    return false;
  MatmulShape shape;
  shape.m = RowsOf(args.c), shape.n = ColsOf(args.c);
  if (shape.m > 1 && shape.n > 1 && LiesInColumns(args.c)) return true;
  const ConstTensor a = TransposedIf(args.transpose_a, args.a);
  shape.k = ColsOf(a), shape.in = a.dtype;
  if (!LiesInColumns(a)) shape.a_row_bytes = std::abs(StepOf(a, a.rank - 2)) * SizeOf(a.dtype);
  const ConstTensor b = TransposedIf(args.transpose_b, args.b);
  if (!LiesInColumns(b)) shape.b_row_bytes = std::abs(StepOf(b, b.rank - 2)) * SizeOf(b.dtype);
  return IsBetterTurned(device.chip(), shape);
}

}  // namespace

Status Matmul(const Device& device, const MatmulArgs& args, Profile* profile) try {
  if (const SmallProduct known = FindSmallProduct(device, args); known.tape != nullptr) {
    Launch launch(device, kKernel);
    launch.GiveThreadsRuns();
    launch.Again(*known.tape, known.data);
    return launch.Finish(profile);
  }
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  if (Vectors(args).any()) return Matmul(device, WithMatrices(args), profile);
  Call call{args, args.alpha == 0 ? WithEmptySum(args) : args};
  while (MergeBatch(&call.run)) {
  }
  call.turned = HadBetterTurn(device, call.run);
  if (call.turned) call.run = Turned(call.run);
  return WithFloatType(InputType(args), [&]<class T>(T) { return Run<T>(device, call, profile); });
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

}  // namespace cubist
