#!/bin/sh
# A shared library of Cubist shows names of Cubist alone, has a version in its name, and needs none that it does not link.
set -eu
library=$1
others=$(nm -DC --defined-only "$library" | cut -c 20- |
  grep -v -E '^(cubist_|cubist::|(typeinfo|typeinfo name|vtable|guard variable|TLS (init|wrapper) function|non-virtual thunk) (for|to) cubist::)' |
  grep -v -E '^[a-z].* cubist::|^(auto|void|bool|double|int|decltype).*cubist::' || true)
if [ -n "$others" ]; then
  echo "$library shows names that are not Cubist's:"
  echo "$others" | head -n 20
  exit 1
fi
readelf -d "$library" | grep SONAME | grep -E 'libcubist\.so\.[0-9]+\.[0-9]+\]'
