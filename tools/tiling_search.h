// TilingSearch: the tiling of a call that the replay finds quickest, among the candidates of its choices.
#ifndef CUBIST_TOOLS_TILING_SEARCH_H_
#define CUBIST_TOOLS_TILING_SEARCH_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/device.h"
#include "npu_model/profile.h"
#include "npu_model/status.h"
#include "npu_model/tuning.h"

namespace cubist {

// A call that may be made on any device.
using Call = std::function<Status(const Device& device, Profile* profile)>;

// A tiling's fields by name, as texts.
using TilingFields = std::map<std::string, std::string>;
TilingFields FieldsOf(const std::string& tiling);

// The choices that a call meets on a chip, each once, with `tuning` in force.
Status MeetChoices(const Call& call, const ChipSpec& chip, const Tuning& tuning,
                   std::vector<TilingChoice>* choices);

struct SearchOptions {
  sync::Policy policy = sync::Policy::kMinimal;
  int budget = 64;  // replays at most, beside that of what the call takes
  // Of a call that has more instructions than so many for each replay of the budget, there are fewer replays.
  std::int64_t most_instructions = std::numeric_limits<std::int64_t>::max();
  // Which candidates may be taken; all where empty.
  std::function<bool(const TilingFields&)> allow = {};
  // Told after every replay, of one thread at a time.
  std::function<void(int tried, int budget, double best_s)> on_progress = {};
  // Tilings to begin with: what was chosen in a call of the same kernels, in their order. Shapes may differ in what
  // makes more tilings possible.
  const std::vector<TilingChoice>* start = nullptr;
};

struct SearchResult {
  Tuning tuning;  // of every choice of the call
  std::vector<TilingChoice>
      choices;  // as the call met them, `chosen` the best found; candidates are those allowed
  Profile
      untuned;  // with what the call takes of its own, or the cheapest allowed candidates where that is not allowed
  std::vector<std::string> untuned_tilings;  // of every choice
  Profile best;
  int budget = 0;  // what the call's instructions leave of the one that was given
  int tried = 0;   // what the call takes is not counted
};

// Replays what the call takes, the cheapest candidates by price and the starting one, then neighbours of the best that
// differ in one field, and when there are none left the next by price, as long as the budget lasts. What costs several times
// as much as the best by price is left out, and so is what the machine has no memory to record. A call's choices (a kernel may
// be called several times in it) are searched one after the other, each with its part of the budget. Deterministic. An error
// is the call's own, or says that no candidate is allowed.
Status SearchTilings(const Call& call, const ChipSpec& chip, const SearchOptions& options,
                     SearchResult* result);

}  // namespace cubist

#endif  // CUBIST_TOOLS_TILING_SEARCH_H_
