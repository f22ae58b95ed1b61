// ChooseFor: the tiling of a call: the cheapest by price, on an NPU the quickest by replay of the cheapest few, with what
// the device's tuning says otherwise.
#ifndef CUBIST_KERNELS_CHOOSE_FOR_H_
#define CUBIST_KERNELS_CHOOSE_FOR_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "npu_model/device.h"
#include "npu_model/profile.h"
#include "npu_model/status.h"
#include "npu_model/tuning.h"
#include "npu_model/types.h"
#include "tiling/fields.h"
#include "tiling/short_list.h"

namespace cubist {

// Fields that `text` leaves out keep what `tiling` holds. A host computes with the tilings that Choose considers
// alone, for any number of its cores: its instructions read tiles in place, and take only what those promise. An NPU takes any
// tiling within the limits of its fields.
template <class Shape, class Tiling>
Status TakeTuned(const ChipSpec& chip, const Shape& shape, const std::string& text,
                 std::vector<Tiling> (*candidates)(const ChipSpec&, const Shape&), Tiling* tiling) {
  CUBIST_RETURN_IF_ERROR(ParseTiling(chip, shape, text, tiling));
  if (chip.pipes_overlap) return {};
  const auto considers = [&](const std::vector<Tiling>& all) {
    return std::find(all.begin(), all.end(), *tiling) != all.end();
  };
  const std::vector<Tiling> all = candidates(chip, shape);
  if (considers(all)) return {};
  for (int cores = 1; cores <= HostChip().concurrent_cores; ++cores) {
    if (considers(candidates(HostChip(cores), shape))) return {};
  }
  return InvalidArgument("is none of the " + std::to_string(all.size()) + " that this machine computes with");
}

// body(0) .. body(count - 1), on the threads of the caller's arena; ForEach of parallel.h without oneTBB for those who
// include this.
CUBIST_EXPORT void SideBySide(std::size_t count, const std::function<void(std::size_t)>& body);

// What a choice hangs on, as bytes.
class CUBIST_EXPORT ChoiceKey {
 public:
  template <class T>
  requires std::is_arithmetic_v<T> || std::is_enum_v<T>
  void Add(T value) { bytes_.append(reinterpret_cast<const char*>(&value), sizeof value); }
  void Add(const std::string& text) { bytes_.append(text).push_back('\0'); }
  void Add(std::span<const std::int64_t> values);
  // But not where it is.
  void Add(const ConstTensor& tensor);
  // All that a price or a replay reads of it.
  void Add(const ChipSpec& chip);

  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// Choices that took replays, of all threads, each a tiling whose type the key names: as many as a run of a model has shapes. Null
// where there is none.
CUBIST_EXPORT std::shared_ptr<const void> FindChoice(const ChoiceKey& key);
CUBIST_EXPORT void KeepChoice(const ChoiceKey& key, std::shared_ptr<const void> tiling);

// Seconds of calls on a chip, one for each of `seconds`, side by side: replay(device, i, &profile) makes call i without data.
// One that takes longer than `known`, or than one that has ended, is given up.
CUBIST_EXPORT Status
ReplayCalls(const ChipSpec& chip, double known,
            const std::function<Status(const Device& device, std::size_t i, Profile* profile)>& replay,
            std::span<double> seconds);

// Stands for the replay of calls whose tiling the price alone decides on.
struct NoReplay {};

// The quickest by replay of the tilings that their price leaves open. `replay(device, tiling, &profile)` makes the call with
// a tiling, replay.AddTo(&key) says what of the call bears on its time besides the shape. Replay::kFamilies limits the
// replays of one tiling of each family, Replay::kWalks those of the best one's others, and of what differs from the best of
// them in a step alone, where the kernel has such; their `work` is ReplayWork. The flags are
// minimal ones whatever the call's, so that a call keeps its tiling where they alone differ.
template <class Shape, class Tiling, class Replay>
class ChoiceByReplay {
 public:
  ChoiceByReplay(const ChipSpec& chip, const Shape& shape, const Replay& replay)
      : chip_(chip), shape_(shape), replay_(replay) {}

  // Of `all`, and of what they lead to where `allow` does: at least one.
  template <class Allow>
  Status Run(std::vector<Tiling> all, const Allow& allow, Tiling* tiling) {
    constexpr ShortListLimits kFamilies = Replay::kFamilies, kWalks = Replay::kWalks;
    const PricedTilings<Tiling> priced(chip_, shape_, std::move(all), SideBySide);
    const auto work = [&](const Tiling& t) { return ReplayWork(shape_, t); };
    std::vector<Tiling> list = ShortList(
        priced, kFamilies, [](const Tiling& t) { return FamilyOf(t); }, work,
        [](const Tiling&) { return true; });
    *tiling = list.front();
    if (priced.size() == 1 || (list.size() == 1 && work(list.front()) > std::max(kWalks.work, kWalks.alone)))
      return {};
    CUBIST_RETURN_IF_ERROR(Try(std::move(list), tiling));
    const auto best = FamilyOf(*tiling);
    CUBIST_RETURN_IF_ERROR(Try(ShortList(
                                   priced, kWalks, [](const Tiling& t) { return WalkOf(t); }, work,
                                   [&](const Tiling& t) { return FamilyOf(t) == best; }),
                               tiling));
    if constexpr (requires { StepOf(*tiling); }) {
      CUBIST_RETURN_IF_ERROR(Try(ShortList(
                                     priced, kWalks, [](const Tiling& t) { return StepOf(t); }, work,
                                     [&](const Tiling& t) { return DifferInStepAlone(t, *tiling); }),
                                 tiling));
    }
    list = OtherOrders(*tiling);
    std::erase_if(list, [&](const Tiling& t) { return !allow(t); });
    return Try(std::move(list), tiling);
  }

 private:
  Status Try(std::vector<Tiling> tilings, Tiling* best) {
    std::erase_if(
        tilings, [&](const Tiling& t) { return std::find(tried_.begin(), tried_.end(), t) != tried_.end(); });
    std::vector<double> seconds(tilings.size());
    const auto replay = [&](const Device& device, std::size_t i, Profile* profile) {
      return replay_(device, tilings[i], profile);
    };
    CUBIST_RETURN_IF_ERROR(ReplayCalls(chip_, least_, replay, seconds));
    for (std::size_t i = 0; i < tilings.size(); ++i) {
      tried_.push_back(tilings[i]);
      if (seconds[i] < least_) least_ = seconds[i], *best = tilings[i];
    }
    return {};
  }

  const ChipSpec& chip_;
  const Shape& shape_;
  const Replay& replay_;
  std::vector<Tiling> tried_;
  double least_ = std::numeric_limits<double>::infinity();
};

// Whether a text names all fields of a tiling.
template <class Tiling, class Shape>
bool NamesAll(const ChipSpec& chip, const Shape& shape, const std::string& text) {
  const auto fields = [](const std::string& t) { return std::count(t.begin(), t.end(), '='); };
  return fields(text) >= fields(TilingText(chip, shape, Tiling()));
}

// The cheapest; where nothing fits, the kernel's error.
template <class Shape, class Tiling>
Status ChooseAs(const char* kernel, const ChipSpec& chip, const Shape& shape, Tiling* tiling) {
  const Status status = Choose(chip, shape, tiling);
  return status.ok() ? status : Status(status.code(), std::string(kernel) + ": " + status.message());
}

// What a call takes on an NPU: of the candidates with the fields that `given` names; where there are none, the cheapest.
template <class Shape, class Tiling, class Replay>
Status ChooseOnNpu(const ChipSpec& chip, const char* kernel, const Shape& shape, const std::string* given,
                   std::vector<Tiling> (*candidates)(const ChipSpec&, const Shape&), const Replay& replay,
                   Tiling* tiling) {
  constexpr bool kReplays = !std::is_same_v<Replay, NoReplay>;
  // A text of all fields may stand on any tiling.
  const bool any_serves = given != nullptr && NamesAll<Tiling>(chip, shape, *given);
  ChoiceKey key;
  if constexpr (kReplays) {
    key.Add(typeid(Tiling).name()), key.Add(chip), key.Add(kernel), key.Add(ShapeText(shape));
    key.Add(given == nullptr || any_serves ? std::string() : *given);
    replay.AddTo(&key);
    if (const std::shared_ptr<const void> known = FindChoice(key)) {
      *tiling = *static_cast<const Tiling*>(known.get());
      return {};
    }
  }
  if (any_serves || (given == nullptr && !kReplays)) return ChooseAs(kernel, chip, shape, tiling);
  const auto has_given = [&](const Tiling& t) {
    Tiling changed = t;
    return given == nullptr || (ParseTiling(chip, shape, *given, &changed).ok() && changed == t);
  };
  std::vector<Tiling> all = candidates(chip, shape);
  std::erase_if(all, [&](const Tiling& t) { return !has_given(t); });
  if (all.empty()) return ChooseAs(kernel, chip, shape, tiling);  // Which says why, if nothing fits at all.
  if constexpr (kReplays) {
    CUBIST_RETURN_IF_ERROR(
        (ChoiceByReplay<Shape, Tiling, Replay>(chip, shape, replay).Run(std::move(all), has_given, tiling)));
    KeepChoice(key, std::make_shared<const Tiling>(*tiling));
  } else {
    *tiling = PricedTilings<Tiling>(chip, shape, std::move(all), SideBySide)[0];
  }
  return {};
}

// Numbers the families of tilings as they are met; all tilings of a kernel that knows none are of one.
template <class Tiling>
class Families {
 public:
  int NumberOf(const Tiling& tiling) {
    return numbers_.emplace(KeyOf(tiling), static_cast<int>(numbers_.size())).first->second;
  }

 private:
  static auto KeyOf(const Tiling& tiling) {
    if constexpr (requires { FamilyOf(tiling); }) {
      return FamilyOf(tiling);
    } else {
      return 0;
    }
  }
  std::map<decltype(KeyOf(std::declval<const Tiling&>())), int> numbers_;
};

template <class Shape, class Tiling, class Replay = NoReplay>
Status ChooseFor(const Device& device, const char* kernel, const Shape& shape,
                 std::vector<Tiling> (*candidates)(const ChipSpec&, const Shape&), Tiling* tiling,
                 const Replay& replay = {}) {
  CUBIST_RETURN_IF_ERROR(device.status());
  constexpr bool kCountsThreads = requires { requires Tiling::kKeepsBits; };
  const ChipSpec& chip = kCountsThreads ? device.chip_of_call() : device.chip();
  const Tuning* tuning = device.tuning();
  const std::string tuned_for = chip.name + chip.changes;
  const std::string* tuned = tuning == nullptr ? nullptr : tuning->Find(kernel, tuned_for, ShapeText(shape));
  const Status untuned = chip.pipes_overlap
                             ? ChooseOnNpu(chip, kernel, shape, tuned, candidates, replay, tiling)
                             : ChooseAs(kernel, chip, shape, tiling);
  if (tuned == nullptr) {
    if (!untuned.ok()) return untuned;
  } else if (const Status status = TakeTuned(chip, shape, *tuned, candidates, tiling); !status.ok()) {
    return {status.code(), std::string(kernel) + ": " + status.message() + " (in the tiling '" + *tuned +
                               "' given for " + ShapeText(shape) + ")"};
  }
  if (tuning == nullptr || !tuning->on_choice) return {};
  TilingChoice choice{kernel, tuned_for, ShapeText(shape), {}, TilingText(chip, shape, *tiling)};
  Families<Tiling> families;
  for (const Tiling& candidate : candidates(chip, shape)) {
    choice.candidates.push_back(
        {TilingText(chip, shape, candidate), Price(chip, shape, candidate), families.NumberOf(candidate)});
  }
  tuning->on_choice(choice);
  return {};
}

}  // namespace cubist

#endif  // CUBIST_KERNELS_CHOOSE_FOR_H_
