#include "kernels/small_products.h"

#include <algorithm>
#include <utility>

#include "kernels/packed_input.h"
#include "tiling/memo.h"

namespace cubist {
namespace {

// A tensor but for where it is.
struct Layout {
  Layout() = default;
  template <class AnyTensor>
  explicit Layout(const AnyTensor& t) : dtype(t.dtype), rank(t.rank), sizes(t.sizes), strides(t.strides) {}

  friend bool operator==(const Layout&, const Layout&) = default;

  DType dtype = DType::kF32;
  int rank = 0;
  ConstTensor::Sizes sizes{}, strides{};
};

// All of a call's arguments but where its tensors are, as far as IsPlain leaves them open.
struct Key {
  Key(const ChipSpec& host, const MatmulArgs& args)
      : chip(&host),
        a(args.a),
        b(args.packed_b.given() ? Layout(args.packed_b.memory()) : Layout(args.b)),
        c(args.c),
        packed_rows(args.packed_b.rows),
        packed_cols(args.packed_b.cols),
        packed_matrices(args.packed_b.matrices),
        packed_dtype(args.packed_b.dtype),
        packed_side(args.packed_b.side),
        transpose_a(args.transpose_a),
        transpose_b(args.transpose_b),
        accumulate(args.accumulate),
        any_order(args.any_order) {}

  friend bool operator==(const Key&, const Key&) = default;

  const ChipSpec* chip;  // One for each SIMD target and number of cores.
  Layout a, b, c;
  std::int64_t packed_rows, packed_cols, packed_matrices;
  DType packed_dtype;
  Side packed_side;
  bool transpose_a, transpose_b, accumulate, any_order;
};

struct Known {
  Tape tape;
  bool turned = false;
  PackedStamp packed_b;  // Where b is packed.
  std::int64_t a_bytes = 0, b_bytes = 0, c_bytes = 0;
};

Memo<Key, Known>& Products() {
  thread_local Memo<Key, Known> products;
  return products;
}

bool IsPlain(const Device& device, const MatmulArgs& args) {
  return device.kind() == Device::Kind::kHost && device.tuning() == nullptr && device.status().ok() &&
         args.c.rank == 2 && args.a.rank == 2 && args.b.rank == (args.packed_b.given() ? 0 : 2) &&
         IsFloat(args.c.dtype) && !args.packed_a.given() && !args.bias.given() && !args.residual.given() &&
         args.alpha == 1 && args.activation == Activation::kNone;
}

bool IsAligned(const void* data, DType dtype) {
  return data != nullptr &&
         (reinterpret_cast<std::uintptr_t>(data) & static_cast<std::uintptr_t>(SizeOf(dtype) - 1)) == 0;
}

// Whether so many bytes of each have none in common.
bool AreApart(const void* x, std::int64_t x_bytes, const void* y, std::int64_t y_bytes) {
  const auto at_x = reinterpret_cast<std::uintptr_t>(x), at_y = reinterpret_cast<std::uintptr_t>(y);
  return at_x + static_cast<std::uintptr_t>(x_bytes) <= at_y ||
         at_y + static_cast<std::uintptr_t>(y_bytes) <= at_x;
}

}  // namespace

ProductData DataOf(const MatmulArgs& args) {
  return {args.a.data, args.packed_b.given() ? args.packed_b.data : args.b.data, args.c.data};
}

bool IsSmallProduct(const Device& device, const MatmulArgs& args, std::int64_t m, std::int64_t n,
                    std::int64_t k) {
  // About 0.3 ms of one thread of a fast machine, in which all that is around the multiplications is less than one percent.
  constexpr std::int64_t kMostProducts = std::int64_t{1} << 25, kMostSize = std::int64_t{1} << 20;
  // Known by where they begin, which has to be their lowest byte.
  const auto ascends = [](const ConstTensor& t) { return t.origin() == 0; };
  const bool small = std::max({m, n, k}) <= kMostSize && std::min({m, n, k}) > 0 &&
                     std::max(m, n) * k <= kMostProducts / std::min(m, n);
  return small && IsPlain(device, args) && ascends(args.a) && ascends(args.b) && ascends(args.c);
}

// What depends on where tensors are is checked again. Tensors whose bytes are not simply apart may be valid all the same:
// then the call is made as if it were the first.
SmallProduct FindSmallProduct(const Device& device, const MatmulArgs& args) {
  if (!IsPlain(device, args)) return {};
  const Known* const known = Products().Find(Key(device.chip_of_call(), args));
  if (known == nullptr) return {};
  const ProductData data = DataOf(args);
  const bool ready =
      IsAligned(data.a, args.a.dtype) && IsAligned(data.c, args.c.dtype) &&
      (args.packed_b.given() ? known->packed_b.IsOn(args.packed_b) : IsAligned(data.b, args.b.dtype)) &&
      AreApart(data.c, known->c_bytes, data.a, known->a_bytes) &&
      AreApart(data.c, known->c_bytes, data.b, known->b_bytes);
  if (!ready) return {};
  return {&known->tape, known->turned ? ProductData{data.b, data.a, data.c} : data};
}

void KeepSmallProduct(const Device& device, const MatmulArgs& args, bool turned, Tape tape) {
  const Key key(device.chip_of_call(), args);
  const PackedStamp stamp = args.packed_b.given() ? PackedStamp(device, args.packed_b) : PackedStamp();
  const auto bytes = [](const ConstTensor& t) { return t.extent() * SizeOf(t.dtype); };
  const ConstTensor b = args.packed_b.given() ? args.packed_b.memory() : args.b;
  Products().Keep(key, {std::move(tape), turned, stamp, bytes(args.a), bytes(b), bytes(args.c)});
}

}  // namespace cubist
