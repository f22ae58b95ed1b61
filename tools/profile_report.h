// A modelled call and its analysis as text, JSON and CSV.
#ifndef CUBIST_TOOLS_PROFILE_REPORT_H_
#define CUBIST_TOOLS_PROFILE_REPORT_H_

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "npu_model/profile.h"
#include "npu_model/sync/slack.h"
#include "npu_model/trace/record.h"
#include "tools/analysis.h"
#include "tools/interval.h"
#include "tools/subject.h"

namespace cubist {

struct ProfiledCall {
  SubjectOptions options;
  bool interval_of_all = false;  // --interval
  Subject subject;
  trace::Record record;
  Profile profile;
  Interval interval;  // of its time; unknown of several launches
  Analysis analysis;
  std::optional<sync::Slack> slack;  // Where it was asked for, or found in no time.
};

std::string ProfileText(const ProfiledCall& call);
// What the second does otherwise: times and shares side by side.
std::string DifferenceText(const ProfiledCall& a, const ProfiledCall& b);
nlohmann::ordered_json ProfileJson(const ProfiledCall& call);
// Lines "section,name,value"; where there is a second call "section,name,value,value_b", what only one of them has empty in the
// other's column.
std::string ProfileCsv(const ProfiledCall& a, const ProfiledCall* b);
// What a trace file leaves out of the timeline; empty where it takes all.
std::string LeftOutText(const Profile& profile);

}  // namespace cubist

#endif  // CUBIST_TOOLS_PROFILE_REPORT_H_
