#!/bin/sh
# Configures and builds a project outside the tree in WORK, then runs PROGRAMs of it.
#
#   run.sh SOURCE WORK PROGRAM[,PROGRAM..] [CMAKE OPTION..]
set -eu
source=$1 work=$2 programs=$3
shift 3
rm -rf "$work"
cmake -S "$source" -B "$work" -G Ninja --no-warn-unused-cli "$@" >/dev/null
cmake --build "$work" >"$work/log" || { cat "$work/log"; exit 1; }
for program in $(echo "$programs" | tr , ' '); do
  echo "$program"
  "$work/$program"
done
