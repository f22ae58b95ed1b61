// Loc: a place in the source, as std::source_location, which Clang before 15 has not got with GCC's library.
#ifndef CUBIST_NPU_MODEL_LOCATION_H_
#define CUBIST_NPU_MODEL_LOCATION_H_

#include <cstdint>

namespace cubist {

class Loc {
 public:
  constexpr Loc() = default;
  // As a defaulted argument: the place of the call that leaves it out.
  static constexpr Loc current(const char* file = __builtin_FILE(),
                               std::uint_least32_t line = __builtin_LINE()) {
    return Loc(file, line);
  }

  constexpr const char* file_name() const { return file_; }
  constexpr std::uint_least32_t line() const { return line_; }

 private:
  constexpr Loc(const char* file, std::uint_least32_t line) : file_(file), line_(line) {}

  const char* file_ = "";
  std::uint_least32_t line_ = 0;
};

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_LOCATION_H_
