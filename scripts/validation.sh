#!/bin/sh
# Writes npu_model/VALIDATION.md from what `cubist validate` says.
#
#   validation.sh [CUBIST]     CUBIST: the command, by default build/release/bin/cubist
set -eu
cd "$(dirname "$0")/.."
cubist=${1:-build/release/bin/cubist}
tables=$(mktemp)
held_out=$(mktemp)
devkit=$(mktemp)
trap 'rm -f "$tables" "$held_out" "$devkit"' EXIT
"$cubist" validate --markdown "$tables" > /dev/null
"$cubist" validate npu_model/data/measured_attention_910b2.csv --markdown "$held_out" > /dev/null
"$cubist" validate npu_model/data/measured_devkit_910b1.csv --markdown "$devkit" > /dev/null
{
  sed '/^<!-- tables -->$/q' npu_model/VALIDATION.md
  echo
  cat "$tables"
  printf '\n## Held out: attention with known blocks\n\n'
  sed 's/^## /### /' "$held_out"
  printf '\n## Held out: reads of GM, and products with known walks\n\n'
  sed 's/^## /### /' "$devkit"
} > npu_model/VALIDATION.md.new
mv npu_model/VALIDATION.md.new npu_model/VALIDATION.md
