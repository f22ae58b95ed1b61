#include "tools/validation/row_recorder.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace cubist {

const std::map<std::string, std::int64_t>& BytesByName() {
  static const std::map<std::string, std::int64_t> bytes = {
      {"float32", 4}, {"fp32", 4},  {"float16", 2}, {"fp16", 2},  {"bfloat16", 2}, {"bf16", 2},
      {"int64", 8},   {"int32", 4}, {"int16", 2},   {"uint8", 1}, {"int8", 1}};
  return bytes;
}

DType DTypeOfName(const std::string& name) {
  if (name == "bfloat16" || name == "bf16") return DType::kBF16;
  return BytesByName().at(name) == 2 ? DType::kF16 : DType::kF32;
}

std::int64_t Count(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

const Shape& RowRecorder::shape(std::size_t i) const {
  static const Shape kNone;
  return i < row.shapes.size() ? row.shapes[i] : kNone;
}

const std::string& RowRecorder::dtype(std::size_t i) const {
  return row.dtypes[std::min(i, row.dtypes.size() - 1)];
}

bool RowRecorder::attribute(const char* name) const {
  const auto found = row.attrs.find(name);
  return found != row.attrs.end() && found->is_boolean() && found->get<bool>();
}

bool RowRecorder::HasRank(std::size_t i, std::size_t rank) {
  if (shape(i).size() == rank) return true;
  Skip(fmt::format("tensor {} has {} dimensions, not {}", i, shape(i).size(), rank));
  return false;
}

bool RowRecorder::TooLong(std::initializer_list<std::int64_t> sizes) {
  constexpr double kMostProducts = 0x1p43;
  double products = 1;
  for (const std::int64_t size : sizes) products *= static_cast<double>(size);
  if (products <= kMostProducts) return false;
  Skip(fmt::format("{:.3g} multiply-adds, at most {:.3g} are replayed", products, kMostProducts));
  return true;
}

void RowRecorder::Skip(const std::string& why) {
  if (out.group.empty()) out.group = "other";
  out.skipped = why;
  out.launches.clear();
}

void RowRecorder::Add(const std::function<Status(const Device&)>& call, sync::Policy policy,
                      std::shared_ptr<const Tuning> tuning) {
  if (!out.skipped.empty()) return;
  trace::Record record;
  const Status status = call(Npu(chip, {.with_data = false, .record = &record, .tuning = std::move(tuning)}));
  if (!status.ok()) return Skip(status.message());
  sync::Plan plan = sync::PlanFlags(record, policy);
  out.launches.push_back({std::move(record), std::move(plan)});
}

void RowRecorder::AddTuned(const Call& call, const std::string& fields) {
  std::vector<TilingChoice> choices;
  if (const Status status = MeetChoices(call, chip, {}, &choices); !status.ok())
    return Skip(status.message());
  auto tuning = std::make_shared<Tuning>();
  for (const TilingChoice& choice : choices) tuning->Set(choice.kernel, choice.chip, choice.shape, fields);
  Add([&](const Device& device) { return call(device, nullptr); }, sync::Policy::kMinimal, tuning);
}

void RowRecorder::StartsSlowly(std::int64_t tiling_bytes) {
  if (!out.skipped.empty()) return;
  const double numbers = static_cast<double>(std::max(tiling_bytes - kUsualTiling, std::int64_t{0})) / 8;
  out.launches.back().before_us = kOperatorStart + numbers * chip.scalar.read_gm / chip.clock_hz * 1e6;
}

void RowRecorder::LeavesOutLaunch() {
  if (!out.skipped.empty()) return;
  RecordedLaunch& launch = out.launches.back();
  launch.before_us = -trace::LaunchSeconds(launch.record, chip) * 1e6;
}

}  // namespace cubist
