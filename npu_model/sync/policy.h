// How many flags a plan places.
#ifndef CUBIST_NPU_MODEL_SYNC_POLICY_H_
#define CUBIST_NPU_MODEL_SYNC_POLICY_H_

#include <cstdint>

namespace cubist::sync {

enum class Policy : std::uint8_t {
  kMinimal,  // what earlier flags already order is left out
  kPerTile,  // what compilers insert: a pair of flags for every tile that changes pipes, in both directions
};
constexpr const char* NameOf(Policy policy) { return policy == Policy::kMinimal ? "minimal" : "per-tile"; }

}  // namespace cubist::sync

#endif  // CUBIST_NPU_MODEL_SYNC_POLICY_H_
