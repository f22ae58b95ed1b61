// The model's counts of attention and its gradient against closed forms of the kernels' loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention_sequences.h"
#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"
#include "kernels/rotate_kernel.h"
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/traffic.h"
#include "tests/support/shapes.h"
#include "tiling/flash_attention_grad_steps.h"
#include "tiling/flash_attention_grad_tiling.h"
#include "tiling/flash_attention_steps.h"
#include "tiling/flash_attention_tiling.h"

namespace cubist::testing {
namespace {

struct AttentionCase {
  AttentionShape shape;
  DType in = DType::kBF16, out = DType::kBF16;
  Causal causal = Causal::kNone;
  bool one_rope_head = false;
  bool lse = true;
  std::int64_t mask_heads = 0;  // 0: no mask.
  std::optional<AttentionWindow> window = {};
  std::vector<std::int64_t> prefix = {}, q_ends = {}, kv_ends = {};
  bool bias = false, turned = false;
  float keep = 1;

  FlashAttentionArgs args() const {
    const auto& [batch, heads, kv_heads, sq, skv, dqk, dr, dv] = shape;
    FlashAttentionArgs args;
    args.q = ConstTensor(nullptr, in, {batch, heads, sq, dqk});
    args.k = ConstTensor(nullptr, in, {batch, kv_heads, skv, dqk});
    args.v = ConstTensor(nullptr, in, {batch, kv_heads, skv, dv});
    if (dr > 0) {
      args.q_rope = ConstTensor(nullptr, in, {batch, heads, sq, dr});
      args.k_rope = ConstTensor(nullptr, in, {batch, rope_heads(), skv, dr});
    }
    const ConstTensor angles(nullptr, DType::kF32, {std::max(sq, skv), dr / 2});
    if (turned) args.rope = {.cos = angles, .sin = angles};
    args.out = Tensor(nullptr, out, {batch, heads, sq, dv});
    if (lse) args.lse = Tensor(nullptr, DType::kF32, {batch, heads, sq});
    if (mask_heads > 0) args.mask = ConstTensor(nullptr, DType::kBool, {batch, mask_heads, sq, skv});
    if (bias) args.bias = ConstTensor(nullptr, in, {batch, heads, sq, skv});
    args.causal = causal, args.window = window, args.prefix = prefix, args.lengths = {q_ends, kv_ends};
    args.dropout.keep = keep;
    return args;
  }
  std::int64_t rope_heads() const { return shape.dr == 0 ? 0 : one_rope_head ? 1 : shape.kv_heads; }

  // Those of the call's list, which is empty where each batch entry is one under the same band.
  std::vector<AttentionSequence> List() const {
    return SequencesOf(causal, window, prefix, {q_ends, kv_ends}, shape.sq, shape.skv, 1);
  }
  std::vector<AttentionSequence> Sequences() const {
    std::vector<AttentionSequence> all = List();
    for (std::int64_t b = 0; all.size() < static_cast<std::size_t>(shape.batch); ++b) {
      all.push_back({.batch = b,
                     .sq = shape.sq,
                     .skv = shape.skv,
                     .band = BandOf(causal, window, shape.sq, shape.skv)});
    }
    return all;
  }
  // What both passes' tilings are chosen by.
  template <class Shape>
  Shape TilingShape() const {
    Shape s;
    s.batches = shape.batch, s.heads = shape.q_heads, s.kv_heads = shape.kv_heads,
    s.rope_heads = rope_heads();
    s.sq = shape.sq, s.skv = shape.skv, s.d_qk = shape.dqk, s.d_rope = shape.dr, s.d_v = shape.dv, s.in = in;
    if (!q_ends.empty()) {
      s.batches = std::ssize(q_ends), s.sq = s.skv = 0;
      for (const AttentionSequence& x : List()) s.sq = std::max(s.sq, x.sq), s.skv = std::max(s.skv, x.skv);
    }
    const std::int64_t most = prefix.empty() ? 0 : *std::max_element(prefix.begin(), prefix.end());
    s.band = BandOf(causal, window, s.sq, s.skv, most);
    s.bias = bias, s.mask = mask_heads > 0, s.dropout = keep < 1;
    return s;
  }
  std::string Name() const {
    return Join(shape.Name(), " ", NameOf(in), mask_heads > 0 ? " mask" : "", window ? " window" : "",
                prefix.empty() ? "" : " prefix", q_ends.empty() ? "" : " packed", bias ? " bias" : "",
                turned ? " turned" : "");
  }
};

std::vector<AttentionCase> AttentionCases() {
  constexpr DType kHalf = DType::kF16, kFloat = DType::kF32;
  const AttentionWindow behind{.left = 200}, around{.left = 30, .right = 70, .anchor = Causal::kTopLeft};
  return {
      {.shape = {1, 2, 2, 512, 512, 128, 0, 128}},
      {.shape = {1, 4, 4, 512, 600, 128, 64, 128}, .causal = Causal::kBottomRight},
      {.shape = {2, 6, 3, 333, 257, 40, 24, 72},
       .in = kHalf,
       .out = kFloat,
       .causal = Causal::kTopLeft,
       .one_rope_head = true},
      {.shape = {1, 8, 1, 3, 1015, 64, 0, 64}, .out = kFloat},
      {.shape = {1, 2, 1, 300, 100, 33, 0, 17},
       .in = kFloat,
       .out = kFloat,
       .causal = Causal::kBottomRight,
       .lse = false},
      {.shape = {1, 1, 1, 70, 0, 16, 0, 24}},
      {.shape = {3, 2, 2, 129, 1031, 192, 0, 128}, .in = kHalf, .out = kHalf, .lse = false},
      {.shape = {2, 2, 1, 300, 290, 64, 0, 80}, .causal = Causal::kBottomRight, .mask_heads = 1},
      {.shape = {2, 1, 1, 128, 1024, 512, 64, 512}, .one_rope_head = true},
      {.shape = {1, 2, 1, 90, 150, 576, 0, 512}, .in = kFloat, .out = kFloat, .causal = Causal::kBottomRight},
      // Windows; some keys are seen by no row.
      {.shape = {1, 2, 1, 600, 1100, 64, 32, 80}, .causal = Causal::kBottomRight, .window = behind},
      {.shape = {2, 2, 2, 500, 450, 128, 0, 128}, .in = kHalf, .out = kFloat, .window = around, .keep = 0.5f},
      // Prefixes, of each entry its own; with keys between them and the window.
      {.shape = {2, 2, 1, 300, 520, 40, 24, 72}, .causal = Causal::kTopLeft, .prefix = {130, 0}},
      {.shape = {2, 2, 1, 700, 800, 64, 0, 64},
       .in = kHalf,
       .out = kHalf,
       .causal = Causal::kBottomRight,
       .window = behind,
       .prefix = {70, 400}},
      // Packed, an empty sequence among them, and rows behind the last.
      {.shape = {1, 4, 2, 700, 900, 64, 32, 64},
       .causal = Causal::kBottomRight,
       .one_rope_head = true,
       .q_ends = {170, 170, 230, 650},
       .kv_ends = {100, 350, 400, 880}},
      {.shape = {1, 2, 2, 500, 900, 64, 0, 64},
       .out = kFloat,
       .q_ends = {200, 500},
       .kv_ends = {300, 900},
       .keep = 0.9f},
      // A mask for each head; biases.
      {.shape = {2, 4, 2, 300, 700, 64, 0, 80}, .mask_heads = 4},
      {.shape = {2, 2, 1, 300, 420, 64, 0, 80}, .bias = true},
      {.shape = {1, 2, 2, 500, 520, 64, 0, 64},
       .in = kFloat,
       .out = kFloat,
       .causal = Causal::kBottomRight,
       .bias = true},
      // Rope turned; keys that no query sees are not, and heads of one matrix are beforehand.
      {.shape = {2, 4, 2, 300, 290, 64, 32, 80}, .turned = true},
      {.shape = {1, 2, 1, 400, 1100, 64, 64, 128},
       .in = kHalf,
       .out = kHalf,
       .causal = Causal::kBottomRight,
       .one_rope_head = true,
       .window = behind,
       .turned = true},
      {.shape = {1, 4, 2, 600, 900, 64, 16, 64}, .q_ends = {200, 550}, .kv_ends = {300, 900}, .turned = true},
      {.shape = {1, 8, 1, 3, 1015, 64, 32, 64}, .out = kFloat, .turned = true}};
}

// To know what a mask hides it is read once, whatever it serves, flags of 16384 pairs of up to 32 rows at a time;
// each cell of rows gets counts before each key and one behind the keys of each time.
void AddHiddenCounts(const AttentionCase& x, std::int64_t cell, Traffic& traffic) {
  const auto& [batch, heads, kv_heads, sq, skv, dqk, dr, dv] = x.shape;
  if (x.mask_heads == 0) return;
  const std::int64_t keys_at_once = 16384 / std::min({cell, sq, std::int64_t{32}});
  traffic[Path::kGmToUb] += batch * x.mask_heads * sq * skv;
  traffic[Path::kUbToGm] += batch * x.mask_heads * CeilDiv(sq, cell) * (skv + CeilDiv(skv, keys_at_once)) * 4;
}
// Rows of the rope parts are turned once: each is read and written. Tiles of rows are dealt to cores in runs, where the heads
// of the same rows follow each other; each core reads the cosines and sines of its rows in fp32 once for all of them.
struct TurnedPart {
  std::int64_t heads = 0, rows = 0;
};
struct TurnedParts {
  std::vector<TurnedPart> queries, keys;
};
void AddTurned(const ChipSpec& chip, const AttentionCase& x, const TurnedParts& parts, Traffic& traffic) {
  if (!x.turned) return;
  std::int64_t rows = 0;
  for (const auto* tensor : {&parts.queries, &parts.keys}) {
    for (const TurnedPart& part : *tensor) rows += part.heads * part.rows;
  }
  traffic[Path::kGmToUb] += rows * x.shape.dr * SizeOf(x.in);
  traffic[Path::kUbToGm] += rows * x.shape.dr * SizeOf(x.in);
  const std::int64_t half = x.shape.dr / 2;
  const std::int64_t at_once = RowsTurnedAtOnce(chip, x.in, SecondHalfInUb(chip, half) + half, rows);
  const std::int64_t cores =
      std::min<std::int64_t>(CeilDiv(rows, at_once), chip.cube_cores * chip.vector_per_cube);
  for (const auto* tensor : {&parts.queries, &parts.keys}) {
    std::vector<std::pair<std::int64_t, bool>> tiles;  // Their rows, and whether these are new to their core.
    for (const TurnedPart& part : *tensor) {
      for (const Range some : Split(part.rows, at_once)) {
        for (std::int64_t head = 0; head < part.heads; ++head) tiles.emplace_back(some.size(), head == 0);
      }
    }
    const auto count = static_cast<std::int64_t>(tiles.size());
    for (std::int64_t core = 0; core < cores && count > 0; ++core)
      tiles[static_cast<std::size_t>(count * core / cores)].second = true;
    for (const auto& [size, loads] : tiles) traffic[Path::kGmToUb] += loads ? size * x.shape.dr * 4 : 0;
  }
}

// What a piece fetches to know which of its blocks a mask hides, some blocks at a time: counts at both ends of each.
std::int64_t HiddenCountsFetched(const FlashAttentionShape& s, const FlashAttentionTiling& t,
                                 const FlashAttentionPiece& piece) {
  std::int64_t counts = 0;
  for (const Range some : Split(BlocksOf(piece.keys, t).count(), kHiddenCounts - 1))
    counts += some.size() + 1;
  return counts * CeilDiv(piece.rows.size(), t.mask_cell(s)) * 4;
}

FlashAttentionShape ForwardShape(const AttentionCase& x) {
  auto s = x.TilingShape<FlashAttentionShape>();
  s.out = x.out;
  if (s.sq <= 16 && s.heads > s.kv_heads) {  // Heads that share keys are rows of one.
    s.band.fold = s.heads / s.kv_heads;
    s.heads = s.kv_heads, s.sq *= s.band.fold;
  }
  return s;
}

// The bytes of one head of a sequence: Q in and O out once, and what each block of keys asks for.
class ForwardTraffic {
 public:
  ForwardTraffic(const AttentionCase& x, const FlashAttentionShape& s, const FlashAttentionTiling& t)
      : x_(x), s_(s), t_(t) {}

  void AddHead(const AttentionSequence& sequence) {
    const auto& [batch, heads, kv_heads, sq, skv, dqk, dr, dv] = x_.shape;
    for (const Range q : Split(sequence.sq, t_.m)) {
      ++tasks;
      traffic[Path::kGmToL1Nd2Nz] += q.size() * (dqk + dr) * SizeOf(x_.in);
      traffic[Path::kUbToGm] += q.size() * (dv * SizeOf(x_.out) + (x_.lse ? 4 : 0));
      FlashAttentionPieces pieces(sequence.band, q, {0, sequence.skv}, t_);
      for (FlashAttentionPiece piece; pieces.Next(piece);) {
        if (s_.mask && !piece.keys.empty()) traffic[Path::kGmToUb] += HiddenCountsFetched(s_, t_, piece);
        for (const Range keys : BlocksOf(piece.keys, t_)) AddBlock(piece.rows.size(), keys.size());
      }
    }
  }
  // All queries, and the keys that any of them sees, from the beginning of a block on.
  void AddTurnedRows(const ChipSpec& chip, const std::vector<AttentionSequence>& sequences) {
    TurnedParts parts;
    for (const AttentionSequence& x : sequences) {
      const Range seen = x.band.Seen({0, x.sq}, {0, x.skv});
      parts.keys.push_back({x_.rope_heads(), seen.end - seen.begin / t_.key_step * t_.key_step});
      parts.queries.push_back({x_.shape.q_heads, x.sq});
    }
    AddTurned(chip, x_, parts, traffic);
  }

  std::int64_t macs = 0, tasks = 0;
  Traffic traffic;

 private:
  void AddBlock(std::int64_t rows, std::int64_t keys) {
    const auto& [batch, heads, kv_heads, sq, skv, dqk, dr, dv] = x_.shape;
    const std::int64_t d_scores = dqk + dr, e = SizeOf(x_.in);
    macs += rows * keys * (d_scores + dv);
    // K and V, and P on its way back; S, PV and P handed over. A step without keys hands over PV = 0.
    traffic[Path::kGmToL1Nd2Nz] += (keys * (d_scores + dv) + rows * keys) * e;
    traffic[Path::kL0CToGm] += rows * (keys + dv) * 4;
    traffic[Path::kGmToUb] += rows * (keys + dv) * 4;
    traffic[Path::kUbToGm] += rows * keys * e;
    // The mask's flags and the bias of each pair. Dropout's are made where they are used.
    traffic[Path::kGmToUb] += rows * keys * ((s_.mask ? 1 : 0) + (s_.bias ? e : 0));
    for (std::int64_t d : {dqk, dr}) {
      for (const Range k0 : Split(d, t_.k0)) {
        traffic[Path::kL1ToL0A] += FractalBytes(rows, k0.size(), x_.in);
        traffic[Path::kL1ToL0B] += FractalBytes(k0.size(), keys, x_.in);
      }
    }
    for (const Range cols : Split(dv, t_.v_cols(dv))) {
      for (const Range k0 : Split(keys, t_.k0)) {
        traffic[Path::kL1ToL0A] += FractalBytes(rows, k0.size(), x_.in);
        traffic[Path::kL1ToL0B] += FractalBytes(k0.size(), cols.size(), x_.in);
      }
    }
  }

  const AttentionCase& x_;
  const FlashAttentionShape& s_;
  const FlashAttentionTiling& t_;
};

TEST(TrafficTest, FlashAttention) {
  for (const ChipSpec* chip : {&Ascend910B2(), &Ascend910B4()}) {
    for (const AttentionCase& x : AttentionCases()) {
      SCOPED_TRACE(x.Name() + " " + chip->name);
      const FlashAttentionShape shape = ForwardShape(x);
      FlashAttentionTiling t;
      Profile profile;
      ASSERT_TRUE(IsOk(FlashAttention(NpuThatTells(*chip, shape, &t), x.args(), &profile)));
      ASSERT_EQ(t.kv_splits, 1);
      ExpectSane(*chip, profile);

      ForwardTraffic expected(x, shape, t);
      std::vector<AttentionSequence> sequences = x.Sequences();
      expected.AddTurnedRows(*chip, sequences);
      AddHiddenCounts(x, t.mask_cell(shape), expected.traffic);
      for (AttentionSequence& sequence : sequences) {
        sequence.band.fold = shape.band.fold, sequence.sq *= shape.band.fold;
        for (std::int64_t head = 0; head < shape.heads; ++head) expected.AddHead(sequence);
      }
      EXPECT_EQ(profile.macs, expected.macs);
      // Where Vector cores have work before, more of them may have it.
      const auto cores = static_cast<int>(std::min<std::int64_t>(expected.tasks, chip->cube_cores));
      EXPECT_GE(profile.cores_used, cores);
      if (!x.turned && x.mask_heads == 0) {
        EXPECT_EQ(profile.cores_used, cores);
      }
      ExpectTraffic(profile, expected.traffic);
      EXPECT_GT(profile.workspace_bytes, 0);
    }
  }
}

// As of the forward pass, but without a mask under a band: its counts are fetched anew for each block at the diagonal.
std::vector<AttentionCase> GradCases() {
  std::vector<AttentionCase> cases = AttentionCases();
  for (AttentionCase& x : cases) {
    if (x.causal != Causal::kNone) x.mask_heads = 0;
  }
  return cases;
}

FlashAttentionGradArgs GradArgsOf(const AttentionCase& x) {
  const auto& [batch, heads, kv_heads, sq, skv, dqk, dr, dv] = x.shape;
  const FlashAttentionArgs f = x.args();
  FlashAttentionGradArgs args;
  args.q = f.q, args.k = f.k, args.v = f.v, args.q_rope = f.q_rope, args.k_rope = f.k_rope;
  args.out = f.out, args.dout = ConstTensor(nullptr, x.in, {batch, heads, sq, dv});
  args.lse = ConstTensor(nullptr, DType::kF32, {batch, heads, sq});
  args.dq = Tensor(nullptr, x.out, {batch, heads, sq, dqk});
  args.dk = Tensor(nullptr, x.out, {batch, kv_heads, skv, dqk});
  args.dv = Tensor(nullptr, x.out, {batch, kv_heads, skv, dv});
  if (dr > 0) {
    args.dq_rope = Tensor(nullptr, x.out, {batch, heads, sq, dr});
    args.dk_rope = Tensor(nullptr, x.out, {batch, x.rope_heads(), skv, dr});
  }
  args.mask = f.mask, args.bias = f.bias, args.rope = f.rope, args.dropout = f.dropout;
  if (x.bias) args.dbias = Tensor(nullptr, x.out, {batch, heads, sq, skv});
  args.causal = f.causal, args.window = f.window, args.prefix = f.prefix, args.lengths = f.lengths;
  return args;
}

// The bytes of the products' phase, step by step, and of the rows before and the sums after it.
class GradTraffic {
 public:
  GradTraffic(const ChipSpec& chip, const AttentionCase& x, const FlashAttentionGradShape& s,
              const FlashAttentionGradTiling& t)
      : chip_(chip), x_(x), s_(s), t_(t), e_(SizeOf(x.in)), list_(x.List()), schedule_(s_, t_, list_) {
    AddRows();
    AddHiddenCounts(x_, t_.mask_cell(s_), traffic);
    FlashAttentionGradSteps steps(schedule_, s_, t_, 0, 1);
    for (FlashAttentionGradStep step; steps.Next(step);) AddStep(step);
    AddSums();
  }

  std::int64_t macs = 0;
  Traffic traffic;

 private:
  // Of each head the query rows that belong to sequences, and their keys: all, and in whole blocks those from the
  // first to the last that a row sees.
  struct Rows {
    std::int64_t queries = 0, keys = 0, seen = 0;
    TurnedParts turned;
    bool hidden = false;  // The first or the last row of a sequence sees no key.
  };
  Rows RowsOfSequences() const {
    Rows rows;
    for (const AttentionSequence& x : x_.Sequences()) {
      rows.queries += x.sq, rows.keys += x.skv;
      for (const std::int64_t row : {std::int64_t{0}, x.sq - 1})
        rows.hidden |= x.sq > 0 && x.skv > 0 && x.band.Seen({row, row + 1}, {0, x.skv}).empty();
      Range seen{x.skv, 0};
      for (const Range keys : Split(x.skv, t_.n)) {
        if (SeeingQueries(x.band, keys, x.sq, t_.strip).empty()) continue;
        seen = {std::min(seen.begin, keys.begin), std::max(seen.end, keys.end)};
      }
      rows.seen += std::max<std::int64_t>(seen.size(), 0);
      if (!seen.empty()) rows.turned.keys.push_back({x_.rope_heads(), seen.size()});
      rows.turned.queries.push_back({x_.shape.q_heads, x.sq});
    }
    return rows;
  }
  void AddRows() {
    const auto& [batch, heads, kv_heads, sq, skv, dqk, dr, dv] = x_.shape;
    const Rows rows = RowsOfSequences();
    traffic[Path::kGmToUb] += heads * rows.queries * (dv * (SizeOf(x_.out) + e_) + 4);
    traffic[Path::kUbToGm] += heads * rows.queries * 2 * 4;
    if (rows.hidden || s_.mask || s_.bias) {  // Copies of q and dout where rows may see no key.
      const std::int64_t all = batch * heads * sq, copies = all * (dqk + dr + dv) * e_;
      traffic[Path::kGmToUb] += copies + all * 4, traffic[Path::kUbToGm] += copies;
    }
    AddTurned(chip_, x_, rows.turned, traffic);
    if (s_.hides()) {  // A copy of k.
      const std::int64_t keys = rows.seen * (kv_heads * dqk + x_.rope_heads() * dr) * e_;
      traffic[Path::kGmToUb] += keys, traffic[Path::kUbToGm] += keys;
    }
    // Which blocks a mask hides: counts at both ends of each block of keys, of all rows of a head.
    if (s_.mask)
      traffic[Path::kGmToUb] += batch * heads * t_.key_blocks(s_) * CeilDiv(sq, t_.mask_cell(s_)) * 2 * 4;
    if (s_.bias && s_.hides())  // Pairs of no step.
      traffic[Path::kUbToGm] += batch * heads * sq * skv * SizeOf(x_.out);
  }
  // (rows, k) times (k, cols), `k` in steps of k0.
  void AddProduct(std::int64_t rows, std::int64_t k, std::int64_t cols, bool turn_a, bool turn_b) {
    macs += rows * k * cols;
    for (const Range k0 : Split(k, t_.k0)) {
      traffic[Path::kL1ToL0A] +=
          turn_a ? FractalBytes(k0.size(), rows, x_.in) : FractalBytes(rows, k0.size(), x_.in);
      traffic[Path::kL1ToL0B] +=
          turn_b ? FractalBytes(cols, k0.size(), x_.in) : FractalBytes(k0.size(), cols, x_.in);
    }
  }
  // The same by the columns that are made at a time, whose accumulators go to GM.
  void AddGradient(std::int64_t rows, std::int64_t k, std::int64_t cols, bool turn_a) {
    for (const Range part : Split(cols, t_.cols_at_once(cols)))
      AddProduct(rows, k, part.size(), turn_a, false);
    traffic[Path::kL0CToGm] += rows * cols * 4;
  }
  void AddStep(const FlashAttentionGradStep& step) {
    const auto& [batch, heads, kv_heads, sq, skv, dqk, dr, dv] = x_.shape;
    const std::int64_t keys = step.keys.size(), queries = step.queries.size(), block = step.block.size();
    if (step.first_of_keys()) {  // Where keys may be hidden dQ meets the copy of k.
      const bool apart = s_.hides() && !step.block.empty();
      traffic[Path::kGmToL1Nd2Nz] += keys * ((dqk + dr) * (apart ? 2 : 1) + dv) * e_;
    }
    if (step.first_of_block()) traffic[Path::kGmToL1Nd2Nz] += block * (dqk + dr + dv) * e_;
    for (std::int64_t d : {dqk, dr, dv}) AddProduct(keys, d, queries, false, true);
    // S and dP handed over, p and ds handed back; lse and delta, once for each Vector core that has keys.
    traffic[Path::kL0CToGm] += 2 * keys * queries * 4;
    traffic[Path::kGmToUb] += 2 * keys * queries * 4;
    traffic[Path::kUbToGm] += 2 * keys * queries * e_;
    traffic[Path::kGmToL1Nd2Nz] += 2 * keys * queries * e_;
    traffic[Path::kGmToUb] += (keys > CeilDiv(t_.n, 2) ? 2 : 1) * 2 * queries * 4;
    // The mask's flags and the bias of each pair, and the latter's gradient.
    traffic[Path::kGmToUb] += keys * queries * ((s_.mask ? 1 : 0) + (s_.bias ? e_ : 0));
    traffic[Path::kUbToGm] += s_.dbias ? keys * queries * SizeOf(x_.out) : 0;
    for (std::int64_t d : {dqk, dr}) {
      if (queries > 0) AddGradient(queries, keys, d, true);
    }
    if (!step.last_of_block()) return;
    for (std::int64_t d : {dqk, dr, dv}) AddGradient(keys, block, d, false);  // No sum is kept in L0C.
  }
  void AddSums() {
    const auto& [batch, heads, kv_heads, sq, skv, dqk, dr, dv] = x_.shape;
    const std::int64_t out = SizeOf(x_.out);
    const Rows rows = RowsOfSequences();
    // Of dQ the rows of each chunk that see any of its keys; of a shared head of k_rope every KV head's part.
    std::int64_t parts = 0;
    for (const AttentionSequence& x : x_.Sequences()) {
      const Split blocks(x.skv, t_.n);
      for (std::int64_t chunk = 0; chunk < t_.chunks; ++chunk) {
        std::int64_t done = 0;
        for (std::int64_t i = chunk; i < blocks.count(); i += t_.chunks) {
          const Range seeing = SeeingQueries(x.band, blocks[i], x.sq, t_.strip);
          parts += std::max<std::int64_t>(seeing.end - std::max(seeing.begin, done), 0);
          done = std::max(done, seeing.end);
        }
      }
    }
    traffic[Path::kGmToUb] += heads * parts * (dqk + dr) * 4;
    traffic[Path::kUbToGm] += heads * rows.queries * (dqk + dr) * out;
    traffic[Path::kGmToUb] += kv_heads * rows.keys * (dqk + dr + dv) * 4;
    traffic[Path::kUbToGm] += rows.keys * (kv_heads * (dqk + dv) + x_.rope_heads() * dr) * out;
    if (x_.turned)  // And turned back, by their cosines and sines.
      traffic[Path::kGmToUb] += (heads * rows.queries + x_.rope_heads() * rows.keys) * dr * 4;
  }

  const ChipSpec& chip_;
  const AttentionCase& x_;
  const FlashAttentionGradShape& s_;
  const FlashAttentionGradTiling& t_;
  std::int64_t e_;
  std::vector<AttentionSequence> list_;
  FlashAttentionGradSchedule schedule_;
};

TEST(TrafficTest, FlashAttentionGrad) {
  for (const ChipSpec* chip : {&Ascend910B2(), &Ascend910B4()}) {
    for (const AttentionCase& x : GradCases()) {
      SCOPED_TRACE(x.Name() + " " + chip->name);
      auto s = x.TilingShape<FlashAttentionGradShape>();
      s.dbias = x.bias;
      FlashAttentionGradTiling t;
      Profile profile;
      ASSERT_TRUE(IsOk(FlashAttentionGrad(NpuThatTells(*chip, s, &t), GradArgsOf(x), &profile)));
      ASSERT_FALSE(t.keep_sums);
      EXPECT_EQ(t.width > 0,
                x.shape.dqk > 512 && x.in == DType::kF32);  // Only where L0B has no room for all columns.
      ExpectSane(*chip, profile);
      const GradTraffic expected(*chip, x, s, t);
      EXPECT_EQ(profile.macs, expected.macs);
      ExpectTraffic(profile, expected.traffic);
      // The sums' fp32 copies at least, which are linear in the length.
      const auto& [batch, heads, kv_heads, sq, skv, dqk, dr, dv] = x.shape;
      const std::int64_t keys = batch * kv_heads * skv, rows = batch * heads * sq;
      const std::int64_t sums = 4 * (keys * (dqk + dr + dv) + rows * (t.chunks * (dqk + dr) + 2));
      EXPECT_GE(profile.workspace_bytes, sums);
    }
  }
}

}  // namespace
}  // namespace cubist::testing
