#include "npu_model/profile.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "npu_model/json_text.h"

namespace cubist {
namespace {

// Pipes by the names that the vendor's profiler gives them.
const char* TrackName(Pipe pipe) {
  constexpr const char* kNames[] = {"SCALAR", "MTE1", "MTE2", "MTE3", "CUBE", "VECTOR", "FIXP"};
  return kNames[static_cast<int>(pipe)];
}

// Writes events one by one; a timeline may have millions.
class EventWriter {
 public:
  explicit EventWriter(std::FILE* file) : file_(file) {
    // MindStudio Insight wants profilingType before the first bracket.
    std::fputs("{\"profilingType\":\"op\",\"traceEvents\":[", file_);
  }

  void Metadata(const char* what, int pid, int tid, const std::string& argument) {
    std::fprintf(file_, "%s\n{\"ph\":\"M\",\"name\":\"%s\",\"pid\":%d,\"tid\":%d,\"args\":{%s}}", Comma(),
                 what, pid, tid, argument.c_str());
  }

  // Times in whole picoseconds, so that neighbours that share an instant share it in the file too.
  void Slice(const TimelineSlice& slice, int pid, int tid) {
    const std::int64_t start = Picoseconds(slice.start_us), end = Picoseconds(slice.end_us);
    const std::string source = std::string(slice.file) + ":" + std::to_string(slice.line);
    std::fprintf(file_,
                 "%s\n{\"ph\":\"X\",\"name\":%s,\"pid\":%d,\"tid\":%d,\"ts\":%s,\"dur\":%s,"
                 "\"args\":{\"bytes\":%lld,\"source\":%s}}",
                 Comma(), json::Quoted(slice.name).c_str(), pid, tid, Microseconds(start).c_str(),
                 Microseconds(end - start).c_str(), static_cast<long long>(slice.bytes),
                 json::Quoted(source).c_str());
  }

  // `events` are all that the timeline has. Whether all was written.
  bool Close(std::size_t events) {
    std::fprintf(file_, "\n],\"otherData\":{\"timeline_events\":\"%zu\"}}\n", events);
    const bool good = std::ferror(file_) == 0;
    return std::fclose(file_) == 0 && good;
  }

 private:
  const char* Comma() { return std::exchange(first_, false) ? "" : ","; }
  static std::int64_t Picoseconds(double us) { return std::llround(us * 1e6); }
  static std::string Microseconds(std::int64_t ps) {
    char text[40];
    std::snprintf(text, sizeof text, "%lld.%06lld", static_cast<long long>(ps / 1000000),
                  static_cast<long long>(ps % 1000000));
    return text;
  }

  std::FILE* file_;
  bool first_ = true;
};

}  // namespace

Status Profile::WriteTimeline(const std::string& path) const {
  if (timeline == nullptr)
    return InvalidArgument("this profile was made without a timeline; nothing to write to " + path);
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (file == nullptr) return InvalidArgument("cannot write " + path + ": " + std::strerror(errno));

  std::vector<const TimelineSlice*> slices;
  for (const TimelineSlice& slice : *timeline) slices.push_back(&slice);
  std::stable_sort(slices.begin(), slices.end(),
                   [](const auto* a, const auto* b) { return a->start_us < b->start_us; });
  if (slices.size() > kMostEvents) slices.resize(kMostEvents);

  // A slice goes to the first track of its pipe that is free; there is nearly always one.
  constexpr int kSides = 1 + kMaxVectorPerCube;  // of an AI core
  constexpr int kTracks = 16;                    // of a pipe
  using Track = std::tuple<int, int, int>;       // core, lane, pipe
  std::map<Track, std::vector<double>> ends;     // by track of the pipe
  std::vector<int> tids;
  for (const TimelineSlice* slice : slices) {
    std::vector<double>& tracks = ends[{slice->core, slice->lane, static_cast<int>(slice->pipe)}];
    const auto is_free = [&](double end) { return end <= slice->start_us; };
    auto track = std::find_if(tracks.begin(), tracks.end(), is_free);
    if (track == tracks.end()) track = tracks.insert(tracks.end(), 0);
    *track = slice->end_us;
    tids.push_back(static_cast<int>(slice->pipe) * kTracks + static_cast<int>(track - tracks.begin()));
  }

  const auto pid_of = [](int core, int lane) { return core * kSides + lane + 1; };
  EventWriter writer(file);
  int named = -1;
  for (const auto& [key, tracks] : ends) {
    const auto& [core, lane, pipe] = key;
    const int pid = pid_of(core, lane);
    if (pid != named) {
      const std::string name =
          lane < 0 ? "AIC" + std::to_string(core) : "AIV" + std::to_string(core) + "-" + std::to_string(lane);
      writer.Metadata("process_name", pid, 0, "\"name\":" + json::Quoted(name));
      writer.Metadata("process_sort_index", pid, 0, "\"sort_index\":" + std::to_string(pid));
      named = pid;
    }
    for (int i = 0; i < static_cast<int>(tracks.size()); ++i) {
      const int tid = pipe * kTracks + i;
      std::string name = TrackName(static_cast<Pipe>(pipe));
      if (i > 0) name.append(" ").append(std::to_string(i + 1));
      writer.Metadata("thread_name", pid, tid, "\"name\":" + json::Quoted(name));
      writer.Metadata("thread_sort_index", pid, tid, "\"sort_index\":" + std::to_string(tid));
    }
  }
  for (std::size_t i = 0; i < slices.size(); ++i)
    writer.Slice(*slices[i], pid_of(slices[i]->core, slices[i]->lane), tids[i]);
  if (!writer.Close(timeline->size()))
    return InvalidArgument("cannot write all of " + path + ": " + std::strerror(errno));
  return {};
}

void Profile::Append(const Profile& next) {
  if (std::isinf(time_s)) return;
  if (kernel.empty() || std::isinf(next.time_s)) {
    *this = next;
    return;
  }
  const double start_us = time_s * 1e6, together_s = time_s + next.time_s;
  const auto mean = [&](double a, double b) {
    return together_s > 0 ? (a * time_s + b * next.time_s) / together_s : 0;
  };
  for (std::size_t p = 0; p < busy.size(); ++p) {
    busy[p].cube_side = mean(busy[p].cube_side, next.busy[p].cube_side);
    busy[p].vector_side = mean(busy[p].vector_side, next.busy[p].vector_side);
    waiting[p].cube_side = mean(waiting[p].cube_side, next.waiting[p].cube_side);
    waiting[p].vector_side = mean(waiting[p].vector_side, next.waiting[p].vector_side);
  }
  cube_utilisation = mean(cube_utilisation, next.cube_utilisation);
  vector_utilisation = mean(vector_utilisation, next.vector_utilisation);
  mte_utilisation = mean(mte_utilisation, next.mte_utilisation);
  const std::int64_t all_read = gm_read + next.gm_read;
  if (all_read > 0) {
    l2_hit_rate =
        (l2_hit_rate * static_cast<double>(gm_read) + next.l2_hit_rate * static_cast<double>(next.gm_read)) /
        static_cast<double>(all_read);
  }
  for (std::size_t p = 0; p < path_bytes.size(); ++p) path_bytes[p] += next.path_bytes[p];
  gm_read = all_read;
  gm_written += next.gm_written;
  hbm_bytes += next.hbm_bytes;
  workspace_bytes = std::max(workspace_bytes, next.workspace_bytes);
  macs += next.macs;
  instructions += next.instructions;
  transfers += next.transfers;
  cores_used = std::max(cores_used, next.cores_used);
  cycles += next.cycles;
  time_s = together_s;
  if (next.bound != bound) {
    bound = "mixed";
    verdict = "several launches, bound by different things";
  }
  launches += next.launches;
  if (next.timeline != nullptr && timeline != nullptr) {
    auto slices = std::make_shared<std::vector<TimelineSlice>>(*timeline);
    for (TimelineSlice slice : *next.timeline) {
      slice.start_us += start_us, slice.end_us += start_us;
      slices->push_back(slice);
    }
    timeline = std::move(slices);
  }
}

}  // namespace cubist
