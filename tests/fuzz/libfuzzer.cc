// A libFuzzer program for one of the targets: CUBIST_FUZZ_TARGET names it.
#include <cstdint>
#include <cstring>

#include "tests/fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  for (const cubist::fuzz::Target& target : cubist::fuzz::kTargets) {
    if (std::strcmp(target.name, CUBIST_FUZZ_TARGET) == 0) target.run(std::as_bytes(std::span(data, size)));
  }
  return 0;
}
