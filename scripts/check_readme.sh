#!/bin/sh
# The README's first C++ block must be tests/readme/example.cc to the letter, the changelog's top of the headers' version.
set -eu
cd "$(dirname "$0")/.."
awk '/^```cpp$/ { on = 1; next } /^```$/ { if (on) exit } on' README.md | diff - tests/readme/example.cc

version=$(awk '/^#define CUBIST_VERSION_(MAJOR|MINOR|PATCH) / { printf "%s%s", dot, $3; dot = "." }' cubist/version.h)
top=$(grep -m 1 '^## ' CHANGELOG.md)
case $top in
  '## [Unreleased]' | "## [$version]"*) ;;
  *)
    echo "CHANGELOG.md begins with '$top', needs [Unreleased] or [$version], the version of cubist/version.h"
    exit 1
    ;;
esac
