// Launch: one kernel call on a device. It knows the call's tensors, runs its phases
// on all cores, and makes the profile.
#ifndef CUBIST_NPU_MODEL_LAUNCH_H_
#define CUBIST_NPU_MODEL_LAUNCH_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "npu_model/device.h"
#include "npu_model/host/host_core.h"
#include "npu_model/host/tape.h"
#include "npu_model/trace/record.h"
#include "npu_model/trace/trace_core.h"

namespace cubist {

// The stride of a dimension as far as anyone steps along it. Along a dimension of one element nobody does, and its stride may
// be longer than a step in bytes can be; instructions that ask for what lies some steps ahead name addresses there all the same.
inline std::int64_t StepOf(const ConstTensor& tensor, int dimension) {
  constexpr std::int64_t kLongestStride = std::int64_t{1} << 40;
  const std::int64_t stride = tensor.stride(dimension);
  return tensor.size(dimension) > 1 ? stride : std::clamp(stride, -kLongestStride, kLongestStride);
}

class CUBIST_EXPORT Launch {
 public:
  // To run; or to measure the workspace alone: phases do nothing then, and workspaces have no memory.
  enum class Purpose { kRun, kMeasure };

  Launch(const Device& device, const char* kernel, const CallerWorkspace& workspace = {},
         Purpose purpose = Purpose::kRun);
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

  // Each thread of a host begins with a run of cores of its own, the same one in every launch, where otherwise all take the next
  // core that is left. To be said where neighbours write side by side: lines of their output would go to and fro between the
  // threads' caches. Zen 4, two threads, (817, 16) times (16, 2736): 114 GFLOP/s -> 195. Not where neighbours read the same: keys
  // of attention are loaded for both.
  void GiveThreadsRuns() { threads_have_runs_ = true; }

  // Keeps what the launch does for a product of `data` on a host, where that is one phase without memory of the launch's own:
  // see Tape. To be said before any phase or workspace.
  void Keep(const ProductData& data, Tape* tape) { data_ = data, tape_ = tape; }
  // Does for `data` what a launch before did for its own, of the same shapes: the whole launch.
  void Again(const Tape& tape, const ProductData& data);

  // Bytes that the launch's workspaces take of a caller's memory, wherever that begins.
  std::int64_t workspace_bytes() const { return room_end_ == 0 ? 0 : room_end_ + kRoomAlignment - 1; }
  // What went wrong, if anything; on an Npu device the profile where one is wanted.
  Status Finish(Profile* profile);

 private:
  // What a phase does on each core: a lambda of the phase's, which a std::function would allocate a copy of.
  class CoreBody {
   public:
    template <class Body>
    CoreBody(const Body& body)  // NOLINT(google-explicit-constructor)
        : body_(&body), run_([](const void* b, int index) { (*static_cast<const Body*>(b))(index); }) {}
    void operator()(int index) const { run_(body_, index); }

   private:
    const void* body_;
    void (*run_)(const void* body, int index);
  };

  template <class TraceCore, class Kernel>
  void Phase(std::int64_t count, int available, Kernel& kernel) {
    constexpr bool kVectorOnly = std::is_same_v<TraceCore, TraceVectorCore>;
    const int cores = static_cast<int>(std::min<std::int64_t>(count, available));
    if (cores <= 0 || !status_.ok() || purpose_ == Purpose::kMeasure) return;
    if (device_.kind() == Device::Kind::kHost) {
      BeginTape(cores);
      const auto body = [&](int index) {
        Scratch& scratch = ThreadScratch();
        scratch.Reset();
        HostContext context(*chip_, scratch, index, cores);
        context.tape = BeginCore(index, scratch);
        HostAiCore core(context);
        if constexpr (kVectorOnly) {
          kernel(core.vectors()[0]);
        } else {
          kernel(core);
        }
        if (context.tape != nullptr) context.tape->End();
        NoteFinding(context.arena.finding());
      };
      RunCores(cores, body);
      return;
    }
    std::vector<trace::CoreRecord>& records = BeginPhase(kVectorOnly, cores);
    const auto body = [&](int index) {
      Scratch& scratch = ThreadScratch();
      scratch.Reset();
      TraceCore core(*chip_, scratch, index, cores, device_.computes(),
                     &records[static_cast<std::size_t>(index)]);
      kernel(core);
      NoteFinding(core.finding());
    };
    RunCores(cores, body);
  }

  // One of tensor_count_.
  GmTensor& TensorAt(std::size_t i) {
    return i < kFirstTensors ? *std::launder(reinterpret_cast<GmTensor*>(tensors_.data()) + i)
                             : *more_tensors_[i - kFirstTensors];
  }
  // Memory of the launch's own.
  GmTensor* AddWorkspace(const char* name, DType dtype, std::initializer_list<std::int64_t> sizes);
  void TakeMemory(GmTensor* t);
  GmTensor* Add(const char* name, const ConstTensor& tensor, bool writable);
  std::vector<trace::CoreRecord>& BeginPhase(bool vector_only, int cores);
  // Room for what so many cores do; none where another phase went before.
  void BeginTape(int cores);
  void DropTape();
  CoreTape* BeginCore(int index, const Scratch& scratch);
  void RunCores(int cores, CoreBody body);
  void NoteFinding(const std::string& finding);

  // A workspace of so many bytes in the caller's memory.
  std::byte* TakeRoom(std::int64_t bytes);

  // Where workspaces begin in a caller's memory, and packed operands in a workspace.
  static constexpr std::int64_t kRoomAlignment = 128;

  const Device& device_;
  const ChipSpec* chip_;
  // The first ones, made as they are added: to make all of them would cost a small product a tenth of its time.
  static constexpr std::size_t kFirstTensors = 16;
  static_assert(std::is_trivially_destructible_v<GmTensor>);
  alignas(GmTensor) std::array<std::byte, kFirstTensors * sizeof(GmTensor)> tensors_;
  std::vector<std::unique_ptr<GmTensor>> more_tensors_;  // And what a list of matrices adds to them.
  std::size_t tensor_count_ = 0;
  std::uint64_t next_address_ = 0;
  CallerWorkspace room_;
  Purpose purpose_;
  bool threads_have_runs_ = false;
  std::int64_t room_end_ = 0;  // What is taken of it.
  std::vector<std::pair<std::byte*, std::int64_t>> workspaces_;
  std::int64_t workspace_bytes_ = 0;
  std::unique_ptr<trace::Record> record_;
  ProductData data_;
  Tape* tape_ = nullptr;
  Status status_;
};

// The workspace of a call whose phases are body(launch).
template <class Body>
Status MeasureLaunch(const Device& device, const char* kernel, Body&& body, std::int64_t* bytes) {
  Launch launch(device, kernel, {}, Launch::Purpose::kMeasure);
  if (Status status = body(launch); !status.ok()) return status;
  *bytes = launch.workspace_bytes();
  return {};
}

// Whether a caller's workspace has the bytes that a call needs.
CUBIST_EXPORT Status CheckWorkspace(const char* kernel, const CallerWorkspace& workspace,
                                    std::int64_t needed);

// Runs body(launch), a call's phases, in the caller's workspace where one is given and large enough for all of it.
template <class Body>
Status RunLaunch(const Device& device, const char* kernel, const CallerWorkspace& workspace, Profile* profile,
                 Body&& body) {
  if (workspace.given()) {
    std::int64_t needed = 0;
    if (Status status = MeasureLaunch(device, kernel, body, &needed); !status.ok()) return status;
    if (Status status = CheckWorkspace(kernel, workspace, needed); !status.ok()) return status;
  }
  Launch launch(device, kernel, workspace);
  if (Status status = body(launch); !status.ok()) return status;
  return launch.Finish(profile);
}

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_LAUNCH_H_
