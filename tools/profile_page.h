// The profile as one self-contained HTML page.
#ifndef CUBIST_TOOLS_PROFILE_PAGE_H_
#define CUBIST_TOOLS_PROFILE_PAGE_H_

#include <string>

#include "tools/profile_report.h"

namespace cubist {

// Bars, roofline, critical path, source lines, buffers over time and a timeline to zoom into; of both calls, side by
// side, where `b` is not null. Draws from the very JSON of ProfileJson, which it holds.
std::string ProfilePage(const ProfiledCall& a, const ProfiledCall* b);

}  // namespace cubist

#endif  // CUBIST_TOOLS_PROFILE_PAGE_H_
