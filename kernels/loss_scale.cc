#include "kernels/loss_scale.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <new>
#include <span>
#include <string>
#include <utility>

#include "kernels/validate.h"

namespace cubist {
namespace {

constexpr const char* kKernel = "loss_scale";

// visit(offset) for every element.
template <class Visit>
void ForEachOffset(const ConstTensor& x, Visit visit) {
  ConstTensor::Sizes index{};
  const std::int64_t count = x.count();
  for (std::int64_t i = 0, offset = 0; i < count; ++i) {
    visit(offset);
    for (int d = x.rank - 1; d >= 0; --d) {
      std::int64_t& at = index[static_cast<std::size_t>(d)];
      offset += x.stride(d);
      if (++at < x.size(d)) break;
      offset -= std::exchange(at, 0) * x.stride(d);
    }
  }
}

bool IsFinite(const ConstTensor& x) {
  bool finite = true;
  ForEachOffset(x,
                [&](std::int64_t at) { finite = finite && std::isfinite(LoadFloat(x.data, x.dtype, at)); });
  return finite;
}

// Whether x / scale, of a finite x, is finite in x's dtype. Only a scale below 1 makes it larger.
bool FitsUnscaled(const ConstTensor& x, float scale) {
  bool fits = true;
  ForEachOffset(x, [&](std::int64_t at) {
    float quotient = 0;  // Of any dtype.
    StoreFloat(&quotient, x.dtype, 0, LoadFloat(x.data, x.dtype, at) / scale);
    fits = fits && std::isfinite(LoadFloat(&quotient, x.dtype, 0));
  });
  return fits;
}

Status CheckOptions(const LossScaleOptions& o) {
  const auto bad = [](const char* name, float value, const std::string& needs) {
    return OptionError(kKernel, name, value, needs);
  };
  if (!std::isfinite(o.most)) return bad("most", o.most, "a finite value");
  if (!(o.least > 0) || !(o.least <= o.most))
    return bad("least", o.least, "more than 0, up to most, " + TextOf(o.most));
  if (!(o.initial >= o.least && o.initial <= o.most))
    return bad("initial", o.initial, "least to most, " + TextOf(o.least) + " to " + TextOf(o.most));
  if (!(o.growth > 1)) return bad("growth", o.growth, "more than 1");
  if (!(o.backoff > 0 && o.backoff < 1)) return bad("backoff", o.backoff, "between 0 and 1");
  if (o.growth_interval >= 1) return {};
  return OptionError(kKernel, "growth_interval", o.growth_interval, "at least 1");
}

// Of any rank and shape.
Status CheckGradient(const Tensor& gradient, const std::string& name) {
  const Argument arg{kKernel, name.c_str(), gradient};
  if (gradient.rank > Tensor::kMaxRank)
    return arg.Error("has rank " + std::to_string(gradient.rank) + ", needs 1 to " +
                     std::to_string(Tensor::kMaxRank));
  std::array<Dim, Tensor::kMaxRank> dims;
  dims.fill({"any"});
  CUBIST_RETURN_IF_ERROR(
      CheckShape(arg, std::span(dims).first(static_cast<std::size_t>(std::max(gradient.rank, 0)))));
  CUBIST_RETURN_IF_ERROR(CheckDType(arg, kFloatTypes));
  CUBIST_RETURN_IF_ERROR(CheckStorage(arg, /*needs_data=*/true));
  return CheckWritable(arg);
}

}  // namespace

Status LossScaler::status() const { return CheckOptions(options_); }

Status LossScaler::Unscale(std::span<const Tensor> gradients, bool* apply) try {
  CUBIST_RETURN_IF_ERROR(status());
  if (apply == nullptr) return InvalidArgument(std::string(kKernel) + ": apply is a null pointer");
  for (std::size_t i = 0; i < gradients.size(); ++i)
    CUBIST_RETURN_IF_ERROR(CheckGradient(gradients[i], "gradients[" + std::to_string(i) + "]"));
  CUBIST_RETURN_IF_ERROR(CheckListApart(kKernel, "gradients", gradients));
  *apply = std::all_of(gradients.begin(), gradients.end(), [](const Tensor& g) { return IsFinite(g); });
  if (!*apply) {
    scale_ = std::max(scale_ * options_.backoff, options_.least);
    clean_steps_ = 0;
    return {};
  }
  if (scale_ < 1) {
    *apply = std::all_of(gradients.begin(), gradients.end(),
                         [this](const Tensor& g) { return FitsUnscaled(g, scale_); });
    if (!*apply) {
      clean_steps_ = 0;
      return {};
    }
  }
  for (const Tensor& g : gradients) {
    ForEachOffset(g, [&](std::int64_t at) {
      StoreFloat(g.data, g.dtype, at, LoadFloat(g.data, g.dtype, at) / scale_);
    });
  }
  if (++clean_steps_ == options_.growth_interval) {
    scale_ = std::min(scale_ * options_.growth, options_.most);
    clean_steps_ = 0;
  }
  return {};
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

}  // namespace cubist
