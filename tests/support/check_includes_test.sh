#!/bin/sh
# Proves that check_includes.sh names a violation of every rule, and nothing in a tree that keeps them all.
#
#   check_includes_test.sh CHECK SCRATCH     CHECK: the script; SCRATCH: a directory that may be emptied
set -eu
check=$1
tree=$2/check_includes_tree
status=0

write() {  # write FILE TEXT: TEXT with \n for line ends
  mkdir -p "$(dirname "$tree/$1")"
  printf "$2\n" > "$tree/$1"
}

write_clean_tree() {
  rm -rf "$tree"
  write npu_model/types.h '#include <cstdint>'
  write npu_model/core.h '#include "npu_model/tile.h"'
  write npu_model/launch.h '#include "npu_model/host/host_core.h"'
  write npu_model/host/cube_ops.cc '#include "hwy/foreach_target.h"\n#include "hwy/highway.h"'
  write npu_model/host/launch.cc '#include <tbb/task_arena.h>\n#include "hwy/targets.h"'
  write tiling/x_tiling.h '#include "npu_model/chip.h"\n#include "tiling/block_order.h"'
  write kernels/x.h '#include "npu_model/device.h"\n#if 1\n#endif'
  write kernels/x.cc '#include "npu_model/launch.h"\n#include "kernels/x_kernel.h"'
  write kernels/x_kernel.h '#ifndef X\n#define X\n#include "npu_model/core.h"  // On the Npu, #if anywhere.\n#include "tiling/x_tiling.h"\n#include "kernels/y_kernel.h"\nint HostSide, Npus;\n#endif'
  write reference/x.cc '#include "reference/x.h"\n#include "npu_model/types.h"\n#include <vector>'
  write tests/x_test.cc '#include "hwy/highway.h"\n#include "tests/support/matrix.h"\n#include "reference/x.h"'
  write bench/x_bench.cc '#include "bench/support/peaks.h"\n#include "kernels/x.h"'
}

# expect FILE TEXT LINE RULE: a tree whose only fault is TEXT in FILE fails, naming FILE:LINE and RULE, in one line.
expect() {
  write_clean_tree
  write "$1" "$2"
  if output=$(sh "$check" "$tree"); then
    echo "not noticed: $1: $2"
    status=1
  elif [ "$(printf '%s\n' "$output" | wc -l)" -ne 1 ] || [ "${output#"$1:$3: "}" = "$output" ] ||
       [ "${output#*"$4"}" = "$output" ]; then
    printf 'expected one line "%s:%s: ..%s", got:\n%s\n' "$1" "$3" "$4" "$output"
    status=1
  fi
}

write_clean_tree
if ! output=$(sh "$check" "$tree"); then
  printf 'a clean tree is refused:\n%s\n' "$output"
  status=1
fi

expect reference/y.cc '#include <cmath>\n#include "npu_model/status.h"' 2 'reference/ sees only'
expect reference/y.h '#include "kernels/x.h"' 1 'reference/ sees only'
expect tiling/y_tiling.cc '\n#include "npu_model/core.h"' 2 'tiling/ sees only'
expect tiling/y_tiling.h '#include "kernels/x.h"' 1 'tiling/ sees only'
expect kernels/y_kernel.h '#include "npu_model/host/host_core.h"' 1 'a *_kernel.h sees only'
expect kernels/y_kernel.h '#include "npu_model/trace/trace_core.h"' 1 'a *_kernel.h sees only'
expect kernels/y_kernel.h '#  include "kernels/x.h"' 1 'a *_kernel.h sees only'
expect kernels/y_kernel.h '#include <hwy/base.h>' 1 'includes no Highway'
expect kernels/y_kernel.h '#include <tbb/parallel_for.h>' 1 'no TBB'
expect kernels/y_kernel.h 'int x;\nif constexpr (HasUb<C>) {' 2 'if constexpr'
expect kernels/y_kernel.h '#ifndef Y\n#if NPU\n#endif' 2 'conditional compilation'
expect kernels/y_kernel.h '#ifdef NPU' 1 'conditional compilation'
expect kernels/y_kernel.h '#ifndef Y\n#else\n#endif' 2 'conditional compilation'
for name in Host Npu HostCore TraceCore HostAiCore TraceAiCore; do
  expect kernels/y_kernel.h "template <class C>\nvoid F($name& core);" 2 "does not name an executor: $name"
done
expect kernels/y.h '#include "hwy/targets.h"' 1 'includes no Highway'
expect kernels/y.h '#include "oneapi/tbb.h"' 1 'no TBB'
expect kernels/y.cc '#include "hwy/highway.h"' 1 'Highway SIMD headers belong'
expect kernels/y.cc '#include "reference/x.h"' 1 'kernels/ does not see'
expect kernels/y.cc '#include "npu_model/host/tape.h"' 1 'kernels/ sees executors through'
expect kernels/y.h '#include "npu_model/trace/record.h"' 1 'kernels/ sees executors through'
expect tools/y_kernels.h '#include "npu_model/launch.h"' 1 'a *_kernel.h sees only'
expect npu_model/host/y.h '#include "hwy/highway.h"' 1 'Highway SIMD headers belong'
expect npu_model/trace/y.cc '#include <hwy/foreach_target.h>' 1 'Highway SIMD headers belong'
expect bench/y_bench.cc '#include "hwy/contrib/math/math-inl.h"' 1 'Highway SIMD headers belong'
expect npu_model/y.cc '#include "tiling/x_tiling.h"' 1 'npu_model/ sees only itself'
expect kernels/y.cc '#include "tests/support/matrix.h"' 1 'nothing but tests includes'
expect bench/y_bench.cc '#include "tests/support/matrix.h"' 1 'nothing but tests includes'
expect tests/y_test.cc '#include "bench/support/peaks.h"' 1 'nothing but benchmarks includes'
expect tools/main.cc '#include "bench/support/peaks.h"' 1 'nothing but benchmarks includes'

rm -rf "$tree"
mkdir -p "$tree"
if sh "$check" "$tree" 2> /dev/null; then
  echo "a tree without sources is accepted"
  status=1
fi
exit $status
