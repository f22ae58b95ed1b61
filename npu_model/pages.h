// How memory stands on pages.
#ifndef CUBIST_NPU_MODEL_PAGES_H_
#define CUBIST_NPU_MODEL_PAGES_H_

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace cubist {

inline constexpr std::int64_t kHugePage = 2 << 20;

// Asks for huge pages under `bytes` from `data` on, which begins a page, wherever whole ones lie there: what is read in many
// places at once then needs few TLB entries. Debian's own kernel gives them unasked. A wish: failure changes nothing but speed.
inline void AskForHugePages(void* data, std::int64_t bytes) {
  if (bytes >= kHugePage) madvise(data, static_cast<std::size_t>(bytes), MADV_HUGEPAGE);
}

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_PAGES_H_
