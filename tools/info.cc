#include "tools/info.h"

#include <fmt/format.h>
#include <oneapi/tbb/info.h>

#include <string>

#include "npu_model/chip.h"
#include "npu_model/host/ceilings.h"
#include "npu_model/host/tile_ops.h"
#include "tools/table.h"

namespace cubist {
namespace {

std::string Bytes(std::int64_t bytes) {
  if (bytes <= 0) return "unknown";
  return bytes % (1 << 20) == 0 ? fmt::format("{} MiB", bytes >> 20) : fmt::format("{} KiB", bytes >> 10);
}

}  // namespace

int InfoCommand() {
  const CubeOps& cube = BestCubeOps();
  fmt::print("SIMD target  {}{}; register tile {} x {}\n", cube.target,
             cube.native_bf16 ? " with native bf16" : "", cube.mr, cube.nr);
  fmt::print("caches       L1d {}, L2 {}, L3 {}\n", Bytes(CacheBytes(1)), Bytes(CacheBytes(2)),
             Bytes(CacheBytes(3)));
  fmt::print("threads      {}\n\n", oneapi::tbb::info::default_concurrency());

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
  for (const std::string& name : ChipNames()) {
    ChipSpec chip;
    if (!FindChip(name, &chip).ok()) continue;
    const auto capacity = [&](Buffer b) { return Bytes(chip.buffer(b).capacity); };
    fmt::print("{}\n", table.Row({chip.name, fmt::format("{}", chip.cube_cores),
                                  fmt::format("{}", chip.cube_cores * chip.vector_per_cube),
                                  fmt::format("{:.2f}", chip.clock_hz.value / 1e9), capacity(Buffer::kL1),
                                  capacity(Buffer::kL0A), capacity(Buffer::kL0B), capacity(Buffer::kL0C),
                                  capacity(Buffer::kUB), Bytes(chip.memory.l2_bytes),
                                  FormatPerSecond(chip.memory.hbm_bytes_per_s, "B/s")}));
  }
  return 0;
}

}  // namespace cubist
