// `cubist tune`: the tiling that the replay finds quickest for a kernel's shape.
#ifndef CUBIST_TOOLS_TUNE_H_
#define CUBIST_TOOLS_TUNE_H_

#include <string>

#include "tools/subject.h"

namespace cubist {

struct TuneOptions {
  SubjectOptions subject;
  int budget = 200;    // replays at most
  std::string output;  // tuning file to add the tiling to
  std::string json;
};

// Exit status: 0, or 2 for bad input.
int TuneCommand(const TuneOptions& options);

}  // namespace cubist

#endif  // CUBIST_TOOLS_TUNE_H_
