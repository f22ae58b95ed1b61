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

  void LoadL1(TileRef dst, const Gm& src, Loc loc = {});
  void LoadL1Packed(TileRef dst, const PackedGm& src, Loc loc = {});
  void StorePacked(const PackedGm& dst, TileRef src, Loc loc = {});
  void LoadL0A(TileRef dst, TileRef src, Transpose transpose, Loc loc = {});
  void LoadL0B(TileRef dst, TileRef src, Transpose transpose, Loc loc = {});
  void LoadBias(TileRef dst, const Gm& row, Loc loc = {});
  void Mmad(TileRef c, TileRef a, TileRef b, MmadStart start, TileRef bias, Loc loc = {});
  void Send(TileRef dst, TileRef src, Loc loc = {});
  void StoreL0C(const Gm& dst, TileRef src, const FixOptions& options = {}, Loc loc = {});
  std::int64_t ReadGmInt(const Gm& element, Loc loc = {});

 private:
  std::int64_t BytesOfB(const TileRef& b) const;
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

  void LoadUb(TileRef dst, const Gm& src, Loc loc = {});
  void StoreUb(const Gm& dst, TileRef src, Loc loc = {});
  void StoreEach(std::span<const Gm> dsts, TileRef src, Loc loc = {});
  void Fill(TileRef x, float value, Loc loc = {});
  void Cast(TileRef dst, TileRef a, Loc loc = {});
  void Scalar(ScalarOp op, TileRef dst, TileRef a, float value, Loc loc = {});
  void Binary(BinaryOp op, TileRef dst, TileRef a, TileRef b, Loc loc = {});
  void Unary(UnaryOp op, TileRef dst, TileRef a, Loc loc = {});
  void Reduce(ReduceOp op, TileRef dst, TileRef a, Loc loc = {});
  void Transpose(TileRef dst, TileRef a, Loc loc = {});
  void MaskOutside(TileRef x, std::int64_t lowest, std::int64_t highest, float value, Loc loc = {});
  void MaskWhere(TileRef x, TileRef flags, float value, Loc loc = {});
  void Distances(TileRef x, std::int64_t first, Loc loc = {});
  void DropFlags(TileRef flags, const DropoutStream& stream, std::int64_t row, std::int64_t key,
                 bool transposed, Loc loc = {});
  void AddAlibi(TileRef s, TileRef scratch, float scale, float slope, std::int64_t first, bool root,
                Loc loc = {});
  void FillInt(TileRef x, std::int32_t value, Loc loc = {});
  void AddInt(TileRef dst, TileRef a, TileRef b, Loc loc = {});
  void ColumnSum(TileRef dst, TileRef a, Loc loc = {});
  void CountTrue(TileRef dst, TileRef scratch, TileRef flags, Loc loc = {});
  void ExclusiveScan(TileRef dst, TileRef a, std::int32_t initial, Loc loc = {});
  void AddScalarInt(TileRef dst, TileRef a, std::int32_t value, Loc loc = {});
  void CopyElement(TileRef dst, TileRef src, Loc loc = {});  // 4 bytes
  std::int64_t ReadInt(const TileRef& a, std::int64_t j, Loc = {}) { return Element<std::int32_t>(a, j); }
  float ReadFloat(const TileRef& a, std::int64_t j, Loc = {}) { return Element<float>(a, j); }

  void SoftmaxStep(TileRef p, TileRef s, TileRef m_new, TileRef m_old, TileRef l, float scale, Loc loc = {});
  void AttentionGradStep(TileRef p, TileRef ds, TileRef s, TileRef dp, TileRef lse, TileRef delta,
                         float scale, Loc loc = {});
  void MulAdd(TileRef acc, TileRef factor, TileRef x, Loc loc = {});
  void WeightedSum(TileRef acc, TileRef scratch, std::span<const TileRef> rows,
                   std::span<const float> weights, Accumulate accumulate, Loc loc = {});
  void SelectLe(TileRef dst, TileRef key, float limit, TileRef a, TileRef b, Loc loc = {});
  void TopK(TileRef values, TileRef ids, TileRef a, Loc loc = {});
  void GroupTop(TileRef sums, TileRef a, std::int64_t count, Loc loc = {});
  void KeepGroups(TileRef a, TileRef ids, std::int64_t group_cols, Loc loc = {});
  void GroupedTopK(const GroupedTopKRefs& t, std::int64_t count, Loc loc = {});
  void Gather(TileRef dst, TileRef a, TileRef ids, Loc loc = {});
  void Scatter(TileRef dst, TileRef ids, TileRef values, Loc loc = {});
  void Random(TileRef u, const RandomStream& stream, std::int64_t first, std::int64_t row_step, Loc loc = {});
  void DropRoutes(TileRef ids, TileRef weights, TileRef u, float rate, Loc loc = {});
  void MapRoutes(TileRef out, TileRef ids, TileRef scores, TileRef d_weights, const RouteFunction& function,
                 Loc loc = {});
  void Scores(ScoreFunction function, TileRef n, TileRef s0, TileRef s1, TileRef column, Loc loc = {});
  void Repair(TileRef x, TileRef bad, TileRef s0, TileRef s1, TileRef column, float limit, bool by_mean,
              Loc loc = {});
  void RowDot(TileRef sum, TileRef s0, TileRef s1, TileRef a, TileRef b, TileRef weights, Loc loc = {});
  void ScaleRows(TileRef dst, TileRef s0, TileRef a, TileRef factor, TileRef weights, Loc loc = {});
  void NormRows(const NormRefs& t, float scale, float eps, Loc loc = {});
  void NormRowsGrad(const NormGradRefs& t, float scale, Loc loc = {});
  void NormGrad(const NormGradRefs& t, Loc loc = {});
  void AddColumnDots(TileRef acc, TileRef s0, TileRef s1, TileRef a, TileRef b, TileRef factor, Loc loc = {});
  void SwiGlu(TileRef out, TileRef s0, TileRef s1, TileRef gate, TileRef up, TileRef probs, Loc loc = {});
  void SwiGluGrad(const SwiGluGradTiles& t, Loc loc = {});
  void StoreActivated(const Gm& dst, const EpilogueRefs& t, const EpilogueScalars& e, Loc loc = {});
  void AddDot(TileRef sum, TileRef scratch, TileRef x, TileRef row, Loc loc = {});
  void StoreScaledDots(TileRef wide, TileRef s0, TileRef s1, TileRef x, bool widens,
                       std::span<const ScaledDotRef> dots, Loc loc = {});
  void Gather(TileRef dst, const Gm& column, TileRef places, TileRef staging, Loc loc = {});
  void Scatter(const Gm& column, TileRef places, TileRef src, TileRef staging, Loc loc = {});
  void Histogram(TileRef counts, TileRef ids, const IdBins& bins, Loc loc = {});
  void Rank(TileRef ranks, TileRef next, TileRef ids, const IdBins& bins, Loc loc = {});
  void RankWithin(TileRef ranks, TileRef next, TileRef limits, TileRef ids, const IdBins& bins, Loc loc = {});
  void HistogramBySort(TileRef counts, TileRef ids, const SortRefs& sort, Loc loc = {});
  void RankBySort(TileRef ranks, TileRef next, TileRef ids, const SortRefs& sort, Loc loc = {});
  void Sort32(TileRef keys, TileRef values, TileRef from, TileRef values_from, Loc loc = {});
  void MergeSort(TileRef keys, TileRef values, TileRef from, TileRef values_from, std::int64_t run,
                 Loc loc = {});
  void RoundUp(TileRef dst, TileRef a, std::int32_t multiple, Loc loc = {});
  void TrueColumns(TileRef dst, TileRef flags, Loc loc = {});
  void KeepWhere(TileRef dst, TileRef a, TileRef flags, Loc loc = {});
  void Lookup(TileRef dst, TileRef ids, TileRef table, std::int32_t first, Loc loc = {});

  void Receive(TileRef dst, TileRef src, Loc loc = {});
  void MoveToUb(TileRef dst, TileRef src, Loc loc = {});
  void MoveToL1(TileRef dst, TileRef src, Loc loc = {});

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
