#include "tools/json_writer.h"

#include "tools/files.h"

namespace cubist {

nlohmann::ordered_json ParseJson(const std::string& text) { return nlohmann::ordered_json::parse(text); }

Status WriteJson(const std::string& file, const nlohmann::ordered_json& json) {
  // Names of files and of chips may hold any bytes.
  return WriteFile(file, json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

}  // namespace cubist
