// Interpreter: what recorded instructions do to bytes, one at a time, as plainly as can be.
//
// It shares nothing with the host executor: tiles lie at their modelled addresses, in the chip's layouts, so that
// two tiles on the same bytes really overwrite each other. Composites come as their expansions. Slow; for records
// of small shapes that are run in many orders (sync/execute.h).
#ifndef CUBIST_NPU_MODEL_TRACE_INTERPRET_H_
#define CUBIST_NPU_MODEL_TRACE_INTERPRET_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/trace/record.h"

namespace cubist::trace {

// Bytes of global memory, by tensor as Record::tensors counts them.
using GmImage = std::vector<std::vector<std::byte>>;

// What a launch finds: inputs as the record's caller gave them. Bytes that a record does not hold, because it was made
// without data, are small numbers made from `seed`, of the tensor's dtype.
CUBIST_COMMAND_EXPORT GmImage InitialGm(const Record& record, unsigned seed);

// The first instruction of a record that the interpreter does not know, by name; null if it knows all.
CUBIST_COMMAND_EXPORT const char* UnknownTo(const Record& record);

// One core of a phase.
class Interpreter {
 public:
  // On-chip bytes start as a pattern that no kernel writes.
  Interpreter(const ChipSpec& chip, const CoreRecord& record, GmImage& gm);

  // What an instruction has computed and not written yet: elements of its destinations, row by row.
  struct Result {
    std::uint32_t instr = 0;
    std::array<std::vector<double>, 2> values;
  };
  // Reads the sources of an instruction.
  Result Start(std::uint32_t i);
  // Writes its destinations.
  void Finish(const Result& result);

 private:
  using Values = std::vector<double>;

  struct Elements;  // where the elements of an operand or an access stand
  Elements ElementsOf(const Operand& o);
  Elements ElementsOf(const Instr& instr, const GmAccess& access);
  Values Read(const Elements& from);
  void Write(const Elements& to, const Values& values);
  Values ReadUse(const Instr& instr, std::size_t n);
  Values ReadBefore(const Instr& instr, std::size_t use);
  Values ReadAccess(const Instr& instr);

  // What an instruction gives its first destination, and its second; interpret_ops.cc. Families of instructions know
  // their own, and give nothing for others.
  using Computed = std::optional<Values>;
  Values Compute(const Instr& instr, Values* second);
  Computed Move(const Instr& instr);
  Computed Cube(const Instr& instr);
  Computed Make(const Instr& instr);
  Computed Elementwise(const Instr& instr);
  Computed Reduce(const Instr& instr);
  Computed Mask(const Instr& instr);
  Computed Choose(const Instr& instr, Values* second);
  Computed Pick(const Instr& instr);
  Computed Count(const Instr& instr, Values* second);
  Computed Sort(const Instr& instr, Values* second);

  const ChipSpec& chip_;
  const CoreRecord& record_;
  GmImage& gm_;
  std::vector<std::vector<std::byte>> on_chip_;  // by buffer and side: the Cube core, then the Vector cores
  std::vector<std::byte> workspace_;
};

}  // namespace cubist::trace

#endif  // CUBIST_NPU_MODEL_TRACE_INTERPRET_H_
