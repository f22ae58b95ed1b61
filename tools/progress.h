// Progress: what a long command is doing, on a terminal in one line that is rewritten, elsewhere in a line
// when nothing else was printed for some time.
#ifndef CUBIST_TOOLS_PROGRESS_H_
#define CUBIST_TOOLS_PROGRESS_H_

#include <chrono>
#include <cstdio>
#include <string>

namespace cubist {

class Progress {
 public:
  explicit Progress(std::FILE* stream);
  ~Progress() { Clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Show(const std::string& text);
  // Removes the line, because something else is printed.
  void Clear();

 private:
  using Clock = std::chrono::steady_clock;

  std::FILE* stream_;
  bool terminal_;
  bool shown_ = false;
  Clock::time_point last_ = Clock::now();
};

}  // namespace cubist

#endif  // CUBIST_TOOLS_PROGRESS_H_
