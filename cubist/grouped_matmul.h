// GroupedMatmul and its gradients.
#ifndef CUBIST_CUBIST_GROUPED_MATMUL_H_
#define CUBIST_CUBIST_GROUPED_MATMUL_H_

#include "kernels/grouped_matmul.h"

#endif  // CUBIST_CUBIST_GROUPED_MATMUL_H_
