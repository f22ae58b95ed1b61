#include "tiling/cost.h"

#include <cmath>

namespace cubist {

double VectorCycles(const ChipSpec& chip, VectorOp op, double elements) {
  return chip.vector.head +
         std::ceil(elements * 4 / static_cast<double>(chip.vector.repeat_bytes)) * chip.vector_cycles(op);
}

}  // namespace cubist
