// `cubist info`: what this machine is to the library, and which chips it knows.
#ifndef CUBIST_TOOLS_INFO_H_
#define CUBIST_TOOLS_INFO_H_

namespace cubist {

// Exit status 0.
int InfoCommand();

}  // namespace cubist

#endif  // CUBIST_TOOLS_INFO_H_
