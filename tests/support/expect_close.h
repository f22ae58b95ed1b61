// Comparison of a kernel's answer with the reference's, element by element.
#ifndef CUBIST_TESTS_SUPPORT_EXPECT_CLOSE_H_
#define CUBIST_TESTS_SUPPORT_EXPECT_CLOSE_H_

#include <gtest/gtest.h>

#include <span>
#include <vector>

#include "npu_model/location.h"
#include "npu_model/types.h"
#include "tests/support/matrix.h"

namespace cubist::testing {

// Whether |actual - expected| <= bound for every element; `expected` and `bound` are row-major in actual's
// shape. Equal values are close whatever the bound. NaN must stand where NaN is expected and nowhere else; so
// must infinities, except where a finite expected value lies within its bound of what the dtype rounds to
// infinity. A bound that is not a finite number accepts nothing else. A failure tells how many elements miss,
// and the worst: coordinates, expected, actual, bound.
::testing::AssertionResult IsClose(const ConstTensor& actual, std::span<const double> expected,
                                   std::span<const double> bound);

// Every element exactly as expected; NaN equals NaN.
::testing::AssertionResult IsExactly(const ConstTensor& actual, std::span<const double> expected);

// Whether two tensors of one shape and dtype hold the same bits.
::testing::AssertionResult HasSameBits(const ConstTensor& actual, const ConstTensor& expected);

// The same as expectations, which fail at the caller's line.
void ExpectClose(const ConstTensor& actual, std::span<const double> expected, std::span<const double> bound,
                 Loc where = Loc::current());
void ExpectExactly(const ConstTensor& actual, std::span<const double> expected, Loc where = Loc::current());
void ExpectSameBits(const ConstTensor& actual, const ConstTensor& expected, Loc where = Loc::current());
void ExpectGuards(const Matrix& matrix, Loc where = Loc::current());

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_SUPPORT_EXPECT_CLOSE_H_
