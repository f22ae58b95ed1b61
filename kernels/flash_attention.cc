#include "kernels/flash_attention.h"

#include <algorithm>
#include <new>
#include <string>
#include <vector>

#include "kernels/attention_arguments.h"
#include "kernels/attention_choice.h"
#include "kernels/attention_combine_kernel.h"
#include "kernels/attention_operands.h"
#include "kernels/attention_pack.h"
#include "kernels/attention_sequences.h"
#include "kernels/element_type.h"
#include "kernels/flash_attention_kernel.h"
#include "kernels/rotate_kernel.h"
#include "npu_model/launch.h"
#include "tiling/attention_cost.h"

namespace cubist {
namespace {

constexpr const char* kName = "flash_attention";

FlashAttentionShape ShapeOf(const FlashAttentionArgs& args) {
  FlashAttentionShape s;
  s.batches = args.q.size(0), s.heads = args.q.size(1), s.sq = args.q.size(2), s.d_qk = args.q.size(3);
  s.kv_heads = args.k.size(1), s.skv = args.k.size(2), s.d_v = args.v.size(3);
  if (args.q_rope.given()) s.d_rope = args.q_rope.size(3), s.rope_heads = args.k_rope.size(1);
  s.in = args.q.dtype, s.out = args.out.dtype;
  s.bias = args.bias.given(), s.soft_cap = SoftCapForm(s.in, args.soft_cap, args.scale),
  s.sinks = args.sinks.given();
  s.mask = args.mask.given(), s.alibi = args.alibi.given(), s.dropout = args.dropout.given();
  const std::int64_t prefix =
      args.prefix.empty() ? 0 : *std::max_element(args.prefix.begin(), args.prefix.end());
  s.band = BandOf(args.causal, args.window, s.sq, s.skv, prefix);
  return s;
}

Status Validate(const Device& device, const FlashAttentionArgs& args) {
  const AttentionArguments x(kName, args);
  const Argument out{kName, "out", args.out}, lse{kName, "lse", args.lse};
  const Argument workspace = AsArgument(kName, args.workspace);
  CUBIST_RETURN_IF_ERROR(x.Check());
  CUBIST_RETURN_IF_ERROR(x.CheckOutputShape(out));
  CUBIST_RETURN_IF_ERROR(CheckDType(out, {DType::kF32, args.q.dtype}));
  if (args.lse.given()) {
    CUBIST_RETURN_IF_ERROR(x.CheckStatisticsShape(lse));
    CUBIST_RETURN_IF_ERROR(CheckDType(lse, {DType::kF32}));
  }
  return x.CheckMemory(device.computes(), {}, {&out, &lse, &workspace});
}

// Whether v shows the first columns of k, as the latent of absorbed MLA does.
bool ValuesAreKeys(const FlashAttentionArgs& args) {
  const ConstTensor &k = args.k, &v = args.v;
  if (v.data == nullptr || v.data != k.data || v.size(3) > k.size(3)) return false;
  for (int d = 0; d < 4; ++d) {
    if (d < 3 && v.size(d) != k.size(d)) return false;
    if (v.size(d) > 1 && v.stride(d) != k.stride(d)) return false;
  }
  return true;
}

// Whether rows of x stand among others without filling the lines of L2.
bool AmongOthers(const ChipSpec& chip, const ConstTensor& x) {
  return x.size(2) > 1 && x.stride(2) != x.size(3) && x.size(3) * SizeOf(x.dtype) % chip.memory.l2_line != 0;
}

// With few query rows per head, the heads that share keys read them together, as rows of one matrix: so many.
std::int64_t FoldOf(const FlashAttentionArgs& args) {
  constexpr std::int64_t kMostPositions = 16;
  const std::int64_t kv_heads = args.k.size(1);
  if (kv_heads == 0 || LongestOf(args.lengths.q_ends, args.q.size(2)) > kMostPositions) return 1;
  return std::max<std::int64_t>(args.q.size(1) / kv_heads, 1);
}

// Tiles are chosen for as many sequences as long as the longest.
void SetSequences(const ChipSpec& chip, const FlashAttentionArgs& args,
                  std::vector<AttentionSequence>& sequences, FlashAttentionShape& s) {
  if (args.lengths.given()) {
    s.batches = static_cast<std::int64_t>(sequences.size());
    s.sq = LongestOf(args.lengths.q_ends, 0), s.skv = LongestOf(args.lengths.kv_ends, 0);
    s.band = BandOf(args.causal, args.window, s.sq, s.skv, s.band.prefix);
  }
  const std::int64_t fold = FoldOf(args);
  s.heads /= fold, s.sq *= fold, s.band.fold = fold;
  for (AttentionSequence& x : sequences) x.sq *= fold, x.band.fold = fold;
  if (!sequences.empty()) s.ragged_splits = RaggedSplits(chip, s, sequences);
}

// What phases before the products do to keys: those that any query sees, from the beginning of a block on.
struct KeysInUse {
  std::vector<RowsToTurn> turned;
  std::vector<PackedRows> packed;  // Empty: all.

  KeysInUse(const FlashAttentionSchedule& schedule, const FlashAttentionArgs& args) {
    const std::int64_t skv = args.k.size(2);
    Range used{skv, 0};  // By any batch entry, where each is one sequence.
    for (std::int64_t i = 0; i < schedule.sequences(); ++i) {
      const AttentionSequence x = schedule.Sequence(i);
      const Range seen = schedule.SeenBlocks(x);
      if (args.lengths.given()) {
        turned.push_back({0, x.kv_begin, seen.From(-x.kv_begin)});
        packed.push_back({seen.From(-x.kv_begin), x.packed_begin + seen.begin});
      } else if (!seen.empty()) {
        used = {std::min(used.begin, seen.begin), std::max(used.end, seen.end)};
      }
    }
    if (args.lengths.given()) return;
    if (used.empty()) used = {};
    for (std::int64_t b = 0; b < args.q.size(0); ++b) turned.push_back({b, 0, used});
    if (used != Range{0, skv}) packed.push_back({used, used.begin});
  }
};

// One call: its tensors, its tiling, and its phases.
template <class T>
class ForwardCall {
 public:
  ForwardCall(Launch& launch, const FlashAttentionArgs& args) : launch_(launch), args_(args) {
    SplitRotaryColumns(args_);
    shape_ = ShapeOf(args_);
  }

  // With `forced` in place of the tiling of its choice, where that is given.
  Status Run(const Device& device, const FlashAttentionTiling* forced = nullptr) {
    CUBIST_RETURN_IF_ERROR(device.status());
    const ChipSpec& chip = launch_.chip();
    if (!device.computes())
      args_.mask.data = nullptr;  // It hides nothing then, so that no tiling depends on it.
    step_ = chip.PackedBlockStep(shape_.in);
    sequences_ =
        SequencesOf(args_.causal, args_.window, args_.prefix, args_.lengths, shape_.sq, shape_.skv, step_);
    SetSequences(chip, args_, sequences_, shape_);
    if (chip.pipes_overlap) {  // A host's operands differ, and are packed in any case.
      shape_.v_in_k = ValuesAreKeys(args_);
      shape_.among_others = AmongOthers(chip, args_.k) || AmongOthers(chip, args_.v);
    }
    if (forced != nullptr) {
      tiling_ = *forced;
    } else {
      const auto with = [&](const Device& model, Launch& other, const FlashAttentionTiling& t) {
        return ForwardCall(other, args_).Run(model, &t);
      };
      CUBIST_RETURN_IF_ERROR(ChooseAttention(device, kName, shape_, &Candidates, &tiling_, args_, with));
    }
    const FlashAttentionSchedule schedule(shape_, tiling_, sequences_);
    const KeysInUse keys(schedule, args_);
    AddTensors();
    if (shape_.skips_hidden()) g_.hidden = CountHidden(launch_, *g_.mask, tiling_.mask_cell(shape_));
    if (args_.rope.given() && shape_.d_rope > 0) TurnRows(schedule, keys);
    if (tiling_.pack_kv) PackKeys(keys);
    const std::int64_t heads = shape_.heads, part_rows = schedule.part_rows();
    if (part_rows > 0) {
      g_.part_out = launch_.Workspace("part_out", DType::kF32, {1, heads, part_rows, shape_.d_v});
      g_.part_lse = launch_.Workspace("part_lse", DType::kF32, {1, heads, part_rows, 1});
    }
    launch_.OnAiCores(CoresOfTasks(chip, shape_, schedule.tasks()),
                      [&](auto& core) { FlashAttentionKernel<T>(core, g_, shape_, tiling_, schedule); });
    if (part_rows > 0) Combine(schedule);
    return {};
  }

 private:
  void AddTensors() {
    static_cast<ScoreOperands&>(g_) = AddScoreOperands(launch_, args_, shape_);
    g_.q = launch_.Input("q", args_.q), g_.q_rope = launch_.Input("q_rope", args_.q_rope);
    g_.k = launch_.Input("k", args_.k), g_.k_rope = launch_.Input("k_rope", args_.k_rope);
    g_.v = launch_.Input("v", args_.v), g_.sinks = launch_.Input("sinks", args_.sinks);
    g_.out = launch_.Output("out", args_.out), g_.lse = launch_.Output("lse", AsColumns(args_.lse));
  }

  const GmTensor* Like(const char* name, const GmTensor& x) {
    return launch_.Workspace(name, shape_.in, {x.sizes[0], x.sizes[1], x.sizes[2], x.sizes[3]});
  }
  // Before all else: each row once, whatever number of blocks and heads asks for it.
  void TurnRows(const FlashAttentionSchedule& schedule, const KeysInUse& keys) {
    const auto [of_queries, of_keys] = AddRotations(launch_, args_.rope, args_.q.size(0));
    const std::vector<TurnedTensor> tensors = {
        {of_keys, g_.k_rope, Like("k_turned", *g_.k_rope), keys.turned},
        {of_queries, g_.q_rope, Like("q_turned", *g_.q_rope), QueriesToTurn(schedule)}};
    g_.k_rope = tensors[0].turned, g_.q_rope = tensors[1].turned;
    TurnTensors<T>(launch_, tensors);
  }

  void PackKeys(const KeysInUse& keys) {
    SequencePacker<T> packer(launch_, Role::kRows, keys.packed, step_);
    g_.k_packed = packer.Add("k_packed", *g_.k, /*transposed=*/true);
    if (shape_.d_rope > 0) g_.k_rope_packed = packer.Add("k_rope_packed", *g_.k_rope, /*transposed=*/true);
    g_.v_packed = packer.Add("v_packed", *g_.v, /*transposed=*/false);
    packer.Run();
  }

  void Combine(const FlashAttentionSchedule& schedule) {
    std::vector<PartsToCombine> blocks;
    for (std::int64_t i = 0; i < schedule.sequences(); ++i) {
      if (schedule.PartsOf(i) == 1) continue;
      for (std::int64_t head = 0; head < shape_.heads; ++head) {
        for (const Range rows : Split(schedule.Sequence(i).sq, kCombineRows))
          blocks.push_back({i, head, rows});
      }
    }
    launch_.OnVectorCores(static_cast<std::int64_t>(blocks.size()),
                          [&](auto& core) { AttentionCombineKernel(core, g_, schedule, blocks); });
  }

  Launch& launch_;
  FlashAttentionArgs args_;
  FlashAttentionShape shape_;
  std::int64_t step_ = 1;  // Of keys of packed operands.
  std::vector<AttentionSequence> sequences_;
  FlashAttentionTiling tiling_;
  FlashAttentionOperands g_;
};

Status RunAny(const Device& device, const FlashAttentionArgs& args, Launch& launch) {
  return WithFloatType(args.q.dtype, [&]<class T>(T) { return ForwardCall<T>(launch, args).Run(device); });
}

}  // namespace

Status FlashAttention(const Device& device, const FlashAttentionArgs& args, Profile* profile) try {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  return RunLaunch(device, kName, args.workspace, profile,
                   [&](Launch& launch) { return RunAny(device, args, launch); });
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

Status FlashAttentionWorkspace(const Device& device, const FlashAttentionArgs& args,
                               std::int64_t* bytes) try {
  if (bytes == nullptr) return InvalidArgument(std::string(kName) + " workspace: bytes is null");
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  return MeasureLaunch(
      device, kName, [&](Launch& launch) { return RunAny(device, args, launch); }, bytes);
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

}  // namespace cubist
