// What attention does to tiles of scores and weights besides the softmax: on every SIMD target.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "npu_model/composites.h"
#include "npu_model/host/host_core.h"
#include "npu_model/philox.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/simd_targets.h"

namespace cubist::testing {
namespace {

constexpr std::int64_t kSizes[][2] = {{1, 1}, {3, 7}, {2, 64}, {9, 33}, {17, 131}};

class AttentionOpsTest : public SimdTargetTest {
 protected:
  Scratch scratch_;
  HostContext context_{HostChip(), scratch_, 0, 1};
  HostAiCore core_{context_};
  HostVectorCore& vector_{core_.vectors()[0]};
  HostVector executor_{context_, 0};
  Random random_;

  template <class T>
  UbTile<T> NewTile(std::int64_t rows, std::int64_t cols) {
    return Ring<Buffer::kUB, T>(vector_, "tile", rows, cols, 1).Next(rows, cols);
  }
  template <class T>
  static T& At(UbTile<T> tile, std::int64_t i, std::int64_t j) {
    return reinterpret_cast<T*>(tile.slot()->shows.data)[i * tile.slot()->shows.pitch + j];
  }
  UbTile<float> NewScores(std::int64_t rows, std::int64_t cols) {
    const auto tile = NewTile<float>(rows, cols);
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < cols; ++j) At(tile, i, j) = static_cast<float>(random_.Normal());
    }
    return tile;
  }
};
INSTANTIATE_TEST_SUITE_P(Simd, AttentionOpsTest, ::testing::ValuesIn(SimdTargets()), SimdTargetName);

TEST_P(AttentionOpsTest, MaskWhereChangesWhatIsFlaggedAlone) {
  const auto check = [&](auto zero) {
    using T = decltype(zero);
    for (const auto& [rows, cols] : kSizes) {
      const auto x = NewTile<T>(rows, cols);
      const auto flags = NewTile<std::uint8_t>(rows, cols);
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < cols; ++j) {
          At(x, i, j) = T(static_cast<float>(i - j));
          At(flags, i, j) = static_cast<std::uint8_t>(random_.Integer(0, 1) * random_.Integer(1, 255));
        }
      }
      vector_.MaskWhere(x, flags, -INFINITY);
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < cols; ++j) {
          const float expected =
              At(flags, i, j) != 0 ? -INFINITY : static_cast<float>(T(static_cast<float>(i - j)));
          ASSERT_EQ(static_cast<float>(At(x, i, j)), expected) << i << ", " << j;
        }
      }
    }
  };
  check(float{}), check(BF16{}), check(F16{});
}

TEST_P(AttentionOpsTest, DistancesAreExact) {
  for (const auto& [rows, cols] : kSizes) {
    for (const std::int64_t first :
         {std::int64_t{0}, std::int64_t{5}, std::int64_t{-40}, std::int64_t{1} << 20}) {
      const auto x = NewTile<float>(rows, cols);
      vector_.Distances(x, first);
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < cols; ++j)
          ASSERT_EQ(At(x, i, j), static_cast<float>(std::abs(first + i - j)));
      }
    }
  }
}

TEST_P(AttentionOpsTest, AddAlibiIsItsExpansion) {
  for (const auto& [rows, cols] : kSizes) {
    for (const bool root : {false, true}) {
      for (const std::int64_t first : {3, -20}) {
        const auto body = NewScores(rows, cols), expansion = NewTile<float>(rows, cols),
                   scratch = NewTile<float>(rows, cols);
        vector_.Cast(expansion, body);
        const auto before = NewTile<float>(rows, cols);
        vector_.Cast(before, body);
        vector_.AddAlibi(body, scratch, 0.3f, 0.125f, first, root);
        ExpandAddAlibi(executor_, expansion, scratch, 0.3f, 0.125f, first, root, Loc::current());
        for (std::int64_t i = 0; i < rows; ++i) {
          for (std::int64_t j = 0; j < cols; ++j) {
            const auto distance = static_cast<double>(std::abs(first + i - j));
            const double exact =
                0.3 * static_cast<double>(At(before, i, j)) - 0.125 * (root ? std::sqrt(distance) : distance);
            ASSERT_NEAR(At(body, i, j), exact, 4 * 0x1p-24 * (std::abs(exact) + distance));
            ASSERT_NEAR(At(expansion, i, j), exact, 4 * 0x1p-24 * (std::abs(exact) + distance));
          }
        }
      }
    }
  }
}

TEST_P(AttentionOpsTest, DropFlagsAreThoseOfTheirPlaces) {
  const DropoutStream streams[] = {{.seed = 7, .offset = 3, .kept = 40000, .row_blocks = 100},
                                   {.seed = ~std::uint64_t{0},
                                    .offset = std::uint64_t{5} << 40,
                                    .kept = 1,
                                    .row_blocks = std::int64_t{1} << 33},
                                   {.seed = 0, .offset = 0, .kept = 65536, .row_blocks = 9}};
  for (const DropoutStream& stream : streams) {
    for (const auto& [rows, cols] : kSizes) {
      for (const std::int64_t key : {0, 8, 13}) {
        const std::int64_t row = random_.Integer(0, 1 << 20);
        const auto flags = NewTile<std::uint8_t>(rows, cols), turned = NewTile<std::uint8_t>(cols, rows);
        vector_.DropFlags(flags, stream, row, key, /*transposed=*/false);
        vector_.DropFlags(turned, stream, row, key, /*transposed=*/true);
        for (std::int64_t i = 0; i < rows; ++i) {
          for (std::int64_t j = 0; j < cols; ++j) {
            const int expected = IsDropped(stream, row + i, key + j) ? 1 : 0;
            ASSERT_EQ(At(flags, i, j), expected) << i << ", " << j;
            ASSERT_EQ(At(turned, j, i), expected) << i << ", " << j;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace cubist::testing
