// Device: where a kernel call runs. Host() computes; Npu(chip) records the same
// kernel and predicts its time on the chip.
#ifndef CUBIST_NPU_MODEL_DEVICE_H_
#define CUBIST_NPU_MODEL_DEVICE_H_

#include <cstdint>
#include <limits>
#include <memory>

#include "npu_model/chip.h"
#include "npu_model/profile.h"
#include "npu_model/status.h"
#include "npu_model/sync/policy.h"
#include "npu_model/tuning.h"

namespace cubist {

namespace trace {
struct Record;
}

inline constexpr int kMostThreads = 1024;

// Results do not depend on threads. A call runs in the oneTBB arena or task that it is made from, where that has no more
// threads than the call may use: nothing is oversubscribed by calls inside of calls.
struct HostOptions {
  int threads =
      0;  // kMostThreads at most; 0 or less: what CUBIST_NUM_THREADS says, else all of the machine (or the caller's arena).
  std::shared_ptr<const Tuning> tuning =
      nullptr;  // Tilings to use where it has any; may be shared by devices.
  bool pin =
      false;  // Each thread stays on one of the process's processors while it computes, and is freed then.
};

struct NpuOptions {
  // Compute the results too (slowly: with the chip's tiling). Without, float tensors may have null data,
  // outputs are not written, and only index tensors are read.
  bool with_data = true;
  sync::Policy policy = sync::Policy::kMinimal;  // Flags that hold the profile's instructions back.
  bool timeline = false;                         // Keep every instruction's start and end in the profile.
  trace::Record* record = nullptr;  // Where given, gets what the call recorded (for sync/ and one's own use).
  std::shared_ptr<const Tuning> tuning = nullptr;  // As for a host.
  // Of a call that takes longer than this the profile says an infinite time, and nothing else.
  double give_up_s = std::numeric_limits<double>::infinity();
};

// Memory for a call to work in, of its caller: `bytes` from `data` on. Without, a call takes its own and keeps it for
// the next ones.
struct CallerWorkspace {
  void* data = nullptr;
  std::int64_t bytes = 0;
  bool given() const { return data != nullptr || bytes != 0; }
};

class CUBIST_EXPORT Device {
 public:
  enum class Kind { kHost, kNpu };

  Kind kind() const { return kind_; }
  const ChipSpec& chip() const { return kind_ == Kind::kHost ? HostChip() : *chip_; }
  // The same with as many of a host's cores as calls may use: for choices that leave results alone.
  const ChipSpec& chip_of_call() const {
    return kind_ == Kind::kHost && threads() > 0 ? HostChip(threads()) : chip();
  }
  // As asked for; 0: all.
  int threads() const { return host_.threads; }
  // How many a call from here would use.
  int concurrency() const;
  bool pins() const { return host_.pin; }
  // What is wrong with the options, the environment or the chip, which every call then says.
  const Status& status() const { return status_; }
  const NpuOptions& npu() const { return npu_; }
  // Null where none was given.
  const Tuning* tuning() const { return kind_ == Kind::kHost ? host_.tuning.get() : npu_.tuning.get(); }
  // Whether a call reads and writes float tensors.
  bool computes() const { return kind_ == Kind::kHost || npu_.with_data; }

 private:
  friend Device Host(HostOptions options);
  friend Device Npu(const ChipSpec& chip, NpuOptions options);

  Kind kind_ = Kind::kHost;
  HostOptions host_;
  NpuOptions npu_;
  std::shared_ptr<const ChipSpec> chip_;
  Status status_;
};

CUBIST_EXPORT Device Host(HostOptions options = {});
CUBIST_EXPORT Device Npu(const ChipSpec& chip, NpuOptions options = {});

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_DEVICE_H_
