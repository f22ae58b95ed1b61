#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "npu_model/cache.h"
#include "npu_model/host/cpu.h"
#include "npu_model/host/host_core.h"
#include "npu_model/host/tile_layout-inl.h"

namespace cubist {

namespace {

// Whether a Mmad may read its A operand where it lies in GM. Long rows cost it more than the copy where it takes but a short run of
// each (TLB, cache sets) or they share sets of the first-level cache, and so do rows that begin inside a line where tile
// registers are loaded a line of each at a time. Zen 4, in place beside copied, one thread: 4000x128x1500 fp32 111 GFLOP/s for
// 102, 4096x1536x7168 bf16 227 for 220.
bool ReadableInPlace(const HostContext& context, const TileRef& dst, const Gm& src) {
  const std::int64_t bytes = SizeOf(src.dtype());
  if (src.col_stride != 1 || context.host->OperandBytes(src.dtype()) != bytes || !Whole(dst)) return false;
  constexpr std::int64_t kLine = 64, kLongRun = 2048;
  const bool aligned =
      reinterpret_cast<std::uintptr_t>(src.data()) % kLine == 0 && src.row_stride * bytes % kLine == 0;
  if (bytes == 2 && context.cube->amx && !aligned) return false;
  const std::int64_t apart = std::abs(src.row_stride) * bytes;
  if (apart <= kWayBytes || src.rows <= context.cube->mr) return true;
  // Tile registers, which load a row at a time, copy a strip where that is quicker.
  const bool few = dst.slot->role == Role::kAFew && context.host->packing.few_columns_in_place;
  const bool copies = apart % kWayBytes == 0 && !few && !(bytes == 2 && context.cube->amx);
  return apart <= context.host->packing.a_in_place_bytes && !copies && src.cols * bytes >= kLongRun;
}

// Whether panels of B pass by all of A as a rule: panels of pairs, however small B is; those of floats, twice as large, where a tile
// of few rows would ask L2 for them twice as often.
bool PassesByColumns(const HostContext& context, std::int64_t operand_bytes) {
  constexpr std::int64_t kFewRows = 6;
  return operand_bytes == 2 || context.cube->mr <= kFewRows;
}

// How Mmads whose sums stay in L0C meet panels. By rows, a B that L2 has no room for beside A would come from L3 for each strip:
// 1024 keys of 576 floats take 1.2 times as long so.
MmadWalk WalkOfSums(const HostContext& context, const MmadArgs& args, std::int64_t operand_bytes) {
  const std::int64_t l2 = 2 * context.host->buffer(Buffer::kL0B).fast;
  const bool far = (args.m + args.n) * args.k * operand_bytes > l2;
  return far || PassesByColumns(context, operand_bytes) ? MmadWalk::kColumns : MmadWalk::kRows;
}

// How Mmads that leave their sums to GM do.
MmadWalk WalkOfRelay(const HostContext& context, const MmadArgs& args, std::int64_t operand_bytes) {
  if (HasRoomyL1() && args.m <= kFewStrips * context.cube->mr) return MmadWalk::kPieces;
  const bool far = args.n * args.k * operand_bytes > context.host->buffer(Buffer::kL0B).fast;
  return far ? MmadWalk::kColumns : MmadWalk::kRows;
}

// Reads rows that are shown in place, at the pace of memory. A Mmad that takes them strip by strip asks for the next strip all at
// once, and waits for it where it comes from memory: the first keys that 192 queries of 192 floats meet take .85 of the peak, .96
// with the queries in L2. By columns it has them come one by one.
void BringNear(const HostContext& context, const Gm& src) {
  constexpr std::int64_t kLine = 64;
  const std::int64_t element = SizeOf(src.dtype()), row_bytes = src.cols * element;
  const bool stay = src.rows * row_bytes <= context.host->buffer(Buffer::kL0A).fast;
  if (!stay || PassesByColumns(context, element)) return;
  for (std::int64_t i = 0; i < src.rows; ++i) {
    const std::byte* const row = src.data() + i * src.row_stride * element;
    for (std::int64_t at = 0; at < row_bytes; at += kLine)
      (void)*static_cast<const volatile std::byte*>(row + at);
  }
}

// The first `rows` rows of panels with `cols` columns, each of which is one run of bytes.
void CastPanels(const VectorOps& ops, const HostLayout& to, DType to_type, const HostLayout& from,
                DType from_type, std::int64_t rows, std::int64_t cols, bool stream) {
  const std::int64_t elements = rows * to.width;
  for (std::int64_t i = 0; i < CeilDiv(cols, to.width); ++i) {
    ops.cast({to.data + i * to.panel_stride * SizeOf(to_type), elements, 1, elements}, to_type,
             {from.data + i * from.panel_stride * SizeOf(from_type), elements, 1, elements}, from_type,
             stream);
  }
}

// Whether a tile of B shows elements as GM has them.
bool InPlace(const HostLayout& b) { return b.row_major || b.narrow; }

}  // namespace

// Bytes of an element of a B tile: in panels as operands are, in place as GM has it.
std::int64_t HostCube::BytesOfB(const TileRef& b) const {
  return InPlace(b.slot->shows) ? SizeOf(b.dtype()) : context_->host->OperandBytes(b.dtype());
}

void HostCube::LoadL1(const TileRef& dst, const Gm& src, Loc) {
  context_->RunDeferred();
  Slot& slot = *dst.slot;
  if (slot.second != nullptr) {
    context_->BreakTape();
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
    ShowOwn(*context_, slot);
    const std::int64_t nr = slot.shows.width;
    CUBIST_CHECK(dst.col_part.begin % nr == 0 && dst.row_part.begin % 2 == 0,
                 "part of a B tile inside a panel");
    const std::int64_t offset = dst.col_part.begin / nr * slot.shows.panel_stride + dst.row_part.begin * nr;
    return Pack(context_->cube->pack_b, dst, source, slot.storage + offset * element_bytes,
                slot.shows.panel_stride);
  }
  CUBIST_CHECK(IsA(slot.role), "an L1 tile that is loaded needs the role of an operand");
  if (ReadableInPlace(*context_, dst, src)) {
    slot.shows = {.data = src.data(), .pitch = src.row_stride};
    if (slot.role == Role::kAOnce) BringNear(*context_, src);
    return;
  }
  ShowOwn(*context_, slot);
  Pack(context_->cube->pack_a, dst, source, At(dst, element_bytes), slot.shows.pitch);
}

void HostCube::Pack(CoreTape::Pack pack, const TileRef& dst, const StridedSource& source, std::byte* to,
                    std::int64_t pitch) {
  const bool is_b = IsB(dst.slot->role);
  if (context_->tape != nullptr)
    context_->tape->NotePack(is_b, pack, dst.dtype(), dst.rows(), dst.cols(), source, to, pitch);
  pack(dst.dtype(), dst.rows(), dst.cols(), source, to, pitch);
}

void HostCube::LoadL1Packed(const TileRef& dst, const PackedGm& src, Loc) {
  context_->RunDeferred();
  CUBIST_CHECK(Whole(dst), "a packed operand is shown in place, as a whole tile");
  if (src.narrow && dst.slot->role == Role::kB) return WidenPanels(dst, LayoutOf(*context_, src));
  dst.slot->shows = LayoutOf(*context_, src);
  if (dst.slot->second == nullptr) return;
  CUBIST_CHECK(src.second_role != Role::kRows, "an operand packed for one role, loaded for two");
  LoadL1Packed(SecondOf(dst), SecondOf(src));
}

void HostCube::WidenPanels(const TileRef& dst, const HostLayout& narrow) {
  context_->BreakTape();
  Slot& slot = *dst.slot;
  CUBIST_CHECK(slot.second == nullptr, "an operand packed for one role, loaded for two");
  ShowOwn(*context_, slot);
  CastPanels(*context_->vector, slot.shows, DType::kF32, narrow, slot.dtype, dst.rows(), dst.cols(),
             /*stream=*/false);
}

// Of panels of floats, which hold what 16 bits had.
void HostCube::StoreNarrow(const PackedGm& dst, const TileRef& src) {
  const HostLayout to = LayoutOf(*context_, dst),
                   from = From(src.slot->shows, Role::kB, 4, src.row_part, src.col_part);
  CUBIST_CHECK(!InPlace(from), "a tile that is to be narrowed shows what it was loaded from");
  CastPanels(*context_->vector, to, dst.dtype, from, DType::kF32, src.rows(), src.cols(), dst.tensor->stream);
}

void HostCube::StorePacked(const PackedGm& dst, const TileRef& src, Loc) {
  context_->RunDeferred();
  context_->BreakTape();
  if (dst.narrow) return StoreNarrow(dst, src);
  if (dst.second_role != Role::kRows) StorePacked(SecondOf(dst), SecondOf(src));
  const std::int64_t bytes = context_->host->OperandBytes(dst.dtype);
  const HostLayout to = LayoutOf(*context_, dst);
  if (const HostLayout& shows = src.slot->shows;
      dst.role == Role::kB && shows.row_major) {  // Not packed yet.
    const HostLayout plain = From(shows, Role::kB, SizeOf(src.dtype()), src.row_part, src.col_part);
    const auto pack = dst.tensor->stream ? context_->cube->stream_pack_b : context_->cube->pack_b;
    pack(src.dtype(), src.rows(), src.cols(), {plain.data, plain.pitch, plain.panel_stride}, to.data,
         to.panel_stride);
    return;
  }
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

void HostCube::LoadL0A(const TileRef& dst, const TileRef& tile, Transpose transpose, Loc) {
  context_->RunDeferred();
  CUBIST_CHECK(Whole(dst), "an L0 tile shows its source, as a whole tile");
  const TileRef src = AsOperand(tile, Role::kA, transpose);
  dst.slot->shows =
      From(src.slot->shows, Role::kA, context_->host->OperandBytes(src.dtype()), src.row_part, src.col_part);
}

namespace {

// A part that begins inside a panel is copied, element by element: the chip's fractals are narrower than the host's
// panels, so tilings for an NPU may ask for it when they are computed here.
void CopyPartOfPanels(HostContext& context, const TileRef& dst, const TileRef& src) {
  context.BreakTape();
  const bool narrow = src.slot->shows.narrow;
  const std::int64_t operand_bytes = context.host->OperandBytes(src.dtype()),
                     bytes = narrow ? SizeOf(src.dtype()) : operand_bytes;
  const std::int64_t run = operand_bytes == 2 ? 2 : 1;  // Pairs of k are interleaved.
  Slot& slot = *dst.slot;
  ShowOwn(context, slot);
  slot.shows.narrow = narrow;
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

void HostCube::LoadL0B(const TileRef& dst, const TileRef& tile, Transpose transpose, Loc) {
  context_->RunDeferred();
  CUBIST_CHECK(Whole(dst), "an L0 tile shows its source, as a whole tile");
  const TileRef src = AsOperand(tile, Role::kB, transpose);
  const HostLayout& shows = src.slot->shows;
  if (!shows.row_major && src.col_part.begin % shows.width != 0) return CopyPartOfPanels(*context_, dst, src);
  dst.slot->shows = From(shows, Role::kB, BytesOfB(src), src.row_part, src.col_part);
}

void HostCube::LoadBias(const TileRef& dst, const Gm& row, Loc) {
  context_->RunDeferred();
  context_->BreakTape();
  CopyStrided(dst.slot->storage + dst.col_part.begin * 4, DType::kF32, 0, 1, row.data(), row.dtype(), 0,
              row.col_stride, 1, row.cols);
}

void HostCube::Mmad(const TileRef& c, const TileRef& a, const TileRef& b, MmadStart start,
                    const TileRef& bias, Loc) {
  context_->RunDeferred();
  const std::int64_t bytes = context_->host->OperandBytes(a.dtype()), nr = context_->cube->nr;
  const bool pairs = bytes == 2;
  const auto mmad = pairs ? context_->mmad_bf16 : context_->cube->mmad_f32;
  const HostLayout left = From(a.slot->shows, Role::kA, bytes, a.row_part, a.col_part);
  const std::int64_t b_bytes = BytesOfB(b);
  const HostLayout right = From(b.slot->shows, Role::kB, b_bytes, b.row_part, b.col_part);
  CUBIST_CHECK(c.col_part.begin % nr == 0 && (c.cols() % nr == 0 || c.col_part.end == c.slot->tile_cols),
               "a Mmad writes whole panels: part of an accumulator inside one");
  context_->Furnish(*c.slot);
  ShowOwn(*context_, *c.slot);
  MmadArgs args;
  args.m = c.rows(), args.n = c.cols();
  args.a_pitch = left.pitch;
  args.b_panel_stride = right.row_major ? 0 : right.panel_stride;
  args.c = reinterpret_cast<float*>(At(c, 4));
  args.c_pitch = c.slot->shows.pitch;
  args.start = start;
  args.k = a.cols();
  const bool a_is_near = args.m * args.k * bytes <= context_->host->buffer(Buffer::kL0A).fast;
  if (!InPlace(right) && a_is_near) {
    args.walk = c.slot->role == Role::kRelay ? WalkOfRelay(*context_, args, bytes)
                                             : WalkOfSums(*context_, args, bytes);
  }
  if (start == MmadStart::kBias) {
    args.bias = reinterpret_cast<const float*>(bias.slot->storage) + bias.col_part.begin;
  }

  // B from its row k on.
  const auto b_from = [&](std::int64_t k) {
    if (InPlace(right)) {
      args.b_source = {right.data + k * right.pitch * b_bytes, right.pitch,
                       right.row_major ? right.panel_stride : 1};
      args.b_type = b.dtype();
    } else {
      args.b = right.data + k * right.width * b_bytes;
    }
  };

  // One call per panel of A. A row-major A is one panel.
  const auto at = [&](std::int64_t col, std::int64_t* panel_end) {
    const std::int64_t width = left.width == 0 ? INT64_MAX : left.width, panel = col / width;
    *panel_end = left.width == 0 ? INT64_MAX : (panel + 1) * width;
    return left.data + (panel * left.panel_stride + col % width) * bytes;
  };
  std::int64_t done = 0, panel_end = 0;
  do {
    args.a = at(left.first_col + done, &panel_end);
    args.k = std::min(a.cols() - done, panel_end - left.first_col - done);
    b_from(done);
    done += args.k;
    if (done == a.cols() && c.slot->role == Role::kRelay) {
      context_->deferred = {mmad, args, c};
    } else {
      context_->Multiply(mmad, args);
    }
    args.start = MmadStart::kAdd;
  } while (done < a.cols());
}

namespace {

// Lets the Mmad that waits for it write a tile to GM, where it can.
bool StoreDeferred(HostContext& context, const Gm& dst, const TileRef& src, const FixOptions& options) {
  HostContext::DeferredMmad& deferred = context.deferred;
  const bool plain = options.scale == 1 && !options.relu;
  if (deferred.mmad == nullptr || !plain || dst.col_stride != 1) return false;
  const bool narrows = dst.dtype() != DType::kF32;
  if (narrows && (options.accumulate == Accumulate::kYes || deferred.mmad != context.cube->mmad_bf16 ||
                  context.cube->casts_bf16 == nullptr || !context.cube->casts_bf16(deferred.args)))
    return false;
  if (deferred.c.slot != src.slot || deferred.c.row_part != src.row_part ||
      deferred.c.col_part != src.col_part)
    return false;
  MmadArgs& args = deferred.args;
  args.adds = options.accumulate == Accumulate::kYes;
  if (args.adds && (args.start != MmadStart::kZero || args.b == nullptr)) return args.adds = false;
  if (args.start == MmadStart::kAdd) args.sums = args.c, args.sums_pitch = args.c_pitch;
  args.c = reinterpret_cast<float*>(dst.data()), args.c_pitch = dst.row_stride;
  args.exact = true;
  if (narrows) {
    constexpr std::int64_t kLine = 64;  // A row of a tile is one, which is streamed whole or not at all.
    const bool whole_lines = reinterpret_cast<std::uintptr_t>(dst.data()) % kLine == 0 &&
                             dst.row_stride * SizeOf(dst.dtype()) % kLine == 0;
    args.cast = context.vector->cast, args.c_type = dst.dtype();
    args.stream = dst.tensor->stream && whole_lines;
  }
  context.RunDeferred();
  src.slot->shows.data = nullptr;  // The sums are nowhere else.
  return true;
}

// Whether a store is one that a tape holds: as StoreRows does it.
bool NotesStore(const HostContext& context, const Gm& dst, const FixOptions& options) {
  const bool plain = options.scale == 1 && !options.relu && options.accumulate == Accumulate::kNo;
  return context.tape != nullptr && plain && !dst.tensor->stream;
}

}  // namespace

void HostCube::StoreL0C(const Gm& dst, const TileRef& src, const FixOptions& options, Loc) {
  if (StoreDeferred(*context_, dst, src, options)) return;
  context_->RunDeferred();
  if (NotesStore(*context_, dst, options)) {
    context_->tape->NoteStore(*context_->vector, dst, RowsOf(src));
  } else {
    context_->BreakTape();
  }
  CUBIST_CHECK(src.slot->shows.data != nullptr,
               std::string(src.slot->owner) + ": a relay accumulator stored twice");
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
  context_->BreakTape();
  return LoadInt(element.data(), element.dtype(), 0);
}

}  // namespace cubist
