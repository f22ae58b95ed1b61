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
#include "tiling/overflow.h"

namespace cubist {

// Whether a tiling takes no more of any buffer than there is.
template <class Shape, class Tiling>
bool FitsBuffers(const ChipSpec& chip, const Shape& shape, const Tiling& tiling) {
  for (int b = 0; b < kBufferCount; ++b) {
    const auto buffer = static_cast<Buffer>(b);
    if (BufferBytes(chip, shape, tiling, buffer) > chip.buffer(buffer).capacity) return false;
  }
  return true;
}

// Names the buffer that the least demanding of `tilings` overflows.
template <class Shape, class Tiling>
Status NothingFits(const ChipSpec& chip, const Shape& shape, const std::vector<Tiling>& tilings) {
  double least = std::numeric_limits<double>::infinity();
  Overflow tightest;
  for (const Tiling& tiling : tilings) {
    const Overflow worst = WorstOf(chip, shape, tiling);
    if (worst.share < least) least = worst.share, tightest = worst;
  }
  return {StatusCode::kUnsupported, "even the smallest tiles need " + tightest.Text(chip)};
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
  const bool memoised = &chip == &HostChip(chip.concurrent_cores);
  if (const Tiling* known = memoised ? memo.Find({&chip, shape}) : nullptr) {
    *tiling = *known;
    return {};
  }
  if (Status status = choose(tiling); !status.ok()) return status;
  if (memoised) memo.Keep({&chip, shape}, *tiling);
  return {};
}

// The cheapest of the tilings all(chip, shape) that fits.
template <class Tiling, class Shape>
Status ChooseCheapest(const ChipSpec& chip, const Shape& shape,
                      std::vector<Tiling> (*all)(const ChipSpec&, const Shape&), Tiling* tiling) {
  const auto choose = [&](Tiling* cheapest) -> Status {
    const std::vector<Tiling> tilings = all(chip, shape);
    return FindCheapest(chip, shape, tilings, cheapest) ? Status() : NothingFits(chip, shape, tilings);
  };
  return ChooseOnce(chip, shape, choose, tiling);
}

}  // namespace cubist

#endif  // CUBIST_TILING_CHOOSE_H_
