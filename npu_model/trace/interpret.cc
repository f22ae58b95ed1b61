#include "npu_model/trace/interpret.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "npu_model/status.h"

namespace cubist::trace {
namespace {

double LoadElement(const std::byte* at, DType dtype) {
  if (IsFloat(dtype)) return LoadFloat(at, dtype, 0);
  return static_cast<double>(LoadInt(at, dtype, 0));
}

void StoreElement(std::byte* at, DType dtype, double value) {
  if (IsFloat(dtype)) return StoreFloat(at, dtype, 0, static_cast<float>(value));
  if (dtype == DType::kBool) {
    *at = static_cast<std::byte>(value != 0);
  } else if (dtype == DType::kI64) {
    const auto wide = static_cast<std::int64_t>(value);
    std::memcpy(at, &wide, sizeof wide);
  } else {
    const auto narrow = static_cast<std::int32_t>(value);
    std::memcpy(at, &narrow, sizeof narrow);
  }
}

// The dtype of a slot's elements on chip: sums are fp32.
DType StoredType(const SlotInfo& slot, bool in_gm) {
  const bool sums = !in_gm && (slot.buffer == Buffer::kL0C || slot.buffer == Buffer::kBT);
  return sums ? DType::kF32 : slot.dtype;
}

// The numbers of a random stream are not in a record, nor are a caller's functions.
bool Known(Op op) { return op <= Op::kReceiveL1 && op != Op::kRandom && op != Op::kMapRoutes; }

}  // namespace

GmImage InitialGm(const Record& record, unsigned seed) {
  GmImage gm(record.tensors.size());
  std::mt19937 random(seed);
  for (std::size_t t = 0; t < gm.size(); ++t) {
    const TensorInfo& tensor = record.tensors[t];
    gm[t].resize(static_cast<std::size_t>(tensor.bytes));
    if (tensor.data != nullptr) {
      std::copy_n(tensor.data, tensor.bytes, gm[t].begin());
      continue;
    }
    const std::int64_t element = SizeOf(tensor.dtype);
    for (std::int64_t at = 0; at + element <= tensor.bytes; at += element) {
      const double value = IsFloat(tensor.dtype) ? static_cast<double>(random() % 2048) / 1024 - 1 : 0;
      StoreElement(gm[t].data() + at, tensor.dtype, value);
    }
  }
  return gm;
}

const char* UnknownTo(const Record& record) {
  for (const Phase& phase : record.phases) {
    for (const CoreRecord& core : phase.cores) {
      for (const Instr& instr : core.instrs) {
        if (!Known(instr.op)) return NameOf(instr.op);
      }
    }
  }
  return nullptr;
}

struct Interpreter::Elements {
  std::vector<std::byte>* bytes = nullptr;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> at;  // byte offsets, row by row
};

Interpreter::Interpreter(const ChipSpec& chip, const CoreRecord& record, GmImage& gm)
    : chip_(chip), record_(record), gm_(gm) {
  constexpr std::byte kPattern{0xa5};
  std::int32_t sides = 1;
  for (const SlotInfo& slot : record.slots) sides = std::max(sides, slot.lane + 2);
  on_chip_.resize(static_cast<std::size_t>(kBufferCount * sides));
  for (const SlotInfo& slot : record.slots) {
    if (slot.buffer == Buffer::kHandOver) continue;  // They stand in the workspace.
    auto& bytes = on_chip_[static_cast<std::size_t>(slot.lane + 1) * kBufferCount +
                           static_cast<std::size_t>(slot.buffer)];
    const auto end = static_cast<std::size_t>(slot.address + slot.bytes);
    if (bytes.size() < end) bytes.resize(end, kPattern);
  }
  workspace_.assign(static_cast<std::size_t>(record.workspace_bytes), kPattern);
}

// Row-major in UB, in BT and in hand-over slots; panels of 32 bytes (L0C: of n_step columns), row after row, in the
// Cube's buffers.
Interpreter::Elements Interpreter::ElementsOf(const Operand& o) {
  const bool in_gm = o.slot < 0;
  const SlotInfo& slot = in_gm ? record_.workspace[static_cast<std::size_t>(~o.slot)]
                               : record_.slots[static_cast<std::size_t>(o.slot)];
  Elements elements;
  elements.dtype = StoredType(slot, in_gm);
  elements.bytes = in_gm ? &workspace_
                         : &on_chip_[static_cast<std::size_t>(slot.lane + 1) * kBufferCount +
                                     static_cast<std::size_t>(slot.buffer)];
  const std::int64_t element = SizeOf(elements.dtype);
  const bool row_major = in_gm || slot.buffer == Buffer::kUB || slot.buffer == Buffer::kBT;
  const bool sums = slot.buffer == Buffer::kL0C;
  const std::int64_t width = row_major ? slot.cols : sums ? chip_.mmad.n_step : kBlockBytes / element;
  const std::int64_t pitch =
      row_major && !in_gm ? RoundUp(slot.cols * element, kBlockBytes) : width * element;
  const std::int64_t rows = RoundUp(slot.rows, sums ? chip_.mmad.m_step : chip_.packing.row_multiple);
  for (std::int64_t r = o.row_begin; r < o.row_end; ++r) {
    for (std::int64_t c = o.col_begin; c < o.col_end; ++c) {
      const std::int64_t panel = row_major ? 0 : c / width;
      elements.at.push_back(slot.address + (panel * rows + r) * pitch + (c - panel * width) * element);
    }
  }
  return elements;
}

// A packed operand lies in panels, row after row; a plain one as its strides say, from its lowest row and burst on.
Interpreter::Elements Interpreter::ElementsOf(const Instr& instr, const GmAccess& access) {
  Elements elements;
  elements.bytes = access.tensor < 0 ? &workspace_ : &gm_[static_cast<std::size_t>(access.tensor)];
  elements.dtype = instr.dtype;
  const std::int64_t element = SizeOf(instr.dtype);
  const bool packed =
      instr.op == Op::kStorePacked || (instr.op == Op::kLoadL1 && access.path == Path::kGmToL1);
  const std::int64_t panel_bytes = chip_.packing.a_width_bytes;
  const auto row_at = [&](std::int64_t i) {
    return (access.rows_down ? access.rows - 1 - i : i) * access.row_stride;
  };
  const auto burst_at = [&](std::int64_t i) {
    return (access.bursts_down ? access.bursts - 1 - i : i) * access.burst_stride;
  };
  for (std::int64_t r = 0; r < instr.dims[0]; ++r) {
    for (std::int64_t c = 0; c < instr.dims[1]; ++c) {
      std::int64_t at = access.offset;
      if (packed) {
        at += c * element / panel_bytes * access.row_stride + r * panel_bytes + c * element % panel_bytes;
      } else if (access.transposed) {
        at += row_at(c) + r * element;
      } else {
        at += row_at(r) + (access.bursts > 1 ? burst_at(c) : c * element);
      }
      elements.at.push_back(at);
    }
  }
  return elements;
}

Interpreter::Values Interpreter::Read(const Elements& from) {
  Values values;
  values.reserve(from.at.size());
  for (const std::int64_t at : from.at) values.push_back(LoadElement(from.bytes->data() + at, from.dtype));
  return values;
}

void Interpreter::Write(const Elements& to, const Values& values) {
  CUBIST_CHECK(to.at.size() == values.size(),
               "an instruction wrote another number of elements than recorded");
  for (std::size_t e = 0; e < values.size(); ++e)
    StoreElement(to.bytes->data() + to.at[e], to.dtype, values[e]);
}

// The n-th operand that an instruction reads.
Interpreter::Values Interpreter::ReadUse(const Instr& instr, std::size_t n) {
  for (const OperandUse use : instr.uses) {
    if (use.used() && !use.writes() && n-- == 0) return Read(ElementsOf(record_.operands[use.operand()]));
  }
  return {};
}

// What an operand that it writes holds before.
Interpreter::Values Interpreter::ReadBefore(const Instr& instr, std::size_t use) {
  return Read(ElementsOf(record_.operands[instr.uses[use].operand()]));
}

Interpreter::Values Interpreter::ReadAccess(const Instr& instr) {
  return Read(ElementsOf(instr, record_.accesses[static_cast<std::size_t>(instr.access)]));
}

Interpreter::Result Interpreter::Start(std::uint32_t i) {
  const Instr& instr = record_.instrs[i];
  Result result;
  result.instr = i;
  result.values[0] = Compute(instr, &result.values[1]);
  return result;
}

void Interpreter::Finish(const Result& result) {
  const Instr& instr = record_.instrs[result.instr];
  std::size_t n = 0;
  for (const OperandUse use : instr.uses) {
    if (use.used() && use.writes()) Write(ElementsOf(record_.operands[use.operand()]), result.values[n++]);
  }
  if (instr.access < 0) return;
  const GmAccess& access = record_.accesses[static_cast<std::size_t>(instr.access)];
  if (access.writes && access.tensor >= 0) Write(ElementsOf(instr, access), result.values[0]);
}

}  // namespace cubist::trace
