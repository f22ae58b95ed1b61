// ChooseFor: the tiling of a call, the cheapest by price with what the device's tuning says otherwise.
#ifndef CUBIST_KERNELS_CHOOSE_FOR_H_
#define CUBIST_KERNELS_CHOOSE_FOR_H_

#include <algorithm>
#include <string>
#include <vector>

#include "npu_model/device.h"
#include "npu_model/status.h"
#include "npu_model/tuning.h"
#include "tiling/fields.h"

namespace cubist {

// Fields that `text` leaves out keep what `tiling` holds. A host computes with the tilings that Choose considers
// alone: its instructions read tiles in place, and take only what those promise. An NPU takes any tiling within
// the limits of its fields.
template <class Shape, class Tiling>
Status TakeTuned(const ChipSpec& chip, const Shape& shape, const std::string& text,
                 std::vector<Tiling> (*candidates)(const ChipSpec&, const Shape&), Tiling* tiling) {
  CUBIST_RETURN_IF_ERROR(ParseTiling(chip, shape, text, tiling));
  if (chip.pipes_overlap) return {};
  const std::vector<Tiling> all = candidates(chip, shape);
  if (std::find(all.begin(), all.end(), *tiling) != all.end()) return {};
  return InvalidArgument("is none of the " + std::to_string(all.size()) + " that this machine computes with");
}

template <class Shape, class Tiling>
Status ChooseFor(const Device& device, const char* kernel, const Shape& shape,
                 std::vector<Tiling> (*candidates)(const ChipSpec&, const Shape&), Tiling* tiling) {
  const ChipSpec& chip = device.chip();
  const Tuning* tuning = device.tuning();
  const std::string* tuned = tuning == nullptr ? nullptr : tuning->Find(kernel, chip.name, ShapeText(shape));
  const Status cheapest = Choose(chip, shape, tiling);
  if (tuned == nullptr) {
    if (!cheapest.ok()) return cheapest;
  } else if (const Status status = TakeTuned(chip, shape, *tuned, candidates, tiling); !status.ok()) {
    return InvalidArgument(std::string(kernel) + ": the tuned tiling '" + *tuned + "' for " +
                           ShapeText(shape) + ": " + status.message());
  }
  if (tuning == nullptr || !tuning->on_choice) return {};
  TilingChoice choice{kernel, chip.name, ShapeText(shape), {}, TilingText(chip, shape, *tiling)};
  for (const Tiling& candidate : candidates(chip, shape)) {
    choice.candidates.push_back({TilingText(chip, shape, candidate), Price(chip, shape, candidate)});
  }
  tuning->on_choice(choice);
  return {};
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_CHOOSE_FOR_H_
