// Of a product whose B lies where the caller has it: parts of its columns, the sums they start from, its elements.
// Included once per Highway target, after foreach_target.h.
#include <cstddef>
#include <cstdint>

#include "npu_model/host/cube_bf16.h"
#include "npu_model/host/tile_ops.h"

#if defined(CUBIST_NPU_MODEL_HOST_IN_PLACE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUBIST_NPU_MODEL_HOST_IN_PLACE_INL_H_
#undef CUBIST_NPU_MODEL_HOST_IN_PLACE_INL_H_
#else
#define CUBIST_NPU_MODEL_HOST_IN_PLACE_INL_H_
#endif

#include "hwy/highway.h"
#include "npu_model/host/packing-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

// A B of so many bytes is near once it has been met: it is not asked for, nor kept where a tile reads its rows as quickly as a
// panel. 64 x 64 x 64 floats: .978 of a Zen 4's peak for .950. Rows of a panel of floats are two lines, which the machine's own
// prefetching finds where it is met for the first time; those of 16-bit elements, met by a strip alone, are asked for. Four times
// as many bytes that were not near after all, values of attention by parts, gave half of what asking gives; near, 1.05 of it.
constexpr std::int64_t kNearB = 64 << 10;

// Whether B's rows lie in panels.
inline bool InPanels(const MmadArgs& args) { return args.b_panel_stride != 0; }

// Where the sums of columns from `col` on start: for the first words of k, or for later ones.
template <class T>
void StartAt(const MmadArgs& args, std::int64_t col, bool first, MmadTile<T>* tile) {
  tile->start = args.c + col, tile->start_pitch = args.c_pitch;
  if (!first) return;
  if (args.start == MmadStart::kZero) tile->start = nullptr;
  if (args.start == MmadStart::kBias) tile->start = args.bias + col, tile->start_pitch = 0;
  if (args.start == MmadStart::kAdd && args.sums != nullptr)
    tile->start = args.sums + col, tile->start_pitch = args.sums_pitch;
}

// The columns of a product from `col` on.
inline MmadArgs ColumnsFrom(MmadArgs args, std::int64_t col) {
  args.n -= col, args.c += col;
  args.b_source.data = static_cast<const std::byte*>(args.b_source.data) +
                       col * args.b_source.col_stride * SizeOf(args.b_type);
  args.exact = args.exact || col % kNr != 0;  // A panel from there on reaches beyond the room of C.
  if (args.bias != nullptr) args.bias += col;
  if (args.sums != nullptr) args.sums += col;
  return args;
}

// B of a tile of floats whose B has other elements.
template <class E>
const E* SourceOf(const MmadTile<float>& tile) {
  return reinterpret_cast<const E*>(tile.b);
}

// B's elements, of the source's type, as floats.
template <class E>
HWY_INLINE hn::Vec<FloatTag> LoadFew(const E* p) {
  return hn::BitCast(FloatTag(), LoadWords(p));
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#endif  // CUBIST_NPU_MODEL_HOST_IN_PLACE_INL_H_
