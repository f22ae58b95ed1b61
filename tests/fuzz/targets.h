// What is fuzzed: every parser, and the arguments of every kernel. A target takes any bytes; it aborts where an input
// breaks a promise, and the sanitizers see the rest.
#ifndef CUBIST_TESTS_FUZZ_TARGETS_H_
#define CUBIST_TESTS_FUZZ_TARGETS_H_

#include <cstddef>
#include <span>

namespace cubist::fuzz {

using Bytes = std::span<const std::byte>;

void Npy(Bytes input);        // tools/npy.h
void Workload(Bytes input);   // tools/workload.h
void ChipFile(Bytes input);   // tools/what_if.h
void Tuning(Bytes input);     // npu_model/tuning.h, and a call that takes what was read
void Csv(Bytes input);        // tools/validation/measured.h
void Arguments(Bytes input);  // every kernel, on the host and on the model: nothing is written on an error

struct Target {
  const char* name;  // of the folder of its seeds
  void (*run)(Bytes input);
};
inline constexpr Target kTargets[] = {{"npy", Npy},       {"workload", Workload}, {"chip", ChipFile},
                                      {"tuning", Tuning}, {"csv", Csv},           {"arguments", Arguments}};

}  // namespace cubist::fuzz

#endif  // CUBIST_TESTS_FUZZ_TARGETS_H_
