// Fields: shapes and tilings as named numbers, "m=128,n=256,order=diagonal". One list of fields per struct, beside
// it, serves printing, parsing and the limits of what may be given:
//
//   template <class Visit> void VisitFields(const Shape&, Visit&&)                               names of a shape
//   template <class T, class Visit> void VisitFields(const ChipSpec&, const Shape&, T&, Visit&&) of a tiling
//
// call visit(Field, member) for each. What follows from shape and fields is set by Complete(shape, tiling) or
// Complete(chip, shape, tiling), if there is one.
#ifndef CUBIST_TILING_FIELDS_H_
#define CUBIST_TILING_FIELDS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "npu_model/chip.h"
#include "npu_model/status.h"
#include "tiling/overflow.h"

namespace cubist {

// A number's name and limits. A switch goes from 0 to 1, an enumeration from 0 to its last; it is written by name.
struct Field {
  const char* name = "";
  std::int64_t least = 1, most = std::int64_t{1} << 40;
  std::int64_t multiple = 1;
};

template <class T>
std::string FieldText(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return NameOf(value);
  } else {
    return std::to_string(static_cast<std::int64_t>(value));
  }
}

class CUBIST_EXPORT FieldPrinter {
 public:
  template <class T>
  void operator()(const Field& field, const T& value) {
    Add(field.name, FieldText(value));
  }
  const std::string& text() const { return text_; }

 private:
  void Add(std::string_view name, std::string_view value);
  std::string text_;
};

template <class Shape>
std::string ShapeText(const Shape& shape) {
  FieldPrinter printer;
  VisitFields(shape, printer);
  return printer.text();
}

template <class Shape, class Tiling>
std::string TilingText(const ChipSpec& chip, const Shape& shape, const Tiling& tiling) {
  FieldPrinter printer;
  VisitFields(chip, shape, tiling, printer);
  return printer.text();
}

// Reads the fields that a text names, once each, into a struct's members; the others keep what they hold.
class CUBIST_EXPORT FieldParser {
 public:
  explicit FieldParser(std::string_view text);

  template <class T>
  void operator()(const Field& field, T& member) {
    if (const std::string* text = Take(field)) {
      std::int64_t value = 0;
      if constexpr (std::is_enum_v<T>) {
        std::vector<std::string> names;
        for (std::int64_t i = 0; i <= field.most; ++i) names.emplace_back(NameOf(static_cast<T>(i)));
        value = Index(field, *text, names);
      } else {
        value = Number(field, *text);
      }
      if (error_.empty()) member = static_cast<T>(value);
    }
    CheckLimits(field, static_cast<std::int64_t>(member));
  }

  // Empty where all is well; otherwise the first thing that is wrong.
  std::string Finish();

 private:
  struct Item {
    std::string name, value;
    bool used = false;
  };

  const std::string* Take(const Field& field);
  std::int64_t Number(const Field& field, const std::string& text);
  std::int64_t Index(const Field& field, const std::string& text, const std::vector<std::string>& names);
  void CheckLimits(const Field& field, std::int64_t value);
  void Note(std::string error);

  std::vector<Item> items_;
  std::vector<std::string> names_;
  std::string error_;
};

// A tiling from its text. Fields that the text leaves out keep what `tiling` holds. It must keep to the limits of
// its fields and fit the chip's buffers, or is unsupported where these alone are too small.
template <class Shape, class Tiling>
Status ParseTiling(const ChipSpec& chip, const Shape& shape, std::string_view text, Tiling* tiling) {
  Tiling parsed = *tiling;
  FieldParser parser(text);
  VisitFields(chip, shape, parsed, parser);
  if (std::string error = parser.Finish(); !error.empty()) return InvalidArgument(std::move(error));
  if constexpr (requires { Complete(shape, parsed); }) Complete(shape, parsed);
  if constexpr (requires { Complete(chip, shape, parsed); }) Complete(chip, shape, parsed);
  if (!Fits(chip, shape, parsed)) {
    if constexpr (requires { BufferBytes(chip, shape, parsed, Buffer::kL1); }) {
      const Overflow worst = WorstOf(chip, shape, parsed);
      if (worst.share > 1) return {StatusCode::kUnsupported, "needs " + worst.Text(chip)};
      return InvalidArgument("has fields that do not go together, or not with the shape");
    }
    return InvalidArgument("does not fit the buffers of " + chip.name);
  }
  *tiling = parsed;
  return {};
}

}  // namespace cubist

#endif  // CUBIST_TILING_FIELDS_H_
