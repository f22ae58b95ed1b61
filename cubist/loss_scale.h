// LossScaler.
#ifndef CUBIST_CUBIST_LOSS_SCALE_H_
#define CUBIST_CUBIST_LOSS_SCALE_H_

#include "kernels/loss_scale.h"

#endif  // CUBIST_CUBIST_LOSS_SCALE_H_
