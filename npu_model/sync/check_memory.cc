#include "npu_model/status.h"
#include "npu_model/sync/bytes.h"
#include "npu_model/sync/core_checker.h"

namespace cubist::sync {

using trace::GmAccess;
using trace::Instr;
using trace::Operand;
using trace::SlotInfo;

void CoreChecker::Locate(std::uint32_t operand) {
  Where& where = where_[operand];
  const Operand& o = from_.operands[operand];
  const SlotInfo& slot = SlotOf(o.slot);
  where.shadow = o.slot < 0 ? &workspace_
                            : &on_chip_[static_cast<std::size_t>(slot.buffer) * kSides +
                                        static_cast<std::size_t>(slot.lane + 1)];
  int ranges = 0;
  ForEachByteRange(chip_, slot, o.slot < 0, o, [&](std::int64_t begin, std::int64_t end) {
    if (ranges++ == 0) where.begin = begin, where.end = end;
  });
  where.in_one = ranges == 1;
  if (slot.buffer == Buffer::kUB && o.slot >= 0)
    where.lane = static_cast<std::int8_t>((slot.address / SizeOf(slot.dtype) + o.col_begin) %
                                          (kBlockBytes / SizeOf(slot.dtype)));
}

void CoreChecker::TouchOperand(std::uint32_t number, std::uint32_t i, std::size_t agent, std::uint32_t count,
                               Touched how) {
  Where& where = where_[number];
  if (where.shadow == nullptr) Locate(number);
  const Operand& o = from_.operands[number];
  const Access access{o.slot, -1, i, agent, count, how};
  // A move into UB writes whole blocks.
  const bool pads = where.lane >= 0 && access.writes() && from_.instrs[i].pipe == Pipe::kMte2;
  const auto touch = [&](std::int64_t begin, std::int64_t end, std::size_t* at) {
    Touch(*where.shadow, begin, end, access, at);
    if (pads && end % kBlockBytes != 0) Pad(*where.shadow, end, access);
  };
  if (where.in_one) return touch(where.begin, where.end, &where.at);
  ForEachByteRange(chip_, SlotOf(o.slot), o.slot < 0, o,
                   [&](std::int64_t begin, std::int64_t end) { touch(begin, end, nullptr); });
}

// What moves and Vector instructions take in UB begins at a block. A Vector instruction's operands may all begin at one
// other lane: it then begins at the block, and its mask leaves out what is before.
void CoreChecker::CheckBlocks(std::uint32_t i, std::size_t agent, std::uint32_t count) {
  const Instr& instr = from_.instrs[i];
  int lane = -1;
  bool one_lane = true;
  for (const trace::OperandUse use : instr.uses) {
    if (!use.used() || where_[use.operand()].lane < 0) continue;
    const int own = where_[use.operand()].lane;
    one_lane = one_lane && (lane < 0 || lane == own);
    lane = own;
  }
  if (one_lane && (lane <= 0 || instr.pipe == Pipe::kV)) return;
  for (const trace::OperandUse use : instr.uses) {
    if (!use.used() || where_[use.operand()].lane <= 0) continue;
    const Where& where = where_[use.operand()];
    Report(Fault::kMisaligned, where.begin, where.end,
           {from_.operands[use.operand()].slot, -1, i, agent, count, Touched::kRead}, nullptr);
  }
}

// To the end of its block.
void CoreChecker::Pad(Shadow& shadow, std::int64_t end, const Access& now) {
  Access pad = now;
  pad.how = Touched::kPad;
  Touch(shadow, end, RoundUp(end, kBlockBytes), pad, nullptr);
}

const SlotInfo& CoreChecker::SlotOf(std::int32_t slot) const {
  return slot < 0 ? from_.workspace[static_cast<std::size_t>(~slot)]
                  : from_.slots[static_cast<std::size_t>(slot)];
}

void CoreChecker::TouchGm(const GmAccess& gm, std::uint32_t i, std::size_t agent, std::uint32_t count) {
  if (gm.tensor < 0) return;  // The workspace comes as an operand.
  const auto tensor = static_cast<std::size_t>(gm.tensor);
  const bool in_order = watch_.in_order[tensor] != 0;
  const Touched how = !gm.writes                    ? Touched::kRead
                      : from_.instrs[i].accumulates ? Touched::kUpdate
                                                    : Touched::kWrite;
  if (!in_order && (gm.writes || watch_.held[tensor] == 0)) return;
  ForEachByteRange(gm, [&](std::int64_t begin, std::int64_t end) {
    const Access access{0, gm.tensor, i, agent, count, how};
    if (in_order) {
      Touch(tensors_[tensor], begin, end, access, nullptr);
    } else if (!Held(tensor, begin, end)) {
      Report(Fault::kUninitialised, begin, end, access, nullptr);
    }
  });
}

bool CoreChecker::Held(std::size_t tensor, std::int64_t begin, std::int64_t end) {
  asked_[tensor] = 1;
  return gm_.Holds(tensor, begin, end);
}

// Whether an instruction writes to a slot that shares bytes with an operand's.
bool CoreChecker::WritesInto(const Instr& instr, std::uint32_t operand) const {
  const std::int32_t slot = from_.operands[operand].slot;
  const auto meets = [&](std::int32_t other) {
    if (slot < 0 || other < 0) return slot == other;
    const SlotInfo &a = from_.slots[static_cast<std::size_t>(slot)],
                   &b = from_.slots[static_cast<std::size_t>(other)];
    return a.buffer == b.buffer && a.lane == b.lane && a.address < b.address + b.bytes &&
           b.address < a.address + a.bytes;
  };
  return std::any_of(instr.uses.begin(), instr.uses.end(), [&](trace::OperandUse use) {
    return use.used() && use.writes() && meets(from_.operands[use.operand()].slot);
  });
}

void CoreChecker::Touch(Shadow& shadow, std::int64_t begin, std::int64_t end, const Access& now,
                        std::size_t* at) {
  ++accesses_;
  const std::size_t component = now.agent + (IsScalar(now.agent) && now.writes() ? kScalarWrites : 0);
  const Epoch mine{now.count, now.instr, static_cast<std::uint8_t>(component)};
  shadow.Walk(begin, end, now.writes(), at, [&](Interval& part) {
    if (now.how == Touched::kNoteRead) return NoteRead(part, mine);
    if (now.how != Touched::kWrite && now.how != Touched::kPad) CheckRead(part, now);
    if (now.how == Touched::kRead) return NoteRead(part, mine);
    if (now.how == Touched::kCheckRead) return;
    if (part.write.component != kNobody && !Ordered(part.write, now))
      Report(Fault::kWriteAfterWrite, part.begin, part.end, now, &part.write);
    for (std::size_t r = 0; r < part.reader_count; ++r) {
      if (!Ordered(part.readers[r], now))
        Report(Fault::kWriteAfterRead, part.begin, part.end, now, &part.readers[r]);
    }
    part.write = mine;
    part.slot = now.how == Touched::kPad ? kPadding : now.slot;
    part.reader_count = 0;
  });
}

void CoreChecker::CheckRead(const Interval& part, const Access& now) {
  if (part.write.component == kNobody) {
    const bool held = now.tensor >= 0 && Held(static_cast<std::size_t>(now.tensor), part.begin, part.end);
    if (!held) Report(Fault::kUninitialised, part.begin, part.end, now, nullptr);
    return;
  }
  if (!Ordered(part.write, now)) Report(Fault::kReadAfterWrite, part.begin, part.end, now, &part.write);
  if (part.slot == kPadding) return Report(Fault::kPadding, part.begin, part.end, now, &part.write);
  if (part.slot != now.slot) Report(Fault::kLiveSlot, part.begin, part.end, now, &part.write, part.slot);
}

// The last read of each pipe stands for its earlier ones: what waits for it waits for them.
void CoreChecker::NoteRead(Interval& part, const Epoch& mine) {
  for (std::size_t r = 0; r < part.reader_count; ++r) {
    if (part.readers[r].component == mine.component) {
      part.readers[r] = mine;
      return;
    }
  }
  CUBIST_CHECK(part.reader_count < Interval::kMaxReaders, "more pipes read a byte than a check holds");
  part.readers[part.reader_count++] = mine;
}

// Whether an access is over, in program order before `now`, when `now` begins.
bool CoreChecker::Ordered(const Epoch& past, const Access& now) const {
  if (past.instr > now.instr) return false;
  if (past.instr == now.instr) return true;
  // A scalar unit has its own writes in order.
  if (IsScalar(now.agent) && past.component == now.agent + kScalarWrites) return true;
  if (past.component == now.agent && (IsScalar(now.agent))) return true;
  return clocks_[now.agent].at[past.component] >= past.count;
}

Finding CoreChecker::Start(Fault fault) const {
  Finding f;
  f.fault = fault;
  f.phase = phase_, f.core = core_, f.other_core = core_;
  return f;
}

Place CoreChecker::PlaceOf(const SyncOp& op) const {
  Place place{op.instr, op.pipe, op.lane, NameOf(op.kind), {}};
  if (op.instr < from_.instrs.size()) place.line = from_.lines[from_.instrs[op.instr].line];
  return place;
}

std::string CoreChecker::MemoryName(const Access& access) const {
  if (access.tensor >= 0) return TensorName(record_, static_cast<std::size_t>(access.tensor));
  return SlotName(access.slot);
}
std::string CoreChecker::SlotName(std::int32_t slot) const {
  const SlotInfo& info = SlotOf(slot);
  return std::string(slot < 0 ? "hand-over workspace of" : NameOf(info.buffer)) + " '" + info.owner + "'";
}

void CoreChecker::Report(Fault fault, std::int64_t begin, std::int64_t end, const Access& now,
                         const Epoch* past, std::int32_t other_slot) {
  Finding f = Start(fault);
  f.memory = MemoryName(now);
  f.begin = begin, f.end = end;
  f.second = PlaceOfInstr(from_, now.instr);
  if (past != nullptr) {
    f.first = PlaceOfInstr(from_, past->instr);
    if (past->instr > now.instr) {
      std::swap(f.first, f.second);
      if (fault == Fault::kReadAfterWrite) {
        f.fault = Fault::kWriteAfterRead;
      } else if (fault == Fault::kWriteAfterRead) {
        f.fault = Fault::kReadAfterWrite;
      }
    }
    if (fault == Fault::kLiveSlot) {
      f.cure =
          "keep the slots apart: " + SlotName(now.slot) + " was overwritten through " + SlotName(other_slot);
    } else if (fault == Fault::kPadding) {
      f.cure = "move whole blocks of " + std::to_string(kBlockBytes) +
               " bytes, or write what stands beside them behind the move";
    } else {
      f.cure = MissingEdge(f.first, f.second);
    }
  } else if (fault == Fault::kMisaligned) {
    f.cure = "begin at a multiple of " + std::to_string(kBlockBytes) + " bytes";
  } else {
    f.cure = "write these bytes before they are read";
  }
  findings_.Add(std::move(f));
}

std::string CoreChecker::MissingEdge(const Place& first, const Place& second) const {
  if (first.lane == second.lane) {
    if (first.pipe == second.pipe) return std::string("PipeBarrier<") + NameOf(first.pipe) + "> between them";
    const std::string pair = std::string(NameOf(first.pipe)) + "_" + NameOf(second.pipe);
    return "SetFlag<" + pair + "> after the first, WaitFlag<" + pair + "> before the second";
  }
  const char* mode = first.lane >= 0 && second.lane >= 0 ? "1" : "2";
  return std::string("CrossCoreSetFlag<") + mode + ", " + NameOf(first.pipe) + "> after the first, " +
         "CrossCoreWaitFlag<" + mode + ", " + NameOf(second.pipe) + "> before the second";
}

std::string CoreChecker::FlagName(const SyncOp& op) {
  std::string name = NameOf(op.kind);
  if (op.kind == Kind::kSetFlag) name += std::string("<") + NameOf(op.pipe) + "_" + NameOf(op.peer) + ">";
  if (op.kind == Kind::kWaitFlag) name += std::string("<") + NameOf(op.peer) + "_" + NameOf(op.pipe) + ">";
  if (op.kind == Kind::kPipeBarrier) return name + "<" + NameOf(op.pipe) + ">";
  if (op.kind == Kind::kCrossSet || op.kind == Kind::kCrossWait)
    name += std::string("<2, ") + NameOf(op.pipe) + ">";
  return name + "(" + std::to_string(op.id) + ")";
}

std::string CoreChecker::AgentName(std::size_t agent) {
  const std::size_t side = SideOf(agent);
  const char* pipe = NameOf(static_cast<Pipe>(agent % kPipes));
  return side == 0 ? std::string("Cube ") + pipe : "Vector " + std::to_string(side - 1) + " " + pipe;
}

}  // namespace cubist::sync
