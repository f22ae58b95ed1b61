// The `cubist` command line: one subcommand per job.
#include "cubist/command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "cubist/version.h"
#include "npu_model/chip.h"
#include "npu_model/chip_constants.h"
#include "npu_model/device.h"
#include "npu_model/nearest.h"
#include "tools/ablate.h"
#include "tools/bad_input.h"
#include "tools/bench.h"
#include "tools/check.h"
#include "tools/completion.h"
#include "tools/files.h"
#include "tools/info.h"
#include "tools/kernel_call.h"
#include "tools/profile.h"
#include "tools/run.h"
#include "tools/subject.h"
#include "tools/sweep.h"
#include "tools/tune.h"
#include "tools/validate.h"
#include "tools/what_if.h"
#include "tools/workload.h"

namespace {

// Options with fixed values; completion knows them too.
using Choices = std::vector<std::string>;
const Choices kDTypes = {"fp32", "bf16", "fp16"}, kPolicies = {"minimal", "per-tile"},
              kRoutings = {"skewed", "uniform", "both"}, kShells = {"bash", "zsh", "fish"};

std::string Quoted(const std::string& text) { return "'" + text + "'"; }

// Whether all of a text is a number within limits.
template <class Number>
bool IsNumber(const std::string& text, Number least, Number most) {
  Number value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end && value >= least && value <= most;
}

// (CLI::Range takes what is no number, and CLI11 what is out of 64 bits modulo 2^64.)
CLI::Validator Whole(std::int64_t least, std::int64_t most) {
  return CLI::Validator(
      [=](const std::string& text) {
        if (IsNumber(text, least, most)) return std::string();
        return fmt::format("'{}' is no whole number from {} to {}", text, least, most);
      },
      fmt::format("{}..{}", least, most));
}

const CLI::Validator kSeeds(
    [](const std::string& text) {
      const bool good = IsNumber<std::uint64_t>(text, 0, std::numeric_limits<std::uint64_t>::max());
      return good ? "" : Quoted(text) + " is no whole number from 0 to 2^64 - 1";
    },
    "");

const CLI::Validator kSeconds(
    [](const std::string& text) {
      return IsNumber(text, 0.0, 3600.0) ? "" : Quoted(text) + " is no number of seconds from 0 to 3600";
    },
    "0..3600");

const CLI::Validator kNumbers(
    [](const std::string& text) {
      constexpr double kMost = std::numeric_limits<double>::max();
      return IsNumber(text, -kMost, kMost) ? "" : Quoted(text) + " is no number";
    },
    "");

// The largest scales that leave anything: the limits of a workload's sequence and heads.
const CLI::Validator kTokenScales = Whole(1, 1 << 24), kHeadScales = Whole(1, 1 << 16);

CLI::Validator OneOf(const Choices& choices) {
  return CLI::Validator(
      [&choices](const std::string& value) {
        if (std::find(choices.begin(), choices.end(), value) != choices.end()) return std::string();
        return Quoted(value) + " is none of " + CLI::detail::join(choices, ", ") +
               cubist::NearestText(value, choices);
      },
      "");
}

// A subcommand with an example in its help; `command` becomes its job.
template <class Options>
CLI::App* AddCommand(CLI::App& app, const char* name, const char* text, const char* example,
                     int (*run)(const Options&), Options& options, std::function<int()>& command) {
  CLI::App* added = app.add_subcommand(name, text);
  added->footer(std::string("Example: ") + example);
  added->callback([&, run] { command = [&, run] { return run(options); }; });
  return added;
}

// A flag that takes back what is done without it. ("!--name" of CLI11 shows as "--name{false}".)
void AddFlagAgainst(CLI::App* command, const char* name, bool& what, const char* text) {
  command->add_flag_callback(
      name, [&what] { what = false; }, text);
}

void AddJson(CLI::App* command, std::string& path, const std::string& what) {
  command->add_option("--json", path,
                      "File to write " + what + " to; - is the standard output, for it alone");
}

void AddThreads(CLI::App* command, int& threads, const std::string& use) {
  command->add_option("--threads", threads, "Threads to " + use + " with; all by default")
      ->check(Whole(1, cubist::kMostThreads));
}

void AddPolicy(CLI::App* command, std::string& policy) {
  command->add_option("--policy", policy, "Flags: minimal, or per-tile as compilers do")
      ->capture_default_str()
      ->check(OneOf(kPolicies));
}

void AddWorkload(CLI::App* command, std::string& workload) {
  command->add_option("--workload", workload, "Name, or path of a .json file")->capture_default_str();
}

// A chip, and what is to be changed of it.
void AddChip(CLI::App* command, cubist::ChipOptions& options) {
  command->add_option("--chip", options.chip, "Chip to model: a name, or a .json file with one of your own")
      ->capture_default_str();
  command
      ->add_option("--set", options.sets,
                   "name=value: change a constant of the chip, such as memory.hbm_bytes_per_s=3.2e12 (info "
                   "--chip lists them); repeatable")
      ->allow_extra_args(false);
}

void AddRun(CLI::App& app, cubist::RunOptions& options, std::function<int()>& command) {
  CLI::App* run = AddCommand(app, "run", "Compute, check, time and model every kernel at a workload's shapes",
                             "cubist run --quick --only attention --chip ascend910b4 --json rows.json",
                             &cubist::RunCommand, options, command);
  AddWorkload(run, options.workload);
  AddChip(run, options.chip);
  AddThreads(run, options.threads, "compute");
  run->add_option("--seed", options.seed, "Seed of the generated inputs")
      ->capture_default_str()
      ->check(kSeeds);
  run->add_option("--scale", options.token_scale,
                  "Divide the sequence by this instead of the workload's token_scale")
      ->check(kTokenScales);
  run->add_option("--head-scale", options.head_scale,
                  "Divide the heads by this instead of the workload's head_scale")
      ->check(kHeadScales);
  run->add_option("--routing", options.routing, "skewed, uniform or both")
      ->capture_default_str()
      ->check(OneOf(kRoutings));
  run->add_option("--only", options.only, "Run this case alone; repeatable")->allow_extra_args(false);
  run->add_option("--input", options.inputs, "name=file.npy: a tensor of yours; repeatable")
      ->allow_extra_args(false);
  run->add_option("--output", options.output, "Folder to write results to, as <case>.<tensor>.npy");
  AddJson(run, options.json, "the rows");
  run->add_option("--timeline", options.timelines,
                  "case=file.json: the modelled timeline of a case, for Perfetto; repeatable")
      ->allow_extra_args(false);
  run->add_option("--check-seed", options.check_seed, "Draw the checked rows with this, to repeat a check")
      ->check(kSeeds);
  run->add_flag("--quick", options.quick, "Fewer tokens, repetitions and checked rows");
  run->add_flag("--list", options.list, "List cases and tensors, run nothing");
}

// A kernel by name and shape.
void AddKernelCall(CLI::App* command, cubist::KernelCallOptions& options) {
  command->add_option("kernel", options.kernel, "One of those below")->required();
  command->add_option("--shape", options.shape,
                      "Sizes, as they stand beside the kernel below; the example there by default");
  command->footer("Kernels, their sizes and an example:\n" + cubist::KernelFormsText() + "\n" +
                  command->get_footer());
  command->add_option("--dtype", options.dtype, "fp32, bf16 or fp16")
      ->capture_default_str()
      ->check(OneOf(kDTypes));
  command->add_flag("--causal", options.causal, "Mask keys behind the query: for attention alone");
}

void AddSubject(CLI::App* command, cubist::SubjectOptions& options) {
  AddKernelCall(command, options.call);
  AddChip(command, options.chip);
  AddPolicy(command, options.policy);
  command->add_option("--tuning", options.tuning, "File of tilings to use, as `cubist tune` writes it");
  command->add_option("--tiling", options.tiling, "name=value,..: fields of the tiling to change");
}

void AddCheck(CLI::App& app, cubist::CheckOptions& options, std::function<int()>& command) {
  CLI::App* check =
      AddCommand(app, "check", "Plan the flags of a kernel on a chip and prove that they suffice",
                 "cubist check flash_attention --shape 8x2048x192x128 --causal --plan", &cubist::CheckCommand,
                 options, command);
  AddSubject(check, options.subject);
  check->add_flag("--slack", options.slack, "Print what each wait costs, and what would be saved without it");
  check->add_flag("--plan", options.plan, "Print the plan: pipe pair, event ids, source lines");
  check
      ->add_option(
          "--execute", options.execute,
          "Compute the kernel on numbers in program order, eagerly, late and in this many random orders, and "
          "compare the bytes: for small shapes")
      ->check(Whole(1, 1000));
  AddJson(check, options.json, "settings, plan and findings");
  check->add_option("--dot", options.dot, "File to write the graph of a deadlock to");
}

void AddValidate(CLI::App& app, cubist::ValidateOptions& options, std::function<int()>& command) {
  CLI::App* validate = AddCommand(
      app, "validate", "Replay what others measured on a device, and show the model's errors",
      "cubist validate --no-intervals --json errors.json", &cubist::ValidateCommand, options, command);
  validate->add_option(
      "file", options.file,
      "CSV of one of the forms of npu_model/data/; the schedules and the operators there by default");
  validate->add_option("--set", options.sets, "name=value: change a constant of every chip; repeatable")
      ->allow_extra_args(false);
  AddJson(validate, options.json, "rows, errors and what was skipped");
  validate->add_option("--markdown", options.markdown,
                       "File to write the tables of npu_model/VALIDATION.md to");
  AddFlagAgainst(validate, "--no-intervals", options.intervals,
                 "Leave the intervals out: ten times as quick");
}

void AddAblate(CLI::App& app, cubist::AblateOptions& options, std::function<int()>& command) {
  CLI::App* ablate = AddCommand(
      app, "ablate", "Set a kernel's conventional form beside ours on the model, one idea at a time",
      "cubist ablate matmul --only 4096x7168x1536 --chip ascend910b2 --json rows.json",
      &cubist::AblateCommand, options, command);
  ablate->add_option("kernel", options.kernel, "One of those below")->required();
  ablate->footer("Kernels:\n" + cubist::AblationsText() + "\n" + ablate->get_footer());
  AddChip(ablate, options.chip);
  AddWorkload(ablate, options.workload);
  ablate->add_option("--only", options.only, "Cases whose names contain this; repeatable")
      ->allow_extra_args(false);
  ablate->add_option("--budget", options.budget, "Tilings to replay for each step, at most")
      ->capture_default_str()
      ->check(Whole(1, 100000));
  ablate->add_flag("--tilings", options.tilings, "Print the tiling of each step");
  AddJson(ablate, options.json, "cases and steps");
  ablate->add_flag("--list", options.list, "List the cases, run nothing");
}

void AddProfile(CLI::App& app, cubist::ProfileOptions& options, std::function<int()>& command) {
  CLI::App* profile =
      AddCommand(app, "profile", "Show what a kernel's time on a chip goes into, and why",
                 "cubist profile matmul --shape 4096x1536x7168 --set memory.hbm_bytes_per_s=0.8e12 --vs "
                 "policy=per-tile "
                 "--html page.html",
                 &cubist::ProfileCommand, options, command);
  AddSubject(profile, options.subject);
  profile
      ->add_option(
          "--vs", options.vs,
          "name=value: compare with a call that differs in this: shape, dtype, policy, chip, tuning, "
          "tiling.NAME or a constant of the chip; repeatable")
      ->allow_extra_args(false);
  profile->add_flag(
      "--slack", options.slack,
      "Tell what each wait costs, by replays without it; of short calls the five dearest are told unasked");
  profile->add_flag("--interval", options.interval,
                    "Tell between which times the spread of the chip's constants leaves it by all of a "
                    "record, not by the first half million instructions of a longer one");
  profile->add_option("--html", options.html, "File to write a page to, for a browser");
  profile->add_option("--trace", options.trace,
                      "File to write a Chrome trace to, for Perfetto or MindStudio Insight");
  profile->add_option("--window", options.window,
                      "FROM:TO, in us: the part of the time that the trace and the page's timeline show");
  AddJson(profile, options.json, "settings and all figures");
  profile->add_option("--csv", options.csv, "File to write the figures to");
}

void AddTune(CLI::App& app, cubist::TuneOptions& options, std::function<int()>& command) {
  CLI::App* tune =
      AddCommand(app, "tune", "Search the tilings of a kernel's shape by replay, and keep the best",
                 "cubist tune matmul --shape 512x4096x7168 --output tilings.txt", &cubist::TuneCommand,
                 options, command);
  AddSubject(tune, options.subject);
  tune->add_option("--budget", options.budget,
                   "Tilings to replay, at most; fewer of calls with very many instructions")
      ->capture_default_str()
      ->check(Whole(1, 1000000));
  tune->add_option("--output", options.output, "Tuning file to make, or to add to");
  AddJson(tune, options.json, "the result");
}

void AddSweep(CLI::App& app, cubist::SweepOptions& options, std::function<int()>& command) {
  CLI::App* sweep = AddCommand(
      app, "sweep",
      "Model a kernel over a constant of the chip, a size of its shape, or a field of its tiling",
      "cubist sweep matmul --shape 4096x1536x7168 --over memory.hbm_bytes_per_s --from 0.4e12 --to "
      "3.2e12 "
      "--log --svg hbm.svg",
      &cubist::SweepCommand, options, command);
  AddSubject(sweep, options.subject);
  sweep->add_option("--over", options.over, "What is varied: such as cube_cores, M, or tiling.k1")
      ->required();
  sweep->add_option("--values", options.values, "The values, with commas between them")->delimiter(',');
  sweep->add_option("--from", options.from, "The least value")->check(kNumbers);
  sweep->add_option("--to", options.to, "The largest value")->check(kNumbers);
  sweep->add_option("--points", options.points, "How many values")
      ->capture_default_str()
      ->check(Whole(1, 10000));
  sweep->add_flag("--log", options.log, "Values evenly in the logarithm");
  sweep->add_option("--svg", options.svg, "File to draw the plot to");
  sweep->add_option("--csv", options.csv, "File to write the points to");
  AddJson(sweep, options.json, "the points");
}

void AddBench(CLI::App& app, cubist::BenchOptions& options, std::function<int()>& command) {
  CLI::App* bench =
      AddCommand(app, "bench", "Time a kernel on this machine, against what the machine can do",
                 "cubist bench matmul --shape 2048x2048x2048 --dtype bf16 --threads 2 --json row.json",
                 &cubist::BenchCommand, options, command);
  AddKernelCall(bench, options.call);
  AddThreads(bench, options.threads, "compute");
  bench->add_flag("--pin", options.pin, "Keep each thread on a processor of its own");
  bench->add_option("--seconds", options.seconds, "How long to repeat, at least three times")
      ->capture_default_str()
      ->check(kSeconds);
  bench->add_option("--repetitions", options.repetitions, "How often, in place of how long")
      ->check(Whole(1, 1000000));
  AddFlagAgainst(bench, "--no-ceilings", options.ceilings, "Do not measure what the machine can do");
  AddJson(bench, options.json, "the figures");
}

void AddInfo(CLI::App& app, cubist::InfoOptions& options, std::function<int()>& command) {
  CLI::App* info = AddCommand(
      app, "info",
      "Show what the library makes of this machine, and the chips it knows; or one chip's constants",
      "cubist info --chip ascend910b2", &cubist::InfoCommand, options, command);
  info->add_option(
      "--chip", options.chip.chip,
      "List the constants of this chip, a name or a .json file, that --set of other commands takes");
  AddThreads(info, options.threads, "measure peaks");
  AddFlagAgainst(info, "--no-peaks", options.measure, "Measure no peaks");
  AddJson(info, options.json, "all of it");
}

std::vector<std::string> KernelsOf(const CLI::App& sub) {
  if (sub.get_name() == "ablate") return cubist::AblationNames();
  std::vector<std::string> kernels;
  for (const cubist::KernelForm& form : cubist::KernelForms()) kernels.emplace_back(form.name);
  return kernels;
}

// "name=" of each.
Choices WithEquals(Choices names) {
  for (std::string& name : names) name += '=';
  return names;
}

// What the parser takes, for a shell.
cubist::CommandWords WordsOf(const CLI::App& app) {
  Choices constants, cases = cubist::RunCaseNames();
  for (const cubist::NamedConstant& constant : cubist::ConstantsOf(cubist::Ascend910B2()))
    constants.push_back(constant.name);
  Choices settings = WithEquals(constants), changes = settings;
  for (const char* option : {"shape=", "dtype=", "policy=", "chip=", "tuning=", "tiling."})
    changes.emplace_back(option);
  // By option, or by command and option.
  const std::map<std::string, Choices> values = {
      {"chip", cubist::ChipNames()},
      {"dtype", kDTypes},
      {"policy", kPolicies},
      {"routing", kRoutings},
      {"workload", cubist::WorkloadNames(cubist::WorkloadFolders())},
      {"set", settings},
      {"vs", changes},
      {"over", constants},
      {"run only", cases},
      {"timeline", WithEquals(cases)},
  };
  cubist::CommandWords words;
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
    cubist::CommandWords::Command& command = words.commands.emplace_back();
    command.name = sub->get_name(), command.help = sub->get_description();
    if (command.name == "completion") command.first = kShells;
    for (const CLI::Option* option : sub->get_options()) {
      if (option->get_positional() && option->get_name(true) == "kernel") command.first = KernelsOf(*sub);
      for (const std::string& name : option->get_lnames()) {
        cubist::CommandWords::Option& added = command.options.emplace_back();
        added.name = name, added.help = option->get_description();
        added.takes_value = option->get_items_expected_max() > 0;
        for (const std::string& key : {name, command.name + " " + name}) {
          if (const auto known = values.find(key); known != values.end()) added.values = known->second;
        }
      }
    }
    for (cubist::CommandWords::Option& option : command.options) {
      for (const std::string& kernel : command.first) {
        if (option.name == "over") option.more[kernel] = cubist::SizeNames(kernel);
        if (command.name == "ablate" && option.name == "only")
          option.more[kernel] = cubist::AblationWords(kernel);
      }
    }
  }
  return words;
}

void AddCompletion(CLI::App& app, std::string& shell, std::function<int()>& command) {
  CLI::App* completion =
      app.add_subcommand("completion", "Print what a shell needs to complete this command's words");
  completion->footer(
      "Examples: eval \"$(cubist completion bash)\"\n          cubist completion zsh > "
      "\"${fpath[1]}/_cubist\"\n          cubist completion fish | source");
  completion->add_option("shell", shell, "bash, zsh or fish")->required()->check(OneOf(kShells));
  completion->callback([&] {
    command = [&] {
      std::fputs(cubist::CompletionScript(WordsOf(app), shell).c_str(), stdout);
      return 0;
    };
  });
}

// What is wrong with words that the parser did not expect: an option or a command that does not exist, by its name and
// the nearest one that does. Empty where it is something else.
std::string Misspelt(const CLI::App& app, int argc, char** argv) {
  Choices commands;
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; }))
    commands.push_back(sub->get_name());
  const std::vector<CLI::App*> parsed = app.get_subcommands();
  const std::string word = argc > 1 ? argv[1] : "";
  if (parsed.empty() && !word.empty() && word[0] != '-')
    return "there is no command " + Quoted(word) + cubist::NearestText(word, commands) +
           "; cubist --help lists them";
  const CLI::App& command = parsed.empty() ? app : *parsed.front();
  Choices options;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) options.push_back("--" + name);
  }
  for (int i = parsed.empty() ? 1 : 2; i < argc; ++i) {
    const std::string option = std::string(argv[i]).substr(0, std::string(argv[i]).find('='));
    if (option.rfind("--", 0) != 0 || option.size() == 2) continue;
    if (std::find(options.begin(), options.end(), option) == options.end())
      return "there is no option " + option + cubist::NearestText(option, options);
  }
  return "";
}

// What the parser says of its error, in words of ours where they are about a missing value.
std::string What(const CLI::ParseError& error) {
  const std::string what = error.what();  // "--shape: 1 required TEXT missing"
  const std::size_t colon = what.find(": 1 required ");
  return dynamic_cast<const CLI::ArgumentMismatch*>(&error) == nullptr || colon == std::string::npos
             ? what
             : what.substr(0, colon) + " is given without a value";
}

// The option that is given a value without a letter, as a variable of a shell that is not set; empty where there is none.
std::string GivenEmpty(const CLI::App& app) {
  for (const CLI::App* sub : app.get_subcommands()) {
    for (const CLI::Option* option : sub->get_options()) {
      const auto& results = option->results();
      if (std::find(results.begin(), results.end(), "") != results.end()) return option->get_name();
    }
  }
  return "";
}

// Files that are read: none of them is to be written over by a slip. (`tune` may write its tilings to where it has them from.)
void NoteInputs(const CLI::App& app) {
  for (const CLI::App* sub : app.get_subcommands()) {
    for (const CLI::Option* option : sub->get_options()) {
      const std::string name = option->get_name();
      const bool file_or_name = name == "--chip" || name == "--workload";
      const bool file = name == "file" || (name == "--tuning" && sub->get_name() != "tune");
      for (const std::string& text : option->results()) {
        const bool path = text.find('/') != std::string::npos || text.ends_with(".json");
        if (file || (file_or_name && path)) cubist::NoteInput(name, text);
      }
    }
  }
}

// "cubist run", as errors begin.
std::string Named(const CLI::App& app) {
  std::string name = "cubist";
  for (const CLI::App* sub : app.get_subcommands()) name += " " + sub->get_name();
  return name;
}

// A command's exit code, or what says that its text did not arrive: the disk is full, nobody reads.
int Printed(int code) {
  std::cout.flush();
  if (std::cout && std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  return cubist::BadInput("cubist", "cannot write to the standard output");
}

}  // namespace

namespace cubist {

int CommandMain(int argc, char** argv) {
  CLI::App app("Fused MoE kernels for Cube/Vector NPUs, run and modelled on any CPU", "cubist");
  app.require_subcommand(1);
  app.set_version_flag("--version", std::string("cubist ") + Version(), "Print the version and exit");
  std::function<int()> command;
  cubist::RunOptions run_options;
  AddRun(app, run_options, command);
  cubist::CheckOptions check_options;
  AddCheck(app, check_options, command);
  cubist::AblateOptions ablate_options;
  AddAblate(app, ablate_options, command);
  cubist::ProfileOptions profile_options;
  AddProfile(app, profile_options, command);
  cubist::TuneOptions tune_options;
  AddTune(app, tune_options, command);
  cubist::SweepOptions sweep_options;
  AddSweep(app, sweep_options, command);
  cubist::ValidateOptions validate_options;
  AddValidate(app, validate_options, command);
  cubist::BenchOptions bench_options;
  AddBench(app, bench_options, command);
  cubist::InfoOptions info_options;
  AddInfo(app, info_options, command);
  std::string shell;
  AddCompletion(app, shell, command);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return Printed(app.exit(error));  // help, version
    const std::string name = Named(app), misspelt = Misspelt(app, argc, argv);
    return BadInput(name, misspelt.empty() ? What(error) + "; " + name + " --help tells more" : misspelt);
  }
  if (const std::string option = GivenEmpty(app); !option.empty())
    return BadInput(Named(app), option + " is given an empty value");
  NoteInputs(app);
  try {
    return Printed(command());
  } catch (const std::bad_alloc&) {
    return BadInput(Named(app), "the machine has no memory left");
  } catch (const std::exception& error) {  // system_error is what fmt::print throws
    return BadInput(Named(app), error.what());
  }
}

}  // namespace cubist
