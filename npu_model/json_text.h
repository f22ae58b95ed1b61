// Pieces of JSON, for reports that are put together as text.
#ifndef CUBIST_NPU_MODEL_JSON_TEXT_H_
#define CUBIST_NPU_MODEL_JSON_TEXT_H_

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace cubist::json {

// A string with its quotes; what may not stand in one is escaped: quotes, backslashes, control characters.
inline std::string Quoted(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(byte));
      quoted += code;
      continue;
    }
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + '"';
}

// A member of an object.
inline std::string Member(std::string_view name, std::string_view text) {
  return Quoted(name).append(": ").append(Quoted(text));
}
inline std::string Member(std::string_view name, std::int64_t value) {
  return Quoted(name).append(": ").append(std::to_string(value));
}

// An array; `to_text` makes the JSON of an item.
template <class Items, class ToText>
std::string List(const Items& items, ToText to_text) {
  std::string list = "[";
  for (const auto& item : items) {
    if (list.size() > 1) list += ", ";
    list += to_text(item);
  }
  return list + ']';
}

}  // namespace cubist::json

#endif  // CUBIST_NPU_MODEL_JSON_TEXT_H_
