// Tiles and rings: how a kernel names on-chip memory, and views of global memory (GM).
//
// A tile is a handle to a ring slot, not an address: which bytes the slot holds, and in which layout, is known
// to the executor alone. Buffer and element type are part of the tile's type; its shape is a run-time value.
#ifndef CUBIST_NPU_MODEL_TILE_H_
#define CUBIST_NPU_MODEL_TILE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "npu_model/status.h"
#include "npu_model/types.h"

namespace cubist {

// Vector cores of an AI core, at most; a chip has its number (ChipSpec::vector_per_cube).
inline constexpr int kMaxVectorPerCube = 4;

// On-chip buffers. L1, L0A, L0B, L0C and BT (bias table) belong to a Cube core, UB to a Vector core. Hand-over slots
// are a Cube core's too; where the chip has no path from L0C to UB they stand in GM.
enum class Buffer : std::uint8_t { kL1, kL0A, kL0B, kL0C, kBT, kUB, kHandOver };
inline constexpr int kBufferCount = 7;
constexpr const char* NameOf(Buffer buffer) {
  constexpr const char* kNames[] = {"L1", "L0A", "L0B", "L0C", "BT", "UB", "hand-over"};
  return kNames[static_cast<int>(buffer)];
}

// What a ring's tiles are for. The host lays them out by it; the NPU has one layout per buffer and ignores it.
enum class Role : std::uint8_t {
  kRows,   // Read and written row by row.
  kA,      // Left operand of Mmad, (m, k).
  kAOnce,  // The same, of rows that hardly any other tile is loaded from, so that they come from memory: the host leaves them in
           // GM too, but reads them as it loads them.
  kAFew,  // The same, multiplied with few columns, kFewColumns at most: a host may leave it in GM where it copies others.
  kB,     // Right operand of Mmad, (k, n).
  kBOnce,  // The same, read once or multiplied with few rows: the host leaves it in GM, for the Mmad or the packing that reads it.
  kRelay,  // Loaded and read, or stored again: the host shows the source in place, till arithmetic of two tiles, Repair or
  // Scores write all of it. An accumulator is stored or sent right after its last Mmad, a tile that was given for a block
  // of GM (see Ring::Next) right after the one instruction that writes it: the host lets that write to where it goes.
  // Second roles of a ring whose tiles play two (see Ring): the transpose as an operand, (k, m) and (n, k).
  kATransposed,
  kBTransposed,
};

inline constexpr std::int64_t kFewColumns = 128;

// The operand that a role is, transposed or not.
constexpr Role OperandOf(Role role) {
  return role == Role::kATransposed ? Role::kA : role == Role::kBTransposed ? Role::kB : role;
}
constexpr bool IsTransposed(Role role) { return role == Role::kATransposed || role == Role::kBTransposed; }

// Where a tile's elements stand in host memory. Element (i, j) of an A tile or a
// plain tile, with c = first_col + j:
//   data + (c / width) * panel_stride + i * pitch + c % width
// Element (k, n) of a B tile: panel n / width holds `width` columns, k by k (in pairs of k for native bf16).
struct HostLayout {
  std::byte* data = nullptr;
  std::int64_t pitch = 0;         // Elements from row to row; unused for B.
  std::int64_t width = 0;         // Columns of a panel; 0 means that all columns are one panel.
  std::int64_t panel_stride = 0;  // Elements from panel to panel.
  bool row_major = false;  // B in place, not in panels: element (k, n) at k * pitch + n * panel_stride.
  std::int64_t first_col = 0;
  bool narrow = false;  // B in panels whose elements are as GM has them, where operands are wider.
};

// A tensor in global memory as a launch knows it. Kernels cut views out of it and never touch its bytes.
struct GmTensor {
  std::byte* data = nullptr;  // Of the element at index 0; null when a kernel is recorded without data.
  DType dtype = DType::kF32;
  bool writable = false;
  bool input = true;       // Holds values before the launch.
  bool stream = false;     // Written once and too large to stay cached: a hint for the host's stores.
  std::int32_t index = 0;  // Position among the launch's tensors.
  const char* name = "";
  std::uint64_t address = 0;  // Lowest byte in the modelled GM.
  std::int64_t bytes = 0;     // From the lowest to the highest element,
  std::int64_t origin =
      0;  // and from the lowest to the one at index 0, which differ where strides are negative.
  // The last four dimensions, innermost last; missing ones are 1 in front.
  std::array<std::int64_t, 4> sizes{}, strides{};
  // Those in front of the four, where a tensor has more.
  std::array<std::int64_t, 2> outer_sizes{1, 1}, outer_strides{};

  // Of the last two dimensions.
  std::int64_t matrices() const { return outer_sizes[0] * outer_sizes[1] * sizes[0] * sizes[1]; }
};

// A place in the dimensions in front of a tensor's last two, or their sizes.
using BatchIndex = std::array<std::int64_t, 4>;

inline BatchIndex BatchOf(const GmTensor& t) {
  return {t.outer_sizes[0], t.outer_sizes[1], t.sizes[0], t.sizes[1]};
}
// The i-th of so many, in row-major order.
inline BatchIndex PlaceIn(const BatchIndex& sizes, std::int64_t i) {
  BatchIndex at{};
  for (std::size_t d = at.size(); i > 0 && d-- > 0; i /= sizes[d]) at[d] = i % sizes[d];
  return at;
}

// A matrix view of global memory: element (i, j) stands at offset + i * row_stride + j * col_stride elements.
struct Gm {
  const GmTensor* tensor = nullptr;
  std::int64_t offset = 0;
  std::int64_t rows = 0, cols = 0;
  std::int64_t row_stride = 0, col_stride = 1;

  DType dtype() const { return tensor->dtype; }
  std::byte* data() const {
    return tensor->data == nullptr ? nullptr : tensor->data + offset * SizeOf(tensor->dtype);
  }
  Gm Block(Range r, Range c) const {
    CUBIST_DCHECK(r.begin >= 0 && r.end <= rows && c.begin >= 0 && c.end <= cols, "block outside its view");
    return {tensor,    offset + r.begin * row_stride + c.begin * col_stride, r.size(), c.size(), row_stride,
            col_stride};
  }
  Gm Rows(Range r) const { return Block(r, {0, cols}); }
  Gm Cols(Range c) const { return Block({0, rows}, c); }
  Gm Transposed() const { return {tensor, offset, cols, rows, col_stride, row_stride}; }
};

// The matrix of the last two dimensions at index (i, j) of the first two.
inline Gm MatrixOf(const GmTensor& t, std::int64_t i = 0, std::int64_t j = 0) {
  return {&t, i * t.strides[0] + j * t.strides[1], t.sizes[2], t.sizes[3], t.strides[2], t.strides[3]};
}
// The one that serves this place of a batch, of which the tensor has the sizes, or 1.
inline Gm MatrixOf(const GmTensor& t, const BatchIndex& at) {
  const auto step = [](std::int64_t size, std::int64_t stride, std::int64_t i) {
    return size == 1 ? 0 : i * stride;
  };
  Gm matrix = MatrixOf(t);
  matrix.offset = step(t.outer_sizes[0], t.outer_strides[0], at[0]) +
                  step(t.outer_sizes[1], t.outer_strides[1], at[1]) + step(t.sizes[0], t.strides[0], at[2]) +
                  step(t.sizes[1], t.strides[1], at[3]);
  return matrix;
}

// One stage of a ring: a fixed piece of one buffer.
struct Slot {
  // What the kernel asked for.
  Buffer buffer = Buffer::kL1;
  Role role = Role::kRows;
  DType dtype = DType::kF32;
  std::int64_t rows = 0;  // Capacity.
  std::int64_t cols = 0;
  const char* owner = "";  // The ring's name, for reports.

  // Where the chip has it.
  std::int32_t id = 0;       // Unique within an AI core, or within a Vector core of a Vector-only launch.
  std::int32_t lane = -1;    // Vector core of the AI core (UB), -1 for the Cube core's buffers.
  std::int64_t address = 0;  // First byte in its buffer.
  std::int64_t bytes = 0;
  std::uint32_t generation = 0;               // Counts how often the ring handed it out,
  std::int64_t tile_rows = 0, tile_cols = 0;  // and with which shape last.
  Gm destination;                             // Of a relay tile that goes to GM; no tensor otherwise.

  // Where the host has it: its own storage, and what it shows at present (its
  // storage or a view of something else).
  Slot* second = nullptr;  // The same elements in the layout of the second role, where there is one.
  std::byte* storage = nullptr;
  std::int64_t storage_bytes = 0;
  HostLayout shows;
};

// Part of a slot: the rows and columns that a kernel handed to an instruction. The slot is larger at the edges. Buffer and dtype
// are the slot's.
struct TileRef {
  Slot* slot = nullptr;
  Range row_part, col_part;

  std::int64_t rows() const { return row_part.size(); }
  std::int64_t cols() const { return col_part.size(); }
  bool given() const { return slot != nullptr; }
  DType dtype() const { return slot->dtype; }
  TileRef Rows(Range r) const { return {slot, {row_part.begin + r.begin, row_part.begin + r.end}, col_part}; }
  TileRef Cols(Range c) const { return {slot, row_part, {col_part.begin + c.begin, col_part.begin + c.end}}; }
  TileRef Row(std::int64_t i) const { return {slot, {row_part.begin + i, row_part.begin + i + 1}, col_part}; }
};

// The same with its type known, until the ring hands out its slot again.
template <Buffer kBuffer, class T>
struct Tile {
  TileRef ref;
  std::uint32_t generation = 0;

  std::int64_t rows() const { return ref.rows(); }
  std::int64_t cols() const { return ref.cols(); }
  bool given() const { return ref.given(); }
  Slot* slot() const { return ref.slot; }
  // What an instruction takes, by reference: a copy of what was put together just before waits for its stores.
  operator const TileRef&() const {  // NOLINT: a tile is a TileRef with its type known.
    CUBIST_CHECK_OF(ref.slot->owner, generation == ref.slot->generation,
                    "tile used after its slot was reused");
    return ref;
  }
  Tile Part(Range r, Range c) const {
    CUBIST_DCHECK(r.begin >= 0 && r.end <= rows() && c.begin >= 0 && c.end <= cols(),
                  "part outside its tile");
    const auto from = [](const Range& part, const Range& some) {
      return Range{part.begin + some.begin, part.begin + some.end};
    };
    return {{ref.slot, from(ref.row_part, r), from(ref.col_part, c)}, generation};
  }
  Tile Rows(Range r) const { return Part(r, {0, cols()}); }
  Tile Cols(Range c) const { return Part({0, rows()}, c); }
};

template <class T>
using L1Tile = Tile<Buffer::kL1, T>;
template <class T>
using L0ATile = Tile<Buffer::kL0A, T>;
template <class T>
using L0BTile = Tile<Buffer::kL0B, T>;
template <class T>
using L0CTile = Tile<Buffer::kL0C, T>;
template <class T>
using BtTile = Tile<Buffer::kBT, T>;
template <class T>
using UbTile = Tile<Buffer::kUB, T>;
template <class T>
using HandOverTile = Tile<Buffer::kHandOver, T>;

struct SlotRequest {
  Buffer buffer;
  Role role;
  DType dtype;
  const char* owner;
  std::int64_t rows, cols;
  int stages;
  Role second_role = Role::kRows;  // kRows: the tiles play one role alone.
};

// `stages` slots of one shape, handed out in turn: the only place where a pipeline's depth is said.
// The core that owns the buffer gives the slots and keeps them; they live as long as the kernel runs on it.
// Tiles in L1 may play a second role: an A tile as B (the same matrix on the right) or as the transpose of A, a B tile
// as its transpose on the right. The NPU's load to L0 turns them; the host fills one layout per role.
template <Buffer kBuffer, class T>
class Ring {
 public:
  template <class Core>
  Ring(Core& core, const char* name, std::int64_t rows, std::int64_t cols, int stages,
       Role role = Role::kRows, Role second_role = Role::kRows)
      : slots_(
            core.Allocate(SlotRequest{kBuffer, role, DTypeOf<T>(), name, rows, cols, stages, second_role})),
        stages_(stages) {}

  // The next slot, as a tile of (rows, cols) from its corner. The slot's last content is gone.
  Tile<kBuffer, T> Next(std::int64_t rows, std::int64_t cols) {
    Slot& slot = slots_[at_];
    at_ = at_ + 1 == stages_ ? 0 : at_ + 1;
    CUBIST_CHECK_OF(slot.owner, rows <= slot.rows && cols <= slot.cols, "tile larger than its slot");
    slot.tile_rows = rows, slot.tile_cols = cols;
    slot.destination.tensor = nullptr;
    return {{&slot, {0, rows}, {0, cols}}, ++slot.generation};
  }
  // The same as large as a block of GM, which is where this tile of a relay ring will be stored.
  Tile<kBuffer, T> Next(const Gm& destination) {
    const Tile<kBuffer, T> tile = Next(destination.rows, destination.cols);
    tile.ref.slot->destination = destination;
    return tile;
  }

 private:
  Slot* slots_;
  int stages_;
  int at_ = 0;
};

// A Mmad operand that lies in global memory in the core's own tile layout ("NZ" on the NPU, panels on the
// host): written by Store(PackedGm, L1Tile), read by Load(L1Tile, PackedGm) without any change of layout. A
// kernel cuts blocks out of it; a block begins at a multiple of ChipSpec::PackedBlockStep.
struct PackedGm {
  const GmTensor* tensor = nullptr;
  std::int64_t byte_offset = 0;
  Role role = Role::kB;
  DType dtype = DType::kF32;
  std::int64_t rows = 0, cols = 0;  // The whole packed matrix.
  Range row_part, col_part;         // The block.
  Role second_role = Role::kRows;   // As of a ring: the host's copy in this role stands behind the first,
  std::int64_t second_offset = 0;   // so many bytes on.
  bool narrow = false;              // See ChipSpec::KeepsNarrow: the host's elements are those of `dtype`.

  // The i-th of several matrices of this size, each a row of the tensor.
  PackedGm Matrix(std::int64_t i) const {
    PackedGm matrix = *this;
    matrix.byte_offset += i * tensor->strides[2] * SizeOf(tensor->dtype);
    return matrix;
  }
  PackedGm Block(Range r, Range c) const {
    PackedGm block = *this;
    block.row_part = {row_part.begin + r.begin, row_part.begin + r.end};
    block.col_part = {col_part.begin + c.begin, col_part.begin + c.end};
    return block;
  }
};

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_TILE_H_
