// Ascend 910B1 to 910B4 (Atlas A2): 20 or 24 Cube cores with two Vector cores each, behind one L2.
//
// The four chips share a core; they differ in core count, clock, L2 and HBM. Sources, as named below:
//   msKPP     measured per-instruction curves, Ascend/mskpp csrc/prof_data/resource910b.cpp
//   pto-isa   hw-native-sys/pto-isa, cost models fitted on the device (include/pto/costmodel)
//   asc-devkit  Ascend/asc-devkit best practices: data_copy, bank_conflict_ub, matmul_high_performance
//   platform file   Ascend910B1.ini of the vendor's simulator
// Where sources differ, `spread` reaches the others.
#include "npu_model/chip.h"

namespace cubist {
namespace {

struct Model {
  const char* name;
  int cube_cores;
  Constant clock_hz;
  std::int64_t l2_bytes;
  Constant hbm_bytes_per_s;
};

constexpr const char* kCycles = "cycles";
constexpr const char* kBytesPerCycle = "bytes/cycle";

constexpr Constant kHbm{1.46e12, "bytes/s", Basis::kMeasured, 0.05,
                        "asc-devkit data_copy, all cores reading 302 MB: 1.41 to 1.49 TB/s; "
                        "add_high_performance: 1.46, past L2 1.56; 1.6 and 1.8 are on paper (vendor guide, "
                        "catlass)"};

void SetBuffers(ChipSpec& chip) {
  constexpr std::int64_t kKiB = 1024;
  const auto set = [&](Buffer buffer, std::int64_t capacity, std::int64_t alignment) {
    chip.buffers[static_cast<std::size_t>(buffer)] = {capacity, capacity, alignment};
  };
  set(Buffer::kL1, 512 * kKiB, 32);
  set(Buffer::kL0A, 64 * kKiB, 512);
  set(Buffer::kL0B, 64 * kKiB, 512);
  set(Buffer::kL0C, 128 * kKiB, 64);
  set(Buffer::kBT, 1 * kKiB, 64);
  set(Buffer::kUB, 192 * kKiB, 32);
  set(Buffer::kHandOver, kHandOverBytes, 512);
}

void SetMmad(ChipSpec& chip) {
  chip.mmad.m_step = chip.mmad.n_step = 16;
  chip.mmad.k_bytes = 32;
  chip.mmad.fp32_passes = {2, kCycles, Basis::kDocumented, 0,
                           "pto-isa cce_costmodel_cube.hpp: fp32 takes two passes"};
  chip.mmad.narrow_passes = {1, kCycles, Basis::kMeasured, 0.02,
                             "msKPP resource910b.cpp, 910B1 and 910B3: 16x16x16 per cycle"};
  chip.mmad.head_idle = {23, kCycles, Basis::kMeasured, 0.1,
                         "msKPP resource910b.cpp, 910B3 isolated: 23; pypto device fit: 21"};
  chip.mmad.head_busy = {
      2, kCycles, Basis::kMeasured, 0.2,
      "msKPP resource910b.cpp, 910B1, back to back: ideal + 1.9; the 10 of asc-devkit 8192^3 "
      "fp16 on 24 cores (+1.96 % of 512) come of the flags around each Mmad"};
}

void SetPaths(ChipSpec& chip) {
  // Transfers of 128 bytes by 48 cores are 20.6 cycles apart: startups overlap.
  constexpr Constant kGmGap{20, kCycles, Basis::kMeasured, 0.3,
                            "asc-devkit data_copy, 48 Vector cores, tiles of 1 x 64 fp16: 548 us for 302 MB"};
  constexpr Constant kL0Gap{
      2, kCycles, Basis::kMeasured, 0.5,
      "msKPP resource910b.cpp, 910B1 L1_TO_L0A and L1_TO_L0B back to back: 2 + bytes / rate"};
  const auto set = [&](Path path, Constant startup, Constant rate) {
    startup.unit = kCycles, rate.unit = kBytesPerCycle;
    PathSpec& spec = chip.paths[static_cast<std::size_t>(path)];
    const bool from_l1 = path == Path::kL1ToL0A || path == Path::kL1ToL0B || path == Path::kL1ToBT;
    spec.startup = startup, spec.bytes_per_cycle = rate;
    spec.gap = from_l1 ? kL0Gap : kGmGap;
  };
  set(Path::kGmToL1,
      {206, "", Basis::kMeasured, 0.2,
       "msKPP resource910b.cpp, 910B1 GM_TO_L1: 1 KiB 173 cycles, line fit 206"},
      {174, "", Basis::kMeasured, 0.1, "msKPP resource910b.cpp, 910B1 GM_TO_L1, one core"});
  set(Path::kGmToL1Nd2Nz,
      {210, "", Basis::kDocumented, 0.5,
       "vendor GEMM tiling model (cache_tiling_cycle_model.cc); msKPP isolated: 780, which pto-dsl's step 1, "
       "where every load is alone, rules out: 15 % more for each of its rows"},
      {165, "", Basis::kMeasured, 0.1, "msKPP resource910b.cpp, 910B1 GM_TO_L1_TRANS, one core: 157 to 178"});
  set(Path::kL1ToL0A,
      {26, "", Basis::kDocumented, 0.3,
       "vendor GEMM tiling model (cache_tiling_cycle_model.cc): MTE1 starts in 26 cycles"},
      {256, "", Basis::kMeasured, 0.05, "msKPP resource910b.cpp, 910B1 L1_TO_L0A: 263; pto-isa: 256"});
  set(Path::kL1ToL0B,
      {26, "", Basis::kDocumented, 0.3,
       "vendor GEMM tiling model (cache_tiling_cycle_model.cc): MTE1 starts in 26 cycles"},
      {128, "", Basis::kMeasured, 0.05, "msKPP resource910b.cpp, 910B1 L1_TO_L0B: 132; pto-isa: 128"});
  set(Path::kL1ToBT, {24, "", Basis::kGuessed, 0.95, "as L1 to L0"},
      {33, "", Basis::kMeasured, 0.1, "msKPP resource910b.cpp, 910B1 L1_TO_BT"});
  chip.paths[static_cast<std::size_t>(Path::kL1ToBT)].gap = {
      0.1, kCycles, Basis::kMeasured, 1, "msKPP resource910b.cpp, 910B1 L1_TO_BT back to back: bytes / rate"};
  set(Path::kL0CToGm,
      {3, "", Basis::kMeasured, 9,
       "msKPP resource910b.cpp, 910B1 L0C_TO_GM and NZ2ND: 0 to 4 with a rate of 120; to 45 with higher "
       "ones"},
      {120, "", Basis::kMeasured, 0.1, "msKPP resource910b.cpp, 910B1 L0C_TO_GM: 117 to 134; pypto: 118"});
  chip.paths[static_cast<std::size_t>(Path::kL0CToGm)].least = {
      82, kCycles, Basis::kMeasured, 1,
      "msKPP resource910b.cpp, 910B1 L0C_TO_GM: 80 to 94 up to 8 KiB; pypto device fit: 164"};
  set(Path::kL1ToGm, {105, "", Basis::kGuessed, 0.5, "as UB to GM"},
      {70, "", Basis::kGuessed, 0.5, "as UB to GM; theory 128, pto-isa 18"});
  set(Path::kGmToUb,
      {193, "", Basis::kMeasured, 0.4, "msKPP resource910b.cpp, 910B3 GM_TO_UB: 193; 910B1: 64 to 147"},
      {126, "", Basis::kMeasured, 0.15,
       "msKPP resource910b.cpp, 910B3 GM_TO_UB: 126, a scatter of 5 % about it; 910B1's 48 are "
       "memory.core_miss"});
  set(Path::kUbToGm,
      {107, "", Basis::kMeasured, 0.2, "msKPP resource910b.cpp, 910B1 and 910B3 UB_TO_GM: 88 to 121"},
      {76, "", Basis::kMeasured, 0.15, "msKPP resource910b.cpp, 910B1 and 910B3 UB_TO_GM: 66 to 79"});
  chip.paths[static_cast<std::size_t>(Path::kUbToGm)].least = {
      150, kCycles, Basis::kMeasured, 0.1, "msKPP resource910b.cpp, 910B1 UB_TO_GM: 1 KiB 151, 2 KiB 155"};
}

void SetVector(ChipSpec& chip) {
  constexpr const char* kPerRepeat = "cycles/repeat";
  chip.vector.repeat_bytes = 256;
  chip.vector.head = {22, kCycles, Basis::kMeasured, 0.3,
                      "pto-isa formula_params.csv, 910B3: 20 to 26; a dependent one waits 13 to 25"};
  chip.vector.least = {3, kCycles, Basis::kMeasured, 0.35,
                       "msKPP resource910b.cpp, 910B1, one repeat back to back: 3 (fp32) or 4 (fp16)"};
  const auto set = [&](VectorOp op, double cycles, Basis basis, double spread, const char* source) {
    chip.vector.cycles[static_cast<std::size_t>(op)] = {cycles, kPerRepeat, basis, spread, source};
  };
  set(VectorOp::kUnary, 1, Basis::kMeasured, 0.07, "msKPP resource910b.cpp, 910B1 vadds, vmuls");
  set(VectorOp::kBinary, 2, Basis::kMeasured, 0.15,
      "msKPP resource910b.cpp, 910B1 vadd, vmul, vmax; pto-isa, 910B3: 2.0 to 2.3; half where sources are in "
      "different bank groups (asc-devkit)");
  set(VectorOp::kExp, 2, Basis::kMeasured, 0.05, "msKPP resource910b.cpp, 910B1 vexp fp32");
  set(VectorOp::kLn, 2, Basis::kMeasured, 0.05, "msKPP resource910b.cpp, 910B1 vln fp32");
  set(VectorOp::kDiv, 4, Basis::kMeasured, 0.05, "msKPP resource910b.cpp, 910B1 vdiv fp32");
  set(VectorOp::kCast, 1, Basis::kMeasured, 0.1,
      "msKPP resource910b.cpp, 910B1 vconv fp16, bf16 to fp32, fp32 to bf16: 1 per 256 bytes read; fp32 to "
      "fp16: "
      "0.5");
  set(VectorOp::kReduce, 1, Basis::kMeasured, 0.1,
      "msKPP resource910b.cpp, 910B1 vcgadd, vcgmax fp32, eight to one");
  set(VectorOp::kSelect, 2, Basis::kMeasured, 0.1, "msKPP resource910b.cpp, 910B1 vsel");
  set(VectorOp::kInteger, 2, Basis::kMeasured, 0.15,
      "msKPP resource910b.cpp, 910B1 vadd int32; half where sources are in different bank groups");
  set(VectorOp::kSort, 16, Basis::kGuessed, 0.5, "as a merge pass");
  set(VectorOp::kMergeSort, 16, Basis::kMeasured, 3.9,
      "msKPP resource910b.cpp, 910B1 vmrgsort4: 16 per 64 elements; PTO's calibration on 910B3: 78, which no "
      "row of moe_init_routing asks for");
  set(VectorOp::kGather, 12, Basis::kMeasured, 1,
      "msKPP resource910b.cpp, 910B1 vgather u32; u16 takes as long for each element: 24");
  set(VectorOp::kGatherMask, 14, Basis::kMeasured, 0.5,
      "msKPP resource910b.cpp, 910B1 vreducev2 u16, u32: 14 per 256 bytes read");
}

void SetScalar(ChipSpec& chip) {
  chip.scalar.issue = {6, kCycles, Basis::kGuessed, 0.8, "no source"};
  chip.scalar.issue_flag = {2, kCycles, Basis::kGuessed, 0.8, "no source; no operands to set up"};
  chip.scalar.queue_depth = 32;  // Vendor guide, matmul tuning: MTE1 and M; the others likewise.
  chip.scalar.step = {10, kCycles, Basis::kGuessed, 0.8,
                      "no source; as scalar.read: an element out of a cache, compared, added, written"};
  chip.scalar.read = {11, kCycles, Basis::kFitted, 0.4,
                      "a third of scalar.update; 15 if its addition and SetValue take 2 each"};
  chip.scalar.read_gm = {40, kCycles, Basis::kGuessed, 0.8,
                         "every eighth int64 misses the cache, about 240 cycles to L2; else as scalar.read"};
  chip.scalar.update = {
      34, kCycles, Basis::kMeasured, 0.15,
      "vendor guide: 8192^2 fp16 additions by GetValue and SetValue on one core, 1.24 s; counts of "
      "MoeReRouting, 30 to 32 each"};
}

void SetMemory(ChipSpec& chip, const Model& model) {
  const double core_cycles_per_s = model.cube_cores * model.clock_hz.value;
  chip.memory.l2_bytes = model.l2_bytes;
  chip.memory.l2_line = 512;
  chip.memory.hbm_bytes_per_s = model.hbm_bytes_per_s;
  chip.memory.l2_read_bytes_per_s = {134 * core_cycles_per_s, "bytes/s", Basis::kMeasured, 0.2,
                                     "asc-devkit data_copy, hits by 48 Vector cores on 910B1: 5.97 TB/s"};
  chip.memory.cube_read_bytes_per_s = {81 * core_cycles_per_s, "bytes/s", Basis::kFitted, 0.1,
                                       "pto-dsl guide, 910B2: 3.5 TB/s on fitting rows; in GEMMs elsewhere "
                                       "3.2 to 3.8, streaming 4.9 (asc-devkit)"};
  chip.memory.l2_write_bytes_per_s = {86 * core_cycles_per_s, "bytes/s", Basis::kDocumented, 0.3,
                                      "platform file: 86 bytes/cycle per Cube core"};
  chip.memory.core_read_bytes_per_cycle = {
      174, kBytesPerCycle, Basis::kMeasured, 0.3,
      "msKPP resource910b.cpp, 910B1 GM_TO_L1: the highest seen of one core"};
  chip.memory.core_write_bytes_per_cycle = {
      120, kBytesPerCycle, Basis::kMeasured, 0.3,
      "msKPP resource910b.cpp, 910B1 L0C_TO_GM: the highest seen of one core"};
  chip.memory.core_miss_bytes_per_cycle = {
      48, kBytesPerCycle, Basis::kMeasured, 0.09,
      "msKPP resource910b.cpp, 910B1 GM_TO_UB: 47 to 51, taken as misses of L2; it has pto-dsl's rows of M = "
      "128 within "
      "7 %. Platform file: 32, with which a row times a matrix would take a third longer than measured"};
  chip.memory.found_dirty = {0.065, "share", Basis::kFitted, 0.5,
                             "pto-dsl guide, M = 128 (fresh buffers for every launch): 0.1 with no "
                             "turn_around; the larger sigmoid rows of "
                             "cann-bench, which nothing else holds back, ask for 0.05 to 0.1"};
  chip.memory.turn_around = {
      0.35, "share", Basis::kFitted, 0.3,
      "sigmoid of 8192 x 8192 fp32 (cann-bench, 360 us) asks for 0.4, fp16 additions of 8192 x 8192 "
      "(asc-devkit add_high_performance, case 4: 258 us in the cores) for 0.25"};
  chip.memory.same_line = {1.7, kCycles, Basis::kGuessed, 0.8,
                           "no row bears it out: those of asc-devkit data_copy with all cores on the same "
                           "addresses (1.54 times as long on "
                           "48 Vector cores, 1.14 on 24 Cube cores) read past L2, and replayed through it "
                           "both orders take as long"};
}

void SetSync(ChipSpec& chip) {
  chip.sync.flag = {12, kCycles, Basis::kFitted, 0.5,
                    "pto-dsl guide, step 1 (a flag in front of every instruction); no published figure"};
  chip.sync.execute = {
      2, kCycles, Basis::kGuessed, 0.5,
      "no source; 3 flags per Mmad explain most of the 10 cycles between Mmads of asc-devkit"};
  chip.sync.cross_core = {
      400, kCycles, Basis::kGuessed, 0.5,
      "half of a round trip of 0.3 to 0.6 us, within the 1000 cycles per tile of attention kernels"};
  chip.sync.start_spread_s = {1e-6, "s", Basis::kGuessed, 0.5,
                              "an empty kernel takes 1.7 to 3 us; cores that start together stay in step"};
  chip.sync.barrier_s = {1.5e-6, "s", Basis::kGuessed, 0.35, "1 to 2 us; no published figure"};
  chip.sync.launch_s = {
      1.6e-6, "s", Basis::kMeasured, 0.25,
      "cann-bench: an empty MoeInitRouting takes 1.66 us, a MatMul of 64^3 1.91, other empty "
      "kernels to 3 with the start of all cores, launched repeatedly; cold launches 13 to 20 us"};
  chip.sync.mixed_launch_s = {4e-6, "s", Basis::kMeasured, 0.75,
                              "catlass: 1 to 5 us in its documents, 1 + 7 * share of the cores in its choice "
                              "of kernels; vendor guide: "
                              "6.6 less for a product made Cube only"};
}

ChipSpec MakeChip(const Model& model) {
  ChipSpec chip;
  chip.name = model.name;
  chip.cube_cores = model.cube_cores;
  chip.vector_per_cube = 2;
  chip.concurrent_cores = model.cube_cores;
  chip.clock_hz = model.clock_hz;
  SetBuffers(chip);
  SetMmad(chip);
  SetPaths(chip);
  SetVector(chip);
  SetScalar(chip);
  SetMemory(chip, model);
  SetSync(chip);
  return chip;
}

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
constexpr Constant ClockOf(double hz) {
  return {hz, "Hz", Basis::kDocumented, 0.03,
          "pto-isa fa_cost_model.py, table of chips; AMLA's peak of 354 TFLOPS per die says the same; "
          "launches that "
          "last over 40 ms run slower, which is not modelled"};
}

}  // namespace

const ChipSpec& Ascend910B1() {
  static const ChipSpec chip =
      MakeChip({"ascend910b1",
                24,
                {1.85e9, "Hz", Basis::kDocumented, 0.02, "platform file Ascend910B1.ini"},
                192 * kMiB,
                kHbm});
  return chip;
}

const ChipSpec& Ascend910B2() {
  static const ChipSpec chip = MakeChip({"ascend910b2", 24, ClockOf(1.8e9), 192 * kMiB, kHbm});
  return chip;
}

const ChipSpec& Ascend910B3() {
  static const ChipSpec chip = MakeChip({"ascend910b3", 20, ClockOf(1.8e9), 192 * kMiB, kHbm});
  return chip;
}

const ChipSpec& Ascend910B4() {
  constexpr Constant kHalfHbm{0.8e12, "bytes/s", Basis::kDocumented, 0.15,
                              "pto-isa fa_cost_model.py: half of the bandwidth; vendor guide: 0.8 TB/s"};
  static const ChipSpec chip = MakeChip({"ascend910b4", 20, ClockOf(1.5e9), 96 * kMiB, kHalfHbm});
  return chip;
}

}  // namespace cubist
