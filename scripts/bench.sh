#!/bin/sh
# Runs a chosen set of benchmarks, keeps the results as JSON, and prints a table: median and best of every case, its
# share of the ceiling, and the ratio to the best peer.
#
#   scripts/bench.sh [-b BUILD] [-o OUT] [-r REPETITIONS] [-t THREADS] [SET]
#
#   SET           targets (default: one or two of every kernel), matmul, grouped, attention, permute, rows, block, peaks, all; or a regular expression
#                 of case names
#   BUILD         build/release; its bin/ holds the benchmark binaries
#   OUT           BUILD/bench; one JSON file per binary
#   REPETITIONS   9; all cases of a binary are interleaved at random
#   THREADS       only cases at this thread count
set -eu

usage() { sed -n '2,/^set -eu/{/^#/s/^# \{0,1\}//p;}' "$0" >&2; exit 2; }

root=$(cd "$(dirname "$0")/.." && pwd)
build=$root/build/release out= repetitions=9 threads='[0-9]+'
while getopts b:o:r:t: option; do
  case $option in
    b) build=$OPTARG ;;
    o) out=$OPTARG ;;
    r) repetitions=$OPTARG ;;
    t) threads=$OPTARG ;;
    *) usage ;;
  esac
done
shift $((OPTIND - 1))
[ $# -le 1 ] || usage
set=${1:-targets}
out=${out:-$build/bench}

programs="matmul_bench grouped_matmul_bench flash_attention_bench flash_attention_grad_bench token_permute_bench \
  token_rank_bench rowwise_bench moe_block_bench"
case $set in
  targets)
    cases='^(Mmad/.*(fp32/252x256x256|bf16/252x256x512)|Matmul/.*/(fp32|bf16)/N(N/2048x2048x2048|T/1x7168x2048)'
    cases="$cases|GroupedMatmul/.*/bf16/NN/skewed4096of32/2048x7168"
    cases="$cases|FlashAttention/.*/(fp32|bf16)/((full|causal)/8x2048x192x128|decode/128on32x)"
    cases="$cases|FlashAttentionGrad/.*/(fp32|bf16)/causal/8x2048x192x128"
    cases="$cases|Token(Permute|Unpermute)/.*/bf16/uniform/4096x7168/top8of64|Rank/.*/uniform/32768of256|Route/)"
    ;;
  matmul) cases='^(Mmad|Matmul)/' programs=matmul_bench ;;
  grouped) cases='^Grouped' programs=grouped_matmul_bench ;;
  attention)
    cases='^FlashAttention(Grad)?/.*/(decode/|8?[0-9]+x(1024|2048|4096|1000)x)'
    programs="flash_attention_bench flash_attention_grad_bench"
    ;;
  permute) cases='^(Token|Rank)' programs="token_permute_bench token_rank_bench" ;;
  rows) cases='^(RmsNorm|AddRmsNorm|SwiGlu|Route)' programs=rowwise_bench ;;
  block) cases='^MoeBlock' programs=moe_block_bench ;;
  peaks) cases='^Peak/' programs=matmul_bench ;;
  all) cases='.' ;;
  *) cases=$set ;;
esac

mkdir -p "$out"
files=
failed=0
run() {  # program
  if [ ! -x "$build/bin/$1" ]; then
    echo "bench.sh: $build/bin/$1 is not built (cmake --build $build --target $1)" >&2
    exit 2
  fi
  case $cases in
    *threads:*) filter=$cases ;;
    *) filter="($cases).*/threads:$threads\$" ;;
  esac
  if ! "$build/bin/$1" --benchmark_list_tests=true --benchmark_filter="$filter" 2>/dev/null | grep -q '/threads:'; then
    return 0
  fi
  echo "$1 --benchmark_filter='$filter' --benchmark_enable_random_interleaving=true" \
       "--benchmark_repetitions=$repetitions" >&2
  "$build/bin/$1" --benchmark_filter="$filter" --benchmark_enable_random_interleaving=true \
    --benchmark_repetitions="$repetitions" --benchmark_out="$out/$1.json" >"$out/$1.log" 2>&1 || failed=1
  files="$files $out/$1.json"
}
for program in $programs; do run "$program"; done
if [ -z "$files" ]; then
  echo "bench.sh: no case matches '$set' in $build/bin" >&2
  exit 2
fi

# Family and model tell CPUs apart whose names a virtual machine keeps to itself.
LC_ALL=C lscpu | awk -F ': *' '
  { of[$1] = $2 }
  END { printf "# %s, family %s model %s, %s threads, L3 %s\n", of["Model name"], of["CPU family"], of["Model"],
               of["CPU(s)"], of["L3 cache"] }'
# shellcheck disable=SC2086
awk '
  function value(line) { sub(/^[^:]*: */, "", line); sub(/,$/, "", line); gsub(/"/, "", line); return line }
  function flush() {
    if (name != "" && type == "iteration") {
      if (!(name in count)) order[++names] = name
      if (error != "") errors[name] = error
      else {
        rate[name, ++count[name]] = speed
        share[name, count[name]] = portion
      }
    }
    name = type = error = ""; speed = portion = 0
  }
  function sorted(values, key, n,    i, j, x) {
    for (i = 1; i <= n; ++i) list[i] = values[key, i]
    for (i = 2; i <= n; ++i) {
      x = list[i]
      for (j = i - 1; j >= 1 && list[j] > x; --j) list[j + 1] = list[j]
      list[j + 1] = x
    }
    return n
  }
  function median(values, key, n) {
    if (sorted(values, key, n) == 0) return 0
    return n % 2 ? list[(n + 1) / 2] : (list[n / 2] + list[n / 2 + 1]) / 2
  }
  function best(values, key, n) { return sorted(values, key, n) ? list[n] : 0 }
  # Kernel/library/dtype/case/threads:n with the library last, and ours first among libraries.
  function key(name,    part) {
    split(name, part, "/")
    sub("/" part[2] "/", "/", name)
    return name "/" (part[2] ~ /^cubist/ ? " " : "") part[2]
  }
  # Peers are not ours, and products packed beforehand meet only their like.
  function rival(a, b) { return b !~ /^cubist/ && (a ~ /_packed$/) == (b ~ /_packed$/) }

  /^    \{/ { flush() }
  /^ *"name":/ { name = value($0) }
  /^ *"run_type":/ { type = value($0) }
  /^ *"error_message":/ { error = value($0) }
  /^ *"(FLOPS|bytes_per_second|routes_per_second)":/ { speed = value($0) + 0 }
  /^ *"of_peak":/ { if (portion == 0) portion = value($0) + 0 }
  /^ *"of_(floor|roofline|products)":/ { portion = value($0) + 0 }
  END {
    flush()
    for (i = 2; i <= names; ++i) {
      name = order[i]
      for (j = i - 1; j >= 1 && key(order[j]) > key(name); --j) order[j + 1] = order[j]
      order[j + 1] = name
    }
    printf "%-74s %9s %9s %7s %7s  %s\n", "case (GFLOP/s; streams, Token* and rows: GB/s; Rank: G routes/s)", "median", "best", "share", "best", "best peer, ratio of medians"
    for (i = 1; i <= names; ++i) {
      name = order[i]
      if (name in errors) {
        printf "%-74s %s\n", name, errors[name]
        continue
      }
      split(name, part, "/")
      mine = median(rate, name, count[name])
      peer = ""; peer_rate = 0
      for (j = 1; j <= names && part[2] ~ /^cubist/; ++j) {
        split(order[j], other, "/")
        same = order[j]
        sub("/" other[2] "/", "/" part[2] "/", same)
        if (same != name || !rival(part[2], other[2]) || order[j] in errors) continue
        r = median(rate, order[j], count[order[j]])
        if (r > peer_rate) { peer = other[2]; peer_rate = r }
      }
      digits = part[1] == "Rank" ? 3 : 1
      printf "%-74s %9.*f %9.*f", name, digits, mine / 1e9, digits, best(rate, name, count[name]) / 1e9
      if (part[1] == "Peak") print ""
      else printf " %7.3f %7.3f  %s\n", median(share, name, count[name]), best(share, name, count[name]),
                  peer == "" ? "" : sprintf("%s %.2f", peer, mine / peer_rate)
    }
  }' $files
echo "JSON:$files" >&2
exit $failed
