// JSON that somebody else has written.
#ifndef CUBIST_TOOLS_JSON_READER_H_
#define CUBIST_TOOLS_JSON_READER_H_

#include <nlohmann/json.hpp>
#include <string_view>

#include "npu_model/status.h"

namespace cubist {

// An error says where the text is none, or names the first key that an object has twice, of which the last would count.
Status ReadJson(std::string_view text, nlohmann::json* json);

}  // namespace cubist

#endif  // CUBIST_TOOLS_JSON_READER_H_
