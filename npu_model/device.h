// Device: where a kernel call runs. Host() computes; Npu(chip) records the same
// kernel and predicts its time on the chip.
#ifndef CUBIST_NPU_MODEL_DEVICE_H_
#define CUBIST_NPU_MODEL_DEVICE_H_

#include <cstdint>
#include <memory>

#include "npu_model/chip.h"
#include "npu_model/profile.h"
#include "npu_model/sync/policy.h"
#include "npu_model/tuning.h"

namespace cubist {

namespace trace {
struct Record;
}

struct HostOptions {
  int threads = 0;  // 0 or less: all that the machine has. Results do not depend on it.
  std::shared_ptr<const Tuning> tuning =
      nullptr;  // Tilings to use where it has any; may be shared by devices.
};

struct NpuOptions {
  // Compute the results too (slowly: with the chip's tiling). Without, float tensors may have null data,
  // outputs are not written, and only index tensors are read.
  bool with_data = true;
  sync::Policy policy = sync::Policy::kMinimal;  // Flags that hold the profile's instructions back.
  bool timeline = false;                         // Keep every instruction's start and end in the profile.
  trace::Record* record = nullptr;  // Where given, gets what the call recorded (for sync/ and one's own use).
  std::shared_ptr<const Tuning> tuning = nullptr;  // As for a host.
};

// Memory for a call to work in, of its caller: `bytes` from `data` on. Without, a call takes its own and keeps it for
// the next ones.
struct CallerWorkspace {
  void* data = nullptr;
  std::int64_t bytes = 0;
  bool given() const { return data != nullptr || bytes != 0; }
};

class Device {
 public:
  enum class Kind { kHost, kNpu };

  Kind kind() const { return kind_; }
  const ChipSpec& chip() const { return kind_ == Kind::kHost ? HostChip() : *chip_; }
  int threads() const { return host_.threads; }
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
};

Device Host(HostOptions options = {});
Device Npu(const ChipSpec& chip, NpuOptions options = {});

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_DEVICE_H_
