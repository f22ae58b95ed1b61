#!/bin/sh
# Who may include whom, and what a kernel file may not say.
#
#   check_includes.sh [ROOT]     ROOT: the source tree, by default the one this script is in
#
# Prints each violation as file:line: rule, and exits 1 if there is any. The rules stand in `allowed` and `text_rules`.
set -eu
root=${1:-$(dirname "$0")/..}
cd "$root" || exit 2

found=$(find npu_model tiling kernels cubist reference tests bench tools python \
             \( -name '*.h' -o -name '*.cc' -o -name '*.cpp' \) 2>/dev/null | LC_ALL=C sort)
if [ -z "$found" ]; then
  echo "check_includes: no source files in $(pwd)" >&2
  exit 2
fi

# File names of the tree hold no blanks.
# shellcheck disable=SC2086
awk '
  function report(rule) {
    print FILENAME ":" FNR ": " rule
    violations++
  }

  # Whether a header of ours is on the list of those that this file may see.
  function is_ours(header) { return header ~ /^(npu_model|tiling|kernels|cubist|reference|tests|bench|tools|python)\// }

  function check_include(header,   ours) {
    ours = is_ours(header)
    if (in_reference && ours && header !~ /^reference\// && header != "npu_model/types.h")
      report("reference/ sees only npu_model/types.h, not " header)
    if (in_tiling && ours && header !~ /^tiling\// && header !~ /^npu_model\/(types|cache|chip|line_slots|nearest|status|tile)\.h$/)
      report("tiling/ sees only npu_model/{types,cache,chip,line_slots,nearest,status,tile}.h, not " header)
    if (in_kernel_text && ours && header !~ /^npu_model\/(core|tile|types|pipeline|composites)\.h$/ &&
        header !~ /^tiling\// && header !~ /^kernels\/.*_kernel\.h$/)
      report("a *_kernel.h sees only npu_model/{core,tile,types,pipeline,composites}.h, tiling/ and other *_kernel.h, not " header)
    if ((in_kernel_text || in_public_kernel_header || in_face) && header ~ /^(hwy|tbb|oneapi)\//)
      report("a header in kernels/ or cubist/ includes no Highway and no TBB, not " header)
    if (in_npu_model && ours && header !~ /^npu_model\//)
      report("npu_model/ sees only itself, not " header)
    if (in_face && header ~ /^(reference|tests|bench|python)\//)
      report("cubist/ does not see " header)
    if (in_kernels && header ~ /^(cubist|reference|tools|python)\//)
      report("kernels/ does not see " header)
    if (in_kernels && !in_kernel_text && header ~ /^npu_model\/(host|trace)\//)
      report("kernels/ sees executors through npu_model/launch.h alone, not " header)
    # A peer of the benchmarks: its header has functions alone.
    is_peer = FILENAME ~ /^bench\// && header == "hwy/contrib/sort/vqsort.h"
    if (header ~ /^hwy\/(highway|foreach_target)\.h$|^hwy\/contrib\// && !may_use_simd && !is_peer)
      report("Highway SIMD headers belong in npu_model/host/{*.cc,*-inl.h} and tests, not " header)
    if (header ~ /^tests\// && FILENAME !~ /^tests\//)
      report("nothing but tests includes " header)
    if (header ~ /^bench\// && FILENAME !~ /^bench\//)
      report("nothing but benchmarks includes " header)
  }

  # A kernel is one text for both executors: it neither asks which one runs it nor names one.
  function check_kernel_text(line) {
    if (line ~ /if[ \t]+constexpr/)
      report("no `if constexpr` in a *_kernel.h")
    if (line ~ /^[ \t]*#[ \t]*(if|ifdef|elif|else)([^A-Za-z_]|$)/)
      report("no conditional compilation in a *_kernel.h")
    if (match(line, /(^|[^A-Za-z0-9_])(Host|Npu|HostCore|TraceCore|HostAiCore|TraceAiCore)([^A-Za-z0-9_]|$)/)) {
      name = substr(line, RSTART, RLENGTH)
      gsub(/[^A-Za-z0-9_]/, "", name)
      report("a *_kernel.h does not name an executor: " name)
    }
  }

  FNR == 1 {
    in_reference = FILENAME ~ /^reference\//
    in_tiling = FILENAME ~ /^tiling\//
    in_npu_model = FILENAME ~ /^npu_model\//
    in_kernels = FILENAME ~ /^kernels\//
    in_face = FILENAME ~ /^cubist\//
    in_kernel_text = FILENAME ~ /_kernels?\.h$/ && FILENAME !~ /^tests\//
    in_public_kernel_header = in_kernels && FILENAME ~ /\.h$/ && !in_kernel_text
    may_use_simd = FILENAME ~ /^npu_model\/host\/.*(\.cc|-inl\.h)$/ || FILENAME ~ /^tests\//
  }

  {
    line = $0
    sub(/\/\/.*/, "", line)  # Comments may say anything. No header name holds "//".
  }
  line ~ /^[ \t]*#[ \t]*include[ \t]*["<]/ {
    header = line
    sub(/^[ \t]*#[ \t]*include[ \t]*["<]/, "", header)
    sub(/[">].*/, "", header)
    check_include(header)
    next
  }
  in_kernel_text { check_kernel_text(line) }

  END { exit violations > 0 }
' $found
