// JSON in tests: read and shown to people by functions that are compiled once.
#ifndef CUBIST_TESTS_SUPPORT_JSON_H_
#define CUBIST_TESTS_SUPPORT_JSON_H_

#include <istream>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>

namespace cubist::testing {

// Throw what GoogleTest shows, where it is none.
nlohmann::json ParseJson(const std::string& text);
nlohmann::json ParseJson(std::istream& file);
bool IsJson(const std::string& text);

}  // namespace cubist::testing

namespace nlohmann {
void PrintTo(const json& value, std::ostream* out);
}  // namespace nlohmann

#endif  // CUBIST_TESTS_SUPPORT_JSON_H_
