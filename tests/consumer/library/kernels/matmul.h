// A folder of the project's own that is named as one of Cubist's.
#ifndef LIBRARY_KERNELS_MATMUL_H_
#define LIBRARY_KERNELS_MATMUL_H_

inline int OwnMatmul() { return 6 * 7; }

#endif  // LIBRARY_KERNELS_MATMUL_H_
