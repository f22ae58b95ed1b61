#include "npu_model/chip_constants.h"

#include <algorithm>
#include <cctype>
#include <cmath>
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

constexpr const char* kVectorOps[kVectorOpCount] = {"unary",   "binary", "exp",        "ln",
                                                    "div",     "cast",   "reduce",     "select",
                                                    "integer", "sort",   "merge_sort", "gather"};

// What may be set.
struct Limits {
  double least = 0;
  bool above = false;
  double most = 1e18;
};
constexpr Limits kCost{}, kRate{0, true};

// Calls visit(name, member, limits) for each. A chip without pipes that overlap has one thread per core: what belongs to
// flags and queues is listed all the same.
template <class Chip, class Visit>
void VisitConstants(Chip& chip, Visit visit) {
  visit("cube_cores", chip.cube_cores, Limits{1, false, 4096});
  visit("vector_per_cube", chip.vector_per_cube, Limits{1, false, kMaxVectorPerCube});
  visit("clock_hz", chip.clock_hz, kRate);
  for (int b = 0; b < kBufferCount; ++b) {
    visit("buffer." + Key(NameOf(static_cast<Buffer>(b))), chip.buffers[static_cast<std::size_t>(b)].capacity,
          Limits{1, false, 1099511627776.0});
  }
  visit("mmad.fp32_passes", chip.mmad.fp32_passes, kRate);
  visit("mmad.narrow_passes", chip.mmad.narrow_passes, kRate);
  visit("mmad.head_idle", chip.mmad.head_idle, kCost);
  visit("mmad.head_busy", chip.mmad.head_busy, kCost);
  for (int p = 0; p < kPathCount; ++p) {
    const std::string prefix = "path." + Key(NameOf(static_cast<Path>(p))) + ".";
    auto& path = chip.paths[static_cast<std::size_t>(p)];
    visit(prefix + "startup", path.startup, kCost);
    visit(prefix + "bytes_per_cycle", path.bytes_per_cycle, kRate);
    visit(prefix + "gap", path.gap, kCost);
    visit(prefix + "row", path.row, kCost);
    visit(prefix + "least", path.least, kCost);
  }
  visit("vector.head", chip.vector.head, kCost);
  visit("vector.least", chip.vector.least, kCost);
  for (std::size_t op = 0; op < kVectorOpCount; ++op) {
    visit(std::string("vector.cycles.") + kVectorOps[op], chip.vector.cycles[op], kRate);
  }
  visit("scalar.issue", chip.scalar.issue, kCost);
  visit("scalar.issue_flag", chip.scalar.issue_flag, kCost);
  visit("scalar.queue_depth", chip.scalar.queue_depth, Limits{1, false, 1e6});
  visit("scalar.read", chip.scalar.read, kCost);
  visit("scalar.read_gm", chip.scalar.read_gm, kCost);
  visit("scalar.update", chip.scalar.update, kCost);
  visit("memory.l2_bytes", chip.memory.l2_bytes, Limits{4096, false, 1099511627776.0});
  visit("memory.hbm_bytes_per_s", chip.memory.hbm_bytes_per_s, kRate);
  visit("memory.l2_read_bytes_per_s", chip.memory.l2_read_bytes_per_s, kRate);
  visit("memory.cube_read_bytes_per_s", chip.memory.cube_read_bytes_per_s, kRate);
  visit("memory.l2_write_bytes_per_s", chip.memory.l2_write_bytes_per_s, kRate);
  visit("memory.core_read_bytes_per_cycle", chip.memory.core_read_bytes_per_cycle, kRate);
  visit("memory.core_write_bytes_per_cycle", chip.memory.core_write_bytes_per_cycle, kRate);
  visit("memory.core_miss_bytes_per_cycle", chip.memory.core_miss_bytes_per_cycle, kCost);
  visit("memory.found_dirty", chip.memory.found_dirty, Limits{0, false, 1});
  visit("memory.turn_around", chip.memory.turn_around, Limits{0, false, 10});
  visit("memory.same_line", chip.memory.same_line, kCost);
  visit("sync.flag", chip.sync.flag, kCost);
  visit("sync.execute", chip.sync.execute, kCost);
  visit("sync.cross_core", chip.sync.cross_core, kCost);
  visit("sync.barrier_s", chip.sync.barrier_s, kCost);
  visit("sync.launch_s", chip.sync.launch_s, kCost);
  visit("sync.mixed_launch_s", chip.sync.mixed_launch_s, kCost);
  visit("sync.start_spread_s", chip.sync.start_spread_s, kCost);
  visit("sync.event_ids", chip.sync.event_ids, Limits{1, false, 64});
  visit("sync.cross_core_ids", chip.sync.cross_core_ids, Limits{1, false, 64});
  visit("sync.cross_core_limit", chip.sync.cross_core_limit, Limits{1, false, 255});
}

std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", value);
  return text;
}

Status CheckValue(const NamedConstant& limits, double value) {
  if (std::isfinite(value) && (limits.above ? value > limits.least : value >= limits.least) &&
      value <= limits.most && (!limits.whole || value == std::floor(value))) {
    return {};
  }
  std::string needs = limits.whole ? "a whole number " : "a number ";
  needs.append(limits.above ? "above " : "from ").append(Number(limits.least));
  needs.append(" to ").append(Number(limits.most));
  return InvalidArgument(limits.name + " is " + Number(value) + ", needs " + needs);
}

template <class Member>
NamedConstant Describe(const std::string& name, const Member& member, const Limits& limits) {
  NamedConstant named;
  named.name = name;
  named.least = limits.least, named.above = limits.above, named.most = limits.most;
  if constexpr (std::is_same_v<Member, Constant>) {
    named.constant = member;
  } else {
    named.constant = {static_cast<double>(member), "", Basis::kDocumented, 0, ""};
    named.whole = true;
  }
  return named;
}

}  // namespace

std::vector<NamedConstant> ConstantsOf(const ChipSpec& chip) {
  std::vector<NamedConstant> constants;
  VisitConstants(chip, [&](const std::string& name, const auto& member, const Limits& limits) {
    constants.push_back(Describe(name, member, limits));
  });
  return constants;
}

Status SetConstant(ChipSpec* chip, std::string_view name, double value) {
  bool found = false;
  Status status;
  std::vector<std::string> names;
  VisitConstants(*chip, [&](const std::string& known, auto& member, const Limits& limits) {
    names.push_back(known);
    if (known != name) return;
    found = true;
    using Member = std::remove_cvref_t<decltype(member)>;
    if (status = CheckValue(Describe(known, member, limits), value); !status.ok()) return;
    if constexpr (std::is_same_v<Member, Constant>) {
      member.value = value, member.basis = Basis::kGuessed, member.spread = 0;
      member.source = "set by the user";
    } else {
      member = static_cast<Member>(value);
    }
  });
  if (!found) {
    return InvalidArgument("no constant of a chip is named '" + std::string(name) + "'; the nearest is " +
                           Nearest(name, names));
  }
  if (!status.ok()) return status;
  if (name == "cube_cores") chip->concurrent_cores = chip->cube_cores;
  for (BufferSpec& buffer : chip->buffers) {
    if (chip->pipes_overlap) buffer.fast = buffer.capacity;
  }
  return {};
}

}  // namespace cubist
