#include "tools/subject.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <set>
#include <utility>
#include <vector>

namespace cubist {
namespace {

std::vector<std::string> Parts(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == 'x') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

// Every choice of the call takes these fields, and the others as it does without them.
Status ChangeTilings(const Call& call, const ChipSpec& chip, const std::string& fields, Tuning* tuning) {
  std::vector<TilingChoice> choices;
  CUBIST_RETURN_IF_ERROR(MeetChoices(call, chip, *tuning, &choices));
  if (choices.empty())
    return InvalidArgument(fmt::format("--tiling is '{}', but the kernel has no tiling to choose", fields));
  for (const TilingChoice& choice : choices) {
    TilingFields all = FieldsOf(choice.chosen);
    std::vector<std::string> texts = {fields};
    for (const auto& [name, value] : FieldsOf(fields)) all.erase(name);
    for (const auto& [name, value] : all) texts.push_back(fmt::format("{}={}", name, value));
    tuning->Set(choice.kernel, choice.chip, choice.shape, fmt::format("{}", fmt::join(texts, ",")));
  }
  const Status status =
      call(Npu(chip, {.with_data = false, .tuning = std::make_shared<Tuning>(*tuning)}), nullptr);
  // Without the whole tiling, of which the user gave a part.
  const std::string what = status.message().substr(0, status.message().find(" (in the tiling '"));
  return status.ok() ? status : Status(status.code(), "--tiling: " + what);
}

// Says so where a file has no tiling for what the call chooses: a call of another shape, dtype or chip.
Status NoteUnused(const Call& call, const ChipSpec& chip, const std::string& file, const Tuning& tuning) {
  std::vector<TilingChoice> choices;
  CUBIST_RETURN_IF_ERROR(MeetChoices(call, chip, tuning, &choices));
  const auto is_tuned = [&](const TilingChoice& choice) {
    return tuning.Find(choice.kernel, choice.chip, choice.shape) != nullptr;
  };
  if (std::any_of(choices.begin(), choices.end(), is_tuned)) return {};
  static std::set<std::string> noted;  // Once, however many points a sweep has.
  if (!noted.insert(file).second || choices.empty()) return {};
  const TilingChoice& first = choices.front();
  fmt::print(
      stderr,
      "--tuning {}: has no tiling for this call, which goes on without; it would begin with\n  {} {} {}\n",
      file, first.kernel, first.chip, first.shape);
  return {};
}

// Constants as they were set last, and fields of the tiling.
std::string ChangesOf(const SubjectOptions& options) {
  std::vector<std::string> changes;
  for (const std::string& set : options.chip.sets) {
    const std::string name = set.substr(0, set.find('=') + 1);
    std::erase_if(changes, [&](const std::string& other) { return other.starts_with(name); });
    changes.push_back(set);
  }
  if (!options.tiling.empty()) changes.push_back(options.tiling);
  return fmt::format("{}", fmt::join(changes, ", "));
}

}  // namespace

Status Subject::Run(Profile* profile, bool timeline, trace::Record* record) const {
  return call(
      Npu(chip,
          {.with_data = false, .policy = policy, .timeline = timeline, .record = record, .tuning = tuning}),
      profile);
}

std::string Subject::Title() const {
  return fmt::format("{} {} {} on {}{}{}", kernel, shape, dtype, chip.name, changes.empty() ? "" : ", ",
                     changes);
}

std::string FullShape(const KernelCallOptions& options) {
  for (const KernelForm& form : KernelForms()) {
    if (options.kernel != form.name) continue;
    if (options.shape.empty()) return form.example;
    const std::vector<std::string> example = Parts(form.example);
    std::string shape = options.shape;
    for (std::size_t i = Parts(shape).size(); i < example.size(); ++i) shape += "x" + example[i];
    return shape;
  }
  return options.shape;
}

Status MakeSubject(const SubjectOptions& options, Subject* subject) {
  Subject s;
  CUBIST_RETURN_IF_ERROR(LoadChip(options.chip, &s.chip));
  auto call = std::make_shared<KernelCall>();
  CUBIST_RETURN_IF_ERROR(MakeKernelCall(options.call, call.get()));
  if (options.policy != "minimal" && options.policy != "per-tile")
    return InvalidArgument(fmt::format("--policy is '{}', needs minimal or per-tile", options.policy));
  s.policy = options.policy == "minimal" ? sync::Policy::kMinimal : sync::Policy::kPerTile;
  s.kernel = options.call.kernel, s.dtype = options.call.dtype;
  if (options.call.causal) s.dtype += " causal";
  s.shape = FullShape(options.call);
  s.call = [call](const Device& device, Profile* profile) { return (*call)(device, profile); };
  s.tuning = std::make_shared<Tuning>();
  if (!options.tuning.empty()) {
    CUBIST_RETURN_IF_ERROR(s.tuning->Read(options.tuning));
    CUBIST_RETURN_IF_ERROR(NoteUnused(s.call, s.chip, options.tuning, *s.tuning));
  }
  if (!options.tiling.empty())
    CUBIST_RETURN_IF_ERROR(ChangeTilings(s.call, s.chip, options.tiling, s.tuning.get()));
  s.changes = ChangesOf(options);
  *subject = std::move(s);
  return {};
}

}  // namespace cubist
