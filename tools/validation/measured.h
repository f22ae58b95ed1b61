// Rows that somebody measured, from the two forms of CSV in npu_model/data/.
#ifndef CUBIST_TOOLS_VALIDATION_MEASURED_H_
#define CUBIST_TOOLS_VALIDATION_MEASURED_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "npu_model/status.h"
#include "tools/owned_tensor.h"

namespace cubist {

// A row of
//   M,N,K,dtype,variant,TFLOPS_digitised,us_derived                    products by schedule: shapes is {{M, N, K}}
//   chip,op,case,shapes,dtypes,attrs,kernels,measured_us               operators; a shape may be null: no tensor
struct MeasuredRow {
  std::string name;  // for people: "gemm 3", "step2_double_noswz 128x8192x8192"
  std::string chip, op;
  std::vector<Shape> shapes;
  std::vector<std::string> dtypes;
  nlohmann::json attrs = nlohmann::json::object();
  std::string kernels;
  bool schedule = false;  // of the first form
  double us = 0;
};

struct MeasuredRows {
  std::vector<MeasuredRow> rows;
  std::vector<std::string> bad;  // "line 7: us_derived 'fast' is not a time above 0"; these are left out
};

// An error: the file cannot be read, or its first line is of neither form.
Status ReadMeasured(const std::string& file, MeasuredRows* rows);

}  // namespace cubist

#endif  // CUBIST_TOOLS_VALIDATION_MEASURED_H_
