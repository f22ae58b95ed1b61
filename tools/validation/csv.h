// CSV as spreadsheets write it: fields in quotes may hold commas and doubled quotes. A field ends with its line.
#ifndef CUBIST_TOOLS_VALIDATION_CSV_H_
#define CUBIST_TOOLS_VALIDATION_CSV_H_

#include <string>
#include <string_view>
#include <vector>

namespace cubist {

struct CsvLine {
  int number = 0;  // of its first line in the file, from 1
  std::vector<std::string> fields;
};

// Lines without any text are left out.
std::vector<CsvLine> ParseCsv(std::string_view text);

}  // namespace cubist

#endif  // CUBIST_TOOLS_VALIDATION_CSV_H_
