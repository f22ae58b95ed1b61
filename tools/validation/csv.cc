#include "tools/validation/csv.h"

#include <utility>

namespace cubist {

std::vector<CsvLine> ParseCsv(std::string_view text) {
  std::vector<CsvLine> lines;
  CsvLine line{1, {""}};
  int number = 1;
  bool quoted = false, any = false;
  const auto end_line = [&] {
    if (any) lines.push_back(std::move(line));
    line = {number, {""}};
    any = false;
  };
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\n') ++number, quoted = false;  // A field ends with its line: one stray quote spoils one line.
    if (c == '"') {
      any = true;
      if (quoted && i + 1 < text.size() && text[i + 1] == '"') {
        line.fields.back() += text[++i];
      } else {
        quoted = !quoted;
      }
    } else if (quoted) {
      line.fields.back() += c;
    } else if (c == ',') {
      any = true;
      line.fields.emplace_back();
    } else if (c == '\n') {
      end_line();
    } else if (c != '\r') {
      any = any || (c != ' ' && c != '\t');
      line.fields.back() += c;
    }
  }
  end_line();
  return lines;
}

}  // namespace cubist
