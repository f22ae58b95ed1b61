#include "tools/what_if.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>

#include "npu_model/chip_constants.h"
#include "npu_model/text_file.h"
#include "tools/json_reader.h"

namespace cubist {
namespace {

using Json = nlohmann::json;

// A name may go into a tuning file, whose words have no blanks.
bool IsName(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_' || c == '-' || c == '.';
  });
}

Status FromJson(const Json& json, ChipSpec* chip) {
  if (!json.is_object()) return InvalidArgument("is not an object");
  for (const auto& [key, value] : json.items()) {
    if (key != "name" && key != "base" && key != "set")
      return InvalidArgument(fmt::format("has '{}'; known are name, base, set", key));
  }
  for (const char* key : {"name", "base"}) {
    if (!json.contains(key) || !json[key].is_string())
      return InvalidArgument(fmt::format("{} is missing or not a text", key));
  }
  const std::string name = json["name"];
  if (!IsName(name))
    return InvalidArgument(fmt::format("name is '{}', needs letters, digits, '_', '-' and '.'", name));
  CUBIST_RETURN_IF_ERROR(FindChip(json["base"].get<std::string>(), chip));
  chip->name = name;
  if (!json.contains("set")) return {};
  if (!json["set"].is_object()) return InvalidArgument("set is not an object");
  for (const auto& [constant, value] : json["set"].items()) {
    if (!value.is_number())
      return InvalidArgument(fmt::format("set: {} is {}, needs a number", constant, value.dump()));
    CUBIST_RETURN_IF_ERROR(SetConstant(chip, constant, value.get<double>()));
  }
  return {};
}

Status ReadChip(const std::string& path, ChipSpec* chip) {
  std::string text;
  CUBIST_RETURN_IF_ERROR(ReadTextFile(path, &text));
  Json json;
  Status status = ReadJson(text, &json);
  if (status.ok()) status = FromJson(json, chip);
  return status.ok() ? status : InvalidArgument(path + ": " + status.message());
}

// Notes the change in `changes`, where the last of a constant's counts.
Status Set(const std::string& text, ChipSpec* chip, std::map<std::string, double>* changes) {
  const std::size_t equals = text.find('=');
  if (equals == std::string::npos)
    return InvalidArgument(fmt::format("--set is '{}', expected name=value", text));
  const std::string_view number = std::string_view(text).substr(equals + 1);
  double value = 0;
  const auto [next, error] = std::from_chars(number.data(), number.data() + number.size(), value);
  if (error != std::errc() || next != number.data() + number.size())
    return InvalidArgument(fmt::format("--set {}: '{}' is not a number", text, number));
  if (const Status status = SetConstant(chip, text.substr(0, equals), value); !status.ok())
    return InvalidArgument("--set: " + status.message());
  (*changes)[text.substr(0, equals)] = value;
  return {};
}

}  // namespace

Status LoadChip(const ChipOptions& options, ChipSpec* chip) {
  const std::string& name = options.chip;
  if (name.find('/') != std::string::npos || name.ends_with(".json")) {
    CUBIST_RETURN_IF_ERROR(ReadChip(name, chip));
  } else {
    CUBIST_RETURN_IF_ERROR(FindChip(name, chip));
  }
  std::map<std::string, double> changes;
  for (const std::string& set : options.sets) CUBIST_RETURN_IF_ERROR(Set(set, chip, &changes));
  if (changes.empty()) return {};
  chip->name += '*';
  for (const auto& [constant, value] : changes)
    chip->changes += fmt::format("{}{}={}", chip->changes.empty() ? "" : ",", constant, value);
  return {};
}

}  // namespace cubist
