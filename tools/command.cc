// The `cubist` command line: one subcommand per job.
#include "cubist/command.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "npu_model/chip.h"
#include "tools/ablate.h"
#include "tools/bench.h"
#include "tools/check.h"
#include "tools/completion.h"
#include "tools/info.h"
#include "tools/kernel_call.h"
#include "tools/profile.h"
#include "tools/run.h"
#include "tools/subject.h"
#include "tools/sweep.h"
#include "tools/tune.h"
#include "tools/validate.h"
#include "tools/what_if.h"

namespace {

constexpr int kBadInput = 2;

// The largest scales that leave anything: the limits of a workload's sequence and heads.
const CLI::Range kTokenScales(1, 1 << 24), kHeadScales(1, 1 << 16);

// A chip, and what is to be changed of it.
void AddChip(CLI::App* command, cubist::ChipOptions& options) {
  command->add_option("--chip", options.chip, "Chip to model: a name, or a .json file with one of your own")
      ->capture_default_str();
  command
      ->add_option(
          "--set", options.sets,
          "name=value: change a constant of the chip, such as memory.hbm_bytes_per_s=3.2e12; repeatable")
      ->allow_extra_args(false);
}

void AddRun(CLI::App& app, cubist::RunOptions& options, std::function<int()>& command) {
  CLI::App* run =
      app.add_subcommand("run", "Compute, check, time and model every kernel at a workload's shapes");
  run->footer("Example: cubist run --quick --only attention --chip ascend910b4 --json rows.json");
  run->add_option("--workload", options.workload, "Name, or path of a .json file")->capture_default_str();
  AddChip(run, options.chip);
  run->add_option("--threads", options.threads, "Threads to compute with; all by default")
      ->check(CLI::Range(1, 1024));
  run->add_option("--seed", options.seed, "Seed of the generated inputs")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  run->add_option("--scale", options.token_scale,
                  "Divide the sequence by this instead of the workload's token_scale")
      ->check(kTokenScales);
  run->add_option("--head-scale", options.head_scale,
                  "Divide the heads by this instead of the workload's head_scale")
      ->check(kHeadScales);
  run->add_option("--routing", options.routing, "skewed, uniform or both")->capture_default_str();
  run->add_option("--only", options.only, "Run this case alone; repeatable")->allow_extra_args(false);
  run->add_option("--input", options.inputs, "name=file.npy: a tensor of yours; repeatable")
      ->allow_extra_args(false);
  run->add_option("--output", options.output, "Folder to write results to, as <case>.<tensor>.npy");
  run->add_option("--json", options.json, "File to write the rows to");
  run->add_option("--timeline", options.timelines,
                  "case=file.json: the modelled timeline of a case, for Perfetto; repeatable")
      ->allow_extra_args(false);
  run->add_option("--check-seed", options.check_seed, "Draw the checked rows with this, to repeat a check")
      ->check(CLI::NonNegativeNumber);
  run->add_flag("--quick", options.quick, "Fewer tokens, repetitions and checked rows");
  run->add_flag("--list", options.list, "List cases and tensors, run nothing");
  run->callback([&] { command = [&] { return cubist::RunCommand(options); }; });
}

// A kernel by name and shape.
void AddKernelCall(CLI::App* command, cubist::KernelCallOptions& options) {
  command->add_option("kernel", options.kernel, "One of: " + cubist::KernelFormsText())->required();
  command->add_option("--shape", options.shape, "Sizes as the kernel's name shows; an example by default");
  command->add_option("--dtype", options.dtype, "fp32, bf16 or fp16")->capture_default_str();
  command->add_flag("--causal", options.causal, "Mask keys behind the query (attention)");
}

void AddCheck(CLI::App& app, cubist::CheckOptions& options, std::function<int()>& command) {
  CLI::App* check =
      app.add_subcommand("check", "Plan the flags of a kernel on a chip and prove that they suffice");
  check->footer("Example: cubist check flash_attention --shape 8x2048x192x128 --causal --plan");
  AddKernelCall(check, options.call);
  AddChip(check, options.chip);
  check->add_option("--policy", options.policy, "minimal, or per-tile as compilers do")
      ->capture_default_str();
  check->add_flag("--slack", options.slack, "Print what each wait costs, and what would be saved without it");
  check->add_flag("--plan", options.plan, "Print the plan: pipe pair, event ids, source lines");
  check
      ->add_option(
          "--execute", options.execute,
          "Compute the kernel on numbers in program order, eagerly, late and in this many random orders, and "
          "compare the bytes: for small shapes")
      ->check(CLI::Range(1, 1000));
  check->add_option("--json", options.json, "File to write plan and findings to");
  check->add_option("--dot", options.dot, "File to write the graph of a deadlock to");
  check->callback([&] { command = [&] { return cubist::CheckCommand(options); }; });
}

void AddValidate(CLI::App& app, cubist::ValidateOptions& options, std::function<int()>& command) {
  CLI::App* validate =
      app.add_subcommand("validate", "Replay what others measured on a device, and show the model's errors");
  validate->footer("Example: cubist validate measured.csv --json errors.json");
  validate->add_option("file", options.file,
                       "CSV of either form of npu_model/data/; the two there by default");
  validate->add_option("--set", options.sets, "name=value: change a constant of every chip; repeatable")
      ->allow_extra_args(false);
  validate->add_option("--json", options.json, "File to write rows, errors and what was skipped to");
  validate->add_option("--markdown", options.markdown,
                       "File to write the tables of npu_model/VALIDATION.md to");
  validate->add_flag("!--no-intervals", options.intervals, "Leave the intervals out: six times as quick");
  validate->callback([&] { command = [&] { return cubist::ValidateCommand(options); }; });
}

void AddAblate(CLI::App& app, cubist::AblateOptions& options, std::function<int()>& command) {
  CLI::App* ablate = app.add_subcommand(
      "ablate", "Set a kernel's conventional form beside ours on the model, one idea at a time");
  ablate->footer("Example: cubist ablate matmul --only 4096x7168x1536 --chip ascend910b2 --json rows.json");
  ablate->add_option("kernel", options.kernel, "One of: " + cubist::AblationsText())->required();
  AddChip(ablate, options.chip);
  ablate->add_option("--workload", options.workload, "Name, or path of a .json file")->capture_default_str();
  ablate->add_option("--only", options.only, "Cases whose names contain this; repeatable")
      ->allow_extra_args(false);
  ablate->add_option("--budget", options.budget, "Tilings to replay for each step, about")
      ->capture_default_str()
      ->check(CLI::Range(1, 100000));
  ablate->add_flag("--tilings", options.tilings, "Print the tiling of each step");
  ablate->add_flag("--list", options.list, "List the cases, run nothing");
  ablate->add_option("--json", options.json, "File to write cases and steps to");
  ablate->callback([&] { command = [&] { return cubist::AblateCommand(options); }; });
}

void AddSubject(CLI::App* command, cubist::SubjectOptions& options) {
  AddKernelCall(command, options.call);
  AddChip(command, options.chip);
  command->add_option("--policy", options.policy, "Flags: minimal, or per-tile as compilers do")
      ->capture_default_str();
  command->add_option("--tuning", options.tuning, "File of tilings to use, as `cubist tune` writes it");
  command->add_option("--tiling", options.tiling, "name=value,..: fields of the tiling to change");
}

void AddProfile(CLI::App& app, cubist::ProfileOptions& options, std::function<int()>& command) {
  CLI::App* profile = app.add_subcommand("profile", "Show what a kernel's time on a chip goes into, and why");
  profile->footer(
      "Example: cubist profile matmul --shape 4096x1536x7168 --set memory.hbm_bytes_per_s=0.8e12 --vs "
      "policy=per-tile "
      "--html page.html");
  AddSubject(profile, options.subject);
  profile
      ->add_option(
          "--vs", options.vs,
          "name=value: compare with a call that differs in this: shape, dtype, policy, chip, tuning, "
          "tiling.NAME or a constant of the chip; repeatable")
      ->allow_extra_args(false);
  profile->add_flag("--slack", options.slack, "Tell what each wait costs, by replays without it");
  profile->add_flag(
      "--interval", options.interval,
      "Tell between which times the spread of the chip's constants leaves it, of records above two "
      "million instructions too: five replays more");
  profile->add_option("--html", options.html, "File to write a page to, for a browser");
  profile->add_option("--trace", options.trace,
                      "File to write a Chrome trace to, for Perfetto or MindStudio Insight");
  profile->add_option("--window", options.window,
                      "FROM:TO, in us: the part of the time that the trace and the page's timeline show");
  profile->add_option("--json", options.json, "File to write all figures to");
  profile->add_option("--csv", options.csv, "File to write the figures to");
  profile->callback([&] { command = [&] { return cubist::ProfileCommand(options); }; });
}

void AddTune(CLI::App& app, cubist::TuneOptions& options, std::function<int()>& command) {
  CLI::App* tune =
      app.add_subcommand("tune", "Search the tilings of a kernel's shape by replay, and keep the best");
  tune->footer("Example: cubist tune matmul --shape 512x4096x7168 --output tilings.txt");
  AddSubject(tune, options.subject);
  tune->add_option("--budget", options.budget, "Tilings to replay, about")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000000));
  tune->add_option("--output", options.output, "Tuning file to make, or to add to");
  tune->add_option("--json", options.json, "File to write the result to");
  tune->callback([&] { command = [&] { return cubist::TuneCommand(options); }; });
}

void AddSweep(CLI::App& app, cubist::SweepOptions& options, std::function<int()>& command) {
  CLI::App* sweep = app.add_subcommand(
      "sweep", "Model a kernel over a constant of the chip, a size of its shape, or a field of its tiling");
  sweep->footer(
      "Example: cubist sweep matmul --shape 4096x1536x7168 --over memory.hbm_bytes_per_s --from 0.4e12 --to "
      "3.2e12 "
      "--log --svg hbm.svg");
  AddSubject(sweep, options.subject);
  sweep->add_option("--over", options.over, "What is varied: such as cube_cores, M, or tiling.k1")
      ->required();
  sweep->add_option("--values", options.values, "The values, with commas between them")->delimiter(',');
  sweep->add_option("--from", options.from, "The least value");
  sweep->add_option("--to", options.to, "The largest value");
  sweep->add_option("--points", options.points, "How many values")
      ->capture_default_str()
      ->check(CLI::Range(1, 10000));
  sweep->add_flag("--log", options.log, "Values evenly in the logarithm");
  sweep->add_option("--svg", options.svg, "File to draw the plot to");
  sweep->add_option("--csv", options.csv, "File to write the points to");
  sweep->add_option("--json", options.json, "File to write the points to");
  sweep->callback([&] { command = [&] { return cubist::SweepCommand(options); }; });
}

void AddBench(CLI::App& app, cubist::BenchOptions& options, std::function<int()>& command) {
  CLI::App* bench =
      app.add_subcommand("bench", "Time a kernel on this machine, against what the machine can do");
  bench->footer(
      "Example: cubist bench matmul --shape 2048x2048x2048 --dtype bf16 --threads 2 --json row.json");
  AddKernelCall(bench, options.call);
  bench->add_option("--threads", options.threads, "Threads to compute with; all by default")
      ->check(CLI::Range(1, 1024));
  bench->add_flag("--pin", options.pin, "Keep each thread on a processor of its own");
  bench->add_option("--seconds", options.seconds, "How long to repeat, at least three times")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 3600.0));
  bench->add_option("--repetitions", options.repetitions, "How often, in place of how long")
      ->check(CLI::Range(1, 1000000));
  bench->add_flag("!--no-ceilings", options.ceilings, "Do not measure what the machine can do");
  bench->add_option("--json", options.json, "File to write the figures to");
  bench->callback([&] { command = [&] { return cubist::BenchCommand(options); }; });
}

void AddInfo(CLI::App& app, cubist::InfoOptions& options, std::function<int()>& command) {
  CLI::App* info =
      app.add_subcommand("info", "Show what the library makes of this machine, and the chips it knows");
  info->footer("Example: cubist info --threads 1 --json machine.json");
  info->add_option("--threads", options.threads, "Threads to measure peaks with; all by default")
      ->check(CLI::Range(1, 1024));
  info->add_flag("!--no-peaks", options.measure, "Measure no peaks");
  info->add_option("--json", options.json, "File to write all of it to");
  info->callback([&] { command = [&] { return cubist::InfoCommand(options); }; });
}

// What the parser takes, for a shell.
cubist::CommandWords WordsOf(const CLI::App& app) {
  std::vector<std::string> kernels;
  for (const cubist::KernelForm& form : cubist::KernelForms()) kernels.emplace_back(form.name);
  const std::map<std::string, std::vector<std::string>> values = {
      {"chip", cubist::ChipNames()},
      {"dtype", {"fp32", "bf16", "fp16"}},
      {"policy", {"minimal", "per-tile"}},
      {"routing", {"skewed", "uniform", "both"}},
      {"workload", {"deepseek_v3", "pangu_ultra_moe"}},
  };
  cubist::CommandWords words;
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
    cubist::CommandWords::Command& command = words.commands.emplace_back();
    command.name = sub->get_name(), command.help = sub->get_description();
    if (command.name == "completion") command.first = {"bash", "zsh", "fish"};
    for (const CLI::Option* option : sub->get_options()) {
      if (option->get_positional() && option->get_name(true) == "kernel") command.first = kernels;
      for (const std::string& name : option->get_lnames()) {
        const auto known = values.find(name);
        command.options.push_back({name, option->get_description(),
                                   known == values.end() ? std::vector<std::string>() : known->second,
                                   option->get_items_expected_max() > 0});
      }
    }
  }
  return words;
}

void AddCompletion(CLI::App& app, std::string& shell, std::function<int()>& command) {
  CLI::App* completion =
      app.add_subcommand("completion", "Print what a shell needs to complete this command's words");
  completion->footer("Example: eval \"$(cubist completion bash)\"");
  completion->add_option("shell", shell, "bash, zsh or fish")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  completion->callback([&] {
    command = [&] {
      std::fputs(cubist::CompletionScript(WordsOf(app), shell).c_str(), stdout);
      return 0;
    };
  });
}

}  // namespace

namespace cubist {

int CommandMain(int argc, char** argv) {
  CLI::App app("Fused MoE kernels for Cube/Vector NPUs, run and modelled on any CPU", "cubist");
  app.require_subcommand(1);
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
    return app.exit(error) == 0 ? 0 : kBadInput;
  }
  return command();
}

}  // namespace cubist
