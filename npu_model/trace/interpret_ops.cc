// What instructions compute, by families.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "npu_model/instruction.h"
#include "npu_model/philox.h"
#include "npu_model/status.h"
#include "npu_model/trace/interpret.h"

namespace cubist::trace {
namespace {

using Values = std::vector<double>;

float Single(double value) { return static_cast<float>(value); }

std::size_t Rows(const Instr& instr) { return static_cast<std::size_t>(instr.dims[0]); }
std::size_t Cols(const Instr& instr) { return static_cast<std::size_t>(instr.dims[1]); }

// NaN where either is.
double MaxOrNan(double a, double b) { return std::isnan(a) || a > b ? a : b; }

template <class F>
Values Each(Values values, F&& f) {
  for (double& v : values) v = f(v);
  return values;
}

// As TopK counts it; a sort needs an order of all.
Values NanAsLowest(Values values) {
  return Each(std::move(values),
              [](double v) { return std::isnan(v) ? -std::numeric_limits<double>::infinity() : v; });
}

template <class F>
Values EachRow(const Instr& instr, const Values& a, double start, F&& f) {
  const std::size_t cols = Cols(instr);
  Values values(Rows(instr), start);
  for (std::size_t e = 0; e < a.size(); ++e) values[e / cols] = f(values[e / cols], a[e]);
  return values;
}

Values Turned(const Instr& instr, const Values& a) {
  const std::size_t rows = Rows(instr), cols = Cols(instr);
  Values values;
  for (std::size_t e = 0; e < a.size(); ++e) values.push_back(a[e % rows * cols + e / rows]);
  return values;
}

double Binary(Op op, double a, double b) {
  const float x = Single(a), y = Single(b);
  switch (op) {
    case Op::kAdd:
      return x + y;
    case Op::kSub:
      return x - y;
    case Op::kMul:
      return x * y;
    case Op::kDiv:
      return x / y;
    default:
      return MaxOrNan(x, y);
  }
}

// c (+)= a b, in fp32 and ascending k.
Values Product(const Instr& instr, Values c, const Values& a, const Values& b, const Values& bias) {
  const auto m = static_cast<std::size_t>(instr.dims[0]), n = static_cast<std::size_t>(instr.dims[1]),
             k = static_cast<std::size_t>(instr.dims[2]);
  if (!instr.accumulates) c.assign(m * n, 0.0);
  for (std::size_t i = 0; i < m; ++i) {
    for (std::size_t j = 0; j < n; ++j) {
      float sum = Single(bias.empty() ? c[i * n + j] : bias[j]);
      for (std::size_t p = 0; p < k; ++p) sum += Single(a[i * k + p]) * Single(b[p * n + j]);
      c[i * n + j] = sum;
    }
  }
  return c;
}

// The bin that a Histogram or Rank puts an id into, where it is one of `count`.
std::optional<std::size_t> BinOf(const Instr& instr, double id, std::size_t count) {
  const std::int64_t bin = BinsOf(instr).Of(static_cast<std::int32_t>(id));
  if (bin < 0 || bin >= static_cast<std::int64_t>(count)) return std::nullopt;
  return static_cast<std::size_t>(bin);
}

}  // namespace

Interpreter::Computed Interpreter::Move(const Instr& instr) {
  switch (instr.op) {
    case Op::kLoadL1:
    case Op::kLoadBias:
    case Op::kLoadUb:
      return ReadAccess(instr);
    case Op::kLoadL0A:
    case Op::kLoadL0B: {
      const Values a = ReadUse(instr, 0);
      return instr.immediate == 0 ? a : Turned(instr, a);
    }
    case Op::kTranspose:
      return Turned(instr, ReadUse(instr, 0));
    case Op::kStorePacked:
    case Op::kLoadBT:
    case Op::kStoreUb:
    case Op::kCast:
    case Op::kCopyElement:
    case Op::kSendL0C:
    case Op::kReceiveUb:
    case Op::kSendUb:
    case Op::kReceiveL1:
      return ReadUse(instr, 0);
    case Op::kReadScalar:
    case Op::kSpend:
      return Values();
    default:
      return std::nullopt;
  }
}

Interpreter::Computed Interpreter::Cube(const Instr& instr) {
  switch (instr.op) {
    case Op::kMmad: {
      const bool has_bias = instr.uses[3].used();
      const bool empty = instr.dims[2] == 0;
      const Values a = empty ? Values() : ReadUse(instr, 0), b = empty ? Values() : ReadUse(instr, 1);
      const Values bias = has_bias ? ReadUse(instr, empty ? 0 : 2) : Values();
      const Values c = instr.accumulates ? ReadBefore(instr, 0) : Values();
      return Product(instr, c, a, b, bias);
    }
    case Op::kStoreL0C: {
      const FixOptions options = FixOf(instr);
      Values sums = Each(ReadUse(instr, 0), [&](double a) {
        const float scaled = Single(a) * options.scale;
        return options.relu && scaled <= 0 ? 0.0f : scaled;
      });
      if (options.accumulate == Accumulate::kNo) return sums;
      const Values before = ReadAccess(instr);
      for (std::size_t e = 0; e < sums.size(); ++e) sums[e] = Single(before[e]) + Single(sums[e]);
      return sums;
    }
    default:
      return std::nullopt;
  }
}

Interpreter::Computed Interpreter::Make(const Instr& instr) {
  const std::size_t rows = Rows(instr), cols = Cols(instr);
  const double number = NumberOf(instr);
  switch (instr.op) {
    case Op::kFill:
      return Values(rows * cols, IsFloat(instr.dtype) ? number : instr.immediate);
    case Op::kDistances: {
      const std::int64_t first = FirstDistanceOf(instr);
      Values x(rows * cols);
      for (std::size_t e = 0; e < x.size(); ++e) {
        x[e] = std::abs(static_cast<double>(first + static_cast<std::int64_t>(e / cols) -
                                            static_cast<std::int64_t>(e % cols)));
      }
      return x;
    }
    case Op::kDropFlags: {
      const DropPlace& place = record_.drops[static_cast<std::size_t>(instr.dims[2])];
      Values flags(rows * cols);
      for (std::size_t e = 0; e < flags.size(); ++e) {
        const auto r = static_cast<std::int64_t>(e / cols), c = static_cast<std::int64_t>(e % cols);
        const std::int64_t row = place.row + (place.transposed ? c : r),
                           key = place.key + (place.transposed ? r : c);
        flags[e] = IsDropped(place.stream, row, key) ? 1 : 0;
      }
      return flags;
    }
    default:
      return std::nullopt;
  }
}

Interpreter::Computed Interpreter::Elementwise(const Instr& instr) {
  const std::size_t cols = Cols(instr);
  const double number = NumberOf(instr);
  switch (instr.op) {
    case Op::kMulScalar:
      return Each(ReadUse(instr, 0), [&](double a) { return Single(a) * Single(number); });
    case Op::kMaxScalar:
      return Each(ReadUse(instr, 0), [&](double a) { return MaxOrNan(a, number); });
    case Op::kAddScalar:
      return Each(ReadUse(instr, 0), [&](double a) { return Single(a) + Single(number); });
    case Op::kAdd:
    case Op::kSub:
    case Op::kMul:
    case Op::kDiv:
    case Op::kMax: {
      Values a = ReadUse(instr, 0);
      const Values b = ReadUse(instr, 1);
      for (std::size_t e = 0; e < a.size(); ++e)
        a[e] = Binary(instr.op, a[e], b[instr.broadcasts ? e / cols : e % b.size()]);  // One row, or as many.
      return a;
    }
    case Op::kExp:
      return Each(ReadUse(instr, 0), [](double a) { return std::exp(Single(a)); });
    case Op::kLn:
      return Each(ReadUse(instr, 0), [](double a) { return std::log(Single(a)); });
    case Op::kSqrt:
      return Each(ReadUse(instr, 0), [](double a) { return std::sqrt(Single(a)); });
    case Op::kAbs:
      return Each(ReadUse(instr, 0), [](double a) { return std::abs(a); });
    case Op::kAddInt: {
      Values a = ReadUse(instr, 0);
      const Values b = ReadUse(instr, 1);
      for (std::size_t e = 0; e < a.size(); ++e) a[e] += b[e];
      return a;
    }
    case Op::kAddScalarInt:
      return Each(ReadUse(instr, 0), [&](double a) { return a + instr.immediate; });
    case Op::kRoundUp:
      return Each(ReadUse(instr, 0),
                  [&](double a) { return std::ceil(a / instr.immediate) * instr.immediate; });
    default:
      return std::nullopt;
  }
}

Interpreter::Computed Interpreter::Reduce(const Instr& instr) {
  const std::size_t cols = Cols(instr);
  switch (instr.op) {
    case Op::kRowMax:
      return EachRow(instr, ReadUse(instr, 0), -std::numeric_limits<double>::infinity(), MaxOrNan);
    case Op::kRowSum:
      return EachRow(instr, ReadUse(instr, 0), 0,
                     [](double sum, double a) { return Single(sum) + Single(a); });
    case Op::kColumnSum: {
      const Values a = ReadUse(instr, 0);
      Values sums(cols, 0.0);
      for (std::size_t e = 0; e < a.size(); ++e) sums[e % cols] += a[e];
      return sums;
    }
    case Op::kExclusiveScan: {
      const Values a = ReadUse(instr, 0);
      Values scan(cols, instr.immediate);
      for (std::size_t e = 0; e + 1 < cols; ++e) scan[e + 1] = scan[e] + a[e];
      return scan;
    }
    default:
      return std::nullopt;
  }
}

Interpreter::Computed Interpreter::Mask(const Instr& instr) {
  const std::size_t cols = Cols(instr);
  const double number = NumberOf(instr);
  switch (instr.op) {
    case Op::kMaskAbove:
    case Op::kMaskBelow: {
      Values x = ReadUse(instr, 0);
      for (std::size_t e = 0; e < x.size(); ++e) {
        const auto diagonal = static_cast<std::int64_t>(e % cols) - static_cast<std::int64_t>(e / cols);
        const bool masked =
            instr.op == Op::kMaskAbove ? diagonal > instr.immediate : diagonal < instr.immediate;
        if (masked) x[e] = MaskValueOf(instr);
      }
      return x;
    }
    case Op::kMaskWhere: {
      Values x = ReadUse(instr, 0);
      const Values flags = ReadUse(instr, 1);
      for (std::size_t e = 0; e < x.size(); ++e) {
        if (flags[e] != 0) x[e] = number;
      }
      return x;
    }
    case Op::kSelectLe: {
      const Values key = ReadUse(instr, 0), b = ReadUse(instr, 2);
      Values a = ReadUse(instr, 1);
      for (std::size_t e = 0; e < a.size(); ++e) {
        if (!(key[e] <= number)) a[e] = b[b.size() == a.size() ? e : e / cols];
      }
      return a;
    }
    case Op::kKeepWhere: {
      Values a = ReadUse(instr, 0);
      const Values flags = ReadUse(instr, 1);
      for (std::size_t e = 0; e < a.size(); ++e) {
        if (flags[flags.size() == a.size() ? e : e / cols] == 0) a[e] = -1;
      }
      return a;
    }
    default:
      return std::nullopt;
  }
}

Interpreter::Computed Interpreter::Choose(const Instr& instr, Values* second) {
  const std::size_t rows = Rows(instr), cols = Cols(instr);
  switch (instr.op) {
    case Op::kTopK: {
      const Values a = NanAsLowest(ReadUse(instr, 0));
      const auto kept = static_cast<std::size_t>(instr.dims[2]);
      Values values;
      for (std::size_t r = 0; r < rows; ++r) {
        std::vector<std::size_t> order(cols);
        for (std::size_t c = 0; c < cols; ++c) order[c] = c;
        std::stable_sort(order.begin(), order.end(),
                         [&](std::size_t x, std::size_t y) { return a[r * cols + x] > a[r * cols + y]; });
        for (std::size_t j = 0; j < kept; ++j) {
          values.push_back(a[r * cols + order[j]]);
          second->push_back(static_cast<double>(order[j]));
        }
      }
      return values;
    }
    case Op::kGroupTop: {
      Values a = NanAsLowest(ReadUse(instr, 0));
      const Operand& to = record_.operands[instr.uses[0].operand()];
      const std::size_t groups = static_cast<std::size_t>(to.col_end - to.col_begin), width = cols / groups;
      Values sums;
      for (std::size_t g = 0; g < rows * groups; ++g) {
        const auto first = a.begin() + static_cast<std::ptrdiff_t>(g * width);
        std::sort(first, first + static_cast<std::ptrdiff_t>(width), std::greater<>());
        float sum = Single(first[0]);
        for (std::int32_t j = 1; j < instr.dims[2] && first[j] > -std::numeric_limits<double>::infinity();
             ++j)
          sum += Single(first[j]);
        sums.push_back(sum);
      }
      return sums;
    }
    case Op::kKeepGroups: {
      Values a = ReadUse(instr, 0);
      const Values ids = ReadUse(instr, 1);
      const std::size_t kept = ids.size() / rows, width = static_cast<std::size_t>(instr.dims[2]);
      for (std::size_t e = 0; e < a.size(); ++e) {
        const auto first = ids.begin() + static_cast<std::ptrdiff_t>(e / cols * kept);
        const auto last = first + static_cast<std::ptrdiff_t>(kept);
        if (std::find(first, last, static_cast<double>(e % cols / width)) == last)
          a[e] = -std::numeric_limits<double>::infinity();
      }
      return a;
    }
    case Op::kDropRoutes: {
      Values ids = ReadBefore(instr, 0);
      *second = ReadBefore(instr, 1);
      const Values u = ReadUse(instr, 0);
      for (std::size_t e = 0; e < u.size(); ++e) {
        if (u[e] < NumberOf(instr)) ids[e] = -1, (*second)[e] = 0;
      }
      return ids;
    }
    default:
      return std::nullopt;
  }
}

Interpreter::Computed Interpreter::Pick(const Instr& instr) {
  const std::size_t rows = Rows(instr), cols = Cols(instr);
  switch (instr.op) {
    case Op::kGather: {
      const Values ids = ReadUse(instr, 0), a = ReadUse(instr, 1);
      const std::size_t width = a.size() / rows;
      Values values;
      for (std::size_t e = 0; e < ids.size(); ++e)
        values.push_back(ids[e] < 0 ? 0.0 : a[e / cols * width + static_cast<std::size_t>(ids[e])]);
      return values;
    }
    case Op::kUnzip: {
      const Values a = ReadUse(instr, 0);
      const auto first = static_cast<std::size_t>(instr.immediate), width = a.size() / rows;
      Values values;
      for (std::size_t i = 0; i < rows; ++i) {
        for (std::size_t j = first; j < cols; j += 2) values.push_back(a[i * width + j]);
      }
      return values;
    }
    case Op::kZip: {
      const Values a = ReadUse(instr, 0), b = ReadUse(instr, 1);
      Values values;
      for (std::size_t e = 0; e < a.size(); ++e) values.insert(values.end(), {a[e], b[e]});
      return values;
    }
    case Op::kScatter: {
      Values dst = ReadBefore(instr, 0);
      const Values ids = ReadUse(instr, 0), values = ReadUse(instr, 1);
      const std::size_t width = dst.size() / rows;
      for (std::size_t e = 0; e < ids.size(); ++e) {
        if (ids[e] >= 0 && ids[e] < static_cast<double>(width))
          dst[e / cols * width + static_cast<std::size_t>(ids[e])] = values[e];
      }
      return dst;
    }
    case Op::kTrueColumns: {
      const Values flags = ReadUse(instr, 0);
      const Operand& to = record_.operands[instr.uses[0].operand()];
      const auto kept = static_cast<std::size_t>(to.col_end - to.col_begin);
      Values columns(rows * kept, -1.0);
      for (std::size_t r = 0; r < rows; ++r) {
        for (std::size_t c = 0, j = 0; c < cols && j < kept; ++c) {
          if (flags[r * cols + c] != 0) columns[r * kept + j++] = static_cast<double>(c);
        }
      }
      return columns;
    }
    case Op::kLookup: {
      Values dst = ReadBefore(instr, 0);
      const Values ids = ReadUse(instr, 0), table = ReadUse(instr, 1);
      for (std::size_t e = 0; e < ids.size(); ++e) {
        const double at = ids[e] - instr.immediate;
        if (at >= 0 && at < static_cast<double>(table.size())) dst[e] = table[static_cast<std::size_t>(at)];
      }
      return dst;
    }
    default:
      return std::nullopt;
  }
}

Interpreter::Computed Interpreter::Count(const Instr& instr, Values* second) {
  switch (instr.op) {
    case Op::kHistogram: {
      Values counts = ReadBefore(instr, 0);
      for (const double id : ReadUse(instr, 0)) {
        if (const auto bin = BinOf(instr, id, counts.size())) ++counts[*bin];
      }
      return counts;
    }
    case Op::kRank: {
      *second = ReadBefore(instr, 1);
      const Values ids = ReadUse(instr, 0), limits = ReadUse(instr, 1);
      Values ranks(ids.size(), -1.0);
      for (std::size_t e = 0; e < ids.size(); ++e) {
        const auto bin = BinOf(instr, ids[e], second->size());
        if (bin) ranks[e] = limits.empty() || (*second)[*bin] < limits[*bin] ? (*second)[*bin]++ : -1;
      }
      return ranks;
    }
    default:
      return std::nullopt;
  }
}

Interpreter::Computed Interpreter::Sort(const Instr& instr, Values* second) {
  switch (instr.op) {
    case Op::kSort32:
    case Op::kMergeSort: {
      const Values keys = ReadUse(instr, 0), values = ReadUse(instr, 1);
      const auto part =
          static_cast<std::size_t>(instr.op == Op::kSort32 ? kSortedRun : kMergedRuns * instr.dims[2]);
      std::vector<std::size_t> order(keys.size());
      std::iota(order.begin(), order.end(), std::size_t{0});
      for (std::size_t begin = 0; begin < order.size(); begin += part) {
        const auto first = order.begin() + static_cast<std::ptrdiff_t>(begin);
        const auto last = first + static_cast<std::ptrdiff_t>(std::min(part, order.size() - begin));
        std::stable_sort(first, last, [&](std::size_t a, std::size_t b) { return keys[a] > keys[b]; });
      }
      Values sorted;
      for (const std::size_t i : order) sorted.push_back(keys[i]), second->push_back(values[i]);
      return sorted;
    }
    default:
      return std::nullopt;
  }
}

Interpreter::Values Interpreter::Compute(const Instr& instr, Values* second) {
  Computed values = Move(instr);
  if (!values) values = Cube(instr);
  if (!values) values = Make(instr);
  if (!values) values = Elementwise(instr);
  if (!values) values = Reduce(instr);
  if (!values) values = Mask(instr);
  if (!values) values = Choose(instr, second);
  if (!values) values = Pick(instr);
  if (!values) values = Count(instr, second);
  if (!values) values = Sort(instr, second);
  CUBIST_CHECK(values.has_value(), std::string("the interpreter does not know ") + NameOf(instr.op));
  return *std::move(values);
}

}  // namespace cubist::trace
