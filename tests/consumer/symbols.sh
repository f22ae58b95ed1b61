#!/bin/sh
# The shared library shows what installed headers mark (npu_model/export.h), what the command needs besides, and nothing
# else; all of it is there; what those headers declare and others define is marked, what their inline functions call is
# shown. The library has a version in its name.
#
#   symbols.sh LIBRARY PREFIX SOURCE WORK COMPILER
set -eu
library=$1 prefix=$2 source=$3 work=$4 compiler=$5
rm -rf "$work"
mkdir -p "$work"
failed=0

# none FILE TEXT: it has no line.
none() {
  [ -s "$1" ] || return 0
  echo "$2:"
  head -n 20 "$1"
  failed=1
}

# What headers declare at the scope of a namespace: "class MARK name::" or "function MARK name(", MARK none without one.
declared() {
  awk '
    FNR == 1 { depth = 0; space = head = ""; interface = 0 }
    { sub(/\/\/.*/, ""); gsub(/\/\*.*\*\//, ""); gsub(/{}/, "") }
    /^#pragma GCC visibility/ { interface = /push/ }
    /^#/ || /^ *\/?\*/ || /^ *$/ { next }
    /^namespace .*{/ { outer[++depth] = space; if (NF > 2) space = space $2 "::"; next }
    /^}/ { if (block) block = 0; else if (depth > 0) space = outer[depth--]; next }
    head != "" || /^[A-Za-z_[]/ {
      head = head " " $0
      if (!match(head, /[;{]/)) next
      text = substr(head, 2, RSTART - 2)
      ends = substr(head, RSTART, 1)
      head = ""
      block = ends == "{" && !/}/  # Until a line that begins with }.
      mark = interface ? "CUBIST_EXPORT" : match(text, /CUBIST_[A-Z_]*EXPORT/) ? substr(text, RSTART, RLENGTH) : "none"
      gsub(/CUBIST_[A-Z_]*EXPORT |\[\[[a-z]*\]\] /, "", text)
      if (text ~ /^(class|struct) /) {
        split(text, words, " ")
        print "class", mark, space words[2] "::"
      } else if (ends == ";" && match(text, /[A-Za-z_0-9]+\(/) &&
                 text !~ /^(template|inline|constexpr|static|using|typedef|extern|friend)/) {
        print "function", mark, space substr(text, RSTART, RLENGTH)
      }
    }' "$@"
}

# The command's own headers, cubist/command.h and tools/, are not the library's.
# shellcheck disable=SC2046
declared $(find "$prefix/include/cubist" -name '*.h' ! -path '*/tools/*' ! -name command.h) >"$work/installed"
# shellcheck disable=SC2046
declared $(cd "$source" && find npu_model tiling kernels -name '*.h' | sed "s|^|$source/|") >"$work/tree"
{
  grep ' CUBIST_EXPORT ' "$work/installed"
  grep ' CUBIST_COMMAND_EXPORT ' "$work/tree"
} | cut -d ' ' -f 3 | sort -u >"$work/marked"
nm -DC --defined-only "$library" | cut -c 20- | sed 's/\[abi:cxx11\]//; /^cubist_/s/$/(/' | sort >"$work/shown"

# A name of `marked` begins each that is shown, whole as it is, and something begins with each of them.
awk 'NR == FNR { marked[$0]; next }
  { begin = ""
    for (at = 0; match(substr($0, at + 1), /::|\(/);) {
      at += RSTART + RLENGTH - 1
      if (substr($0, 1, at) in marked) begin = substr($0, 1, at)
      if (substr($0, at, 1) == "(") break
    }
    print begin == "" ? "unmarked" : "shown", begin == "" ? $0 : begin }' "$work/marked" "$work/shown" >"$work/met"
grep '^unmarked' "$work/met" >"$work/unmarked" || true
none "$work/unmarked" "$library shows what no header marks"
sed -n 's/^shown //p' "$work/met" | sort -u | comm -13 - "$work/marked" >"$work/missing"
none "$work/missing" "$library lacks what headers mark"
# The instructions' SIMD bodies are the executors' own.
grep '^function none' "$work/installed" | grep -v -E 'cubist::(Best[A-Za-z]*Ops|trace::AccessOf)\(' >"$work/lost" || true
none "$work/lost" "installed headers declare functions without a mark"

# With -fkeep-inline-functions what inline functions call is called; members of the cores' templates, of every instruction.
cat >"$work/all.cc" <<'END'
#include "cubist/c.h"
#include "cubist/cubist.h"
#include "cubist/machine.h"
template class cubist::CubeFront<cubist::HostCube>;
template class cubist::CubeFront<cubist::trace::TraceCube>;
template class cubist::VectorFront<cubist::HostVector>;
template class cubist::VectorFront<cubist::trace::TraceVector>;
int main() {}
END
keep=-fkeep-inline-functions
echo 'int main() {}' >"$work/none.cc"
$compiler -Werror $keep "$work/none.cc" -o "$work/none" 2>/dev/null || keep=
# shellcheck disable=SC2086
$compiler -std=c++20 $keep "-I$prefix/include" "$work/all.cc" "$library" -o "$work/all" 2>"$work/log" || {
  echo "inline functions call what $library hides:"
  grep -o 'undefined reference to .*' "$work/log" | sort -u | head -n 20 || head -n 20 "$work/log"
  failed=1
}

count() { grep -c -F -x -f "$work/$1" "$work/met" || true; }
grep ' CUBIST_COMMAND_EXPORT ' "$work/tree" | sed 's/^[a-z]* [A-Z_]* /shown /' | sort -u >"$work/command"
all=$(wc -l <"$work/shown")
command=$(count command)
echo "$all names: $((all - command)) of the interface, $command for the command"
readelf -d "$library" | grep SONAME | grep -E 'libcubist\.so\.[0-9]+\.[0-9]+\]'
exit $failed
