#include "npu_model/trace/trace_core.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>

#include "npu_model/trace/record_room.h"
#include "npu_model/trace/recording.h"

namespace cubist::trace {
namespace {

// Rows of one length, one after the other without a gap, are one row.
GmAccess Contiguous(GmAccess access) {
  if (access.bursts == 1 && access.rows > 1 && access.row_stride == access.burst_bytes && !access.rows_down) {
    access.burst_bytes *= access.rows;
    access.rows = 1;
  }
  return access;
}

// From the lowest of `count` pieces on, where they step down; returns whether they do.
bool Upwards(std::int64_t count, std::int64_t* stride, std::int64_t* offset) {
  const bool down = *stride < 0 && count > 1;
  if (down) *offset += (count - 1) * *stride;
  *stride = std::abs(*stride);
  return down;
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
    workspace_of_[id] = static_cast<std::int32_t>(out_->workspace.size());
    SlotInfo info = out_->slots[id];
    info.address = out_->workspace_bytes;
    info.bytes = RoundUp(info.rows * info.cols * SizeOf(info.dtype), line_);
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
  std::vector<Instr>& instrs = out_->instrs;
  if (instrs.size() == instrs.capacity()) {  // Twice as many are made, beside those that there are.
    CheckRoom(std::ssize(instrs), 2 * std::ssize(instrs) * static_cast<std::int64_t>(sizeof(Instr)));
  }
  Instr& instr = instrs.emplace_back();
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

void Recorder::Spend(int lane, std::int64_t steps, const Loc& loc) {
  CUBIST_CHECK(steps >= 0, "Spend of fewer than no steps");
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  for (; steps > 0; steps -= std::min(steps, kMost))
    Add(Op::kSpend, Pipe::kS, lane, DType::kI64, std::min(steps, kMost), 1, {}, loc);
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
  access.offset = gm.tensor->origin + gm.offset * element;
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
  access.rows_down = Upwards(access.rows, &access.row_stride, &access.offset);
  access.bursts_down = Upwards(access.bursts, &access.burst_stride, &access.offset);
  access = Contiguous(access);
  access.rows_far =
      path == Path::kGmToL1Nd2Nz && access.rows > 1 && access.row_stride > kMostNd2NzStride * element;
  return access;
}

GmAccess AccessOf(const ChipSpec& chip, const PackedGm& packed, Path path, bool writes) {
  if (packed.role == Role::kB) {
    const std::int64_t step = chip.PackedBlockStep(packed.dtype);
    const bool turned = packed.second_role == Role::kBTransposed;
    CUBIST_CHECK(packed.col_part.begin % step == 0 && (!turned || packed.row_part.begin % step == 0),
                 "a block of a packed operand begins inside a panel of some host");
  }
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
  if (lane >= 0) has_buffers[static_cast<std::size_t>(lane)] = true;
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

void TraceCube::LoadL1(const TileRef& dst, const Gm& src, Loc loc) {
  if (state_->with_data) host_.LoadL1(dst, src, loc);
  if (Empty(dst)) return;
  Recorder& to = state_->recorder;
  Instr& instr = to.Add(Op::kLoadL1, Pipe::kMte2, -1, src.dtype(), src.rows, src.cols, {to.Writes(dst)}, loc);
  to.SetAccess(instr, AccessOf(src, Path::kGmToL1Nd2Nz, /*writes=*/false));
}

void TraceCube::LoadL1Packed(const TileRef& dst, const PackedGm& src, Loc loc) {
  if (state_->with_data) host_.LoadL1Packed(dst, src, loc);
  if (Empty(dst)) return;
  Recorder& to = state_->recorder;
  Instr& instr =
      to.Add(Op::kLoadL1, Pipe::kMte2, -1, src.dtype, dst.rows(), dst.cols(), {to.Writes(dst)}, loc);
  to.SetAccess(instr, AccessOf(*state_->context.chip, src, Path::kGmToL1, /*writes=*/false));
}

void TraceCube::StorePacked(const PackedGm& dst, const TileRef& src, Loc loc) {
  if (state_->with_data) host_.StorePacked(dst, src, loc);
  if (Empty(src)) return;
  Recorder& to = state_->recorder;
  Instr& instr =
      to.Add(Op::kStorePacked, Pipe::kMte3, -1, dst.dtype, src.rows(), src.cols(), {to.Reads(src)}, loc);
  to.SetAccess(instr, AccessOf(*state_->context.chip, dst, Path::kL1ToGm, /*writes=*/true));
}

void TraceCube::LoadL0A(const TileRef& dst, const TileRef& src, Transpose transpose, Loc loc) {
  if (state_->with_data) host_.LoadL0A(dst, src, transpose, loc);
  if (Empty(dst)) return;
  Recorder& to = state_->recorder;
  to.Add(Op::kLoadL0A, Pipe::kMte1, -1, src.dtype(), src.rows(), src.cols(), {to.Reads(src), to.Writes(dst)},
         loc)
      .immediate = transpose == Transpose::kYes;
}

void TraceCube::LoadL0B(const TileRef& dst, const TileRef& src, Transpose transpose, Loc loc) {
  if (state_->with_data) host_.LoadL0B(dst, src, transpose, loc);
  if (Empty(dst)) return;
  Recorder& to = state_->recorder;
  to.Add(Op::kLoadL0B, Pipe::kMte1, -1, src.dtype(), src.rows(), src.cols(), {to.Reads(src), to.Writes(dst)},
         loc)
      .immediate = transpose == Transpose::kYes;
}

void TraceCube::LoadBias(const TileRef& dst, const Gm& row, Loc loc) {
  if (state_->with_data) host_.LoadBias(dst, row, loc);
  if (Empty(dst)) return;
  Recorder& to = state_->recorder;
  const TileRef staged{state_->BiasStage(*dst.slot), {0, 1}, dst.col_part};
  Instr& instr = to.Add(Op::kLoadBias, Pipe::kMte2, -1, row.dtype(), 1, row.cols, {to.Writes(staged)}, loc);
  to.SetAccess(instr, AccessOf(row, Path::kGmToL1, /*writes=*/false));
  to.Add(Op::kLoadBT, Pipe::kMte1, -1, row.dtype(), 1, row.cols, {to.Reads(staged), to.Writes(dst)}, loc);
}

void TraceCube::Mmad(const TileRef& c, const TileRef& a, const TileRef& b, MmadStart start,
                     const TileRef& bias, Loc loc) {
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

void TraceCube::StoreL0C(const Gm& dst, const TileRef& src, const FixOptions& options, Loc loc) {
  if (state_->with_data) host_.StoreL0C(dst, src, options, loc);
  if (Empty(src)) return;
  Recorder& to = state_->recorder;
  Instr& instr =
      to.Add(Op::kStoreL0C, Pipe::kFix, -1, dst.dtype(), src.rows(), src.cols(), {to.Reads(src)}, loc);
  SetFix(instr, options);
  GmAccess access = AccessOf(dst, Path::kL0CToGm, /*writes=*/true);
  access.adds = instr.accumulates;
  to.SetAccess(instr, access);
}

void TraceCube::Send(const TileRef& dst, const TileRef& src, Loc loc) {
  if (state_->with_data) host_.Send(dst, src, loc);
  if (!Empty(src)) AddSend(state_->recorder, state_->recorder.WorkspaceOf(dst), src, loc);
}

// Kernels steer by it, so it is read without data too.
std::int64_t TraceCube::ReadGmInt(const Gm& element, Loc loc) {
  CUBIST_CHECK(element.data() != nullptr, std::string("no data in index tensor ") + element.tensor->name);
  state_->ForEachSide([&](int lane) {
    Instr& instr = state_->recorder.Add(Op::kReadScalar, Pipe::kS, lane, element.dtype(), 1, 1, {}, loc);
    state_->recorder.SetAccess(instr, AccessOf(element, Path::kGmToL1, /*writes=*/false));
  });
  return host_.ReadGmInt(element, loc);
}

void TraceCube::Spend(std::int64_t steps, Loc loc) {
  state_->ForEachSide([&](int lane) { state_->recorder.Spend(lane, steps, loc); });
}

}  // namespace cubist::trace
