#include "npu_model/host/host_core.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "npu_model/philox.h"

namespace cubist {
namespace {

// Elements from row to row of a row-major tile: whole pairs of cache lines, and never a multiple of 1 KiB,
// which would put the twelve rows of a register tile into few sets of L1d.
std::int64_t PitchOf(const Slot& slot, std::int64_t element_bytes) {
  if (slot.buffer == Buffer::kUB && slot.cols == 1) return 1;  // A column tile is a vector.
  std::int64_t bytes = RoundUp(slot.cols * element_bytes, 128);
  if (bytes % 1024 == 0) bytes += 64;
  return bytes / element_bytes;
}

bool IsB(Role role) { return role == Role::kB || role == Role::kBOnce; }
bool IsOperand(const Slot& slot) { return slot.role == Role::kA || IsB(slot.role); }

// Bytes of one element as the slot stores it.
std::int64_t ElementBytes(const HostContext& context, const Slot& slot) {
  return IsOperand(slot) ? context.host->OperandBytes(slot.dtype) : SizeOf(slot.dtype);
}

// Where row `row` and column `col` (within the tile) of a row-major slot stands.
std::byte* At(const TileRef& tile, std::int64_t element_bytes) {
  const HostLayout& shows = tile.slot->shows;
  return shows.data + (tile.row_part.begin * shows.pitch + tile.col_part.begin) * element_bytes;
}

Rows RowsOf(const TileRef& tile) {
  return {At(tile, SizeOf(tile.dtype())), tile.slot->shows.pitch, tile.rows(), tile.cols()};
}

// Tiles that are computed on own their bytes; a relay tile may show the caller's.
Rows WritableRowsOf(const TileRef& tile) {
  CUBIST_DCHECK(tile.slot->shows.data == tile.slot->storage, "an instruction writes to a tile that shows GM");
  return RowsOf(tile);
}

std::int32_t* Ints(const TileRef& tile) { return reinterpret_cast<std::int32_t*>(At(tile, 4)); }

// Row `i` of a tile of T.
template <class T>
T* RowAt(const TileRef& tile, std::int64_t i) {
  return reinterpret_cast<T*>(At(tile, static_cast<std::int64_t>(sizeof(T)))) + i * tile.slot->shows.pitch;
}

// The layout of a slot's own storage.
HostLayout OwnLayout(const HostContext& context, const Slot& slot) {
  HostLayout own;
  own.data = slot.storage;
  if (IsB(slot.role)) {
    own.pitch = own.width = context.cube->nr;
    own.panel_stride = RoundUp(slot.rows, context.host->packing.row_multiple) * own.width;
  } else {
    own.pitch = PitchOf(slot, ElementBytes(context, slot));
  }
  return own;
}

// An operand layout that begins at a part's corner.
HostLayout From(HostLayout layout, Role role, std::int64_t element_bytes, Range rows, Range cols) {
  std::int64_t offset = rows.begin * layout.pitch;
  if (layout.row_major) {
    offset += cols.begin * layout.panel_stride;
  } else if (role == Role::kB) {
    CUBIST_CHECK(cols.begin % layout.width == 0 && rows.begin % 2 == 0,
                 "a part of a B tile begins inside a panel");
    offset += cols.begin / layout.width * layout.panel_stride;
  } else {
    layout.first_col += cols.begin;
  }
  layout.data += offset * element_bytes;
  return layout;
}

// The packed block as a layout to read from or write to.
HostLayout LayoutOf(const HostContext& context, const PackedGm& packed) {
  const ChipSpec& host = *context.host;
  HostLayout layout;
  layout.data = packed.tensor->data + packed.byte_offset;
  layout.pitch = layout.width = host.PackedStep(packed.role, packed.dtype);
  layout.panel_stride = RoundUp(packed.rows, host.packing.row_multiple) * layout.width;
  return From(layout, packed.role, host.OperandBytes(packed.dtype), packed.row_part, packed.col_part);
}

// The copy in the second role, as a packed operand of its own.
PackedGm SecondOf(const PackedGm& packed) {
  PackedGm second = packed;
  second.byte_offset += packed.second_offset;
  second.role = OperandOf(packed.second_role), second.second_role = Role::kRows;
  if (IsTransposed(packed.second_role)) {
    std::swap(second.rows, second.cols);
    std::swap(second.row_part, second.col_part);
  }
  return second;
}

// The same part of a tile in its second role, in the orientation of that role.
TileRef SecondOf(const TileRef& tile) {
  const Slot& slot = *tile.slot;
  Slot& second = *slot.second;
  const bool turned = second.role == slot.role;  // A second layout of the same operand is its transpose.
  second.tile_rows = turned ? slot.tile_cols : slot.tile_rows;
  second.tile_cols = turned ? slot.tile_rows : slot.tile_cols;
  return turned ? TileRef(&second, tile.col_part, tile.row_part)
                : TileRef(&second, tile.row_part, tile.col_part);
}

// The tile in the layout of an operand.
TileRef AsOperand(const TileRef& tile, Role role, Transpose transpose) {
  const Slot& slot = *tile.slot;
  if (slot.role == Role::kBOnce && role == Role::kB && transpose == Transpose::kNo) return tile;
  if (slot.role == role && transpose == Transpose::kNo) return tile;
  CUBIST_CHECK(slot.second != nullptr && slot.second->role == role &&
                   (slot.role == role) == (transpose == Transpose::kYes),
               std::string(slot.owner) + ": its tiles do not play this operand");
  return SecondOf(tile);
}

bool Whole(const TileRef& tile) {
  return tile.row_part == Range{0, tile.slot->tile_rows} && tile.col_part == Range{0, tile.slot->tile_cols};
}

// Copies between strided matrices of float types, element by element: for views whose columns are not adjacent.
void CopyStrided(std::byte* dst, DType dst_type, std::int64_t dst_row, std::int64_t dst_col,
                 const std::byte* src, DType src_type, std::int64_t src_row, std::int64_t src_col,
                 std::int64_t rows, std::int64_t cols) {
  const std::int64_t bytes = SizeOf(src_type);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) {
      const std::int64_t from = i * src_row + j * src_col, to = i * dst_row + j * dst_col;
      if (src_type == dst_type) {
        std::memcpy(dst + to * bytes, src + from * bytes, static_cast<std::size_t>(bytes));
      } else {
        StoreFloat(dst, dst_type, to, LoadFloat(src, src_type, from));
      }
    }
  }
}

// GM = a row-major tile, converted where the types differ.
void StoreRows(const VectorOps& ops, const Gm& dst, const Rows& src, DType src_type) {
  const std::int64_t bytes = SizeOf(dst.dtype());
  if (src.rows == 0 || src.cols == 0) return;
  if (dst.col_stride != 1 || src.cols == 1) {
    CopyStrided(dst.data(), dst.dtype(), dst.row_stride, dst.col_stride,
                static_cast<const std::byte*>(src.data), src_type, src.pitch, 1, src.rows, src.cols);
  } else if (src_type == dst.dtype()) {
    ops.copy(dst.data(), dst.row_stride * bytes, src.data, src.pitch * bytes, src.rows, src.cols * bytes,
             dst.tensor->stream);
  } else {
    ops.cast({dst.data(), dst.row_stride, src.rows, src.cols}, dst.dtype(), src, src_type,
             dst.tensor->stream);
  }
}

// GM += a row-major tile, both fp32.
void AddRows(const VectorOps& ops, const Gm& dst, const Rows& src) {
  if (src.rows == 0 || src.cols == 0) return;
  if (dst.col_stride == 1 && src.cols > 1) {
    const Rows sum{dst.data(), dst.row_stride, src.rows, src.cols};
    return ops.binary(BinaryOp::kAdd, sum, sum, src);
  }
  auto* out = reinterpret_cast<float*>(dst.data());
  const auto* in = static_cast<const float*>(src.data);
  for (std::int64_t i = 0; i < src.rows; ++i) {
    for (std::int64_t j = 0; j < src.cols; ++j) {
      out[i * dst.row_stride + j * dst.col_stride] += in[i * src.pitch + j];
    }
  }
}

}  // namespace

HostContext::HostContext(const ChipSpec& chip, Scratch& scratch, int index, int count)
    : chip(&chip),
      scratch(&scratch),
      host(&HostChip()),
      cube(&BestCubeOps()),
      vector(&BestVectorOps()),
      activation(&BestActivationOps()),
      movement(&BestMovementOps()),
      attention(&BestAttentionOps()),
      attention_grad(&BestAttentionGradOps()),
      routing(&BestRoutingOps()),
      epilogue(&BestEpilogueOps()),
      arena(chip),
      index(index),
      count(count) {}

Slot* HostContext::Allocate(const SlotRequest& request, int lane, bool with_storage) {
  auto* slots = reinterpret_cast<Slot*>(
      scratch->Take(static_cast<std::int64_t>(sizeof(Slot)) * static_cast<std::int64_t>(request.stages)));
  for (int stage = 0; stage < request.stages; ++stage) {
    Slot& slot = *new (slots + stage) Slot;
    slot.buffer = request.buffer, slot.role = request.role, slot.dtype = request.dtype;
    slot.owner = request.owner, slot.rows = request.rows, slot.cols = request.cols;
  }
  arena.Place(request, lane, slots);
  // L0A and L0B tiles show parts of L1 tiles.
  if (!with_storage || request.buffer == Buffer::kL0A || request.buffer == Buffer::kL0B) return slots;
  const auto give_storage = [&](Slot& slot) {
    slot.shows = OwnLayout(*this, slot);
    const std::int64_t elements = IsB(slot.role)
                                      ? CeilDiv(slot.cols, slot.shows.width) * slot.shows.panel_stride
                                      : slot.rows * slot.shows.pitch;
    slot.storage_bytes = elements * ElementBytes(*this, slot);
    if (slot.buffer != Buffer::kHandOver) slot.storage = slot.shows.data = scratch->Take(slot.storage_bytes);
  };
  for (int stage = 0; stage < request.stages; ++stage) {
    Slot& slot = slots[stage];
    give_storage(slot);
    if (request.second_role == Role::kRows) continue;
    CUBIST_CHECK(IsOperand(slot) && request.buffer == Buffer::kL1 &&
                     (IsTransposed(request.second_role) == (OperandOf(request.second_role) == slot.role)),
                 "a second role is the other operand, or the same one's transpose");
    auto* second = new (scratch->Take(static_cast<std::int64_t>(sizeof(Slot)))) Slot(slot);
    second->role = OperandOf(request.second_role);
    if (IsTransposed(request.second_role)) std::swap(second->rows, second->cols);
    give_storage(*second);
    slot.second = second;
  }
  return slots;
}

void HostContext::Furnish(Slot& slot) {
  if (slot.storage != nullptr) return;
  const auto found = std::find_if(spare_.rbegin(), spare_.rend(),
                                  [&](const auto& spare) { return spare.first == slot.storage_bytes; });
  if (found == spare_.rend()) {
    slot.storage = scratch->Take(slot.storage_bytes);
  } else {
    slot.storage = found->second;
    spare_.erase(std::next(found).base());
  }
}

void HostContext::Strip(Slot& slot) {
  if (slot.storage != nullptr) spare_.emplace_back(slot.storage_bytes, slot.storage);
  slot.storage = nullptr;
}

// ---- Cube ----

namespace {

// Whether a Mmad may read its A operand where it lies in GM. Long rows cost it more
// than the copy (TLB, cache sets), and native bf16 reads k in pairs.
bool ReadableInPlace(const HostContext& context, const TileRef& dst, const Gm& src) {
  const std::int64_t bytes = SizeOf(src.dtype());
  const bool narrow = bytes == 2;
  if (src.col_stride != 1 || context.host->OperandBytes(src.dtype()) != bytes || !Whole(dst)) return false;
  if (narrow && src.cols % 2 != 0) return false;
  return src.row_stride * bytes <= context.host->packing.a_in_place_bytes || src.rows <= context.cube->mr;
}

}  // namespace

// Bytes of an element of a B tile: in panels as operands are, in place as GM has it.
std::int64_t HostCube::BytesOfB(const TileRef& b) const {
  return b.slot->shows.row_major ? SizeOf(b.dtype()) : context_->host->OperandBytes(b.dtype());
}

void HostCube::LoadL1(TileRef dst, const Gm& src, Loc) {
  Slot& slot = *dst.slot;
  if (slot.second != nullptr) {
    const TileRef second = SecondOf(dst);
    LoadL1(second, slot.second->role == slot.role ? src.Transposed() : src);
  }
  const StridedSource source{src.data(), src.row_stride, src.col_stride};
  const std::int64_t element_bytes = context_->host->OperandBytes(slot.dtype);
  if (slot.role == Role::kBOnce && (src.col_stride == 1 || src.row_stride == 1) && Whole(dst)) {
    slot.shows = {
        .data = src.data(), .pitch = src.row_stride, .panel_stride = src.col_stride, .row_major = true};
    return;
  }
  if (IsB(slot.role)) {
    slot.shows = OwnLayout(*context_, slot);
    const std::int64_t nr = slot.shows.width;
    CUBIST_CHECK(dst.col_part.begin % nr == 0 && dst.row_part.begin % 2 == 0,
                 "part of a B tile inside a panel");
    const std::int64_t offset = dst.col_part.begin / nr * slot.shows.panel_stride + dst.row_part.begin * nr;
    context_->cube->pack_b(slot.dtype, dst.rows(), dst.cols(), source, slot.storage + offset * element_bytes,
                           slot.shows.panel_stride);
    return;
  }
  CUBIST_CHECK(slot.role == Role::kA, "an L1 tile that is loaded needs the role of an operand");
  if (ReadableInPlace(*context_, dst, src)) {
    slot.shows = {.data = src.data(), .pitch = src.row_stride, .padded = true};
    return;
  }
  slot.shows = OwnLayout(*context_, slot);
  slot.shows.padded = true;
  context_->cube->pack_a(slot.dtype, dst.rows(), dst.cols(), source, At(dst, element_bytes),
                         slot.shows.pitch);
}

void HostCube::LoadL1Packed(TileRef dst, const PackedGm& src, Loc) {
  CUBIST_CHECK(Whole(dst), "a packed operand is shown in place, as a whole tile");
  dst.slot->shows = LayoutOf(*context_, src);
  dst.slot->shows.padded = src.col_part.end == src.cols;
  if (dst.slot->second == nullptr) return;
  CUBIST_CHECK(src.second_role != Role::kRows, "an operand packed for one role, loaded for two");
  LoadL1Packed(SecondOf(dst), SecondOf(src));
}

void HostCube::StorePacked(const PackedGm& dst, TileRef src, Loc) {
  if (dst.second_role != Role::kRows) StorePacked(SecondOf(dst), SecondOf(src));
  const std::int64_t bytes = context_->host->OperandBytes(dst.dtype);
  const HostLayout to = LayoutOf(*context_, dst);
  const HostLayout from = From(src.slot->shows, dst.role, bytes, src.row_part, src.col_part);
  const auto copy = [&](std::byte* out, std::int64_t out_pitch, const std::byte* in, std::int64_t in_pitch,
                        std::int64_t rows, std::int64_t cols) {
    context_->vector->copy(out, out_pitch * bytes, in, in_pitch * bytes, rows, cols * bytes,
                           /*stream=*/false);
  };
  if (dst.role == Role::kB) {
    // Pairs of k are interleaved, so an odd last k travels with its padding.
    const std::int64_t rows = RoundUp(src.rows(), context_->host->packing.row_multiple);
    for (std::int64_t panel = 0; panel < CeilDiv(src.cols(), to.width); ++panel) {
      copy(to.data + panel * to.panel_stride * bytes, rows * to.width,
           from.data + panel * from.panel_stride * bytes, rows * to.width, 1, rows * to.width);
    }
    return;
  }
  CUBIST_CHECK(from.width == 0, "an A tile that shows a packed operand is not packed again");
  const std::int64_t end = to.first_col + src.cols();
  for (std::int64_t col = to.first_col; col < end;) {
    const std::int64_t panel = col / to.width, cols = std::min(end, (panel + 1) * to.width) - col;
    copy(to.data + (panel * to.panel_stride + col % to.width) * bytes, to.pitch,
         from.data + (from.first_col + col - to.first_col) * bytes, from.pitch, src.rows(),
         bytes == 2 ? RoundUp(cols, 2) : cols);
    col += cols;
  }
}

void HostCube::LoadL0A(TileRef dst, TileRef tile, Transpose transpose, Loc) {
  CUBIST_CHECK(Whole(dst), "an L0 tile shows its source, as a whole tile");
  const TileRef src = AsOperand(tile, Role::kA, transpose);
  dst.slot->shows =
      From(src.slot->shows, Role::kA, context_->host->OperandBytes(src.dtype()), src.row_part, src.col_part);
  dst.slot->shows.padded = src.slot->shows.padded && src.col_part.end == src.slot->tile_cols;
}

namespace {

// A part that begins inside a panel is copied, element by element: the chip's fractals are narrower than the host's
// panels, so tilings for an NPU may ask for it when they are computed here.
void CopyPartOfPanels(HostContext& context, const TileRef& dst, const TileRef& src) {
  const std::int64_t bytes = context.host->OperandBytes(src.dtype());
  const std::int64_t run = bytes == 2 ? 2 : 1;  // Pairs of k are interleaved.
  Slot& slot = *dst.slot;
  slot.shows = OwnLayout(context, slot);
  slot.shows.panel_stride = RoundUp(slot.rows, run) * slot.shows.width;
  const std::int64_t size = CeilDiv(slot.cols, slot.shows.width) * slot.shows.panel_stride * bytes;
  if (slot.storage == nullptr) slot.storage = context.scratch->Take(size);
  slot.shows.data = slot.storage;
  std::memset(slot.storage, 0, static_cast<std::size_t>(size));
  const auto at = [&](const HostLayout& layout, std::int64_t p, std::int64_t j) {
    return layout.data + (j / layout.width * layout.panel_stride +
                          (p / run * layout.width + j % layout.width) * run + p % run) *
                             bytes;
  };
  for (std::int64_t p = 0; p < src.rows(); ++p) {
    for (std::int64_t j = 0; j < src.cols(); ++j) {
      std::memcpy(at(slot.shows, p, j), at(src.slot->shows, src.row_part.begin + p, src.col_part.begin + j),
                  static_cast<std::size_t>(bytes));
    }
  }
}

}  // namespace

void HostCube::LoadL0B(TileRef dst, TileRef tile, Transpose transpose, Loc) {
  CUBIST_CHECK(Whole(dst), "an L0 tile shows its source, as a whole tile");
  const TileRef src = AsOperand(tile, Role::kB, transpose);
  const HostLayout& shows = src.slot->shows;
  if (!shows.row_major && src.col_part.begin % shows.width != 0) return CopyPartOfPanels(*context_, dst, src);
  dst.slot->shows = From(shows, Role::kB, BytesOfB(src), src.row_part, src.col_part);
}

void HostCube::LoadBias(TileRef dst, const Gm& row, Loc) {
  CopyStrided(dst.slot->storage + dst.col_part.begin * 4, DType::kF32, 0, 1, row.data(), row.dtype(), 0,
              row.col_stride, 1, row.cols);
}

void HostCube::Mmad(TileRef c, TileRef a, TileRef b, MmadStart start, TileRef bias, Loc) {
  const std::int64_t bytes = context_->host->OperandBytes(a.dtype()), nr = context_->cube->nr;
  const bool pairs = bytes == 2;
  const auto mmad = pairs ? context_->cube->mmad_bf16 : context_->cube->mmad_f32;
  const HostLayout left = From(a.slot->shows, Role::kA, bytes, a.row_part, a.col_part);
  const std::int64_t b_bytes = BytesOfB(b);
  const HostLayout right = From(b.slot->shows, Role::kB, b_bytes, b.row_part, b.col_part);
  CUBIST_CHECK(c.col_part.begin % nr == 0 && (c.cols() % nr == 0 || c.col_part.end == c.slot->tile_cols),
               "a Mmad writes whole panels: part of an accumulator inside one");
  context_->Furnish(*c.slot);
  c.slot->shows = OwnLayout(*context_, *c.slot);
  MmadArgs args;
  args.m = c.rows(), args.n = c.cols();
  args.a_pitch = left.pitch;
  args.b_panel_stride = right.panel_stride;
  args.c = reinterpret_cast<float*>(At(c, 4));
  args.c_pitch = c.slot->shows.pitch;
  args.start = start;
  if (start == MmadStart::kBias) {
    args.bias = reinterpret_cast<const float*>(bias.slot->storage) + bias.col_part.begin;
  }

  // B from its row k on.
  const auto b_from = [&](std::int64_t k) {
    if (right.row_major) {
      args.b_source = {right.data + k * right.pitch * b_bytes, right.pitch, right.panel_stride};
      args.b_type = b.dtype();
    } else {
      args.b = right.data + k * right.width * b_bytes;
    }
  };

  // An odd last k without padding behind it is multiplied apart, from a padded copy of A's last column.
  const bool padded = a.slot->shows.padded && a.col_part.end == a.slot->tile_cols;
  const std::int64_t k = pairs && !padded ? a.cols() / 2 * 2 : a.cols();
  // One call per panel of A. A row-major A is one panel.
  const auto at = [&](std::int64_t col, std::int64_t* panel_end) {
    const std::int64_t width = left.width == 0 ? INT64_MAX : left.width, panel = col / width;
    *panel_end = left.width == 0 ? INT64_MAX : (panel + 1) * width;
    return left.data + (panel * left.panel_stride + col % width) * bytes;
  };
  std::int64_t done = 0, panel_end = 0;
  while (done < k || (done == 0 && a.cols() == 0)) {
    args.a = at(left.first_col + done, &panel_end);
    args.k = std::min(k - done, panel_end - left.first_col - done);
    b_from(done);
    mmad(args);
    args.start = MmadStart::kAdd;
    done += args.k;
    if (k == 0) break;
  }
  if (k == a.cols()) return;
  constexpr std::int64_t kRows = 256;
  std::array<BF16, 2 * kRows> column{};
  const auto* last = reinterpret_cast<const BF16*>(at(left.first_col + k, &panel_end));
  float* const c_data = args.c;
  for (const Range rows : Split(c.rows(), kRows)) {
    for (std::int64_t i = 0; i < rows.size(); ++i) {
      column[static_cast<std::size_t>(2 * i)] = last[(rows.begin + i) * left.pitch];
    }
    args.m = rows.size(), args.k = 1;
    args.a = column.data(), args.a_pitch = 2;
    b_from(k);
    args.c = c_data + rows.begin * args.c_pitch;
    mmad(args);
  }
}

namespace {

// GM = activation(alpha * x + bias + beta * residual), straight into its rows, or through a short row of floats where
// its columns are not adjacent.
void StoreEpilogue(const HostContext& context, const Gm& dst, const EpilogueRows& rows,
                   const EpilogueScalars& e) {
  const EpilogueOps& ops = *context.epilogue;
  if (dst.col_stride == 1) {
    return ops.store({dst.data(), dst.row_stride, dst.rows, dst.cols}, dst.dtype(), rows, e,
                     dst.tensor->stream);
  }
  std::array<float, 256> piece;
  const auto from = [](const Rows& x, std::int64_t i, std::int64_t j) {
    return x.data == nullptr ? Rows() : Rows{static_cast<float*>(x.data) + i * x.pitch + j, x.pitch, 1, 0};
  };
  for (std::int64_t i = 0; i < dst.rows; ++i) {
    for (const Range j : Split(dst.cols, static_cast<std::int64_t>(piece.size()))) {
      const EpilogueRows part{from(rows.x, i, j.begin), rows.bias == nullptr ? nullptr : rows.bias + j.begin,
                              from(rows.residual, i, j.begin)};
      const Rows out{piece.data(), 0, 1, j.size()};
      ops.store(out, DType::kF32, part, e, /*stream=*/false);
      StoreRows(*context.vector, dst.Block({i, i + 1}, j), out, DType::kF32);
    }
  }
}

}  // namespace

void HostCube::StoreL0C(const Gm& dst, TileRef src, const FixOptions& options, Loc) {
  const bool adds = options.accumulate == Accumulate::kYes;
  if (options.scale == 1 && !options.relu) {
    if (adds) return AddRows(*context_->vector, dst, RowsOf(src));
    return StoreRows(*context_->vector, dst, RowsOf(src), DType::kF32);
  }
  if (!adds) {
    const Activation activation = options.relu ? Activation::kRelu : Activation::kNone;
    return StoreEpilogue(*context_, dst, {RowsOf(src), nullptr, {}}, {options.scale, 1, activation});
  }
  // What is added is rounded first.
  const Rows x = RowsOf(src);
  std::array<float, 256> piece;
  for (std::int64_t i = 0; i < x.rows; ++i) {
    for (const Range j : Split(x.cols, static_cast<std::int64_t>(piece.size()))) {
      const Rows part{static_cast<float*>(x.data) + i * x.pitch + j.begin, x.pitch, 1, 0},
          out{piece.data(), 0, 1, j.size()};
      context_->epilogue->store(out, DType::kF32, {part, nullptr, {}},
                                {options.scale, 1, options.relu ? Activation::kRelu : Activation::kNone},
                                /*stream=*/false);
      AddRows(*context_->vector, dst.Block({i, i + 1}, j), out);
    }
  }
}

std::int64_t HostCube::ReadGmInt(const Gm& element, Loc) {
  return LoadInt(element.data(), element.dtype(), 0);
}

// ---- Vector ----

void HostVector::Show(const void* data, std::int64_t bytes) {
  if (shown_count_ == kMostShown) {
    std::move(shown_.begin() + 1, shown_.end(), shown_.begin());
    --shown_count_;
  }
  shown_[shown_count_++] = {data, bytes};
}

void HostVector::Use(const void* data) {
  const auto end = shown_.begin() + static_cast<std::ptrdiff_t>(shown_count_);
  const auto kept = std::remove_if(shown_.begin(), end, [&](const Shown& row) { return row.data == data; });
  shown_count_ = static_cast<std::size_t>(kept - shown_.begin());
}

const void* HostVector::TakeShown(std::int64_t bytes, const void* own) {
  if (shown_count_ == 0) return nullptr;
  const Shown row = shown_[--shown_count_];
  return row.bytes == bytes && row.data != own ? row.data : nullptr;
}

void HostVector::LoadUb(TileRef dst, const Gm& src, Loc) {
  Slot& slot = *dst.slot;
  const std::int64_t bytes = SizeOf(src.dtype());
  if (slot.role == Role::kRelay && src.col_stride == 1 && src.dtype() == slot.dtype && Whole(dst)) {
    slot.shows = {.data = src.data(), .pitch = src.row_stride};
    if (dst.rows() == 1) Show(src.data(), dst.cols() * bytes);
    return;
  }
  slot.shows = OwnLayout(*context_, slot);
  const Rows rows = RowsOf(dst);
  if (rows.rows == 0 || rows.cols == 0) return;
  if (src.col_stride != 1 || rows.cols == 1) {
    CopyStrided(static_cast<std::byte*>(rows.data), slot.dtype, rows.pitch, 1, src.data(), src.dtype(),
                src.row_stride, src.col_stride, rows.rows, rows.cols);
  } else if (src.dtype() == slot.dtype) {
    context_->vector->copy(rows.data, rows.pitch * bytes, src.data(), src.row_stride * bytes, rows.rows,
                           rows.cols * bytes, /*stream=*/false);
  } else {
    context_->vector->cast(rows, slot.dtype, {src.data(), src.row_stride, rows.rows, rows.cols}, src.dtype(),
                           /*stream=*/false);
  }
}

void HostVector::StoreUb(const Gm& dst, TileRef src, Loc) {
  const std::int64_t bytes = src.cols() * SizeOf(src.dtype());
  if (src.slot->role == Role::kRelay && src.rows() == 1 && src.cols() > 1 && dst.tensor->stream &&
      dst.col_stride == 1 && dst.dtype() == src.dtype()) {
    const void* const row = RowsOf(src).data;
    if (const void* next = TakeShown(bytes, row))
      return context_->movement->copy_row(dst.data(), row, bytes, next);
  }
  StoreRows(*context_->vector, dst, RowsOf(src), src.dtype());
}

void HostVector::Fill(TileRef x, float value, Loc) { context_->vector->fill(WritableRowsOf(x), value); }

namespace {

template <class To, class From, class F>
void Transform(const TileRef& dst, const TileRef& a, F f) {
  for (std::int64_t i = 0; i < dst.rows(); ++i) {
    const From* in = RowAt<From>(a, i);
    std::transform(in, in + a.cols(), RowAt<To>(dst, i), f);
  }
}

}  // namespace

void HostVector::Cast(TileRef dst, TileRef a, Loc) {
  switch (a.dtype()) {
    case DType::kI32:
      return Transform<float, std::int32_t>(dst, a, [](std::int32_t v) { return static_cast<float>(v); });
    case DType::kI64:
      return Transform<std::int32_t, std::int64_t>(
          dst, a, [](std::int64_t v) { return static_cast<std::int32_t>(v); });
    case DType::kBool:
      if (dst.dtype() == DType::kI32) {
        return Transform<std::int32_t, std::uint8_t>(dst, a, [](std::uint8_t v) { return v != 0 ? 1 : 0; });
      }
      return Transform<float, std::uint8_t>(dst, a, [](std::uint8_t v) { return v != 0 ? 1.0f : 0.0f; });
    default:
      return context_->vector->cast(WritableRowsOf(dst), dst.dtype(), RowsOf(a), a.dtype(),
                                    /*stream=*/false);
  }
}

void HostVector::Scalar(ScalarOp op, TileRef dst, TileRef a, float value, Loc) {
  context_->vector->scalar(op, WritableRowsOf(dst), RowsOf(a), value);
}
void HostVector::Binary(BinaryOp op, TileRef dst, TileRef a, TileRef b, Loc) {
  Rows second = RowsOf(b);
  if (b.rows() == 1 && a.rows() > 1) second.pitch = 0, second.rows = a.rows();  // One row for all.
  context_->vector->binary(op, WritableRowsOf(dst), RowsOf(a), second);
}
void HostVector::Unary(UnaryOp op, TileRef dst, TileRef a, Loc) {
  context_->vector->unary(op, WritableRowsOf(dst), RowsOf(a));
}
void HostVector::Reduce(ReduceOp op, TileRef dst, TileRef a, Loc) {
  context_->vector->reduce(op, WritableRowsOf(dst), RowsOf(a));
}
// Squares of one cache line's columns: each line of either tile is fetched once.
void HostVector::Transpose(TileRef dst, TileRef a, Loc) {
  constexpr std::int64_t kSquare = 16;
  const Rows to = WritableRowsOf(dst), from = RowsOf(a);
  auto* const out = static_cast<float*>(to.data);
  const auto* const in = static_cast<const float*>(from.data);
  for (const Range i : Split(a.rows(), kSquare)) {
    for (const Range j : Split(a.cols(), kSquare)) {
      for (std::int64_t c = j.begin; c < j.end; ++c) {
        for (std::int64_t r = i.begin; r < i.end; ++r) out[c * to.pitch + r] = in[r * from.pitch + c];
      }
    }
  }
}
void HostVector::MaskOutside(TileRef x, std::int64_t lowest, std::int64_t highest, float value, Loc) {
  context_->attention->mask_outside(WritableRowsOf(x), lowest, highest, value);
}

void HostVector::MaskWhere(TileRef x, TileRef flags, float value, Loc) {
  context_->attention->mask_where(x.dtype(), WritableRowsOf(x), RowsOf(flags), value);
}
void HostVector::Distances(TileRef x, std::int64_t first, Loc) {
  context_->attention->distances(WritableRowsOf(x), first);
}
void HostVector::DropFlags(TileRef flags, const DropoutStream& stream, std::int64_t row, std::int64_t key,
                           bool transposed, Loc) {
  const auto drop = transposed ? context_->attention->drop_flags_transposed : context_->attention->drop_flags;
  drop(WritableRowsOf(flags), stream, row, key);
}
void HostVector::AddAlibi(TileRef s, TileRef, float scale, float slope, std::int64_t first, bool root, Loc) {
  context_->attention->add_alibi(WritableRowsOf(s), scale, slope, first, root);
}

void HostVector::FillInt(TileRef x, std::int32_t value, Loc) {
  for (std::int64_t i = 0; i < x.rows(); ++i) std::fill_n(Ints(x) + i * x.slot->shows.pitch, x.cols(), value);
}

void HostVector::AddInt(TileRef dst, TileRef a, TileRef b, Loc) {
  for (std::int64_t i = 0; i < dst.rows(); ++i) {
    auto* out = Ints(dst) + i * dst.slot->shows.pitch;
    const auto* left = Ints(a) + i * a.slot->shows.pitch;
    const auto* right = Ints(b) + i * b.slot->shows.pitch;
    for (std::int64_t j = 0; j < dst.cols(); ++j) out[j] = left[j] + right[j];
  }
}

void HostVector::ColumnSum(TileRef dst, TileRef a, Loc) {
  std::int32_t* sum = Ints(dst);
  std::fill_n(sum, dst.cols(), 0);
  for (std::int64_t i = 0; i < a.rows(); ++i) {
    const auto* row = Ints(a) + i * a.slot->shows.pitch;
    for (std::int64_t j = 0; j < dst.cols(); ++j) sum[j] += row[j];
  }
}

void HostVector::ExclusiveScan(TileRef dst, TileRef a, std::int32_t initial, Loc) {
  std::int32_t sum = initial;
  for (std::int64_t j = 0; j < a.cols(); ++j) {
    Ints(dst)[j] = sum;
    sum += Ints(a)[j];
  }
  Ints(dst)[a.cols()] = sum;
}

void HostVector::AddScalarInt(TileRef dst, TileRef a, std::int32_t value, Loc) {
  for (std::int64_t i = 0; i < dst.rows(); ++i) {
    auto* out = Ints(dst) + i * dst.slot->shows.pitch;
    const auto* in = Ints(a) + i * a.slot->shows.pitch;
    for (std::int64_t j = 0; j < dst.cols(); ++j) out[j] = in[j] + value;
  }
}

void HostVector::CopyElement(TileRef dst, TileRef src, Loc) { *Ints(dst) = *Ints(src); }
std::int64_t HostVector::ReadInt(TileRef a, std::int64_t j, Loc) { return Ints(a)[j]; }
float HostVector::ReadFloat(TileRef a, std::int64_t j, Loc) {
  return reinterpret_cast<const float*>(At(a, 4))[j];
}

void HostVector::SoftmaxStep(TileRef p, TileRef s, TileRef m_new, TileRef m_old, TileRef l, float scale,
                             Loc) {
  p.slot->shows = OwnLayout(*context_, *p.slot);
  context_->vector->softmax_step(RowsOf(p), p.dtype(), WritableRowsOf(s), RowsOf(m_new), RowsOf(m_old),
                                 RowsOf(l), scale);
}

namespace {

// An operand that may not be given: null data then.
Rows RowsIfGiven(const TileRef& tile) { return tile.given() ? RowsOf(tile) : Rows(); }

}  // namespace

void HostVector::RowDot(TileRef sum, TileRef, TileRef, TileRef a, TileRef b, TileRef weights, Loc) {
  context_->activation->row_dot(WritableRowsOf(sum), a.dtype(), RowsOf(a), RowsOf(b), RowsIfGiven(weights));
}

void HostVector::ScaleRows(TileRef dst, TileRef, TileRef a, TileRef factor, TileRef weights, Loc) {
  context_->activation->scale_rows(dst.dtype(), WritableRowsOf(dst), RowsOf(a), RowsOf(factor),
                                   RowsOf(weights));
}

void HostVector::NormGrad(TileRef dx, TileRef, TileRef, TileRef dy, TileRef x, TileRef weights,
                          TileRef factor, TileRef shift, TileRef more, Loc) {
  context_->activation->norm_grad(dx.dtype(), WritableRowsOf(dx), RowsOf(dy), RowsOf(x), RowsOf(weights),
                                  RowsOf(factor), RowsOf(shift), RowsIfGiven(more));
}

void HostVector::AddColumnDots(TileRef acc, TileRef, TileRef, TileRef a, TileRef b, TileRef factor, Loc) {
  context_->activation->add_column_dots(WritableRowsOf(acc), a.dtype(), RowsOf(a), RowsOf(b), RowsOf(factor));
}

void HostVector::SwiGlu(TileRef out, TileRef, TileRef, TileRef gate, TileRef up, TileRef probs, Loc) {
  context_->activation->swiglu(out.dtype(), WritableRowsOf(out), RowsOf(gate), RowsOf(up),
                               RowsIfGiven(probs));
}

void HostVector::SwiGluGrad(const SwiGluGradTiles& t, Loc) {
  context_->activation->swiglu_grad(
      t.gate.dtype(), {WritableRowsOf(t.d_gate), WritableRowsOf(t.d_up), WritableRowsOf(t.d_probs),
                       RowsOf(t.d_out), RowsOf(t.gate), RowsOf(t.up), RowsOf(t.probs)});
}

void HostVector::AttentionGradStep(TileRef p, TileRef ds, TileRef s, TileRef dp, TileRef lse, TileRef delta,
                                   float scale, Loc) {
  p.slot->shows = OwnLayout(*context_, *p.slot);
  ds.slot->shows = OwnLayout(*context_, *ds.slot);
  context_->attention_grad->step(RowsOf(p), RowsOf(ds), p.dtype(), WritableRowsOf(s), WritableRowsOf(dp),
                                 RowsOf(lse), RowsOf(delta), scale);
}

// ---- Routing

void HostVector::SelectLe(TileRef dst, TileRef key, float limit, TileRef a, TileRef b, Loc) {
  context_->routing->select_le(WritableRowsOf(dst), RowsOf(key), limit, RowsOf(a), RowsOf(b));
}
void HostVector::TopK(TileRef values, TileRef ids, TileRef a, Loc) {
  context_->routing->top_k(WritableRowsOf(values), WritableRowsOf(ids), RowsOf(a));
}
void HostVector::GroupTop(TileRef sums, TileRef a, std::int64_t count, Loc) {
  context_->routing->group_top(WritableRowsOf(sums), RowsOf(a), count);
}
void HostVector::Scores(ScoreFunction function, TileRef n, TileRef, TileRef, Loc) {
  context_->routing->scores(function, WritableRowsOf(n));
}
void HostVector::Repair(TileRef x, TileRef bad, TileRef, TileRef, TileRef, float limit, bool by_mean, Loc) {
  context_->routing->repair(WritableRowsOf(x), WritableRowsOf(bad), limit, by_mean);
}

void HostVector::KeepGroups(TileRef a, TileRef ids, std::int64_t group_cols, Loc) {
  context_->routing->keep_groups(WritableRowsOf(a), RowsOf(ids), group_cols);
}

void HostVector::Gather(TileRef dst, TileRef a, TileRef ids, Loc) {
  for (std::int64_t i = 0; i < dst.rows(); ++i) {
    const auto* at = RowAt<std::int32_t>(ids, i);
    const auto* from = RowAt<float>(a, i);
    float* to = RowAt<float>(dst, i);
    for (std::int64_t j = 0; j < dst.cols(); ++j) to[j] = at[j] < 0 ? 0.0f : from[at[j]];
  }
}

void HostVector::Scatter(TileRef dst, TileRef ids, TileRef values, Loc) {
  for (std::int64_t i = 0; i < ids.rows(); ++i) {
    const auto* at = RowAt<std::int32_t>(ids, i);
    const auto* from = RowAt<float>(values, i);
    for (std::int64_t j = 0; j < ids.cols(); ++j) {
      if (at[j] >= 0) RowAt<float>(dst, i)[at[j]] = from[j];
    }
  }
}

void HostVector::Random(TileRef u, const RandomStream& stream, std::int64_t first, std::int64_t row_step,
                        Loc) {
  for (std::int64_t i = 0; i < u.rows(); ++i) {
    PhiloxBlock block{};
    for (std::int64_t j = 0; j < u.cols(); ++j) {
      const auto element = static_cast<std::uint64_t>(first + i * row_step + j);
      if (j == 0 || element % 4 == 0) block = Philox(stream, element / 4);
      RowAt<float>(u, i)[j] = UniformOf(block[element % 4]);
    }
  }
}

void HostVector::DropRoutes(TileRef ids, TileRef weights, TileRef u, float rate, Loc) {
  for (std::int64_t i = 0; i < ids.rows(); ++i) {
    for (std::int64_t j = 0; j < ids.cols(); ++j) {
      if (RowAt<float>(u, i)[j] < rate) RowAt<std::int32_t>(ids, i)[j] = -1, RowAt<float>(weights, i)[j] = 0;
    }
  }
}

void HostVector::MulAdd(TileRef acc, TileRef factor, TileRef x, Loc) {
  context_->vector->mul_add(WritableRowsOf(acc), RowsOf(factor), RowsOf(x));
}

void HostVector::WeightedSum(TileRef acc, TileRef, std::span<const TileRef> rows,
                             std::span<const float> weights, Accumulate accumulate, Loc) {
  std::array<const void*, HostVectorCore::kMaxSummands> sources;
  std::array<const void*, kMostShown> upcoming;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    sources[i] = RowsOf(rows[i]).data;
    Use(sources[i]);
  }
  for (std::size_t i = 0; i < shown_count_; ++i) upcoming[i] = shown_[i].data;
  context_->vector->weighted_sum(reinterpret_cast<float*>(At(acc, 4)), acc.cols(),
                                 rows.empty() ? DType::kF32 : rows[0].dtype(), sources.data(), weights.data(),
                                 static_cast<std::int64_t>(rows.size()), accumulate == Accumulate::kYes,
                                 upcoming.data(), static_cast<std::int64_t>(shown_count_));
}

namespace {

// visit(id - first, element) for every id in [first, first + bins), row by row.
template <class Visit>
void ForEachBin(const TileRef& ids, std::int32_t first, std::int64_t bins, Visit visit) {
  for (std::int64_t i = 0; i < ids.rows(); ++i) {
    const std::int32_t* row = Ints(ids) + i * ids.slot->shows.pitch;
    for (std::int64_t j = 0; j < ids.cols(); ++j) {
      const std::int64_t bin = std::int64_t{row[j]} - first;
      if (bin >= 0 && bin < bins) visit(bin, i, j);
    }
  }
}

}  // namespace

void HostVector::Histogram(TileRef counts, TileRef ids, std::int32_t first, Loc) {
  std::int32_t* count = Ints(counts);
  ForEachBin(ids, first, counts.cols(), [&](std::int64_t bin, std::int64_t, std::int64_t) { ++count[bin]; });
}

void HostVector::Rank(TileRef ranks, TileRef next, TileRef ids, std::int32_t first, Loc) {
  std::int32_t *at = Ints(next), *rank = Ints(ranks);
  const std::int64_t pitch = ranks.slot->shows.pitch;
  ForEachBin(ids, first, next.cols(),
             [&](std::int64_t bin, std::int64_t i, std::int64_t j) { rank[i * pitch + j] = at[bin]++; });
}

void HostVector::RankWithin(TileRef ranks, TileRef next, TileRef limits, TileRef ids, std::int32_t first,
                            Loc) {
  std::int32_t *at = Ints(next), *rank = Ints(ranks);
  const std::int32_t* limit = Ints(limits);
  const std::int64_t pitch = ranks.slot->shows.pitch;
  ForEachBin(ids, first, next.cols(), [&](std::int64_t bin, std::int64_t i, std::int64_t j) {
    rank[i * pitch + j] = at[bin] < limit[bin] ? at[bin]++ : -1;
  });
}

void HostVector::RoundUp(TileRef dst, TileRef a, std::int32_t multiple, Loc) {
  for (std::int64_t j = 0; j < a.cols(); ++j) {
    Ints(dst)[j] = static_cast<std::int32_t>(cubist::RoundUp(std::int64_t{Ints(a)[j]}, multiple));
  }
}

void HostVector::TrueColumns(TileRef dst, TileRef flags, Loc) {
  for (std::int64_t i = 0; i < dst.rows(); ++i) {
    const std::int32_t* flag = RowAt<std::int32_t>(flags, i);
    std::int32_t* const columns = RowAt<std::int32_t>(dst, i);
    std::int64_t count = 0;
    for (std::int64_t j = 0; j < flags.cols() && count < dst.cols(); ++j) {
      columns[count] = static_cast<std::int32_t>(j);
      count += flag[j] != 0 ? 1 : 0;
    }
    std::fill(columns + count, columns + dst.cols(), -1);
  }
}

void HostVector::KeepWhere(TileRef dst, TileRef a, TileRef flags, Loc) {
  const std::int64_t step = flags.cols() == 1 ? 0 : 1;
  for (std::int64_t i = 0; i < dst.rows(); ++i) {
    const std::int32_t *flag = RowAt<std::int32_t>(flags, i), *from = RowAt<std::int32_t>(a, i);
    std::int32_t* const to = RowAt<std::int32_t>(dst, i);
    for (std::int64_t j = 0; j < dst.cols(); ++j) to[j] = flag[j * step] != 0 ? from[j] : -1;
  }
}

void HostVector::Lookup(TileRef dst, TileRef ids, TileRef table, std::int32_t first, Loc) {
  const std::int32_t* const entries = Ints(table);
  ForEachBin(ids, first, table.cols(), [&](std::int64_t bin, std::int64_t i, std::int64_t j) {
    RowAt<std::int32_t>(dst, i)[j] = entries[bin];
  });
}

void HostVector::StoreScaled(const Gm& dst, TileRef scratch, TileRef x, float weight, Loc loc) {
  if (dst.col_stride != 1) {
    Scalar(ScalarOp::kMul, scratch, x, weight, loc);
    return StoreUb(dst, scratch, loc);
  }
  const std::int64_t bytes = SizeOf(dst.dtype());
  const Rows rows = RowsOf(x);
  const void* const next = TakeShown(rows.cols * bytes, /*own=*/nullptr);
  for (std::int64_t i = 0; i < rows.rows; ++i) {
    context_->movement->scale(dst.data() + i * dst.row_stride * bytes, dst.dtype(),
                              static_cast<const float*>(rows.data) + i * rows.pitch, weight, rows.cols,
                              dst.tensor->stream, next);
  }
}

void HostVector::StoreActivated(const Gm& dst, const EpilogueRefs& t, const EpilogueScalars& e, Loc) {
  const float* bias = t.bias.given() ? static_cast<const float*>(RowsOf(t.bias).data) : nullptr;
  StoreEpilogue(*context_, dst, {RowsOf(t.x), bias, RowsIfGiven(t.residual)}, e);
}

void HostVector::AddDot(TileRef sum, TileRef, TileRef x, TileRef row, Loc) {
  const void* const data = RowsOf(row).data;
  const void* const next = TakeShown(row.cols() * SizeOf(row.dtype()), data);
  *reinterpret_cast<float*>(At(sum, 4)) +=
      context_->movement->dot(reinterpret_cast<const float*>(At(x, 4)), data, row.dtype(), x.cols(), next);
}

namespace {

// visit(place, row, column) for every place in [0, limit).
template <class Visit>
void ForEachPlaceWithin(const TileRef& places, std::int64_t limit, Visit visit) {
  for (std::int64_t i = 0; i < places.rows(); ++i) {
    const std::int32_t* row = Ints(places) + i * places.slot->shows.pitch;
    for (std::int64_t j = 0; j < places.cols(); ++j) {
      if (row[j] >= 0 && row[j] < limit) visit(std::int64_t{row[j]}, i, j);
    }
  }
}

}  // namespace

void HostVector::Gather(TileRef dst, const Gm& column, TileRef places, TileRef, Loc loc) {
  Fill(dst, 0.0f, loc);
  auto* out = reinterpret_cast<float*>(At(dst, 4));
  const std::int64_t pitch = dst.slot->shows.pitch;
  ForEachPlaceWithin(places, column.rows, [&](std::int64_t place, std::int64_t i, std::int64_t j) {
    out[i * pitch + j] = LoadFloat(column.data(), column.dtype(), place * column.row_stride);
  });
}

void HostVector::Scatter(const Gm& column, TileRef places, TileRef src, TileRef, Loc) {
  const std::int64_t pitch = src.slot->shows.pitch;
  if (column.dtype() == DType::kI32) {
    auto* out = reinterpret_cast<std::int32_t*>(column.data());
    ForEachPlaceWithin(places, column.rows, [&](std::int64_t place, std::int64_t i, std::int64_t j) {
      out[place * column.row_stride] = Ints(src)[i * pitch + j];
    });
    return;
  }
  const auto* values = reinterpret_cast<const float*>(At(src, 4));
  ForEachPlaceWithin(places, column.rows, [&](std::int64_t place, std::int64_t i, std::int64_t j) {
    StoreFloat(column.data(), column.dtype(), place * column.row_stride, values[i * pitch + j]);
  });
}

namespace {

// Whether a tile can be handed on by giving its slot's storage away.
bool Alike(const TileRef& dst, const TileRef& src) {
  return Whole(src) && Whole(dst) && dst.slot->storage_bytes == src.slot->storage_bytes &&
         dst.slot->cols == src.slot->cols;
}

// dst = src, from slot to slot: its storage where the slots are alike, otherwise a copy.
void HandOn(HostContext& context, TileRef dst, TileRef src) {
  Slot &to = *dst.slot, &from = *src.slot;
  if (Alike(dst, src)) {
    context.Strip(to);
    to.storage = std::exchange(from.storage, nullptr);
    to.shows = OwnLayout(context, to);
    return;
  }
  context.Furnish(to);
  to.shows = OwnLayout(context, to);
  const Rows out = RowsOf(dst), in = RowsOf(src);
  context.vector->copy(out.data, out.pitch * 4, in.data, in.pitch * 4, in.rows, in.cols * 4,
                       /*stream=*/false);
}

}  // namespace

void HostCube::Send(TileRef dst, TileRef src, Loc) { HandOn(*context_, dst, src); }

void HostVector::Receive(TileRef dst, TileRef src, Loc) { HandOn(*context_, dst, src); }

// A whole tile changes hands by swapping the two slots' storage, so that the giver may be filled again at
// once. Parts, and tiles of unlike slots, are copied.
void HostVector::MoveToUb(TileRef dst, TileRef src, Loc) {
  Slot &to = *dst.slot, &from = *src.slot;
  to.shows = OwnLayout(*context_, to);
  if (Alike(dst, src)) {
    std::swap(to.storage, from.storage);
    std::swap(to.shows.data, from.shows.data);
    return;
  }
  const Rows out = RowsOf(dst), in = RowsOf(src);
  context_->vector->copy(out.data, out.pitch * 4, in.data, in.pitch * 4, in.rows, in.cols * 4,
                         /*stream=*/false);
}

void HostVector::MoveToL1(TileRef dst, TileRef src, Loc) {
  Slot &to = *dst.slot, &from = *src.slot;
  CUBIST_CHECK(from.role != Role::kRelay, "a relay tile may show GM, and is not handed over");
  to.shows = OwnLayout(*context_, to);
  to.shows.padded = true;
  const std::int64_t bytes = context_->host->OperandBytes(to.dtype);
  const bool pairs = bytes == 2 && src.cols() % 2 != 0;
  if (to.second != nullptr) {
    const TileRef second = SecondOf(dst);
    const Rows in = RowsOf(src);
    const bool turned = to.second->role == to.role;
    to.second->shows = OwnLayout(*context_, *to.second);
    to.second->shows.padded = true;
    CUBIST_CHECK(to.second->role == Role::kA && turned, "a hand-over fills A tiles and their transposes");
    context_->cube->pack_a(to.dtype, in.cols, in.rows, {in.data, 1, in.pitch}, At(second, bytes),
                           to.second->shows.pitch);
  }
  if (bytes == SizeOf(from.dtype) && Alike(dst, src)) {
    std::swap(to.storage, from.storage);
    std::swap(to.shows.data, from.shows.data);
    if (pairs) {  // Mmad reads k in pairs: the one after the last must be zero.
      std::byte* end = to.shows.data + src.cols() * bytes;
      for (std::int64_t i = 0; i < src.rows(); ++i) std::memset(end + i * to.shows.pitch * bytes, 0, 2);
    }
    return;
  }
  const Rows in = RowsOf(src);
  context_->cube->pack_a(to.dtype, in.rows, in.cols, {in.data, in.pitch, 1}, At(dst, bytes), to.shows.pitch);
}

}  // namespace cubist
