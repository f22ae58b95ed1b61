// Comparing answers: what a library wrote against the reference, element by element within derived bounds.
#ifndef CUBIST_BENCH_SUPPORT_ANSWER_H_
#define CUBIST_BENCH_SUPPORT_ANSWER_H_

#include <cstdint>
#include <span>
#include <string>

#include "npu_model/types.h"

namespace cubist::bench {

// Empty if every |actual[i * stride] - expected[i]| <= bounds[i]; else the first element beyond its bound,
// named by `where` and i. NaN is never within bounds.
std::string Mismatch(const std::string& where, const void* actual, DType dtype, std::int64_t stride,
                     std::span<const double> expected, std::span<const double> bounds);

// Overwrites elements with NaN, so that the answer of the library that ran before cannot pass for this one's.
void Spoil(void* data, DType dtype, std::int64_t count);

}  // namespace cubist::bench

#endif  // CUBIST_BENCH_SUPPORT_ANSWER_H_
