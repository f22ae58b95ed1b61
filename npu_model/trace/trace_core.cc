#include "npu_model/trace/trace_core.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "npu_model/composites.h"

namespace cubist::trace {
namespace {

// Rows of one length, one after the other without a gap, are one row.
GmAccess Contiguous(GmAccess access) {
  if (access.bursts == 1 && access.rows > 1 && access.row_stride == access.burst_bytes) {
    access.burst_bytes *= access.rows;
    access.rows = 1;
  }
  return access;
}

std::uint64_t Hash(const Operand& o) {
  const auto word = [](std::int32_t a, std::int32_t b) {
    return std::uint64_t{static_cast<std::uint32_t>(a)} << 32 | static_cast<std::uint32_t>(b);
  };
  constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15u;
  std::uint64_t h = word(o.slot, o.row_begin) * kOdd;
  h = (h ^ h >> 29 ^ word(o.row_end, o.col_begin)) * kOdd;
  h = (h ^ h >> 31 ^ static_cast<std::uint32_t>(o.col_end)) * kOdd;
  return h ^ h >> 32;
}

std::int32_t Bits(float value) { return std::bit_cast<std::int32_t>(value); }

bool Empty(const TileRef& tile) { return tile.rows() == 0 || tile.cols() == 0; }

Op OpOf(BinaryOp op) {
  switch (op) {
    case BinaryOp::kAdd:
      return Op::kAdd;
    case BinaryOp::kSub:
      return Op::kSub;
    case BinaryOp::kMul:
      return Op::kMul;
    case BinaryOp::kDiv:
      return Op::kDiv;
    case BinaryOp::kMax:
      break;
  }
  return Op::kMax;
}

}  // namespace

// ---- Recorder ----

void Recorder::AddSlots(const Slot* slots, int stages) {
  for (const Slot* slot = slots; slot != slots + stages; ++slot) {
    const auto id = static_cast<std::size_t>(slot->id);
    if (out_->slots.size() <= id) out_->slots.resize(id + 1);
    out_->slots[id] = {slot->owner, slot->buffer, slot->dtype,   slot->lane,
                       slot->rows,  slot->cols,   slot->address, slot->bytes};
  }
}

Operand Recorder::WorkspaceOf(const TileRef& dst) {
  const auto id = static_cast<std::size_t>(dst.slot->id);
  if (workspace_of_.size() <= id) workspace_of_.resize(id + 1, -1);
  if (workspace_of_[id] < 0) {
    constexpr std::int64_t kLine = 512;
    workspace_of_[id] = static_cast<std::int32_t>(out_->workspace.size());
    SlotInfo info = out_->slots[id];
    info.address = out_->workspace_bytes;
    info.bytes = RoundUp(info.rows * info.cols * SizeOf(info.dtype), kLine);
    out_->workspace_bytes += info.bytes;
    out_->workspace.push_back(info);
  }
  Operand operand = OperandOf(dst);
  operand.slot = ~workspace_of_[id];
  return operand;
}

GmAccess Recorder::AccessOf(const Operand& workspace, Path path, bool writes) const {
  const SlotInfo& slot = out_->workspace[static_cast<std::size_t>(~workspace.slot)];
  const std::int64_t element = SizeOf(slot.dtype);
  GmAccess access;
  access.path = path;
  access.writes = writes;
  access.offset = slot.address + (workspace.row_begin * slot.cols + workspace.col_begin) * element;
  access.rows = workspace.row_end - workspace.row_begin;
  access.row_stride = slot.cols * element;
  access.burst_bytes = (workspace.col_end - workspace.col_begin) * element;
  return Contiguous(access);
}

Operand Recorder::OperandOf(const TileRef& tile) {
  return {tile.slot->id, static_cast<std::int32_t>(tile.row_part.begin),
          static_cast<std::int32_t>(tile.row_part.end), static_cast<std::int32_t>(tile.col_part.begin),
          static_cast<std::int32_t>(tile.col_part.end)};
}

std::uint32_t Recorder::Intern(const Operand& operand) {
  const std::size_t mask = table_.size() - 1;
  std::size_t at = Hash(operand) & mask;
  for (; table_[at] != OperandUse::kNone; at = (at + 1) & mask) {
    if (out_->operands[table_[at]] == operand) return table_[at];
  }
  const auto number = static_cast<std::uint32_t>(out_->operands.size());
  table_[at] = number;
  out_->operands.push_back(operand);
  if (out_->operands.size() * 2 > table_.size()) Rehash();
  return number;
}

void Recorder::Rehash() {
  table_.assign(table_.size() * 2, OperandUse::kNone);
  const std::size_t mask = table_.size() - 1;
  for (std::uint32_t number = 0; number < out_->operands.size(); ++number) {
    std::size_t at = Hash(out_->operands[number]) & mask;
    while (table_[at] != OperandUse::kNone) at = (at + 1) & mask;
    table_[at] = number;
  }
}

std::uint32_t Recorder::InternLine(const Loc& loc) {
  std::uint32_t& last = last_lines_[loc.line() % last_lines_.size()];
  // A build in a subfolder names files from there.
  const char* file = loc.file_name();
  while (std::strncmp(file, "../", 3) == 0) file += 3;
  const auto same = [&](const SourceLine& known) { return known.line == loc.line() && known.file == file; };
  if (last < out_->lines.size() && same(out_->lines[last])) return last;
  const auto found = std::find_if(out_->lines.begin(), out_->lines.end(), same);
  last = static_cast<std::uint32_t>(found - out_->lines.begin());
  if (found == out_->lines.end()) out_->lines.push_back({file, loc.line()});
  return last;
}

Instr& Recorder::Add(Op op, Pipe pipe, int lane, DType dtype, std::int64_t rows, std::int64_t cols,
                     std::initializer_list<OperandUse> uses, const Loc& loc) {
  Instr& instr = out_->instrs.emplace_back();
  instr.op = op;
  instr.pipe = pipe;
  instr.lane = static_cast<std::int8_t>(lane);
  instr.dtype = dtype;
  instr.line = InternLine(loc);
  instr.dims[0] = static_cast<std::int32_t>(rows);
  instr.dims[1] = static_cast<std::int32_t>(cols);
  std::copy(uses.begin(), uses.end(), instr.uses.begin());
  return instr;
}

void Recorder::SetDrop(Instr& instr, const DropPlace& place) {
  instr.dims[2] = static_cast<std::int32_t>(out_->drops.size());
  out_->drops.push_back(place);
}

void Recorder::SetAccess(Instr& instr, const GmAccess& access) {
  instr.access = static_cast<std::int32_t>(out_->accesses.size());
  out_->accesses.push_back(access);
}

// ---- Global memory ----

GmAccess AccessOf(const Gm& gm, Path path, bool writes) {
  const std::int64_t element = SizeOf(gm.dtype());
  GmAccess access;
  access.tensor = gm.tensor->index;
  access.path = path;
  access.writes = writes;
  access.offset = gm.offset * element;
  if (gm.col_stride == 1 || (gm.cols == 1 && gm.row_stride != 1)) {
    access.rows = gm.rows, access.row_stride = gm.row_stride * element;
    access.burst_bytes = gm.cols * element;
  } else if (gm.row_stride == 1 || gm.rows == 1) {
    access.rows = gm.cols, access.row_stride = gm.col_stride * element;
    access.burst_bytes = gm.rows * element;
    access.transposed = true;
  } else {
    access.rows = gm.rows, access.row_stride = gm.row_stride * element;
    access.bursts = gm.cols, access.burst_stride = gm.col_stride * element;
    access.burst_bytes = element;
  }
  return Contiguous(access);
}

GmAccess AccessOf(const ChipSpec& chip, const PackedGm& packed, Path path, bool writes) {
  const std::int64_t width = chip.PackedStep(packed.role, packed.dtype);
  const std::int64_t row_bytes = width * chip.OperandBytes(packed.dtype);
  const std::int64_t padded_rows = RoundUp(packed.rows, chip.packing.row_multiple);
  const std::int64_t first_panel = packed.col_part.begin / width;
  const std::int64_t end_row = std::min(RoundUp(packed.row_part.end, chip.packing.row_multiple), padded_rows);
  GmAccess access;
  access.tensor = packed.tensor->index;
  access.path = path;
  access.writes = writes;
  access.offset = packed.byte_offset + (first_panel * padded_rows + packed.row_part.begin) * row_bytes;
  access.rows = CeilDiv(packed.col_part.end, width) - first_panel;
  access.row_stride = padded_rows * row_bytes;
  access.burst_bytes = (end_row - packed.row_part.begin) * row_bytes;
  return Contiguous(access);
}

// ---- State ----

Slot* TraceState::Allocate(const SlotRequest& request, int lane) {
  Slot* slots = context.Allocate(request, lane, with_data || !IsFloat(request.dtype));
  recorder.AddSlots(slots, request.stages);
  return slots;
}

// A bias row passes through L1. The ring's rows have one stage each there, placed when the first bias is
// loaded, so that a kernel without a bias gives no L1 for it.
Slot* TraceState::BiasStage(const Slot& bt) {
  const auto id = static_cast<std::size_t>(bt.id);
  if (bias_stages.size() <= id) bias_stages.resize(id + 1);
  if (bias_stages[id] == nullptr) {
    bias_stages[id] =
        context.Allocate({Buffer::kL1, Role::kRows, DType::kF32, "bias on its way to BT", 1, bt.cols, 1},
                         /*lane=*/-1, /*with_storage=*/false);
    recorder.AddSlots(bias_stages[id], 1);
  }
  return bias_stages[id];
}

// ---- Cube ----

void TraceCube::LoadL1(TileRef dst, const Gm& src, Loc loc) {
  if (state_->with_data) host_.LoadL1(dst, src, loc);
  if (Empty(dst)) return;
  Recorder& to = state_->recorder;
  Instr& instr = to.Add(Op::kLoadL1, Pipe::kMte2, -1, src.dtype(), src.rows, src.cols, {to.Writes(dst)}, loc);
  to.SetAccess(instr, AccessOf(src, Path::kGmToL1Nd2Nz, /*writes=*/false));
}

void TraceCube::LoadL1Packed(TileRef dst, const PackedGm& src, Loc loc) {
  if (state_->with_data) host_.LoadL1Packed(dst, src, loc);
  if (Empty(dst)) return;
  Recorder& to = state_->recorder;
  Instr& instr =
      to.Add(Op::kLoadL1, Pipe::kMte2, -1, src.dtype, dst.rows(), dst.cols(), {to.Writes(dst)}, loc);
  to.SetAccess(instr, AccessOf(*state_->context.chip, src, Path::kGmToL1, /*writes=*/false));
}

void TraceCube::StorePacked(const PackedGm& dst, TileRef src, Loc loc) {
  if (state_->with_data) host_.StorePacked(dst, src, loc);
  if (Empty(src)) return;
  Recorder& to = state_->recorder;
  Instr& instr =
      to.Add(Op::kStorePacked, Pipe::kMte3, -1, dst.dtype, src.rows(), src.cols(), {to.Reads(src)}, loc);
  to.SetAccess(instr, AccessOf(*state_->context.chip, dst, Path::kL1ToGm, /*writes=*/true));
}

void TraceCube::LoadL0A(TileRef dst, TileRef src, Transpose transpose, Loc loc) {
  if (state_->with_data) host_.LoadL0A(dst, src, transpose, loc);
  if (Empty(dst)) return;
  Recorder& to = state_->recorder;
  to.Add(Op::kLoadL0A, Pipe::kMte1, -1, src.dtype(), src.rows(), src.cols(), {to.Reads(src), to.Writes(dst)},
         loc)
      .immediate = transpose == Transpose::kYes;
}

void TraceCube::LoadL0B(TileRef dst, TileRef src, Transpose transpose, Loc loc) {
  if (state_->with_data) host_.LoadL0B(dst, src, transpose, loc);
  if (Empty(dst)) return;
  Recorder& to = state_->recorder;
  to.Add(Op::kLoadL0B, Pipe::kMte1, -1, src.dtype(), src.rows(), src.cols(), {to.Reads(src), to.Writes(dst)},
         loc)
      .immediate = transpose == Transpose::kYes;
}

void TraceCube::LoadBias(TileRef dst, const Gm& row, Loc loc) {
  if (state_->with_data) host_.LoadBias(dst, row, loc);
  if (Empty(dst)) return;
  Recorder& to = state_->recorder;
  const TileRef staged(state_->BiasStage(*dst.slot), {0, 1}, dst.col_part);
  Instr& instr = to.Add(Op::kLoadBias, Pipe::kMte2, -1, row.dtype(), 1, row.cols, {to.Writes(staged)}, loc);
  to.SetAccess(instr, AccessOf(row, Path::kGmToL1, /*writes=*/false));
  to.Add(Op::kLoadBT, Pipe::kMte1, -1, row.dtype(), 1, row.cols, {to.Reads(staged), to.Writes(dst)}, loc);
}

void TraceCube::Mmad(TileRef c, TileRef a, TileRef b, MmadStart start, TileRef bias, Loc loc) {
  if (state_->with_data) host_.Mmad(c, a, b, start, bias, loc);
  if (Empty(c)) return;
  Recorder& to = state_->recorder;
  // An accumulator that is added to is read and written in place; the write covers both.
  const OperandUse rows = Empty(a) ? OperandUse() : to.Reads(a), cols = Empty(b) ? OperandUse() : to.Reads(b);
  const OperandUse start_from = start == MmadStart::kBias ? to.Reads(bias) : OperandUse();
  Instr& instr = to.Add(Op::kMmad, Pipe::kM, -1, a.dtype(), c.rows(), c.cols(),
                        {to.Writes(c), rows, cols, start_from}, loc);
  instr.dims[2] = static_cast<std::int32_t>(a.cols());
  instr.accumulates = start == MmadStart::kAdd;
}

void TraceCube::StoreL0C(const Gm& dst, TileRef src, const FixOptions& options, Loc loc) {
  if (state_->with_data) host_.StoreL0C(dst, src, options, loc);
  if (Empty(src)) return;
  Recorder& to = state_->recorder;
  Instr& instr =
      to.Add(Op::kStoreL0C, Pipe::kFix, -1, dst.dtype(), src.rows(), src.cols(), {to.Reads(src)}, loc);
  instr.accumulates = options.accumulate == Accumulate::kYes;
  instr.immediate = Bits(options.scale);
  instr.dims[2] = options.relu;
  to.SetAccess(instr, AccessOf(dst, Path::kL0CToGm, /*writes=*/true));
}

namespace {

// A hand-over slot is written by FIX and read by MTE2 of a Vector core.
void AddSend(Recorder& to, const Operand& between, const TileRef& src, const Loc& loc) {
  Instr& send = to.Add(Op::kSendL0C, Pipe::kFix, -1, src.dtype(), src.rows(), src.cols(),
                       {to.Reads(src), to.Writes(between)}, loc);
  to.SetAccess(send, to.AccessOf(between, Path::kL0CToGm, /*writes=*/true));
}
void AddReceive(Recorder& to, int lane, const Operand& between, const TileRef& dst, const Loc& loc) {
  Instr& receive = to.Add(Op::kReceiveUb, Pipe::kMte2, lane, dst.dtype(), dst.rows(), dst.cols(),
                          {to.Reads(between), to.Writes(dst)}, loc);
  to.SetAccess(receive, to.AccessOf(between, Path::kGmToUb, /*writes=*/false));
}

}  // namespace

void TraceCube::Send(TileRef dst, TileRef src, Loc loc) {
  if (state_->with_data) host_.Send(dst, src, loc);
  if (!Empty(src)) AddSend(state_->recorder, state_->recorder.WorkspaceOf(dst), src, loc);
}

// Kernels steer by it, so it is read without data too.
std::int64_t TraceCube::ReadGmInt(const Gm& element, Loc loc) {
  CUBIST_CHECK(element.data() != nullptr, std::string("no data in index tensor ") + element.tensor->name);
  Recorder& to = state_->recorder;
  Instr& instr = to.Add(Op::kReadScalar, Pipe::kS, -1, element.dtype(), 1, 1, {}, loc);
  to.SetAccess(instr, AccessOf(element, Path::kGmToL1, /*writes=*/false));
  return host_.ReadGmInt(element, loc);
}

// ---- Vector, recorded ----

void VectorRecorder::LoadUb(TileRef dst, const Gm& src, Loc loc) {
  if (Empty(dst)) return;
  Instr& instr = recorder_->Add(Op::kLoadUb, Pipe::kMte2, lane_, src.dtype(), src.rows, src.cols,
                                {recorder_->Writes(dst)}, loc);
  recorder_->SetAccess(instr, AccessOf(src, Path::kGmToUb, /*writes=*/false));
  if (src.dtype() != dst.dtype()) Cast(dst, dst, loc);
}

void VectorRecorder::StoreUb(const Gm& dst, TileRef src, Loc loc) {
  if (Empty(src)) return;
  if (src.dtype() != dst.dtype()) Cast(src, src, loc);
  Instr& instr = recorder_->Add(Op::kStoreUb, Pipe::kMte3, lane_, dst.dtype(), dst.rows, dst.cols,
                                {recorder_->Reads(src)}, loc);
  recorder_->SetAccess(instr, AccessOf(dst, Path::kUbToGm, /*writes=*/true));
}

void VectorRecorder::Fill(TileRef x, float value, Loc loc) {
  if (!Empty(x)) AddV(Op::kFill, x.dtype(), x, {recorder_->Writes(x)}, loc).immediate = Bits(value);
}

void VectorRecorder::FillInt(TileRef x, std::int32_t value, Loc loc) {
  if (!Empty(x)) AddV(Op::kFill, x.dtype(), x, {recorder_->Writes(x)}, loc).immediate = value;
}

void VectorRecorder::Cast(TileRef dst, TileRef a, Loc loc) {
  if (Empty(dst)) return;
  // A repeat is 256 bytes of what is read: widening takes half as long as narrowing.
  AddV(Op::kCast, a.dtype(), a, {recorder_->Writes(dst), recorder_->Reads(a)}, loc);
}

void VectorRecorder::Scalar(ScalarOp op, TileRef dst, TileRef a, float value, Loc loc) {
  if (Empty(dst)) return;
  constexpr Op kOps[] = {Op::kMulScalar, Op::kMaxScalar, Op::kAddScalar};  // By ScalarOp.
  AddV(kOps[static_cast<int>(op)], a.dtype(), a, {recorder_->Writes(dst), recorder_->Reads(a)}, loc)
      .immediate = Bits(value);
}

void VectorRecorder::Binary(BinaryOp op, TileRef dst, TileRef a, TileRef b, Loc loc) {
  if (Empty(dst)) return;
  Instr& instr =
      AddV(OpOf(op), a.dtype(), a, {recorder_->Writes(dst), recorder_->Reads(a), recorder_->Reads(b)}, loc);
  instr.broadcasts = b.cols() == 1 && a.cols() > 1;
}

void VectorRecorder::Unary(UnaryOp op, TileRef dst, TileRef a, Loc loc) {
  if (Empty(dst)) return;
  constexpr Op kOps[] = {Op::kExp, Op::kLn, Op::kSqrt, Op::kAbs};  // By UnaryOp.
  AddV(kOps[static_cast<int>(op)], a.dtype(), a, {recorder_->Writes(dst), recorder_->Reads(a)}, loc);
}

void VectorRecorder::Reduce(ReduceOp op, TileRef dst, TileRef a, Loc loc) {
  if (Empty(dst)) return;
  AddV(op == ReduceOp::kMax ? Op::kRowMax : Op::kRowSum, a.dtype(), a,
       {recorder_->Writes(dst), recorder_->Reads(a)}, loc);
}

void VectorRecorder::Transpose(TileRef dst, TileRef a, Loc loc) {
  if (Empty(a)) return;
  AddV(Op::kTranspose, a.dtype(), a, {recorder_->Writes(dst), recorder_->Reads(a)}, loc);
}

// A select for each side of the band that cuts the tile.
void VectorRecorder::MaskOutside(TileRef x, std::int64_t lowest, std::int64_t highest, float value, Loc loc) {
  if (Empty(x)) return;
  const auto select = [&](Op op, std::int64_t diagonal) {
    Instr& instr = AddV(op, x.dtype(), x, {recorder_->Writes(x), recorder_->Reads(x)}, loc);
    instr.immediate = static_cast<std::int32_t>(std::clamp(diagonal, -x.rows(), x.cols()));
    instr.dims[2] = std::bit_cast<std::int32_t>(value);
  };
  if (lowest > 1 - x.rows()) select(Op::kMaskBelow, lowest);
  if (highest < x.cols() - 1) select(Op::kMaskAbove, highest);
}

void VectorRecorder::MaskWhere(TileRef x, TileRef flags, float value, Loc loc) {
  if (Empty(x)) return;
  AddV(Op::kMaskWhere, x.dtype(), x, {recorder_->Writes(x), recorder_->Reads(x), recorder_->Reads(flags)},
       loc)
      .immediate = Bits(value);
}

void VectorRecorder::Distances(TileRef x, std::int64_t first, Loc loc) {
  if (Empty(x)) return;
  Instr& instr = AddV(Op::kDistances, x.dtype(), x, {recorder_->Writes(x)}, loc);
  instr.immediate = static_cast<std::int32_t>(first & 0xffffffff);
  instr.dims[2] = static_cast<std::int32_t>(first >> 32);
}

void VectorRecorder::DropFlags(TileRef flags, const DropPlace& place, Loc loc) {
  if (Empty(flags)) return;
  recorder_->SetDrop(AddV(Op::kDropFlags, flags.dtype(), flags, {recorder_->Writes(flags)}, loc), place);
}

void VectorRecorder::AddInt(TileRef dst, TileRef a, TileRef b, Loc loc) {
  if (Empty(dst)) return;
  AddV(Op::kAddInt, a.dtype(), a, {recorder_->Writes(dst), recorder_->Reads(a), recorder_->Reads(b)}, loc);
}

void VectorRecorder::ColumnSum(TileRef dst, TileRef a, Loc loc) {
  if (Empty(dst)) return;
  if (Empty(a)) return FillInt(dst, 0, loc);
  AddV(Op::kColumnSum, a.dtype(), a, {recorder_->Writes(dst), recorder_->Reads(a)}, loc);
}

void VectorRecorder::ExclusiveScan(TileRef dst, TileRef a, std::int32_t initial, Loc loc) {
  const OperandUse source = Empty(a) ? OperandUse() : recorder_->Reads(a);
  Instr& instr = AddV(Op::kExclusiveScan, dst.dtype(), dst, {recorder_->Writes(dst), source}, loc);
  // Every pass adds what is 1, 2, 4, .. elements to the left.
  instr.dims[2] = static_cast<std::int32_t>(std::bit_width(static_cast<std::uint64_t>(dst.cols())));
  instr.immediate = initial;
}

void VectorRecorder::ReadScalar(TileRef a, std::int64_t j, Loc loc) {
  const TileRef element = a.Cols({j, j + 1});
  recorder_->Add(Op::kReadScalar, Pipe::kS, lane_, a.dtype(), 1, 1, {recorder_->Reads(element)}, loc);
}

std::int64_t VectorRecorder::ReadInt(TileRef a, std::int64_t j, Loc loc) {
  ReadScalar(a, j, loc);
  const HostLayout& shows = a.slot->shows;
  return reinterpret_cast<const std::int32_t*>(
      shows.data)[a.row_part.begin * shows.pitch + a.col_part.begin + j];
}

void VectorRecorder::AddScalarInt(TileRef dst, TileRef a, std::int32_t value, Loc loc) {
  if (Empty(dst)) return;
  AddV(Op::kAddScalarInt, a.dtype(), a, {recorder_->Writes(dst), recorder_->Reads(a)}, loc).immediate = value;
}

void VectorRecorder::CopyElement(TileRef dst, TileRef src, Loc loc) {
  recorder_->Add(Op::kCopyElement, Pipe::kS, lane_, src.dtype(), 1, 1,
                 {recorder_->Writes(dst), recorder_->Reads(src)}, loc);
}

void VectorRecorder::AddBins(Op op, TileRef ids, const IdBins& bins, std::initializer_list<OperandUse> uses,
                             Loc loc) {
  Instr& instr = recorder_->Add(op, Pipe::kS, lane_, ids.dtype(), ids.rows(), ids.cols(), uses, loc);
  instr.immediate = bins.first;
  instr.dims[2] = bins.whole() ? 0 : bins.shift << 8 | bins.bits;
}

void VectorRecorder::Histogram(TileRef counts, TileRef ids, const IdBins& bins, Loc loc) {
  if (Empty(counts) || Empty(ids)) return;
  AddBins(Op::kHistogram, ids, bins, {recorder_->Writes(counts), recorder_->Reads(ids)}, loc);
}

void VectorRecorder::Rank(TileRef ranks, TileRef next, TileRef ids, const IdBins& bins, Loc loc) {
  if (Empty(next) || Empty(ids)) return;
  AddBins(Op::kRank, ids, bins, {recorder_->Writes(ranks), recorder_->Writes(next), recorder_->Reads(ids)},
          loc);
}

void VectorRecorder::RankWithin(TileRef ranks, TileRef next, TileRef limits, TileRef ids, const IdBins& bins,
                                Loc loc) {
  if (Empty(next) || Empty(ids)) return;
  AddBins(
      Op::kRank, ids, bins,
      {recorder_->Writes(ranks), recorder_->Writes(next), recorder_->Reads(ids), recorder_->Reads(limits)},
      loc);
}

void VectorRecorder::RoundUp(TileRef dst, TileRef a, std::int32_t multiple, Loc loc) {
  if (Empty(a)) return;
  recorder_
      ->Add(Op::kRoundUp, Pipe::kS, lane_, a.dtype(), a.rows(), a.cols(),
            {recorder_->Writes(dst), recorder_->Reads(a)}, loc)
      .immediate = multiple;
}

void VectorRecorder::TrueColumns(TileRef dst, TileRef flags, Loc loc) {
  if (Empty(dst)) return;
  AddV(Op::kTrueColumns, flags.dtype(), flags, {recorder_->Writes(dst), recorder_->Reads(flags)}, loc);
}

void VectorRecorder::KeepWhere(TileRef dst, TileRef a, TileRef flags, Loc loc) {
  if (Empty(dst)) return;
  AddV(Op::kKeepWhere, a.dtype(), a, {recorder_->Writes(dst), recorder_->Reads(a), recorder_->Reads(flags)},
       loc)
      .broadcasts = flags.cols() == 1 && a.cols() > 1;
}

void VectorRecorder::Lookup(TileRef dst, TileRef ids, TileRef table, std::int32_t first, Loc loc) {
  if (Empty(dst) || Empty(table)) return;
  AddV(Op::kLookup, ids.dtype(), ids,
       {recorder_->Writes(dst), recorder_->Reads(ids), recorder_->Reads(table)}, loc)
      .immediate = first;
}

void VectorRecorder::Receive(TileRef dst, TileRef src, Loc loc) {
  if (!Empty(dst)) AddReceive(*recorder_, lane_, recorder_->WorkspaceOf(src), dst, loc);
}

void VectorRecorder::SelectLe(TileRef dst, TileRef key, float limit, TileRef a, TileRef b, Loc loc) {
  if (Empty(dst)) return;
  AddV(Op::kSelectLe, key.dtype(), key,
       {recorder_->Writes(dst), recorder_->Reads(key), recorder_->Reads(a), recorder_->Reads(b)}, loc)
      .immediate = Bits(limit);
}

void VectorRecorder::TopK(TileRef values, TileRef ids, TileRef a, Loc loc) {
  if (Empty(values)) return;
  AddV(Op::kTopK, a.dtype(), a, {recorder_->Writes(values), recorder_->Writes(ids), recorder_->Reads(a)}, loc)
      .dims[2] = static_cast<std::int32_t>(values.cols());
}

void VectorRecorder::GroupTop(TileRef sums, TileRef a, std::int64_t count, Loc loc) {
  if (Empty(a)) return;
  AddV(Op::kGroupTop, a.dtype(), a, {recorder_->Writes(sums), recorder_->Reads(a)}, loc).dims[2] =
      static_cast<std::int32_t>(count);
}

void VectorRecorder::KeepGroups(TileRef a, TileRef ids, std::int64_t group_cols, Loc loc) {
  if (Empty(a)) return;
  AddV(Op::kKeepGroups, a.dtype(), a, {recorder_->Writes(a), recorder_->Reads(a), recorder_->Reads(ids)}, loc)
      .dims[2] = static_cast<std::int32_t>(group_cols);
}

void VectorRecorder::Gather(TileRef dst, TileRef a, TileRef ids, Loc loc) {
  if (Empty(dst)) return;
  AddV(Op::kGather, dst.dtype(), dst, {recorder_->Writes(dst), recorder_->Reads(ids), recorder_->Reads(a)},
       loc);
}

void VectorRecorder::Scatter(TileRef dst, TileRef ids, TileRef values, Loc loc) {
  if (Empty(values)) return;
  recorder_->Add(Op::kScatter, Pipe::kS, lane_, values.dtype(), values.rows(), values.cols(),
                 {recorder_->Writes(dst), recorder_->Reads(ids), recorder_->Reads(values)}, loc);
}

void VectorRecorder::Random(TileRef u, Loc loc) {
  if (!Empty(u)) AddV(Op::kRandom, u.dtype(), u, {recorder_->Writes(u)}, loc);
}

void VectorRecorder::DropRoutes(TileRef ids, TileRef weights, TileRef u, float rate, Loc loc) {
  if (Empty(ids)) return;
  AddV(Op::kDropRoutes, u.dtype(), u,
       {recorder_->Writes(ids), recorder_->Reads(u), recorder_->Writes(weights)}, loc)
      .immediate = Bits(rate);
}

void VectorRecorder::MapRoutes(TileRef out, TileRef ids, TileRef scores, TileRef d_weights, Loc loc) {
  if (Empty(out)) return;
  const OperandUse gradient = d_weights.given() ? recorder_->Reads(d_weights) : OperandUse();
  recorder_->Add(Op::kMapRoutes, Pipe::kS, lane_, out.dtype(), out.rows(), out.cols(),
                 {recorder_->Writes(out), recorder_->Reads(ids), recorder_->Reads(scores), gradient}, loc);
}

void VectorRecorder::MoveToUb(TileRef dst, TileRef src, Loc loc) {
  if (Empty(dst)) return;
  const Operand between = recorder_->WorkspaceOf(dst);
  AddSend(*recorder_, between, src, loc);
  AddReceive(*recorder_, lane_, between, dst, loc);
}

void VectorRecorder::MoveToL1(TileRef dst, TileRef src, Loc loc) {
  if (Empty(dst)) return;
  const Operand between = recorder_->WorkspaceOf(dst);
  Instr& send = recorder_->Add(Op::kSendUb, Pipe::kMte3, lane_, src.dtype(), src.rows(), src.cols(),
                               {recorder_->Reads(src), recorder_->Writes(between)}, loc);
  recorder_->SetAccess(send, recorder_->AccessOf(between, Path::kUbToGm, /*writes=*/true));
  Instr& receive = recorder_->Add(Op::kReceiveL1, Pipe::kMte2, -1, dst.dtype(), dst.rows(), dst.cols(),
                                  {recorder_->Reads(between), recorder_->Writes(dst)}, loc);
  recorder_->SetAccess(receive, recorder_->AccessOf(between, Path::kGmToL1Nd2Nz, /*writes=*/false));
}

// ---- Vector ----

void TraceVector::LoadUb(TileRef dst, const Gm& src, Loc loc) {
  const bool masks =
      src.dtype() == DType::kBool && src.data() == nullptr;  // They steer nothing by themselves.
  if (state_->Computes(dst) && !masks) {
    CUBIST_CHECK(Empty(dst) || src.data() != nullptr,
                 std::string("no data in index tensor ") + src.tensor->name);
    host_.LoadUb(dst, src, loc);
  }
  record_.LoadUb(dst, src, loc);
}

void TraceVector::StoreUb(const Gm& dst, TileRef src, Loc loc) {
  if (state_->Computes(src) && dst.data() != nullptr) host_.StoreUb(dst, src, loc);
  record_.StoreUb(dst, src, loc);
}

void TraceVector::Fill(TileRef x, float value, Loc loc) {
  if (state_->with_data) host_.Fill(x, value, loc);
  record_.Fill(x, value, loc);
}

void TraceVector::Cast(TileRef dst, TileRef a, Loc loc) {
  if (state_->Computes(dst)) host_.Cast(dst, a, loc);
  record_.Cast(dst, a, loc);
}

void TraceVector::Scalar(ScalarOp op, TileRef dst, TileRef a, float value, Loc loc) {
  if (state_->with_data) host_.Scalar(op, dst, a, value, loc);
  record_.Scalar(op, dst, a, value, loc);
}

void TraceVector::Binary(BinaryOp op, TileRef dst, TileRef a, TileRef b, Loc loc) {
  if (state_->with_data) host_.Binary(op, dst, a, b, loc);
  record_.Binary(op, dst, a, b, loc);
}

void TraceVector::Unary(UnaryOp op, TileRef dst, TileRef a, Loc loc) {
  if (state_->with_data) host_.Unary(op, dst, a, loc);
  record_.Unary(op, dst, a, loc);
}

void TraceVector::Reduce(ReduceOp op, TileRef dst, TileRef a, Loc loc) {
  if (state_->with_data) host_.Reduce(op, dst, a, loc);
  record_.Reduce(op, dst, a, loc);
}

void TraceVector::Transpose(TileRef dst, TileRef a, Loc loc) {
  if (state_->with_data) host_.Transpose(dst, a, loc);
  record_.Transpose(dst, a, loc);
}

void TraceVector::MaskOutside(TileRef x, std::int64_t lowest, std::int64_t highest, float value, Loc loc) {
  if (state_->with_data) host_.MaskOutside(x, lowest, highest, value, loc);
  record_.MaskOutside(x, lowest, highest, value, loc);
}

void TraceVector::MaskWhere(TileRef x, TileRef flags, float value, Loc loc) {
  if (state_->with_data) host_.MaskWhere(x, flags, value, loc);
  record_.MaskWhere(x, flags, value, loc);
}

void TraceVector::Distances(TileRef x, std::int64_t first, Loc loc) {
  if (state_->with_data) host_.Distances(x, first, loc);
  record_.Distances(x, first, loc);
}

void TraceVector::DropFlags(TileRef flags, const DropoutStream& stream, std::int64_t row, std::int64_t key,
                            bool transposed, Loc loc) {
  if (state_->with_data) host_.DropFlags(flags, stream, row, key, transposed, loc);
  record_.DropFlags(flags, {stream, row, key, transposed}, loc);
}

void TraceVector::AddAlibi(TileRef s, TileRef scratch, float scale, float slope, std::int64_t first,
                           bool root, Loc loc) {
  if (state_->with_data) host_.AddAlibi(s, scratch, scale, slope, first, root, loc);
  ExpandAddAlibi(record_, s, scratch, scale, slope, first, root, loc);
}

void TraceVector::FillInt(TileRef x, std::int32_t value, Loc loc) {
  host_.FillInt(x, value, loc);
  record_.FillInt(x, value, loc);
}

void TraceVector::AddInt(TileRef dst, TileRef a, TileRef b, Loc loc) {
  host_.AddInt(dst, a, b, loc);
  record_.AddInt(dst, a, b, loc);
}

void TraceVector::ColumnSum(TileRef dst, TileRef a, Loc loc) {
  host_.ColumnSum(dst, a, loc);
  record_.ColumnSum(dst, a, loc);
}

void TraceVector::ExclusiveScan(TileRef dst, TileRef a, std::int32_t initial, Loc loc) {
  host_.ExclusiveScan(dst, a, initial, loc);
  record_.ExclusiveScan(dst, a, initial, loc);
}

void TraceVector::AddScalarInt(TileRef dst, TileRef a, std::int32_t value, Loc loc) {
  host_.AddScalarInt(dst, a, value, loc);
  record_.AddScalarInt(dst, a, value, loc);
}

std::int64_t TraceVector::ReadInt(TileRef a, std::int64_t j, Loc loc) {
  record_.ReadScalar(a, j, loc);
  return host_.ReadInt(a, j, loc);
}

float TraceVector::ReadFloat(TileRef a, std::int64_t j, Loc loc) {
  record_.ReadScalar(a, j, loc);
  return state_->with_data ? host_.ReadFloat(a, j, loc) : 1.0f;
}

void TraceVector::SoftmaxStep(TileRef p, TileRef s, TileRef m_new, TileRef m_old, TileRef l, float scale,
                              Loc loc) {
  if (state_->with_data) host_.SoftmaxStep(p, s, m_new, m_old, l, scale, loc);
  if (!Empty(s)) ExpandSoftmaxStep(record_, p, s, m_new, m_old, l, scale, loc);
}

void TraceVector::RowDot(TileRef sum, TileRef s0, TileRef s1, TileRef a, TileRef b, TileRef weights,
                         Loc loc) {
  if (state_->with_data) host_.RowDot(sum, s0, s1, a, b, weights, loc);
  if (!Empty(a)) ExpandRowDot(record_, sum, s0, s1, a, b, weights, loc);
}

void TraceVector::ScaleRows(TileRef dst, TileRef s0, TileRef a, TileRef factor, TileRef weights, Loc loc) {
  if (state_->with_data) host_.ScaleRows(dst, s0, a, factor, weights, loc);
  if (!Empty(a)) ExpandScaleRows(record_, dst, s0, a, factor, weights, loc);
}

void TraceVector::NormGrad(TileRef dx, TileRef s0, TileRef s1, TileRef dy, TileRef x, TileRef weights,
                           TileRef factor, TileRef shift, TileRef more, Loc loc) {
  if (state_->with_data) host_.NormGrad(dx, s0, s1, dy, x, weights, factor, shift, more, loc);
  if (!Empty(x)) ExpandNormGrad(record_, dx, s0, s1, dy, x, weights, factor, shift, more, loc);
}

void TraceVector::AddColumnDots(TileRef acc, TileRef s0, TileRef s1, TileRef a, TileRef b, TileRef factor,
                                Loc loc) {
  if (state_->with_data) host_.AddColumnDots(acc, s0, s1, a, b, factor, loc);
  if (!Empty(a)) ExpandAddColumnDots(record_, acc, s0, s1, a, b, factor, loc);
}

void TraceVector::SwiGlu(TileRef out, TileRef s0, TileRef s1, TileRef gate, TileRef up, TileRef probs,
                         Loc loc) {
  if (state_->with_data) host_.SwiGlu(out, s0, s1, gate, up, probs, loc);
  if (!Empty(gate)) ExpandSwiGlu(record_, out, s0, s1, gate, up, probs, loc);
}

void TraceVector::SwiGluGrad(const SwiGluGradTiles& t, Loc loc) {
  if (state_->with_data) host_.SwiGluGrad(t, loc);
  if (!Empty(t.gate)) ExpandSwiGluGrad(record_, t, loc);
}

void TraceVector::AttentionGradStep(TileRef p, TileRef ds, TileRef s, TileRef dp, TileRef lse, TileRef delta,
                                    float scale, Loc loc) {
  if (state_->with_data) host_.AttentionGradStep(p, ds, s, dp, lse, delta, scale, loc);
  if (!Empty(s)) ExpandAttentionGradStep(record_, p, ds, s, dp, lse, delta, scale, loc);
}

void TraceVector::SelectLe(TileRef dst, TileRef key, float limit, TileRef a, TileRef b, Loc loc) {
  if (state_->with_data) host_.SelectLe(dst, key, limit, a, b, loc);
  record_.SelectLe(dst, key, limit, a, b, loc);
}

// Without data the first columns stand for the highest.
void TraceVector::TopK(TileRef values, TileRef ids, TileRef a, Loc loc) {
  if (state_->with_data) {
    host_.TopK(values, ids, a, loc);
  } else {
    host_.FillInt(ids, 0, loc);
  }
  record_.TopK(values, ids, a, loc);
}

void TraceVector::GroupTop(TileRef sums, TileRef a, std::int64_t count, Loc loc) {
  if (state_->with_data) host_.GroupTop(sums, a, count, loc);
  record_.GroupTop(sums, a, count, loc);
}

void TraceVector::KeepGroups(TileRef a, TileRef ids, std::int64_t group_cols, Loc loc) {
  if (state_->with_data) host_.KeepGroups(a, ids, group_cols, loc);
  record_.KeepGroups(a, ids, group_cols, loc);
}

void TraceVector::Gather(TileRef dst, TileRef a, TileRef ids, Loc loc) {
  if (state_->with_data) host_.Gather(dst, a, ids, loc);
  record_.Gather(dst, a, ids, loc);
}

void TraceVector::Scatter(TileRef dst, TileRef ids, TileRef values, Loc loc) {
  if (state_->with_data) host_.Scatter(dst, ids, values, loc);
  record_.Scatter(dst, ids, values, loc);
}

void TraceVector::Random(TileRef u, const RandomStream& stream, std::int64_t first, std::int64_t row_step,
                         Loc loc) {
  if (state_->with_data) host_.Random(u, stream, first, row_step, loc);
  record_.Random(u, loc);
}

void TraceVector::DropRoutes(TileRef ids, TileRef weights, TileRef u, float rate, Loc loc) {
  if (state_->with_data) host_.DropRoutes(ids, weights, u, rate, loc);
  record_.DropRoutes(ids, weights, u, rate, loc);
}

void TraceVector::MapRoutes(TileRef out, TileRef ids, TileRef scores, TileRef d_weights,
                            const RouteFunction& function, Loc loc) {
  if (state_->with_data) host_.MapRoutes(out, ids, scores, d_weights, function, loc);
  record_.MapRoutes(out, ids, scores, d_weights, loc);
}

void TraceVector::Scores(ScoreFunction function, TileRef n, TileRef s0, TileRef column, Loc loc) {
  if (state_->with_data) host_.Scores(function, n, s0, column, loc);
  if (!Empty(n)) ExpandScores(record_, function, n, s0, column, loc);
}

void TraceVector::Repair(TileRef x, TileRef bad, TileRef s0, TileRef s1, TileRef column, float limit,
                         bool by_mean, Loc loc) {
  if (state_->with_data) host_.Repair(x, bad, s0, s1, column, limit, by_mean, loc);
  if (!Empty(x)) ExpandRepair(record_, x, bad, s0, s1, column, limit, by_mean, loc);
}

void TraceVector::MulAdd(TileRef acc, TileRef factor, TileRef x, Loc loc) {
  if (state_->with_data) host_.MulAdd(acc, factor, x, loc);
  ExpandMulAdd(record_, acc, factor, x, loc);
}

void TraceVector::WeightedSum(TileRef acc, TileRef scratch, std::span<const TileRef> rows,
                              std::span<const float> weights, Accumulate accumulate, Loc loc) {
  if (state_->with_data) host_.WeightedSum(acc, scratch, rows, weights, accumulate, loc);
  ExpandWeightedSum(record_, acc, scratch, rows, weights, accumulate, loc);
}

void TraceVector::StoreScaled(const Gm& dst, TileRef scratch, TileRef x, float weight, Loc loc) {
  if (state_->with_data) host_.StoreScaled(dst, scratch, x, weight, loc);
  if (!Empty(x)) ExpandStoreScaled(record_, dst, scratch, x, weight, loc);
}

void TraceVector::StoreActivated(const Gm& dst, const EpilogueRefs& t, const EpilogueScalars& e, Loc loc) {
  if (state_->with_data) host_.StoreActivated(dst, t, e, loc);
  if (!Empty(t.x)) ExpandStoreActivated(record_, dst, t, e, loc);
}

void TraceVector::AddDot(TileRef sum, TileRef scratch, TileRef x, TileRef row, Loc loc) {
  if (state_->with_data) host_.AddDot(sum, scratch, x, row, loc);
  if (!Empty(x)) ExpandAddDot(record_, sum, scratch, x, row, loc);
}

void TraceVector::StoreScaledDots(TileRef s0, TileRef s1, TileRef x, std::span<const ScaledDotRef> dots,
                                  Loc loc) {
  if (state_->with_data) host_.StoreScaledDots(s0, s1, x, dots, loc);
  if (!Empty(x)) ExpandStoreScaledDots(record_, s0, s1, x, dots, loc);
}

void TraceVector::Gather(TileRef dst, const Gm& column, TileRef places, TileRef staging, Loc loc) {
  if (state_->with_data) host_.Gather(dst, column, places, staging, loc);
  ExpandGather(record_, dst, column, places, staging, loc);
}

void TraceVector::Scatter(const Gm& column, TileRef places, TileRef src, TileRef staging, Loc loc) {
  if (state_->Computes(src) && column.data() != nullptr) host_.Scatter(column, places, src, staging, loc);
  ExpandScatter(record_, column, places, src, staging, loc);
}

void TraceVector::Histogram(TileRef counts, TileRef ids, const IdBins& bins, Loc loc) {
  host_.Histogram(counts, ids, bins, loc);
  record_.Histogram(counts, ids, bins, loc);
}

void TraceVector::Rank(TileRef ranks, TileRef next, TileRef ids, const IdBins& bins, Loc loc) {
  host_.Rank(ranks, next, ids, bins, loc);
  record_.Rank(ranks, next, ids, bins, loc);
}

void TraceVector::RankWithin(TileRef ranks, TileRef next, TileRef limits, TileRef ids, const IdBins& bins,
                             Loc loc) {
  host_.RankWithin(ranks, next, limits, ids, bins, loc);
  record_.RankWithin(ranks, next, limits, ids, bins, loc);
}

void TraceVector::TrueColumns(TileRef dst, TileRef flags, Loc loc) {
  host_.TrueColumns(dst, flags, loc);
  record_.TrueColumns(dst, flags, loc);
}

void TraceVector::KeepWhere(TileRef dst, TileRef a, TileRef flags, Loc loc) {
  host_.KeepWhere(dst, a, flags, loc);
  record_.KeepWhere(dst, a, flags, loc);
}

void TraceVector::Lookup(TileRef dst, TileRef ids, TileRef table, std::int32_t first, Loc loc) {
  host_.Lookup(dst, ids, table, first, loc);
  record_.Lookup(dst, ids, table, first, loc);
}

void TraceVector::RoundUp(TileRef dst, TileRef a, std::int32_t multiple, Loc loc) {
  host_.RoundUp(dst, a, multiple, loc);
  record_.RoundUp(dst, a, multiple, loc);
}

void TraceVector::Receive(TileRef dst, TileRef src, Loc loc) {
  if (state_->with_data) host_.Receive(dst, src, loc);
  record_.Receive(dst, src, loc);
}

void TraceVector::MoveToUb(TileRef dst, TileRef src, Loc loc) {
  if (state_->with_data) host_.MoveToUb(dst, src, loc);
  record_.MoveToUb(dst, src, loc);
}

void TraceVector::MoveToL1(TileRef dst, TileRef src, Loc loc) {
  if (state_->with_data) host_.MoveToL1(dst, src, loc);
  record_.MoveToL1(dst, src, loc);
}

}  // namespace cubist::trace
