#include "tools/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <utility>

namespace cubist {
namespace {

constexpr std::size_t kGap = 2;  // blanks between columns

// Three significant digits: 0.0123, 1.23, 12.3, 123, 1234.
std::string ThreeDigits(double value) {
  if (value <= 0) return "0";
  // Rounded first: 0.9996 has as many digits as 1.00.
  const double rounded = std::strtod(fmt::format("{:.2e}", value).c_str(), nullptr);
  return fmt::format("{:.{}f}", value,
                     std::clamp(2 - static_cast<int>(std::floor(std::log10(rounded))), 0, 9));
}

std::string Stripped(std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

}  // namespace

Table::Table(std::vector<Column> columns) : columns_(std::move(columns)) {
  for (Column& column : columns_) {
    column.width = static_cast<int>(
        std::max({static_cast<std::size_t>(column.width), column.title.size(), column.unit.size()}));
  }
}

int Table::width() const {
  int width = static_cast<int>(kGap) * std::max<int>(static_cast<int>(columns_.size()) - 1, 0);
  for (const Column& column : columns_) width += column.width;
  return width;
}

std::string Table::Row(const std::vector<std::string>& cells) const {
  std::string line;
  std::size_t column_end = 0;
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    const std::string cell = i < cells.size() ? cells[i] : "";
    const std::size_t begin = column_end + (i > 0 ? kGap : 0);
    column_end = begin + static_cast<std::size_t>(columns_[i].width);
    if (cell.empty()) continue;
    std::size_t at = begin;
    if (columns_[i].align == Column::Align::kRight) at = column_end - std::min(cell.size(), column_end);
    at = std::max(at, line.empty() ? 0 : line.size() + 1);
    line.resize(at, ' ');
    line += cell;
  }
  return Stripped(line);
}

std::string Table::Rule() const { return std::string(static_cast<std::size_t>(width()), '-'); }

std::string Table::Header() const {
  std::vector<std::string> titles, units;
  for (const Column& column : columns_) {
    titles.push_back(column.title);
    units.push_back(column.unit);
  }
  return Row(titles) + "\n" + Row(units) + "\n" + Rule();
}

std::string FormatSeconds(double seconds) {
  if (seconds <= 0) return "0 s";
  if (seconds < 0.9995e-3) return ThreeDigits(seconds * 1e6) + " us";
  if (seconds < 0.9995) return ThreeDigits(seconds * 1e3) + " ms";
  return ThreeDigits(seconds) + " s";
}

std::string FormatPerSecond(double value, const char* unit) {
  constexpr std::array<std::pair<double, const char*>, 4> kPrefixes = {
      {{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}}};
  for (const auto& [factor, prefix] : kPrefixes) {
    if (value >= factor || prefix == kPrefixes.back().second) {
      return fmt::format("{} {}{}", ThreeDigits(value / factor), prefix, unit);
    }
  }
  return "";
}

std::string FormatError(double error) { return error == 0 ? "0" : fmt::format("{:.1e}", error); }

}  // namespace cubist
