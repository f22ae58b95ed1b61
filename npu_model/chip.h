// ChipSpec: everything that tiling and the model know of a chip. One table per chip,
// each number with its source.
#ifndef CUBIST_NPU_MODEL_CHIP_H_
#define CUBIST_NPU_MODEL_CHIP_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "npu_model/status.h"
#include "npu_model/tile.h"
#include "npu_model/types.h"

namespace cubist {

// How a constant came to be known.
enum class Basis : std::uint8_t { kDocumented, kMeasured, kFitted, kGuessed };
constexpr const char* NameOf(Basis basis) {
  constexpr const char* kNames[] = {"documented", "measured", "fitted", "guessed"};
  return kNames[static_cast<int>(basis)];
}

// A number of the hardware. `spread` is relative: sources or repetitions lie within value * (1 +- spread).
struct Constant {
  double value = 0;
  const char* unit = "";
  Basis basis = Basis::kGuessed;
  double spread = 0;
  const char* source = "";

  constexpr operator double() const { return value; }
};

// In-order queues of a core. An AI core has S, MTE1, MTE2, M, FIX and MTE3 on its
// Cube core, and S, MTE2, V and MTE3 on each of its Vector cores.
enum class Pipe : std::uint8_t { kS, kMte1, kMte2, kMte3, kM, kV, kFix };
inline constexpr int kPipeCount = 7;
constexpr const char* NameOf(Pipe pipe) {
  constexpr const char* kNames[] = {"S", "MTE1", "MTE2", "MTE3", "M", "V", "FIX"};
  return kNames[static_cast<int>(pipe)];
}

// Ways that bytes take. Each belongs to one pipe of one kind of core.
enum class Path : std::uint8_t {
  kGmToL1,       // MTE2, plain copy of contiguous bytes
  kGmToL1Nd2Nz,  // MTE2, row-major to fractals on the way
  kL1ToL0A,      // MTE1
  kL1ToL0B,      // MTE1
  kL1ToBT,       // MTE1
  kL0CToGm,      // FIX
  kL1ToGm,       // MTE3 of the Cube core
  kGmToUb,       // MTE2 of a Vector core
  kUbToGm,       // MTE3 of a Vector core
};
inline constexpr int kPathCount = 9;
constexpr const char* NameOf(Path path) {
  constexpr const char* kNames[] = {"GM->L1",  "GM->L1 ND2NZ", "L1->L0A", "L1->L0B", "L1->BT",
                                    "L0C->GM", "L1->GM",       "GM->UB",  "UB->GM"};
  return kNames[static_cast<int>(path)];
}

// A transfer of B bytes in r rows (bursts that are not contiguous in GM) is complete after
//   startup + r * row + B / bytes_per_cycle, and `least` at the earliest,
// cycles when nothing else is slower. Startups overlap: behind a transfer the next one on the pipe begins `gap`
// cycles after it began, and its bytes flow once the first one's have.
// Elements from row to row that a move which changes the layout can step, at most: its srcDValue has 16 bits (Ascend C
// DataCopy, Nd2NzParams). Rows farther apart are a move each.
inline constexpr std::int64_t kMostNd2NzStride = 65535;

struct PathSpec {
  Constant startup;          // cycles
  Constant bytes_per_cycle;  // bytes/cycle
  Constant gap{1, "cycles", Basis::kGuessed, 1, "an instruction per cycle"};
  Constant row{0, "cycles", Basis::kDocumented, 0, "rows take no longer than their bytes"};
  Constant least{0, "cycles", Basis::kDocumented, 0, "none"};  // Of the smallest transfer.
};

// Vector instructions, by what they cost.
enum class VectorOp : std::uint8_t {
  kUnary,   // Muls, Adds, Fill, copies
  kBinary,  // Add, Sub, Mul, Max
  kExp,
  kLn,
  kDiv,
  kCast,
  kReduce,      // row maximum, row sum
  kSelect,      // masks
  kInteger,     // int32 add, compare
  kSort,        // Sort32
  kMergeSort,   // MrgSort
  kGather,      // elements by index
  kGatherMask,  // elements by a pattern
};
inline constexpr int kVectorOpCount = 13;

// Bytes of a block; a fractal of L1, L0A and L0B is 16 rows of one block. What Vector instructions and moves take in UB begins
// at one (developer guide, alignment of operands), and a move into UB fills the last block of each row with anything
// (asc-devkit, DataCopyPad(ISASI)).
inline constexpr std::int64_t kBlockBytes = 32, kBlockWords = kBlockBytes / 4;

// Sort32 sorts runs of so many keys; MrgSort makes one of so many runs, and so many keys are a repeat of it.
inline constexpr std::int64_t kSortedRun = 32, kMergedRuns = 4, kMergedKeys = 64;

struct BufferSpec {
  std::int64_t capacity = 0;  // bytes; exceeding it is an error
  std::int64_t fast =
      0;  // bytes that keep full speed; on an NPU the capacity, on the host a share of the cache
  std::int64_t alignment = 1;  // bytes, of a slot
};

// Hand-over slots stand in GM, of which there is more than any kernel hands over.
inline constexpr std::int64_t kHandOverBytes = std::int64_t{1} << 40;

// Columns of the widest panel that any layout has. With data, a packed operand is laid out for the host on every chip, and no
// block of it may begin inside a panel.
inline constexpr std::int64_t kWidestPanel = 32;

struct CUBIST_EXPORT ChipSpec {
  std::string name;
  // What was set of a table's constants, "clock_hz=1800000000,cube_cores=8": with the name it says which chip a tiling was
  // tuned for.
  std::string changes = {};
  // A host runs all pipes of a core on one thread, one after the other; an NPU runs them side by side.
  bool pipes_overlap = true;

  int cube_cores = 1;       // AI cores: one Cube core and `vector_per_cube` Vector cores each
  int vector_per_cube = 1;  // kMaxVectorPerCube at most
  int concurrent_cores =
      1;  // AI cores that really run side by side: all of an NPU, the hardware threads of a host
  Constant clock_hz;

  std::array<BufferSpec, kBufferCount> buffers{};

  // Cube: a Mmad of (m, k, n) takes head + ceil(m / m_step) * ceil(k / k_step) * ceil(n / n_step) * passes
  // cycles, with k_step = k_bytes / operand element size. The next one begins after the busy head, flags and
  // barriers wait for the idle one.
  struct Mmad {
    std::int64_t m_step = 16, n_step = 16;
    // Where 16-bit operands have tile registers of their own (AMX): rows of a step of them, else 0. Such a Mmad keeps its
    // rows of A near and lets panels of B pass.
    std::int64_t narrow_m_step = 0;
    std::int64_t k_bytes = 32;
    Constant fp32_passes;  // cycles per step for 32-bit operands,
    Constant narrow_passes{1, "cycles", Basis::kDocumented, 0,
                           "a step is what the unit does in one cycle"};  // 16-bit
    Constant head_idle, head_busy;  // cycles: until the result is complete, until the next Mmad may begin
  } mmad;

  std::array<PathSpec, kPathCount> paths{};

  // Vector: an instruction over r repeats of `repeat_bytes` is complete after head + r * cycles[op]; the next one
  // may begin after max(least, r * cycles[op]).
  struct Vector {
    std::int64_t repeat_bytes = 256;
    Constant head;
    Constant least{1, "cycles", Basis::kGuessed, 1, "an instruction per cycle"};
    std::array<Constant, kVectorOpCount> cycles{};
  } vector;

  struct Scalar {
    Constant issue;  // cycles to issue one instruction to a pipe
    Constant issue_flag{0, "cycles", Basis::kDocumented, 0, "none"};  // the same of a flag or a barrier
    int queue_depth = 32;  // instructions that wait in front of a pipe before the scalar unit stands still
    Constant step;         // cycles for a step of a kernel's own loops
    Constant read;         // cycles for a kernel to read one scalar from UB
    Constant read_gm;      // the same from GM, through the scalar unit's cache of 64-byte lines
    Constant
        update;  // cycles for the scalar unit to read, change and write one element of UB (Histogram, Rank)
  } scalar;

  struct Memory {
    std::int64_t l2_bytes = 0, l2_line = 512;
    Constant hbm_bytes_per_s, l2_read_bytes_per_s, l2_write_bytes_per_s;
    Constant cube_read_bytes_per_s;  // what all Cube cores together get from L2
    Constant core_read_bytes_per_cycle, core_write_bytes_per_cycle;  // one core's port to L2
    Constant core_miss_bytes_per_cycle;  // what one core alone gets from HBM; 0: as much as its port takes
    // Lines of L2 that a launch finds there and that have to be written back before it can use them: a share.
    Constant found_dirty{0, "share", Basis::kGuessed, 0, "none"};
    // HBM turns its bus around for what is written back between reads: more of a read's time for each byte, a share.
    Constant turn_around{0, "share", Basis::kGuessed, 0, "none"};
    // Requests of several cores to one line are served one after the other: cycles for each.
    Constant same_line{0, "cycles", Basis::kGuessed, 0, "none"};
  } memory;

  struct Sync {
    Constant flag;  // cycles, SetFlag to WaitFlag between pipes of a core
    Constant execute{0, "cycles", Basis::kDocumented, 0,
                     "none"};  // of a pipe for a SetFlag, WaitFlag or barrier
    Constant cross_core;       // cycles, Cube core to Vector core or back
    Constant barrier_s;        // seconds, all cores (between phases)
    Constant launch_s;         // seconds, start of a kernel
    Constant mixed_launch_s{0, "s", Basis::kDocumented, 0,
                            "none"};  // more, if it takes Cube and Vector cores
    // Seconds from the start of a launch's first core to that of the last, if it takes all of the chip's.
    Constant start_spread_s{0, "s", Basis::kGuessed, 0, "none"};

    // What the placing of flags has to keep to (sync/plan.h). Developer guide: event ids 0 to 7 per ordered
    // pair of pipes, of which the framework reserves 6 and 7; CrossCoreSetFlag ids 0 to 10, counters to 15.
    int event_ids = 6;
    int cross_core_ids = 11, cross_core_limit = 15;
    // Developer guide: a Vector instruction may begin before the last one's result is in UB; PipeBarrier(V)
    // stands between two that touch the same bytes.
    bool vector_needs_barrier = true;
    // asc-devkit, PipeBarrier(ISASI), and its example pipe_barrier for Atlas A2: moves of MTE2 or of MTE3 whose
    // addresses overlap need PipeBarrier of their pipe between them. Of MTE1 and FIX no document says that order in
    // the pipe is enough, and the vendor's compiler (AscendNPU-IR, InjectSync/SyncAnalysis.cpp) has one between
    // dependent instructions of any pipe but S and M.
    bool moves_need_barrier = true;
    // catlass block_mmad: PipeBarrier(M) after a Mmad with (m / 16) * (n / 16) below this, if the next one
    // touches the same accumulator.
    int mmad_barrier_below = 10;
  } sync;

  // Layout of packed operands in GM and of operand tiles: panels of some columns, row by row (see PackedGm).
  struct Packing {
    std::int64_t a_width_bytes = 32;  // columns of a panel times operand element size
    std::int64_t b_width_bytes = 32;
    std::int64_t b_width = 0;  // columns of a panel of B whatever the dtype; 0: by b_width_bytes
    // Rows of A up to this length are read in GM by Mmad itself, without packing; where they share sets of a first-level cache,
    // if at all, of products of at most kFewColumns.
    std::int64_t a_in_place_bytes = 0;
    bool few_columns_in_place = false;
    // Of a host: whether B of few columns is packed for many rows (MostRowsOnce), and whether few columns are multiplied as rows
    // where A is near as well (IsBetterTurned).
    bool packs_few_columns = false, turns_near = false;
    std::int64_t a_line_bytes = 0;  // rows of a panel of A are an odd number of these; 0: as wide as it is
    // Of a host: what it costs to pack all of A, or of a B in rows, before a product, which drives out what is near, in times that
    // its bytes take at the rate of Path::kGmToL1Nd2Nz.
    Constant a_passes{0, "times", Basis::kDocumented, 0, "an NPU's packing is priced by its steps"};
    Constant b_passes = a_passes;
    std::int64_t row_multiple = 16;         // rows of a panel are padded to it
    std::int64_t narrow_element_bytes = 2;  // bytes that a 16-bit element takes in an operand tile
    bool native_bf16 = true;                // bf16 stays 16 bits; else it is widened like fp16
  } packing;

  const BufferSpec& buffer(Buffer b) const { return buffers[static_cast<std::size_t>(b)]; }
  const PathSpec& path(Path p) const { return paths[static_cast<std::size_t>(p)]; }
  const Constant& vector_cycles(VectorOp op) const { return vector.cycles[static_cast<std::size_t>(op)]; }

  // Bytes of one element in an operand tile (role A or B).
  std::int64_t OperandBytes(DType dtype) const {
    if (dtype == DType::kF32) return 4;
    return dtype == DType::kBF16 && packing.native_bf16 ? 2 : packing.narrow_element_bytes;
  }
  // Whether an operand that a caller packs once keeps its 16-bit elements where Mmads take them as floats: few rows wait for its
  // bytes alone, and for many it is widened block by block.
  bool KeepsNarrow(Role role, DType dtype) const {
    return role == Role::kB && OperandBytes(dtype) > SizeOf(dtype);
  }
  bool InTileRegisters(DType dtype) const { return mmad.narrow_m_step > 0 && OperandBytes(dtype) == 2; }
  // Rows of a step of a Mmad of such operands.
  std::int64_t RowStep(DType dtype) const {
    return InTileRegisters(dtype) ? mmad.narrow_m_step : mmad.m_step;
  }
  // k of a step of one: cuts elsewhere would split a word, or change bits.
  std::int64_t KStep(DType dtype) const {
    return std::max(mmad.k_bytes / OperandBytes(dtype), packing.row_multiple);
  }
  // Columns of a panel of a packed operand.
  std::int64_t PackedStep(Role role, DType dtype) const {
    if (role == Role::kB && packing.b_width > 0) return packing.b_width;
    return (role == Role::kA ? packing.a_width_bytes : packing.b_width_bytes) / OperandBytes(dtype);
  }
  // Columns that parts of a right operand are multiples of: of a Mmad and of a panel.
  std::int64_t ColumnStep(DType dtype) const { return std::max(mmad.n_step, PackedStep(Role::kB, dtype)); }
  // Blocks of a packed right operand begin at multiples of this: on an NPU of whole panels of any host.
  std::int64_t PackedBlockStep(DType dtype) const {
    return pipes_overlap ? std::max(ColumnStep(dtype), kWidestPanel) : ColumnStep(dtype);
  }
  // Elements from row to row of a panel of an operand with so many columns.
  std::int64_t PackedPitch(Role role, DType dtype, std::int64_t cols) const {
    const std::int64_t width = PackedStep(role, dtype), line = packing.a_line_bytes;
    if (role != Role::kA || line == 0) return width;
    const std::int64_t bytes = OperandBytes(dtype);
    return (CeilDiv(std::min(cols, width) * bytes, line) | 1) * line / bytes;
  }
  // Bytes that a slot of (rows, cols) takes in a buffer: whole fractals for the Cube's operands and
  // accumulators, rows of whole 32-byte blocks in UB, rounded up to the buffer's alignment.
  std::int64_t SlotBytes(Buffer b, DType dtype, std::int64_t rows, std::int64_t cols) const;

  // Bytes of a packed (rows, cols) operand.
  std::int64_t PackedBytes(Role role, DType dtype, std::int64_t rows, std::int64_t cols) const {
    return CeilDiv(cols, PackedStep(role, dtype)) * RoundUp(rows, packing.row_multiple) *
           PackedPitch(role, dtype, cols) * OperandBytes(dtype);
  }
};

// "ascend910b1" .. "ascend910b4". An unknown name is an error that lists the known ones.
CUBIST_EXPORT Status FindChip(std::string_view name, ChipSpec* chip);
CUBIST_EXPORT std::vector<std::string> ChipNames();

CUBIST_EXPORT const ChipSpec& Ascend910B1();
CUBIST_EXPORT const ChipSpec& Ascend910B2();
CUBIST_EXPORT const ChipSpec& Ascend910B3();
CUBIST_EXPORT const ChipSpec& Ascend910B4();

// This machine: caches read from the operating system, Cube and panel shapes from
// the SIMD target in use. One table per target, made on first use.
CUBIST_EXPORT const ChipSpec& HostChip();
// The same, as calls see it that may use so many of its cores at most.
CUBIST_EXPORT const ChipSpec& HostChip(int cores);

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_CHIP_H_
