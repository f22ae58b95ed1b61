#include "cubist/version.h"

namespace cubist {

const char* Version() { return CUBIST_VERSION_STRING; }

}  // namespace cubist
