#!/bin/sh
# Writes npu_model/VALIDATION.md from what `cubist validate` says.
#
#   validation.sh [CUBIST]     CUBIST: the command, by default build/release/bin/cubist
set -eu
cd "$(dirname "$0")/.."
cubist=${1:-build/release/bin/cubist}
tables=$(mktemp)
trap 'rm -f "$tables"' EXIT
"$cubist" validate --markdown "$tables" > /dev/null
{
  sed '/^<!-- tables -->$/q' npu_model/VALIDATION.md
  echo
  cat "$tables"
} > npu_model/VALIDATION.md.new
mv npu_model/VALIDATION.md.new npu_model/VALIDATION.md
