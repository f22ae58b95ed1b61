// `cubist validate`: replays what others measured, and prints by how much the model is wrong.
#ifndef CUBIST_TOOLS_VALIDATE_H_
#define CUBIST_TOOLS_VALIDATE_H_

#include <string>
#include <vector>

namespace cubist {

struct ValidateOptions {
  std::string file;               // a CSV of either form of npu_model/data/; empty: the two that lie there
  std::string json;               // file for the rows
  std::string markdown;           // file for the tables of npu_model/VALIDATION.md
  std::vector<std::string> sets;  // "name=value": constants of every chip
  bool intervals = true;          // eleven more replays per row
};

// What a group of rows comes to. Errors are predicted / measured - 1.
struct ErrorSummary {
  std::size_t rows = 0;
  double mape = 0, median = 0;  // of absolute errors, and of errors
  double spearman = 0;          // rank correlation of predicted and measured
};
ErrorSummary Summarise(const std::vector<double>& predicted, const std::vector<double>& measured);

// Prints rows, summaries by group and what was skipped. Exit status: 0, or 2 for bad input.
int ValidateCommand(const ValidateOptions& options);

}  // namespace cubist

#endif  // CUBIST_TOOLS_VALIDATE_H_
