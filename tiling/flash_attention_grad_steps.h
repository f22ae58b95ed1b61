// How the backward pass of attention walks keys and queries: which core takes which blocks of keys, and which queries
// they meet in turn.
#ifndef CUBIST_TILING_FLASH_ATTENTION_GRAD_STEPS_H_
#define CUBIST_TILING_FLASH_ATTENTION_GRAD_STEPS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tiling/attention_band.h"
#include "tiling/flash_attention_grad_tiling.h"

namespace cubist {

// The tasks of a call, the most expensive first: a chunk of the keys of one sequence and KV head, or of all those whose
// bias is one and the same.
class FlashAttentionGradSchedule {
 public:
  struct Task {
    std::int64_t chunk = 0;
    Range sequences, kv_heads;
  };

  // `sequences` is empty where each of s.batches entries is one sequence of s.sq rows and s.skv keys under s.band.
  FlashAttentionGradSchedule(const FlashAttentionGradShape& s, const FlashAttentionGradTiling& t,
                             std::span<const AttentionSequence> sequences)
      : s_(s), t_(t), sequences_(sequences) {
    const std::int64_t together = s.shared_batches ? std::max<std::int64_t>(this->sequences(), 1) : 1;
    for (const Range some : Split(this->sequences(), together)) {
      for (std::int64_t chunk = 0; chunk < t.chunks; ++chunk) {
        if (!HasKeys(some, chunk)) continue;
        // Sequences that are alike cost as much as the first.
        const bool known = sequences.empty() && some.begin > 0;
        const std::int64_t scores =
            known ? items_[static_cast<std::size_t>(chunk)].scores : Scores(some, chunk);
        items_.push_back({some, chunk, scores});
      }
    }
    std::stable_sort(items_.begin(), items_.end(),
                     [](const Item& x, const Item& y) { return x.scores > y.scores; });
  }

  std::int64_t sequences() const {
    return sequences_.empty() ? s_.batches : static_cast<std::int64_t>(sequences_.size());
  }
  AttentionSequence Sequence(std::int64_t i) const {
    if (!sequences_.empty()) return sequences_[static_cast<std::size_t>(i)];
    return {.batch = i, .sq = s_.sq, .skv = s_.skv, .band = s_.band};
  }
  // The blocks of keys of a sequence, which its chunks take in turn.
  Split KeyBlocks(const AttentionSequence& sequence) const { return {sequence.skv, t_.n}; }
  // Of its query rows those that see any of the keys, in whole strips.
  Range Seeing(const AttentionSequence& sequence, Range keys) const {
    return s_.group() > 0 ? SeeingQueries(sequence.band, keys, sequence.sq, t_.strip) : Range{};
  }

  std::int64_t tasks() const { return static_cast<std::int64_t>(items_.size()) * shares(); }
  Task At(std::int64_t i) const {
    const auto items = static_cast<std::int64_t>(items_.size());
    const bool by_head = t_.by_head && sequences_.empty();  // Chunks of like sequences cost about the same.
    const Item& item = items_[static_cast<std::size_t>(by_head ? i % items : i / shares())];
    const std::int64_t head = by_head ? i / items : i % shares();
    return {item.chunk, item.sequences, s_.shared_heads ? Range{0, s_.kv_heads} : Range{head, head + 1}};
  }

 private:
  struct Item {
    Range sequences;
    std::int64_t chunk = 0, scores = 0;
  };
  std::int64_t shares() const {
    return s_.shared_heads ? std::min<std::int64_t>(s_.kv_heads, 1) : s_.kv_heads;
  }
  bool HasKeys(Range sequences, std::int64_t chunk) const {
    for (std::int64_t i = sequences.begin; i < sequences.end; ++i) {
      if (chunk < KeyBlocks(Sequence(i)).count()) return true;
    }
    return false;
  }
  std::int64_t Scores(Range sequences, std::int64_t chunk) const {
    std::int64_t scores = 0;
    for (std::int64_t i = sequences.begin; i < sequences.end; ++i) {
      const AttentionSequence sequence = Sequence(i);
      const Split blocks = KeyBlocks(sequence);
      for (std::int64_t block = chunk; block < blocks.count(); block += t_.chunks)
        scores += blocks[block].size() * Seeing(sequence, blocks[block]).size();
    }
    return scores;
  }

  const FlashAttentionGradShape& s_;
  const FlashAttentionGradTiling& t_;
  std::span<const AttentionSequence> sequences_;
  std::vector<Item> items_;
};

// A block of keys and a piece of a block of queries, on their way through the stages. Keys and queries count from the
// start of their sequence.
struct FlashAttentionGradStep {
  AttentionSequence sequence;
  std::int64_t sequence_index = 0, kv_head = 0, h = 0, chunk = 0;
  Range key_block;                               // A block of keys,
  Range keys;                                    // and what of it any of `block` sees.
  Range block, queries;                          // A block of queries, and the piece of it.
  bool first_block = false, last_block = false;  // Of queries, for the block of keys.
  bool adds = false;    // An earlier block of keys of the chunk has given these queries a part of dQ.
  bool hidden = false;  // A mask hides all keys from the block, whose part of dQ begins here all the same.

  Range Piece() const { return queries.From(block.begin); }
  Range KeysInBlock() const { return keys.From(key_block.begin); }
  bool first_of_block() const { return queries.begin == block.begin; }
  bool last_of_block() const { return queries.end == block.end; }
  bool first_of_keys() const { return first_block && first_of_block(); }
  // As rows of GM.
  Range QueryRows(Range rows) const { return rows.From(-sequence.q_begin); }
  Range KeyRows(Range rows) const { return rows.From(-sequence.kv_begin); }
};

// The steps of core `index` of `count`. Tasks are dealt forth and back; in a task the sequences and KV heads, of each the
// blocks of keys of the chunk in ascending order, for each the query heads of the group, and of each the queries that see
// the block from the last to the first, so that the first ones see all of its keys, in narrow blocks where the mask
// cuts it. A block of keys that no query sees is one step without queries. Blocks of queries that a mask hides whole are
// left out, but for those that no earlier block of keys has given a part of dQ.
class FlashAttentionGradSteps {
 public:
  FlashAttentionGradSteps(const FlashAttentionGradSchedule& schedule, const FlashAttentionGradShape& s,
                          const FlashAttentionGradTiling& t, int index, int count)
      : schedule_(schedule), s_(s), t_(t), index_(index), count_(count), at_{s.group(), {}} {}

  bool Next(FlashAttentionGradStep& step) {
    return Next(step, [](std::int64_t, std::int64_t, Range, Range keys) { return std::optional(keys); });
  }
  // seen_of(sequence, head, queries, keys): what a mask leaves of the keys to the queries, or nothing where it hides all.
  template <class SeenOf>
  bool Next(FlashAttentionGradStep& step, SeenOf&& seen_of) {
    const auto sees = [&](const Place& at) {
      return seen_of(at_sequence_, HeadOf(at), at.block, SeenBy(at.block));
    };
    while (piece_ == at_.block.end && !NextBlock(sees)) {
      if (unseen_) break;
      if (!NextKeys()) return false;
      FindSeeing(at_, sees);
      unseen_ = seeing_.head == s_.group();
    }
    step.sequence = sequence_, step.sequence_index = at_sequence_;
    step.kv_head = kv_head_, step.chunk = task_.chunk;
    step.h = HeadOf(at_);
    step.key_block = keys_, step.keys = seen_, step.block = at_.block;
    step.queries = {piece_, std::min(piece_ + t_.piece(), at_.block.end)};
    step.adds = step.queries.begin < written_;
    step.hidden = hidden_;
    step.first_block = !hidden_ && first_block_;
    step.last_block = !hidden_ && seeing_.head == s_.group();
    piece_ = step.queries.end;
    if (step.queries.empty()) unseen_ = false;
    if (!hidden_ && step.last_of_block()) first_block_ = false;
    return true;
  }

 private:
  // A block of queries of a head of the group.
  struct Place {
    std::int64_t head = 0;
    Range block;
    friend bool operator==(const Place&, const Place&) = default;
  };

  std::int64_t HeadOf(const Place& at) const {
    return kv_head_ * s_.group() +
           std::clamp<std::int64_t>(at.head, 0, std::max<std::int64_t>(s_.group() - 1, 0));
  }

  bool NextTask() {
    const std::int64_t task = dealt_ * count_ + (dealt_ % 2 == 0 ? index_ : count_ - 1 - index_);
    if (task >= schedule_.tasks()) return false;
    ++dealt_;
    task_ = schedule_.At(task);
    at_sequence_ = task_.sequences.begin, kv_head_ = task_.kv_heads.begin;
    return true;
  }
  // The next sequence and KV head of the task, or of the next one.
  bool NextItem() {
    if (task_.kv_heads.empty() ||
        (++kv_head_ == task_.kv_heads.end && ++at_sequence_ == task_.sequences.end)) {
      if (!NextTask()) return false;
    } else if (kv_head_ == task_.kv_heads.end) {
      kv_head_ = task_.kv_heads.begin;
    }
    sequence_ = schedule_.Sequence(at_sequence_);
    key_block_ = task_.chunk;
    return true;
  }

  bool NextKeys() {
    key_block_ += t_.chunks;
    while (key_block_ >= schedule_.KeyBlocks(sequence_).count()) {
      if (!NextItem()) return false;
    }
    const Split blocks = schedule_.KeyBlocks(sequence_);
    const AttentionBand& band = sequence_.band;
    keys_ = blocks[key_block_];
    queries_ = schedule_.Seeing(sequence_, keys_);
    // Rows before this see an earlier block of the chunk, too: the one before this, or the first, of a prefix.
    written_ = 0;
    if (key_block_ != task_.chunk) {
      for (const std::int64_t earlier : {task_.chunk, key_block_ - t_.chunks})
        written_ = std::max(written_, schedule_.Seeing(sequence_, blocks[earlier]).end);
    }
    // From this row on they see all keys, as far as causal order goes.
    full_ = band.prefix >= keys_.end
                ? 0
                : RoundUp(std::max<std::int64_t>(keys_.end - 1 - band.highest, 0), t_.strip);
    at_ = {queries_.empty() ? s_.group() : -1, {queries_.begin, queries_.begin}};
    piece_ = at_.block.end;
    first_block_ = true;
    return true;
  }

  // The block of queries before this one, or the last of the next head; behind the last of those head group().
  bool Before(Place& at) const {
    std::int64_t end = at.block.begin;
    if (end == queries_.begin) {
      at.block = {end, end};
      if (at.head >= s_.group() || ++at.head >= s_.group()) return false;
      end = queries_.end;
    }
    const std::int64_t width = end > full_ ? t_.m() : t_.strip;
    at.block = {std::max((end - 1) / width * width, queries_.begin), end};
    for (const std::int64_t border : {full_, written_}) {
      if (at.block.begin < border && border < end) at.block.begin = border;
    }
    return true;
  }
  // The next place behind `at` that sees keys, and which.
  template <class Sees>
  void FindSeeing(Place at, Sees& sees) {
    std::optional<Range> keys;
    while (!keys && Before(at)) keys = sees(at);
    seeing_ = at, seeing_keys_ = keys.value_or(Range{});
  }
  // Of the block of keys what any query of a block sees.
  Range SeenBy(Range block) const {
    const AttentionBand& band = sequence_.band;
    return {keys_.begin, std::clamp(std::max(block.end + band.highest, band.prefix), keys_.begin, keys_.end)};
  }
  // The next block of queries that is walked. The first one that sees keys meets all of them, so that their sums start, but
  // where sums that are kept may start from nothing.
  template <class Sees>
  bool NextBlock(Sees& sees) {
    while (Before(at_)) {
      hidden_ = at_ != seeing_;
      if (hidden_ && at_.block.begin < written_) continue;
      piece_ = at_.block.begin;
      const bool starts = first_block_ && (t_.mask_step == 0 || !t_.keep_sums);
      seen_ = starts ? keys_ : hidden_ ? SeenBy(at_.block) : seeing_keys_;
      if (!hidden_) FindSeeing(at_, sees);
      return true;
    }
    hidden_ = false, piece_ = at_.block.end, seen_ = keys_;
    return false;
  }

  const FlashAttentionGradSchedule& schedule_;
  const FlashAttentionGradShape& s_;
  const FlashAttentionGradTiling& t_;
  std::int64_t index_, count_, dealt_ = 0;
  FlashAttentionGradSchedule::Task task_;
  std::int64_t at_sequence_ = 0, kv_head_ = 0, key_block_ = 0;
  AttentionSequence sequence_;
  Range keys_, queries_, seen_;
  Place at_, seeing_;  // Where the walk is, and the next place that sees keys: these.
  Range seeing_keys_;
  std::int64_t piece_ = 0, written_ = 0, full_ = 0;
  bool first_block_ = true, hidden_ = false;
  bool unseen_ = false;  // No place sees the keys, which have a step yet.
};

}  // namespace cubist

#endif  // CUBIST_TILING_FLASH_ATTENTION_GRAD_STEPS_H_
