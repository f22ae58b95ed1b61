// Reads of a matrix and nothing else, as somebody measured them: which tiles cores read, in which order.
#ifndef CUBIST_TOOLS_VALIDATION_READ_KERNEL_H_
#define CUBIST_TOOLS_VALIDATION_READ_KERNEL_H_

#include <cstdint>

#include "npu_model/core.h"
#include "npu_model/tile.h"

namespace cubist {

// Whose rows a core reads: its own share; or all shares, from the first, or from its own one.
enum class ReadRows : std::uint8_t { kOwn, kAll, kAllFromOwn };

struct Reads {
  std::int64_t rows = 0, cols = 0;       // of a tile
  std::int64_t slices = 1, repeats = 1;  // of the columns, each read so often before the next
  ReadRows whose = ReadRows::kOwn;
};

// load(tile of GM), in the order of `core`.
template <class Core, class Load>
void ForEachRead(const Core& core, const Gm& matrix, const Reads& r, Load load) {
  const auto shares = Split(matrix.rows, CeilDiv(matrix.rows, core.count()));
  const std::int64_t first = r.whose == ReadRows::kAll ? 0 : core.index();
  const std::int64_t count = r.whose == ReadRows::kOwn ? 1 : shares.count();
  for (const Range slice : Split(matrix.cols, CeilDiv(matrix.cols, r.slices))) {
    for (std::int64_t repeat = 0; repeat < r.repeats; ++repeat) {
      for (std::int64_t i = 0; i < count; ++i) {
        for (const Range rows : Split(shares[(first + i) % shares.count()], r.rows)) {
          for (const Range cols : Split(slice, r.cols)) load(matrix.Block(rows, cols));
        }
      }
    }
  }
}

template <VectorCore Core>
void ReadIntoUb(Core& core, const Gm& matrix, const Reads& r) {
  Ring<Buffer::kUB, F16> tiles(core, "read_ub", r.rows, r.cols, 1);
  ForEachRead(core, matrix, r, [&](const Gm& tile) { core.Load(tiles.Next(tile.rows, tile.cols), tile); });
}

template <CubeCore Core>
void ReadIntoL1(Core& core, const Gm& matrix, const Reads& r) {
  Ring<Buffer::kL1, F16> tiles(core, "read_l1", r.rows, r.cols, 1, Role::kA);
  ForEachRead(core, matrix, r, [&](const Gm& tile) { core.Load(tiles.Next(tile.rows, tile.cols), tile); });
}

}  // namespace cubist

#endif  // CUBIST_TOOLS_VALIDATION_READ_KERNEL_H_
