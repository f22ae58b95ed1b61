// `cubist completion`: what a shell needs to complete the command's words.
#ifndef CUBIST_TOOLS_COMPLETION_H_
#define CUBIST_TOOLS_COMPLETION_H_

#include <map>
#include <string>
#include <vector>

namespace cubist {

// What may stand on the command line, as its parser knows it.
struct CommandWords {
  struct Option {
    std::string name, help;           // without the dashes
    std::vector<std::string> values;  // One that ends in "=" goes on.
    bool takes_value = false;
    std::map<std::string, std::vector<std::string>> more;  // values, by the first of the command's own words
  };
  struct Command {
    std::string name, help;
    std::vector<Option> options;
    std::vector<std::string> first;  // of its own words
  };
  std::vector<Command> commands;
};

// Of bash, zsh or fish; empty for another.
std::string CompletionScript(const CommandWords& words, const std::string& shell);

}  // namespace cubist

#endif  // CUBIST_TOOLS_COMPLETION_H_
