#include "tiling/fields.h"

#include <algorithm>
#include <charconv>
#include <cstddef>

#include "npu_model/nearest.h"

namespace cubist {
namespace {

// "a, b, c"
std::string Listed(const std::vector<std::string>& names) {
  std::string list;
  for (const std::string& name : names) {
    if (!list.empty()) list += ", ";
    list += name;
  }
  return list;
}

}  // namespace

void FieldPrinter::Add(std::string_view name, std::string_view value) {
  if (!text_.empty()) text_ += ',';
  text_.append(name).append("=").append(value);
}

FieldParser::FieldParser(std::string_view text) {
  while (!text.empty()) {
    const std::string_view item = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), item.size() + 1));
    const std::size_t equals = item.find('=');
    if (equals == std::string_view::npos) {
      Note(std::string(1, '\'').append(item).append("' is not name=value"));
    } else {
      items_.push_back({std::string(item.substr(0, equals)), std::string(item.substr(equals + 1))});
    }
  }
}

std::string FieldParser::Finish() {
  for (const Item& item : items_) {
    if (!item.used) {
      Note("no field is named '" + item.name + "'" + NearestText(item.name, names_) + "; they are " +
           Listed(names_));
    }
  }
  return error_;
}

// The value that the text gives a field, if it does.
const std::string* FieldParser::Take(const Field& field) {
  names_.emplace_back(field.name);
  const std::string* value = nullptr;
  for (Item& item : items_) {
    if (item.name != field.name) continue;
    if (value != nullptr) Note(item.name + " is given twice");
    item.used = true;
    value = &item.value;
  }
  return value;
}

std::int64_t FieldParser::Number(const Field& field, const std::string& text) {
  std::int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [next, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || next != end) {
    Note(std::string(field.name) + " is '" + text + "', needs a whole number");
  } else {
    CheckLimits(field, value);  // Before the member's type may cut it.
  }
  return value;
}

std::int64_t FieldParser::Index(const Field& field, const std::string& text,
                                const std::vector<std::string>& names) {
  const auto found = std::find(names.begin(), names.end(), text);
  if (found == names.end()) {
    Note(std::string(field.name) + " is '" + text + "'; known are " + Listed(names));
    return 0;
  }
  return found - names.begin();
}

void FieldParser::CheckLimits(const Field& field, std::int64_t value) {
  if (value >= field.least && value <= field.most && value % field.multiple == 0) return;
  std::string needs = std::to_string(field.least) + " to " + std::to_string(field.most);
  if (field.multiple > 1) needs += ", multiples of " + std::to_string(field.multiple);
  Note(std::string(field.name) + " is " + std::to_string(value) + ", needs " + needs);
}

void FieldParser::Note(std::string error) {
  if (error_.empty()) error_ = std::move(error);
}

}  // namespace cubist
