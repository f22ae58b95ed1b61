// Launch: one kernel call on a device. It knows the call's tensors, runs its phases
// on all cores, and makes the profile.
#ifndef CUBIST_NPU_MODEL_LAUNCH_H_
#define CUBIST_NPU_MODEL_LAUNCH_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "npu_model/device.h"
#include "npu_model/host/host_core.h"
#include "npu_model/trace/record.h"
#include "npu_model/trace/trace_core.h"

namespace cubist {

class Launch {
 public:
  Launch(const Device& device, const char* kernel);
  ~Launch();
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  const ChipSpec& chip() const { return *chip_; }

  // Tensors of the call. The returned pointer lives as long as the launch. A tensor
  // that is not given is a null pointer.
  const GmTensor* Input(const char* name, const ConstTensor& tensor);
  const GmTensor* Output(const char* name, const Tensor& tensor);
  // An output that holds values already, which the launch reads or adds to.
  const GmTensor* InOut(const char* name, const Tensor& tensor);
  // GM of the launch's own, uninitialised.
  const GmTensor* Workspace(const char* name, DType dtype, std::initializer_list<std::int64_t> sizes);
  // Room for `matrices` packed operands of (rows, cols) each; see PackedGm::Matrix.
  PackedGm Packed(const char* name, Role role, DType dtype, std::int64_t rows, std::int64_t cols,
                  std::int64_t matrices = 1, Role second_role = Role::kRows);

  // One phase: kernel(core) for cores 0 .. count - 1, side by side; the phase ends when all have. `count` is
  // cut to what the chip has. A phase of a launch that has failed does nothing.
  template <class Kernel>
  void OnAiCores(std::int64_t count, Kernel&& kernel) {
    Phase<TraceAiCore>(count, chip_->cube_cores, kernel);
  }
  // The same on Vector cores, all of the chip's.
  template <class Kernel>
  void OnVectorCores(std::int64_t count, Kernel&& kernel) {
    Phase<TraceVectorCore>(count, chip_->cube_cores * chip_->vector_per_cube, kernel);
  }

  // What went wrong, if anything; on an Npu device the profile where one is wanted.
  Status Finish(Profile* profile);

 private:
  template <class TraceCore, class Kernel>
  void Phase(std::int64_t count, int available, Kernel& kernel) {
    constexpr bool kVectorOnly = std::is_same_v<TraceCore, TraceVectorCore>;
    const int cores = static_cast<int>(std::min<std::int64_t>(count, available));
    if (cores <= 0 || !status_.ok()) return;
    if (device_.kind() == Device::Kind::kHost) {
      RunCores(cores, [&](int index) {
        Scratch& scratch = ThreadScratch();
        scratch.Reset();
        HostContext context(*chip_, scratch, index, cores);
        HostAiCore core(context);
        if constexpr (kVectorOnly) {
          kernel(core.vectors()[0]);
        } else {
          kernel(core);
        }
        NoteFinding(context.arena.finding());
      });
      return;
    }
    std::vector<trace::CoreRecord>& records = BeginPhase(kVectorOnly, cores);
    RunCores(cores, [&](int index) {
      Scratch& scratch = ThreadScratch();
      scratch.Reset();
      TraceCore core(*chip_, scratch, index, cores, device_.computes(),
                     &records[static_cast<std::size_t>(index)]);
      kernel(core);
      NoteFinding(core.finding());
    });
  }

  GmTensor* Add(const char* name, const ConstTensor& tensor, bool writable);
  std::vector<trace::CoreRecord>& BeginPhase(bool vector_only, int cores);
  void RunCores(int cores, const std::function<void(int)>& body);
  void NoteFinding(const std::string& finding);

  const Device& device_;
  const ChipSpec* chip_;
  std::array<GmTensor, 16> tensors_;                     // The first ones, without an allocation,
  std::vector<std::unique_ptr<GmTensor>> more_tensors_;  // and what a list of matrices adds to them.
  std::size_t tensor_count_ = 0;
  std::uint64_t next_address_ = 0;
  std::vector<std::pair<std::byte*, std::int64_t>> workspaces_;
  std::int64_t workspace_bytes_ = 0;
  std::unique_ptr<trace::Record> record_;
  std::mutex mutex_;
  Status status_;
};

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_LAUNCH_H_
