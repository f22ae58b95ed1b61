// The `cubist` command line with kernels of one's own beside the library's: link cubist::command.
//
//   int main(int argc, char** argv) {
//     const cubist::Status status = cubist::RegisterKernel(
//         {"scaled_add", "ROWSxCOLS", "4096x7168", "50x33", 2}, &MakeScaledAdd);
//     return status.ok() ? cubist::CommandMain(argc, argv) : 2;
//   }
//
// `check`, `profile`, `tune`, `sweep` and `bench` know it by that name then.
#ifndef CUBIST_CUBIST_COMMAND_H_
#define CUBIST_CUBIST_COMMAND_H_

#include "tools/kernel_call.h"

namespace cubist {

// Runs the command that the arguments name. The result is the exit status: 0, 1 where a check failed, 2 where the input
// is bad.
int CommandMain(int argc, char** argv);

}  // namespace cubist

#endif  // CUBIST_CUBIST_COMMAND_H_
