#include "npu_model/host/tape.h"

#include <algorithm>

#include "npu_model/host/tile_layout-inl.h"

namespace cubist {

void CoreTape::Begin(const ProductData& data, const Scratch& scratch) {
  data_ = data, scratch_ = &scratch;
  steps_.clear();
  whole_ = true, ended_ = false;
}

CoreTape::Place CoreTape::PlaceOf(const void* pointer, const void* operand) const {
  if (pointer == nullptr) return {};
  if (const std::int64_t offset = scratch_->OffsetOf(pointer); offset >= 0) return {true, offset};
  return {false, static_cast<const std::byte*>(pointer) - static_cast<const std::byte*>(operand)};
}

CoreTape::Step* CoreTape::Next() {
  whole_ = whole_ && steps_.size() < kMostSteps;
  return whole_ ? &steps_.emplace_back() : nullptr;
}

void CoreTape::Note(Mmad mmad, const MmadArgs& args) {
  Step* const step = Next();
  if (step == nullptr) return;
  if (args.bias != nullptr) return Break();
  step->mmad = mmad, step->args = args;
  step->a = PlaceOf(args.a, data_.a), step->c = PlaceOf(args.c, data_.c);
  step->b = PlaceOf(args.b != nullptr ? args.b : args.b_source.data, data_.b);
  step->sums = PlaceOf(args.sums, data_.c);
}

void CoreTape::NotePack(bool of_b, Pack pack, DType dtype, std::int64_t rows, std::int64_t cols,
                        const StridedSource& source, const void* dst, std::int64_t pitch) {
  Step* const step = Next();
  if (step == nullptr) return;
  step->pack = pack, step->packs_b = of_b, step->dtype = dtype;
  step->rows = rows, step->cols = cols, step->pitch = pitch;
  step->args.b_source = source;
  step->b = PlaceOf(source.data, of_b ? data_.b : data_.a), step->c = PlaceOf(dst, data_.c);
}

void CoreTape::NoteStore(const VectorOps& ops, const Gm& dst, const Rows& sums) {
  Step* const step = Next();
  if (step == nullptr) return;
  step->store = &ops, step->dtype = dst.dtype();
  step->rows = sums.rows, step->cols = sums.cols, step->args.c_pitch = sums.pitch;
  step->pitch = dst.row_stride, step->col_stride = dst.col_stride;
  step->sums = PlaceOf(sums.data, data_.c), step->c = PlaceOf(dst.data(), data_.c);
}

// Memory that was added meanwhile stands elsewhere.
void CoreTape::End() {
  scratch_bytes_ = scratch_->used();
  whole_ = whole_ && scratch_->in_one_piece();
  scratch_ = nullptr;
  ended_ = true;
}

void CoreTape::Run(const ProductData& data, Scratch& scratch) const {
  scratch.Reset();
  std::byte* const room = scratch.Take(scratch_bytes_);
  const auto at = [&](const Place& place, const void* operand) {
    return (place.in_scratch ? room : static_cast<const std::byte*>(operand)) + place.offset;
  };
  const auto writable = [&](const Place& place) { return const_cast<std::byte*>(at(place, data.c)); };
  for (const Step& step : steps_) {
    if (step.store != nullptr) {
      GmTensor c;
      c.data = writable(step.c), c.dtype = step.dtype;
      const Rows sums{writable(step.sums), step.args.c_pitch, step.rows, step.cols};
      StoreRows(*step.store, {&c, 0, step.rows, step.cols, step.pitch, step.col_stride}, sums, DType::kF32);
      continue;
    }
    if (step.pack != nullptr) {
      StridedSource source = step.args.b_source;
      source.data = at(step.b, step.packs_b ? data.b : data.a);
      step.pack(step.dtype, step.rows, step.cols, source, writable(step.c), step.pitch);
      continue;
    }
    MmadArgs args = step.args;
    args.a = at(step.a, data.a);
    args.c = reinterpret_cast<float*>(writable(step.c));
    (args.b != nullptr ? args.b : args.b_source.data) = at(step.b, data.b);
    if (args.sums != nullptr) args.sums = reinterpret_cast<const float*>(writable(step.sums));
    step.mmad(args);
  }
}

bool Tape::whole() const {
  return !cores.empty() &&
         std::all_of(cores.begin(), cores.end(), [](const CoreTape& core) { return core.whole(); });
}

}  // namespace cubist
