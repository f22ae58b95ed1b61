#include "scaled_add.h"

#include <algorithm>
#include <compare>
#include <vector>

#include "scaled_add_kernel.h"

namespace own {
namespace {

using cubist::Argument, cubist::Buffer, cubist::ChipSpec, cubist::DType, cubist::Status;

struct ScaledAddShape {
  std::int64_t rows = 0, cols = 0;
  DType dtype = DType::kF32;
  friend auto operator<=>(const ScaledAddShape&, const ScaledAddShape&) = default;
};

// What tuning files call the sizes and the choices.
template <class Visit>
void VisitFields(const ScaledAddShape& s, Visit&& visit) {
  visit({"rows"}, s.rows), visit({"cols"}, s.cols), visit({"dtype"}, s.dtype);
}
template <class Tiling, class Visit>
void VisitFields(const ChipSpec&, const ScaledAddShape&, Tiling& t, Visit&& visit) {
  visit({"rows"}, t.rows), visit({"stages", 1, 64}, t.stages);
}
void Complete(const ScaledAddShape& s, ScaledAddTiling& t) { t.tiles = cubist::CeilDiv(s.rows, t.rows); }

// What the kernel's rings take of a buffer: errors and ChooseCheapest ask for it.
std::int64_t BufferBytes(const ChipSpec& chip, const ScaledAddShape& s, const ScaledAddTiling& t,
                         Buffer buffer) {
  return buffer == Buffer::kUB ? t.stages * (2 * chip.SlotBytes(Buffer::kUB, DType::kF32, t.rows, s.cols) +
                                             chip.SlotBytes(Buffer::kUB, s.dtype, t.rows, s.cols))
                               : 0;
}

bool Fits(const ChipSpec& chip, const ScaledAddShape& s, const ScaledAddTiling& t) {
  return cubist::FitsBuffers(chip, s, t);
}

std::vector<ScaledAddTiling> AllTilings(const ChipSpec&, const ScaledAddShape& s) {
  std::vector<ScaledAddTiling> all;
  for (const std::int64_t rows : cubist::TileSizes({1, 2, 4, 8, 16, 32, 64}, 1, s.rows)) {
    for (const int stages : {1, 2}) {
      all.push_back({.rows = rows, .stages = stages});
      Complete(s, all.back());
    }
  }
  return all;
}

std::vector<ScaledAddTiling> Candidates(const ChipSpec& chip, const ScaledAddShape& s) {
  std::vector<ScaledAddTiling> all = AllTilings(chip, s);
  std::erase_if(all, [&](const ScaledAddTiling& t) { return !Fits(chip, s, t); });
  return all;
}

// Cycles of the busiest core.
double Price(const ChipSpec& chip, const ScaledAddShape& s, const ScaledAddTiling& t) {
  const double bytes = static_cast<double>(t.rows * s.cols * cubist::SizeOf(s.dtype));
  const double load = cubist::PathCycles(chip, cubist::Path::kGmToUb, 2 * bytes, 2);
  const double store = cubist::PathCycles(chip, cubist::Path::kUbToGm, bytes, 1);
  return cubist::Waves(chip, t.tiles) * cubist::Overlap(chip, t.stages > 1, {load, store});
}

Status Choose(const ChipSpec& chip, const ScaledAddShape& s, ScaledAddTiling* tiling) {
  return cubist::ChooseCheapest(chip, s, &AllTilings, tiling);
}

Status Validate(const cubist::Device& device, const ScaledAddArgs& args) {
  const Argument x{"scaled_add", "x", args.x}, y{"scaled_add", "y", args.y},
      out{"scaled_add", "out", args.out};
  CUBIST_RETURN_IF_ERROR(CheckShape(x, {{"M"}, {"N"}}));
  CUBIST_RETURN_IF_ERROR(CheckDType(x, {DType::kF32, DType::kBF16, DType::kF16}));
  for (const Argument* arg : {&y, &out}) {
    CUBIST_RETURN_IF_ERROR(CheckShape(*arg, {{"M, of x", args.x.size(0)}, {"N, of x", args.x.size(1)}}));
    CUBIST_RETURN_IF_ERROR(CheckDType(*arg, {args.x.dtype}));
  }
  return CheckTensors(device, {&x, &y}, {&out});
}

}  // namespace

Status ScaledAdd(const cubist::Device& device, const ScaledAddArgs& args, cubist::Profile* profile) {
  CUBIST_RETURN_IF_ERROR(Validate(device, args));
  const ScaledAddShape shape{args.x.size(0), args.x.size(1), args.x.dtype};
  ScaledAddTiling tiling;
  CUBIST_RETURN_IF_ERROR(cubist::ChooseFor(device, "scaled_add", shape, &Candidates, &tiling));
  cubist::Launch launch(device, "scaled_add");
  ScaledAddOperands g;
  g.x = MatrixOf(*launch.Input("x", args.x));
  g.y = MatrixOf(*launch.Input("y", args.y));
  g.out = MatrixOf(*launch.Output("out", args.out));
  g.alpha = args.alpha;
  cubist::WithFloatType(args.x.dtype, [&]<class T>(T) {
    launch.OnVectorCores(tiling.tiles, [&](auto& core) { ScaledAddKernel<T>(core, g, tiling); });
  });
  return launch.Finish(profile);
}

}  // namespace own
