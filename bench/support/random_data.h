// Benchmark data: random, never zero (stores of zeros are faster than of anything else), written before it is
// used (a fresh page costs a fault), and kept for the process, so that all libraries and repetitions share
// it.
#ifndef CUBIST_BENCH_SUPPORT_RANDOM_DATA_H_
#define CUBIST_BENCH_SUPPORT_RANDOM_DATA_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "npu_model/types.h"

namespace cubist::bench {

// Owned memory at a page boundary, on huge pages where there are any.
class Bytes {
 public:
  explicit Bytes(std::int64_t size);
  char* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(char* data) const;
  };
  std::unique_ptr<char, Free> data_;
};

// `count` elements of a float type, uniform in (-1, 1) without zero.
void FillRandom(void* data, DType dtype, std::int64_t count, std::uint64_t seed);
Bytes RandomBytes(DType dtype, std::int64_t count, std::uint64_t seed = 1);

// Random bits, for what only moves.
Bytes RandomBits(std::int64_t size, std::uint64_t seed = 1);

// Up to `count` different numbers below `limit`, ascending, 0 and limit - 1 among them; the others differ
// from process to process.
std::vector<std::int64_t> Sample(std::int64_t limit, std::int64_t count);

}  // namespace cubist::bench

#endif  // CUBIST_BENCH_SUPPORT_RANDOM_DATA_H_
