// What tests of the host's Vector core share: tiles with values, and values of tiles.
#ifndef CUBIST_TESTS_NPU_MODEL_HOST_VECTOR_RIG_H_
#define CUBIST_TESTS_NPU_MODEL_HOST_VECTOR_RIG_H_

#include "tests/npu_model/host_rig.h"

namespace cubist::host_test {

inline constexpr Shape kVectorShapes[] = {{1, 1}, {4, 1}, {1, 40}, {5, 17}, {3, 64}, {7, 33}};

class HostVectorTest : public SimdTargetTest {
 protected:
  // A tile of the matrix's values, three columns and one row into a larger tile.
  UbTile<float> TileOf(const GmMatrix& values) {
    const Gm gm = values.gm();
    const auto tile = NewTile<Buffer::kUB, float>(rig_.vector, gm.rows + 2, gm.cols + 5)
                          .Part({1, gm.rows + 1}, {3, gm.cols + 3});
    rig_.vector.Load(tile, gm);
    return tile;
  }
  // A column in a ring of columns, as kernels keep row statistics.
  UbTile<float> ColumnOf(const GmMatrix& values) {
    const auto tile = NewTile<Buffer::kUB, float>(rig_.vector, values.gm().rows, 1);
    rig_.vector.Load(tile, values.gm());
    return tile;
  }
  template <class T>
  Values ValuesOf(UbTile<T> tile) {
    GmMatrix out(DTypeOf<T>(), tile.rows(), tile.cols());
    rig_.vector.Store(out.gm(), tile);
    return out->ToDoubles();
  }
  template <class T>
  UbTile<T> IntsOf(const std::vector<T>& values, std::int64_t rows = 1) {
    const std::int64_t cols = rows == 0 ? 0 : static_cast<std::int64_t>(values.size()) / rows;
    GmMatrix in(DTypeOf<T>(), rows, cols);
    for (std::size_t i = 0; i < values.size(); ++i) {
      in->set({static_cast<std::int64_t>(i) / cols, static_cast<std::int64_t>(i) % cols},
              static_cast<double>(values[i]));
    }
    const auto tile = NewTile<Buffer::kUB, T>(rig_.vector, rows + 1, cols + 3).Part({0, rows}, {0, cols});
    rig_.vector.Load(tile, in.gm());
    return tile;
  }

  HostRig rig_;
  HostVectorCore& vector_ = rig_.vector;
  Random random_;
};

}  // namespace cubist::host_test

#endif  // CUBIST_TESTS_NPU_MODEL_HOST_VECTOR_RIG_H_
