// Choose: the cheapest tiling that fits, or why none does. The same for every kernel.
#ifndef CUBIST_TILING_CHOOSE_H_
#define CUBIST_TILING_CHOOSE_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/status.h"
#include "tiling/memo.h"

namespace cubist {

// Whether a tiling takes no more of any buffer than there is. need(buffer) is in bytes.
template <class Need>
bool FitsBuffers(const ChipSpec& chip, Need need) {
  for (int b = 0; b < kBufferCount; ++b) {
    const auto buffer = static_cast<Buffer>(b);
    if (need(buffer) > chip.buffer(buffer).capacity) return false;
  }
  return true;
}

// Names the buffer that the least demanding of `tilings` overflows. need(tiling, buffer) is in bytes.
template <class Tiling, class Need>
Status NothingFits(const ChipSpec& chip, const char* kernel, const std::vector<Tiling>& tilings, Need need) {
  double least = std::numeric_limits<double>::infinity();
  Buffer tightest = Buffer::kL1;
  std::int64_t needed = 0;
  for (const Tiling& tiling : tilings) {
    double worst = 0;
    Buffer worst_buffer = Buffer::kL1;
    for (int b = 0; b < kBufferCount; ++b) {
      const auto buffer = static_cast<Buffer>(b);
      const double share = static_cast<double>(need(tiling, buffer)) /
                           static_cast<double>(std::max<std::int64_t>(chip.buffer(buffer).capacity, 1));
      if (share > worst) worst = share, worst_buffer = buffer;
    }
    if (worst < least) least = worst, tightest = worst_buffer, needed = need(tiling, worst_buffer);
  }
  return {StatusCode::kUnsupported, std::string(kernel) + ": even the smallest tiles need " +
                                        std::to_string(needed) + " bytes of " + NameOf(tightest) + ", " +
                                        chip.name + " has " + std::to_string(chip.buffer(tightest).capacity)};
}

// The cheapest of `tilings` that fits, of equals the first; false where none fits.
template <class Tiling, class Shape>
bool FindCheapest(const ChipSpec& chip, const Shape& shape, const std::vector<Tiling>& tilings,
                  Tiling* cheapest) {
  double best = std::numeric_limits<double>::infinity();
  for (const Tiling& tiling : tilings) {
    if (!Fits(chip, shape, tiling)) continue;
    const double price = Price(chip, shape, tiling);
    if (price < best) best = price, *cheapest = tiling;
  }
  return best < std::numeric_limits<double>::infinity();
}

// Status choose(tiling), whose last answers for the host are remembered: its table lives as long as they do.
template <class Tiling, class Shape, class F>
Status ChooseOnce(const ChipSpec& chip, const Shape& shape, F choose, Tiling* tiling) {
  using Key = std::pair<const ChipSpec*, Shape>;
  thread_local Memo<Key, Tiling> memo;
  const bool memoised = &chip == &HostChip();
  if (const Tiling* known = memoised ? memo.Find({&chip, shape}) : nullptr) {
    *tiling = *known;
    return {};
  }
  if (Status status = choose(tiling); !status.ok()) return status;
  if (memoised) memo.Keep({&chip, shape}, *tiling);
  return {};
}

// The cheapest of the tilings all(chip, shape) that fits.
template <class Tiling, class Shape, class Need>
Status ChooseCheapest(const ChipSpec& chip, const Shape& shape, const char* kernel,
                      std::vector<Tiling> (*all)(const ChipSpec&, const Shape&), Need need, Tiling* tiling) {
  const auto choose = [&](Tiling* cheapest) -> Status {
    const std::vector<Tiling> tilings = all(chip, shape);
    return FindCheapest(chip, shape, tilings, cheapest) ? Status() : NothingFits(chip, kernel, tilings, need);
  };
  return ChooseOnce(chip, shape, choose, tiling);
}

}  // namespace cubist

#endif  // CUBIST_TILING_CHOOSE_H_
