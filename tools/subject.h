// Subject: a kernel call on a modelled chip, as the command line names it: what `profile`, `tune` and `sweep` look at.
#ifndef CUBIST_TOOLS_SUBJECT_H_
#define CUBIST_TOOLS_SUBJECT_H_

#include <memory>
#include <string>

#include "npu_model/chip.h"
#include "npu_model/profile.h"
#include "npu_model/status.h"
#include "npu_model/sync/policy.h"
#include "npu_model/trace/record.h"
#include "npu_model/tuning.h"
#include "tools/kernel_call.h"
#include "tools/tiling_search.h"
#include "tools/what_if.h"

namespace cubist {

struct SubjectOptions {
  KernelCallOptions call;
  ChipOptions chip;
  std::string policy = "minimal";  // or per-tile
  std::string tuning;              // file of tilings to use
  std::string tiling;              // "m=128,order=diagonal": fields of the tiling to change
};

struct Subject {
  std::string kernel, shape, dtype;
  ChipSpec chip;
  sync::Policy policy = sync::Policy::kMinimal;
  Call call;
  std::shared_ptr<Tuning> tuning;  // never null
  std::string changes;             // of the chip's constants and of the tiling, as they were given

  // Without data. Record and timeline where wanted.
  Status Run(Profile* profile, bool timeline = false, trace::Record* record = nullptr) const;
  // "matmul 1024x1024x1024 bf16 on ascend910b2", and what was changed
  std::string Title() const;
};

// What a call was, for a file: enough to make it again. `base` is what --chip was given, `set` what was changed of it.
template <class Writer>
void WriteSettings(Writer& out, const SubjectOptions& options, const Subject& subject) {
  out("kernel", subject.kernel);
  out("shape", subject.shape);
  out("dtype", options.call.dtype);
  out("causal", options.call.causal);
  WriteChip(out, options.chip, subject.chip);
  out("policy", options.policy);
  out("tuning", options.tuning);
  out("tiling", options.tiling);
}

// Errors name the option, its value and what would be right.
Status MakeSubject(const SubjectOptions& options, Subject* subject);

// The example where the shape is not given, its last sizes where those are missing.
std::string FullShape(const KernelCallOptions& options);

}  // namespace cubist

#endif  // CUBIST_TOOLS_SUBJECT_H_
