// RmsNorm and its gradient.
#ifndef CUBIST_CUBIST_RMS_NORM_H_
#define CUBIST_CUBIST_RMS_NORM_H_

#include "kernels/rms_norm.h"

#endif  // CUBIST_CUBIST_RMS_NORM_H_
