#include "tools/validation/measured.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <string_view>
#include <utility>

#include "npu_model/text_file.h"
#include "tools/validation/csv.h"

namespace cubist {
namespace {

using Json = nlohmann::json;

// A line's fields by the names of the first line. Functions that read one return what is wrong with it, or nothing.
class Fields {
 public:
  Fields(const std::vector<std::string>& names, const CsvLine& line) {
    for (std::size_t i = 0; i < names.size() && i < line.fields.size(); ++i)
      values_[names[i]] = line.fields[i];
  }
  const std::string& operator[](const char* name) const {
    static const std::string kNone;
    const auto found = values_.find(name);
    return found == values_.end() ? kNone : found->second;
  }
  std::string Time(const char* name, double* us) const {
    const std::string& text = (*this)[name];
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *us);
    if (error == std::errc() && end == text.data() + text.size() && std::isfinite(*us) && *us > 0) return "";
    return fmt::format("{} '{}' is not a time above 0", name, text);
  }
  std::string Size(const char* name, std::int64_t* size) const {
    const std::string& text = (*this)[name];
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *size);
    if (error == std::errc() && end == text.data() + text.size() && *size > 0 && *size <= kLargest) return "";
    return fmt::format("{} '{}' is not a size from 1 to 2^31", name, text);
  }
  std::string Read(const char* name, Json* json) const {
    *json = Json::parse((*this)[name], nullptr, /*allow_exceptions=*/false);
    return json->is_discarded() ? fmt::format("{} '{}' is not JSON", name, (*this)[name]) : "";
  }

  static constexpr std::int64_t kLargest = std::int64_t{1} << 31;

 private:
  std::map<std::string, std::string> values_;
};

std::string ReadSchedule(const Fields& fields, MeasuredRow* row) {
  row->schedule = true;
  row->chip = "ascend910b2";
  row->op = fields["variant"];
  row->dtypes = {fields["dtype"]};
  row->shapes = {Shape(3)};
  std::string wrong = fields.Time("us_derived", &row->us);
  const char* const names[] = {"M", "N", "K"};
  for (std::size_t d = 0; d < 3 && wrong.empty(); ++d) wrong = fields.Size(names[d], &row->shapes[0][d]);
  if (wrong.empty() && row->dtypes[0] != "fp16" && row->dtypes[0] != "bf16")
    wrong = fmt::format("dtype '{}' is not fp16 or bf16", row->dtypes[0]);
  row->name = fmt::format("{} {}x{}x{}", row->op, fields["M"], fields["N"], fields["K"]);
  return wrong;
}

std::string ReadShapes(const Json& json, std::vector<Shape>* shapes) {
  if (!json.is_array()) return "shapes is not a list";
  for (const Json& one : json) {
    Shape& shape = shapes->emplace_back();
    if (one.is_null()) continue;
    if (!one.is_array()) return "shapes holds something that is not a list of sizes";
    for (const Json& size : one) {
      if (!size.is_number_integer() || size.get<std::int64_t>() < 0 ||
          size.get<std::int64_t>() > Fields::kLargest)
        return fmt::format("shapes holds {}, not a size from 0 to 2^31", size.dump());
      shape.push_back(size);
    }
  }
  return "";
}

std::string ReadOperator(const Fields& fields, MeasuredRow* row) {
  row->chip = fields["chip"].starts_with("ascend") ? fields["chip"] : "ascend" + fields["chip"];
  row->op = fields["op"];
  row->kernels = fields["kernels"];
  row->name = row->op + " " + fields["case"];
  std::string wrong = fields.Time("measured_us", &row->us);
  Json shapes, dtypes;
  if (wrong.empty()) wrong = fields.Read("shapes", &shapes);
  if (wrong.empty()) wrong = ReadShapes(shapes, &row->shapes);
  if (wrong.empty()) wrong = fields.Read("dtypes", &dtypes);
  if (wrong.empty()) wrong = fields.Read("attrs", &row->attrs);
  if (!wrong.empty()) return wrong;
  if (!row->attrs.is_object()) return "attrs is not an object";
  for (const Json& dtype : dtypes) row->dtypes.push_back(dtype.is_string() ? dtype.get<std::string>() : "");
  return row->shapes.empty() || row->dtypes.empty() ? "shapes or dtypes is empty" : "";
}

}  // namespace

Status ReadMeasured(const std::string& file, MeasuredRows* rows) {
  std::string text;
  CUBIST_RETURN_IF_ERROR(ReadTextFile(file, &text));
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";  // Which spreadsheets begin with.
  const bool marked = text.starts_with(kByteOrderMark);
  const std::vector<CsvLine> lines = ParseCsv(marked ? text.substr(kByteOrderMark.size()) : text);
  const std::vector<std::string> names = lines.empty() ? std::vector<std::string>() : lines[0].fields;
  const auto has = [&](const char* name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  const bool schedules = has("M") && has("N") && has("K") && has("variant") && has("us_derived");
  if (!schedules && !(has("chip") && has("op") && has("shapes") && has("dtypes") && has("measured_us"))) {
    return InvalidArgument(
        fmt::format("'{}' begins with neither M,N,K,dtype,variant,TFLOPS_digitised,us_derived nor "
                    "chip,op,case,shapes,dtypes,attrs,kernels,measured_us",
                    file));
  }
  for (std::size_t i = 1; i < lines.size(); ++i) {
    const Fields fields(names, lines[i]);
    MeasuredRow row;
    std::string wrong = lines[i].fields.size() == names.size()
                            ? (schedules ? ReadSchedule(fields, &row) : ReadOperator(fields, &row))
                            : fmt::format("{} fields, not {}", lines[i].fields.size(), names.size());
    if (wrong.empty()) {
      rows->rows.push_back(std::move(row));
    } else {
      rows->bad.push_back(fmt::format("line {}: {}", lines[i].number, wrong));
    }
  }
  return {};
}

}  // namespace cubist
