#include "npu_model/chip.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "npu_model/nearest.h"

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

}  // namespace

namespace {

// RoundUp for sizes that are powers of two on nearly every chip: a ring is placed without divisions.
std::int64_t RoundUpQuickly(std::int64_t a, std::int64_t b) {
  return (b & (b - 1)) == 0 ? (a + b - 1) & -b : RoundUp(a, b);
}

}  // namespace

std::int64_t ChipSpec::SlotBytes(Buffer b, DType dtype, std::int64_t rows, std::int64_t cols) const {
  std::int64_t bytes = 0;
  switch (b) {
    case Buffer::kL1:
    case Buffer::kL0A:
    case Buffer::kL0B: {
      const std::int64_t element = IsFloat(dtype) ? OperandBytes(dtype) : SizeOf(dtype);
      bytes = RoundUpQuickly(rows, packing.row_multiple) * RoundUp(cols * element, kBlockBytes);
      break;
    }
    case Buffer::kL0C:
      bytes = RoundUp(rows, mmad.m_step) * RoundUp(cols, mmad.n_step) * 4;
      break;
    case Buffer::kBT:
      bytes = cols * 4;
      break;
    case Buffer::kHandOver:
      bytes = rows * cols * SizeOf(dtype);
      break;
    case Buffer::kUB:
      bytes = rows * RoundUp(cols * SizeOf(dtype), kBlockBytes);
      break;
  }
  return RoundUpQuickly(bytes, buffer(b).alignment);
}

std::vector<std::string> ChipNames() {
  std::vector<std::string> names;
  for (const NamedChip& chip : kChips) names.emplace_back(chip.name);
  return names;
}

Status FindChip(std::string_view name, ChipSpec* chip) {
  const std::string wanted = Lower(name);
  for (const NamedChip& candidate : kChips) {
    if (wanted == candidate.name) {
      *chip = candidate.spec();
      return {};
    }
  }
  return InvalidArgument("unknown chip '" + std::string(name) + "'; " + KnownAndNearest(wanted, ChipNames()));
}

}  // namespace cubist
