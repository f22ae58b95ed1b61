#include "npu_model/trace/costs.h"

#include <algorithm>

#include "npu_model/philox.h"

namespace cubist::trace {
namespace {

VectorOp CostOf(Op op) {
  switch (op) {
    case Op::kCast:
      return VectorOp::kCast;
    case Op::kAdd:
    case Op::kSub:
    case Op::kMul:
    case Op::kMax:
      return VectorOp::kBinary;
    case Op::kDiv:
      return VectorOp::kDiv;
    case Op::kSqrt:
    case Op::kExp:
      return VectorOp::kExp;
    case Op::kLn:
      return VectorOp::kLn;
    case Op::kRowMax:
    case Op::kRowSum:
      return VectorOp::kReduce;
    case Op::kMaskAbove:
    case Op::kMaskBelow:
    case Op::kMaskWhere:
    case Op::kSelectLe:
    case Op::kKeepGroups:
    case Op::kDropRoutes:
    case Op::kKeepWhere:
      return VectorOp::kSelect;
    case Op::kGroupTop:
      return VectorOp::kReduce;
    case Op::kUnzip:
    case Op::kTrueColumns:
      return VectorOp::kGatherMask;
    case Op::kGather:
    case Op::kLookup:
    case Op::kZip:
      return VectorOp::kGather;
    case Op::kAddInt:
    case Op::kAddScalarInt:
    case Op::kColumnSum:
    case Op::kExclusiveScan:
    case Op::kRandom:
    case Op::kDropFlags:
      return VectorOp::kInteger;
    default:
      return VectorOp::kUnary;
  }
}

// Repeats of a Vector instruction on a tile of `rows` x `cols`: all blocks in a row where the tile fills its
// slot's rows, eight rows at a time where a row is one block, and row by row otherwise.
std::int64_t Repeats(const ChipSpec& chip, std::int64_t rows, std::int64_t cols, std::int64_t element,
                     std::int64_t slot_cols) {
  const std::int64_t row_bytes = RoundUp(cols * element, kBlockBytes);
  const std::int64_t per_repeat = chip.vector.repeat_bytes;
  if (rows == 1 || row_bytes == RoundUp(slot_cols * element, kBlockBytes) || row_bytes == kBlockBytes) {
    return CeilDiv(rows * row_bytes, per_repeat);
  }
  return rows * CeilDiv(row_bytes, per_repeat);
}

// Whether rows of so many columns follow each other in an operand's slot.
bool Gapless(const CoreRecord& record, OperandUse use, std::int64_t cols) {
  const SlotInfo& slot = record.slots[static_cast<std::size_t>(record.operands[use.operand()].slot)];
  return cols == slot.cols && cols * SizeOf(slot.dtype) % kBlockBytes == 0;
}

// The groups of UB's banks in which a Vector instruction finds the first repeat of an operand, a bit each: of 16, by
// blocks. Those of the next repeats are as far on.
std::uint32_t BankGroups(const CoreRecord& record, OperandUse use, std::int64_t blocks) {
  constexpr std::int64_t kGroups = 16;
  const Operand& operand = record.operands[use.operand()];
  const SlotInfo& slot = record.slots[static_cast<std::size_t>(operand.slot)];
  const std::int64_t element = SizeOf(slot.dtype);
  const std::int64_t first = slot.address + operand.row_begin * RoundUp(slot.cols * element, kBlockBytes) +
                             operand.col_begin * element;
  std::uint32_t groups = 0;
  for (std::int64_t b = 0; b < blocks; ++b) groups |= 1u << (first / kBlockBytes + b) % kGroups;
  return groups;
}

// Whether a Histogram or Rank takes a digit of its ids.
bool TakesDigit(const Instr& instr) {
  return (instr.op == Op::kHistogram || instr.op == Op::kRank) && !BinsOf(instr).whole();
}

// Whether two sources are read at once: a bank group gives one block per cycle. Sources whose repeats are of different
// lengths meet sooner or later.
bool ReadsAtOnce(const ChipSpec& chip, const CoreRecord& record, const Instr& instr) {
  const OperandUse x = instr.uses[1], y = instr.uses[2];
  if (!x.used() || !y.used() || x.writes() || y.writes() || instr.broadcasts) return false;
  const Operand &of_x = record.operands[x.operand()], &of_y = record.operands[y.operand()];
  const SlotInfo &in_x = record.slots[static_cast<std::size_t>(of_x.slot)],
                 &in_y = record.slots[static_cast<std::size_t>(of_y.slot)];
  const bool alike = in_x.dtype == in_y.dtype && in_x.cols == in_y.cols &&
                     of_x.row_end - of_x.row_begin == of_y.row_end - of_y.row_begin;
  const std::int64_t blocks = chip.vector.repeat_bytes / kBlockBytes;
  return alike && (BankGroups(record, x, blocks) & BankGroups(record, y, blocks)) == 0;
}

}  // namespace

Cost Costs::Of(const CoreRecord& record, const Instr& instr) const {
  switch (instr.pipe) {
    case Pipe::kM:
      return Mmad(instr);
    case Pipe::kV:
      return Vector(record, instr);
    case Pipe::kS: {
      const double cycles = ScalarCycles(instr);
      return {cycles, cycles};
    }
    default:
      return Load(instr);
  }
}

double Costs::ScalarCycles(const Instr& instr) const {
  const auto& scalar = chip_->scalar;
  if (instr.op == Op::kReadScalar) return instr.access >= 0 ? scalar.read_gm : scalar.read;
  const double count = static_cast<double>(instr.dims[0]) * instr.dims[1];
  if (instr.op == Op::kSpend) return count * scalar.step;
  // A digit of an id is shifted and masked first.
  const double digit = TakesDigit(instr) ? 2.0 * scalar.issue : 0.0;
  return count * (scalar.update + digit);
}

std::int64_t Costs::FractalBytes(const Instr& instr) const {
  if (instr.op == Op::kLoadBT) return instr.dims[1] * SizeOf(instr.dtype);
  return RoundUp(instr.dims[0], chip_->packing.row_multiple) *
         RoundUp(instr.dims[1] * chip_->OperandBytes(instr.dtype), kBlockBytes);
}

Cost Costs::Mmad(const Instr& instr) const {
  const auto& mmad = chip_->mmad;
  const std::int64_t element = chip_->OperandBytes(instr.dtype);
  const std::int64_t steps = CeilDiv(instr.dims[0], mmad.m_step) * CeilDiv(instr.dims[1], mmad.n_step) *
                             CeilDiv(instr.dims[2], mmad.k_bytes / element);
  const double work = static_cast<double>(steps) * (element == 4 ? mmad.fp32_passes : mmad.narrow_passes);
  return {mmad.head_busy + work, mmad.head_idle + work};
}

Cost Costs::Repeated(double repeats, double cycles) const {
  const double work = repeats * cycles;
  return {std::max<double>(chip_->vector.least, work), chip_->vector.head + work};
}

Cost Costs::Vector(const CoreRecord& record, const Instr& instr) const {
  const OperandUse work = instr.uses[1].used() ? instr.uses[1] : instr.uses[0];
  const Operand& operand = record.operands[work.operand()];
  const std::int64_t slot_cols = record.slots[static_cast<std::size_t>(operand.slot)].cols;
  const std::int64_t rows = instr.dims[0], cols = instr.dims[1], element = SizeOf(instr.dtype);
  const VectorOp op = CostOf(instr.op);
  double cycles = chip_->vector_cycles(op);
  // The table has what two sources cost that are read one after the other.
  if ((op == VectorOp::kBinary || op == VectorOp::kInteger) && ReadsAtOnce(*chip_, record, instr))
    cycles /= 2;
  // Columns are picked from a ramp by what flags compare to.
  if (instr.op == Op::kTrueColumns) cycles += chip_->vector_cycles(VectorOp::kSelect);
  if (instr.op == Op::kRowMax || instr.op == Op::kRowSum) {
    return Reduction(rows, cols, element, slot_cols, cycles);
  }
  if (instr.op == Op::kTopK) return Sort(rows, cols);
  if (instr.op == Op::kSort32 || instr.op == Op::kMergeSort)
    return SortPass(instr, rows * RoundUp(cols * element, kBlockBytes) / element);
  const auto repeats = static_cast<double>(Repeats(*chip_, rows, cols, element, slot_cols));
  Cost cost = Repeated(repeats, cycles);
  // Instructions made of several: a Philox round is eight integer operations; a route is dropped in its index and its
  // weight; the top of a group is found, taken out and summed, once for each element, after a compare. Flags are widened
  // and compared before they select; a ramp is made before it is a distance. Eight drop flags, which are bytes, cost the
  // rounds of a block of words, and three more operations on words each. Words are turned in two passes of halves.
  // What Zip writes is twice a source.
  const bool compares = instr.op == Op::kDropRoutes || instr.op == Op::kSelectLe ||
                        instr.op == Op::kKeepWhere || instr.op == Op::kLookup;
  const double times = instr.op == Op::kRandom      ? 8.0 * kPhiloxRounds
                       : instr.op == Op::kDropFlags ? 4.0 * (kPhiloxRounds + 3)
                       : instr.op == Op::kMaskWhere ? 3
                       : instr.op == Op::kDistances ? 2
                       : compares                   ? 2
                       : instr.op == Op::kTranspose ? 2
                       : instr.op == Op::kZip       ? 2
                       : instr.op == Op::kGroupTop  ? 4.0 * instr.dims[2]
                                                    : 1;
  cost = {times * cost.busy, (times - 1) * cost.busy + cost.done};
  if (instr.op == Op::kExclusiveScan) {  // Every pass needs the one before.
    const double before = (instr.dims[2] - 1) * cost.done;
    return {before + cost.busy, before + cost.done};
  }
  // What is picked is written without a gap: an instruction for each row where the tile has one, or rows their own numbers.
  const bool gaps = instr.op == Op::kTrueColumns ||
                    (instr.op == Op::kUnzip
                         ? !Gapless(record, instr.uses[0], cols / 2) || !Gapless(record, instr.uses[1], cols)
                         : instr.op == Op::kZip && !Gapless(record, instr.uses[0], 2 * cols));
  if (gaps && rows > 1) {
    const Cost row = Repeated(times * repeats / static_cast<double>(rows), cycles);
    const double before = static_cast<double>(rows - 1) * row.busy;
    return {before + row.busy, before + row.done};
  }
  // A row spread over the rows of the first source: an instruction for each row, or for each repeat of columns with a
  // stride of zero over the rows.
  const OperandUse last = instr.uses[2];
  if (rows > 1 && last.used() &&
      record.operands[last.operand()].row_end - record.operands[last.operand()].row_begin == 1) {
    const auto pieces =
        static_cast<double>(std::min(rows, CeilDiv(cols * element, chip_->vector.repeat_bytes)));
    cost.busy = pieces * Repeated(repeats / pieces, cycles).busy;
    cost.done = std::max(cost.done, cost.busy - Repeated(repeats / pieces, cycles).busy +
                                        Repeated(repeats / pieces, cycles).done);
  }
  if (instr.broadcasts) {  // The column is first spread to one block per row, eight rows per repeat.
    const auto spread = static_cast<double>(CeilDiv(rows * kBlockBytes, chip_->vector.repeat_bytes));
    const double before = Repeated(spread, chip_->vector_cycles(VectorOp::kUnary)).done;
    cost.busy += before, cost.done += before;
  }
  return cost;
}

// Every pass makes one element of each block, and the next one needs it.
Cost Costs::Reduction(std::int64_t rows, std::int64_t cols, std::int64_t element, std::int64_t slot_cols,
                      double cycles) const {
  const std::int64_t per_block = kBlockBytes / element;
  double before = 0;
  while (true) {
    const Cost pass = Repeated(static_cast<double>(Repeats(*chip_, rows, cols, element, slot_cols)), cycles);
    cols = slot_cols = CeilDiv(cols, per_block);
    if (cols <= 1) return {before + pass.busy, before + pass.done};
    before += pass.done;
  }
}

// A pass over keys, with those that fill up the blocks of rows. Pairs of key and value are made of two tiles by the first
// pass, and every pass is priced as if the pairs were then taken apart again, 64 per repeat.
Cost Costs::SortPass(const Instr& instr, std::int64_t keys) const {
  const bool first = instr.op == Op::kSort32;
  const auto repeats = static_cast<double>(CeilDiv(keys, first ? kSortedRun : kMergedKeys));
  const Cost sort = Repeated(repeats, chip_->vector_cycles(first ? VectorOp::kSort : VectorOp::kMergeSort));
  const Cost parts =
      Repeated(2 * static_cast<double>(CeilDiv(keys, kMergedKeys)), chip_->vector_cycles(VectorOp::kUnary));
  return {sort.done + parts.busy, sort.done + parts.done};
}

// Every row: Sort32 over runs of 32 pairs of value and index, then merges of four runs at a time.
Cost Costs::Sort(std::int64_t rows, std::int64_t cols) const {
  Cost row = Repeated(static_cast<double>(CeilDiv(cols, kSortedRun)), chip_->vector_cycles(VectorOp::kSort));
  for (std::int64_t runs = CeilDiv(cols, kSortedRun); runs > 1; runs = CeilDiv(runs, kMergedRuns)) {
    const Cost merge =
        Repeated(static_cast<double>(CeilDiv(cols, kMergedKeys)), chip_->vector_cycles(VectorOp::kMergeSort));
    row = {row.done + merge.busy, row.done + merge.done};
  }
  const double others = static_cast<double>(rows - 1) * row.busy;
  return {others + row.busy, others + row.done};
}

Cost Costs::Load(const Instr& instr) const {
  const PathSpec& path = chip_->path(PathOf(instr.op));
  const double bytes = static_cast<double>(FractalBytes(instr)) / path.bytes_per_cycle;
  return {path.gap + bytes, path.startup + bytes};
}

}  // namespace cubist::trace
