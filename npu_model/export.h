/* What the shared library shows: everything else is hidden. In C too. */
#ifndef CUBIST_NPU_MODEL_EXPORT_H_
#define CUBIST_NPU_MODEL_EXPORT_H_

/* The interface: a function, or a class with all that is not inline. In installed headers alone. */
#define CUBIST_EXPORT __attribute__((visibility("default")))

/* No interface: what cubist::command, which is built with the library, needs besides. */
#define CUBIST_COMMAND_EXPORT CUBIST_EXPORT

#endif /* CUBIST_NPU_MODEL_EXPORT_H_ */
