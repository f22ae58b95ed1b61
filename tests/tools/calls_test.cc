// Every kernel of the table, called from several threads at once and where memory runs out.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "npu_model/device.h"
#include "tools/kernel_call.h"

namespace {

// Allocations that still succeed; negative: all of them do.
std::atomic<long> allowance = -1;
std::atomic<bool> once = true;  // After one that failed all succeed again; else none does.
std::atomic<bool> failed = false;

bool Refused() {
  if (allowance.load(std::memory_order_relaxed) < 0) return false;
  if (allowance.fetch_sub(1) != 0) return false;
  failed = true;
  if (!once) allowance = 0;
  return true;
}

void* Allocate(std::size_t bytes, std::size_t alignment) {
  if (Refused()) throw std::bad_alloc();
  void* data = nullptr;
  if (posix_memalign(&data, alignment, bytes == 0 ? 1 : bytes) != 0) throw std::bad_alloc();
  return data;
}

// Not inlined: GCC takes std::free inlined into a delete for the partner of a new that it has not inlined.
[[gnu::noinline]] void Release(void* data) { std::free(data); }

}  // namespace

void* operator new(std::size_t bytes) { return Allocate(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return Allocate(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return Refused() ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
}
void operator delete(void* data, const std::nothrow_t&) noexcept { Release(data); }
void operator delete(void* data) noexcept { Release(data); }
void operator delete(void* data, std::size_t) noexcept { Release(data); }
void operator delete(void* data, std::align_val_t) noexcept { Release(data); }
void operator delete(void* data, std::size_t, std::align_val_t) noexcept { Release(data); }

namespace cubist {
namespace {

// Fills the call's outputs with what it computes, or with nothing.
std::unique_ptr<KernelCall> Made(const KernelForm& form, const char* dtype) {
  KernelCallOptions options;
  options.kernel = form.name, options.shape = form.small, options.dtype = dtype, options.with_data = true;
  auto call = std::make_unique<KernelCall>();
  const Status status = MakeKernelCall(options, call.get());
  EXPECT_TRUE(status.ok()) << status.message();
  return call;
}

std::string Outputs(const KernelCall& call) {
  std::string bytes;
  for (const Tensor& output : call.outputs()) {
    bytes.append(static_cast<const char*>(output.data),
                 static_cast<std::size_t>(output.count() * SizeOf(output.dtype)));
  }
  return bytes;
}

void ClearOutputs(const KernelCall& call) {
  for (const Tensor& output : call.outputs())
    std::memset(output.data, 0, static_cast<std::size_t>(output.count() * SizeOf(output.dtype)));
}

TEST(CallsTest, SeveralThreadsAtOnceGiveWhatOneGives) {
  for (const char* dtype : {"fp32", "bf16"}) {
    std::vector<std::string> expected;
    for (const KernelForm& form : KernelForms()) {
      const auto call = Made(form, dtype);
      ClearOutputs(*call);
      ASSERT_TRUE((*call)(Host({.threads = 1})).ok()) << form.name;
      expected.push_back(Outputs(*call));
    }
    // Each thread begins with another kernel, so that different ones run side by side.
    constexpr int kThreads = 4;
    std::vector<std::thread> threads;
    std::atomic<int> wrong = 0;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        const std::vector<KernelForm> forms = KernelForms();
        for (std::size_t i = 0; i < forms.size(); ++i) {
          const std::size_t at = (i + static_cast<std::size_t>(t)) % forms.size();
          const auto call = Made(forms[at], dtype);
          ClearOutputs(*call);
          const Device device = t % 2 == 0 ? Host({.threads = 1}) : Host({.threads = 2});
          wrong += !(*call)(device).ok() || Outputs(*call) != expected[at];
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0) << dtype;
  }
}

// Lets the n-th allocation of a call fail, for n that grow, until a call needs no more than those before.
void ExpectErrorsAreClean(const KernelForm& form, const Device& device) {
  SCOPED_TRACE(std::string(form.name) + " on " + device.chip().name);
  const auto call = Made(form, "bf16");
  ClearOutputs(*call);
  ASSERT_TRUE((*call)(device).ok());
  const std::string expected = Outputs(*call);
  for (const bool only_once : {true, false}) {
    for (long n = 0;; n = n < 20 ? n + 1 : n + n / 3) {
      failed = false, once = only_once, allowance = n;
      Profile profile;
      const Status status = (*call)(device, &profile);
      allowance = -1;
      if (!failed) {
        EXPECT_TRUE(status.ok()) << status.message();
        break;
      }
      // Where it was not needed after all, as for a cache, the call may go well.
      if (status.ok()) continue;
      ASSERT_EQ(status.code(), StatusCode::kOutOfMemory) << n << ": " << status.message();
      ASSERT_FALSE(status.message().empty());
    }
  }
  ClearOutputs(*call);
  ASSERT_TRUE((*call)(device).ok());
  EXPECT_EQ(Outputs(*call), expected);
}

TEST(CallsTest, OutOfMemoryIsAnErrorOnTheHost) {
  for (const KernelForm& form : KernelForms()) ExpectErrorsAreClean(form, Host({.threads = 1}));
}

TEST(CallsTest, OutOfMemoryIsAnErrorOnAModelledChip) {
  for (const KernelForm& form : KernelForms()) ExpectErrorsAreClean(form, Npu(Ascend910B2()));
}

}  // namespace
}  // namespace cubist
