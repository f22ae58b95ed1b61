// What Route, its gradient and the blocks that run them check of the options.
#ifndef CUBIST_KERNELS_ROUTE_OPTIONS_H_
#define CUBIST_KERNELS_ROUTE_OPTIONS_H_

#include <cstdint>

#include "kernels/route.h"
#include "kernels/validate.h"
#include "npu_model/status.h"

namespace cubist {

// The first option that is wrong for `top_k` of `experts`, as an error of `kernel`; `backward` needs a weighting's gradient.
Status CheckRouteOptions(const char* kernel, const RouteOptions& options, std::int64_t experts,
                         std::int64_t top_k, bool backward);

// A selection bias of numbers below infinity, or -inf.
Status CheckSelectionBias(const Argument& bias);

}  // namespace cubist

#endif  // CUBIST_KERNELS_ROUTE_OPTIONS_H_
