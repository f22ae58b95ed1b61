#include "tools/validation/predict.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "tools/validation/row_recorder.h"
#include "tools/validation/rows.h"

namespace cubist {
namespace {

// Routing was measured without tokens, too.
bool IsEmptyInRowsAlone(const Shape& shape) {
  return !shape.empty() && shape[0] == 0 && std::count(shape.begin(), shape.end(), 0) == 1;
}

// Why no operator could take the row's tensors; empty where one might.
std::string Unfit(const RowRecorder& r) {
  constexpr double kMostElements = 0x1p34;
  if (r.shape(0).empty()) return "the first tensor has no dimensions";
  for (std::size_t i = 0; i < r.row.shapes.size(); ++i) {
    double elements = 1;
    for (const std::int64_t size : r.row.shapes[i]) elements *= static_cast<double>(size);
    const bool of_no_tokens = r.row.op == "moe_init_routing_v3" && IsEmptyInRowsAlone(r.row.shapes[i]);
    if (elements == 0 && !of_no_tokens) return fmt::format("tensor {} has a size of 0", i);
    if (elements > kMostElements && !r.row.schedule)
      return fmt::format("tensor {} has {:.3g} elements, at most {:.3g} are replayed", i, elements,
                         kMostElements);
  }
  return "";
}

void RecordOperator(RowRecorder& r) {
  static const std::map<std::string, void (*)(RowRecorder&)> operators = {
      {"sigmoid", ElementwiseRow},
      {"gelu", ElementwiseRow},
      {"relu", ElementwiseRow},
      {"maximum", ElementwiseRow},
      {"swi_glu", SwiGluRow},
      {"rms_norm", RmsNormRow},
      {"softmax", SoftmaxRow},
      {"transpose", TransposeRow},
      {"moe_re_routing", ReRoutingRow},
      {"moe_finalize_routing", FinalizeRow},
      {"moe_init_routing_v3", InitRoutingRow},
      {"gemm", GemmRow},
      {"grouped_matmul", GroupedRow},
      {"mla", AttentionRow},
      {"mha", AttentionRow},
      {"gqa", AttentionRow},
      {"flash_attention", AttentionRow},
      {"apply_rotary_pos_emb", RotaryRow},
      {"read_gm", ReadGmRow},
      {"core_matmul", CoreMatmulRow},
  };
  if (!BytesByName().contains(r.dtype(0))) {
    r.Skip(fmt::format("dtype '{}' is not one that the model knows", r.dtype(0)));
  } else if (r.row.schedule) {
    ScheduleRow(r);
  } else if (const auto found = operators.find(r.row.op); found != operators.end()) {
    found->second(r);
  } else if (r.row.op == "moe_distribute_dispatch_v2") {
    r.Skip("runs on several devices: links between them are not modelled");
  } else {
    r.Skip(fmt::format("no kernel stands for '{}'", r.row.op));
  }
}

}  // namespace

Interval IntervalOf(Recorded& recorded, const ChipSpec& chip, double us) {
  Interval all = IntervalOf(recorded.launches, chip, us);
  if (recorded.schedule == Schedule::kKnown) return all;
  double before = 0, starts = 0, launching = 0;
  for (const RecordedLaunch& launch : recorded.launches) {
    before += launch.before_us, launching += trace::LaunchSeconds(launch.record, chip) * 1e6;
    if (launch.before_us > 0) starts += 1;
  }
  const double scheduled = us - before - launching, other = recorded.other_schedule;
  all = Together(us, all, {us - scheduled * other / (1 + other), us + scheduled * other});
  if (recorded.schedule == Schedule::kStandard) {
    const double spread = starts * kStandardStart;
    return Together(us, all, {us - spread, us + spread});
  }
  all = Together(us, all, {us - before, us + starts * kOperatorStart * kOperatorStart.spread});
  return Together(us, all, AnySchedule(recorded.launches, chip));
}

Recorded RecordRow(const MeasuredRow& row, const ChipSpec& chip) {
  RowRecorder r{.row = row, .chip = chip};
  std::string wrong = Unfit(r);
  try {
    if (wrong.empty()) RecordOperator(r);
  } catch (const nlohmann::json::exception& error) {  // Of an attribute's type.
    wrong = fmt::format("attrs: {}", error.what());
  }
  if (!wrong.empty()) r.Skip(wrong);
  return std::move(r.out);
}

}  // namespace cubist
