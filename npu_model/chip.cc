#include "npu_model/chip.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <numeric>

namespace cubist {
namespace {

struct NamedChip {
  const char* name;
  const ChipSpec& (*spec)();
};
constexpr std::array<NamedChip, 4> kChips = {{{"ascend910b1", Ascend910B1},
                                              {"ascend910b2", Ascend910B2},
                                              {"ascend910b3", Ascend910B3},
                                              {"ascend910b4", Ascend910B4}}};

std::string Lower(std::string_view text) {
  std::string lower(text);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return lower;
}

// Levenshtein distance.
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

std::int64_t ChipSpec::SlotBytes(Buffer b, DType dtype, std::int64_t rows, std::int64_t cols) const {
  constexpr std::int64_t kBlock = 32;  // UB is read and written in blocks; a fractal is 16 rows of one block.
  std::int64_t bytes = 0;
  switch (b) {
    case Buffer::kL1:
    case Buffer::kL0A:
    case Buffer::kL0B: {
      const std::int64_t element = IsFloat(dtype) ? OperandBytes(dtype) : SizeOf(dtype);
      bytes = RoundUp(rows, packing.row_multiple) * RoundUp(cols * element, kBlock);
      break;
    }
    case Buffer::kL0C:
      bytes = RoundUp(rows, mmad.m_step) * RoundUp(cols, mmad.n_step) * 4;
      break;
    case Buffer::kBT:
      bytes = cols * 4;
      break;
    case Buffer::kUB:
      bytes = rows * RoundUp(cols * SizeOf(dtype), kBlock);
      break;
  }
  return RoundUp(bytes, buffer(b).alignment);
}

std::vector<std::string> ChipNames() {
  std::vector<std::string> names;
  for (const NamedChip& chip : kChips) names.emplace_back(chip.name);
  return names;
}

Status FindChip(std::string_view name, ChipSpec* chip) {
  const std::string wanted = Lower(name);
  const NamedChip* nearest = &kChips[0];
  std::string known;
  for (const NamedChip& candidate : kChips) {
    if (wanted == candidate.name) {
      *chip = candidate.spec();
      return {};
    }
    if (EditDistance(wanted, candidate.name) < EditDistance(wanted, nearest->name)) nearest = &candidate;
    known += (known.empty() ? "" : ", ") + std::string(candidate.name);
  }
  return InvalidArgument("unknown chip '" + std::string(name) + "'; known are " + known + "; nearest is " +
                         nearest->name);
}

}  // namespace cubist
