#!/bin/sh
# Writes the parts of the documentation that are taken from the code:
#
#   docs.sh            the snippets in kernels/TUTORIAL.md and README.md, and npu_model/INSTRUCTIONS.md
#   docs.sh --check    changes nothing; tells what is not as the code is, and fails
#
# A snippet is a fenced block behind a line `<!-- snippet: FILE [NAME] -->`: what stands in FILE between two lines
# `// [NAME]`, or all of FILE where no name is given.
set -eu
cd "$(dirname "$0")/.."
check=false
case "$*" in
  "") ;;
  --check) check=true ;;
  *)
    echo "docs.sh: there is no '$*'; it takes --check" >&2
    exit 2
    ;;
esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0

# take FILE: what it should be is in $work/new.
take() {
  if cmp -s "$work/new" "$1"; then return; fi
  if $check; then
    echo "$1 is not as the code is; scripts/docs.sh writes it anew:"
    diff "$1" "$work/new" | head -20 || true
    status=1
  else
    cp "$work/new" "$1"
    echo "wrote $1"
  fi
}

# Every snippet of a document by its source.
snippets() {
  awk '
    function put(file, name,    line, inside, found) {
      inside = name == ""
      while ((getline line < file) > 0) {
        if (name != "" && line == "// [" name "]") { inside = !inside; found = 1; continue }
        if (inside) { print line; found = 1 }
      }
      close(file)
      if (!found) { print "docs.sh: no [" name "] in " file > "/dev/stderr"; exit 1 }
    }
    /^<!-- snippet: / {
      print
      text = $0
      sub(/^<!-- snippet: /, "", text); sub(/ -->$/, "", text)
      file = text; name = ""
      if (split(text, parts, " \\[") == 2) { file = parts[1]; name = parts[2]; sub(/\]$/, "", name) }
      getline; print  # ```
      put(file, name)
      while ((getline) > 0 && $0 != "```") {}
      print
      next
    }
    { print }' "$1"
}

# One row per instruction of core.h: what stands behind it there.
instructions() {
  cat <<'END'
# The instructions

Written by `scripts/docs.sh` from the concepts in `core.h`, where each one is declared; `README.md` tells of pipes and order.
`x`, `narrow`, `ids` are tiles in UB of fp32, of a 16-bit float and of int32; `gm` is a view of global memory. A composite has a
body of its own on the host and the expansion of `composites.h` on the model.
END
  awk '
    function row(    call, pipe, composite) {
      if (match(code, /core(\.vectors\(\)\[0\])?\.[A-Z][A-Za-z0-9]*\(.*\)/)) {
        call = substr(code, RSTART, RLENGTH)
        sub(/^core\.vectors\(\)\[0\]\./, "", call); sub(/^core\./, "", call)
        sub(/ *\} *->.*$/, "", call)
        gsub(/ +/, " ", call); gsub(/std::/, "", call); gsub(/int(32|64)_t\{\}/, "n", call)
        gsub(/ +/, " ", note); sub(/^ /, "", note); sub(/ $/, "", note)
        pipe = ""
        if (match(note, /^(MTE[123]|FIX|M|V|S)(, (MTE[123]|FIX|M|V|S))*( |$)/)) {
          pipe = substr(note, 1, RLENGTH); note = substr(note, RLENGTH + 1); sub(/ $/, "", pipe)
        }
        if (pipe == "" && composites) pipe = "composite"
        if (call !~ /^Allocate/) {
          gsub(/\|/, "\\|", call); gsub(/\|/, "\\|", note)
          print "| `" call "` | " pipe " | " note " |"
        }
      }
      code = note = ""
    }
    /^concept (Cube|Vector|Ai)Core / {
      name = $2
      composites = 0
      print "\n## " (name == "CubeCore" ? "Cube core" : name == "VectorCore" ? "Vector core" : "Between the two") "\n"
      print "| instruction | pipe | meaning |\n|---|---|---|"
      inside = 1
      next
    }
    /^};/ { if (inside) row(); inside = 0 }
    !inside { next }
    /^  \/\/ / { row(); if ($2 == "Composites:") composites = 1; next }
    {
      text = $0; comment = ""
      if ((at = index(text, "//")) > 0) { comment = substr(text, at + 2); text = substr(text, 1, at - 1) }
      if (text ~ /[^ ]/ && code ~ /;[ ]*$/) row()
      code = code " " text; note = note " " comment
    }' npu_model/core.h
}

for document in kernels/TUTORIAL.md README.md; do
  snippets "$document" > "$work/new"
  take "$document"
done
instructions > "$work/new"
take npu_model/INSTRUCTIONS.md
exit $status
