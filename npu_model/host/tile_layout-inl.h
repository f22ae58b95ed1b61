// How the host keeps tiles: where a slot's rows and operands lie, and copies between tiles and GM. For the .cc files of
// the host executor.
#ifndef CUBIST_NPU_MODEL_HOST_TILE_LAYOUT_INL_H_
#define CUBIST_NPU_MODEL_HOST_TILE_LAYOUT_INL_H_

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "npu_model/host/host_core.h"

namespace cubist {

// Elements from row to row of a row-major tile: whole pairs of cache lines, and never a multiple of 1 KiB,
// which would put the twelve rows of a register tile into few sets of L1d. Short rows of integers, which never change hands
// with a Cube core, follow one another: they are copied and walked as one.
inline std::int64_t PitchOf(const Slot& slot, std::int64_t element_bytes) {
  constexpr std::int64_t kShortRow = 64;
  if (slot.buffer == Buffer::kUB && slot.cols == 1) return 1;  // A column tile is a vector.
  if (slot.buffer == Buffer::kUB && !IsFloat(slot.dtype) && slot.cols * element_bytes <= kShortRow)
    return slot.cols;
  std::int64_t bytes = RoundUp(slot.cols * element_bytes, 128);
  if (bytes % 1024 == 0) bytes += 64;
  return bytes / element_bytes;
}

inline bool IsA(Role role) { return role == Role::kA || role == Role::kAOnce || role == Role::kAFew; }
inline bool IsB(Role role) { return role == Role::kB || role == Role::kBOnce; }
inline bool IsOperand(const Slot& slot) { return IsA(slot.role) || IsB(slot.role); }

// Bytes of one element as the slot stores it.
inline std::int64_t ElementBytes(const HostContext& context, const Slot& slot) {
  return IsOperand(slot) ? context.host->OperandBytes(slot.dtype) : SizeOf(slot.dtype);
}

// Where row `row` and column `col` (within the tile) of a row-major slot stands.
inline std::byte* At(const TileRef& tile, std::int64_t element_bytes) {
  const HostLayout& shows = tile.slot->shows;
  return shows.data + (tile.row_part.begin * shows.pitch + tile.col_part.begin) * element_bytes;
}

inline Rows RowsOf(const TileRef& tile) {
  return {At(tile, SizeOf(tile.dtype())), tile.slot->shows.pitch, tile.rows(), tile.cols()};
}

// Whether a tile shows GM, which nobody may write.
inline bool ShowsGm(const TileRef& tile) { return tile.slot->shows.data != tile.slot->storage; }

// Tiles that are computed on own their bytes; a relay tile may show the caller's.
inline Rows WritableRowsOf(const TileRef& tile) {
  CUBIST_DCHECK(!ShowsGm(tile), "an instruction writes to a tile that shows GM");
  return RowsOf(tile);
}

inline std::int32_t* Ints(const TileRef& tile) { return reinterpret_cast<std::int32_t*>(At(tile, 4)); }

// Row `i` of a tile of T.
template <class T>
T* RowAt(const TileRef& tile, std::int64_t i) {
  return reinterpret_cast<T*>(At(tile, static_cast<std::int64_t>(sizeof(T)))) + i * tile.slot->shows.pitch;
}

// Lets a slot show its own storage. Field by field: a layout built elsewhere would be copied by loads wider than the stores that
// have just made it, which wait for those.
inline void ShowOwn(const HostContext& context, Slot& slot) {
  const bool is_b = IsB(slot.role);
  const std::int64_t nr = context.cube->nr;
  HostLayout& own = slot.shows;
  own.data = slot.storage;
  own.pitch = is_b ? nr : PitchOf(slot, ElementBytes(context, slot));
  own.width = is_b ? nr : 0;
  own.panel_stride = is_b ? RoundUp(slot.rows, context.host->packing.row_multiple) * nr : 0;
  own.first_col = 0;
  own.row_major = own.narrow = false;
}

inline bool Whole(const TileRef& tile) {
  return tile.row_part == Range{0, tile.slot->tile_rows} && tile.col_part == Range{0, tile.slot->tile_cols};
}

// Whether a tile can be handed on by giving its slot's storage away.
inline bool Alike(const TileRef& dst, const TileRef& src) {
  return Whole(src) && Whole(dst) && dst.slot->storage_bytes == src.slot->storage_bytes &&
         dst.slot->cols == src.slot->cols;
}

// Where an instruction writes all of a tile that it may have read: the tile's own bytes, also where it showed GM till now.
inline Rows OwnRowsOf(const HostContext& context, const TileRef& tile) {
  if (ShowsGm(tile)) {
    CUBIST_CHECK(Whole(tile), "an instruction writes to part of a tile that shows GM");
    ShowOwn(context, *tile.slot);
  }
  return RowsOf(tile);
}

// Where an instruction writes a tile of its own: to the block of GM that a relay tile goes to, as far as that is row-major
// and of the tile's type. The Store behind it has nothing to do then.
inline Rows OutputRowsOf(const HostContext& context, const TileRef& tile) {
  Slot& slot = *tile.slot;
  if (slot.role != Role::kRelay) return WritableRowsOf(tile);
  const Gm& to = slot.destination;
  const bool there = to.tensor != nullptr && to.data() != nullptr && to.col_stride == 1 &&
                     to.dtype() == slot.dtype && Whole(tile);
  if (there) {
    slot.shows = {.data = to.data(), .pitch = to.row_stride};
  } else {
    ShowOwn(context, slot);
  }
  Rows rows = RowsOf(tile);
  rows.stream = there && to.tensor->stream;
  return rows;
}

// An operand layout that begins at a part's corner.
inline HostLayout From(HostLayout layout, Role role, std::int64_t element_bytes, Range rows, Range cols) {
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
inline HostLayout LayoutOf(const HostContext& context, const PackedGm& packed) {
  const ChipSpec& host = *context.host;
  HostLayout layout;
  layout.data = packed.tensor->data + packed.byte_offset;
  layout.width = host.PackedStep(packed.role, packed.dtype);
  layout.pitch = host.PackedPitch(packed.role, packed.dtype, packed.cols);
  layout.panel_stride = RoundUp(packed.rows, host.packing.row_multiple) * layout.pitch;
  layout.narrow = packed.narrow;
  const std::int64_t bytes = packed.narrow ? SizeOf(packed.dtype) : host.OperandBytes(packed.dtype);
  return From(layout, packed.role, bytes, packed.row_part, packed.col_part);
}

// The copy in the second role, as a packed operand of its own.
inline PackedGm SecondOf(const PackedGm& packed) {
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
inline TileRef SecondOf(const TileRef& tile) {
  const Slot& slot = *tile.slot;
  Slot& second = *slot.second;
  const bool turned = second.role == slot.role;  // A second layout of the same operand is its transpose.
  second.tile_rows = turned ? slot.tile_cols : slot.tile_rows;
  second.tile_cols = turned ? slot.tile_rows : slot.tile_cols;
  return turned ? TileRef{&second, tile.col_part, tile.row_part}
                : TileRef{&second, tile.row_part, tile.col_part};
}

// The tile in the layout of an operand.
inline TileRef AsOperand(const TileRef& tile, Role role, Transpose transpose) {
  const Slot& slot = *tile.slot;
  const bool plays = role == Role::kA ? IsA(slot.role) : IsB(slot.role);
  if (plays && transpose == Transpose::kNo) return tile;
  CUBIST_CHECK(slot.second != nullptr && slot.second->role == role && plays == (transpose == Transpose::kYes),
               std::string(slot.owner) + ": its tiles do not play this operand");
  return SecondOf(tile);
}

// Copies between strided matrices of float types, element by element: for views whose columns are not adjacent.
inline void CopyStrided(std::byte* dst, DType dst_type, std::int64_t dst_row, std::int64_t dst_col,
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

// Columns of GM, each of which is one run, = a row-major tile, which is turned a block at a time.
inline void StoreColumns(const VectorOps& ops, const Gm& dst, const Rows& src, DType src_type) {
  constexpr std::int64_t kSide = 32;
  const std::int64_t bytes = SizeOf(dst.dtype());
  std::array<std::byte, kSide * kSide * 4> storage;
  for (const Range i : Split(src.rows, kSide)) {
    for (const Range j : Split(src.cols, kSide)) {
      const auto turn = [&]<class T>(T) {
        const T* const from = static_cast<const T*>(src.data) + i.begin * src.pitch + j.begin;
        T* const to = reinterpret_cast<T*>(storage.data());
        for (std::int64_t col = 0; col < j.size(); ++col) {
          for (std::int64_t row = 0; row < i.size(); ++row)
            to[col * kSide + row] = from[row * src.pitch + col];
        }
      };
      SizeOf(src_type) == 4 ? turn(std::uint32_t()) : turn(std::uint16_t());
      const Rows turned{storage.data(), kSide, j.size(), i.size()};
      std::byte* const to = dst.data() + (i.begin + j.begin * dst.col_stride) * bytes;
      if (src_type == dst.dtype())
        ops.copy(to, dst.col_stride * bytes, turned.data, kSide * bytes, turned.rows, turned.cols * bytes,
                 /*stream=*/false);
      else
        ops.cast({to, dst.col_stride, turned.rows, turned.cols}, dst.dtype(), turned, src_type,
                 /*stream=*/false);
    }
  }
}

// GM = a row-major tile, converted where the types differ.
inline void StoreRows(const VectorOps& ops, const Gm& dst, const Rows& src, DType src_type) {
  const std::int64_t bytes = SizeOf(dst.dtype());
  if (src.rows == 0 || src.cols == 0) return;
  const bool in_words = SizeOf(src_type) == 4 || SizeOf(src_type) == 2;
  if (dst.col_stride != 1 && dst.row_stride == 1 && src.rows > 1 && in_words) {
    StoreColumns(ops, dst, src, src_type);
  } else if (dst.col_stride != 1 || src.cols == 1) {
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
inline void AddRows(const VectorOps& ops, const Gm& dst, const Rows& src) {
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

// GM = activation(alpha * x + bias + beta * residual), straight into its rows, or through a short row of floats where
// its columns are not adjacent.
inline void StoreEpilogue(const HostContext& context, const Gm& dst, const EpilogueRows& rows,
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

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_HOST_TILE_LAYOUT_INL_H_
