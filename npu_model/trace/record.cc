#include "npu_model/trace/record.h"

namespace cubist::trace {

const char* NameOf(Op op) {
  constexpr const char* kNames[kOpCount] = {
      "Load L1",   "Store packed",  "Load L0A",      "Load L0B",    "Load bias", "Load BT",   "Mmad",
      "Store L0C", "Load UB",       "Store UB",      "Fill",        "Cast",      "MulScalar", "MaxScalar",
      "AddScalar", "Add",           "Sub",           "Mul",         "Div",       "Max",       "Exp",
      "Ln",        "Sqrt",          "Abs",           "RowMax",      "RowSum",    "Transpose", "Unzip",
      "Zip",       "MaskAbove",     "MaskBelow",     "MaskWhere",   "Distances", "DropFlags", "Add int",
      "ColumnSum", "ExclusiveScan", "AddScalar int", "SelectLe",    "TopK",      "GroupTop",  "KeepGroups",
      "Gather",    "Random",        "DropRoutes",    "TrueColumns", "KeepWhere", "Lookup",    "Sort32",
      "MergeSort", "ReadScalar",    "Spend",         "CopyElement", "Histogram", "Rank",      "RoundUp",
      "Scatter",   "MapRoutes",     "Send L0C",      "Receive UB",  "Send UB",   "Receive L1"};
  return kNames[static_cast<int>(op)];
}

bool IsMixed(const Record& record) {
  bool cube = false, vector = false;
  for (const Phase& phase : record.phases) {
    for (const CoreRecord& core : phase.cores) {
      for (const Instr& instr : core.instrs) {
        const bool on_vector = phase.vector_only || instr.lane >= 0;
        (on_vector ? vector : cube) = true;
        if (cube && vector) return true;
        if (phase.vector_only) break;
      }
    }
  }
  return false;
}

double LaunchSeconds(const Record& record, const ChipSpec& chip) {
  return chip.sync.launch_s + (IsMixed(record) ? chip.sync.mixed_launch_s.value : 0);
}

}  // namespace cubist::trace
