// RowRecorder: a measured row, and the launches that stand for it so far. What the functions of rows.h have in common.
#ifndef CUBIST_TOOLS_VALIDATION_ROW_RECORDER_H_
#define CUBIST_TOOLS_VALIDATION_ROW_RECORDER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/launch.h"
#include "npu_model/tuning.h"
#include "tools/tiling_search.h"
#include "tools/validation/measured.h"
#include "tools/validation/predict.h"

namespace cubist {

// Sizes of the types that rows name.
const std::map<std::string, std::int64_t>& BytesByName();
// Integers are moved and computed on as floats of their size.
DType DTypeOfName(const std::string& name);
std::int64_t Count(const Shape& shape);

struct RowRecorder {
  const Shape& shape(std::size_t i) const;        // of no dimensions where the row has no such tensor
  const std::string& dtype(std::size_t i) const;  // of the last that is named where i has none of its own
  bool is_int64() const { return dtype(0) == "int64"; }
  bool attribute(const char* name) const;

  // Whether tensor i has so many dimensions; the row is skipped otherwise.
  bool HasRank(std::size_t i, std::size_t rank);
  // Whether so many multiply-adds are too many to replay; the row is skipped then.
  bool TooLong(std::initializer_list<std::int64_t> sizes);
  // Nothing is to be replayed; nothing is added any more.
  void Skip(const std::string& why);

  // One launch of whatever `call` runs on the device it is given.
  void Add(const std::function<Status(const Device&)>& call, sync::Policy policy = sync::Policy::kMinimal,
           std::shared_ptr<const Tuning> tuning = nullptr);
  // A call with the best tilings of those that have `fields`, or the one that has all of its own there. The vendor's
  // products leave their Vector cores idle: nothing is read ahead.
  void AddTuned(const Call& call, const std::string& fields);
  // A launch of `kernel(core, inputs, outputs)` on all Vector cores; tensors are matrices.
  struct Operand {
    DType dtype;
    std::int64_t rows, cols;
    const void* data = nullptr;  // of integers
  };
  template <class Kernel>
  void AddVector(const std::vector<Operand>& inputs, const std::vector<Operand>& outputs, Kernel kernel) {
    Add([&](const Device& device) {
      Launch launch(device, row.op.c_str());
      std::vector<Gm> in, out;
      for (const Operand& o : inputs)
        in.push_back(MatrixOf(*launch.Input("in", ConstTensor(o.data, o.dtype, {o.rows, o.cols}))));
      for (const Operand& o : outputs)
        out.push_back(MatrixOf(*launch.Output("out", Tensor(nullptr, o.dtype, {o.rows, o.cols}))));
      launch.OnVectorCores(chip.cube_cores * chip.vector_per_cube,
                           [&](auto& core) { kernel(core, in, out); });
      return launch.Finish(nullptr);
    });
  }

  // The launch added last is of an Ascend C operator, whose tiling has so many bytes.
  void StartsSlowly(std::int64_t tiling_bytes = kUsualTiling);
  // The launch added last was timed in the cores.
  void LeavesOutLaunch();

  const MeasuredRow& row;
  const ChipSpec& chip;
  Recorded out = {};
};

}  // namespace cubist

#endif  // CUBIST_TOOLS_VALIDATION_ROW_RECORDER_H_
