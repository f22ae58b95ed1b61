#include "npu_model/sync/findings.h"

namespace cubist::sync {
namespace {

std::string Describe(const Place& place) {
  std::string text = place.what;
  text += std::string(" on ") + NameOf(place.pipe);
  if (place.lane >= 0) text += " of Vector core " + std::to_string(place.lane);
  return text + ", " + place.line.file + ":" + std::to_string(place.line.line);
}

}  // namespace

std::string TensorName(const trace::Record& record, std::size_t tensor) {
  if (tensor < record.tensors.size()) return "GM '" + record.tensors[tensor].name + "'";
  return "GM tensor " + std::to_string(tensor);
}

Place PlaceOfInstr(const trace::CoreRecord& core, std::uint32_t i) {
  const trace::Instr& instr = core.instrs[i];
  return {i, instr.pipe, instr.lane, trace::NameOf(instr.op), core.lines[instr.line]};
}

const char* NameOf(Fault fault) {
  constexpr const char* kNames[kFaultCount] = {"read after write",
                                               "write after read",
                                               "write after write",
                                               "uninitialised read",
                                               "slot overwritten while live",
                                               "bytes shared by cores",
                                               "deadlock",
                                               "flag never set",
                                               "flag left set",
                                               "flag set twice",
                                               "bad plan entry",
                                               "misaligned operand",
                                               "overwritten by whole blocks"};
  return kNames[static_cast<int>(fault)];
}

std::string ToString(const Finding& f) {
  std::string text = std::string(NameOf(f.fault)) + ": ";
  if (f.first.what[0] != '\0') text += Describe(f.first) + ", then ";
  text += Describe(f.second) + "\n  ";
  if (!f.memory.empty()) text += f.memory + ", ";
  if (f.end > f.begin) text += "bytes " + std::to_string(f.begin) + " to " + std::to_string(f.end) + ", ";
  text += "phase " + std::to_string(f.phase) + ", core " + std::to_string(f.core);
  if (f.fault == Fault::kSharedGm) text += " and core " + std::to_string(f.other_core);
  if (f.count > 1) text += ", " + std::to_string(f.count) + " times";
  for (const std::string& link : f.chain) text += "\n  " + link;
  if (!f.cure.empty()) text += "\n  missing: " + f.cure;
  return text;
}

}  // namespace cubist::sync
