#include "npu_model/nearest.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

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
  const std::string* nearest = &names.front();
  std::size_t least = EditDistance(wanted, *nearest);
  for (const std::string& name : names) {
    const std::size_t distance = EditDistance(wanted, name);
    if (distance < least) nearest = &name, least = distance;
  }
  return *nearest;
}

}  // namespace cubist
