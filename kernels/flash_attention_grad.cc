#include "kernels/flash_attention_grad.h"

#include <algorithm>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention_arguments.h"
#include "kernels/attention_choice.h"
#include "kernels/attention_operands.h"
#include "kernels/attention_pack.h"
#include "kernels/attention_sequences.h"
#include "kernels/element_type.h"
#include "kernels/flash_attention_grad_kernel.h"
#include "npu_model/launch.h"
#include "tiling/attention_cost.h"

namespace cubist {
namespace {

constexpr const char* kName = "flash_attention_grad";

FlashAttentionGradShape ShapeOf(const FlashAttentionGradArgs& args) {
  FlashAttentionGradShape s;
  s.batches = args.q.size(0), s.heads = args.q.size(1), s.sq = args.q.size(2), s.d_qk = args.q.size(3);
  s.kv_heads = args.k.size(1), s.skv = args.k.size(2), s.d_v = args.v.size(3);
  if (args.q_rope.given()) s.d_rope = args.q_rope.size(3), s.rope_heads = args.k_rope.size(1);
  s.in = args.q.dtype;
  s.bias = args.bias.given(), s.dbias = args.dbias.given(),
  s.soft_cap = SoftCapForm(s.in, args.soft_cap, args.scale);
  s.mask = args.mask.given(), s.alibi = args.alibi.given(), s.dropout = args.dropout.given();
  s.shared_heads = s.dbias && args.bias.size(1) != s.heads;
  const std::int64_t prefix =
      args.prefix.empty() ? 0 : *std::max_element(args.prefix.begin(), args.prefix.end());
  if (args.lengths.given()) {  // Tiles are chosen for as many sequences as long as the longest.
    s.batches = static_cast<std::int64_t>(args.lengths.q_ends.size());
    s.sq = LongestOf(args.lengths.q_ends, 0), s.skv = LongestOf(args.lengths.kv_ends, 0);
  }
  s.shared_batches = s.dbias && args.bias.size(0) != s.batches;
  s.band = BandOf(args.causal, args.window, s.sq, s.skv, prefix);
  return s;
}

// Shaped like `like`, in fp32 or `dtype`, and given where that is, if `needed`.
Status CheckGradient(const Argument& gradient, const Argument& like, DType dtype, bool needed) {
  if (!like.tensor.given()) {
    return gradient.tensor.given() ? gradient.Error(std::string("is given, but ") + like.name + " is not")
                                   : Status();
  }
  if (!gradient.tensor.given() && !needed) return {};
  const std::string of = std::string(", of ") + like.name;
  const auto size = [&](int d) { return like.tensor.size(d); };
  if (like.tensor.rank == 1) {
    CUBIST_RETURN_IF_ERROR(CheckShape(gradient, {{("heads" + of).c_str(), size(0)}}));
  } else {
    const std::string dims[4] = {"B" + of, "heads" + of, "rows" + of, "columns" + of};
    CUBIST_RETURN_IF_ERROR(CheckShape(gradient, {{dims[0].c_str(), size(0)},
                                                 {dims[1].c_str(), size(1)},
                                                 {dims[2].c_str(), size(2)},
                                                 {dims[3].c_str(), size(3)}}));
  }
  return dtype == DType::kF32 ? CheckDType(gradient, {dtype}) : CheckDType(gradient, {DType::kF32, dtype});
}

Status Validate(const Device& device, const FlashAttentionGradArgs& args) {
  const AttentionArguments x(kName, args);
  const Argument out{kName, "out", args.out}, lse{kName, "lse", args.lse}, dout{kName, "dout", args.dout};
  const Argument dq{kName, "dq", args.dq}, dk{kName, "dk", args.dk}, dv{kName, "dv", args.dv};
  const Argument dq_rope{kName, "dq_rope", args.dq_rope}, dk_rope{kName, "dk_rope", args.dk_rope};
  const Argument workspace = AsArgument(kName, args.workspace);
  const Argument dbias{kName, "dbias", args.dbias}, dsinks{kName, "dsinks", args.dsinks};
  CUBIST_RETURN_IF_ERROR(x.Check());
  for (const Argument* arg : {&out, &dout}) CUBIST_RETURN_IF_ERROR(x.CheckOutputShape(*arg));
  CUBIST_RETURN_IF_ERROR(x.CheckStatisticsShape(lse));
  CUBIST_RETURN_IF_ERROR(CheckDType(dout, {args.q.dtype}));
  CUBIST_RETURN_IF_ERROR(CheckDType(out, {DType::kF32, args.q.dtype}));
  CUBIST_RETURN_IF_ERROR(CheckDType(lse, {DType::kF32}));
  const std::pair<const Argument*, const Argument*> gradients[] = {
      {&dq, &x.q}, {&dk, &x.k}, {&dv, &x.v}, {&dq_rope, &x.q_rope}, {&dk_rope, &x.k_rope}};
  for (const auto& [gradient, of] : gradients)
    CUBIST_RETURN_IF_ERROR(CheckGradient(*gradient, *of, args.q.dtype, /*needed=*/true));
  CUBIST_RETURN_IF_ERROR(CheckGradient(dbias, x.bias, args.q.dtype, /*needed=*/false));
  CUBIST_RETURN_IF_ERROR(CheckGradient(dsinks, x.sinks, DType::kF32, /*needed=*/false));
  return x.CheckMemory(device.computes(), {&out, &lse, &dout},
                       {&dq, &dk, &dv, &dq_rope, &dk_rope, &dbias, &dsinks, &workspace});
}

// Rows that two rings of two stages hold in half of UB; a power of two.
std::int64_t RowsAtOnce(const ChipSpec& chip, std::int64_t columns) {
  constexpr std::int64_t kMost = 128;
  const std::int64_t row = 4 * 4 * RoundUp(std::max<std::int64_t>(columns, 1) + 1, 8);
  std::int64_t rows = kMost;
  while (rows > 1 &&
         rows * row > std::min(chip.buffer(Buffer::kUB).fast, chip.buffer(Buffer::kUB).capacity) / 2)
    rows /= 2;
  return rows;
}

// The sequences of a call where they are not all alike; packed queries begin at multiples of `step`.
std::vector<AttentionSequence> GradSequencesOf(const FlashAttentionGradArgs& args,
                                               const FlashAttentionGradShape& s, std::int64_t step) {
  std::vector<AttentionSequence> sequences =
      SequencesOf(args.causal, args.window, args.prefix, args.lengths, s.sq, s.skv, step);
  if (!args.lengths.given()) return sequences;
  std::int64_t packed_begin = 0;
  for (AttentionSequence& sequence : sequences) {
    sequence.packed_begin = packed_begin;
    packed_begin += RoundUp(sequence.sq, step);
  }
  return sequences;
}

// Sequence by sequence, what RotateKernel and FiniteRowsKernel are to do with keys: whole blocks, from the first to the last
// that a query sees.
std::vector<RowsToTurn> SeenKeys(const FlashAttentionGradSchedule& schedule) {
  std::vector<RowsToTurn> rows;
  for (std::int64_t i = 0; i < schedule.sequences(); ++i) {
    const AttentionSequence x = schedule.Sequence(i);
    Range seen{x.skv, 0};
    for (const Range keys : schedule.KeyBlocks(x)) {
      if (schedule.Seeing(x, keys).empty()) continue;
      seen = {std::min(seen.begin, keys.begin), std::max(seen.end, keys.end)};
    }
    if (!seen.empty()) rows.push_back({x.batch, x.kv_begin, seen.From(-x.kv_begin)});
  }
  return rows;
}
std::vector<PackedRows> QueriesToPack(const std::vector<AttentionSequence>& sequences) {
  std::vector<PackedRows> rows;
  for (const AttentionSequence& s : sequences)
    rows.push_back({{s.q_begin, s.q_begin + s.sq}, s.packed_begin});
  return rows;
}

// One call: its tensors, its tiling, and its phases.
template <class T>
class GradCall {
 public:
  GradCall(Launch& launch, const FlashAttentionGradArgs& args) : launch_(launch), args_(args) {
    SplitRotaryColumns(args_);
    s_ = ShapeOf(args_);
  }

  // With `forced` in place of the tiling of its choice, where that is given.
  Status Run(const Device& device, const FlashAttentionGradTiling* forced = nullptr) {
    if (!device.computes())
      args_.mask.data = nullptr;  // It hides nothing then, so that no tiling depends on it.
    if (forced != nullptr) {
      t_ = *forced;
    } else {
      const auto with = [&](const Device& model, Launch& other, const FlashAttentionGradTiling& t) {
        return GradCall(other, args_).Run(model, &t);
      };
      CUBIST_RETURN_IF_ERROR(ChooseAttention(device, kName, s_, &Candidates, &t_, args_, with));
    }
    const ChipSpec& chip = launch_.chip();
    step_ = chip.PackedBlockStep(s_.in);
    sequences_ = GradSequencesOf(args_, s_, step_);
    schedule_.emplace(s_, t_, sequences_);
    AddTensors();
    if (s_.mask) g_.hidden = CountHidden(launch_, *g_.mask, t_.mask_cell(s_));
    LeaveOutUnseen();
    TurnRows();
    PrepareRows();
    AddWorkspaces();
    PackQueries();
    launch_.OnAiCores(CoresOfTasks(chip, s_, schedule_->tasks()),
                      [&](auto& core) { FlashAttentionGradKernel<T>(core, g_, s_, t_, *schedule_); });
    AddUp();
    return {};
  }

 private:
  using Sum = FlashAttentionGradSum;

  std::int64_t batches() const { return args_.q.size(0); }
  bool rotate() const { return args_.rope.given() && s_.d_rope > 0; }
  bool shared_rope() const { return s_.rope_heads == 1 && s_.kv_heads > 1; }
  const GmTensor* Workspace(const char* name, std::int64_t i, std::int64_t j, std::int64_t rows,
                            std::int64_t cols, DType dtype = DType::kF32) {
    return launch_.Workspace(name, dtype, {i, j, rows, cols});
  }
  const GmTensor* WorkspaceLike(const char* name, const GmTensor& rows) {
    const auto& sizes = rows.sizes;
    return Workspace(name, sizes[0], sizes[1], sizes[2], sizes[3], s_.in);
  }
  template <class Kernel>
  void ForAllRows(std::int64_t matrices, std::int64_t rows, std::int64_t columns, Kernel&& kernel) {
    const std::int64_t at_once = RowsAtOnce(launch_.chip(), columns);
    launch_.OnVectorCores(matrices * CeilDiv(rows, at_once), [&](auto& core) { kernel(core, at_once); });
  }

  void AddTensors() {
    g_.q = launch_.Input("q", args_.q), g_.q_rope = launch_.Input("q_rope", args_.q_rope);
    g_.k = launch_.Input("k", args_.k), g_.k_rope = launch_.Input("k_rope", args_.k_rope);
    g_.v = launch_.Input("v", args_.v);
    g_.out = launch_.Input("out", args_.out), g_.dout = launch_.Input("dout", args_.dout);
    g_.lse = launch_.Input("lse", AsColumns(args_.lse));
    g_.dq = launch_.Output("dq", args_.dq), g_.dk = launch_.Output("dk", args_.dk);
    g_.dv = launch_.Output("dv", args_.dv);
    g_.dq_rope = launch_.Output("dq_rope", args_.dq_rope);
    g_.dk_rope = launch_.Output("dk_rope", args_.dk_rope);
    static_cast<ScoreOperands&>(g_) = AddScoreOperands(launch_, args_, s_);
    g_.dbias = launch_.Output("dbias", args_.dbias);
    if (args_.dsinks.given()) {
      g_.sinks = launch_.Input("sinks", args_.sinks), g_.dsinks = launch_.Output("dsinks", args_.dsinks);
    }
  }

  // Whether a row may see no key, though there are some. A bias may be -inf.
  bool MayHideRows() const {
    if (s_.mask || s_.bias) return true;
    for (std::int64_t i = 0; i < schedule_->sequences(); ++i) {
      const AttentionSequence x = schedule_->Sequence(i);
      if (x.sq == 0 || x.skv == 0) continue;
      // A band moves along with the rows.
      for (const Range row : {Range{0, 1}, Range{x.sq - 1, x.sq}}) {
        if (x.band.Seen(row, {0, x.skv}).empty()) return true;
      }
    }
    return false;
  }
  void LeaveOutUnseen() {
    if (!MayHideRows()) return;
    std::vector<SeenRows> list;
    const auto leave_out = [&](const char* name, const GmTensor*& rows) {
      list.push_back({rows, WorkspaceLike(name, *rows)});
      rows = list.back().seen;
    };
    leave_out("dout_seen", g_.dout), leave_out("q_seen", g_.q);
    if (g_.q_rope != nullptr) leave_out("q_rope_seen", g_.q_rope);
    ForAllRows(batches() * s_.heads, args_.q.size(2), std::max({s_.d_v, s_.d_qk, s_.d_rope}),
               [&](auto& core, std::int64_t at_once) {
                 SeenRowsKernel(core, *g_.lse, std::span<const SeenRows>(list), at_once);
               });
  }

  void PrepareRows() {
    const std::int64_t b = batches(), sq = args_.q.size(2);
    g_.row_lse = Workspace("row_lse", b, s_.heads, sq, 1);
    g_.delta = Workspace("delta", b, s_.heads, sq, 1);
    if (s_.hides()) {
      g_.k_finite = WorkspaceLike("k_finite", *g_.k);
      if (g_.k_rope != nullptr) g_.k_rope_finite = WorkspaceLike("k_rope_finite", *g_.k_rope);
    }
    const std::vector<RowsToTurn> seen = s_.hides() ? SeenKeys(*schedule_) : std::vector<RowsToTurn>();
    // Of keys and their columns, too, where they are copied.
    const std::int64_t rows = s_.hides() ? std::max(sq, args_.k.size(2)) : sq;
    const std::int64_t columns = s_.hides() ? std::max({s_.d_v, s_.d_qk, s_.d_rope}) : s_.d_v;
    ForAllRows(b * s_.heads, rows, columns, [&](auto& core, std::int64_t at_once) {
      FlashAttentionGradRowsKernel(core, g_, s_, *schedule_, at_once);
      if (!s_.hides()) return;
      FiniteRowsKernel(core, *g_.k, *g_.k_finite, seen, at_once);
      if (g_.k_rope != nullptr) FiniteRowsKernel(core, *g_.k_rope, *g_.k_rope_finite, seen, at_once);
    });
  }

  // Rope parts turned to their positions, once for all that read them.
  void TurnRows() {
    g_.k_rope_unseen = g_.k_rope;
    if (!rotate()) return;
    rotations_ = AddRotations(launch_, args_.rope, batches());
    const std::vector<TurnedTensor> tensors = {
        {rotations_.of_keys, g_.k_rope, WorkspaceLike("k_turned", *g_.k_rope), SeenKeys(*schedule_)},
        {rotations_.of_queries, g_.q_rope, WorkspaceLike("q_turned", *g_.q_rope), QueriesToTurn(*schedule_)}};
    g_.k_rope = tensors[0].turned, g_.q_rope = tensors[1].turned;
    TurnTensors<T>(launch_, tensors);
  }

  void AddWorkspaces() {
    const std::int64_t b = batches(), sq = args_.q.size(2), skv = args_.k.size(2);
    g_.dq_parts = Workspace("dq_parts", t_.chunks, b * s_.heads, sq, s_.d_qk);
    if (!t_.keep_sums) {
      g_.dk_sums = Workspace("dk_sums", b, s_.kv_heads, skv, s_.d_qk);
      g_.dv_sums = Workspace("dv_sums", b, s_.kv_heads, skv, s_.d_v);
    }
    if (args_.q_rope.given()) {
      g_.dq_rope_parts = Workspace("dq_rope_parts", t_.chunks, b * s_.heads, sq, s_.d_rope);
      if (!t_.keep_sums || rotate() || shared_rope())
        g_.dk_rope_sums = Workspace("dk_rope_sums", b, s_.kv_heads, skv, s_.d_rope);
    }
    if (s_.dbias) AddBiasParts();
  }

  // Where every pair of a query and a key has an element of its own, what no step computes is 0 beforehand.
  void AddBiasParts() {
    const auto& sizes = g_.dbias->sizes;
    const bool one_row = sizes[2] == 1 && s_.sq != 1, one_column = sizes[3] == 1 && s_.skv != 1;
    const bool summed = s_.shared_batches || s_.shared_heads || one_row || one_column;
    if (!summed && !s_.band.bounded() && !s_.mask && !args_.lengths.given()) return;
    if (summed) {
      const std::int64_t parts = one_column ? t_.chunks * launch_.chip().vector_per_cube : 1;
      g_.dbias_parts = Workspace("dbias_parts", parts, sizes[0] * sizes[1], sizes[2], sizes[3]);
    }
    const GmTensor& zeros = summed ? *g_.dbias_parts : *g_.dbias;
    ForAllRows(zeros.sizes[0] * zeros.sizes[1], zeros.sizes[2], kBiasColumns,
               [&](auto& core, std::int64_t at_once) { FillZeroKernel(core, zeros, at_once, kBiasColumns); });
  }

  void PackQueries() {
    if (!t_.pack_queries) return;
    const std::vector<PackedRows> rows =
        args_.lengths.given() ? QueriesToPack(sequences_) : std::vector<PackedRows>();
    SequencePacker<T> packer(launch_, Role::kBTransposed, rows, step_);
    g_.q_packed = packer.Add("q_packed", *g_.q, /*transposed=*/false);
    g_.dout_packed = packer.Add("dout_packed", *g_.dout, /*transposed=*/false);
    if (s_.d_rope > 0) g_.q_rope_packed = packer.Add("q_rope_packed", *g_.q_rope, /*transposed=*/false);
    packer.Run();
  }

  void AddUp() {
    auto& [of_queries, of_keys] = rotations_;
    of_queries.inverse = of_keys.inverse = true;
    const float scale = g_.scale;
    const Sum sums[] = {{g_.dq, g_.dq_parts, scale, Sum::Of::kChunks, /*keys=*/false, {}},
                        {g_.dq_rope, g_.dq_rope_parts, scale, Sum::Of::kChunks, /*keys=*/false, of_queries},
                        {g_.dk, g_.dk_sums, scale, Sum::Of::kOne, /*keys=*/true, {}},
                        {g_.dk_rope, g_.dk_rope_sums, scale, shared_rope() ? Sum::Of::kHeads : Sum::Of::kOne,
                         /*keys=*/true, of_keys},
                        {g_.dv, g_.dv_sums, 1.0f, Sum::Of::kOne, /*keys=*/true, {}}};
    std::vector<Sum> wanted;
    std::int64_t rows = 0;
    for (const Sum& sum : sums) {
      if (sum.gradient == nullptr || sum.parts == nullptr) continue;
      const auto& sizes = sum.gradient->sizes;
      wanted.push_back(sum), rows += sizes[0] * sizes[1] * sizes[2];
    }
    const std::span<const Sum> list(wanted);
    const std::int64_t sinks = g_.dsinks == nullptr ? 0 : s_.heads;
    const std::int64_t at_once = RowsAtOnce(launch_.chip(), ColumnsOfSums(list));
    launch_.OnVectorCores(sinks + CeilDiv(rows, at_once), [&](auto& core) {
      RoundRobin share(core.index(), core.count());
      if (sinks > 0) FlashAttentionGradSinksKernel(core, g_, s_, *schedule_, kSinkRows, share);
      FlashAttentionGradSums(core, list, s_, t_, *schedule_, at_once).Run(share);
    });
    if (g_.dbias_parts == nullptr) return;
    const auto& sizes = g_.dbias_parts->sizes;
    ForAllRows(sizes[1], sizes[2], kBiasColumns, [&](auto& core, std::int64_t at_once) {
      FlashAttentionGradBiasKernel(core, *g_.dbias_parts, *g_.dbias, at_once, kBiasColumns);
    });
  }

  static constexpr std::int64_t kBiasColumns = 512, kSinkRows = 512;  // At a time.

  Launch& launch_;
  FlashAttentionGradArgs args_;
  FlashAttentionGradShape s_;
  FlashAttentionGradTiling t_;
  std::int64_t step_ = 1;  // Of rows of packed operands.
  std::vector<AttentionSequence> sequences_;
  std::optional<FlashAttentionGradSchedule> schedule_;
  FlashAttentionGradOperands g_;
  Rotations rotations_;
};

Status RunAny(const Device& device, const FlashAttentionGradArgs& args, Launch& launch) {
  return WithFloatType(args.q.dtype, [&]<class T>(T) { return GradCall<T>(launch, args).Run(device); });
}

}  // namespace

Status FlashAttentionGrad(const Device& device, const FlashAttentionGradArgs& args, Profile* profile) try {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  return RunLaunch(device, kName, args.workspace, profile,
                   [&](Launch& launch) { return RunAny(device, args, launch); });
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

Status FlashAttentionGradWorkspace(const Device& device, const FlashAttentionGradArgs& args,
                                   std::int64_t* bytes) try {
  if (bytes == nullptr) return InvalidArgument(std::string(kName) + " workspace: bytes is null");
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  return MeasureLaunch(
      device, kName, [&](Launch& launch) { return RunAny(device, args, launch); }, bytes);
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

}  // namespace cubist
