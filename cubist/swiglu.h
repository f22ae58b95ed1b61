// SwiGlu and its gradient.
#ifndef CUBIST_CUBIST_SWIGLU_H_
#define CUBIST_CUBIST_SWIGLU_H_

#include "kernels/swiglu.h"

#endif  // CUBIST_CUBIST_SWIGLU_H_
