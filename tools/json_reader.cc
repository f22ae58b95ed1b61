#include "tools/json_reader.h"

#include <fmt/format.h>

#include <set>
#include <string>
#include <vector>

namespace cubist {

Status ReadJson(std::string_view text, nlohmann::json* json) {
  using Json = nlohmann::json;
  std::vector<std::set<std::string>> keys;
  std::string repeated;
  const auto note = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && repeated.empty() &&
        !keys.back().insert(parsed.get<std::string>()).second)
      repeated = parsed.get<std::string>();
    return true;
  };
  try {
    *json = Json::parse(text, note);
  } catch (const Json::exception& error) {
    const std::string what = error.what();  // "[json.exception..] parse error at line .."
    return InvalidArgument(fmt::format("is not JSON: {}", what.substr(what.find("] ") + 2)));
  }
  if (!repeated.empty())
    return InvalidArgument(fmt::format("has the key '{}' twice in one object", repeated));
  return {};
}

}  // namespace cubist
