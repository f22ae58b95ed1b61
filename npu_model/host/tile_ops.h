// The seam between the host executor and SIMD: tables of instruction bodies, one table per Highway target.
//
// The *_ops.cc, and the *-inl.h, which they share, are the only files that include Highway; cube_bf16_avx512.cc and
// cube_bf16_amx.cc hold the native bf16 bodies. Everything here is plain pointers, sizes and strides in elements. Nothing is
// allocated, nothing fails.
#ifndef CUBIST_NPU_MODEL_HOST_TILE_OPS_H_
#define CUBIST_NPU_MODEL_HOST_TILE_OPS_H_

#include <cstdint>

#include "npu_model/instruction.h"
#include "npu_model/types.h"

namespace cubist {

// An operand block in memory as the caller has it: element (i, j) at data + i * row_stride + j * col_stride.
struct StridedSource {
  const void* data = nullptr;
  std::int64_t row_stride = 0, col_stride = 1;
};

// A matrix of floats, or of another dtype where a function says so.
struct Rows {
  void* data = nullptr;
  std::int64_t pitch = 0;  // elements
  std::int64_t rows = 0, cols = 0;
  bool stream = false;  // Written with non-temporal stores, by the functions that say so.
};

// In which order tiles of C are made: row by row; column by column, where A stays near and B does not; or column by column and
// a piece of k at a time, where B comes from memory and strips of A are few (with more, or with `adds`, by columns).
enum class MmadWalk : std::uint8_t { kRows, kColumns, kPieces };
constexpr std::int64_t kFewStrips = 4;

// c (m, n) (+)= a (m, k) * b (k, n), fp32 accumulation in ascending k.
//
// a: row-major, element (i, p) at a + i * a_pitch + p.
// b: panels of nr columns, b_panel_stride elements apart. Inside a panel element (p, j) stands at
//      p * nr + j                         for float operands,
//      (p / 2) * 2 * nr + 2 * j + p % 2   for native bf16 ("VNNI pairs"); an odd last k is padded with zeros. Not so in
//    a: nothing is read behind its rows.
//    The columns of the last panel beyond n are zero.
//    Or, where b_source has data, b is null and element (p, j) of type b_type stands as b_source says, whose
//    row_stride or col_stride is 1; in panels of such rows where b_panel_stride is not 0, of 16-bit elements that are
//    multiplied as floats.
// c: row-major. Where `exact` is not set more than n columns may be written, and read: each row has room for
//    RoundUp(n, nr) elements.
struct MmadArgs {
  std::int64_t m = 0, n = 0, k = 0;
  const void* a = nullptr;
  std::int64_t a_pitch = 0;
  const void* b = nullptr;
  std::int64_t b_panel_stride = 0;
  StridedSource b_source = {};
  DType b_type = DType::kF32;
  float* c = nullptr;
  std::int64_t c_pitch = 0;
  bool exact = false;
  MmadWalk walk = MmadWalk::kRows;
  MmadStart start = MmadStart::kZero;
  const float* bias = nullptr;  // kBias: n elements, added to every row
  const float* sums =
      nullptr;  // kAdd: what c starts from, with room as c has without `exact`; null: from c itself
  std::int64_t sums_pitch = 0;
  bool adds = false;  // kZero: c += a * b, the product summed before it is added. Where b lies in panels.
  // Where CubeOps::casts_bf16: c is of c_type, and this, as VectorOps::cast, makes it from sums that
  // stand in L1. What c is added to stands in `sums`.
  void (*cast)(const Rows& dst, DType dst_type, const Rows& src, DType src_type, bool stream) = nullptr;
  DType c_type = DType::kF32;
  bool stream = false;
};

struct CubeOps {
  const char* target = "";  // Highway's name of the SIMD target
  std::int64_t mr = 0;      // rows of the register tile
  std::int64_t nr = 0;      // its columns, which is the width of a B panel
  bool native_bf16 =
      false;         // bf16 operands stay 16 bits wide (in pairs of k); otherwise they are widened to float
  bool amx = false;  // And multiplied in the tile registers of AMX.

  // (m, k) of the source to row-major `dst` of operand elements: float for fp32 and fp16, BF16 or float for bf16. Any
  // strides, quick where either is 1.
  void (*pack_a)(DType dtype, std::int64_t m, std::int64_t k, const StridedSource& src, void* dst,
                 std::int64_t pitch);
  // (k, n) of the source to panels, as MmadArgs says; the last panel is zero-padded. Any strides, quick where either is 1.
  void (*pack_b)(DType dtype, std::int64_t k, std::int64_t n, const StridedSource& src, void* dst,
                 std::int64_t panel_stride);
  // The same, with non-temporal stores where a vector is a line and panels begin at one. They are visible to other threads
  // after FlushStreams.
  void (*stream_pack_b)(DType dtype, std::int64_t k, std::int64_t n, const StridedSource& src, void* dst,
                        std::int64_t panel_stride);

  void (*mmad_f32)(const MmadArgs& args);  // float operands
  // Native bf16 operands; null where not native_bf16. AMX keeps its bits where k is cut at multiples of HostChip()'s
  // mmad.k_bytes, the second one wherever it is.
  void (*mmad_bf16)(const MmadArgs& args);
  void (*mmad_bf16_any_cut)(const MmadArgs& args);
  // Whether mmad_bf16 can hand its sums on by MmadArgs::cast; null: it never does.
  bool (*casts_bf16)(const MmadArgs& args) = nullptr;

  // Ceilings: run independent register-resident multiply-adds for `rounds` rounds, return how many were done.
  std::int64_t (*peak_fma)(std::int64_t rounds);
  std::int64_t (*peak_dot_bf16)(std::int64_t rounds);  // null where not native_bf16
};

// Bodies of the Vector instructions of core.h. Sources and destination may coincide. Column tiles are (rows, 1).
struct VectorOps {
  const char* target = "";
  void (*fill)(const Rows& x, float value);
  void (*scalar)(ScalarOp op, const Rows& dst, const Rows& a, float value);
  // b has the shape of a, or is (rows, 1) and broadcast over the columns, or (1, cols) and broadcast over the rows.
  void (*binary)(BinaryOp op, const Rows& dst, const Rows& a, const Rows& b);
  void (*unary)(UnaryOp op, const Rows& dst, const Rows& a);
  void (*reduce)(ReduceOp op, const Rows& dst,
                 const Rows& a);  // dst is (rows, 1), maybe the first column of a
  // Float types to float types, to nearest even. With `stream`, non-temporal stores where alignment allows; they are
  // visible to other threads after FlushStreams.
  void (*cast)(const Rows& dst, DType dst_type, const Rows& src, DType src_type, bool stream);
  // See ExpandSoftmaxStep in composites.h. p has dtype p_type.
  void (*softmax_step)(const Rows& p, DType p_type, const Rows& s, const Rows& m_new, const Rows& m_old,
                       const Rows& l, float scale);
  void (*mul_add)(const Rows& acc, const Rows& factor,
                  const Rows& x);  // factor (rows, 1) or the shape of acc
  // `rows` rows of `bytes` bytes. With `stream`, non-temporal stores for all but the unaligned ends.
  void (*copy)(void* dst, std::int64_t dst_stride_bytes, const void* src, std::int64_t src_stride_bytes,
               std::int64_t rows, std::int64_t bytes, bool stream);

  // Ceilings of memory: read `bytes` (returns a checksum), or fill them with non-temporal stores of a non-zero pattern.
  std::uint64_t (*stream_read)(const void* data, std::int64_t bytes);
  void (*stream_write)(void* data, std::int64_t bytes, std::uint64_t pattern);
};

// Orders the calling thread's non-temporal stores before whatever it stores next. One per core, not one per row: it
// waits for the write buffers to drain.
CUBIST_EXPORT void FlushStreams();

// The tables of the best target that the CPU has (or that hwy::SetSupportedTargetsForTest left). Cheap, not cached.
CUBIST_COMMAND_EXPORT const CubeOps& BestCubeOps();
const VectorOps& BestVectorOps();

}  // namespace cubist

#endif  // CUBIST_NPU_MODEL_HOST_TILE_OPS_H_
