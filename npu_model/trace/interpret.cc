#include "npu_model/trace/interpret.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <random>

#include "npu_model/instruction.h"
#include "npu_model/philox.h"
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

// The bin that a Histogram or Rank puts an id into, where it is one of `count`.
std::optional<std::size_t> BinOf(const Instr& instr, double id, std::size_t count) {
  const std::int64_t bin = BinsOf(instr).Of(static_cast<std::int32_t>(id));
  if (bin < 0 || bin >= static_cast<std::int64_t>(count)) return std::nullopt;
  return static_cast<std::size_t>(bin);
}

// The numbers of a random stream are not in a record, nor are a caller's functions.
bool Known(Op op) {
  return op <= Op::kReceiveL1 && op != Op::kRandom && op != Op::kDropRoutes && op != Op::kMapRoutes;
}

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

// A packed operand lies in panels, row after row; a plain one as its strides say.
Interpreter::Elements Interpreter::ElementsOf(const Instr& instr, const GmAccess& access) {
  Elements elements;
  elements.bytes = access.tensor < 0 ? &workspace_ : &gm_[static_cast<std::size_t>(access.tensor)];
  elements.dtype = instr.dtype;
  const std::int64_t element = SizeOf(instr.dtype);
  const bool packed =
      instr.op == Op::kStorePacked || (instr.op == Op::kLoadL1 && access.path == Path::kGmToL1);
  const std::int64_t panel_bytes = chip_.packing.a_width_bytes;
  for (std::int64_t r = 0; r < instr.dims[0]; ++r) {
    for (std::int64_t c = 0; c < instr.dims[1]; ++c) {
      std::int64_t at = access.offset;
      if (packed) {
        at += c * element / panel_bytes * access.row_stride + r * panel_bytes + c * element % panel_bytes;
      } else if (access.transposed) {
        at += c * access.row_stride + r * element;
      } else {
        at += r * access.row_stride + c * (access.bursts > 1 ? access.burst_stride : element);
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

namespace {

float Single(double value) { return static_cast<float>(value); }

double Binary(Op op, double a, double b) {
  const float x = Single(a), y = Single(b);
  switch (op) {
    case Op::kAdd:
      return x + y;
    case Op::kSub:
      return x - y;
    case Op::kMul:
      return x * y;
    case Op::kDiv:
      return x / y;
    default:
      return x > y ? x : y;
  }
}

// c (+)= a b, in fp32 and ascending k.
std::vector<double> Product(const Instr& instr, std::vector<double> c, const std::vector<double>& a,
                            const std::vector<double>& b, const std::vector<double>& bias) {
  const auto m = static_cast<std::size_t>(instr.dims[0]), n = static_cast<std::size_t>(instr.dims[1]),
             k = static_cast<std::size_t>(instr.dims[2]);
  if (!instr.accumulates) c.assign(m * n, 0.0);
  for (std::size_t i = 0; i < m; ++i) {
    for (std::size_t j = 0; j < n; ++j) {
      float sum = Single(bias.empty() ? c[i * n + j] : bias[j]);
      for (std::size_t p = 0; p < k; ++p) sum += Single(a[i * k + p]) * Single(b[p * n + j]);
      c[i * n + j] = sum;
    }
  }
  return c;
}

}  // namespace

Interpreter::Values Interpreter::Compute(const Instr& instr, Values* second) {
  const auto rows = static_cast<std::size_t>(instr.dims[0]), cols = static_cast<std::size_t>(instr.dims[1]);
  const double number = NumberOf(instr);
  const auto each = [&](auto&& f) {
    Values values = ReadUse(instr, 0);
    for (double& v : values) v = f(v);
    return values;
  };
  const auto each_row = [&](double start, auto&& f) {
    const Values a = ReadUse(instr, 0);
    Values values(rows, start);
    for (std::size_t e = 0; e < a.size(); ++e) values[e / cols] = f(values[e / cols], a[e]);
    return values;
  };
  const auto turned = [&](const Values& a) {
    Values values;
    for (std::size_t e = 0; e < a.size(); ++e) values.push_back(a[e % rows * cols + e / rows]);
    return values;
  };
  switch (instr.op) {
    case Op::kLoadL1:
    case Op::kLoadBias:
    case Op::kLoadUb:
      return Read(ElementsOf(instr, record_.accesses[static_cast<std::size_t>(instr.access)]));
    case Op::kLoadL0A:
    case Op::kLoadL0B: {
      const Values a = ReadUse(instr, 0);
      return instr.immediate == 0 ? a : turned(a);
    }
    case Op::kTranspose:
      return turned(ReadUse(instr, 0));
    case Op::kStorePacked:
    case Op::kLoadBT:
    case Op::kStoreUb:
    case Op::kCast:
    case Op::kCopyElement:
    case Op::kSendL0C:
    case Op::kReceiveUb:
    case Op::kSendUb:
    case Op::kReceiveL1:
      return ReadUse(instr, 0);
    case Op::kStoreL0C: {
      const FixOptions options = FixOf(instr);
      Values sums = each([&](double a) {
        const float scaled = Single(a) * options.scale;
        return options.relu && scaled <= 0 ? 0.0f : scaled;
      });
      if (options.accumulate == Accumulate::kNo) return sums;
      const Values before = Read(ElementsOf(instr, record_.accesses[static_cast<std::size_t>(instr.access)]));
      for (std::size_t e = 0; e < sums.size(); ++e) sums[e] = Single(before[e]) + Single(sums[e]);
      return sums;
    }
    case Op::kMmad: {
      const bool has_bias = instr.uses[3].used();
      const bool empty = instr.dims[2] == 0;
      const Values a = empty ? Values() : ReadUse(instr, 0), b = empty ? Values() : ReadUse(instr, 1);
      const Values bias = has_bias ? ReadUse(instr, empty ? 0 : 2) : Values();
      const Values c =
          instr.accumulates ? Read(ElementsOf(record_.operands[instr.uses[0].operand()])) : Values();
      return Product(instr, c, a, b, bias);
    }
    case Op::kFill:
      return Values(rows * cols, IsFloat(instr.dtype) ? number : instr.immediate);
    case Op::kMulScalar:
      return each([&](double a) { return Single(a) * Single(number); });
    case Op::kAddScalar:
      return each([&](double a) { return Single(a) + Single(number); });
    case Op::kMaxScalar:
      return each([&](double a) { return a > number ? a : number; });
    case Op::kAdd:
    case Op::kSub:
    case Op::kMul:
    case Op::kDiv:
    case Op::kMax: {
      Values a = ReadUse(instr, 0);
      const Values b = ReadUse(instr, 1);
      for (std::size_t e = 0; e < a.size(); ++e)
        a[e] = Binary(instr.op, a[e], b[instr.broadcasts ? e / cols : e % b.size()]);  // One row, or as many.
      return a;
    }
    case Op::kExp:
      return each([](double a) { return std::exp(Single(a)); });
    case Op::kLn:
      return each([](double a) { return std::log(Single(a)); });
    case Op::kSqrt:
      return each([](double a) { return std::sqrt(Single(a)); });
    case Op::kRowMax:
      return each_row(-std::numeric_limits<double>::infinity(),
                      [](double max, double a) { return a > max ? a : max; });
    case Op::kRowSum:
      return each_row(0, [](double sum, double a) { return Single(sum) + Single(a); });
    case Op::kMaskAbove:
    case Op::kMaskBelow: {
      Values x = ReadUse(instr, 0);
      for (std::size_t e = 0; e < x.size(); ++e) {
        const auto diagonal = static_cast<std::int64_t>(e % cols) - static_cast<std::int64_t>(e / cols);
        const bool masked =
            instr.op == Op::kMaskAbove ? diagonal > instr.immediate : diagonal < instr.immediate;
        if (masked) x[e] = MaskValueOf(instr);
      }
      return x;
    }
    case Op::kMaskWhere: {
      Values x = ReadUse(instr, 0);
      const Values flags = ReadUse(instr, 1);
      for (std::size_t e = 0; e < x.size(); ++e) {
        if (flags[e] != 0) x[e] = number;
      }
      return x;
    }
    case Op::kDistances: {
      const std::int64_t first = FirstDistanceOf(instr);
      Values x(rows * cols);
      for (std::size_t e = 0; e < x.size(); ++e) {
        x[e] = std::abs(static_cast<double>(first + static_cast<std::int64_t>(e / cols) -
                                            static_cast<std::int64_t>(e % cols)));
      }
      return x;
    }
    case Op::kAddInt: {
      Values a = ReadUse(instr, 0);
      const Values b = ReadUse(instr, 1);
      for (std::size_t e = 0; e < a.size(); ++e) a[e] += b[e];
      return a;
    }
    case Op::kAddScalarInt:
      return each([&](double a) { return a + instr.immediate; });
    case Op::kColumnSum: {
      const Values a = ReadUse(instr, 0);
      Values sums(cols, 0.0);
      for (std::size_t e = 0; e < a.size(); ++e) sums[e % cols] += a[e];
      return sums;
    }
    case Op::kExclusiveScan: {
      const Values a = ReadUse(instr, 0);
      Values scan(cols, instr.immediate);
      for (std::size_t e = 0; e + 1 < cols; ++e) scan[e + 1] = scan[e] + a[e];
      return scan;
    }
    case Op::kReadScalar:
      return {};
    case Op::kAbs:
      return each([](double a) { return std::abs(a); });
    case Op::kSelectLe: {
      const Values key = ReadUse(instr, 0), b = ReadUse(instr, 2);
      Values a = ReadUse(instr, 1);
      for (std::size_t e = 0; e < a.size(); ++e) {
        if (!(key[e] <= number)) a[e] = b[b.size() == a.size() ? e : e / cols];
      }
      return a;
    }
    case Op::kTopK: {
      const Values a = ReadUse(instr, 0);
      const auto kept = static_cast<std::size_t>(instr.dims[2]);
      Values values;
      for (std::size_t r = 0; r < rows; ++r) {
        std::vector<std::size_t> order(cols);
        for (std::size_t c = 0; c < cols; ++c) order[c] = c;
        std::stable_sort(order.begin(), order.end(),
                         [&](std::size_t x, std::size_t y) { return a[r * cols + x] > a[r * cols + y]; });
        for (std::size_t j = 0; j < kept; ++j) {
          values.push_back(a[r * cols + order[j]]);
          second->push_back(static_cast<double>(order[j]));
        }
      }
      return values;
    }
    case Op::kGroupTop: {
      Values a = ReadUse(instr, 0);
      const Operand& to = record_.operands[instr.uses[0].operand()];
      const std::size_t groups = static_cast<std::size_t>(to.col_end - to.col_begin), width = cols / groups;
      Values sums;
      for (std::size_t g = 0; g < rows * groups; ++g) {
        const auto first = a.begin() + static_cast<std::ptrdiff_t>(g * width);
        std::sort(first, first + static_cast<std::ptrdiff_t>(width), std::greater<>());
        float sum = Single(first[0]);
        for (std::int32_t j = 1; j < instr.dims[2] && first[j] > -std::numeric_limits<double>::infinity();
             ++j)
          sum += Single(first[j]);
        sums.push_back(sum);
      }
      return sums;
    }
    case Op::kKeepGroups: {
      Values a = ReadUse(instr, 0);
      const Values ids = ReadUse(instr, 1);
      const std::size_t kept = ids.size() / rows, width = static_cast<std::size_t>(instr.dims[2]);
      for (std::size_t e = 0; e < a.size(); ++e) {
        const auto first = ids.begin() + static_cast<std::ptrdiff_t>(e / cols * kept);
        const auto last = first + static_cast<std::ptrdiff_t>(kept);
        if (std::find(first, last, static_cast<double>(e % cols / width)) == last)
          a[e] = -std::numeric_limits<double>::infinity();
      }
      return a;
    }
    case Op::kGather: {
      const Values ids = ReadUse(instr, 0), a = ReadUse(instr, 1);
      const std::size_t width = a.size() / rows;
      Values values;
      for (std::size_t e = 0; e < ids.size(); ++e)
        values.push_back(ids[e] < 0 ? 0.0 : a[e / cols * width + static_cast<std::size_t>(ids[e])]);
      return values;
    }
    case Op::kScatter: {
      Values dst = Read(ElementsOf(record_.operands[instr.uses[0].operand()]));
      const Values ids = ReadUse(instr, 0), values = ReadUse(instr, 1);
      const std::size_t width = dst.size() / rows;
      for (std::size_t e = 0; e < ids.size(); ++e) {
        if (ids[e] >= 0) dst[e / cols * width + static_cast<std::size_t>(ids[e])] = values[e];
      }
      return dst;
    }
    case Op::kTrueColumns: {
      const Values flags = ReadUse(instr, 0);
      const Operand& to = record_.operands[instr.uses[0].operand()];
      const auto kept = static_cast<std::size_t>(to.col_end - to.col_begin);
      Values columns(rows * kept, -1.0);
      for (std::size_t r = 0; r < rows; ++r) {
        for (std::size_t c = 0, j = 0; c < cols && j < kept; ++c) {
          if (flags[r * cols + c] != 0) columns[r * kept + j++] = static_cast<double>(c);
        }
      }
      return columns;
    }
    case Op::kKeepWhere: {
      Values a = ReadUse(instr, 0);
      const Values flags = ReadUse(instr, 1);
      for (std::size_t e = 0; e < a.size(); ++e) {
        if (flags[flags.size() == a.size() ? e : e / cols] == 0) a[e] = -1;
      }
      return a;
    }
    case Op::kLookup: {
      Values dst = Read(ElementsOf(record_.operands[instr.uses[0].operand()]));
      const Values ids = ReadUse(instr, 0), table = ReadUse(instr, 1);
      for (std::size_t e = 0; e < ids.size(); ++e) {
        const double at = ids[e] - instr.immediate;
        if (at >= 0 && at < static_cast<double>(table.size())) dst[e] = table[static_cast<std::size_t>(at)];
      }
      return dst;
    }
    case Op::kRandom:
    case Op::kDropRoutes:
    case Op::kMapRoutes:
      break;
    case Op::kDropFlags: {
      const DropPlace& place = record_.drops[static_cast<std::size_t>(instr.dims[2])];
      Values flags(rows * cols);
      for (std::size_t e = 0; e < flags.size(); ++e) {
        const auto r = static_cast<std::int64_t>(e / cols), c = static_cast<std::int64_t>(e % cols);
        const std::int64_t row = place.row + (place.transposed ? c : r),
                           key = place.key + (place.transposed ? r : c);
        flags[e] = IsDropped(place.stream, row, key) ? 1 : 0;
      }
      return flags;
    }
    case Op::kHistogram: {
      Values counts = Read(ElementsOf(record_.operands[instr.uses[0].operand()]));
      for (const double id : ReadUse(instr, 0)) {
        if (const auto bin = BinOf(instr, id, counts.size())) ++counts[*bin];
      }
      return counts;
    }
    case Op::kRank: {
      *second = Read(ElementsOf(record_.operands[instr.uses[1].operand()]));
      const Values ids = ReadUse(instr, 0), limits = ReadUse(instr, 1);
      Values ranks(ids.size(), -1.0);
      for (std::size_t e = 0; e < ids.size(); ++e) {
        const auto bin = BinOf(instr, ids[e], second->size());
        if (bin) ranks[e] = limits.empty() || (*second)[*bin] < limits[*bin] ? (*second)[*bin]++ : -1;
      }
      return ranks;
    }
    case Op::kSort32:
    case Op::kMergeSort: {
      const Values keys = ReadUse(instr, 0), values = ReadUse(instr, 1);
      const auto part =
          static_cast<std::size_t>(instr.op == Op::kSort32 ? kSortedRun : kMergedRuns * instr.dims[2]);
      std::vector<std::size_t> order(keys.size());
      std::iota(order.begin(), order.end(), std::size_t{0});
      for (std::size_t begin = 0; begin < order.size(); begin += part) {
        const auto first = order.begin() + static_cast<std::ptrdiff_t>(begin);
        const auto last = first + static_cast<std::ptrdiff_t>(std::min(part, order.size() - begin));
        std::stable_sort(first, last, [&](std::size_t a, std::size_t b) { return keys[a] > keys[b]; });
      }
      Values sorted;
      for (const std::size_t i : order) sorted.push_back(keys[i]), second->push_back(values[i]);
      return sorted;
    }
    case Op::kRunOffsets: {
      Values offsets = Read(ElementsOf(record_.operands[instr.uses[0].operand()]));
      *second = Read(ElementsOf(record_.operands[instr.uses[1].operand()]));
      const Values keys = ReadUse(instr, 0);
      std::vector<bool> starts(keys.size());
      for (std::size_t e = 0; e < keys.size(); ++e) starts[e] = e == 0 || keys[e] != keys[e - 1];
      for (std::size_t e = 0; e < keys.size(); ++e) {
        if (keys[e] > 0 || -keys[e] >= static_cast<double>(second->size())) continue;
        const auto id = static_cast<std::size_t>(-keys[e]);
        if (starts[e]) offsets[id] = (*second)[id] - static_cast<double>(e);
        ++(*second)[id];
      }
      return offsets;
    }
    case Op::kRoundUp:
      return each([&](double a) { return std::ceil(a / instr.immediate) * instr.immediate; });
  }
  CUBIST_CHECK(false, std::string("the interpreter does not know ") + NameOf(instr.op));
  return {};
}

}  // namespace cubist::trace
