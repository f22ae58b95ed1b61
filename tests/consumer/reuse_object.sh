#!/bin/sh
# A compiler launcher: takes an object of the build tree CUBIST_BUILT, where the same source was compiled with the same
# flags; compiles otherwise. So a parent project shows how it builds Cubist without building it once more.
set -eu
last= object= source=
for word in "$@"; do
  case $last in
    -o) object=$word ;;
    -c) source=$word ;;
  esac
  last=$word
done
# A command without what names the output, and without precompiled headers, which are this build tree's alone.
flags() { sed -e 's/ -Winvalid-pch//' -e 's/\( -Xclang\)* -include\(-pch\)*\( -Xclang\)* [^ ]*cmake_pch[^ ]*//g' -e 's/ -o [^ ]*//' -e 's/ -M[TF] [^ ]*//g' -e 's/ -MD//' -e 's/ *$//' -e 's/.*\(c++\|g++\|clang++\)[^ ]* //'; }
built=$(grep -F "\"command\": " "$CUBIST_BUILT/compile_commands.json" | grep -F -- " -c $source\"" |
  sed -e 's/^ *"command": "//' -e 's/",\{0,1\}$//' | head -n 1) || true
if [ -n "$object" ] && [ -n "$built" ] && [ "$(echo "$built" | flags)" = "$(echo "$*" | flags)" ]; then
  other=$CUBIST_BUILT/$(echo "$built" | sed -e 's/.* -o \([^ ]*\).*/\1/')
  if [ "$other" -nt "$source" ]; then
    cp "$other" "$object"
    exit 0
  fi
fi
exec "$@"
