// Rows of tensors with more than 2^31 elements, and further than that from each other: memory that is mapped and, but for
// the rows that move, never touched.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <vector>

#include "kernels/flash_attention.h"
#include "kernels/flash_attention_grad.h"
#include "kernels/token_permute.h"
#include "kernels/token_permute_grad.h"
#include "tests/kernels/attention_grad_call.h"
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

// Tensors like those of a call, of which one dimension has its entries further than 2^31 elements from each other.
class FarTensors {
 public:
  explicit FarTensors(int far) : far_(far) {}

  // In the place of `x`, with its values.
  void Move(ConstTensor& x) {
    if (!x.given() || x.count() == 0 || far_ >= x.rank) return;
    Tensor there = Like(x);
    if (there.data != nullptr) Assign(there, ToDoubles(x));
    x = there;
  }
  void Move(Tensor& x) {
    if (x.given() && x.count() > 0 && far_ < x.rank) x = Like(x);
  }
  bool given() const {
    return std::all_of(memory_.begin(), memory_.end(), [](const Mapped& x) { return x.given(); });
  }

 private:
  Tensor Like(const ConstTensor& x) {
    Tensor there;
    there.dtype = x.dtype, there.rank = x.rank, there.sizes = x.sizes;
    std::int64_t stride = 1;
    for (int d = x.rank - 1; d >= 0; --d) {
      there.strides[static_cast<std::size_t>(d)] = d == far_ ? kStride : stride;
      if (d != far_) stride *= x.size(d);
    }
    const Mapped& memory = memory_.emplace_back(x.size(far_) * kStride * SizeOf(x.dtype));
    there.data = memory.given() ? memory.data() : nullptr;
    return there;
  }

  int far_;
  std::list<Mapped> memory_;
};

// Attention and its gradient give the same bits however far batch entries, heads, rows or columns are from each other.
TEST(LargeViewsTest, AttentionOfTensorsFarApart) {
  GradCall call({2, 2, 2, 5, 9, 8, 8, 16}, {.in = DType::kBF16,
                                            .out = DType::kBF16,
                                            .causal = Causal::kBottomRight,
                                            .forward_out = DType::kBF16,
                                            .bias = {2, 2, 5, 9},
                                            .mask = {2, 2, 5, 9}});
  call.FillNormal();
  Matrix out(DType::kBF16, {2, 2, 5, 16}), lse(DType::kF32, {2, 2, 5});
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    ASSERT_TRUE(IsOk(FlashAttention(device, ForwardOf(call.args(), out.view(), lse.view()))));
    ASSERT_TRUE(IsOk(FlashAttentionGrad(device, call.args())));
    // The model's L2 counts the lines between, too: there only of the dimension that has two entries.
    for (int far = 0; far < (device.kind() == Device::Kind::kHost ? 4 : 1); ++far) {
      SCOPED_TRACE(Join("dimension ", far));
      FarTensors tensors(far);
      FlashAttentionGradArgs args = call.args();
      for (ConstTensor* x : {&args.q, &args.k, &args.v, &args.q_rope, &args.k_rope, &args.out, &args.lse,
                             &args.dout, &args.bias, &args.mask})
        tensors.Move(*x);
      for (Tensor* x : {&args.dq, &args.dk, &args.dv, &args.dq_rope, &args.dk_rope, &args.dbias})
        tensors.Move(*x);
      Matrix near_lse(DType::kF32, {2, 2, 5});
      Tensor far_out = out.view(), far_lse = near_lse.view();
      tensors.Move(far_out), tensors.Move(far_lse);
      if (!tensors.given()) GTEST_SKIP() << "no address space";
      ASSERT_TRUE(IsOk(FlashAttention(device, ForwardOf(args, far_out, far_lse))));
      ExpectExactly(far_out, out.ToDoubles()), ExpectExactly(far_lse, lse.ToDoubles());
      ASSERT_TRUE(IsOk(FlashAttentionGrad(device, args)));
      ExpectExactly(args.dq, call.dq.ToDoubles()), ExpectExactly(args.dq_rope, call.dq_rope.ToDoubles());
      ExpectExactly(args.dk, call.dk.ToDoubles()), ExpectExactly(args.dk_rope, call.dk_rope.ToDoubles());
      ExpectExactly(args.dv, call.dv.ToDoubles()), ExpectExactly(args.dbias, call.dbias.ToDoubles());
    }
  }
}

}  // namespace
}  // namespace cubist::testing
