#include "npu_model/nearest.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

namespace cubist {
namespace {

std::size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t substitute = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({substitute, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

const std::string& Nearest(std::string_view wanted, const std::vector<std::string>& names) {
  const auto distance = [&](const std::string& name) {
    const bool goes_on = !wanted.empty() && name.compare(0, wanted.size(), wanted) == 0;
    return std::pair(!goes_on, EditDistance(wanted, name));
  };
  return *std::min_element(names.begin(), names.end(), [&](const std::string& a, const std::string& b) {
    return distance(a) < distance(b);
  });
}

std::string KnownAndNearest(std::string_view wanted, const std::vector<std::string>& names) {
  if (names.empty()) return "none is known";
  std::string text = "known are ";
  for (const std::string& name : names) text += name + (&name == &names.back() ? "" : ", ");
  return text + "; the nearest is " + Nearest(wanted, names);
}

}  // namespace cubist
