// JSON of the command: a writer of fields, as profile_fields.h takes it, into an object; texts from and to it, which are
// compiled once.
#ifndef CUBIST_TOOLS_JSON_WRITER_H_
#define CUBIST_TOOLS_JSON_WRITER_H_

#include <nlohmann/json.hpp>
#include <string>

#include "npu_model/status.h"

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

// Of a text of ours.
nlohmann::ordered_json ParseJson(const std::string& text);

// Indented; as WriteFile.
Status WriteJson(const std::string& file, const nlohmann::ordered_json& json);

}  // namespace cubist

#endif  // CUBIST_TOOLS_JSON_WRITER_H_
