// Tape: what the Cube cores of a small product did, to be done again for other tensors of the same shapes without walking
// the kernel: its SIMD bodies, with their operands as places in the product's tensors and in a core's scratch memory.
#ifndef CUBIST_NPU_MODEL_HOST_TAPE_H_
#define CUBIST_NPU_MODEL_HOST_TAPE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "npu_model/host/scratch.h"
#include "npu_model/host/tile_ops.h"

namespace cubist {

// Where the tensors of c = a b begin, plain or packed.
struct ProductData {
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
};

// One core's.
class CUBIST_EXPORT CoreTape {
 public:
  using Mmad = decltype(CubeOps::mmad_f32);
  using Pack = decltype(CubeOps::pack_b);

  // A core begins to work for a product in scratch memory that has just been reset.
  void Begin(const ProductData& data, const Scratch& scratch);
  // What it is about to do.
  void Note(Mmad mmad, const MmadArgs& args);
  void NotePack(bool of_b, Pack pack, DType dtype, std::int64_t rows, std::int64_t cols,
                const StridedSource& source, const void* dst, std::int64_t pitch);
  // Sums of an accumulator to a block of c, as StoreRows brings them there.
  void NoteStore(const VectorOps& ops, const Gm& dst, const Rows& sums);
  // It does what no tape holds.
  void Break() { whole_ = false; }
  void End();

  // Whether all that the core did is there.
  bool whole() const { return whole_ && ended_; }
  void Run(const ProductData& data, Scratch& scratch) const;

 private:
  // So many bytes from the beginning of an operand, or of the scratch memory.
  struct Place {
    bool in_scratch = false;
    std::int64_t offset = 0;
  };
  struct Step {
    Mmad mmad = nullptr;               // One of these three.
    const VectorOps* store = nullptr;  // Of `sums`, whose pitch is args.c_pitch, to `c`.
    Pack pack = nullptr;               // Of b, or of a, to `c`.
    MmadArgs args;                     // Without pointers.
    Place a, b, c, sums;
    bool packs_b = false;
    DType dtype = DType::kF32;
    std::int64_t rows = 0, cols = 0, pitch = 0, col_stride = 1;  // `pitch` from row to row of `c`.
  };
  Place PlaceOf(const void* pointer, const void* operand) const;
  // Null beyond the most steps that are worth their memory.
  Step* Next();

  static constexpr std::size_t kMostSteps = 32;
  std::vector<Step> steps_;
  const Scratch* scratch_ = nullptr;
  ProductData data_;
  std::int64_t scratch_bytes_ = 0;
  bool whole_ = true, ended_ = false;
};

// All cores' of a launch of one phase.
struct Tape {
  std::vector<CoreTape> cores;

  bool whole() const;
};

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_HOST_TAPE_H_
