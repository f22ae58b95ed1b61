// Overflow: which buffer a tiling asks for most of, and how much that is. Every tiling has, beside its shape,
//
//   std::int64_t BufferBytes(const ChipSpec&, const Shape&, const Tiling&, Buffer)   what its kernel's rings take
#ifndef CUBIST_TILING_OVERFLOW_H_
#define CUBIST_TILING_OVERFLOW_H_

#include <algorithm>
#include <cstdint>
#include <string>

#include "npu_model/chip.h"

namespace cubist {

struct Overflow {
  Buffer buffer = Buffer::kL1;
  std::int64_t bytes = 0;
  double share = 0;  // of what the chip has

  // "1048576 bytes of L0A, ascend910b2 has 65536"
  std::string Text(const ChipSpec& chip) const {
    return std::to_string(bytes) + " bytes of " + NameOf(buffer) + ", " + chip.name + " has " +
           std::to_string(chip.buffer(buffer).capacity);
  }
};

template <class Shape, class Tiling>
Overflow WorstOf(const ChipSpec& chip, const Shape& shape, const Tiling& tiling) {
  Overflow worst;
  for (int b = 0; b < kBufferCount; ++b) {
    const auto buffer = static_cast<Buffer>(b);
    const std::int64_t bytes = BufferBytes(chip, shape, tiling, buffer);
    const double share = static_cast<double>(bytes) /
                         static_cast<double>(std::max<std::int64_t>(chip.buffer(buffer).capacity, 1));
    if (share > worst.share) worst = {buffer, bytes, share};
  }
  return worst;
}

}  // namespace cubist

#endif  // CUBIST_TILING_OVERFLOW_H_
