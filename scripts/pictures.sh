#!/bin/sh
# Draws the README's pictures from runs of the command, into images/.
#
#   pictures.sh [CUBIST]     CUBIST: the command, by default build/release/bin/cubist
set -eu
cd "$(dirname "$0")/.."
cubist=${1:-build/release/bin/cubist}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p images

"$cubist" profile flash_attention --shape 8x2048x128x128x64 --causal --trace "$work/trace.json" \
  --json "$work/attention.json" > /dev/null
python3 scripts/pictures.py timeline "$work/trace.json" "$work/attention.json" images/timeline.svg

"$cubist" profile matmul --shape 4096x1536x7168 --json "$work/matmul.json" > /dev/null
"$cubist" profile matmul --shape 64x7168x2048 --json "$work/narrow.json" > /dev/null
"$cubist" profile grouped_matmul --shape 8192x4096x7168x8 --json "$work/grouped.json" > /dev/null
"$cubist" profile matmul --shape 512x7168x4096 --json "$work/wide.json" > /dev/null
python3 scripts/pictures.py roofline images/roofline.svg "$work/matmul.json" "$work/wide.json" "$work/narrow.json" \
  "$work/grouped.json"

"$cubist" ablate flash_attention --only "forward 128+64/128 S 2048" --budget 8 --json "$work/ablation.json" > /dev/null
python3 scripts/pictures.py ablation "$work/ablation.json" images/ablation.svg \
  "Attention from the conventional kernel to ours, idea by idea"
