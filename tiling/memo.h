// Memo: a thread's last answers of a tiling choice, so that choosing costs nothing when shapes repeat.
#ifndef CUBIST_TILING_MEMO_H_
#define CUBIST_TILING_MEMO_H_

#include <array>
#include <cstddef>
#include <optional>
#include <utility>

namespace cubist {

template <class Key, class Value>
class Memo {
 public:
  const Value* Find(const Key& key) const {
    for (const auto& entry : entries_) {
      if (entry && entry->first == key) return &entry->second;
    }
    return nullptr;
  }
  void Keep(const Key& key, Value value) {
    entries_[next_] = std::pair(key, std::move(value));
    next_ = (next_ + 1) % entries_.size();
  }

 private:
  std::array<std::optional<std::pair<Key, Value>>, 16> entries_{};
  std::size_t next_ = 0;
};

}  // namespace cubist

#endif  // CUBIST_TILING_MEMO_H_
