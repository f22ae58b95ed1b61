// What the caches of hosts have in common.
#ifndef CUBIST_NPU_MODEL_CACHE_H_
#define CUBIST_NPU_MODEL_CACHE_H_

#include <cstdint>

namespace cubist {

// Of a first-level cache of an x86 core, 32 KiB in 8 ways or 48 in 12: lines a multiple of this apart share a set, which holds as
// many of them as there are ways.
inline constexpr std::int64_t kWayBytes = 4096;

// Of the second-level cache of an x86 core with tile registers, 2 MiB: what a right operand may take that stays there while strips
// of the left one and of the sums pass.
inline constexpr std::int64_t kPassingBytes = 5 << 18;

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_CACHE_H_
