#include "tools/tiling_search.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <set>
#include <string_view>
#include <utility>

#include "npu_model/parallel.h"

namespace cubist {
namespace {

using Candidate = TilingChoice::Candidate;

// Fields in which two tilings of one list differ: their texts name the same ones in the same order.
int Differences(std::string_view a, std::string_view b) {
  int differences = 0;
  while (!a.empty() || !b.empty()) {
    const std::size_t end_a = std::min(a.find(','), a.size()), end_b = std::min(b.find(','), b.size());
    differences += a.substr(0, end_a) != b.substr(0, end_b) ? 1 : 0;
    a.remove_prefix(std::min(end_a + 1, a.size())), b.remove_prefix(std::min(end_b + 1, b.size()));
  }
  return differences;
}

// The choices of a call with the candidates that are allowed, the cheapest first. Where what the call takes is not allowed,
// the cheapest is chosen.
Status Listen(const Call& call, const ChipSpec& chip, const SearchOptions& options,
              std::vector<TilingChoice>* choices) {
  CUBIST_RETURN_IF_ERROR(MeetChoices(call, chip, {}, choices));
  for (TilingChoice& choice : *choices) {
    if (options.allow)
      std::erase_if(choice.candidates,
                    [&](const Candidate& c) { return !options.allow(FieldsOf(c.tiling)); });
    if (choice.candidates.empty())
      return {StatusCode::kUnsupported, choice.kernel + ": no tiling of this kind fits " + chip.name};
    std::stable_sort(choice.candidates.begin(), choice.candidates.end(),
                     [](const Candidate& a, const Candidate& b) { return a.price < b.price; });
    if (options.allow && !options.allow(FieldsOf(choice.chosen)))
      choice.chosen = choice.candidates.front().tiling;
  }
  return {};
}

class Search {
 public:
  Search(const Call& call, const ChipSpec& chip, const SearchOptions& options, SearchResult* result)
      : call_(&call), chip_(&chip), options_(&options), result_(result) {}

  Status Run() {
    SearchResult& r = *result_;
    CUBIST_RETURN_IF_ERROR(Listen(*call_, *chip_, *options_, &r.choices));
    for (const TilingChoice& choice : r.choices) {
      Take(choice, choice.chosen, &r.tuning);
      r.untuned_tilings.push_back(choice.chosen);
    }
    CUBIST_RETURN_IF_ERROR(Replay(r.tuning, std::numeric_limits<double>::infinity(), &r.untuned));
    r.best = r.untuned;
    const std::int64_t affordable =
        options_->most_instructions / std::max<std::int64_t>(r.untuned.instructions, 1);
    r.budget = static_cast<int>(std::min<std::int64_t>(options_->budget, affordable));
    const auto count = std::ssize(r.choices);
    for (std::ptrdiff_t i = 0; i < count; ++i) {
      left_ = static_cast<int>(r.budget * (i + 1) / count - r.budget * i / count);
      CUBIST_RETURN_IF_ERROR(
          Improve(r.choices[static_cast<std::size_t>(i)], StartOf(static_cast<std::size_t>(i))));
    }
    return {};
  }

 private:
  static constexpr std::size_t kSeeds = 10, kNeighbours = 12;  // replayed at a time

  static void Take(const TilingChoice& choice, const std::string& tiling, Tuning* tuning) {
    tuning->Set(choice.kernel, choice.chip, choice.shape, tiling);
  }

  // No further than to `give_up_s`.
  Status Replay(const Tuning& tuning, double give_up_s, Profile* profile) const {
    return (*call_)(Npu(*chip_, {.with_data = false,
                                 .policy = options_->policy,
                                 .tuning = std::make_shared<const Tuning>(tuning),
                                 .give_up_s = give_up_s}),
                    profile);
  }

  // The tiling that choice number `i` begins with; null where there is none.
  const std::string* StartOf(std::size_t i) const {
    if (options_->start == nullptr || options_->start->size() != result_->choices.size()) return nullptr;
    const TilingChoice& start = (*options_->start)[i];
    return start.kernel == result_->choices[i].kernel ? &start.chosen : nullptr;
  }

  Status Improve(TilingChoice& choice, const std::string* start) {
    seen_ = {choice.chosen};
    CUBIST_RETURN_IF_ERROR(TryAll(choice, SeedsOf(choice, start)));
    while (left_ > 0) {
      std::vector<std::string> next = Neighbours(choice);
      if (next.empty()) next = CheapestUntried(choice);
      if (next.empty()) break;
      CUBIST_RETURN_IF_ERROR(TryAll(choice, next));
    }
    return {};
  }

  // No price errs so much that one of several times the cheapest's would be the quickest, and its record may be as many times
  // as long.
  static bool IsHopeless(const TilingChoice& choice, const Candidate& candidate) {
    return candidate.price > 4 * choice.candidates.front().price;
  }

  // The cheapest of each family; where there is but one, one of each price: equals differ in what the price does not see,
  // which the neighbours try.
  static std::vector<std::string> SeedsOf(const TilingChoice& choice, const std::string* start) {
    const bool families =
        std::any_of(choice.candidates.begin(), choice.candidates.end(),
                    [&](const Candidate& c) { return c.family != choice.candidates[0].family; });
    std::vector<std::string> seeds;
    if (start != nullptr) seeds.push_back(*start);
    std::set<std::pair<int, double>> met;
    for (const Candidate& c : choice.candidates) {
      if (seeds.size() >= kSeeds || IsHopeless(choice, c)) break;
      if (met.emplace(c.family, families ? 0 : c.price).second) seeds.push_back(c.tiling);
    }
    return seeds;
  }

  // Candidates that were not tried yet and are `wanted`, the cheapest first.
  template <class Wanted>
  std::vector<std::string> Untried(const TilingChoice& choice, Wanted wanted) const {
    std::vector<std::string> untried;
    for (const Candidate& c : choice.candidates) {
      if (untried.size() >= kNeighbours || IsHopeless(choice, c)) break;
      if (!seen_.contains(c.tiling) && wanted(c)) untried.push_back(c.tiling);
    }
    return untried;
  }

  // Those that differ from the best in one field.
  std::vector<std::string> Neighbours(const TilingChoice& choice) const {
    return Untried(choice, [&](const Candidate& c) { return Differences(c.tiling, choice.chosen) == 1; });
  }

  std::vector<std::string> CheapestUntried(const TilingChoice& choice) const {
    return Untried(choice, [](const Candidate&) { return true; });
  }

  Status TryAll(TilingChoice& choice, std::vector<std::string> tilings) {
    std::erase_if(tilings, [&](const std::string& tiling) { return !seen_.insert(tiling).second; });
    tilings.resize(std::min(tilings.size(), static_cast<std::size_t>(std::max(left_, 0))));
    left_ -= static_cast<int>(tilings.size());
    std::vector<Profile> profiles(tilings.size());
    std::vector<Status> statuses(tilings.size());
    const double best_s = result_->best.time_s;
    std::mutex mutex;
    ForEach(tilings.size(), [&](std::size_t i) {
      Tuning tuning = result_->tuning;
      Take(choice, tilings[i], &tuning);
      statuses[i] = Replay(tuning, best_s, &profiles[i]);
      const std::scoped_lock lock(mutex);
      ++result_->tried;
      if (options_->on_progress) options_->on_progress(result_->tried, result_->budget, best_s);
    });
    for (std::size_t i = 0; i < tilings.size(); ++i) {
      if (statuses[i].code() == StatusCode::kOutOfMemory) continue;
      if (!statuses[i].ok()) return statuses[i];
      if (profiles[i].time_s < result_->best.time_s) {
        result_->best = std::move(profiles[i]);
        choice.chosen = tilings[i];
        Take(choice, tilings[i], &result_->tuning);
      }
    }
    return {};
  }

  const Call* call_;
  const ChipSpec* chip_;
  const SearchOptions* options_;
  SearchResult* result_;
  std::set<std::string> seen_;
  int left_ = 0;  // of the budget of a choice
};

}  // namespace

Status MeetChoices(const Call& call, const ChipSpec& chip, const Tuning& tuning,
                   std::vector<TilingChoice>* choices) {
  auto listening = std::make_shared<Tuning>(tuning);
  listening->on_choice = [&](const TilingChoice& choice) {
    const bool known = std::any_of(choices->begin(), choices->end(), [&](const TilingChoice& other) {
      return other.kernel == choice.kernel && other.shape == choice.shape;
    });
    if (!known) choices->push_back(choice);
  };
  return call(Npu(chip, {.with_data = false, .tuning = listening}), nullptr);
}

TilingFields FieldsOf(const std::string& tiling) {
  TilingFields fields;
  for (std::size_t begin = 0; begin < tiling.size();) {
    const std::size_t end = std::min(tiling.find(',', begin), tiling.size());
    const std::size_t equals = std::min(tiling.find('=', begin), end);
    fields[tiling.substr(begin, equals - begin)] =
        equals < end ? tiling.substr(equals + 1, end - equals - 1) : std::string();
    begin = end + 1;
  }
  return fields;
}

Status SearchTilings(const Call& call, const ChipSpec& chip, const SearchOptions& options,
                     SearchResult* result) {
  *result = {};
  return Search(call, chip, options, result).Run();
}

}  // namespace cubist
