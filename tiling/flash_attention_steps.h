// How attention walks queries and keys: which core takes which block of queries, and which keys its rows meet in turn.
#ifndef CUBIST_TILING_FLASH_ATTENTION_STEPS_H_
#define CUBIST_TILING_FLASH_ATTENTION_STEPS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include "tiling/attention_band.h"
#include "tiling/flash_attention_tiling.h"

namespace cubist {

// Keys that rows of a block of queries walk together.
struct FlashAttentionPiece {
  Range rows, keys;
  bool last = false;  // Of these rows.
};

// How a block of queries `q` walks the keys that it sees. Keys that all its rows see are met by all rows at once. Where
// a mask cuts the block, strips of t.strip rows walk what is left of their keys, so that strip^2 / 2 and not m^2 / 2
// scores are computed in vain at each edge. Rows without keys walk one empty piece. Of two runs of keys the prefix comes
// first, a piece of all rows.
class FlashAttentionPieces {
 public:
  FlashAttentionPieces(const AttentionBand& band, Range q, Range keys, const FlashAttentionTiling& t)
      : band_(band), q_(q), keys_(keys), t_(t) {
    if (band.parted() && keys.begin < std::min(band.prefix, keys.end)) {
      prefix_ = {keys.begin, std::min(RoundUp(band.prefix, t.key_step), keys.end)};
      keys = keys_ = {prefix_.end, keys.end};
      at_ = -1;
    }
    if (band.parted()) band_ = band.WithoutPrefix();
    all_ = Aligned(band_.Seen(q, keys));
    common_ = band_.SeenByAll(q, keys);
    common_ = {std::min(RoundUp(common_.begin, t.key_step), keys.end),
               common_.end == keys.end ? keys.end : common_.end / t.key_step * t.key_step};
    stripped_ = t.strip < q.size() && common_ != all_;
    if (common_.empty()) common_ = {all_.begin, all_.begin};
  }

  bool Next(FlashAttentionPiece& piece) {
    const std::int64_t behind = stripped_ ? 1 + 2 * Split(q_, t_.strip).count() : 1;
    const std::int64_t pieces = !prefix_.empty() && all_.empty() ? 0 : behind;
    for (; at_ < pieces; ++at_) {
      piece = At(at_);
      if (piece.keys.empty() && !piece.last) continue;
      ++at_;
      return true;
    }
    return false;
  }

 private:
  Range Aligned(Range keys) const { return {keys.begin / t_.key_step * t_.key_step, keys.end}; }

  // All rows first; then for every strip its keys before and behind those of all rows. The second of the two is
  // the strip's last unless it alone is empty.
  FlashAttentionPiece At(std::int64_t i) const {
    if (i < 0) return {q_, prefix_, all_.empty()};
    if (!stripped_) return {q_, all_, true};
    if (i == 0) return {q_, common_, false};
    const Range rows = Split(q_, t_.strip)[(i - 1) / 2], seen = Aligned(band_.Seen(rows, keys_));
    const Range before{seen.begin, std::min(seen.end, common_.begin)};
    const Range behind{std::max(seen.begin, common_.end), seen.end};
    const bool only_before = !before.empty() && behind.empty();
    if ((i - 1) % 2 == 0) return {rows, before, only_before};
    return {rows, behind.empty() ? Range{} : behind, !only_before};
  }

  AttentionBand band_;
  Range q_, keys_;
  const FlashAttentionTiling& t_;
  Range prefix_, all_, common_;  // What lies before other keys, those, and what all rows see of them.
  bool stripped_ = false;
  std::int64_t at_ = 0;
};

// The blocks of keys of a piece: as many as t.n asks for, of about one size.
inline Split BlocksOf(Range keys, const FlashAttentionTiling& t) {
  const std::int64_t count = std::max<std::int64_t>(CeilDiv(keys.size(), t.n), 1);
  return AtLeastOnce(Split(keys, std::min(RoundUp(CeilDiv(keys.size(), count), t.key_step), t.n)));
}

// The blocks of queries of a call, the most expensive first. Sequences that are alike need no list.
//
// With t.kv_splits > 1 the keys that a sequence sees are walked in parts, each a task of its own: so many parts of the
// longest sequence, and as many of that size as others have keys for.
class FlashAttentionSchedule {
 public:
  struct Task {
    std::int64_t sequence = 0, head = 0, split = 0;
    Range q;
  };

  // `sequences` is empty where each of s.batches entries is one sequence of s.sq rows and s.skv keys under s.band.
  FlashAttentionSchedule(const FlashAttentionShape& s, const FlashAttentionTiling& t,
                         std::span<const AttentionSequence> sequences)
      : s_(s), t_(t), sequences_(sequences) {
    SetPartKeys();
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      const auto number = static_cast<std::int64_t>(i), parts = PartsOf(number);
      parts_begin_.push_back(part_rows_);
      if (parts > 1) part_rows_ += parts * sequences[i].sq;
      for (const Range q : Split(sequences[i].sq, t.m)) {
        for (std::int64_t split = 0; split < parts; ++split) {
          const Task task{number, 0, split, q};
          ragged_.push_back({task, q.size() * sequences[i].band.Seen(q, KeysOf(task)).size()});
        }
      }
    }
    std::stable_sort(ragged_.begin(), ragged_.end(),
                     [](const Item& x, const Item& y) { return x.scores > y.scores; });
    if (!sequences.empty()) return;
    SetOrder();
    alike_parts_ = s.batches > 0 ? PartsOf(0) : 1;
    if (alike_parts_ > 1) part_rows_ = s.batches * alike_parts_ * s.sq;
  }

  // Cores that work through a list of tasks together: those of the KV heads `kv` of all sequences.
  struct Team {
    Range kv;
    std::int64_t index = 0, cores = 1;  // This core, and how many there are.
  };
  // The team of core `index` of `count`. With t.by_head there are as many of one size as KV heads can be dealt to evenly.
  Team TeamOf(int index, int count) const {
    const std::int64_t kv = sequences_.empty() ? s_.batches * s_.kv_heads : s_.kv_heads;
    const std::int64_t apart = t_.by_head && sequences_.empty() ? std::gcd(kv, count) : 1;
    const std::int64_t teams = std::max<std::int64_t>(apart, 1);
    const std::int64_t cores = std::max<std::int64_t>(count / teams, 1);
    const auto member = [&](std::int64_t team, std::int64_t i) {
      return Team{{team * (kv / teams), (team + 1) * (kv / teams)}, i, cores};
    };
    if (teams == 1 || count != tasks()) {
      const Team team = member(index / cores, index % cores);
      if (!t_.by_head || !sequences_.empty() || !LastHasMore(team)) return team;
      return member(index / cores, cores - 1 - index % cores);
    }
    // Tasks that begin in the order of their cores: the cheapest block of queries of all heads behind the others, so that
    // whoever works on them ends at about the same time.
    const std::int64_t late = cores / static_cast<std::int64_t>(order_.size()), early = cores - late,
                       behind = index - teams * early;
    return behind < 0 ? member(index / early, index % early) : member(behind / late, early + behind % late);
  }

  std::int64_t tasks() const {
    if (!sequences_.empty()) return static_cast<std::int64_t>(ragged_.size()) * s_.heads;
    return s_.batches * s_.heads * t_.query_blocks(s_) * alike_parts_;
  }
  std::int64_t sequences() const {
    return sequences_.empty() ? s_.batches : static_cast<std::int64_t>(sequences_.size());
  }
  AttentionSequence Sequence(std::int64_t i) const {
    if (!sequences_.empty()) return sequences_[static_cast<std::size_t>(i)];
    return {.batch = i, .sq = s_.sq, .skv = s_.skv, .band = s_.band};
  }
  // The i-th task of a team, if it has as many. With t.by_keys, and on a core alone, those of a KV head follow each other.
  std::optional<Task> At(const Team& team, std::int64_t i) const {
    if (i >= TasksOf(team)) return {};
    const std::int64_t blocks = Blocks(), group = Group();
    const std::int64_t split = i % alike_parts_;
    i /= alike_parts_;
    const std::int64_t member = i % group;
    i /= group;
    const bool by_kv = team.cores == 1 || t_.by_keys;
    const std::int64_t kv = team.kv.begin + (by_kv ? i / blocks : i % team.kv.size());
    const std::int64_t block = by_kv ? i % blocks : i / team.kv.size();
    Task task;
    if (!sequences_.empty()) {
      task = ragged_[static_cast<std::size_t>(block)].task;
    } else {
      task.sequence = kv / s_.kv_heads, task.split = split;
      task.q = Split(s_.sq, t_.m)[order_[static_cast<std::size_t>(block)]];
    }
    task.head = kv % s_.kv_heads * group + member;
    return task;
  }
  // The keys of a task: its part of those that its sequence sees.
  Range KeysOf(const Task& task) const {
    if (PartsOf(task.sequence) == 1) return {0, Sequence(task.sequence).skv};
    return Split(SeenBlocks(Sequence(task.sequence)), part_keys_)[task.split];
  }

  // What any row of a sequence sees, from the beginning of a block on.
  Range SeenBlocks(const AttentionSequence& sequence) const {
    const Range seen = sequence.band.Seen({0, sequence.sq}, {0, sequence.skv});
    return {seen.begin / t_.key_step * t_.key_step, seen.end};
  }
  // Of the keys of sequence i, at least one.
  std::int64_t PartsOf(std::int64_t i) const {
    return t_.kv_splits == 1 ? 1 : AtLeastOnce(Split(SeenBlocks(Sequence(i)), part_keys_)).count();
  }
  // Rows of a head's outputs of parts, of all sequences that have several: those of a sequence one part behind the other.
  std::int64_t part_rows() const { return part_rows_; }
  std::int64_t PartRow(std::int64_t sequence, std::int64_t part) const {
    if (sequences_.empty()) return (sequence * alike_parts_ + part) * s_.sq;
    const auto i = static_cast<std::size_t>(sequence);
    return parts_begin_[i] + part * sequences_[i].sq;
  }
  // Of a step of a task.
  template <class Step>
  void SetPart(Step& step) const {
    step.parts = PartsOf(step.task.sequence);
    step.part_row = PartRow(step.task.sequence, step.task.split);
  }

 private:
  struct Item {
    Task task;
    std::int64_t scores = 0;
  };

  // Blocks of queries of a head, of all sequences in a list, and heads of queries that share one of keys.
  std::int64_t Blocks() const {
    return sequences_.empty() ? t_.query_blocks(s_) : static_cast<std::int64_t>(ragged_.size());
  }
  std::int64_t Group() const { return s_.heads / std::max<std::int64_t>(s_.kv_heads, 1); }
  std::int64_t TasksOf(const Team& team) const { return alike_parts_ * Group() * team.kv.size() * Blocks(); }

  // Where the mask is causal, later rows see more keys. What remains of the rows is a block of few: behind the others it evens
  // out when cores end.
  void SetOrder() {
    const Split blocks(s_.sq, t_.m);
    const auto scores = [&](std::int64_t block) {
      return blocks[block].size() * s_.band.Seen(blocks[block], {0, s_.skv}).size();
    };
    for (std::int64_t block = t_.query_blocks(s_); block-- > 0;) order_.push_back(block);
    std::stable_sort(order_.begin(), order_.end(),
                     [&](std::int64_t x, std::int64_t y) { return scores(x) > scores(y); });
  }

  // Whether dealing a team's tasks forth and back leaves its last core with more of them than its first one: then the last one
  // is to begin first, as cores do in the order of their numbers where threads are few. Else whoever takes the last one works on
  // two blocks of queries when all others have ended. The last rounds tell: those before come in pairs that hardly differ.
  bool LastHasMore(const Team& team) const {
    const auto scores = [&](std::int64_t i) {
      const auto task = At(team, i);
      return task ? task->q.size() * Sequence(task->sequence).band.Seen(task->q, KeysOf(*task)).size() : 0;
    };
    constexpr std::int64_t kLastRounds = 16;
    const std::int64_t rounds = CeilDiv(TasksOf(team), team.cores);
    std::int64_t first = 0, last = 0;
    for (std::int64_t round = std::max<std::int64_t>(rounds - kLastRounds, 0) / 2 * 2; round < rounds;
         ++round) {
      const std::int64_t begin = round * team.cores, end = begin + team.cores;
      const bool forth = round % 2 == 0;
      first += scores(forth ? begin : end - 1), last += scores(forth ? end - 1 : begin);
    }
    return last > first;
  }

  void SetPartKeys() {
    std::int64_t longest = 1;
    for (std::int64_t i = 0; i < (sequences_.empty() ? 1 : sequences()); ++i)
      longest = std::max(longest, SeenBlocks(Sequence(i)).size());
    part_keys_ = RoundUp(CeilDiv(longest, t_.kv_splits), t_.key_step);
  }

  const FlashAttentionShape& s_;
  const FlashAttentionTiling& t_;
  std::span<const AttentionSequence> sequences_;
  std::int64_t part_keys_ = 1, part_rows_ = 0;
  std::int64_t alike_parts_ = 1;     // Of each sequence, where there is no list.
  std::vector<std::int64_t> order_;  // Of blocks of queries, likewise.
  std::vector<Item> ragged_;
  std::vector<std::int64_t> parts_begin_;
};

// A block of keys for rows of a block of queries. Rows and keys count from the start of their sequence.
struct FlashAttentionStep {
  FlashAttentionSchedule::Task task;
  AttentionSequence sequence;
  Range rows, kv;
  std::int64_t round = 0;            // How many steps these rows went before.
  bool first = false, last = false;  // The first of the block of queries; the last of these rows.
  std::int64_t parts = 1;            // Of the sequence's keys,
  std::int64_t part_row = 0;         // and where the outputs of the task's part begin; see PartRow.

  Range rows_in_block() const { return {rows.begin - task.q.begin, rows.end - task.q.begin}; }
};

// The steps of core `index` of `count`. Tasks are dealt forth and back among the cores of a team, so that nobody always
// gets the longer one.
class FlashAttentionSteps {
 public:
  FlashAttentionSteps(const FlashAttentionSchedule& schedule, const FlashAttentionTiling& t, int index,
                      int count)
      : schedule_(schedule), t_(t), team_(schedule.TeamOf(index, count)) {}

  bool Next(FlashAttentionStep& step) {
    return Next(step, [](const auto&, const auto&, Range, const Split& blocks, std::int64_t i) {
      return SeenKeys{i, blocks[i]};
    });
  }
  // first_seen(task, sequence, rows, blocks, i): of blocks of keys that `rows` walk the first from the i-th on that a mask
  // does not hide whole, and what of it they meet; blocks.count() where there is none. Rows whose last piece is hidden end
  // with an empty block.
  template <class FirstSeen>
  bool Next(FlashAttentionStep& step, FirstSeen&& first_seen) {
    const auto find = [&](std::int64_t i) {
      at_ = piece_.keys.empty() ? SeenKeys{i, {}} : first_seen(task_, sequence_, piece_.rows, blocks_, i);
    };
    while (at_.block == blocks_.count()) {
      if (!NextPiece()) return false;
      blocks_ = BlocksOf(piece_.keys, t_);
      find(0);
      if (at_.block < blocks_.count() || !piece_.last) continue;
      blocks_ = BlocksOf(Range{}, t_), at_ = {};
      piece_.keys = {};
    }
    step.task = task_, step.sequence = sequence_;
    schedule_.SetPart(step);
    step.rows = piece_.rows, step.kv = at_.keys;
    step.round = round_++;
    step.first = first_, first_ = false;
    find(at_.block + 1);
    step.last = piece_.last && at_.block == blocks_.count();
    return true;
  }

 private:
  bool NextPiece() {
    const Range before = piece_.rows;
    if (pieces_ && piece_.rows == task_.q) common_rounds_ = round_;
    while (!pieces_ || !pieces_->Next(piece_)) {
      const std::int64_t in_turn = dealt_ % 2 == 0 ? team_.index : team_.cores - 1 - team_.index;
      const auto task = schedule_.At(team_, dealt_ * team_.cores + in_turn);
      if (!task) return false;
      ++dealt_;
      task_ = *task, sequence_ = schedule_.Sequence(task_.sequence);
      pieces_.emplace(sequence_.band, task_.q, schedule_.KeysOf(task_), t_);
      first_ = true, common_rounds_ = round_ = 0;
    }
    if (piece_.rows != before) round_ = common_rounds_;
    return true;
  }

  const FlashAttentionSchedule& schedule_;
  const FlashAttentionTiling& t_;
  FlashAttentionSchedule::Team team_;
  std::int64_t dealt_ = 0;
  FlashAttentionSchedule::Task task_;
  AttentionSequence sequence_;
  std::optional<FlashAttentionPieces> pieces_;
  FlashAttentionPiece piece_;
  Split blocks_ = Split(0, 1);
  SeenKeys at_;
  std::int64_t round_ = 0, common_rounds_ = 0;
  bool first_ = false;
};

// The steps of a few rows at a time, which see the same keys: those and no others, so that nothing hidden is read.
class FlashAttentionRowSteps {
 public:
  FlashAttentionRowSteps(const FlashAttentionSchedule& schedule, const FlashAttentionTiling& t,
                         std::span<const FlashAttentionSchedule::Task> rows)
      : schedule_(schedule), t_(t), rows_(rows) {}

  // seen(task, sequence, keys): the first of `keys`, one behind the other, that a mask shows to the rows; empty for none.
  // The last step of rows is one without keys.
  template <class Seen>
  bool Next(FlashAttentionStep& step, Seen&& seen) {
    if (at_ == rows_.size()) return false;
    step.task = rows_[at_], step.sequence = schedule_.Sequence(step.task.sequence);
    step.rows = step.task.q;
    schedule_.SetPart(step);
    if (round_ == 0) keys_ = step.sequence.band.Seen(step.rows, schedule_.KeysOf(step.task));
    Range run;
    while (!keys_.empty() && run.empty()) {
      Range part = step.sequence.band.FirstRun(step.rows, keys_);
      if (part.empty()) break;
      part.end = std::min(part.begin + t_.n, part.end);
      run = seen(step.task, step.sequence, part);
      keys_.begin = run.empty() ? part.end : run.end;
    }
    step.kv = run;
    step.first = round_ == 0, step.round = round_++;
    step.last = run.empty();
    if (step.last) ++at_, round_ = 0;
    return true;
  }

 private:
  const FlashAttentionSchedule& schedule_;
  const FlashAttentionTiling& t_;
  std::span<const FlashAttentionSchedule::Task> rows_;
  std::size_t at_ = 0;
  std::int64_t round_ = 0;
  Range keys_;
};

}  // namespace cubist

#endif  // CUBIST_TILING_FLASH_ATTENTION_STEPS_H_
