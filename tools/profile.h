// `cubist profile`: what a kernel's time on a chip goes into, and why.
#ifndef CUBIST_TOOLS_PROFILE_H_
#define CUBIST_TOOLS_PROFILE_H_

#include <string>
#include <vector>

#include "tools/subject.h"

namespace cubist {

struct ProfileOptions {
  SubjectOptions subject;
  // name=value: the other configuration of an A/B comparison differs in these. Names: shape, dtype, policy, chip, tuning,
  // tiling.NAME, and constants of the chip.
  std::vector<std::string> vs;
  std::string json, csv, html, trace;
  std::string window;     // "FROM:TO" in us: what --trace and the page's timeline show; all where empty
  bool slack = false;     // what each wait costs, by replays without it
  bool interval = false;  // of the time, by replays of all of the record, however large it is
};

// Exit status: 0, or 2 for bad input.
int ProfileCommand(const ProfileOptions& options);

}  // namespace cubist

#endif  // CUBIST_TOOLS_PROFILE_H_
