// What the blocks of a layer share: their state between forward and backward, and their profiles.
#ifndef CUBIST_KERNELS_BLOCK_H_
#define CUBIST_KERNELS_BLOCK_H_

#include <cstddef>
#include <initializer_list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "npu_model/profile.h"
#include "npu_model/types.h"

namespace cubist {

// What a block's forward pass keeps for the backward one, and the scratch memory of both. Grows with the largest call and
// is reused by the next ones. One per block and call in flight.
class CUBIST_EXPORT BlockState {
 public:
  // A tensor of that name, dtype and shape; its contents last until it is asked for with another.
  Tensor Take(const std::string& name, DType dtype, std::initializer_list<std::int64_t> sizes);

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::map<std::string, std::vector<Line>> memory_;
};

// The kernels of a block as the model predicts them, in order; empty on the host.
struct CUBIST_EXPORT BlockProfile {
  std::vector<std::pair<std::string, Profile>> kernels;
  double time_s() const;
};

}  // namespace cubist

#endif  // CUBIST_KERNELS_BLOCK_H_
