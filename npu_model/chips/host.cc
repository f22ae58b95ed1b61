// The CPU as one more chip: caches read from the operating system, Cube shapes from the SIMD target.
//
// L0A, L0B, L0C and UB tiles share the private L2 cache; L1 is a slice of L3 or plain memory. Nothing breaks
// when a tile is larger than its cache, so capacities are generous and `fast` says what keeps full speed.
#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "npu_model/chip.h"
#include "npu_model/host/ceilings.h"
#include "npu_model/host/cpu.h"
#include "npu_model/host/tile_ops.h"

namespace cubist {
namespace {

// Rates of a reference core (Zen 4 at 3.6 GHz). Tiling compares alternatives by them; only their ratios
// matter.
constexpr const char* kProbe = "probe on a 2-core Zen 4 at 3.6 GHz";
constexpr double kClockHz = 3.6e9;

std::int64_t CacheBytesOr(int level, std::int64_t fallback) {
  const std::int64_t bytes = CacheBytes(level);
  return bytes > 0 ? bytes : fallback;
}

PathSpec Rate(double startup, double bytes_per_cycle) {
  return {{startup, "cycles", Basis::kGuessed, 0.5, kProbe},
          {bytes_per_cycle, "bytes/cycle", Basis::kMeasured, 0.3, kProbe}};
}

// How many multiply-adds of vectors of so many floats a core ends in a cycle: two, but for 512 bits on a Zen 4, which does
// them by halves.
constexpr const char* kWidths = "probes on Zen 4 and Zen 5; two units on other cores";
int MultiplyAddsPerCycle(std::int64_t lanes) { return lanes >= 16 && ThisCpu() == Cpu::kZen4 ? 1 : 2; }

ChipSpec MakeHostChip(const CubeOps& cube, int cores) {
  const std::int64_t l2 = CacheBytesOr(2, 1 << 20);
  const std::int64_t l3 = CacheBytesOr(3, 8 << 20);

  ChipSpec chip;
  chip.name = "host";
  chip.pipes_overlap = false;
  chip.cube_cores = 64;  // Virtual cores: enough for any machine's threads, and the same on all of them.
  chip.vector_per_cube = 1;
  chip.concurrent_cores = cores;
  chip.clock_hz = {kClockHz, "Hz", Basis::kGuessed, 0.3, kProbe};

  constexpr std::int64_t kPlainMemory = std::int64_t{1} << 40;
  const auto set = [&](Buffer buffer, std::int64_t fast) {
    chip.buffers[static_cast<std::size_t>(buffer)] = {kPlainMemory, fast, 128};
  };
  set(Buffer::kL1, l3 / 8);
  set(Buffer::kL0A, l2 * 3 / 8);
  set(Buffer::kL0B, l2 / 2);
  set(Buffer::kL0C, l2 / 4);
  set(Buffer::kBT, l2 / 16);
  set(Buffer::kUB, l2 / 2);
  set(Buffer::kHandOver, kHandOverBytes);

  // A register tile of (mr, nr), whose columns are two vectors, takes a multiply-add per row, vector and k (pair of k for
  // native bf16). AMX takes 32 elements of k at a time, 512 multiply-adds a cycle, of which operands in L2 leave about half: k
  // is cut at multiples of them, since elsewhere a cut would change bits.
  constexpr double kAmxMultiplyAdds = 512 * 0.54;
  constexpr std::int64_t kAmxRows = 32;
  const auto cycles = [](double count) { return Constant{count, "cycles", Basis::kMeasured, 0.05, kWidths}; };
  chip.mmad.m_step = cube.mr;
  chip.mmad.narrow_m_step = cube.amx ? kAmxRows : 0;
  chip.mmad.n_step = cube.nr;
  chip.mmad.k_bytes = cube.amx ? 64 : 4;
  const auto step = [&](std::int64_t rows) {
    return static_cast<double>(rows * cube.nr * chip.mmad.k_bytes);
  };
  chip.mmad.fp32_passes =
      cycles(step(cube.mr) / 4 / static_cast<double>(MultiplyAddsPerCycle(cube.nr / 2) * cube.nr / 2));
  chip.mmad.narrow_passes = cube.amx ? cycles(step(kAmxRows) / 2 / kAmxMultiplyAdds) : chip.mmad.fp32_passes;
  chip.mmad.head_idle = {100, "cycles", Basis::kGuessed, 0.5, kProbe};
  chip.mmad.head_busy = chip.mmad.head_idle;

  for (PathSpec& path : chip.paths) path = Rate(50, 8);
  const auto path = [&](Path p) -> PathSpec& { return chip.paths[static_cast<std::size_t>(p)]; };
  path(Path::kL1ToL0A) = path(Path::kL1ToL0B) = Rate(10, 1e9);  // An alias: no bytes move.
  path(Path::kGmToL1) = Rate(10, 24);                           // Shown in place: Mmad reads them from L3.
  path(Path::kGmToL1Nd2Nz) = Rate(100, 4);                      // Packing.

  chip.vector.repeat_bytes = cube.nr * 2;
  chip.vector.head = {50, "cycles", Basis::kGuessed, 0.5, kProbe};
  for (Constant& cycles : chip.vector.cycles) cycles = {4, "cycles/repeat", Basis::kGuessed, 0.5, kProbe};
  chip.vector.cycles[static_cast<std::size_t>(VectorOp::kExp)].value = 20;
  chip.scalar.issue = {20, "cycles", Basis::kGuessed, 0.5, kProbe};
  chip.scalar.step = {1, "cycles", Basis::kGuessed, 0.5, kProbe};
  chip.scalar.read = {1, "cycles", Basis::kGuessed, 0.5, kProbe};
  chip.scalar.update = {1, "cycles", Basis::kGuessed, 0.5, kProbe};
  chip.scalar.read_gm = {1, "cycles", Basis::kGuessed, 0.5, kProbe};

  chip.memory.l2_bytes = l3;
  chip.memory.l2_line = 64;
  chip.memory.hbm_bytes_per_s = {25e9, "bytes/s", Basis::kMeasured, 0.3, kProbe};
  chip.memory.l2_read_bytes_per_s = {85e9, "bytes/s", Basis::kMeasured, 0.3, kProbe};
  chip.memory.cube_read_bytes_per_s = chip.memory.l2_read_bytes_per_s;
  chip.memory.l2_write_bytes_per_s = {60e9, "bytes/s", Basis::kGuessed, 0.3, kProbe};
  chip.memory.core_read_bytes_per_cycle = {24, "bytes/cycle", Basis::kMeasured, 0.3, kProbe};
  chip.memory.core_write_bytes_per_cycle = {16, "bytes/cycle", Basis::kGuessed, 0.3, kProbe};
  chip.sync.flag =
      chip.sync.cross_core = {0, "cycles", Basis::kDocumented, 0, "pipes run on one thread, in order"};
  chip.sync.barrier_s = {3e-6, "s", Basis::kMeasured, 0.5, kProbe};
  chip.sync.launch_s = {1e-6, "s", Basis::kMeasured, 0.5, kProbe};

  // A operands are rows of up to 4 KiB, as many words of k as a Mmad takes at a time, and an odd number of lines apart:
  // rows a power of two apart would share sets of the caches. B operands are panels as wide as the register tile.
  chip.packing.native_bf16 = cube.native_bf16;
  chip.packing.narrow_element_bytes = 4;
  chip.packing.row_multiple = 2;
  chip.packing.a_width_bytes = 4096;
  chip.packing.a_line_bytes = 64;
  chip.packing.a_in_place_bytes = 32768;
  // Twelve rows that share a set fit the twelve ways of an Intel core's L1. Emerald Rapids, floats, 4096 rows 28 KiB apart times
  // packed B of 16, 32, 64 and 128 columns: 1.8, 1.6, 1.35 and 1.05 times as fast.
  chip.packing.few_columns_in_place = ThisCpu() == Cpu::kIntel;
  chip.packing.packs_few_columns = chip.packing.turns_near = ThisCpu() == Cpu::kIntel;
  const auto fitted = [](double times, const char* to) {
    return Constant{times, "times", Basis::kFitted, 0.2, to};
  };
  chip.packing.a_passes = ThisCpu() == Cpu::kZen5 ? fitted(5.8, "measured tilings of products on a Zen 5")
                                                  : fitted(7.3, "measured tilings of products on a Zen 4");
  chip.packing.b_passes = ThisCpu() == Cpu::kIntel
                              ? fitted(1.63, "measured tilings of products on an Emerald Rapids")
                              : fitted(1.25, "measured tilings of products on a Zen 4");
  chip.packing.b_width = cube.nr;
  return chip;
}

}  // namespace

const ChipSpec& HostChip() { return HostChip(std::numeric_limits<int>::max()); }

const ChipSpec& HostChip(int cores) {
  using Key = std::pair<const CubeOps*, int>;  // SIMD target and cores.
  static std::mutex mutex;
  static std::map<Key, ChipSpec> chips;  // Entries never move.
  static const int all = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  thread_local std::pair<Key, const ChipSpec*> lasts[2] = {};  // A call of few threads asks for both in turn.
  const Key key{&BestCubeOps(), std::clamp(cores, 1, all)};
  auto& last = lasts[key.second < all ? 1 : 0];
  if (last.first != key) {
    const std::scoped_lock lock(mutex);
    auto found = chips.find(key);
    if (found == chips.end()) found = chips.emplace(key, MakeHostChip(*key.first, key.second)).first;
    last = {key, &found->second};
  }
  return *last.second;
}

}  // namespace cubist
