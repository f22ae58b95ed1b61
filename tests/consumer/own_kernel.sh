#!/bin/sh
# The command of a project with a kernel of its own, WORK/own_kernel: the kernel is checked, profiled and tuned there.
set -eu
work=$1
own=$work/own_kernel
# expect TEXT COMMAND..: it succeeds and prints this.
expect() {
  text=$1
  shift
  "$@" >"$work/out" || { cat "$work/out"; echo "own_kernel: failed: $*"; exit 1; }
  grep -q -e "$text" "$work/out" || { cat "$work/out"; echo "own_kernel: no '$text' from: $*"; exit 1; }
}
expect scaled_add "$own" check --help
expect "executed in 8 orders: the same bytes in each" "$own" check scaled_add --shape 50x33 --execute 5
expect "scaled_add 512x1024 bf16 on ascend910b2" "$own" profile scaled_add --shape 512x1024
expect "rows=" "$own" tune scaled_add --shape 512x1024 --budget 8 --output "$work/tilings.txt"
grep -q '^scaled_add' "$work/tilings.txt"
expect "scaled_add 512x1024 bf16" "$own" profile scaled_add --shape 512x1024 --tuning "$work/tilings.txt"
if [ -e "$work/tutorial" ]; then
  expect "executed in 6 orders: the same bytes in each" "$work/tutorial" check matmul_silu --shape 50x40x30 --execute 3
  expect "matmul_silu 256x512x256 bf16" "$work/tutorial" profile matmul_silu --shape 256x512x256
fi
status=0
"$own" check scaled_add --shape 0x0x0 2>"$work/err" || status=$?
[ "$status" -eq 2 ] && grep -q ROWSxCOLS "$work/err"
