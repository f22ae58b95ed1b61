#include <algorithm>
#include <bit>
#include <string>

#include "npu_model/trace/recording.h"
#include "npu_model/trace/trace_core.h"

namespace cubist::trace {
namespace {

Op OpOf(BinaryOp op) {
  switch (op) {
    case BinaryOp::kAdd:
      return Op::kAdd;
    case BinaryOp::kSub:
      return Op::kSub;
    case BinaryOp::kMul:
      return Op::kMul;
    case BinaryOp::kDiv:
      return Op::kDiv;
    case BinaryOp::kMax:
      break;
  }
  return Op::kMax;
}

}  // namespace

void AddSend(Recorder& to, const Operand& between, const TileRef& src, const Loc& loc) {
  Instr& send = to.Add(Op::kSendL0C, Pipe::kFix, -1, src.dtype(), src.rows(), src.cols(),
                       {to.Reads(src), to.Writes(between)}, loc);
  to.SetAccess(send, to.AccessOf(between, Path::kL0CToGm, /*writes=*/true));
}
void AddReceive(Recorder& to, int lane, const Operand& between, const TileRef& dst, const Loc& loc) {
  Instr& receive = to.Add(Op::kReceiveUb, Pipe::kMte2, lane, dst.dtype(), dst.rows(), dst.cols(),
                          {to.Reads(between), to.Writes(dst)}, loc);
  to.SetAccess(receive, to.AccessOf(between, Path::kGmToUb, /*writes=*/false));
}

void VectorRecorder::LoadUb(const TileRef& dst, const Gm& src, Loc loc) {
  if (Empty(dst)) return;
  Instr& instr = recorder_->Add(Op::kLoadUb, Pipe::kMte2, lane_, src.dtype(), src.rows, src.cols,
                                {recorder_->Writes(dst)}, loc);
  recorder_->SetAccess(instr, AccessOf(src, Path::kGmToUb, /*writes=*/false));
  if (src.dtype() != dst.dtype()) Cast(dst, dst, loc);
}

void VectorRecorder::StoreUb(const Gm& dst, const TileRef& src, Loc loc) {
  if (Empty(src)) return;
  if (src.dtype() != dst.dtype()) Cast(src, src, loc);
  Instr& instr = recorder_->Add(Op::kStoreUb, Pipe::kMte3, lane_, dst.dtype(), dst.rows, dst.cols,
                                {recorder_->Reads(src)}, loc);
  recorder_->SetAccess(instr, AccessOf(dst, Path::kUbToGm, /*writes=*/true));
}

void VectorRecorder::Fill(const TileRef& x, float value, Loc loc) {
  if (!Empty(x)) SetNumber(AddV(Op::kFill, x.dtype(), x, {recorder_->Writes(x)}, loc), value);
}

void VectorRecorder::FillInt(const TileRef& x, std::int32_t value, Loc loc) {
  if (!Empty(x)) AddV(Op::kFill, x.dtype(), x, {recorder_->Writes(x)}, loc).immediate = value;
}

void VectorRecorder::Cast(const TileRef& dst, const TileRef& a, Loc loc) {
  if (Empty(dst)) return;
  // A repeat is 256 bytes of what is read: widening takes half as long as narrowing.
  AddV(Op::kCast, a.dtype(), a, {recorder_->Writes(dst), recorder_->Reads(a)}, loc);
}

void VectorRecorder::Scalar(ScalarOp op, const TileRef& dst, const TileRef& a, float value, Loc loc) {
  if (Empty(dst)) return;
  constexpr Op kOps[] = {Op::kMulScalar, Op::kMaxScalar, Op::kAddScalar};  // By ScalarOp.
  Instr& instr =
      AddV(kOps[static_cast<int>(op)], a.dtype(), a, {recorder_->Writes(dst), recorder_->Reads(a)}, loc);
  SetNumber(instr, value);
}

void VectorRecorder::Binary(BinaryOp op, const TileRef& dst, const TileRef& a, const TileRef& b, Loc loc) {
  if (Empty(dst)) return;
  Instr& instr =
      AddV(OpOf(op), a.dtype(), a, {recorder_->Writes(dst), recorder_->Reads(a), recorder_->Reads(b)}, loc);
  instr.broadcasts = b.cols() == 1 && a.cols() > 1;
}

void VectorRecorder::Unary(UnaryOp op, const TileRef& dst, const TileRef& a, Loc loc) {
  if (Empty(dst)) return;
  constexpr Op kOps[] = {Op::kExp, Op::kLn, Op::kSqrt, Op::kAbs};  // By UnaryOp.
  AddV(kOps[static_cast<int>(op)], a.dtype(), a, {recorder_->Writes(dst), recorder_->Reads(a)}, loc);
}

void VectorRecorder::Reduce(ReduceOp op, const TileRef& dst, const TileRef& a, Loc loc) {
  if (Empty(dst)) return;
  AddV(op == ReduceOp::kMax ? Op::kRowMax : Op::kRowSum, a.dtype(), a,
       {recorder_->Writes(dst), recorder_->Reads(a)}, loc);
}

void VectorRecorder::Transpose(const TileRef& dst, const TileRef& a, Loc loc) {
  if (Empty(a)) return;
  AddV(Op::kTranspose, a.dtype(), a, {recorder_->Writes(dst), recorder_->Reads(a)}, loc);
}

void VectorRecorder::Unzip(const TileRef& dst, const TileRef& a, int first, Loc loc) {
  if (Empty(a)) return;
  // The last element does not matter where first ones are picked.
  const TileRef read = a.Cols({0, a.cols() - 1 + first});
  AddV(Op::kUnzip, a.dtype(), a, {recorder_->Writes(dst), recorder_->Reads(read)}, loc).immediate = first;
}
void VectorRecorder::Zip(const TileRef& dst, const TileRef& a, const TileRef& b, Loc loc) {
  if (Empty(a)) return;
  AddV(Op::kZip, a.dtype(), a, {recorder_->Writes(dst), recorder_->Reads(a), recorder_->Reads(b)}, loc);
}

// A select for each side of the band that cuts the tile.
void VectorRecorder::MaskOutside(const TileRef& x, std::int64_t lowest, std::int64_t highest, float value,
                                 Loc loc) {
  if (Empty(x)) return;
  const auto select = [&](Op op, std::int64_t diagonal) {
    Instr& instr = AddV(op, x.dtype(), x, {recorder_->Writes(x), recorder_->Reads(x)}, loc);
    instr.immediate = static_cast<std::int32_t>(std::clamp(diagonal, -x.rows(), x.cols()));
    SetMaskValue(instr, value);
  };
  if (lowest > 1 - x.rows()) select(Op::kMaskBelow, lowest);
  if (highest < x.cols() - 1) select(Op::kMaskAbove, highest);
}

void VectorRecorder::MaskWhere(const TileRef& x, const TileRef& flags, float value, Loc loc) {
  if (Empty(x)) return;
  Instr& instr = AddV(Op::kMaskWhere, x.dtype(), x,
                      {recorder_->Writes(x), recorder_->Reads(x), recorder_->Reads(flags)}, loc);
  SetNumber(instr, value);
}

void VectorRecorder::Distances(const TileRef& x, std::int64_t first, Loc loc) {
  if (Empty(x)) return;
  SetFirstDistance(AddV(Op::kDistances, x.dtype(), x, {recorder_->Writes(x)}, loc), first);
}

void VectorRecorder::DropFlags(const TileRef& flags, const DropPlace& place, Loc loc) {
  if (Empty(flags)) return;
  recorder_->SetDrop(AddV(Op::kDropFlags, flags.dtype(), flags, {recorder_->Writes(flags)}, loc), place);
}

void VectorRecorder::AddInt(const TileRef& dst, const TileRef& a, const TileRef& b, Loc loc) {
  if (Empty(dst)) return;
  AddV(Op::kAddInt, a.dtype(), a, {recorder_->Writes(dst), recorder_->Reads(a), recorder_->Reads(b)}, loc);
}

void VectorRecorder::ColumnSum(const TileRef& dst, const TileRef& a, Loc loc) {
  if (Empty(dst)) return;
  if (Empty(a)) return FillInt(dst, 0, loc);
  AddV(Op::kColumnSum, a.dtype(), a, {recorder_->Writes(dst), recorder_->Reads(a)}, loc);
}

void VectorRecorder::ExclusiveScan(const TileRef& dst, const TileRef& a, std::int32_t initial, Loc loc) {
  const OperandUse source = Empty(a) ? OperandUse() : recorder_->Reads(a);
  Instr& instr = AddV(Op::kExclusiveScan, dst.dtype(), dst, {recorder_->Writes(dst), source}, loc);
  // Every pass adds what is 1, 2, 4, .. elements to the left.
  instr.dims[2] = static_cast<std::int32_t>(std::bit_width(static_cast<std::uint64_t>(dst.cols())));
  instr.immediate = initial;
}

void VectorRecorder::ReadScalar(const TileRef& a, std::int64_t j, Loc loc) {
  const TileRef element = a.Cols({j, j + 1});
  recorder_->Add(Op::kReadScalar, Pipe::kS, lane_, a.dtype(), 1, 1, {recorder_->Reads(element)}, loc);
}

void VectorRecorder::Spend(std::int64_t steps, Loc loc) { recorder_->Spend(lane_, steps, loc); }

std::int64_t VectorRecorder::ReadInt(const TileRef& a, std::int64_t j, Loc loc) {
  ReadScalar(a, j, loc);
  const HostLayout& shows = a.slot->shows;
  return reinterpret_cast<const std::int32_t*>(
      shows.data)[a.row_part.begin * shows.pitch + a.col_part.begin + j];
}

void VectorRecorder::AddScalarInt(const TileRef& dst, const TileRef& a, std::int32_t value, Loc loc) {
  if (Empty(dst)) return;
  AddV(Op::kAddScalarInt, a.dtype(), a, {recorder_->Writes(dst), recorder_->Reads(a)}, loc).immediate = value;
}

void VectorRecorder::CopyElement(const TileRef& dst, const TileRef& src, Loc loc) {
  recorder_->Add(Op::kCopyElement, Pipe::kS, lane_, src.dtype(), 1, 1,
                 {recorder_->Writes(dst), recorder_->Reads(src)}, loc);
}

void VectorRecorder::AddBins(Op op, const TileRef& ids, const IdBins& bins,
                             std::initializer_list<OperandUse> uses, Loc loc) {
  SetBins(recorder_->Add(op, Pipe::kS, lane_, ids.dtype(), ids.rows(), ids.cols(), uses, loc), bins);
}

void VectorRecorder::Histogram(const TileRef& counts, const TileRef& ids, const IdBins& bins, Loc loc) {
  if (Empty(counts) || Empty(ids)) return;
  AddBins(Op::kHistogram, ids, bins, {recorder_->Writes(counts), recorder_->Reads(ids)}, loc);
}

void VectorRecorder::Rank(const TileRef& ranks, const TileRef& next, const TileRef& ids, const IdBins& bins,
                          Loc loc) {
  if (Empty(ids)) return;
  if (Empty(next)) return FillInt(ranks, -1, loc);
  AddBins(Op::kRank, ids, bins, {recorder_->Writes(ranks), recorder_->Writes(next), recorder_->Reads(ids)},
          loc);
}

void VectorRecorder::RankWithin(const TileRef& ranks, const TileRef& next, const TileRef& limits,
                                const TileRef& ids, const IdBins& bins, Loc loc) {
  if (Empty(ids)) return;
  if (Empty(next)) return FillInt(ranks, -1, loc);
  AddBins(
      Op::kRank, ids, bins,
      {recorder_->Writes(ranks), recorder_->Writes(next), recorder_->Reads(ids), recorder_->Reads(limits)},
      loc);
}

void VectorRecorder::Sort32(const TileRef& keys, const TileRef& values, const TileRef& from,
                            const TileRef& values_from, Loc loc) {
  if (Empty(from)) return;
  AddV(Op::kSort32, from.dtype(), from,
       {recorder_->Writes(keys), recorder_->Reads(from), recorder_->Writes(values),
        recorder_->Reads(values_from)},
       loc);
}

void VectorRecorder::MergeSort(const TileRef& keys, const TileRef& values, const TileRef& from,
                               const TileRef& values_from, std::int64_t run, Loc loc) {
  if (Empty(from)) return;
  AddV(Op::kMergeSort, from.dtype(), from,
       {recorder_->Writes(keys), recorder_->Reads(from), recorder_->Writes(values),
        recorder_->Reads(values_from)},
       loc)
      .dims[2] = static_cast<std::int32_t>(run);
}

void VectorRecorder::RoundUp(const TileRef& dst, const TileRef& a, std::int32_t multiple, Loc loc) {
  if (Empty(a)) return;
  recorder_
      ->Add(Op::kRoundUp, Pipe::kS, lane_, a.dtype(), a.rows(), a.cols(),
            {recorder_->Writes(dst), recorder_->Reads(a)}, loc)
      .immediate = multiple;
}

void VectorRecorder::TrueColumns(const TileRef& dst, const TileRef& flags, Loc loc) {
  if (Empty(dst)) return;
  AddV(Op::kTrueColumns, flags.dtype(), flags, {recorder_->Writes(dst), recorder_->Reads(flags)}, loc);
}

void VectorRecorder::KeepWhere(const TileRef& dst, const TileRef& a, const TileRef& flags, Loc loc) {
  if (Empty(dst)) return;
  AddV(Op::kKeepWhere, a.dtype(), a, {recorder_->Writes(dst), recorder_->Reads(a), recorder_->Reads(flags)},
       loc)
      .broadcasts = flags.cols() == 1 && a.cols() > 1;
}

void VectorRecorder::Lookup(const TileRef& dst, const TileRef& ids, const TileRef& table, std::int32_t first,
                            Loc loc) {
  if (Empty(dst) || Empty(table)) return;
  AddV(Op::kLookup, ids.dtype(), ids,
       {recorder_->Writes(dst), recorder_->Reads(ids), recorder_->Reads(table)}, loc)
      .immediate = first;
}

void VectorRecorder::Receive(const TileRef& dst, const TileRef& src, Loc loc) {
  if (!Empty(dst)) AddReceive(*recorder_, lane_, recorder_->WorkspaceOf(src), dst, loc);
}

void VectorRecorder::SelectLe(const TileRef& dst, const TileRef& key, float limit, const TileRef& a,
                              const TileRef& b, Loc loc) {
  if (Empty(dst)) return;
  Instr& instr =
      AddV(Op::kSelectLe, key.dtype(), key,
           {recorder_->Writes(dst), recorder_->Reads(key), recorder_->Reads(a), recorder_->Reads(b)}, loc);
  SetNumber(instr, limit);
}

void VectorRecorder::TopK(const TileRef& values, const TileRef& ids, const TileRef& a, Loc loc) {
  if (Empty(values)) return;
  AddV(Op::kTopK, a.dtype(), a, {recorder_->Writes(values), recorder_->Writes(ids), recorder_->Reads(a)}, loc)
      .dims[2] = static_cast<std::int32_t>(values.cols());
}

void VectorRecorder::GroupTop(const TileRef& sums, const TileRef& a, std::int64_t count, Loc loc) {
  if (Empty(a)) return;
  AddV(Op::kGroupTop, a.dtype(), a, {recorder_->Writes(sums), recorder_->Reads(a)}, loc).dims[2] =
      static_cast<std::int32_t>(count);
}

void VectorRecorder::KeepGroups(const TileRef& a, const TileRef& ids, std::int64_t group_cols, Loc loc) {
  if (Empty(a)) return;
  AddV(Op::kKeepGroups, a.dtype(), a, {recorder_->Writes(a), recorder_->Reads(a), recorder_->Reads(ids)}, loc)
      .dims[2] = static_cast<std::int32_t>(group_cols);
}

void VectorRecorder::Gather(const TileRef& dst, const TileRef& a, const TileRef& ids, Loc loc) {
  if (Empty(dst)) return;
  AddV(Op::kGather, dst.dtype(), dst, {recorder_->Writes(dst), recorder_->Reads(ids), recorder_->Reads(a)},
       loc);
}

void VectorRecorder::Scatter(const TileRef& dst, const TileRef& ids, const TileRef& values, Loc loc) {
  if (Empty(values)) return;
  recorder_->Add(Op::kScatter, Pipe::kS, lane_, values.dtype(), values.rows(), values.cols(),
                 {recorder_->Writes(dst), recorder_->Reads(ids), recorder_->Reads(values)}, loc);
}

void VectorRecorder::Random(const TileRef& u, Loc loc) {
  if (!Empty(u)) AddV(Op::kRandom, u.dtype(), u, {recorder_->Writes(u)}, loc);
}

void VectorRecorder::DropRoutes(const TileRef& ids, const TileRef& weights, const TileRef& u, float rate,
                                Loc loc) {
  if (Empty(ids)) return;
  Instr& instr = AddV(Op::kDropRoutes, u.dtype(), u,
                      {recorder_->Writes(ids), recorder_->Reads(u), recorder_->Writes(weights)}, loc);
  SetNumber(instr, rate);
}

void VectorRecorder::MapRoutes(const TileRef& out, const TileRef& ids, const TileRef& scores,
                               const TileRef& d_weights, Loc loc) {
  if (Empty(out)) return;
  const OperandUse gradient = d_weights.given() ? recorder_->Reads(d_weights) : OperandUse();
  recorder_->Add(Op::kMapRoutes, Pipe::kS, lane_, out.dtype(), out.rows(), out.cols(),
                 {recorder_->Writes(out), recorder_->Reads(ids), recorder_->Reads(scores), gradient}, loc);
}

void VectorRecorder::MoveToUb(const TileRef& dst, const TileRef& src, Loc loc) {
  if (Empty(dst)) return;
  const Operand between = recorder_->WorkspaceOf(dst);
  AddSend(*recorder_, between, src, loc);
  AddReceive(*recorder_, lane_, between, dst, loc);
}

void VectorRecorder::MoveToL1(const TileRef& dst, const TileRef& src, Loc loc) {
  if (Empty(dst)) return;
  const Operand between = recorder_->WorkspaceOf(dst);
  Instr& send = recorder_->Add(Op::kSendUb, Pipe::kMte3, lane_, src.dtype(), src.rows(), src.cols(),
                               {recorder_->Reads(src), recorder_->Writes(between)}, loc);
  recorder_->SetAccess(send, recorder_->AccessOf(between, Path::kUbToGm, /*writes=*/true));
  Instr& receive = recorder_->Add(Op::kReceiveL1, Pipe::kMte2, -1, dst.dtype(), dst.rows(), dst.cols(),
                                  {recorder_->Reads(between), recorder_->Writes(dst)}, loc);
  recorder_->SetAccess(receive, recorder_->AccessOf(between, Path::kGmToL1Nd2Nz, /*writes=*/false));
}

}  // namespace cubist::trace
