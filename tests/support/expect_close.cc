#include "tests/support/expect_close.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iomanip>
#include <limits>
#include <sstream>
#include <string>

namespace cubist::testing {
namespace {

std::string Coordinates(const Index& index, int rank) {
  std::ostringstream text;
  text << "(";
  for (int d = 0; d < rank; ++d) text << (d == 0 ? "" : ", ") << index[static_cast<std::size_t>(d)];
  text << ")";
  return text.str();
}

// From this magnitude on, round-to-nearest gives infinity: half a unit above the largest finite number.
double RoundsToInfinity(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return 65520.0;
    case DType::kBF16:
      return 0x1.ffp127;
    default:
      return 0x1.ffffffp127;
  }
}

// By how much an element misses its bound: at most 1 where it is within; infinite where no bound can help.
double Miss(DType dtype, double actual, double expected, double bound) {
  constexpr double kHopeless = std::numeric_limits<double>::infinity();
  if (std::isnan(expected)) return std::isnan(actual) ? 0 : kHopeless;
  if (actual == expected) return 0;
  if (!std::isfinite(bound) || std::isnan(actual) || std::isinf(expected)) return kHopeless;
  if (std::isinf(actual)) {
    const bool may_overflow = IsFloat(dtype) && std::signbit(actual) == std::signbit(expected) &&
                              std::abs(expected) + bound >= RoundsToInfinity(dtype);
    return may_overflow ? 0 : kHopeless;
  }
  const double error = std::abs(actual - expected);
  return error <= bound ? 0 : bound > 0 ? error / bound : kHopeless;
}

struct Worst {
  double miss = 0, expected = 0, actual = 0, bound = 0;
  Index index{};
};

::testing::AssertionResult Report(const ConstTensor& actual, std::int64_t misses, const Worst& worst) {
  return ::testing::AssertionFailure()
         << misses << " of " << actual.count() << " elements (" << NameOf(actual.dtype)
         << ") beyond their bound; worst at " << Coordinates(worst.index, actual.rank) << ": expected "
         << std::setprecision(17) << worst.expected << ", actual " << worst.actual << ", error "
         << std::setprecision(4) << std::abs(worst.actual - worst.expected) << ", bound " << worst.bound;
}

::testing::AssertionResult Compare(const ConstTensor& actual, std::span<const double> expected,
                                   const double* bound) {
  if (static_cast<std::int64_t>(expected.size()) != actual.count()) {
    return ::testing::AssertionFailure()
           << actual.count() << " elements compared with " << expected.size() << " expected ones";
  }
  std::int64_t misses = 0;
  Worst worst;
  std::size_t i = 0;
  ForEachElement(actual, [&](const Index& index, std::int64_t offset) {
    const double a = LoadElement(actual, offset), e = expected[i], b = bound == nullptr ? 0 : bound[i];
    ++i;
    const double miss = Miss(actual.dtype, a, e, b);
    if (miss == 0) return;
    ++misses;
    if (miss > worst.miss) worst = {miss, e, a, b, index};
  });
  return misses == 0 ? ::testing::AssertionSuccess() : Report(actual, misses, worst);
}

void AddFailure(const ::testing::AssertionResult& result, const Loc& where) {
  if (!result) ADD_FAILURE_AT(where.file_name(), static_cast<int>(where.line())) << result.message();
}

}  // namespace

::testing::AssertionResult IsClose(const ConstTensor& actual, std::span<const double> expected,
                                   std::span<const double> bound) {
  if (bound.size() != expected.size()) {
    return ::testing::AssertionFailure() << expected.size() << " elements but " << bound.size() << " bounds";
  }
  return Compare(actual, expected, bound.data());
}

::testing::AssertionResult IsExactly(const ConstTensor& actual, std::span<const double> expected) {
  return Compare(actual, expected, nullptr);
}

::testing::AssertionResult HasSameBits(const ConstTensor& actual, const ConstTensor& expected) {
  if (actual.dtype != expected.dtype || actual.rank != expected.rank || actual.sizes != expected.sizes) {
    return ::testing::AssertionFailure()
           << "shapes or dtypes differ: " << actual.count() << " elements of " << NameOf(actual.dtype)
           << " and " << expected.count() << " of " << NameOf(expected.dtype);
  }
  const std::int64_t size = SizeOf(actual.dtype);
  std::vector<const std::byte*> places;
  ForEachElement(expected, [&](const Index&, std::int64_t offset) {
    places.push_back(static_cast<const std::byte*>(expected.data) + offset * size);
  });
  std::int64_t misses = 0;
  std::size_t i = 0;
  ::testing::AssertionResult result = ::testing::AssertionSuccess();
  ForEachElement(actual, [&](const Index& index, std::int64_t offset) {
    const std::byte* place = places[i++];
    const std::byte* found = static_cast<const std::byte*>(actual.data) + offset * size;
    if (std::memcmp(found, place, static_cast<std::size_t>(size)) == 0 || misses++ > 0) return;
    result = ::testing::AssertionFailure()
             << "first differing element " << Coordinates(index, actual.rank) << ": " << std::setprecision(9)
             << LoadElement(actual, offset) << " and "
             << LoadElement(expected, (place - static_cast<const std::byte*>(expected.data)) / size);
  });
  if (misses > 0) result << "; " << misses << " of " << actual.count() << " elements differ in their bits";
  return result;
}

void ExpectClose(const ConstTensor& actual, std::span<const double> expected, std::span<const double> bound,
                 Loc where) {
  AddFailure(IsClose(actual, expected, bound), where);
}

void ExpectExactly(const ConstTensor& actual, std::span<const double> expected, Loc where) {
  AddFailure(IsExactly(actual, expected), where);
}

void ExpectSameBits(const ConstTensor& actual, const ConstTensor& expected, Loc where) {
  AddFailure(HasSameBits(actual, expected), where);
}

void ExpectGuards(const Matrix& matrix, Loc where) { AddFailure(matrix.CheckGuards(), where); }

}  // namespace cubist::testing
