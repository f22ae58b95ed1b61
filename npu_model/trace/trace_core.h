// The model executor's cores: they record. Each untyped method notes one instruction of core.h (a composite:
// its expansion) and, with data, lets the host executor's body compute it on the same slots.
//
// Without data only control is computed: instructions on int32 and int64 tiles run their bodies, because
// kernels steer by what they read from them. Float tiles then have no storage, and ReadScalar of one gives 1.
#ifndef CUBIST_NPU_MODEL_TRACE_TRACE_CORE_H_
#define CUBIST_NPU_MODEL_TRACE_TRACE_CORE_H_

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "npu_model/core.h"
#include "npu_model/cube_front.h"
#include "npu_model/host/host_core.h"
#include "npu_model/host/scratch.h"
#include "npu_model/trace/record.h"
#include "npu_model/vector_front.h"

namespace cubist {
namespace trace {

// Writes a CoreRecord: interns operands, accesses and source lines.
class CUBIST_EXPORT Recorder {
 public:
  Recorder(const ChipSpec& chip, CoreRecord* out) : line_(chip.memory.l2_line), out_(out) {}

  void AddSlots(const Slot* slots, int stages);
  // The hand-over slot in GM that belongs to a destination slot, as an operand of the same rectangle.
  Operand WorkspaceOf(const TileRef& dst);
  GmAccess AccessOf(const Operand& workspace, Path path, bool writes) const;

  static Operand OperandOf(const TileRef& tile);
  OperandUse Reads(const Operand& operand) { return {Intern(operand), false}; }
  OperandUse Reads(const TileRef& tile) { return Reads(OperandOf(tile)); }
  OperandUse Writes(const Operand& operand) { return {Intern(operand), true}; }
  OperandUse Writes(const TileRef& tile) { return Writes(OperandOf(tile)); }

  Instr& Add(Op op, Pipe pipe, int lane, DType dtype, std::int64_t rows, std::int64_t cols,
             std::initializer_list<OperandUse> uses, const Loc& loc);
  void SetAccess(Instr& instr, const GmAccess& access);
  // S: steps of a kernel's own loops, without operands.
  void Spend(int lane, std::int64_t steps, const Loc& loc);
  void SetDrop(Instr& instr, const DropPlace& place);

 private:
  std::uint32_t Intern(const Operand& operand);
  std::uint32_t InternLine(const Loc& loc);
  void Rehash();

  std::int64_t line_;  // Bytes; hand-over slots stand at whole ones.
  CoreRecord* out_;
  std::vector<std::uint32_t> table_ =
      std::vector<std::uint32_t>(1024, OperandUse::kNone);  // Open addressing.
  std::vector<std::int32_t> workspace_of_;                  // By slot id; -1 for none yet.
  std::array<std::uint32_t, 64> last_lines_{};              // By line number.
};

// What the cores of one recorded AI core share.
struct CUBIST_EXPORT TraceState {
  TraceState(const ChipSpec& chip, Scratch& scratch, int index, int count, bool with_data, CoreRecord* out)
      : context(chip, scratch, index, count), with_data(with_data), recorder(chip, out) {}

  Slot* Allocate(const SlotRequest& request, int lane);
  Slot* BiasStage(const Slot& bt);
  // Calls visit(lane) for the Cube core, -1, and for each Vector core that has buffers: those run the kernel's text as well.
  template <class Visit>
  void ForEachSide(Visit&& visit) const {
    visit(-1);
    for (std::size_t lane = 0; lane < has_buffers.size(); ++lane)
      if (has_buffers[lane]) visit(static_cast<int>(lane));
  }
  // Whether the instruction's result is computed.
  bool Computes(const TileRef& tile) const { return with_data || !IsFloat(tile.dtype()); }

  HostContext context;
  bool with_data;
  Recorder recorder;
  std::vector<Slot*> bias_stages;                     // In L1, by id of the BT slot.
  std::array<bool, kMaxVectorPerCube> has_buffers{};  // by Vector core
};

// GM bytes of a view or of a packed block, in their stored orientation.
GmAccess AccessOf(const Gm& gm, Path path, bool writes);
GmAccess AccessOf(const ChipSpec& chip, const PackedGm& packed, Path path, bool writes);

class CUBIST_EXPORT TraceCube {
 public:
  explicit TraceCube(TraceState& state) : state_(&state), host_(state.context) {}

  Slot* Allocate(const SlotRequest& request) { return state_->Allocate(request, -1); }
  int index() const { return state_->context.index; }
  int count() const { return state_->context.count; }

  void LoadL1(const TileRef& dst, const Gm& src, Loc loc = {});
  void LoadL1Packed(const TileRef& dst, const PackedGm& src, Loc loc = {});
  void StorePacked(const PackedGm& dst, const TileRef& src, Loc loc = {});
  void LoadL0A(const TileRef& dst, const TileRef& src, Transpose transpose, Loc loc = {});
  void LoadL0B(const TileRef& dst, const TileRef& src, Transpose transpose, Loc loc = {});
  void LoadBias(const TileRef& dst, const Gm& row, Loc loc = {});
  void Mmad(const TileRef& c, const TileRef& a, const TileRef& b, MmadStart start, const TileRef& bias,
            Loc loc = {});
  void Send(const TileRef& dst, const TileRef& src, Loc loc = {});
  void StoreL0C(const Gm& dst, const TileRef& src, const FixOptions& options = {}, Loc loc = {});
  std::int64_t ReadGmInt(const Gm& element, Loc loc = {});
  void Spend(std::int64_t steps, Loc loc = {});

 private:
  TraceState* state_;
  HostCube host_;
};

// Records primitive Vector instructions; the expansions of composites.h run on it.
class VectorRecorder {
 public:
  VectorRecorder(Recorder& recorder, int lane) : recorder_(&recorder), lane_(lane) {}

  void LoadUb(const TileRef& dst, const Gm& src, Loc loc);
  void StoreUb(const Gm& dst, const TileRef& src, Loc loc);
  void Fill(const TileRef& x, float value, Loc loc);
  void FillInt(const TileRef& x, std::int32_t value, Loc loc);
  void Cast(const TileRef& dst, const TileRef& a, Loc loc);
  void Scalar(ScalarOp op, const TileRef& dst, const TileRef& a, float value, Loc loc);
  void Binary(BinaryOp op, const TileRef& dst, const TileRef& a, const TileRef& b, Loc loc);
  void Unary(UnaryOp op, const TileRef& dst, const TileRef& a, Loc loc);
  void Reduce(ReduceOp op, const TileRef& dst, const TileRef& a, Loc loc);
  void Transpose(const TileRef& dst, const TileRef& a, Loc loc);
  void Unzip(const TileRef& dst, const TileRef& a, int first, Loc loc);
  void Zip(const TileRef& dst, const TileRef& a, const TileRef& b, Loc loc);
  void MaskOutside(const TileRef& x, std::int64_t lowest, std::int64_t highest, float value, Loc loc);
  void MaskWhere(const TileRef& x, const TileRef& flags, float value, Loc loc);
  void Distances(const TileRef& x, std::int64_t first, Loc loc);
  void DropFlags(const TileRef& flags, const DropPlace& place, Loc loc);
  void AddInt(const TileRef& dst, const TileRef& a, const TileRef& b, Loc loc);
  void ColumnSum(const TileRef& dst, const TileRef& a, Loc loc);
  void ExclusiveScan(const TileRef& dst, const TileRef& a, std::int32_t initial, Loc loc);
  void ReadScalar(const TileRef& a, std::int64_t j, Loc loc);
  void Spend(std::int64_t steps, Loc loc);
  std::int64_t ReadInt(const TileRef& a, std::int64_t j,
                       Loc loc);  // Of what was computed, as expansions steer by it.
  void AddScalarInt(const TileRef& dst, const TileRef& a, std::int32_t value, Loc loc);
  void CopyElement(const TileRef& dst, const TileRef& src, Loc loc);
  void Histogram(const TileRef& counts, const TileRef& ids, const IdBins& bins, Loc loc);
  void Rank(const TileRef& ranks, const TileRef& next, const TileRef& ids, const IdBins& bins, Loc loc);
  void RankWithin(const TileRef& ranks, const TileRef& next, const TileRef& limits, const TileRef& ids,
                  const IdBins& bins, Loc loc);
  void Sort32(const TileRef& keys, const TileRef& values, const TileRef& from, const TileRef& values_from,
              Loc loc);
  void MergeSort(const TileRef& keys, const TileRef& values, const TileRef& from, const TileRef& values_from,
                 std::int64_t run, Loc loc);
  void RoundUp(const TileRef& dst, const TileRef& a, std::int32_t multiple, Loc loc);
  void TrueColumns(const TileRef& dst, const TileRef& flags, Loc loc);
  void KeepWhere(const TileRef& dst, const TileRef& a, const TileRef& flags, Loc loc);
  void Lookup(const TileRef& dst, const TileRef& ids, const TileRef& table, std::int32_t first, Loc loc);
  void Receive(const TileRef& dst, const TileRef& src, Loc loc);
  void SelectLe(const TileRef& dst, const TileRef& key, float limit, const TileRef& a, const TileRef& b,
                Loc loc);
  void TopK(const TileRef& values, const TileRef& ids, const TileRef& a, Loc loc);
  void GroupTop(const TileRef& sums, const TileRef& a, std::int64_t count, Loc loc);
  void KeepGroups(const TileRef& a, const TileRef& ids, std::int64_t group_cols, Loc loc);
  void Gather(const TileRef& dst, const TileRef& a, const TileRef& ids, Loc loc);
  void Scatter(const TileRef& dst, const TileRef& ids, const TileRef& values, Loc loc);
  void Random(const TileRef& u, Loc loc);
  void DropRoutes(const TileRef& ids, const TileRef& weights, const TileRef& u, float rate, Loc loc);
  void MapRoutes(const TileRef& out, const TileRef& ids, const TileRef& scores, const TileRef& d_weights,
                 Loc loc);
  void MoveToUb(const TileRef& dst, const TileRef& src, Loc loc);
  void MoveToL1(const TileRef& dst, const TileRef& src, Loc loc);

 private:
  void AddBins(Op op, const TileRef& ids, const IdBins& bins, std::initializer_list<OperandUse> uses,
               Loc loc);
  Instr& AddV(Op op, DType dtype, const TileRef& work, std::initializer_list<OperandUse> uses,
              const Loc& loc) {
    return recorder_->Add(op, Pipe::kV, lane_, dtype, work.rows(), work.cols(), uses, loc);
  }

  Recorder* recorder_;
  int lane_;
};

class CUBIST_EXPORT TraceVector {
 public:
  TraceVector(TraceState& state, int lane)
      : state_(&state), lane_(lane), host_(state.context, lane), record_(state.recorder, lane) {}

  Slot* Allocate(const SlotRequest& request) { return state_->Allocate(request, lane_); }
  int index() const { return state_->context.index; }
  int count() const { return state_->context.count; }

  void LoadUb(const TileRef& dst, const Gm& src, Loc loc = {});
  void StoreUb(const Gm& dst, const TileRef& src, Loc loc = {});
  void Fill(const TileRef& x, float value, Loc loc = {});
  void Cast(const TileRef& dst, const TileRef& a, Loc loc = {});
  void Scalar(ScalarOp op, const TileRef& dst, const TileRef& a, float value, Loc loc = {});
  void Binary(BinaryOp op, const TileRef& dst, const TileRef& a, const TileRef& b, Loc loc = {});
  void Unary(UnaryOp op, const TileRef& dst, const TileRef& a, Loc loc = {});
  void Reduce(ReduceOp op, const TileRef& dst, const TileRef& a, Loc loc = {});
  void Transpose(const TileRef& dst, const TileRef& a, Loc loc = {});
  void Unzip(const TileRef& dst, const TileRef& a, int first, Loc loc = {});
  void Zip(const TileRef& dst, const TileRef& a, const TileRef& b, Loc loc = {});
  void MaskOutside(const TileRef& x, std::int64_t lowest, std::int64_t highest, float value, Loc loc = {});
  void MaskWhere(const TileRef& x, const TileRef& flags, float value, Loc loc = {});
  void Distances(const TileRef& x, std::int64_t first, Loc loc = {});
  void DropFlags(const TileRef& flags, const DropoutStream& stream, std::int64_t row, std::int64_t key,
                 bool transposed, Loc loc = {});
  void AddAlibi(const TileRef& s, const TileRef& scratch, float scale, float slope, std::int64_t first,
                bool root, Loc loc = {});
  void FillInt(const TileRef& x, std::int32_t value, Loc loc = {});
  void AddInt(const TileRef& dst, const TileRef& a, const TileRef& b, Loc loc = {});
  void ColumnSum(const TileRef& dst, const TileRef& a, Loc loc = {});
  void CountTrue(const TileRef& dst, const TileRef& scratch, const TileRef& flags, Loc loc = {});
  void ExclusiveScan(const TileRef& dst, const TileRef& a, std::int32_t initial, Loc loc = {});
  void AddScalarInt(const TileRef& dst, const TileRef& a, std::int32_t value, Loc loc = {});
  void Spend(std::int64_t steps, Loc loc = {});
  std::int64_t ReadInt(const TileRef& a, std::int64_t j, Loc loc = {});
  float ReadFloat(const TileRef& a, std::int64_t j, Loc loc = {});

  void SoftmaxStep(const TileRef& p, const TileRef& s, const TileRef& m_new, const TileRef& m_old,
                   const TileRef& l, float scale, Loc loc = {});
  void AttentionGradStep(const TileRef& p, const TileRef& ds, const TileRef& s, const TileRef& dp,
                         const TileRef& lse, const TileRef& delta, float scale, Loc loc = {});
  void MulAdd(const TileRef& acc, const TileRef& factor, const TileRef& x, Loc loc = {});
  void WeightedSum(const TileRef& acc, const TileRef& scratch, std::span<const TileRef> rows,
                   std::span<const float> weights, Accumulate accumulate, Loc loc = {});
  void SelectLe(const TileRef& dst, const TileRef& key, float limit, const TileRef& a, const TileRef& b,
                Loc loc = {});
  void TopK(const TileRef& values, const TileRef& ids, const TileRef& a, Loc loc = {});
  void GroupTop(const TileRef& sums, const TileRef& a, std::int64_t count, Loc loc = {});
  void KeepGroups(const TileRef& a, const TileRef& ids, std::int64_t group_cols, Loc loc = {});
  void GroupedTopK(const GroupedTopKRefs& t, std::int64_t count, Loc loc = {});
  void Gather(const TileRef& dst, const TileRef& a, const TileRef& ids, Loc loc = {});
  void Scatter(const TileRef& dst, const TileRef& ids, const TileRef& values, Loc loc = {});
  void Random(const TileRef& u, const RandomStream& stream, std::int64_t first, std::int64_t row_step,
              Loc loc = {});
  void DropRoutes(const TileRef& ids, const TileRef& weights, const TileRef& u, float rate, Loc loc = {});
  void MapRoutes(const TileRef& out, const TileRef& ids, const TileRef& scores, const TileRef& d_weights,
                 const RouteFunction& function, Loc loc = {});
  void Scores(ScoreFunction function, const TileRef& n, const TileRef& s0, const TileRef& s1,
              const TileRef& column, Loc loc = {});
  void Repair(const TileRef& x, const TileRef& bad, const TileRef& s0, const TileRef& s1,
              const TileRef& column, float limit, bool by_mean, Loc loc = {});
  void RowDot(const TileRef& sum, const TileRef& s0, const TileRef& s1, const TileRef& a, const TileRef& b,
              const TileRef& weights, Loc loc = {});
  void ScaleRows(const TileRef& dst, const TileRef& s0, const TileRef& a, const TileRef& factor,
                 const TileRef& weights, Loc loc = {});
  void NormRows(const NormRefs& t, float scale, float eps, Loc loc = {});
  void NormRowsGrad(const NormGradRefs& t, float scale, Loc loc = {});
  void NormGrad(const NormGradRefs& t, Loc loc = {});
  void AddColumnDots(const TileRef& acc, const TileRef& s0, const TileRef& s1, const TileRef& a,
                     const TileRef& b, const TileRef& factor, Loc loc = {});
  void SwiGlu(const TileRef& out, const TileRef& s0, const TileRef& s1, const TileRef& gate,
              const TileRef& up, const TileRef& probs, Loc loc = {});
  void SwiGluGrad(const SwiGluGradTiles& t, Loc loc = {});
  void StoreActivated(const Gm& dst, const EpilogueRefs& t, const EpilogueScalars& e, Loc loc = {});
  void AddDot(const TileRef& sum, const TileRef& scratch, const TileRef& x, const TileRef& row, Loc loc = {});
  void StoreEach(std::span<const Gm> dsts, const TileRef& src, Loc loc);
  void StoreScaledDots(const TileRef& wide, const TileRef& s0, const TileRef& s1, const TileRef& x,
                       bool widens, std::span<const ScaledDotRef> dots, Loc loc = {});
  void Gather(const TileRef& dst, const Gm& column, const TileRef& places, const TileRef& staging,
              Loc loc = {});
  void Scatter(const Gm& column, const TileRef& places, const TileRef& src, const TileRef& staging,
               Loc loc = {});
  void Histogram(const TileRef& counts, const TileRef& ids, const IdBins& bins, Loc loc = {});
  void Rank(const TileRef& ranks, const TileRef& next, const TileRef& ids, const IdBins& bins, Loc loc = {});
  void RankWithin(const TileRef& ranks, const TileRef& next, const TileRef& limits, const TileRef& ids,
                  const IdBins& bins, Loc loc = {});
  void HistogramBySort(const TileRef& counts, const TileRef& ids, const SortRefs& sort, Loc loc = {});
  void RankBySort(const TileRef& ranks, const TileRef& next, const TileRef& ids, const SortRefs& sort,
                  Loc loc = {});
  void Sort32(const TileRef& keys, const TileRef& values, const TileRef& from, const TileRef& values_from,
              Loc loc = {});
  void MergeSort(const TileRef& keys, const TileRef& values, const TileRef& from, const TileRef& values_from,
                 std::int64_t run, Loc loc = {});
  void RoundUp(const TileRef& dst, const TileRef& a, std::int32_t multiple, Loc loc = {});
  void TrueColumns(const TileRef& dst, const TileRef& flags, Loc loc = {});
  void KeepWhere(const TileRef& dst, const TileRef& a, const TileRef& flags, Loc loc = {});
  void Lookup(const TileRef& dst, const TileRef& ids, const TileRef& table, std::int32_t first, Loc loc = {});

  void Receive(const TileRef& dst, const TileRef& src, Loc loc = {});
  void MoveToUb(const TileRef& dst, const TileRef& src, Loc loc = {});
  void MoveToL1(const TileRef& dst, const TileRef& src, Loc loc = {});

 private:
  TraceState* state_;
  int lane_;
  HostVector host_;
  VectorRecorder record_;
};

}  // namespace trace

// A Vector core that records. On its own: one of a launch on all Vector cores.
class TraceVectorCore : private trace::TraceState, public VectorFront<trace::TraceVector> {
 public:
  TraceVectorCore(const ChipSpec& chip, Scratch& scratch, int index, int count, bool with_data,
                  trace::CoreRecord* out)
      : TraceState(chip, scratch, index, count, with_data, out),
        VectorFront<trace::TraceVector>(static_cast<TraceState&>(*this), 0) {}
  TraceVectorCore(const TraceVectorCore&) = delete;
  TraceVectorCore& operator=(const TraceVectorCore&) = delete;

  using VectorFront<trace::TraceVector>::Allocate;

  // Empty, or which ring overflowed which buffer (Arena::finding).
  const std::string& finding() const { return context.arena.finding(); }
};
static_assert(VectorCore<TraceVectorCore>);

// An AI core that records: one Cube core and the chip's number of Vector cores.
class TraceAiCore : private trace::TraceState, public CubeFront<trace::TraceCube> {
 public:
  TraceAiCore(const ChipSpec& chip, Scratch& scratch, int index, int count, bool with_data,
              trace::CoreRecord* out)
      : TraceState(chip, scratch, index, count, with_data, out),
        CubeFront<trace::TraceCube>(static_cast<TraceState&>(*this)) {
    CUBIST_CHECK(chip.vector_per_cube <= kMaxVectorPerCube,
                 "more Vector cores per Cube core than kernels hold");
    vectors_.reserve(static_cast<std::size_t>(chip.vector_per_cube));
    for (int lane = 0; lane < chip.vector_per_cube; ++lane)
      vectors_.emplace_back(static_cast<TraceState&>(*this), lane);
  }
  TraceAiCore(const TraceAiCore&) = delete;
  TraceAiCore& operator=(const TraceAiCore&) = delete;

  using CubeFront<trace::TraceCube>::Allocate;

  std::span<VectorFront<trace::TraceVector>> vectors() { return vectors_; }
  const std::string& finding() const { return context.arena.finding(); }

 private:
  std::vector<VectorFront<trace::TraceVector>> vectors_;
};
static_assert(AiCore<TraceAiCore>);

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_TRACE_TRACE_CORE_H_
