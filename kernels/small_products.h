// Small products that come again: a thread remembers what its last ones did (see Tape), so that a call of the same shapes,
// dtypes and strides costs its multiplications and hardly more.
#ifndef CUBIST_KERNELS_SMALL_PRODUCTS_H_
#define CUBIST_KERNELS_SMALL_PRODUCTS_H_

#include <cstdint>

#include "kernels/matmul.h"
#include "npu_model/launch.h"

namespace cubist {

ProductData DataOf(const MatmulArgs& args);

// Whether a valid product on a device may be remembered: a single one of two matrices on a host, without an epilogue, that
// takes so little time that what stands around its multiplications counts.
bool IsSmallProduct(const Device& device, const MatmulArgs& args, std::int64_t m, std::int64_t n,
                    std::int64_t k);

// What the calling thread remembers, and the tensors in the order in which the tape has them: a call that was turned around
// (c^T = b^T a^T) has those of a and b changed.
struct SmallProduct {
  const Tape* tape = nullptr;
  ProductData data;
};
// It has a tape if the thread remembers one and nothing is wrong with these arguments, until the next is kept.
SmallProduct FindSmallProduct(const Device& device, const MatmulArgs& args);
void KeepSmallProduct(const Device& device, const MatmulArgs& args, bool turned, Tape tape);

}  // namespace cubist

#endif  // CUBIST_KERNELS_SMALL_PRODUCTS_H_
