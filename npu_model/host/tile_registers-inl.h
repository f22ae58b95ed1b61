// The walks of a Mmad over the tile registers of AMX, which need more of both operands at a time than vector registers do.
// Included once per Highway target by cube_ops.cc, after foreach_target.h.
#include <cstddef>
#include <cstdint>

#include "npu_model/host/cube_bf16.h"
#include "npu_model/host/tile_ops.h"

#if defined(CUBIST_NPU_MODEL_HOST_TILE_REGISTERS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CUBIST_NPU_MODEL_HOST_TILE_REGISTERS_INL_H_
#undef CUBIST_NPU_MODEL_HOST_TILE_REGISTERS_INL_H_
#else
#define CUBIST_NPU_MODEL_HOST_TILE_REGISTERS_INL_H_
#endif

#include "npu_model/host/mmad-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cubist {
namespace HWY_NAMESPACE {
namespace {

// Tiles of sixteen rows and more take as many operands as multiply-adds are quick: at 32 x 32, 64 bytes a cycle, twice what L2
// gives. So one operand of each tile has to stand in L1.
//
// Where B stays in L2 and a strip of A in L1, strips are outermost: B passes once for each (MmadTile::b_passes). 512 x 512 x 512
// on a Granite Rapids, two Mmads: .57 of the peak, 1.2 to 1.35 times as fast as the other way. Not for sums that stay with the
// core: scores of attention took 1.03 to 1.08 times as long, for no reason found.
//
// Else k passes by pieces of which a panel of B, read once, stays in L1 while the strips of A go by it, as many as have room for
// their sums beside it: they stay in L2 while all of B passes. What lies behind the piece is asked for meanwhile, a part by each
// strip: 1.13 times as fast where B comes from L3. Rows of A that share sets of L1 cost nothing, as none of their lines is met
// twice. 256 x 512 x 1024, B in L3: .43 of the peak, .34 with all of k at once.
template <class T, int kTileRows>
class MmadNear {
 public:
  MmadNear(const MmadArgs& args, const MmadTiles<T, kTileRows>& tiles)
      : args_(args),
        tiles_(tiles),
        panels_(args.n, kNr),
        in_strips_(RoundDown(args.m, std::int64_t{kTileRows})),
        c_bytes_(SizeOf(args.c_type)) {
    tile_.a_pitch = args.a_pitch, tile_.adds = args.adds;
    tile_.prefetch_step = kNr * 4;
  }

  void Run() {
    if (StripsStay()) {
      StripByStrip();
    } else {
      PieceByPiece();
    }
    LastRows();
  }

 private:
  static constexpr std::int64_t kPerWord = 4 / sizeof(T), kBytes = sizeof(T);
  static constexpr std::int64_t kWords = 128, kRows = 256;  // Of a piece, and of A that stays in L2.
  static constexpr std::int64_t kStripBytes = 48 << 10, kMostOfB = 512 << 10, kFetchedB = 128 << 10;

  // Whether strips of A, all of k long, stay in L1 and B in L2. Lines in rows a multiple of 2 KiB apart have too few sets of it.
  bool StripsStay() const {
    constexpr std::int64_t kNoPitch = 2 << 10;
    return args_.exact && !args_.adds && args_.a_pitch * kBytes % kNoPitch != 0 &&
           args_.k * kBytes * kTileRows <= kStripBytes && BytesOfB() <= kMostOfB;
  }
  std::int64_t BytesOfB() const { return panels_.count() * args_.k * kNr * kBytes; }

  void StripByStrip() {
    tile_.b_passes = true;
    const bool fetches = BytesOfB() > kFetchedB;
    for (const Range strip : Split(in_strips_, kTileRows)) {
      for (std::int64_t panel = 0; panel < panels_.count(); ++panel) {
        FindB(panel, 0);
        tile_.prefetch = tile_.b + args_.b_panel_stride;
        const bool follows = strip.begin == 0 && panel + 1 < panels_.count();
        tile_.prefetch_words = fetches && follows ? CeilDiv(args_.k, kPerWord) : 0;
        Multiply(strip, panels_[panel], {0, args_.k}, sums_);
      }
    }
  }

  void PieceByPiece() {
    // What is added is one sum over all of k, and a strip alone finds nothing in L1 twice.
    const bool whole = args_.adds || args_.m <= kTileRows;
    const auto pieces = AtLeastOnce(Split(args_.k, whole ? args_.k : kWords * kPerWord));
    for (const Range group : Split(in_strips_, kRows)) {
      const std::int64_t strips = group.size() / kTileRows;
      for (std::int64_t panel = 0; panel < panels_.count(); ++panel) {
        for (const Range k : pieces) {
          FindB(panel, k.begin);
          const std::int64_t words = CeilDiv(k.size(), kPerWord), asks = CeilDiv(words, strips);
          for (std::int64_t i = 0; i < strips; ++i) {
            const std::int64_t row = i * kTileRows;
            tile_.prefetch = tile_.b + (words + i * asks) * kNr * kPerWord, tile_.prefetch_words = asks;
            Multiply({group.begin + row, group.begin + row + kTileRows}, panels_[panel], k,
                     sums_ + row * kNr);
          }
        }
      }
    }
  }

  // Rows that fill no strip set the registers anew, which takes hundreds of cycles: once, and for all of k at a time.
  void LastRows() {
    tile_.b_passes = false;
    for (std::int64_t panel = 0; in_strips_ < args_.m && panel < panels_.count(); ++panel) {
      FindB(panel, 0);
      tile_.prefetch = tile_.b + args_.b_panel_stride, tile_.prefetch_words = CeilDiv(args_.k, kPerWord);
      Multiply({in_strips_, args_.m}, panels_[panel], {0, args_.k}, sums_);
    }
  }

  void FindB(std::int64_t panel, std::int64_t k) {
    tile_.b = static_cast<const T*>(args_.b) + panel * args_.b_panel_stride + k * kNr;
  }

  // A tile of C times a piece of k: its sums stand in `own`, as rows of a panel, until the last one.
  void Multiply(const Range& m, const Range& n, const Range& k, float* own) {
    alignas(64) float bias[kNr];
    const bool ends = k.end == args_.k;
    tile_.rows = m.size(), tile_.words = k.size() / kPerWord, tile_.half = k.size() % kPerWord != 0;
    tile_.a = static_cast<const T*>(args_.a) + m.begin * args_.a_pitch + k.begin;
    tile_.start = own, tile_.start_pitch = kNr;
    if (k.begin == 0) StartOf(args_, m, n, bias, &tile_);
    tile_.asks = ends && !args_.adds ? PlaceOf(m, n) : nullptr;
    tile_.asks_bytes = n.size() * c_bytes_, tile_.asks_pitch = args_.c_pitch * c_bytes_;
    const ColumnsTiles<T> tiles = TilesOf(tiles_.panel, n);
    const auto function = tiles.OfRows(m.size());
    if (!ends || args_.cast != nullptr) {
      tile_.c = own, tile_.c_pitch = kNr;
      function(tile_);
      if (ends) Cast(m, n, own);
      return;
    }
    tile_.c = args_.c + m.begin * args_.c_pitch + n.begin, tile_.c_pitch = args_.c_pitch;
    if (args_.exact && n.size() < tiles.width)
      return MmadEdge<kTileRows>(function, m.size(), n.size(), tile_);
    function(tile_);
  }

  void Cast(const Range& m, const Range& n, float* own) const {
    std::byte* const c = PlaceOf(m, n);
    if (args_.c_type == DType::kBF16 &&
        tiles_.to_bf16(own, m.size(), n.size(), reinterpret_cast<BF16*>(c), args_.c_pitch, args_.stream))
      return;
    args_.cast({c, args_.c_pitch, m.size(), n.size()}, args_.c_type, {own, kNr, m.size(), n.size()},
               DType::kF32, args_.stream);
  }
  std::byte* PlaceOf(const Range& m, const Range& n) const {
    return reinterpret_cast<std::byte*>(args_.c) + (m.begin * args_.c_pitch + n.begin) * c_bytes_;
  }

  const MmadArgs& args_;
  const MmadTiles<T, kTileRows>& tiles_;
  const Split panels_;
  const std::int64_t in_strips_, c_bytes_;
  MmadTile<T> tile_;
  alignas(64) float sums_[kRows * kNr];
};

// For tiles whose instructions need so much of B at a time that its lines would come one by one: B a slab at a time, packed into
// L2 in runs that are long enough for the machine's own prefetching, then multiplied. Asked for line by line, 32 x 64 bytes of
// B come at the pace of L1's fill buffers: one row of A at .28 of the read bandwidth.
constexpr std::int64_t kSlabK = 128, kSlabN = 512;          // Where each row of B is one run of memory,
constexpr std::int64_t kTallSlabK = 1024, kTallSlabN = 64;  // and where each column is.

// The longest k of one slab. Sums of more than one stand in C, which is of fp32 then.
constexpr std::int64_t SlabK(const StridedSource& b) { return b.col_stride == 1 ? kSlabK : kTallSlabK; }

template <class T, int kTileRows>
void MmadBySlabs(const MmadArgs& args, const MmadTiles<T, kTileRows>& tiles, decltype(CubeOps::pack_b) pack) {
  constexpr std::int64_t kPerWord = static_cast<std::int64_t>(4 / sizeof(T));
  constexpr std::int64_t kApart = 4 * kNr * kPerWord;  // Or panels would be written to the same sets of L1.
  constexpr std::int64_t kSpace = kSlabN / kNr * (kSlabK * kNr + kApart);
  static_assert(kTallSlabN / kNr * (kTallSlabK * kNr + kApart) <= kSpace);
  alignas(64) std::byte slab[kSpace * sizeof(T)];
  const StridedSource& source = args.b_source;
  const bool in_rows = source.col_stride == 1;
  MmadArgs part = args;
  part.b = slab, part.b_source = {};
  for (const Range n : Split(args.n, in_rows ? kSlabN : kTallSlabN)) {
    auto* const c = reinterpret_cast<std::byte*>(args.c) + n.begin * SizeOf(args.c_type);
    part.n = n.size(), part.c = reinterpret_cast<float*>(c);
    part.start = args.start, part.bias = args.bias == nullptr ? nullptr : args.bias + n.begin;
    part.sums = args.sums == nullptr ? nullptr : args.sums + n.begin;
    for (const Range k : AtLeastOnce(Split(args.k, SlabK(source)))) {
      const std::int64_t first = k.begin * source.row_stride + n.begin * source.col_stride;
      part.k = k.size(), part.a = static_cast<const T*>(args.a) + k.begin;
      part.b_panel_stride = RoundUp(k.size(), kPerWord) * kNr + kApart;
      pack(args.b_type, k.size(), n.size(),
           {static_cast<const std::byte*>(source.data) + first * SizeOf(args.b_type), source.row_stride,
            source.col_stride},
           slab, part.b_panel_stride);
      MmadNear(part, tiles).Run();
      part.start = MmadStart::kAdd, part.sums = nullptr;
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cubist
HWY_AFTER_NAMESPACE();

#endif  // CUBIST_NPU_MODEL_HOST_TILE_REGISTERS_INL_H_
