#!/bin/sh
# Every installed header of cubist/ compiles alone, without warnings, without Highway and oneTBB, and soon.
#
#   headers.sh PREFIX WORK COMPILER
set -eu
prefix=$1 work=$2 compiler=$3
limit=1  # second of the compiler's own time, the best of three
mkdir -p "$work"
failed=0
for header in "$prefix"/include/cubist/*.h; do
  name=$(basename "$header")
  echo "#include \"cubist/$name\"" >"$work/one.cc"
  check() { $compiler -std=c++20 -Wall -Wextra -Wconversion -Werror -I"$prefix/include" -I"$prefix/include/cubist" "$@" "$work/one.cc"; }
  check -fsyntax-only || { echo "cubist/$name: does not compile alone"; failed=1; continue; }
  foreign=$(check -M | tr ' ' '\n' | grep -E '/(hwy|tbb|oneapi|fmt|nlohmann|CLI)/' | head -n 1) || true
  [ -z "$foreign" ] || { echo "cubist/$name: includes $foreign"; failed=1; }
  best=99
  for _ in 1 2 3; do
    seconds=$( { bash -c 'TIMEFORMAT=%U; time "$@"' time $compiler -std=c++20 -fsyntax-only -I"$prefix/include" \
      -I"$prefix/include/cubist" "$work/one.cc"; } 2>&1)
    best=$(echo "$best $seconds" | awk '{ print $1 < $2 ? $1 : $2 }')
    if [ "$(echo "$best $limit" | awk '{ print $1 < $2 }')" = 1 ]; then break; fi
  done
  echo "cubist/$name: $best s"
  [ "$(echo "$best $limit" | awk '{ print $1 < $2 }')" = 1 ] || { echo "cubist/$name: takes $limit s or more"; failed=1; }
done
# Of C too, and as C++.
echo '#include "cubist/c.h"' >"$work/one.c"
${CC:-cc} -std=c11 -Wall -Wextra -pedantic -Werror -fsyntax-only -I"$prefix/include" "$work/one.c" || failed=1
# The kernels that are public here are those of cubist/cubist.h.
for header in "$prefix"/include/cubist/kernels/*.h; do
  grep -q 'Device& device.*Args& args' "$header" || continue
  $compiler -std=c++20 -MM -I"$prefix/include" -I"$prefix/include/cubist" "$prefix/include/cubist/cubist.h" |
    grep -q "kernels/$(basename "$header")" || { echo "cubist/cubist.h lacks kernels/$(basename "$header")"; failed=1; }
done
exit $failed
