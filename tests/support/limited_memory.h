// LimitedMemory: a program whose `operator new` ends when a test says so. Linking it replaces the operators.
#ifndef CUBIST_TESTS_SUPPORT_LIMITED_MEMORY_H_
#define CUBIST_TESTS_SUPPORT_LIMITED_MEMORY_H_

#include <cstdint>

namespace cubist::testing {

// While it lives, all threads together have `allocations` more; each later one throws std::bad_alloc. One at a time.
class LimitedMemory {
 public:
  explicit LimitedMemory(std::int64_t allocations);
  LimitedMemory(const LimitedMemory&) = delete;
  LimitedMemory& operator=(const LimitedMemory&) = delete;
  ~LimitedMemory();
};

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_SUPPORT_LIMITED_MEMORY_H_
