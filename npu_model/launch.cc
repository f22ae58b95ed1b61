#include "npu_model/launch.h"

#include <tbb/global_control.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <mutex>
#include <new>
#include <optional>

#include "npu_model/host_threads.h"
#include "npu_model/parallel.h"
#include "npu_model/sync/plan.h"
#include "npu_model/trace/record_room.h"
#include "npu_model/trace/replay.h"
#include "npu_model/workspace_pool.h"

namespace cubist {

Launch::Launch(const Device& device, const char* kernel, const CallerWorkspace& workspace, Purpose purpose)
    : device_(device), chip_(&device.chip()), room_(workspace), purpose_(purpose), status_(device.status()) {
  if (device.kind() == Device::Kind::kNpu) {
    record_ = std::make_unique<trace::Record>();
    record_->kernel = kernel;
    record_->chip = *chip_;
  }
}

Launch::~Launch() {
  for (const auto& [data, capacity] : workspaces_) Workspaces().Give(data, capacity);
}

GmTensor* Launch::Add(const char* name, const ConstTensor& tensor, bool writable) {
  // Where a tensor without elements stands if it has no memory: views step through it by its strides, a null pointer cannot.
  static std::byte nowhere{};
  if (tensor_count_ < kFirstTensors) {
    new (tensors_.data() + tensor_count_ * sizeof(GmTensor)) GmTensor;
  } else {
    more_tensors_.push_back(std::make_unique<GmTensor>());
  }
  GmTensor& t = TensorAt(tensor_count_);
  // Without data no output is written; inputs stay, as index tensors are read all the same.
  t.data =
      device_.computes() || !writable ? static_cast<std::byte*>(const_cast<void*>(tensor.data)) : nullptr;
  if (device_.computes() && t.data == nullptr && tensor.count() == 0) t.data = &nowhere;
  t.dtype = tensor.dtype;
  t.writable = writable;
  t.input = !writable;
  t.index = static_cast<std::int32_t>(tensor_count_++);
  t.name = name;
  t.sizes = {1, 1, 1, 1};
  for (int d = 0; d < tensor.rank; ++d) {
    const int to = d + 4 - tensor.rank;
    const auto outer = static_cast<std::size_t>(to + 2), inner = static_cast<std::size_t>(to);
    std::int64_t& size = to < 0 ? t.outer_sizes[outer] : t.sizes[inner];
    size = tensor.size(d);
    (to < 0 ? t.outer_strides[outer] : t.strides[inner]) = StepOf(tensor, d);
  }
  if (tensor.count() > 0) {
    t.bytes = tensor.extent() * SizeOf(tensor.dtype), t.origin = tensor.origin() * SizeOf(tensor.dtype);
  }
  // In the modelled GM tensors stand at whole lines, apart from each other.
  const auto line = static_cast<std::uint64_t>(chip_->memory.l2_line);
  t.address = next_address_;
  next_address_ += (static_cast<std::uint64_t>(t.bytes) + line) / line * line;
  // An output larger than half of the last cache, of which inputs take their share, will not be found there by whoever
  // reads it.
  t.stream = writable && t.bytes > HostChip().memory.l2_bytes / 2;
  return &t;
}

const GmTensor* Launch::Input(const char* name, const ConstTensor& tensor) {
  return tensor.given() ? Add(name, tensor, /*writable=*/false) : nullptr;
}

const GmTensor* Launch::Output(const char* name, const Tensor& tensor) {
  if (!tensor.given()) return nullptr;
  GmTensor* t = Add(name, tensor, /*writable=*/true);
  // Integers steer what comes after them, so that a later phase may read them where nothing else is computed.
  if (!device_.computes() && !IsFloat(t->dtype) && purpose_ != Purpose::kMeasure) TakeMemory(t);
  return t;
}

const GmTensor* Launch::InOut(const char* name, const Tensor& tensor) {
  if (!tensor.given()) return nullptr;
  GmTensor* t = Add(name, tensor, /*writable=*/true);
  t->input = true, t->stream = false;
  return t;
}

const GmTensor* Launch::Workspace(const char* name, DType dtype, std::initializer_list<std::int64_t> sizes) {
  return AddWorkspace(name, dtype, sizes);
}

GmTensor* Launch::AddWorkspace(const char* name, DType dtype, std::initializer_list<std::int64_t> sizes) {
  GmTensor* t = Add(name, ConstTensor(nullptr, dtype, sizes), /*writable=*/true);
  t->stream = false;
  DropTape();
  workspace_bytes_ += t->bytes;
  std::byte* const room = TakeRoom(t->bytes);
  if (purpose_ == Purpose::kMeasure || (!device_.computes() && IsFloat(dtype))) return t;
  if (room_.given()) {
    t->data = room;
    return t;
  }
  TakeMemory(t);
  return t;
}

void Launch::TakeMemory(GmTensor* t) {
  try {
    std::int64_t capacity = 0;
    workspaces_.reserve(workspaces_.size() + 1);  // So that what was taken is given back.
    std::byte* const memory = Workspaces().Take(t->bytes, &capacity);
    workspaces_.emplace_back(memory, capacity);
    t->data = memory + t->origin;
  } catch (const std::bad_alloc&) {
    status_ = {StatusCode::kOutOfMemory, std::string("no memory for a workspace of ") +
                                             std::to_string(t->bytes) + " bytes (" + t->name + ")"};
  }
}

std::byte* Launch::TakeRoom(std::int64_t bytes) {
  const std::int64_t begin = room_end_;
  room_end_ = RoundUp(begin + bytes, kRoomAlignment);
  if (room_.data == nullptr) return nullptr;
  const auto address = reinterpret_cast<std::uintptr_t>(room_.data);
  const auto skipped = RoundUp(static_cast<std::int64_t>(address % kRoomAlignment), kRoomAlignment) -
                       static_cast<std::int64_t>(address % kRoomAlignment);
  return static_cast<std::byte*>(room_.data) + skipped + begin;
}

Status CheckWorkspace(const char* kernel, const CallerWorkspace& workspace, std::int64_t needed) {
  if (workspace.bytes < needed) {
    return InvalidArgument(std::string(kernel) + ": workspace has " + std::to_string(workspace.bytes) +
                           " bytes, needs " + std::to_string(needed));
  }
  if (workspace.data == nullptr && workspace.bytes > 0) {
    return InvalidArgument(std::string(kernel) + ": workspace has " + std::to_string(workspace.bytes) +
                           " bytes at a null pointer");
  }
  return {};
}

PackedGm Launch::Packed(const char* name, Role role, DType dtype, std::int64_t rows, std::int64_t cols,
                        std::int64_t matrices, Role second_role) {
  const bool host = device_.kind() == Device::Kind::kHost;
  // With data, the host's layout must have room too.
  std::int64_t bytes =
      std::max(chip_->PackedBytes(role, dtype, rows, cols), HostChip().PackedBytes(role, dtype, rows, cols));
  PackedGm packed;
  packed.second_role = second_role;
  packed.second_offset = RoundUp(bytes, kRoomAlignment);
  if (second_role != Role::kRows && (host || device_.computes())) {
    const ChipSpec& layout = HostChip();
    bytes = packed.second_offset + (second_role == Role::kB
                                        ? layout.PackedBytes(Role::kB, dtype, rows, cols)
                                        : layout.PackedBytes(OperandOf(second_role), dtype, cols, rows));
  }
  GmTensor* const tensor =
      AddWorkspace(name, DType::kF32, {matrices, RoundUp(bytes, kRoomAlignment) / SizeOf(DType::kF32)});
  // What is packed comes and goes with its source, and is one of several: of more than this part of the last cache little
  // is found there when it is used. Stores past the caches spare memory the reading of what they replace: keys and values
  // of 8 x 2048 in fp32 are packed in half the time on a Zen 4 whose last cache holds 32 MiB.
  tensor->stream = tensor->bytes >= HostChip().memory.l2_bytes / 8;
  packed.tensor = tensor;
  packed.role = role, packed.dtype = dtype;
  packed.rows = rows, packed.cols = cols;
  packed.row_part = {0, rows}, packed.col_part = {0, cols};
  return packed;
}

std::vector<trace::CoreRecord>& Launch::BeginPhase(bool vector_only, int cores) {
  trace::Phase& phase = record_->phases.emplace_back();
  phase.vector_only = vector_only;
  phase.cores.resize(static_cast<std::size_t>(cores));
  return phase.cores;
}

void Launch::BeginTape(int cores) {
  if (tape_ == nullptr) return;
  if (!tape_->cores.empty()) return DropTape();
  tape_->cores.resize(static_cast<std::size_t>(cores));
}

void Launch::DropTape() {
  if (tape_ != nullptr) tape_->cores.clear();
  tape_ = nullptr;
}

CoreTape* Launch::BeginCore(int index, const Scratch& scratch) {
  if (tape_ == nullptr) return nullptr;
  CoreTape& core = tape_->cores[static_cast<std::size_t>(index)];
  core.Begin(data_, scratch);
  return &core;
}

void Launch::Again(const Tape& tape, const ProductData& data) {
  if (!status_.ok()) return;
  const auto body = [&](int index) {
    tape.cores[static_cast<std::size_t>(index)].Run(data, ThreadScratch());
  };
  RunCores(static_cast<int>(tape.cores.size()), body);
}

namespace {

// The cores of a launch, for the threads that run them, in one or several runs of numbers that follow each other. A thread takes
// the cores of one run in their order, then goes on with the other runs': kernels deal the longest tasks first, so that the last
// ones to end are short. Ranges that are split and stolen would leave a thread with a long one.
class CoreRuns {
 public:
  CoreRuns(int cores, int runs) : cores_(cores), runs_(static_cast<std::size_t>(std::clamp(runs, 1, cores))) {
    for (std::size_t run = 0; run < runs_.size(); ++run) runs_[run].next = BeginOf(run);
  }

  // Until no core is left.
  template <class Body>
  void Take(int thread, const Body& body) {
    for (std::size_t i = 0; i < runs_.size(); ++i) {
      const std::size_t run = (static_cast<std::size_t>(std::max(thread, 0)) + i) % runs_.size();
      std::atomic<int>& next = runs_[run].next;
      for (int index = next++; index < BeginOf(run + 1); index = next++) body(index);
    }
  }

 private:
  struct alignas(64) CoreRun {  // A line for each, as its thread takes from it all the time.
    std::atomic<int> next = 0;
  };
  int BeginOf(std::size_t run) const {
    return static_cast<int>(static_cast<std::int64_t>(run) * cores_ /
                            static_cast<std::int64_t>(runs_.size()));
  }

  int cores_;
  std::vector<CoreRun> runs_;
};

}  // namespace

void Launch::RunCores(int cores, CoreBody body) {
  try {
    int threads = device_.threads();
    if (cores == 1 || threads == 1) {
      const auto run = [&] {
        for (int index = 0; index < cores; ++index) body(index);
      };
      if (!device_.pins()) return run();
      const PinnedThread pinned;
      return run();
    }
    const int here = tbb::this_task_arena::max_concurrency();
    const int machine =
        static_cast<int>(tbb::global_control::active_value(tbb::global_control::max_allowed_parallelism));
    // An arena of the caller's has no more.
    if (threads <= 0 || (threads > here && here < machine)) threads = here;
    CoreRuns runs(cores, threads_have_runs_ ? threads : 1);
    const auto work = [&] {
      ForEachPart(std::min(cores, threads), 1, [&](std::int64_t, std::int64_t) {
        runs.Take(tbb::this_task_arena::current_thread_index(), body);
      });
    };
    const auto all = [&] { Isolated(work); };
    if (threads == here && !device_.pins()) {
      all();
      return;
    }
    // More threads than the machine has are given too, for this call.
    std::optional<tbb::global_control> allowance;
    if (threads > machine)
      allowance.emplace(tbb::global_control::max_allowed_parallelism, static_cast<std::size_t>(threads));
    LentArena(threads, device_.pins())->execute(all);
  } catch (const trace::NoRoomForRecord& error) {
    status_ = {StatusCode::kOutOfMemory, record_->kernel + ": " + error.what()};
  } catch (const std::bad_alloc&) {
    status_ = {StatusCode::kOutOfMemory, "no memory for a core's buffers"};
  }
}

void Launch::NoteFinding(const std::string& finding) {
  if (finding.empty()) return;
  static std::mutex mutex;  // Of all launches: a finding is the end of one.
  const std::scoped_lock lock(mutex);
  if (status_.ok()) status_ = {StatusCode::kUnsupported, finding};
}

namespace {

// A flag or two for each instruction, and a slice of the timeline.
Status CheckRoomToReplay(const trace::Record& record, bool timeline) try {
  std::int64_t instructions = 0;
  for (const trace::Phase& phase : record.phases) {
    for (const trace::CoreRecord& core : phase.cores) instructions += std::ssize(core.instrs);
  }
  const std::size_t each = 2 * sizeof(sync::SyncOp) + (timeline ? sizeof(TimelineSlice) : 0);
  trace::CheckRoom(instructions, instructions * static_cast<std::int64_t>(each));
  return {};
} catch (const trace::NoRoomForRecord& error) {
  return {StatusCode::kOutOfMemory, record.kernel + ": " + error.what()};
}

}  // namespace

Status Launch::Finish(Profile* profile) {
  if (status_.ok() && record_ != nullptr) {
    record_->workspace_bytes = workspace_bytes_;
    if (profile != nullptr) {
      if (Status status = CheckRoomToReplay(*record_, device_.npu().timeline); !status.ok()) return status;
      const sync::Plan plan = sync::PlanFlags(*record_, device_.npu().policy);
      *profile = trace::Replay(*record_, plan,
                               {.timeline = device_.npu().timeline, .give_up_s = device_.npu().give_up_s});
    }
    if (device_.npu().record != nullptr) {
      for (std::size_t i = 0; i < tensor_count_; ++i) {
        const GmTensor& t = TensorAt(i);
        const std::byte* const lowest = t.writable || t.data == nullptr ? nullptr : t.data - t.origin;
        record_->tensors.push_back({t.name, t.address, t.bytes, t.input, t.dtype, lowest});
      }
      *device_.npu().record = std::move(*record_);
    }
  }
  return status_;
}

}  // namespace cubist
