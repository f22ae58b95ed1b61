#include "tools/info.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cubist/version.h"
#include "npu_model/chip.h"
#include "npu_model/chip_constants.h"
#include "npu_model/device.h"
#include "npu_model/host/ceilings.h"
#include "npu_model/host/tile_ops.h"
#include "tools/bad_input.h"
#include "tools/files.h"
#include "tools/json_writer.h"
#include "tools/table.h"
#include "tools/what_if.h"

namespace cubist {
namespace {

using Json = nlohmann::ordered_json;

std::string Bytes(std::int64_t bytes) {
  if (bytes <= 0) return "unknown";
  return bytes % (1 << 20) == 0 ? fmt::format("{} MiB", bytes >> 20) : fmt::format("{} KiB", bytes >> 10);
}

Json ChipJson(const ChipSpec& chip) {
  Json buffers;
  for (const Buffer b : {Buffer::kL1, Buffer::kL0A, Buffer::kL0B, Buffer::kL0C, Buffer::kUB})
    buffers[NameOf(b)] = chip.buffer(b).capacity;
  return {{"name", chip.name},
          {"cube_cores", chip.cube_cores},
          {"vector_cores", chip.cube_cores * chip.vector_per_cube},
          {"clock_hz", chip.clock_hz.value},
          {"buffer_bytes", buffers},
          {"l2_bytes", static_cast<std::int64_t>(chip.memory.l2_bytes)},
          {"hbm_bytes_per_s", static_cast<double>(chip.memory.hbm_bytes_per_s)}};
}

std::vector<ChipSpec> KnownChips() {
  std::vector<ChipSpec> chips;
  for (const std::string& name : ChipNames()) {
    ChipSpec chip;
    if (FindChip(name, &chip).ok()) chips.push_back(std::move(chip));
  }
  return chips;
}

void PrintChips() {
  using Align = Column::Align;
  const Table table({{"chip", "", 12, Align::kLeft},
                     {"Cube", "cores", 5},
                     {"Vector", "cores", 6},
                     {"clock", "GHz", 5},
                     {"L1", "", 8},
                     {"L0A", "", 8},
                     {"L0B", "", 8},
                     {"L0C", "", 8},
                     {"UB", "", 8},
                     {"L2", "", 8},
                     {"HBM", "", 9}});
  fmt::print("{}\n", table.Header());
  for (const ChipSpec& chip : KnownChips()) {
    const auto capacity = [&](Buffer b) { return Bytes(chip.buffer(b).capacity); };
    fmt::print("{}\n", table.Row({chip.name, fmt::format("{}", chip.cube_cores),
                                  fmt::format("{}", chip.cube_cores * chip.vector_per_cube),
                                  fmt::format("{:.2f}", chip.clock_hz.value / 1e9), capacity(Buffer::kL1),
                                  capacity(Buffer::kL0A), capacity(Buffer::kL0B), capacity(Buffer::kL0C),
                                  capacity(Buffer::kUB), Bytes(chip.memory.l2_bytes),
                                  FormatPerSecond(chip.memory.hbm_bytes_per_s, "B/s")}));
  }
}

Json ConstantsJson(const ChipSpec& chip) {
  Json json = Json::array();
  for (const NamedConstant& named : ConstantsOf(chip)) {
    const Constant& c = named.constant;
    json.push_back({{"name", named.name},
                    {"value", c.value},
                    {"unit", c.unit},
                    {"spread", c.spread},
                    {"basis", NameOf(c.basis)},
                    {"source", c.source}});
  }
  return json;
}

void PrintConstants(const ChipSpec& chip) {
  using Align = Column::Align;
  const Table table({{"constant of " + chip.name, "", 36, Align::kLeft},
                     {"value", "", 12},
                     {"spread", "+- %", 6},
                     {"unit", "", 10, Align::kLeft},
                     {"known as", "", 10, Align::kLeft},
                     {"source", "", 40, Align::kLeft}});
  fmt::print("{}\n", table.Header());
  for (const NamedConstant& named : ConstantsOf(chip)) {
    const Constant& c = named.constant;
    fmt::print("{}\n", table.Row({named.name, fmt::format("{:g}", c.value),
                                  c.spread == 0 ? "" : fmt::format("{:.0f}", 100 * c.spread), c.unit,
                                  NameOf(c.basis), c.source}));
  }
}

// The constants of one chip.
int ConstantsCommand(const InfoOptions& options) {
  Status status = PrepareOutput("--json", options.json);
  ChipSpec chip;
  if (status.ok()) status = LoadChip(options.chip, &chip);
  if (status.ok()) PrintConstants(chip);
  if (status.ok() && !options.json.empty()) {
    Json json = ChipJson(chip);
    json["constants"] = ConstantsJson(chip);
    status = WriteJson(options.json, json);
  }
  return status.ok() ? 0 : BadInput("cubist info", status.message());
}

}  // namespace

std::string TargetText(const CubeOps& cube) {
  return std::string(cube.target) + (cube.amx ? " with AMX" : cube.native_bf16 ? " with native bf16" : "");
}

int InfoCommand(const InfoOptions& options) {
  if (!options.chip.chip.empty()) return ConstantsCommand(options);
  Status status = PrepareOutput("--json", options.json);
  const Device host = Host({.threads = options.threads});
  if (status.ok()) status = host.status();
  if (!status.ok()) return BadInput("cubist info", status.message());
  const CubeOps& cube = BestCubeOps();
  fmt::print("version      {}\n", Version());
  fmt::print("SIMD target  {}; register tile {} x {}\n", TargetText(cube), cube.mr, cube.nr);
  fmt::print("caches       L1d {}, L2 {}, L3 {}\n", Bytes(CacheBytes(1)), Bytes(CacheBytes(2)),
             Bytes(CacheBytes(3)));
  fmt::print("threads      {}\n", host.concurrency());
  Json json = {{"version", Version()},
               {"simd_target", cube.target},
               {"native_bf16", cube.native_bf16},
               {"amx", cube.amx},
               {"cache_bytes", {CacheBytes(1), CacheBytes(2), CacheBytes(3)}},
               {"threads", host.concurrency()}};
  if (options.measure) {
    const Ceilings peaks = MeasureCeilings(host.concurrency());
    fmt::print("peaks        fp32 {}, bf16 {}\n", FormatPerSecond(peaks.fma_flops, "FLOP/s"),
               FormatPerSecond(peaks.bf16_flops(), "FLOP/s"));
    fmt::print("memory       read {}, write {}, copy {}\n", FormatPerSecond(peaks.read_bytes_per_s, "B/s"),
               FormatPerSecond(peaks.write_bytes_per_s, "B/s"),
               FormatPerSecond(peaks.copy_bytes_per_s, "B/s"));
    json["peaks"] = {{"fp32_flops", peaks.fma_flops},
                     {"bf16_flops", peaks.bf16_flops()},
                     {"read_bytes_per_s", peaks.read_bytes_per_s},
                     {"write_bytes_per_s", peaks.write_bytes_per_s},
                     {"copy_bytes_per_s", peaks.copy_bytes_per_s}};
  }
  fmt::print("\n");
  PrintChips();
  if (options.json.empty()) return 0;
  json["chips"] = Json::array();
  for (const ChipSpec& chip : KnownChips()) json["chips"].push_back(ChipJson(chip));
  status = WriteJson(options.json, json);
  return status.ok() ? 0 : BadInput("cubist info", status.message());
}

}  // namespace cubist
