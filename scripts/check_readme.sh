#!/bin/sh
# The README's first C++ block must be tests/readme/example.cc to the letter.
set -eu
cd "$(dirname "$0")/.."
awk '/^```cpp$/ { on = 1; next } /^```$/ { if (on) exit } on' README.md | diff - tests/readme/example.cc
