// Calls made from bytes: most are right but for a field or two.
#ifndef CUBIST_TESTS_FUZZ_CALLER_H_
#define CUBIST_TESTS_FUZZ_CALLER_H_

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <utility>
#include <vector>

#include "kernels/attention_options.h"
#include "kernels/route.h"
#include "npu_model/device.h"
#include "npu_model/status.h"
#include "npu_model/types.h"
#include "tests/fuzz/targets.h"

namespace cubist::fuzz {

// Choices from the input; zeros once it ends.
class Choices {
 public:
  explicit Choices(Bytes input) : input_(input) {}

  unsigned Byte() {
    if (next_ == input_.size()) return 0;
    return static_cast<unsigned>(input_[next_++]);
  }
  bool Often() { return Byte() % 4 != 3; }
  bool Seldom() { return Byte() % 32 == 31; }
  std::int64_t Below(std::int64_t n) { return static_cast<std::int64_t>(Byte()) % n; }
  float Number() {
    constexpr float kNumbers[] = {1.0f, 0.0f, 0.5f, -1.0f, 1e30f, -0.0f, 1e-30f, 3.0f};
    return kNumbers[Byte() % std::size(kNumbers)];
  }
  template <class T, std::size_t n>
  T Of(const T (&values)[n]) {
    return values[Byte() % n];
  }

 private:
  Bytes input_;
  std::size_t next_ = 0;
};

inline constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16};
inline constexpr Causal kCausal[] = {Causal::kNone, Causal::kTopLeft, Causal::kBottomRight};
inline constexpr DType kInts[] = {DType::kI32, DType::kI64};

// Where all tensors lie: every one has a part of its own that holds any view that a spoilt size or stride may ask for. In
// front is one that views step down into.
inline constexpr std::int64_t kMost = 8;  // of a size
inline constexpr std::int64_t kPart = 64 * 1024, kParts = 32;

class Memory {
 public:
  Memory() : bytes_(kPart * (kParts + 1)) {}

  // Floats of size about 1, integers from -1 to 6, a third of booleans true: `salt` varies them. Bytes are copied, not
  // made: under sanitizers this takes a call as long as the kernel does.
  void Fill(unsigned salt) {
    static const std::vector<float> floats = Floats();
    std::memcpy(bytes_.data(), &floats[salt % kSalts], bytes_.size());
    used_ = 0;
  }
  // They repeat every eight elements.
  void FillIntegers(std::byte* part, DType dtype, unsigned salt) {
    const std::size_t period = 8 * static_cast<std::size_t>(SizeOf(dtype));
    for (std::size_t i = 0; i < 8; ++i) {
      const std::int64_t value = static_cast<std::int64_t>((i * 7 + salt) % 8) - (salt % 5 == 4 ? 1 : 0);
      if (dtype == DType::kI64) {
        std::memcpy(part + i * 8, &value, 8);
      } else if (dtype == DType::kBool) {
        part[i] = static_cast<std::byte>(value % 3 == 0);
      } else {
        const auto narrow = static_cast<std::int32_t>(value);
        std::memcpy(part + i * 4, &narrow, 4);
      }
    }
    for (std::size_t filled = period; filled < kPart; filled *= 2) std::memcpy(part + filled, part, filled);
  }
  bool Is(const std::vector<std::byte>& bytes) const {
    return std::memcmp(bytes.data(), bytes_.data(), bytes_.size()) == 0;
  }
  std::byte* NextPart() { return Part(used_++ % kParts); }
  std::byte* Part(std::int64_t i) { return &bytes_[static_cast<std::size_t>(kPart * (i + 1))]; }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  static constexpr std::size_t kSalts = 256;

  static std::vector<float> Floats() {
    std::vector<float> floats(kPart * (kParts + 1) / sizeof(float) + kSalts);
    for (std::size_t i = 0; i < floats.size(); ++i) {
      const auto noise = static_cast<std::uint32_t>(i * 2654435761u);
      floats[i] = static_cast<float>(noise >> 16) / 32768.0f - 1.0f;
    }
    return floats;
  }

  std::vector<std::byte> bytes_;
  std::int64_t used_ = 0;
};

class Caller {
 public:
  explicit Caller(Bytes input) : choose_(input) { memory().Fill(choose_.Byte()); }

  Choices& choose() { return choose_; }
  std::int64_t Size() { return choose_.Below(kMost); }
  DType Float() { return choose_.Of(kFloats); }

  // A right view, contiguous or with gaps, upwards or downwards, and seldom a spoilt one.
  Tensor Of(DType dtype, std::initializer_list<std::int64_t> sizes) {
    Tensor t(memory().NextPart(), dtype, sizes);
    if (!IsFloat(dtype)) memory().FillIntegers(static_cast<std::byte*>(t.data), dtype, choose_.Byte());
    if (choose_.Seldom() && t.rank > 1) std::swap(t.strides[0], t.strides[1]);
    if (choose_.Seldom()) {
      for (auto& stride : t.strides) stride *= 2;
    }
    if (choose_.Seldom()) Flip(&t);
    if (choose_.Seldom()) Spoil(&t);
    return t;
  }
  Tensor Maybe(DType dtype, std::initializer_list<std::int64_t> sizes) {
    return choose_.Byte() % 2 == 0 ? Tensor() : Of(dtype, sizes);
  }

  // Runs a call; where it is refused, nothing may have been written.
  template <class Call>
  void Run(const Call& call) {
    static std::vector<std::byte> before;
    before = memory().bytes();
    HostOptions host;
    host.threads = static_cast<int>(1 + choose_.Below(2));
    NpuOptions npu;
    npu.with_data = choose_.Byte() % 2 == 0;
    const bool on_host = choose_.Byte() % 4 != 3;
    const Status status = call(on_host ? Host(host) : Npu(Ascend910B2(), npu));
    if (status.ok()) return;
    if (status.message().empty() || !memory().Is(before)) {
      std::fprintf(stderr, "refused (%s), and %s\n", status.message().c_str(),
                   status.message().empty() ? "does not say why" : "wrote");
      std::abort();
    }
  }

 private:
  static Memory& memory() {
    static Memory memory;
    return memory;
  }

  void Flip(Tensor* t) {
    const auto d = static_cast<std::size_t>(choose_.Below(std::max(t->rank, 1)));
    if (t->sizes[d] == 0) return;
    t->data = static_cast<std::byte*>(t->data) + (t->sizes[d] - 1) * t->strides[d] * SizeOf(t->dtype);
    t->strides[d] = -t->strides[d];
  }

  void Spoil(Tensor* t) {
    const auto d = static_cast<std::size_t>(choose_.Below(std::max(t->rank, 1)));
    constexpr std::int64_t kStrides[] = {-3, -1, 0, 1, 3, std::int64_t{1} << 61, INT64_MIN};
    switch (choose_.Byte() % 7) {
      case 0:
        t->sizes[d] = choose_.Below(kMost + 1) - 1;
        break;
      case 1:
        t->strides[d] = choose_.Of(kStrides);
        break;
      case 2:
        t->dtype = static_cast<DType>(choose_.Byte() % 7);  // One more than there are.
        break;
      case 3:
        t->rank = static_cast<int>(choose_.Below(Tensor::kMaxRank + 2));
        break;
      case 4:
        t->data = static_cast<std::byte*>(t->data) + 1;
        break;
      case 5:
        t->data = nullptr;
        break;
      default:
        t->data = memory().Part(choose_.Below(kParts));  // another tensor's
    }
  }

  Choices choose_;
};

RouteOptions OptionsOf(Caller& in);

void CallMatmul(Caller& in);
void CallPackedMatmul(Caller& in);
void CallBatchedMatmul(Caller& in);
void CallGroupedMatmul(Caller& in);
void CallGroupedMatmulGrad(Caller& in);
void CallFlashAttention(Caller& in);
void CallFlashAttentionGrad(Caller& in);
void CallTokenPermute(Caller& in);
void CallTokenUnpermute(Caller& in);
void CallTokenPermuteGrad(Caller& in);
void CallTokenUnpermuteGrad(Caller& in);
void CallReorderChunks(Caller& in);
void CallRoute(Caller& in);
void CallRouteGrad(Caller& in);
void CallRmsNorm(Caller& in);
void CallRmsNormGrad(Caller& in);
void CallSwiGlu(Caller& in);
void CallSwiGluGrad(Caller& in);
void CallMoeBlock(Caller& in);
void CallMlaBlock(Caller& in);

}  // namespace cubist::fuzz

#endif  // CUBIST_TESTS_FUZZ_CALLER_H_
