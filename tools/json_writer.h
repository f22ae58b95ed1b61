// A writer of fields, as profile_fields.h takes it, into a JSON object.
#ifndef CUBIST_TOOLS_JSON_WRITER_H_
#define CUBIST_TOOLS_JSON_WRITER_H_

#include <nlohmann/json.hpp>

namespace cubist {

struct JsonWriter {
  nlohmann::ordered_json& json;

  template <class Value>
  void operator()(const char* name, const Value& value) {
    json[name] = value;
  }
  template <class Items, class Write>
  void List(const char* name, const Items& items, Write write) {
    nlohmann::ordered_json& list = json[name] = nlohmann::ordered_json::array();
    for (const auto& item : items) {
      JsonWriter fields{list.emplace_back(nlohmann::ordered_json::object())};
      write(fields, item);
    }
  }
  template <class Write>
  void Group(const char* name, Write write) {
    JsonWriter fields{json[name] = nlohmann::ordered_json::object()};
    write(fields);
  }
};

}  // namespace cubist

#endif  // CUBIST_TOOLS_JSON_WRITER_H_
