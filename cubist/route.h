// Route and its gradient.
#ifndef CUBIST_CUBIST_ROUTE_H_
#define CUBIST_CUBIST_ROUTE_H_

#include "kernels/route.h"

#endif  // CUBIST_CUBIST_ROUTE_H_
