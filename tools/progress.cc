#include "tools/progress.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace cubist {
namespace {

constexpr auto kPlainInterval = std::chrono::seconds(10);
// One that cannot rewrite a line.
bool IsDumb() {
  const char* terminal = std::getenv("TERM");
  return terminal == nullptr || std::strcmp(terminal, "dumb") == 0;
}

constexpr std::size_t kTerminalColumns = 79;  // A longer line would wrap and could not be rewritten.

}  // namespace

Progress::Progress(std::FILE* stream)
    : stream_(stream), terminal_(isatty(fileno(stream)) != 0 && !IsDumb()) {}

void Progress::Show(const std::string& text) {
  if (terminal_) {
    std::fprintf(stream_, "\r%s\x1b[K", text.substr(0, kTerminalColumns).c_str());
    shown_ = true;
  } else if (Clock::now() - last_ >= kPlainInterval) {
    std::fprintf(stream_, "%s\n", text.c_str());
    last_ = Clock::now();
  }
  std::fflush(stream_);
}

void Progress::Clear() {
  last_ = Clock::now();
  if (!shown_) return;
  std::fputs("\r\x1b[K", stream_);
  std::fflush(stream_);
  shown_ = false;
}

}  // namespace cubist
