#!/bin/sh
# Every installed header of cubist/ compiles alone, without warnings, without Highway and oneTBB, and within a second.
#
#   headers.sh PREFIX WORK COMPILER
set -eu
prefix=$1 work=$2 compiler=$3
include="-I$prefix/include"
mkdir -p "$work"
failed=0

fail() {
  echo "$1"
  failed=1
}

# The compiler's own time for one.cc with these options; what it says is in log.
seconds() {
  bash -c 'TIMEFORMAT=%U; log=$1; shift; time "$@" 2>"$log"' time "$work/log" \
    $compiler -std=c++20 -fsyntax-only "$@" "$work/one.cc" 2>&1
}

less() { awk "BEGIN { exit !($1 < $2) }"; }

# A machine that is busy, or slower, has as much more time as these take there: 0.45 s where a second is a second.
printf '#include <%s>\n' algorithm functional map memory mutex string vector >"$work/one.cc"
limit=$(seconds | awk '{ print ($1 > 0.45 ? $1 / 0.45 : 1) }')

for header in "$prefix"/include/cubist/*.h; do
  name=cubist/$(basename "$header")
  echo "#include \"$name\"" >"$work/one.cc"
  for attempt in 1 2 3; do
    # -H names the files that were read.
    # shellcheck disable=SC2086
    if ! time=$(seconds -Wall -Wextra -Wconversion -Werror -H $include); then
      grep -v '^\.' "$work/log" || true
      fail "$name: does not compile alone"
      break
    fi
    if less "$time" "$limit"; then break; fi
    [ "$attempt" -lt 3 ] || fail "$name: takes $time s, $limit s are allowed"
  done
  foreign=$(grep -E -m 1 '^\.+ .*/(hwy|tbb|oneapi|fmt|nlohmann|CLI)/' "$work/log") || true
  [ -z "$foreign" ] || fail "$name: includes $foreign"
  echo "$name: $time s of $limit s"
done

# By one path: a folder of the user's that is named as one of ours is not looked into.
other=$(grep -rE '^ *# *include *"' "$prefix/include/cubist" | grep -v 'include "cubist/') || true
[ -z "$other" ] || fail "not by its path below cubist/: $other"

# cubist/c.h, with every initialiser as a constant and as a value, in each language that takes it, by Clang too where it is.
{
  echo '#include "cubist/c.h"'
  sed -e ':join' -e '/\\$/ { N; s/\\\n *//; b join' -e '}' "$prefix/include/cubist/c.h" |
    sed -n 's/^#define \(CUBIST_[A-Z_]*\) *CUBIST_INITIAL(\([a-z_]*\),.*/\2 constant_\2 = \1; size_t use_\2(void); size_t use_\2(void) { const \2 value = \1; return value.size; }/p'
} >"$work/initial.h"
[ "$(grep -c constant_ "$work/initial.h")" -eq "$(grep -c '^  size_t size;' "$prefix/include/cubist/c.h")" ] ||
  fail "cubist/c.h: a struct with a size lacks its initialiser"
for language in c11 c17 c++17 c++20; do
  case $language in
    c++*) type=c++ compilers="$compiler clang++" ;;
    *) type=c compilers="${CC:-cc} clang" ;;
  esac
  for one in $compilers; do
    command -v "$one" >/dev/null || continue
    # shellcheck disable=SC2086
    "$one" -x "$type" -std="$language" -Wall -Wextra -Wpedantic -Wconversion -Werror $include -fsyntax-only "$work/initial.h" ||
      fail "cubist/c.h: is not $language without warnings of $one"
  done
done

# Every public kernel is in cubist/cubist.h.
echo '#include "cubist/cubist.h"' >"$work/one.cc"
# shellcheck disable=SC2086
$compiler -std=c++20 -MM $include "$work/one.cc" >"$work/all"
for header in $(grep -l '^CUBIST_EXPORT Status [A-Za-z]*(const Device& device, const [A-Za-z]*Args& args' "$prefix"/include/cubist/kernels/*.h); do
  grep -q "kernels/$(basename "$header")" "$work/all" || fail "cubist/cubist.h lacks kernels/$(basename "$header")"
done
exit $failed
