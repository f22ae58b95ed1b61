// The Cube instructions of core.h with their types, in front of an executor: shapes and dtypes are checked here.
#ifndef CUBIST_NPU_MODEL_CUBE_FRONT_H_
#define CUBIST_NPU_MODEL_CUBE_FRONT_H_

#include <cstdint>
#include <type_traits>
#include <utility>

#include "npu_model/core.h"
#include "npu_model/instruction.h"
#include "npu_model/location.h"
#include "npu_model/tile.h"

namespace cubist {

// The typed front of a Cube core. `E` is an executor: it has one untyped method per instruction.
template <class E>
class CubeFront : protected E {
 public:
  using E::Allocate;
  using E::count;
  using E::E;
  using E::index;

  template <OperandType T>
  void Load(const L1Tile<T>& dst, const Gm& src, Loc loc = Loc::current()) {
    SameShape(dst, src);
    CUBIST_CHECK(src.dtype() == DTypeOf<T>(), "Load to L1 does not convert");
    E::LoadL1(dst, src, loc);
  }
  template <OperandType T>
  void Load(const L1Tile<T>& dst, const PackedGm& src, Loc loc = Loc::current()) {
    CUBIST_CHECK(dst.rows() == src.row_part.size() && dst.cols() == src.col_part.size(), "shapes differ");
    CUBIST_CHECK(src.dtype == DTypeOf<T>(), "Load to L1 does not convert");
    E::LoadL1Packed(dst, src, loc);
  }
  template <OperandType T>
  void Store(const PackedGm& dst, const L1Tile<T>& src, Loc loc = Loc::current()) {
    CUBIST_CHECK(src.rows() == dst.row_part.size() && src.cols() == dst.col_part.size(), "shapes differ");
    E::StorePacked(dst, src, loc);
  }
  template <OperandType T>
  void Load(const L0ATile<T>& dst, const L1Tile<T>& src, Loc loc = Loc::current()) {
    Load(dst, src, Transpose::kNo, loc);
  }
  template <OperandType T>
  void Load(const L0BTile<T>& dst, const L1Tile<T>& src, Loc loc = Loc::current()) {
    Load(dst, src, Transpose::kNo, loc);
  }
  template <OperandType T>
  void Load(const L0ATile<T>& dst, const L1Tile<T>& src, Transpose transpose, Loc loc = Loc::current()) {
    OperandShape(dst, src, transpose);
    E::LoadL0A(dst, src, transpose, loc);
  }
  template <OperandType T>
  void Load(const L0BTile<T>& dst, const L1Tile<T>& src, Transpose transpose, Loc loc = Loc::current()) {
    OperandShape(dst, src, transpose);
    E::LoadL0B(dst, src, transpose, loc);
  }
  void Load(const BtTile<float>& dst, const Gm& row, Loc loc = Loc::current()) {
    SameShape(dst, row);
    E::LoadBias(dst, row, loc);
  }
  template <OperandType T>
  void Mmad(const L0CTile<float>& c, const L0ATile<T>& a, const L0BTile<T>& b, Accumulate accumulate,
            Loc loc = Loc::current()) {
    ProductShape(c, a, b);
    E::Mmad(c, a, b, accumulate == Accumulate::kYes ? MmadStart::kAdd : MmadStart::kZero, TileRef(), loc);
  }
  template <OperandType T>
  void Mmad(const L0CTile<float>& c, const L0ATile<T>& a, const L0BTile<T>& b, const BtTile<float>& bias,
            Loc loc = Loc::current()) {
    ProductShape(c, a, b);
    CUBIST_CHECK(bias.cols() == c.cols(), "bias and accumulator differ in width");
    E::Mmad(c, a, b, MmadStart::kBias, bias, loc);
  }
  void Store(const Gm& dst, const L0CTile<float>& src, Loc loc = Loc::current()) {
    Store(dst, src, Accumulate::kNo, loc);
  }
  void Store(const Gm& dst, const L0CTile<float>& src, Accumulate accumulate, Loc loc = Loc::current()) {
    Store(dst, src, FixOptions{accumulate}, loc);
  }
  void Store(const Gm& dst, const L0CTile<float>& src, const FixOptions& options, Loc loc = Loc::current()) {
    SameShape(dst, src);
    CUBIST_CHECK(options.accumulate == Accumulate::kNo || dst.dtype() == DType::kF32,
                 "Store adds to fp32 memory alone");
    E::StoreL0C(dst, src, options, loc);
  }
  // What no phase of the launch has written: the scalar unit's cache does not see other cores' stores.
  std::int64_t ReadScalar(const Gm& src, std::int64_t j, Loc loc = Loc::current()) {
    CUBIST_CHECK(src.rows == 1 && j >= 0 && j < src.cols && !IsFloat(src.dtype()) && !src.tensor->writable,
                 "ReadScalar reads an integer of an input");
    return E::ReadGmInt(src.Cols({j, j + 1}), loc);
  }
  // What loops take that plan or deal, where there are more of their steps than instructions: those have their own time.
  void Spend(std::int64_t steps, Loc loc = Loc::current()) { E::Spend(steps, loc); }

  void Send(const HandOverTile<float>& dst, const L0CTile<float>& src, Loc loc = Loc::current()) {
    SameShape(dst, src);
    E::Send(dst, src, loc);
  }

 private:
  template <class X, class Y>
  static void SameShape(const X& x, const Y& y) {
    const auto shape = [](const auto& v) {
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(v)>, Gm>) {
        return std::pair(v.rows, v.cols);
      } else {
        return std::pair(v.rows(), v.cols());
      }
    };
    CUBIST_CHECK(shape(x) == shape(y), "shapes differ");
  }
  static void OperandShape(const TileRef& dst, const TileRef& src, Transpose transpose) {
    const bool turned = transpose == Transpose::kYes;
    CUBIST_CHECK(
        dst.rows() == (turned ? src.cols() : src.rows()) && dst.cols() == (turned ? src.rows() : src.cols()),
        "shapes differ");
  }
  static void ProductShape(const TileRef& c, const TileRef& a, const TileRef& b) {
    CUBIST_CHECK(c.rows() == a.rows() && c.cols() == b.cols() && a.cols() == b.rows(),
                 "shapes do not multiply");
  }
};

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_CUBE_FRONT_H_
