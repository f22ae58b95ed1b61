// Chips that a call does not fit: the error names the buffer, and what fits is right.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/flash_attention.h"
#include "kernels/matmul.h"
#include "kernels/rms_norm.h"
#include "kernels/token_permute.h"
#include "reference/matmul.h"
#include "tests/kernels/bad_call.h"
#include "tests/kernels/call_fixtures.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

// Grows a buffer from next to nothing, in large steps once the call fits. While it does not, its error names the buffer and
// how much of it there is, and nothing is written; from some size on it fits, and the answer is right.
template <class Fixture, class Run, class Check>
void ExpectNamesBufferUntilItFits(const std::string& kernel, const std::vector<Buffer>& buffers, Run run,
                                  Check check) {
  for (Buffer buffer : buffers) {
    bool fits = false;
    const std::int64_t whole = Ascend910B2().buffer(buffer).capacity;
    for (std::int64_t bytes = 32; bytes <= whole;
         bytes += fits ? bytes : RoundUp(std::max<std::int64_t>(bytes / 4, 1), 32)) {
      SCOPED_TRACE(Join(kernel, " with ", bytes, " bytes of ", NameOf(buffer)));
      const Device device = NpuWithData(WithCapacity(buffer, bytes));
      Fixture fixture;
      const Fixture before = fixture;
      const Status status = run(device, fixture.args());
      if (status.ok()) {
        fits = true;
        check(fixture);
        continue;
      }
      EXPECT_FALSE(fits) << "fitted in less: " << status.message();
      EXPECT_TRUE(Says(status, {kernel, NameOf(buffer), "small chip has " + std::to_string(bytes)}));
      EXPECT_NE(status.code(), StatusCode::kInvalidArgument);
      for (std::size_t i = 0; i < fixture.all().size(); ++i) {
        ExpectSameBits(fixture.all()[i]->view(), before.all()[i]->view());
      }
      EXPECT_TRUE(Says(run(NpuWithoutData(WithCapacity(buffer, bytes)), fixture.args()), {NameOf(buffer)}));
    }
    EXPECT_TRUE(fits) << kernel << " never fitted " << NameOf(buffer);
  }
}

struct LargerMatmul : MatmulFixture {
  LargerMatmul() {
    Random random;
    a = Matrix(DType::kF32, {70, 90}), b = Matrix(DType::kF32, {90, 110}), bias = Matrix(DType::kF32, {110});
    c = Matrix(DType::kF32, {70, 110});
    a.FillIntegers(random), b.FillIntegers(random), bias.FillIntegers(random);
  }
};

TEST(SmallChipsTest, Matmul) {
  ExpectNamesBufferUntilItFits<LargerMatmul>(
      "matmul", {Buffer::kL1, Buffer::kL0A, Buffer::kL0B, Buffer::kL0C, Buffer::kBT}, RunMatmul,
      [](LargerMatmul& x) {
        ExpectExactly(x.c.view(), reference::Matmul(x.a.view(), false, x.b.view(), false, x.bias.view()).c);
      });
}

TEST(SmallChipsTest, FlashAttention) {
  // Equal scores, four keys: the mean, exactly.
  struct Fixture : AttentionFixture {
    Fixture() {
      Random random;
      k = Matrix(DType::kBF16, {2, 3, 64, 8}), v = Matrix(DType::kBF16, {2, 3, 64, 4});
      k_rope = Matrix(DType::kBF16, {2, 3, 64, 2});
      k.FillUniform(random), v.FillIntegers(random), k_rope.FillUniform(random);
      q.Fill(0), q_rope.Fill(0);
    }
  };
  ExpectNamesBufferUntilItFits<Fixture>(
      "flash_attention", {Buffer::kL1, Buffer::kL0A, Buffer::kL0B, Buffer::kL0C, Buffer::kUB}, RunAttention,
      [](Fixture& x) {
        for (std::int64_t h = 0; h < 6; ++h) {
          double sum = 0;
          for (std::int64_t j = 0; j < 64; ++j) sum += x.v.at({1, h / 2, j, 3});
          ASSERT_EQ(x.out.at({1, h, 4, 3}), RoundTo(DType::kBF16, sum / 64));
        }
      });
}

// The same for other shapes, without data, until they fit.
TEST(SmallChipsTest, MessagesNameTheBuffer) {
  const auto expect = [](const std::string& name, auto call) {
    for (Buffer buffer : {Buffer::kL1, Buffer::kL0A, Buffer::kL0B, Buffer::kL0C, Buffer::kUB}) {
      for (std::int64_t bytes = 256; bytes <= 64 << 10; bytes += bytes / 2) {
        const Status status = call(NpuWithoutData(WithCapacity(buffer, bytes)));
        if (status.ok()) break;
        EXPECT_TRUE(Says(status, {name.substr(0, name.find(' ')) + ": ", NameOf(buffer),
                                  "small chip has " + std::to_string(bytes)}))
            << name << " in " << bytes << " bytes of " << NameOf(buffer);
      }
    }
  };
  for (DType in : kFloatTypes) {
    for (std::int64_t size : {1, 33, 256}) {
      const ConstTensor square(nullptr, in, {size, size});
      expect(Join("matmul ", NameOf(in), " ", size), [&](const Device& device) {
        return Matmul(device, {.a = square, .b = square, .c = Tensor(nullptr, in, {size, size})});
      });
    }
    expect(Join("rms_norm ", NameOf(in)), [&](const Device& device) {
      return RmsNorm(device, {.x = ConstTensor(nullptr, in, {5, 300}),
                              .gamma = ConstTensor(nullptr, DType::kF32, {300}),
                              .out = Tensor(nullptr, in, {5, 300})});
    });
    for (std::int64_t d : {1, 64, 192}) {
      expect(Join("flash_attention ", NameOf(in), " ", d), [&](const Device& device) {
        return FlashAttention(device, {.q = ConstTensor(nullptr, in, {1, 1, 33, d}),
                                       .k = ConstTensor(nullptr, in, {1, 1, 65, d}),
                                       .v = ConstTensor(nullptr, in, {1, 1, 65, 128}),
                                       .out = Tensor(nullptr, in, {1, 1, 33, 128})});
      });
    }
  }
}

TEST(SmallChipsTest, TokenPermute) {
  ExpectNamesBufferUntilItFits<PermuteFixture>(
      "token_permute", {Buffer::kUB}, RunPermute, [](PermuteFixture& x) {
        for (std::int64_t s = 0; s < 15; ++s) {
          const auto row = static_cast<std::int64_t>(x.sorted_indices.at({s}));
          for (std::int64_t h = 0; h < 6; ++h) ASSERT_EQ(x.permuted.at({row, h}), x.tokens.at({s / 3, h}));
        }
      });
}

TEST(SmallChipsTest, TokenUnpermute) {
  ExpectNamesBufferUntilItFits<UnpermuteFixture>("token_unpermute", {Buffer::kUB}, RunUnpermute,
                                                 [](UnpermuteFixture& x) {
                                                   EXPECT_TRUE(std::isfinite(x.out.at({4, 5})));
                                                 });
}

}  // namespace
}  // namespace cubist::testing
