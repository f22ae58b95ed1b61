// Tuning: tilings by kernel, chip and shape that calls use instead of their own choice.
//
// Shapes and tilings are texts of named numbers, "m=4096,n=7168,k=1536", which the tilings' own field lists print and
// parse (tiling/fields.h); fields that a tiling leaves out are chosen as ever. A file has one entry per line, four words:
//
//   # kernel  chip         shape                     tiling
//   matmul    ascend910b2  m=4096,n=7168,k=1536,...  m=128,n=256,k1=256,...
#ifndef CUBIST_NPU_MODEL_TUNING_H_
#define CUBIST_NPU_MODEL_TUNING_H_

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "npu_model/status.h"

namespace cubist {

// A choice that a call met: every tiling that fits, with its closed-form price.
struct TilingChoice {
  struct Candidate {
    std::string tiling;
    double price = 0;  // cycles
    int family = 0;    // Tilings whose prices err alike have the same number.
  };
  std::string kernel, chip, shape;
  std::vector<Candidate> candidates;
  std::string chosen;  // what the call used
};

class CUBIST_EXPORT Tuning {
 public:
  // What an earlier entry for the same kernel, chip and shape said is replaced.
  void Set(const std::string& kernel, const std::string& chip, const std::string& shape,
           const std::string& tiling);
  // Null where there is no entry.
  const std::string* Find(const std::string& kernel, const std::string& chip, const std::string& shape) const;
  std::size_t size() const { return entries_.size(); }

  // Adds the entries of a text or a file, or puts them in the place of earlier ones for the same calls; a text has no call
  // twice. An error names the line; nothing is added then. What a tiling's fields say is checked when a call takes it.
  Status Parse(std::string_view text, const std::string& origin);
  Status Read(const std::string& path);
  // A file that Read takes.
  std::string Text() const;
  Status Write(const std::string& path) const;

  // Called with each choice that a call meets, where set. Calls list all their candidates then, which is slow.
  std::function<void(const TilingChoice&)> on_choice;

 private:
  using Key = std::tuple<std::string, std::string, std::string>;  // kernel, chip, shape
  std::map<Key, std::string> entries_;
};

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_TUNING_H_
