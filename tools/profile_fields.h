// The names that a profile and its analysis have in JSON, in CSV of many profiles and in Python's dictionaries.
//
// A writer takes fields in order: out(name, value) for numbers and texts, out.List(name, items, write) for a list whose
// items `write(item_writer, item)` fills, and out.Group(name, write) for fields of their own.
#ifndef CUBIST_TOOLS_PROFILE_FIELDS_H_
#define CUBIST_TOOLS_PROFILE_FIELDS_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/profile.h"
#include "tools/analysis.h"

namespace cubist {

template <class Writer>
void WriteProfileFields(Writer& out, const Profile& p) {
  out("time_us", p.time_s * 1e6);
  out("cycles", p.cycles);
  out("cores_used", p.cores_used);
  out("instructions", p.instructions);
  out("transfers", p.transfers);
  out("launches", p.launches);
  out("bound", p.bound);
  out("verdict", p.verdict);
  out("cube_busy", p.cube_utilisation);
  out("vector_busy", p.vector_utilisation);
  out("mte_busy", p.mte_utilisation);
  out("gm_read", p.gm_read);
  out("gm_written", p.gm_written);
  out("workspace_bytes", p.workspace_bytes);
  out("l2_hit_rate", p.l2_hit_rate);
  out("hbm_bytes", p.hbm_bytes);
  out("macs", p.macs);
}

// What is told of each of many profiles: of the steps of an ablation, of the points of a sweep.
template <class Writer>
void WriteBusyFields(Writer& out, const Profile& p) {
  out("time_us", p.time_s * 1e6);
  out("cube_busy", p.cube_utilisation);
  out("vector_busy", p.vector_utilisation);
  out("mte_busy", p.mte_utilisation);
  out("gm_bytes", p.gm_read + p.gm_written);
  out("l2_hit_rate", p.l2_hit_rate);
}

template <class Writer>
void WritePathFields(Writer& out, const Profile& p) {
  std::vector<std::pair<const char*, std::int64_t>> paths;
  for (std::size_t i = 0; i < kPathCount; ++i) {
    if (p.path_bytes[i] > 0) paths.emplace_back(NameOf(static_cast<Path>(i)), p.path_bytes[i]);
  }
  out.List("paths", paths, [](Writer& item, const auto& path) {
    item("path", path.first);
    item("bytes", path.second);
  });
}

// What Analyse found, of a profile with a timeline.
template <class Writer>
void WriteAnalysisFields(Writer& out, const Profile& p, const Analysis& a) {
  out.List("pipes", a.pipes, [](Writer& item, const Analysis::PipeShare& pipe) {
    item("core", pipe.core);
    item("pipe", pipe.pipe);
    item("busy", pipe.busy);
    item("waiting", pipe.waiting);
    item("idle", pipe.idle);
  });
  out.List("critical_path", a.critical_path, [&](Writer& item, const Analysis::Cause& cause) {
    item("cause", cause.name);
    item("us", cause.us);
    item("share", cause.us / (p.time_s * 1e6));
  });
  WritePathFields(out, p);
  out.List("lines", a.lines, [](Writer& item, const Analysis::LineCost& l) {
    item("file", l.file);
    item("line", l.line);
    item("instruction", l.what);
    item("pipe", l.pipe);
    item("count", l.count);
    item("bytes", l.bytes);
    item("busy_us", l.busy_us);
    item("critical_us", l.critical_us);
  });
  out.List("occupancy", a.occupancy, [](Writer& item, const Analysis::Occupancy& o) {
    item("buffer", o.buffer);
    item("capacity", o.capacity);
    item("most", o.most);
    item("bytes", o.bytes);
  });
  struct Names {
    const char *group, *operations, *attained, *peak;
  };
  const auto write_roofline = [&](const Names& names, const Analysis::Roofline& r) {
    out.Group(names.group, [&](Writer& group) {
      group(names.operations, r.operations);
      group("hbm_bytes", r.bytes);
      group("intensity", r.intensity());
      group(names.attained, r.attained_per_s);
      group("attained_bytes_per_s", r.attained_bytes_per_s);
      group(names.peak, r.peak_per_s);
      group("peak_bytes_per_s", r.peak_bytes_per_s);
      group("share", r.share);
    });
  };
  write_roofline({"roofline", "flops", "attained_flops_per_s", "peak_flops_per_s"}, a.roofline);
  write_roofline({"vector_roofline", "operations", "attained_operations_per_s", "peak_operations_per_s"},
                 a.vector_roofline);
}

}  // namespace cubist

#endif  // CUBIST_TOOLS_PROFILE_FIELDS_H_
