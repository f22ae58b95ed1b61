#include "tools/completion.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <set>
#include <utility>

namespace cubist {
namespace {

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
  std::set<std::string> names, known;
  for (const auto& command : words.commands) {
    for (const auto& option : command.options) {
      if (option.takes_value) names.insert("--" + option.name);
      if (!option.values.empty() || !option.more.empty()) known.insert("--" + option.name);
    }
  }
  std::erase_if(names, [&](const std::string& name) { return known.contains(name); });
  return names;
}

// Branches of `case $command:$before` for the options with known values: commands where these are the same have one.
std::string ValueBranches(const CommandWords& words) {
  std::map<std::pair<std::string, std::vector<std::string>>, std::vector<std::string>> patterns;
  for (const auto& command : words.commands) {
    for (const auto& option : command.options) {
      if (!option.values.empty())
        patterns[{option.name, option.values}].push_back(fmt::format("{}:--{}", command.name, option.name));
    }
  }
  std::string text;
  for (const auto& [option, commands] : patterns)
    text +=
        fmt::format("    {}) choices=\"{}\" ;;\n", fmt::join(commands, "|"), fmt::join(option.second, " "));
  return text;
}

// The same of `case $command:$own:$before`, for those that depend on the command's own first word.
std::string MoreBranches(const CommandWords& words) {
  std::string text;
  for (const auto& command : words.commands) {
    for (const auto& option : command.options) {
      for (const auto& [own, values] : option.more) {
        text += fmt::format("    {}:{}:--{}) choices=\"$choices {}\" ;;\n", command.name, own, option.name,
                            fmt::join(values, " "));
      }
    }
  }
  return text;
}

// Shared by bash and zsh: sets $choices by the word before ($before), the subcommand ($command), its own first word ($own), and
// whether the subcommand is still to come ($first is 1).
std::string Choice(const CommandWords& words) {
  std::string text = "  local value=0\n  case $command:$before in\n" + ValueBranches(words) +
                     "  esac\n  case $command:$own:$before in\n" + MoreBranches(words) +
                     "  esac\n  case $before in\n";
  text += fmt::format("    {}) value=1 ;;\n", fmt::join(OthersWithValues(words), "|"));
  text += "  esac\n  if [ -z \"$choices\" ] && [ $value = 0 ]; then\n    case $command in\n";
  for (const auto& command : words.commands)
    text += fmt::format("      {}) choices=\"{}\" ;;\n", command.name, fmt::join(WordsOf(command), " "));
  text += fmt::format("    esac\n    [ \"$first\" = 1 ] && choices=\"{} --help --version\"\n  fi\n",
                      fmt::join(Names(words), " "));
  return text;
}

std::string Bash(const CommandWords& words) {
  return "# bash completion of cubist: eval \"$(cubist completion bash)\"\n"
         "_cubist() {\n"
         "  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}\n"
         "  local command=${COMP_WORDS[1]} own=${COMP_WORDS[2]} choices= first=0\n"
         "  [ \"$COMP_CWORD\" -eq 1 ] && first=1\n"
         "  # bash takes \"=\" for a word: --option=value, or --option name=value, whose value is a file if "
         "anything.\n"
         "  [ \"$before\" = = ] && before=${COMP_WORDS[COMP_CWORD-2]}\n"
         "  if [ \"$current\" = = ] || [ \"${COMP_WORDS[COMP_CWORD-1]}\" = = ]; then\n"
         "    [ \"$current\" = = ] && current=\n"
         "    case $before in --*) ;; *) return ;; esac\n"
         "  fi\n" +
         Choice(words) +
         "  COMPREPLY=($(compgen -W \"$choices\" -- \"$current\"))\n"
         "  case ${COMPREPLY[0]} in *=) compopt -o nospace 2>/dev/null ;; esac\n"
         "}\n"
         "complete -o bashdefault -o default -F _cubist cubist\n";
}

std::string Zsh(const CommandWords& words) {
  return "#compdef cubist\n"
         "# zsh completion of cubist: cubist completion zsh >\"${fpath[1]}/_cubist\"\n"
         "_cubist() {\n"
         "  local before=${words[CURRENT-1]} command=${words[2]} own=${words[3]} first=0\n"
         "  [ \"$CURRENT\" -eq 2 ] && first=1\n"
         "  local choices=\n" +
         Choice(words) +
         "  local -a all=(${=choices})\n"
         "  compadd -S '' -- ${(M)all:#*=}\n"
         "  compadd -- ${all:#*=}\n"
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
      for (const auto& [own, values] : option.more) {
        text += fmt::format(
            "complete -c cubist -n '__fish_seen_subcommand_from {}; and __fish_seen_subcommand_from {}' -l "
            "{} -x "
            "-a {}\n",
            command.name, own, option.name, Quoted(fmt::format("{}", fmt::join(values, " "))));
      }
    }
  }
  return text;
}

}  // namespace

std::string CompletionScript(const CommandWords& words, const std::string& shell) {
  return shell == "bash" ? Bash(words) : shell == "zsh" ? Zsh(words) : shell == "fish" ? Fish(words) : "";
}

}  // namespace cubist
