#include "tools/tune.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "tools/bad_input.h"
#include "tools/files.h"
#include "tools/json_writer.h"
#include "tools/progress.h"
#include "tools/table.h"

namespace cubist {
namespace {

using Json = nlohmann::ordered_json;

// "[####......]" of a share.
std::string Bar(double share) {
  constexpr int kWidth = 24;
  const int full = static_cast<int>(share * kWidth);
  return fmt::format("[{}{}]", std::string(static_cast<std::size_t>(full), '#'),
                     std::string(static_cast<std::size_t>(kWidth - full), '.'));
}

Json ToJson(const TuneOptions& options, const Subject& subject, const SearchResult& found) {
  Json json;
  JsonWriter fields{json};
  WriteSettings(fields, options.subject, subject);
  fields("budget", options.budget);
  fields("tried", found.tried);
  fields("default_us", found.untuned.time_s * 1e6);
  fields("best_us", found.best.time_s * 1e6);
  fields("gain", found.untuned.time_s / found.best.time_s);
  json["choices"] = Json::array();
  for (std::size_t i = 0; i < found.choices.size(); ++i) {
    const TilingChoice& choice = found.choices[i];
    json["choices"].push_back({{"kernel", choice.kernel},
                               {"shape", choice.shape},
                               {"candidates", choice.candidates.size()},
                               {"default", found.untuned_tilings[i]},
                               {"best", choice.chosen}});
  }
  return json;
}

}  // namespace

int TuneCommand(const TuneOptions& options) {
  Subject subject;
  Tuning file;
  Status status = MakeSubject(options.subject, &subject);
  if (status.ok()) status = PrepareOutput("--output", options.output);
  if (status.ok()) status = PrepareOutput("--json", options.json);
  if (status.ok() && options.output != "-" && std::filesystem::exists(options.output))
    status = file.Read(options.output);
  if (!status.ok()) return BadInput("cubist tune", status.message());

  Progress progress(stderr);
  SearchOptions search;
  search.policy = subject.policy;
  search.budget = options.budget;
  // A minute or two on two cores.
  search.most_instructions = std::int64_t{1} << 26;
  search.on_progress = [&](int tried, int budget, double best_s) {
    const double share = std::min(1.0, static_cast<double>(tried) / std::max(budget, 1));
    progress.Show(
        fmt::format("{} {} of {} tilings, best {}", Bar(share), tried, budget, FormatSeconds(best_s)));
  };
  SearchResult found;
  status = SearchTilings(subject.call, subject.chip, search, &found);
  progress.Clear();
  if (!status.ok()) return BadInput("cubist tune", status.message());
  if (found.choices.empty())
    return BadInput("cubist tune", fmt::format("{} chooses no tiling that could be tuned", subject.kernel));

  fmt::print("{}, {} flags\n", subject.Title(), options.subject.policy);
  for (std::size_t i = 0; i < found.choices.size(); ++i) {
    const TilingChoice& choice = found.choices[i];
    fmt::print("{} {}\n  {} candidates\n  default  {}\n  best     {}\n", choice.kernel, choice.shape,
               choice.candidates.size(), found.untuned_tilings[i], choice.chosen);
    file.Set(choice.kernel, choice.chip, choice.shape, choice.chosen);
  }
  fmt::print("default {}, best {}: {:.3f}x after {} replays\n", FormatSeconds(found.untuned.time_s),
             FormatSeconds(found.best.time_s), found.untuned.time_s / found.best.time_s, found.tried);
  if (found.budget < options.budget && found.tried == found.budget) {
    fmt::print("the call has {} instructions, which leave {} of the budget of {} replays\n",
               found.untuned.instructions, found.budget, options.budget);
  }
  if (!options.output.empty()) {
    if (status = WriteFile(options.output, file.Text()); !status.ok())
      return BadInput("cubist tune", status.message());
    if (options.output != "-")
      fmt::print("written to {}: give it to --tuning, or to a device as its tuning\n", options.output);
  }
  if (options.json.empty()) return 0;
  status = WriteJson(options.json, ToJson(options, subject, found));
  return status.ok() ? 0 : BadInput("cubist tune", status.message());
}

}  // namespace cubist
