#include "npu_model/chip_constants.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <type_traits>

#include "npu_model/nearest.h"

namespace cubist {
namespace {

// "GM->L1 ND2NZ" as "gm_to_l1_nd2nz".
std::string Key(std::string_view name) {
  std::string key;
  for (std::size_t i = 0; i < name.size(); ++i) {
    if (name.substr(i, 2) == "->") {
      key += "_to_";
      ++i;
    } else {
      key += name[i] == ' ' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(name[i])));
    }
  }
  return key;
}

constexpr const char* kVectorOps[kVectorOpCount] = {"unary",      "binary", "exp",        "ln",      "div",
                                                    "cast",       "reduce", "select",     "integer", "sort",
                                                    "merge_sort", "gather", "gather_mask"};

// What may be set: far beyond any machine on either side, and not so far that times leave what a double tells apart.
struct Limits {
  double least = 0, most = 0;
  bool or_zero = false;  // Zero is none.
};
constexpr Limits kHertz{1e6, 1e12}, kBytesPerSecond{1e6, 1e18}, kBytesPerCycle{1e-3, 1e12};
constexpr Limits kCycles{0, 1e9}, kSeconds{0, 10}, kCyclesOfWork{1e-6, 1e6};
constexpr Limits kBytes{1, 1099511627776.0};

// Of a constant, in parts: a text is made of it where it is wanted.
struct Name {
  Name(const char* group, std::string_view member = {},
       const char* what = "")  // NOLINT(google-explicit-constructor)
      : group(group), member(member), what(what) {}
  std::string text() const { return std::string(group).append(member).append(what); }

  const char* group;
  std::string_view member;
  const char* what;
};

template <class Enum, std::size_t kCount>
const std::array<std::string, kCount>& KeysOf() {
  static const std::array<std::string, kCount> keys = [] {
    std::array<std::string, kCount> made;
    for (std::size_t i = 0; i < kCount; ++i) made[i] = Key(NameOf(static_cast<Enum>(i)));
    return made;
  }();
  return keys;
}

// What a count, which is no Constant, is of, and who says so.
struct Known {
  const char *unit = "", *source = "";
};

// Calls visit(name, member, limits), and with Known for counts, for each. A chip without pipes that overlap has one thread per core: what belongs to
// flags and queues is listed all the same.
template <class Chip, class Visit>
void VisitConstants(Chip& chip, Visit visit) {
  visit("cube_cores", chip.cube_cores, Limits{1, 4096},
        Known{"cores", "CANN's platform files, catlass, pto-dsl guide"});
  visit("vector_per_cube", chip.vector_per_cube, Limits{1, kMaxVectorPerCube},
        Known{"cores", "CANN's platform files: twice as many Vector cores as Cubes"});
  visit("clock_hz", chip.clock_hz, kHertz);
  for (std::size_t b = 0; b < kBufferCount; ++b)
    visit({"buffer.", KeysOf<Buffer, kBufferCount>()[b]}, chip.buffers[b].capacity, kBytes,
          Known{"bytes", static_cast<Buffer>(b) == Buffer::kHandOver ? "workspace in GM: any size"
                                                                     : "CANN's platform files, catlass"});
  visit("mmad.fp32_passes", chip.mmad.fp32_passes, kCyclesOfWork);
  visit("mmad.narrow_passes", chip.mmad.narrow_passes, kCyclesOfWork);
  visit("mmad.head_idle", chip.mmad.head_idle, kCycles);
  visit("mmad.head_busy", chip.mmad.head_busy, kCycles);
  for (std::size_t p = 0; p < kPathCount; ++p) {
    const std::string& key = KeysOf<Path, kPathCount>()[p];
    auto& path = chip.paths[p];
    visit({"path.", key, ".startup"}, path.startup, kCycles);
    visit({"path.", key, ".bytes_per_cycle"}, path.bytes_per_cycle, kBytesPerCycle);
    visit({"path.", key, ".gap"}, path.gap, kCycles);
    visit({"path.", key, ".row"}, path.row, kCycles);
    visit({"path.", key, ".least"}, path.least, kCycles);
  }
  visit("vector.head", chip.vector.head, kCycles);
  visit("vector.least", chip.vector.least, kCycles);
  for (std::size_t op = 0; op < kVectorOpCount; ++op)
    visit({"vector.cycles.", kVectorOps[op]}, chip.vector.cycles[op], kCyclesOfWork);
  visit("scalar.issue", chip.scalar.issue, kCycles);
  visit("scalar.issue_flag", chip.scalar.issue_flag, kCycles);
  visit("scalar.queue_depth", chip.scalar.queue_depth, Limits{1, 1024},
        Known{"instructions", "developer guide, tuning of a matmul: MTE1 and M; the others likewise"});
  visit("scalar.step", chip.scalar.step, kCycles);
  visit("scalar.read", chip.scalar.read, kCycles);
  visit("scalar.read_gm", chip.scalar.read_gm, kCycles);
  visit("scalar.update", chip.scalar.update, kCycles);
  visit("memory.l2_bytes", chip.memory.l2_bytes, Limits{4096, kBytes.most},
        Known{"bytes", "CANN's platform files, catlass, pto-dsl guide"});
  visit("memory.hbm_bytes_per_s", chip.memory.hbm_bytes_per_s, kBytesPerSecond);
  visit("memory.l2_read_bytes_per_s", chip.memory.l2_read_bytes_per_s, kBytesPerSecond);
  visit("memory.cube_read_bytes_per_s", chip.memory.cube_read_bytes_per_s, kBytesPerSecond);
  visit("memory.l2_write_bytes_per_s", chip.memory.l2_write_bytes_per_s, kBytesPerSecond);
  visit("memory.core_read_bytes_per_cycle", chip.memory.core_read_bytes_per_cycle, kBytesPerCycle);
  visit("memory.core_write_bytes_per_cycle", chip.memory.core_write_bytes_per_cycle, kBytesPerCycle);
  visit("memory.core_miss_bytes_per_cycle", chip.memory.core_miss_bytes_per_cycle,
        Limits{kBytesPerCycle.least, kBytesPerCycle.most, true});
  visit("memory.found_dirty", chip.memory.found_dirty, Limits{0, 1});
  visit("memory.turn_around", chip.memory.turn_around, Limits{0, 10});
  visit("memory.same_line", chip.memory.same_line, kCycles);
  visit("sync.flag", chip.sync.flag, kCycles);
  visit("sync.execute", chip.sync.execute, kCycles);
  visit("sync.cross_core", chip.sync.cross_core, kCycles);
  visit("sync.barrier_s", chip.sync.barrier_s, kSeconds);
  visit("sync.launch_s", chip.sync.launch_s, kSeconds);
  visit("sync.mixed_launch_s", chip.sync.mixed_launch_s, kSeconds);
  visit("sync.start_spread_s", chip.sync.start_spread_s, kSeconds);
  visit("sync.event_ids", chip.sync.event_ids, Limits{1, 64},
        Known{"ids",
              "developer guide: 0 to 7 of an ordered pair of pipes, of which the framework keeps 6 and 7"});
  visit("sync.cross_core_ids", chip.sync.cross_core_ids, Limits{1, 64},
        Known{"ids", "developer guide: CrossCoreSetFlag takes 0 to 10"});
  visit("sync.cross_core_limit", chip.sync.cross_core_limit, Limits{1, 255},
        Known{"sets", "developer guide: the counter of an id goes to 15"});
}

std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", value);
  return text;
}

// NaN is within no limits.
bool IsWithin(const Limits& limits, bool whole, double value) {
  if (limits.or_zero && value == 0) return true;
  return value >= limits.least && value <= limits.most && (!whole || value == std::floor(value));
}

Status CheckValue(const Name& name, const Limits& limits, bool whole, double value) {
  if (IsWithin(limits, whole, value)) return {};
  std::string needs = limits.or_zero ? "0 or " : "";
  needs.append(whole ? "a whole number" : "a number");
  needs.append(" from ").append(Number(limits.least)).append(" to ").append(Number(limits.most));
  return InvalidArgument(name.text() + " is " + Number(value) + ", needs " + needs);
}

template <class Member>
constexpr bool kWhole = !std::is_same_v<std::remove_cvref_t<Member>, Constant>;

template <class Member>
NamedConstant Describe(const Name& name, const Member& member, const Limits& limits, const Known& known) {
  NamedConstant named;
  named.name = name.text();
  named.least = limits.least, named.most = limits.most, named.or_zero = limits.or_zero;
  named.whole = kWhole<Member>;
  if constexpr (kWhole<Member>) {
    named.constant = {static_cast<double>(member), known.unit, Basis::kDocumented, 0, known.source};
  } else {
    named.constant = member;
  }
  return named;
}

}  // namespace

std::vector<NamedConstant> ConstantsOf(const ChipSpec& chip) {
  std::vector<NamedConstant> constants;
  VisitConstants(chip,
                 [&](const Name& name, const auto& member, const Limits& limits, const Known& known = {}) {
                   constants.push_back(Describe(name, member, limits, known));
                 });
  return constants;
}

Status CheckChip(const ChipSpec& chip) {
  Status status;
  const auto check = [&](const Name& name, const auto& member, const Limits& limits, const Known& = {}) {
    if (status.ok()) status = CheckValue(name, limits, kWhole<decltype(member)>, static_cast<double>(member));
  };
  VisitConstants(chip, check);
  // What only a table of one's own can change.
  constexpr Limits kSize{1, 1048576}, kWidth{4, kSize.most};
  check("concurrent_cores", chip.concurrent_cores, kSize);
  for (const BufferSpec& buffer : chip.buffers) check("a buffer's alignment", buffer.alignment, kSize);
  check("mmad.m_step", chip.mmad.m_step, kSize);
  check("mmad.narrow_m_step", chip.mmad.narrow_m_step, Limits{0, kSize.most});
  check("mmad.n_step", chip.mmad.n_step, kSize);
  check("mmad.k_bytes", chip.mmad.k_bytes, kWidth);
  check("vector.repeat_bytes", chip.vector.repeat_bytes, Limits{32, kSize.most});
  check("memory.l2_line", chip.memory.l2_line, kWidth);
  check("packing.a_width_bytes", chip.packing.a_width_bytes, kWidth);
  check("packing.b_width_bytes", chip.packing.b_width_bytes, kWidth);
  check("packing.row_multiple", chip.packing.row_multiple, kSize);
  check("packing.narrow_element_bytes", chip.packing.narrow_element_bytes, Limits{2, 4});
  if (status.ok() && !std::has_single_bit(static_cast<std::uint64_t>(chip.memory.l2_line)))
    status = InvalidArgument("memory.l2_line is " + std::to_string(chip.memory.l2_line) +
                             ", needs a power of two");
  return status.ok() ? status : InvalidArgument(chip.name + ": " + status.message());
}

Status SetConstant(ChipSpec* chip, std::string_view name, double value) {
  bool found = false;
  Status status;
  std::vector<std::string> names;
  VisitConstants(*chip, [&](const Name& known, auto& member, const Limits& limits, const Known& = {}) {
    names.push_back(known.text());
    if (names.back() != name) return;
    found = true;
    using Member = std::remove_cvref_t<decltype(member)>;
    if (status = CheckValue(known, limits, kWhole<Member>, value); !status.ok()) return;
    if constexpr (kWhole<Member>) {
      member = static_cast<Member>(value);
    } else {
      member.value = value, member.basis = Basis::kGuessed, member.spread = 0;
      member.source = "set by the user";
    }
  });
  if (!found) {
    return InvalidArgument("no constant of a chip is named '" + std::string(name) + "'" +
                           NearestText(name, names));
  }
  if (!status.ok()) return status;
  if (name == "cube_cores") chip->concurrent_cores = chip->cube_cores;
  for (BufferSpec& buffer : chip->buffers) {
    if (chip->pipes_overlap) buffer.fast = buffer.capacity;
  }
  return {};
}

}  // namespace cubist
