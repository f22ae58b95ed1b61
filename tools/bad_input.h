// What a command says of bad input, and its exit code.
#ifndef CUBIST_TOOLS_BAD_INPUT_H_
#define CUBIST_TOOLS_BAD_INPUT_H_

#include <cstdio>
#include <string>

namespace cubist {

inline constexpr int kBadInput = 2;

// `command` is its whole name, such as "cubist info".
inline int BadInput(const std::string& command, const std::string& what) {
  std::fprintf(stderr, "%s: %s\n", command.c_str(), what.c_str());
  return kBadInput;
}

}  // namespace cubist

#endif  // CUBIST_TOOLS_BAD_INPUT_H_
