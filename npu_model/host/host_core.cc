#include "npu_model/host/host_core.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "npu_model/host/tile_layout-inl.h"

namespace cubist {

HostContext::HostContext(const ChipSpec& chip, Scratch& scratch, int index, int count)
    : chip(&chip),
      scratch(&scratch),
      host(&HostChip()),
      cube(&BestCubeOps()),
      mmad_bf16(chip.mmad.k_bytes % host->mmad.k_bytes == 0 ? cube->mmad_bf16 : cube->mmad_bf16_any_cut),
      vector(&BestVectorOps()),
      activation(&BestActivationOps()),
      norm(&BestNormOps()),
      movement(&BestMovementOps()),
      attention(&BestAttentionOps()),
      attention_grad(&BestAttentionGradOps()),
      routing(&BestRoutingOps()),
      epilogue(&BestEpilogueOps()),
      arena(chip),
      index(index),
      count(count) {}

Slot* HostContext::Allocate(const SlotRequest& request, int lane, bool with_storage) {
  if (lane >= 0) BreakTape();  // Without tiles no Vector core does anything.
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
    ShowOwn(*this, slot);
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
    const bool turned = IsTransposed(request.second_role);
    CUBIST_CHECK(IsOperand(slot) && request.buffer == Buffer::kL1 &&
                     turned == (IsB(OperandOf(request.second_role)) == IsB(slot.role)),
                 "a second role is the other operand, or the same one's transpose");
    auto* second = new (scratch->Take(static_cast<std::int64_t>(sizeof(Slot)))) Slot(slot);
    second->role = turned ? slot.role : OperandOf(request.second_role);
    if (turned) std::swap(second->rows, second->cols);
    give_storage(*second);
    slot.second = second;
  }
  return slots;
}

void HostContext::RunDeferred() {
  if (deferred.mmad != nullptr) Multiply(std::exchange(deferred.mmad, nullptr), deferred.args);
}

void HostContext::Multiply(CoreTape::Mmad mmad, const MmadArgs& args) {
  if (tape != nullptr) tape->Note(mmad, args);
  mmad(args);
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

void HostContext::Release(const TileRef& tile) {
  Slot& slot = *tile.slot;
  if (!Whole(tile) || slot.storage == nullptr) return;
  const auto found = std::find_if(spare_.rbegin(), spare_.rend(),
                                  [&](const auto& spare) { return spare.first == slot.storage_bytes; });
  if (found == spare_.rend()) return;
  const std::pair idle = *found;
  spare_.erase(std::next(found).base());
  spare_.emplace_back(slot.storage_bytes, std::exchange(slot.storage, idle.second));
  ShowOwn(*this, slot);
}

// ---- Hand-overs ----

namespace {

// dst = src, from slot to slot: its storage where the slots are alike, otherwise a copy.
void HandOn(HostContext& context, const TileRef& dst, const TileRef& src) {
  Slot &to = *dst.slot, &from = *src.slot;
  if (Alike(dst, src)) {
    context.Strip(to);
    to.storage = std::exchange(from.storage, nullptr);
    ShowOwn(context, to);
    return;
  }
  context.Furnish(to);
  ShowOwn(context, to);
  const Rows out = RowsOf(dst), in = RowsOf(src);
  context.vector->copy(out.data, out.pitch * 4, in.data, in.pitch * 4, in.rows, in.cols * 4,
                       /*stream=*/false);
}

}  // namespace

void HostCube::Send(const TileRef& dst, const TileRef& src, Loc) {
  context_->RunDeferred();
  context_->BreakTape();
  HandOn(*context_, dst, src);
}

void HostVector::Receive(const TileRef& dst, const TileRef& src, Loc) { HandOn(*context_, dst, src); }

// A whole tile changes hands by swapping the two slots' storage, so that the giver may be filled again at
// once. Parts, and tiles of unlike slots, are copied.
void HostVector::MoveToUb(const TileRef& dst, const TileRef& src, Loc) {
  context_->RunDeferred();
  Slot &to = *dst.slot, &from = *src.slot;
  ShowOwn(*context_, to);
  if (Alike(dst, src)) {
    std::swap(to.storage, from.storage);
    std::swap(to.shows.data, from.shows.data);
    return;
  }
  const Rows out = RowsOf(dst), in = RowsOf(src);
  context_->vector->copy(out.data, out.pitch * 4, in.data, in.pitch * 4, in.rows, in.cols * 4,
                         /*stream=*/false);
}

void HostVector::MoveToL1(const TileRef& dst, const TileRef& src, Loc) {
  Slot &to = *dst.slot, &from = *src.slot;
  CUBIST_CHECK(from.role != Role::kRelay, "a relay tile may show GM, and is not handed over");
  ShowOwn(*context_, to);
  const std::int64_t bytes = context_->host->OperandBytes(to.dtype);
  if (to.second != nullptr) {
    const TileRef second = SecondOf(dst);
    const Rows in = RowsOf(src);
    const bool turned = to.second->role == to.role;
    ShowOwn(*context_, *to.second);
    CUBIST_CHECK(to.second->role == Role::kA && turned, "a hand-over fills A tiles and their transposes");
    context_->cube->pack_a(to.dtype, in.cols, in.rows, {in.data, 1, in.pitch}, At(second, bytes),
                           to.second->shows.pitch);
  }
  if (bytes == SizeOf(from.dtype) && Alike(dst, src)) {
    std::swap(to.storage, from.storage);
    std::swap(to.shows.data, from.shows.data);
    return;
  }
  const Rows in = RowsOf(src);
  context_->cube->pack_a(to.dtype, in.rows, in.cols, {in.data, in.pitch, 1}, At(dst, bytes), to.shows.pitch);
}

}  // namespace cubist
