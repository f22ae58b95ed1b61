// The record of a kernel: every instruction of every core, with the bytes that it reads and writes.
//
// A record is made once, by the cores of trace_core.h, and replayed as often as one
// likes (replay.h), with other rates and latencies too. Operands, global-memory
// accesses and source lines are interned, so that an instruction stays small.
#ifndef CUBIST_NPU_MODEL_TRACE_RECORD_H_
#define CUBIST_NPU_MODEL_TRACE_RECORD_H_

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/instruction.h"
#include "npu_model/tile.h"

namespace cubist::trace {

// With what dims[2] and immediate of an Instr hold: as they are, or as a function below reads them. The other dims are rows
// and columns, unless said otherwise.
enum class Op : std::uint8_t {
  // Cube core.
  kLoadL1,       // MTE2  GM -> L1
  kStorePacked,  // MTE3  L1 -> GM
  kLoadL0A,      // MTE1  L1 -> L0A; immediate: whether it transposes
  kLoadL0B,      // MTE1  L1 -> L0B; likewise
  kLoadBias,     // MTE2  GM -> L1, a row on its way to BT
  kLoadBT,       // MTE1  L1 -> BT
  kMmad,         // M     dims are m, n, k
  kStoreL0C,     // FIX   L0C -> GM; FixOf
  // Vector core; V where no pipe is said.
  kLoadUb,   // MTE2  GM -> UB
  kStoreUb,  // MTE3  UB -> GM
  kFill,     // NumberOf, or immediate in an int32 tile
  kCast,
  kMulScalar,  // NumberOf
  kMaxScalar,  // NumberOf
  kAddScalar,  // NumberOf
  kAdd,
  kSub,
  kMul,
  kDiv,
  kMax,
  kExp,
  kLn,
  kSqrt,
  kAbs,
  kRowMax,
  kRowSum,
  kTranspose,
  kUnzip,  // immediate: the first element of each pair, or the second
  kZip,
  kMaskAbove,  // immediate: the last diagonal that stays; MaskValueOf
  kMaskBelow,  // immediate: the first diagonal that stays; MaskValueOf
  kMaskWhere,  // NumberOf
  kDistances,  // FirstDistanceOf
  kDropFlags,  // dims[2]: its number in CoreRecord::drops
  kAddInt,
  kColumnSum,
  kExclusiveScan,  // dims[2]: its passes; immediate: the first sum
  kAddScalarInt,   // immediate: what is added
  kSelectLe,       // NumberOf: the limit
  kTopK,           // dims[2]: the elements kept of each row
  kGroupTop,       // dims[2]: the elements summed of each group
  kKeepGroups,     // dims[2]: the columns of a group
  kGather,
  kRandom,
  kDropRoutes,  // NumberOf: the rate
  kTrueColumns,
  kKeepWhere,
  kLookup,       // immediate: the first id
  kSort32,       // In runs of 32 keys
  kMergeSort,    // dims[2]: the keys of a run before
  kReadScalar,   // S     of UB, or with an access of GM
  kSpend,        // S     dims[0] steps of the kernel's own
  kCopyElement,  // S     one element of UB to another
  kHistogram,    // S     a read-modify-write per id; BinsOf
  kRank,         // S     likewise
  kRoundUp,      // S     a read-modify-write per element; immediate: the multiple
  kScatter,      // S     a read-modify-write per element
  kMapRoutes,    // S     likewise, by a caller's function
  // Hand-overs on a chip without a direct path, through a GM workspace.
  kSendL0C,    // FIX   L0C -> workspace
  kReceiveUb,  // MTE2  workspace -> UB
  kSendUb,     // MTE3  UB -> workspace
  kReceiveL1,  // MTE2  workspace -> L1
};
inline constexpr int kOpCount = static_cast<int>(Op::kReceiveL1) + 1;
CUBIST_EXPORT const char* NameOf(Op op);

// A rectangle of a slot. `slot` is an index into CoreRecord::slots, or ~i for CoreRecord::workspace[i].
struct Operand {
  std::int32_t slot = 0;
  std::int32_t row_begin = 0, row_end = 0, col_begin = 0, col_end = 0;

  friend bool operator==(const Operand&, const Operand&) = default;
};

// Operand number in CoreRecord::operands, and whether the instruction writes it. An
// operand that is changed in place is listed twice.
struct OperandUse {
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
  std::uint32_t bits = kNone;

  OperandUse() = default;
  OperandUse(std::uint32_t operand, bool writes) : bits(operand << 1 | (writes ? 1u : 0u)) {}
  bool used() const { return bits != kNone; }
  bool writes() const { return (bits & 1u) != 0; }
  std::uint32_t operand() const { return bits >> 1; }
  friend bool operator==(const OperandUse&, const OperandUse&) = default;
};

inline constexpr int kMaxOperands = 4;

struct Instr {
  Op op = Op::kFill;
  Pipe pipe = Pipe::kS;
  std::int8_t lane = -1;      // -1: the Cube core; otherwise the Vector core
  DType dtype = DType::kF32;  // what the work is counted in: the widest type of a Vector instruction
  std::uint32_t line = 0;     // CoreRecord::lines
  // m, n, k of a Mmad; otherwise rows, columns and what Op says.
  std::int32_t dims[3] = {};
  std::int32_t access = -1;  // CoreRecord::accesses; -1 for none
  std::array<OperandUse, kMaxOperands> uses;
  bool broadcasts = false;   // the second source is a column, spread over the columns of the first
  bool accumulates = false;  // a Mmad that adds to what its accumulator holds; a store that adds to GM
  std::uint16_t unused = 0;  // No byte is left out: like instructions are like bytes.
  // The number that an instruction brings along, where Op says so: an int32, or the bits of a float.
  std::int32_t immediate = 0;

  friend bool operator==(const Instr&, const Instr&) = default;
};
static_assert(sizeof(Instr) <= 64);

// x == y, as bytes.
template <class T>
bool SameBytes(const std::vector<T>& x, const std::vector<T>& y) {
  static_assert(std::has_unique_object_representations_v<T>);
  return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(T)) == 0);
}

// What is packed into dims[2] and immediate.

// The float that an instruction brings along.
inline void SetNumber(Instr& instr, float number) { instr.immediate = std::bit_cast<std::int32_t>(number); }
inline float NumberOf(const Instr& instr) { return std::bit_cast<float>(instr.immediate); }

// How a StoreL0C stores.
inline void SetFix(Instr& instr, const FixOptions& options) {
  instr.accumulates = options.accumulate == Accumulate::kYes;
  SetNumber(instr, options.scale);
  instr.dims[2] = options.relu;
}
inline FixOptions FixOf(const Instr& instr) {
  return {instr.accumulates ? Accumulate::kYes : Accumulate::kNo, NumberOf(instr), instr.dims[2] != 0};
}

// What MaskAbove and MaskBelow fill in.
inline void SetMaskValue(Instr& instr, float value) { instr.dims[2] = std::bit_cast<std::int32_t>(value); }
inline float MaskValueOf(const Instr& instr) { return std::bit_cast<float>(instr.dims[2]); }

// Element (0, 0) of Distances, with its sign: the upper half stands in dims[2].
inline void SetFirstDistance(Instr& instr, std::int64_t first) {
  instr.immediate = static_cast<std::int32_t>(first & 0xffffffff);
  instr.dims[2] = static_cast<std::int32_t>(first >> 32);
}
inline std::int64_t FirstDistanceOf(const Instr& instr) {
  return std::int64_t{instr.dims[2]} << 32 | static_cast<std::uint32_t>(instr.immediate);
}

// What a Histogram or Rank counts ids in. dims[2] is 0 for whole ids, otherwise their bits and 256 times the shift.
inline void SetBins(Instr& instr, const IdBins& bins) {
  instr.immediate = bins.first;
  instr.dims[2] = bins.whole() ? 0 : bins.shift << 8 | bins.bits;
}
inline IdBins BinsOf(const Instr& instr) {
  IdBins bins{.first = instr.immediate};
  if (const int part = instr.dims[2]; part != 0) bins.shift = part >> 8, bins.bits = part & 0xff;
  return bins;
}

// Bytes of global memory, in their stored orientation: rows of `bursts` pieces of
// `burst_bytes` each. A plain matrix has one burst per row, contiguous bytes are one
// row, and a view whose columns are not adjacent has a burst per element. Strides are never negative: rows or bursts
// that a view takes downwards are named from the lowest on. No move of a device steps down, so each of them is one, and so is
// each row that lies farther from the next than a move's stride can say.
struct GmAccess {
  std::int32_t tensor = -1;  // Record::tensors; -1 for the core's own hand-over workspace
  Path path = Path::kGmToL1;
  bool writes = false;
  bool adds = false;                          // Of one that writes: to what is there.
  std::int64_t offset = 0;                    // first byte, from the start of the tensor
  std::int64_t rows = 1, row_stride = 0;      // bytes
  std::int64_t bursts = 1, burst_stride = 0;  // bytes
  std::int64_t burst_bytes = 0;
  bool transposed = false;                      // rows of the view are columns here
  bool rows_down = false, bursts_down = false;  // the lowest one is the view's last
  bool rows_far = false;                        // farther apart than one move can step

  std::int64_t bytes() const { return rows * bursts * burst_bytes; }
  // Moves of a device that it takes.
  std::int64_t moves() const {
    return (rows_down || bursts_down || rows_far ? rows : 1) * (bursts_down ? bursts : 1);
  }
  // One past the last byte, from the start of the tensor.
  std::int64_t end() const {
    return offset + (rows - 1) * row_stride + (bursts - 1) * burst_stride + burst_bytes;
  }
};

struct SlotInfo {
  const char* owner = "";  // the ring
  Buffer buffer = Buffer::kL1;
  DType dtype = DType::kF32;
  std::int32_t lane = -1;
  std::int64_t rows = 0, cols = 0;
  std::int64_t address = 0, bytes = 0;  // of a workspace: from the start of the core's workspace
};

struct SourceLine {
  const char* file = "";
  std::uint32_t line = 0;
};

// Which flags a DropFlags makes.
struct DropPlace {
  DropoutStream stream;
  std::int64_t row = 0, key = 0;
  bool transposed = false;
};

struct CoreRecord {
  std::vector<Instr> instrs;  // in program order, all pipes of the AI core (or of the Vector core) together
  std::vector<Operand> operands;
  std::vector<GmAccess> accesses;
  std::vector<SlotInfo> slots;      // by Slot::id
  std::vector<SlotInfo> workspace;  // hand-over slots in GM
  std::vector<SourceLine> lines;
  std::vector<DropPlace> drops;  // by dims[2] of a DropFlags
  std::int64_t workspace_bytes = 0;
};

struct Phase {
  bool vector_only = false;  // cores are Vector cores; otherwise AI cores
  std::vector<CoreRecord> cores;
};

struct TensorInfo {
  std::string name;
  std::uint64_t address = 0;  // first byte in the modelled GM
  std::int64_t bytes = 0;
  bool input = true;  // holds values before the launch
  DType dtype = DType::kF32;
  const std::byte* data = nullptr;  // an input's bytes, while the call's tensors live; null where it had none
};

struct Record {
  std::string kernel;
  ChipSpec chip;
  std::vector<TensorInfo>
      tensors;  // by GmTensor::index; may be left empty, extents then follow from the accesses
  std::vector<Phase> phases;
  std::int64_t workspace_bytes =
      0;  // packed operands and other workspaces of the launch, hand-overs not counted
};

// Whether it takes Cube and Vector cores.
CUBIST_EXPORT bool IsMixed(const Record& record);

// From the launch to the first instruction, in seconds.
CUBIST_EXPORT double LaunchSeconds(const Record& record, const ChipSpec& chip);

}  // namespace cubist::trace

#endif  // CUBIST_NPU_MODEL_TRACE_RECORD_H_
