// Rows of tensors with more than 2^31 elements, and further than that from each other: memory that is mapped and, but for
// the rows that move, never touched.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/token_permute.h"
#include "kernels/token_permute_grad.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"

namespace cubist::testing {
namespace {

class Mapped {
 public:
  explicit Mapped(std::int64_t bytes)
      : size_(static_cast<std::size_t>(bytes)),
        data_(::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                     0)) {}
  ~Mapped() {
    if (given()) ::munmap(data_, size_);
  }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;

  bool given() const { return data_ != MAP_FAILED; }
  void* data() const { return data_; }

 private:
  std::size_t size_;
  void* data_;
};

// 2^32 elements and some: the last rows begin behind 2^32, which 32 bits do not count, nor bytes of them.
constexpr std::int64_t kHidden = 4096, kRows = (std::int64_t{1} << 20) + 3, kMost = kRows * kHidden;
constexpr std::int64_t kFew = 3, kTopK = 2, kExperts = 4;
// Between rows of a view with few of them.
constexpr std::int64_t kStride = (std::int64_t{1} << 31) + 64;

// Element h of row i of what is written here.
float Value(std::int64_t i, std::int64_t h) { return static_cast<float>(1 + (i * 31 + h) % 200); }

void FillRow(const Tensor& x, std::int64_t row, std::int64_t number) {
  for (std::int64_t h = 0; h < x.size(1); ++h)
    StoreFloat(x.data, x.dtype, row * x.stride(0) + h * x.stride(1), Value(number, h));
}

// That row i of x is `factor` times what stands in row `number`, or 0 where that is negative.
void ExpectRow(const ConstTensor& x, std::int64_t row, std::int64_t number, float factor = 1) {
  std::int64_t wrong = 0;
  for (std::int64_t h = 0; h < x.size(1); ++h) {
    const float expected = number < 0 ? 0 : factor * Value(number, h);
    wrong += LoadFloat(x.data, x.dtype, row * x.stride(0) + h * x.stride(1)) == expected ? 0 : 1;
  }
  EXPECT_EQ(wrong, 0) << "row " << row;
}

Tensor FarRows(const Mapped& memory) {
  Tensor x(memory.data(), DType::kBF16, {kFew, kHidden});
  x.strides[0] = kStride;
  return x;
}

// Few of many tokens go anywhere: the last ones.
TEST(LargeViewsTest, TokenPermuteOfManyTokens) {
  const Mapped memory(2 * kMost);
  if (!memory.given()) GTEST_SKIP() << "no address space";
  const Tensor tokens(memory.data(), DType::kBF16, {kRows, kHidden});
  const std::vector<std::int64_t> going = {5, (std::int64_t{1} << 19) + 1, kRows - 2, kRows - 1};
  std::vector<std::int32_t> ids(static_cast<std::size_t>(kRows), -1), sorted(ids);
  for (std::size_t i = 0; i < going.size(); ++i) {
    FillRow(tokens, going[i], going[i]);
    ids[static_cast<std::size_t>(going[i])] = static_cast<std::int32_t>(kExperts - 1 - i);
  }
  Matrix permuted(DType::kBF16, {4, kHidden});
  ASSERT_TRUE(IsOk(TokenPermute(Host(), {.tokens = tokens,
                                         .topk_ids = ConstTensor(ids.data(), DType::kI32, {kRows}),
                                         .num_experts = kExperts,
                                         .num_out_tokens = 4,
                                         .permuted = permuted.view(),
                                         .sorted_indices = Tensor(sorted.data(), DType::kI32, {kRows})})));
  for (std::int64_t row = 0; row < 4; ++row)
    ExpectRow(permuted.view(), row, going[static_cast<std::size_t>(3 - row)]);
  ExpectGuards(permuted);
}

// Rows that few tokens take together again out of very many, and their gradient's.
TEST(LargeViewsTest, TokenUnpermuteOfManyRows) {
  const Mapped memory(2 * kMost);
  if (!memory.given()) GTEST_SKIP() << "no address space";
  const Tensor rows(memory.data(), DType::kBF16, {kRows, kHidden});
  std::vector<std::int32_t> sorted = {static_cast<std::int32_t>(kRows - 1), -1, 7, -1, -1, (1 << 19) + 3};
  for (const std::int32_t row : sorted) {
    if (row >= 0) FillRow(rows, row, row);
  }
  const ConstTensor indices(sorted.data(), DType::kI32, {kFew * kTopK});
  Matrix out(DType::kBF16, {kFew, kHidden}), gradient(DType::kBF16, {kFew, kHidden});
  ASSERT_TRUE(IsOk(TokenUnpermute(
      Host(), {.permuted = rows, .sorted_indices = indices, .top_k = kTopK, .out = out.view()})));
  ASSERT_TRUE(IsOk(TokenPermuteGrad(
      Host(),
      {.permuted_grad = rows, .sorted_indices = indices, .top_k = kTopK, .tokens_grad = gradient.view()})));
  for (const Matrix* x : {&out, &gradient}) {
    ExpectRow(x->view(), 0, kRows - 1), ExpectRow(x->view(), 1, 7), ExpectRow(x->view(), 2, (1 << 19) + 3);
    ExpectGuards(*x);
  }
}

// Rows 2^31 elements apart, read and written.
TEST(LargeViewsTest, RowsFarApart) {
  const Mapped from(2 * kFew * kStride), there(2 * kFew * kTopK * kStride), back(2 * kFew * kStride);
  if (!from.given() || !there.given() || !back.given()) GTEST_SKIP() << "no address space";
  const Tensor tokens = FarRows(from), out = FarRows(back);
  Tensor permuted(there.data(), DType::kBF16, {kFew * kTopK, kHidden});
  permuted.strides[0] = kStride;
  for (std::int64_t t = 0; t < kFew; ++t) FillRow(tokens, t, t);
  const std::int32_t ids[] = {3, 0, 2, 1, 1, 3};
  const std::int64_t token_of_row[] = {0, 1, 2, 1, 0, 2};
  std::int32_t sorted[kFew * kTopK] = {};
  const Tensor indices(sorted, DType::kI32, {kFew * kTopK});
  ASSERT_TRUE(IsOk(TokenPermute(Host(), {.tokens = tokens,
                                         .topk_ids = ConstTensor(ids, DType::kI32, {kFew, kTopK}),
                                         .num_experts = kExperts,
                                         .permuted = permuted,
                                         .sorted_indices = indices})));
  for (std::int64_t row = 0; row < kFew * kTopK; ++row) ExpectRow(permuted, row, token_of_row[row]);
  ASSERT_TRUE(IsOk(
      TokenUnpermute(Host(), {.permuted = permuted, .sorted_indices = indices, .top_k = kTopK, .out = out})));
  for (std::int64_t t = 0; t < kFew; ++t) ExpectRow(out, t, t, 2);
  ASSERT_TRUE(IsOk(TokenUnpermuteGrad(
      Host(), {.out_grad = tokens, .sorted_indices = indices, .top_k = kTopK, .permuted_grad = permuted})));
  for (std::int64_t row = 0; row < kFew * kTopK; ++row) ExpectRow(permuted, row, token_of_row[row]);
}

}  // namespace
}  // namespace cubist::testing
