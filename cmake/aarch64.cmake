# For Debian's cross compiler (g++-aarch64-linux-gnu), the libraries of its arm64 architecture, and qemu-user.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
# Without -L: the loader has to be that of arm64's own libc. The cross compiler's may be older, and threads never start.
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64)
