// Findings, collected.
#ifndef CUBIST_NPU_MODEL_SYNC_FINDINGS_H_
#define CUBIST_NPU_MODEL_SYNC_FINDINGS_H_

#include <cstddef>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "npu_model/sync/check.h"

namespace cubist::sync {

std::string TensorName(const trace::Record& record, std::size_t tensor);
Place PlaceOfInstr(const trace::CoreRecord& core, std::uint32_t i);

// Findings of one kind between the same lines are one finding with a count.
class Findings {
 public:
  void Add(Finding finding) {
    const auto key =
        std::tuple(finding.fault, finding.first.line.file, finding.first.line.line, finding.first.pipe,
                   finding.first.what, finding.second.line.file, finding.second.line.line,
                   finding.second.pipe, finding.second.what, finding.memory);
    const auto [at, is_new] = index_.try_emplace(key, all_.size());
    if (is_new) {
      all_.push_back(std::move(finding));
    } else {
      all_[at->second].count += finding.count;
    }
  }
  std::vector<Finding> Take() { return std::move(all_); }

 private:
  std::map<std::tuple<Fault, std::string, std::uint32_t, Pipe, std::string, std::string, std::uint32_t, Pipe,
                      std::string, std::string>,
           std::size_t>
      index_;
  std::vector<Finding> all_;
};

}  // namespace cubist::sync

#endif  // CUBIST_NPU_MODEL_SYNC_FINDINGS_H_
