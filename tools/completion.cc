#include "tools/completion.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <set>

namespace cubist {
namespace {

// Options with fixed values, of all commands: they mean the same in each.
std::map<std::string, std::vector<std::string>> ValuesOf(const CommandWords& words) {
  std::map<std::string, std::vector<std::string>> values;
  for (const auto& command : words.commands) {
    for (const auto& option : command.options) {
      if (!option.values.empty()) values.emplace(option.name, option.values);
    }
  }
  return values;
}

std::vector<std::string> WordsOf(const CommandWords::Command& command) {
  std::vector<std::string> words = command.first;
  for (const auto& option : command.options) words.push_back("--" + option.name);
  return words;
}

std::vector<std::string> Names(const CommandWords& words) {
  std::vector<std::string> names;
  for (const auto& command : words.commands) names.push_back(command.name);
  return names;
}

// Options that take some value or other, for which a shell has its files.
std::set<std::string> OthersWithValues(const CommandWords& words) {
  std::set<std::string> names;
  for (const auto& command : words.commands) {
    for (const auto& option : command.options) {
      if (option.takes_value && option.values.empty()) names.insert("--" + option.name);
    }
  }
  return names;
}

// Shared by bash and zsh: sets $choices by the word before ($before), the subcommand ($command) and whether it is still
// to come ($first is 1).
std::string Choice(const CommandWords& words) {
  std::string text = "  local value=0\n  case $before in\n";
  for (const auto& [name, values] : ValuesOf(words))
    text += fmt::format("    --{}) choices=\"{}\" ;;\n", name, fmt::join(values, " "));
  text += fmt::format("    {}) value=1 ;;\n", fmt::join(OthersWithValues(words), "|"));
  text += "  esac\n  if [ -z \"$choices\" ] && [ $value = 0 ]; then\n    case $command in\n";
  for (const auto& command : words.commands)
    text += fmt::format("      {}) choices=\"{}\" ;;\n", command.name, fmt::join(WordsOf(command), " "));
  text +=
      fmt::format("    esac\n    [ \"$first\" = 1 ] && choices=\"{}\"\n  fi\n", fmt::join(Names(words), " "));
  return text;
}

std::string Bash(const CommandWords& words) {
  return "# bash completion of cubist: eval \"$(cubist completion bash)\"\n"
         "_cubist() {\n"
         "  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} "
         "command=${COMP_WORDS[1]}\n"
         "  local choices= first=0\n"
         "  [ \"$COMP_CWORD\" -eq 1 ] && first=1\n" +
         Choice(words) +
         "  COMPREPLY=($(compgen -W \"$choices\" -- \"$current\"))\n"
         "}\n"
         "complete -o bashdefault -o default -F _cubist cubist\n";
}

std::string Zsh(const CommandWords& words) {
  return "#compdef cubist\n"
         "# zsh completion of cubist: cubist completion zsh >\"${fpath[1]}/_cubist\"\n"
         "_cubist() {\n"
         "  local before=${words[CURRENT-1]} command=${words[2]} first=0\n"
         "  [ \"$CURRENT\" -eq 2 ] && first=1\n"
         "  local choices=\n" +
         Choice(words) +
         "  compadd -- ${=choices}\n"
         "  _files\n"
         "}\n"
         "_cubist \"$@\"\n";
}

// A text between single quotes.
std::string Quoted(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' || c == '\\' ? std::string("\\") + c : std::string(1, c);
  return quoted + "'";
}

std::string Fish(const CommandWords& words) {
  std::string text = "# fish completion of cubist: cubist completion fish | source\n";
  for (const auto& command : words.commands) {
    text += fmt::format("complete -c cubist -n __fish_use_subcommand -f -a {} -d {}\n", command.name,
                        Quoted(command.help));
    const std::string seen =
        fmt::format("complete -c cubist -n '__fish_seen_subcommand_from {}'", command.name);
    if (!command.first.empty())
      text += fmt::format("{} -a {}\n", seen, Quoted(fmt::format("{}", fmt::join(command.first, " "))));
    for (const auto& option : command.options) {
      text +=
          fmt::format("{} -l {}{} -d {}\n", seen, option.name,
                      !option.values.empty()
                          ? fmt::format(" -x -a {}", Quoted(fmt::format("{}", fmt::join(option.values, " "))))
                      : option.takes_value ? " -r"
                                           : "",
                      Quoted(option.help));
    }
  }
  return text;
}

}  // namespace

std::string CompletionScript(const CommandWords& words, const std::string& shell) {
  return shell == "bash" ? Bash(words) : shell == "zsh" ? Zsh(words) : shell == "fish" ? Fish(words) : "";
}

}  // namespace cubist
