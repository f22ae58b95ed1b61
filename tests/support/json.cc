#include "tests/support/json.h"

#include <sstream>

namespace cubist::testing {

nlohmann::json ParseJson(const std::string& text) { return nlohmann::json::parse(text); }

nlohmann::json ParseJson(std::istream& file) {
  std::ostringstream text;
  text << file.rdbuf();
  return ParseJson(text.str());
}

bool IsJson(const std::string& text) { return nlohmann::json::accept(text); }

}  // namespace cubist::testing

namespace nlohmann {
void PrintTo(const json& value, std::ostream* out) {
  *out << value.dump(-1, ' ', false, json::error_handler_t::replace);
}
}  // namespace nlohmann
