#!/bin/sh
# Proves that check_faces.sh names what C, Python or the table lack: in a copy of the tree, one thing at a time is taken
# away, or added to a kernel.
#
#   check_faces_test.sh CHECK TREE SCRATCH
set -eu
check=$1 tree=$2 copy=$3/check_faces_tree
status=0

# without FILE PATTERN TEXT: with FILE edited by the sed script PATTERN the check fails and says TEXT.
without() {
  rm -rf "$copy"
  mkdir -p "$copy/python" "$copy/tools"
  cp -r "$tree/cubist" "$tree/kernels" "$copy"
  cp -r "$tree/python/src" "$tree/python/cubist" "$copy/python"
  cp "$tree/tools/library_calls.cc" "$copy/tools"
  sed -i "$2" "$copy/$1"
  if cmp -s "$tree/$1" "$copy/$1"; then
    echo "'$2' changes nothing in $1"
    status=1
  elif output=$("$check" "$copy"); then
    echo "not noticed: '$2' in $1"
    status=1
  elif ! printf '%s\n' "$output" | grep -qF "$3"; then
    printf 'expected "%s", got:\n%s\n' "$3" "$output"
    status=1
  fi
}

"$check" "$tree" || status=1
without kernels/swiglu.h 's/^struct SwiGluArgs {/&\n  std::optional<float> limit = {};/' 'cubist_swiglu_args lacks limit'
without kernels/swiglu.h 's/^struct SwiGluArgs {/&\n  std::optional<float> limit = {};/' 'SwiGluArgs lacks limit'
without kernels/attention_options.h 's/^struct AttentionRope {/&\n  float base = 1, other = 2;/' 'cubist_mla_block_args lacks other'
without kernels/route.h 's/^struct RouteOptions {/&\n  bool sorted = false;/' 'MoeBlockGradArgs lacks sorted'
without cubist/c.h 's/cubist_tensor gate, up, probs, out;/cubist_tensor gate, up, out;/' 'cubist_swiglu_args lacks probs'
without cubist/c.h 's/^cubist_status cubist_reorder_chunks(/int reorder(/' 'no cubist_reorder_chunks'
without python/src/kernels.cc 's/("expert_places", a.expert_places)//' 'TokenPermuteArgs lacks expert_places'
without python/cubist/_permute.py 's/^def reorder_chunks/def reorder/' 'there is no reorder_chunks'
without tools/library_calls.cc 's/&RouteGrad,/\&Route,/' 'no call of RouteGrad'
rm -rf "$copy"
exit $status
