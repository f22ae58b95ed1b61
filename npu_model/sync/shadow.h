// Shadow memory: for every byte its last write and the reads since.
#ifndef CUBIST_NPU_MODEL_SYNC_SHADOW_H_
#define CUBIST_NPU_MODEL_SYNC_SHADOW_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

namespace cubist::sync {

inline constexpr std::uint8_t kNobody = 0xff;

// One access: component and its count, and which instruction that was.
struct Epoch {
  std::uint32_t count = 0, instr = 0;
  std::uint8_t component = kNobody;
};

// Bytes with one history.
struct Interval {
  static constexpr std::size_t kMaxReaders = 6;
  std::int64_t begin = 0, end = 0;
  Epoch write;
  std::int32_t slot = -1;  // that the write went through
  std::uint8_t reader_count = 0;
  std::array<Epoch, kMaxReaders> readers;  // since the write, the last of each pipe
};

// Intervals by address, in pages so that inserting stays cheap. They do not overlap; what is not listed was
// never touched.
class Shadow {
 public:
  explicit Shadow(int page_bits) : page_bits_(page_bits) {}

  // Calls visit(interval) for every part of [begin, end), cut to that range; untouched parts come as new
  // intervals. The part may be changed, not its bounds. With `replace`, all parts of a page become one after
  // the visits, a copy of what `visit` left in the last one. `at`, if not null, is where an interval with just
  // these bounds was found last, and is kept up.
  template <class Visit>
  void Walk(std::int64_t begin, std::int64_t end, bool replace, std::size_t* at, Visit visit) {
    while (begin < end) {
      const auto page = static_cast<std::size_t>(begin >> page_bits_);
      const std::int64_t stop = std::min(end, static_cast<std::int64_t>(page + 1) << page_bits_);
      if (pages_.size() <= page) pages_.resize(page + 1);
      WalkPage(pages_[page], begin, stop, replace, at, visit);
      begin = stop;
    }
  }

 private:
  using Page = std::vector<Interval>;

  template <class Visit>
  static void WalkPage(Page& page, std::int64_t begin, std::int64_t end, bool replace, std::size_t* hint,
                       Visit& visit) {
    if (hint != nullptr && *hint < page.size() && page[*hint].begin == begin && page[*hint].end == end)
      return visit(page[*hint]);
    auto at =
        std::partition_point(page.begin(), page.end(), [&](const Interval& i) { return i.end <= begin; });
    if (hint != nullptr) *hint = static_cast<std::size_t>(at - page.begin());
    if (at != page.end() && at->begin == begin && at->end == end) return visit(*at);
    if (at == page.end() || at->begin >= end) {
      Interval fresh;
      fresh.begin = begin, fresh.end = end;
      visit(fresh);
      page.insert(at, fresh);
      return;
    }
    // The general case: the parts are made aside and put in place of what they came from.
    thread_local Page parts;
    parts.clear();
    auto last = at;
    if (at->begin < begin) {
      parts.push_back(*at);
      parts.back().end = begin;
    }
    const std::size_t inside = parts.size();
    std::int64_t from = begin;
    for (; last != page.end() && last->begin < end; ++last) {
      if (last->begin > from) AddFresh(parts, from, last->begin);
      parts.push_back(*last);
      parts.back().begin = std::max(last->begin, from);
      parts.back().end = std::min(last->end, end);
      from = parts.back().end;
    }
    if (from < end) AddFresh(parts, from, end);
    for (std::size_t p = inside; p < parts.size(); ++p) visit(parts[p]);
    if (replace) {
      parts[inside] = parts.back();
      parts[inside].begin = begin, parts[inside].end = end;
      parts.resize(inside + 1);
    }
    if (std::prev(last)->end > end) {
      parts.push_back(*std::prev(last));
      parts.back().begin = end;
    }
    const auto old = static_cast<std::size_t>(last - at);
    const std::size_t common = std::min(old, parts.size());
    at = std::copy_n(parts.begin(), common, at);
    if (parts.size() > old) {
      page.insert(at, parts.begin() + static_cast<std::ptrdiff_t>(common), parts.end());
    } else {
      page.erase(at, last);
    }
  }
  static void AddFresh(Page& parts, std::int64_t begin, std::int64_t end) {
    Interval& fresh = parts.emplace_back();
    fresh.begin = begin, fresh.end = end;
  }

  int page_bits_;
  std::vector<Page> pages_;
};

}  // namespace cubist::sync

#endif  // CUBIST_NPU_MODEL_SYNC_SHADOW_H_
