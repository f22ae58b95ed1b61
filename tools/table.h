// Table: aligned columns of text under a title and a unit each, one line per row.
#ifndef CUBIST_TOOLS_TABLE_H_
#define CUBIST_TOOLS_TABLE_H_

#include <string>
#include <vector>

namespace cubist {

struct Column {
  enum class Align { kLeft, kRight };

  std::string title, unit;
  int width = 0;  // characters; widened to fit title and unit
  Align align = Align::kRight;
};

class Table {
 public:
  explicit Table(std::vector<Column> columns);

  int width() const;
  // Titles, units, and a rule; three lines.
  std::string Header() const;
  // One line. A cell wider than its column takes the blanks beside it, and moves the cells after it where
  // there are too few. Missing cells are blank.
  std::string Row(const std::vector<std::string>& cells) const;
  std::string Rule() const;

 private:
  std::vector<Column> columns_;
};

// Times and rates with three significant digits and a unit: "1.23 ms", "451 GFLOP/s"; "0 s".
std::string FormatSeconds(double seconds);
std::string FormatPerSecond(double value, const char* unit);
// Two significant digits, "3.1e-03"; "0", "inf" and "nan" as they are.
std::string FormatError(double error);

}  // namespace cubist

#endif  // CUBIST_TOOLS_TABLE_H_
