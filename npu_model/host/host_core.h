// The host executor's cores: they compute. Each untyped method is the body of one instruction of core.h;
// CubeFront and VectorFront give them their types. SIMD bodies come from the tables of *_ops.h.
#ifndef CUBIST_NPU_MODEL_HOST_HOST_CORE_H_
#define CUBIST_NPU_MODEL_HOST_HOST_CORE_H_

#include <array>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "npu_model/arena.h"
#include "npu_model/core.h"
#include "npu_model/cube_front.h"
#include "npu_model/host/activation_ops.h"
#include "npu_model/host/attention_grad_ops.h"
#include "npu_model/host/attention_ops.h"
#include "npu_model/host/epilogue_ops.h"
#include "npu_model/host/movement_ops.h"
#include "npu_model/host/norm_ops.h"
#include "npu_model/host/routing_ops.h"
#include "npu_model/host/scratch.h"
#include "npu_model/host/tape.h"
#include "npu_model/host/tile_ops.h"
#include "npu_model/vector_front.h"

namespace cubist {

// What the cores of one virtual AI core share.
struct CUBIST_EXPORT HostContext {
  HostContext(const ChipSpec& chip, Scratch& scratch, int index, int count);
  ~HostContext() { FlushStreams(); }

  // Slots for a ring: placed in the chip's buffers, with host storage where `with_storage`.
  Slot* Allocate(const SlotRequest& request, int lane, bool with_storage = true);
  // Storage for a slot that has handed its own on. Hand-over slots begin without any.
  void Furnish(Slot& slot);
  // Takes a slot's storage away, for the next one of its size.
  void Strip(Slot& slot);
  // The slot's content is lost: another storage of its size takes its place, and the next Mmad that needs one writes
  // to this, which the caches hold.
  void Release(const TileRef& tile);

  // The last Mmad of a relay accumulator waits for the Store behind it, to write where that would. Any other
  // instruction that might meet its operands or its sums runs it first.
  struct DeferredMmad {
    void (*mmad)(const MmadArgs& args) = nullptr;  // None waits where null.
    MmadArgs args;
    TileRef c;
  };
  DeferredMmad deferred;
  void RunDeferred();
  void Multiply(CoreTape::Mmad mmad, const MmadArgs& args);

  // Where given, gets what the core does; everything but packing and multiplying breaks it.
  CoreTape* tape = nullptr;
  void BreakTape() {
    if (tape != nullptr) tape->Break();
  }

  const ChipSpec* chip;  // Whose buffers the slots stand in; host layouts come from HostChip() on any chip.
  Scratch* scratch;
  const ChipSpec* host;  // HostChip() of the SIMD target in use.
  const CubeOps* cube;
  CoreTape::Mmad mmad_bf16;  // Of `cube`: the one whose bits stay wherever the chip's kernels cut k.
  const VectorOps* vector;
  const ActivationOps* activation;
  const NormOps* norm;
  const MovementOps* movement;
  const AttentionOps* attention;
  const AttentionGradOps* attention_grad;
  const RoutingOps* routing;
  const EpilogueOps* epilogue;
  Arena arena;
  int index, count;

 private:
  std::vector<std::pair<std::int64_t, std::byte*>> spare_;  // by bytes; the last one is taken first
};

// Cube core, computing. Method by method the Cube instructions of core.h.
class CUBIST_EXPORT HostCube {
 public:
  explicit HostCube(HostContext& context) : context_(&context) {}

  Slot* Allocate(const SlotRequest& request) { return context_->Allocate(request, -1); }
  int index() const { return context_->index; }
  int count() const { return context_->count; }

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
  void Spend(std::int64_t /*steps*/, Loc = {}) {}

 private:
  std::int64_t BytesOfB(const TileRef& b) const;
  void WidenPanels(const TileRef& dst, const HostLayout& narrow);
  void StoreNarrow(const PackedGm& dst, const TileRef& src);
  void Pack(CoreTape::Pack pack, const TileRef& dst, const StridedSource& source, std::byte* to,
            std::int64_t pitch);

  HostContext* context_;
};

// Vector core, computing.
class CUBIST_EXPORT HostVector {
 public:
  HostVector(HostContext& context, int lane) : context_(&context), lane_(lane) {}

  Slot* Allocate(const SlotRequest& request) { return context_->Allocate(request, lane_); }
  int index() const { return context_->index; }
  int count() const { return context_->count; }

  void LoadUb(const TileRef& dst, const Gm& src, Loc loc = {});
  void StoreUb(const Gm& dst, const TileRef& src, Loc loc = {});
  void StoreEach(std::span<const Gm> dsts, const TileRef& src, Loc loc = {});
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
  void CopyElement(const TileRef& dst, const TileRef& src, Loc loc = {});  // 4 bytes
  std::int64_t ReadInt(const TileRef& a, std::int64_t j, Loc = {}) { return Element<std::int32_t>(a, j); }
  float ReadFloat(const TileRef& a, std::int64_t j, Loc = {}) { return Element<float>(a, j); }
  void Spend(std::int64_t /*steps*/, Loc = {}) {}

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
  HostContext* context_;
  int lane_;
  // The rows of GM that relay tiles showed last, oldest first, as far as nobody has used them: who works meanwhile
  // fetches them.
  struct Shown {
    const void* data;
    std::int64_t bytes;
  };
  void Show(const void* data, std::int64_t bytes);
  std::size_t shown_count() const { return shown_end_ - shown_begin_; }
  // Forgets the row, where it is there.
  void Use(const void* data);
  // Takes the last one, where there is one of `bytes` and it is not `own`; else null.
  const void* TakeShown(std::int64_t bytes, const void* own);

  // A row that a relay tile shows, to rows past the caches, while the row that was shown last comes. False where one of
  // them has to go another way.
  bool CopyShownRow(std::span<const Gm> dsts, const TileRef& src);

  static constexpr std::size_t kMostShown = 32;  // Two WeightedSums of most rows.
  std::array<Shown, kMostShown> shown_{};
  std::size_t shown_begin_ = 0, shown_end_ = 0;

  // Element j of a row.
  template <class T>
  static T Element(const TileRef& a, std::int64_t j) {
    const HostLayout& shows = a.slot->shows;
    return reinterpret_cast<const T*>(shows.data)[a.row_part.begin * shows.pitch + a.col_part.begin + j];
  }
};

using HostVectorCore = VectorFront<HostVector>;
static_assert(VectorCore<HostVectorCore>);

// A virtual AI core of the host: one Cube core and one Vector core on one thread.
class HostAiCore : public CubeFront<HostCube> {
 public:
  explicit HostAiCore(HostContext& context)
      : CubeFront<HostCube>(context), vectors_{HostVectorCore(context, 0)} {}

  std::span<HostVectorCore> vectors() { return vectors_; }

 private:
  std::array<HostVectorCore, 1> vectors_;
};
static_assert(AiCore<HostAiCore>);

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_HOST_HOST_CORE_H_
