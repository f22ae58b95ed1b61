// The version of the library that runs, and of the headers.
#ifndef CUBIST_CUBIST_VERSION_H_
#define CUBIST_CUBIST_VERSION_H_

#include "npu_model/export.h"

namespace cubist {

// "0.1.0"; the library's interface is the same within 0.1.
CUBIST_EXPORT const char* Version();

}  // namespace cubist

#endif  // CUBIST_CUBIST_VERSION_H_
