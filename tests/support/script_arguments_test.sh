#!/bin/sh
# Scripts refuse arguments that they do not know, before they install anything. A package manager that notes its calls, and has
# nothing installed, stands in for Debian's.
#
#   script_arguments_test.sh TREE
set -eu
cd "$1"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for name in apt-get sudo; do printf '#!/bin/sh\necho "$0 $*" >>"%s/called"\n' "$work" >"$work/$name"; done
printf '#!/bin/sh\nexit 1\n' >"$work/dpkg-query"
chmod +x "$work/apt-get" "$work/sudo" "$work/dpkg-query"

# refused MESSAGE COMMAND..
refused() {
  message=$1
  shift
  status=0
  PATH="$work:$PATH" "$@" >"$work/out" 2>&1 || status=$?
  if [ $status -ne 2 ] || ! grep -qF -e "$message" "$work/out" || [ -e "$work/called" ]; then
    echo "$*: expected exit code 2, '$message' and nothing installed; got $status,"
    cat "$work/out" "$work/called" 2>/dev/null || true
    exit 1
  fi
}

refused "lint: there is no '--al'; it takes --quick --all" scripts/lint --al
refused "lint: there is no 'tools'; it takes --quick --all" scripts/lint --all tools
refused "ci-full: there is no 'BADNAME'; it takes lint asan" scripts/ci-full BADNAME
refused "ci-full: there is no 'lnt'; it takes lint asan" scripts/ci-full docs lnt
refused "sanitize: there is no 'asan'; it takes no arguments" scripts/sanitize asan
refused "docs.sh: there is no '--chek'; it takes --check" scripts/docs.sh --chek
