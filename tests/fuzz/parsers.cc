#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/matmul.h"
#include "npu_model/tuning.h"
#include "tests/fuzz/targets.h"
#include "tools/npy.h"
#include "tools/validation/measured.h"
#include "tools/what_if.h"
#include "tools/workload.h"

namespace cubist::fuzz {
namespace {

std::string_view TextOf(Bytes input) { return {reinterpret_cast<const char*>(input.data()), input.size()}; }

void Require(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", promise);
  std::abort();
}

// An error says something.
void RequireTold(const Status& status) {
  Require(status.ok() || !status.message().empty(), "errors say why");
}

// A file in memory, for what is read by name.
class MemoryFile {
 public:
  MemoryFile(Bytes content, const char* suffix) : fd_(memfd_create("fuzz", 0)) {
    Require(fd_ >= 0 && write(fd_, content.data(), content.size()) == static_cast<ssize_t>(content.size()),
            "the input can be written to a file");
    const std::string target = "/proc/self/fd/" + std::to_string(fd_);
    link_ = "/tmp/cubist_fuzz_" + std::to_string(getpid()) + suffix;
    unlink(link_.c_str());
    Require(symlink(target.c_str(), link_.c_str()) == 0, "the file can be linked to");
  }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  ~MemoryFile() {
    unlink(link_.c_str());
    close(fd_);
  }
  const std::string& path() const { return link_; }

 private:
  int fd_;
  std::string link_;
};

}  // namespace

void Npy(Bytes input) {
  const MemoryFile file(input, ".npy");
  OwnedTensor tensor;
  const Status status = ReadNpy(file.path(), &tensor);
  RequireTold(status);
  if (!status.ok()) return;
  // What was read can be written, and reads the same.
  const std::string copy = file.path() + ".copy";
  Require(WriteNpy(copy, tensor.view()).ok(), "an array that was read can be written");
  OwnedTensor again;
  Require(ReadNpy(copy, &again).ok(), "an array that was written can be read");
  unlink(copy.c_str());
  const ConstTensor a = tensor.view(), b = again.view();
  Require(a.rank == b.rank && a.sizes == b.sizes && a.dtype == b.dtype, "a copy has the same shape");
}

void Workload(Bytes input) {
  cubist::Workload workload;
  const Status status = ParseWorkload(TextOf(input), "fuzz", &workload);
  RequireTold(status);
  if (status.ok()) Require(workload.hidden > 0 && workload.moe.experts > 0, "accepted sizes are above 0");
}

void ChipFile(Bytes input) {
  const MemoryFile file(input, ".json");
  ChipSpec chip;
  const Status status = LoadChip({.chip = file.path()}, &chip);
  RequireTold(status);
  if (status.ok()) Require(chip.cube_cores > 0, "an accepted chip has cores");
}

void Tuning(Bytes input) {
  cubist::Tuning tuning;
  RequireTold(tuning.Parse(TextOf(input), "fuzz"));
  cubist::Tuning again;
  Require(again.Parse(tuning.Text(), "copy").ok() && again.size() == tuning.size(),
          "its own text can be read");

  // A call takes a tiling that fits and refuses the rest.
  std::vector<float> a(64), b(64), c(64);
  MatmulArgs args;
  args.a = ConstTensor(a.data(), {8, 8});
  args.b = ConstTensor(b.data(), {8, 8});
  args.c = Tensor(c.data(), {8, 8});
  const auto call = [&](cubist::Tuning with) {
    NpuOptions options;
    options.with_data = false;
    options.tuning = std::make_shared<const cubist::Tuning>(std::move(with));
    return Matmul(Npu(Ascend910B2(), options), args);
  };
  static const std::string shape = [&] {
    std::string met;
    cubist::Tuning probe;
    probe.on_choice = [&](const TilingChoice& choice) { met = choice.shape; };
    Require(call(std::move(probe)).ok() && !met.empty(), "a call tells which tilings it could take");
    return met;
  }();
  tuning.Set("matmul", Ascend910B2().name, shape, std::string(TextOf(input).substr(0, 200)));
  RequireTold(call(std::move(tuning)));
}

void Csv(Bytes input) {
  const MemoryFile file(input, ".csv");
  MeasuredRows rows;
  RequireTold(ReadMeasured(file.path(), &rows));
  for (const MeasuredRow& row : rows.rows) Require(row.us > 0, "accepted times are above 0");
}

}  // namespace cubist::fuzz
