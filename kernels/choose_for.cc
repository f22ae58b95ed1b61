#include "kernels/choose_for.h"

#include "npu_model/parallel.h"

namespace cubist {

void SideBySide(std::size_t count, const std::function<void(std::size_t)>& body) { ForEach(count, body); }

}  // namespace cubist
