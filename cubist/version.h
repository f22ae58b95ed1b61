// The version of the headers, for C and C++ and their preprocessors, and of the library that runs. Here alone: builds, packages
// and Python read it. The library's interface is the same within a minor version, before 1.0.
#ifndef CUBIST_CUBIST_VERSION_H_
#define CUBIST_CUBIST_VERSION_H_

#include "npu_model/export.h"

#define CUBIST_VERSION_MAJOR 0
#define CUBIST_VERSION_MINOR 1
#define CUBIST_VERSION_PATCH 0

// 1.2.3 is 10203: #if CUBIST_VERSION >= 200, from 0.2.0 on.
#define CUBIST_VERSION (CUBIST_VERSION_MAJOR * 10000 + CUBIST_VERSION_MINOR * 100 + CUBIST_VERSION_PATCH)

// "0.1.0"
#define CUBIST_VERSION_STRING \
  CUBIST_VERSION_TEXT(CUBIST_VERSION_MAJOR, CUBIST_VERSION_MINOR, CUBIST_VERSION_PATCH)
#define CUBIST_VERSION_TEXT(major, minor, patch) CUBIST_VERSION_WORDS(major, minor, patch)
#define CUBIST_VERSION_WORDS(major, minor, patch) #major "." #minor "." #patch

#ifdef __cplusplus
namespace cubist {

// CUBIST_VERSION_STRING of the library.
CUBIST_EXPORT const char* Version();

}  // namespace cubist
#endif

#endif  // CUBIST_CUBIST_VERSION_H_
