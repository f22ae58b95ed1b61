#!/bin/sh
# Every kernel of kernels/, with every field of its arguments, is there in C and in Python, and in the command line's
# table of kernels. Names what is missing, and fails.
#
#   check_faces.sh [TREE]
set -eu
cd "${1:-$(dirname "$0")/..}"
# Kernels are what the headers of cubist/ include.
public=$(sed -n 's|^#include "\(kernels/.*\)".*|\1|p' cubist/*.h | sort -u)
# shellcheck disable=SC2086
found=$(awk '
  # The last name of each declarator of `text`, a declaration without comments and default values; its type in `type`.
  function declare(struct, text, lists,    parts, n, i, name) {
    while (match(text, /<[^<>]*>/)) {
      inner = substr(text, RSTART + 1, RLENGTH - 2)
      sub(/<[^<>]*>/, " @" inner " ", text)
    }
    while (sub(/\{[^{}]*\}/, "", text)) {}
    gsub(/\[[^]]*\]/, "", text)
    n = split(text, parts, ",")
    type = parts[1]
    sub(/=.*/, "", type)
    for (i = 1; i <= n; i++) {
      name = parts[i]
      sub(/=.*/, "", name)
      name = trim(name)
      sub(/^.*[ *&]/, "", name)
      if (name !~ /^[a-z_][a-z_0-9]*$/) continue
      fields[struct] = fields[struct] " " name
      if (match(type, /(cubist_[a-z_]+|[A-Z][A-Za-z]+)/)) types[struct, name] = substr(type, RSTART, RLENGTH)
      if (type ~ /@/ && match(type, /@ *[A-Z][A-Za-z]+/)) {
        inner = substr(type, RSTART, RLENGTH); gsub(/[@ ]/, "", inner)
        types[struct, name] = inner
      }
    }
  }
  function trim(s) { gsub(/^[ \t]+|[ \t]+$/, "", s); return s }
  function snake(name,    out, c, i) {
    out = ""
    gsub(/SwiGlu/, "Swiglu", name)
    for (i = 1; i <= length(name); i++) {
      c = substr(name, i, 1)
      out = out (c ~ /[A-Z]/ && i > 1 ? "_" : "") tolower(c)
    }
    return out
  }
  # All names in a struct, and in the structs that are its fields.
  function leaves(struct, into,    parts, n, i, type) {
    n = split(fields[struct], parts, " ")
    for (i = 1; i <= n; i++) {
      type = types[struct, parts[i]]
      if (type in fields && type !~ /^(PackedOperand|CallerWorkspace|cubist_(tensor|packed|workspace|range|route_weighting))$/) leaves(type, into)
      else into[parts[i]] = 1
    }
  }
  FNR == 1 { inside = ""; body = "" }
  FILENAME ~ /^python/ || FILENAME ~ /^tools/ { text[FILENAME] = text[FILENAME] "\n" $0 }
  {
    line = $0
    sub(/\/\/.*/, "", line); gsub(/\/\*[^*]*\*\//, "", line)
    if (FILENAME ~ /\.py$/ && match(line, /^def [a-z_0-9]+/)) functions[substr(line, 5, RLENGTH - 4)] = 1
    if (FILENAME ~ /\.(h|cc)$/ && FILENAME !~ /^tools/) {
      if (match(line, /^CUBIST_EXPORT Status [A-Za-z]+\(const Device& device, const [A-Za-z]+Args& args/)) {
        name = line; sub(/^CUBIST_EXPORT Status /, "", name); sub(/\(.*/, "", name)
        if (name !~ /Workspace$/) kernels[name] = 1
      }
      if (line ~ /^(typedef )?struct [A-Za-z_]+ \{/) {
        inside = line; sub(/^(typedef )?struct /, "", inside); sub(/ .*/, "", inside); body = ""
        next
      }
      if (inside != "") {
        if (line ~ /^\}/) {
          n = split(body, declarations, ";")
          for (i = 1; i <= n; i++) if (declarations[i] !~ /\(/) declare(inside, trim(declarations[i]))
          inside = ""
        } else if (line !~ /\) const \{|return/) body = body " " line
      }
      if (FILENAME == "cubist/c.h" && match(line, /^cubist_status cubist_[a-z_]+\(/))
        c_functions[substr(line, 22, RLENGTH - 22)] = 1
    }
    if (FILENAME == "python/src/kernels.cc") {
      if (match(line, /^void Read[A-Za-z]*\(Arguments& in, [A-Za-z]+& /) || match(line, /^void Read[A-Z][A-Za-z]*\(/)) {
        reader = line; sub(/^void /, "", reader)
        if (reader ~ /^Read\(/) { sub(/^Read\(Arguments& in, /, "", reader); sub(/&.*/, "", reader) } else sub(/\(.*/, "", reader)
      }
      reads[reader] = reads[reader] " " line
      if (line ~ /^\}/ || line ~ /\}$/ && line ~ /^void/) reader = ""
    }
  }
  # The text of a reader with the readers that it calls.
  function reading(name, depth,    all, other) {
    all = reads[name]
    if (depth == 0) return all
    for (other in reads) if (other ~ /^Read/ && index(reads[name], other "(in")) all = all reading(other, depth - 1)
    if (index(reads[name], "Read(in, a.forward)")) { other = name; sub(/Grad/, "", other); all = all reading(other, depth - 1) }
    return all
  }
  END {
    for (kernel in kernels) {
      name = snake(kernel); args = kernel "Args"; count++
      if (name != "pack_operand") {
        split("", wanted); leaves(args, wanted)
        c_args = "cubist_" name "_args"
        split("", there); leaves(c_args, there)
        for (field in there) if (field == "out_weight") there["out"] = 1
        python = reading(args, 4)
        for (field in wanted) {
          if (!(field in there)) print "cubist/c.h: " c_args " lacks " field
          if (python !~ ("[.>]" field "[^a-z_0-9]")) print "python/src/kernels.cc: " args " lacks " field
        }
      }
      if (!(name in c_functions)) print "cubist/c.h: there is no cubist_" name
      if (!((name == "pack_operand" ? "pack" : name) in functions)) print "python/cubist: there is no " name
      table = text["tools/library_calls.cc"]
      if (name !~ /_block|^pack_operand$/ && table !~ ("&" kernel ",")) print "tools/library_calls.cc: no call of " kernel
    }
    if (count < 10) print "check_faces.sh: found no kernels"
  }' $public kernels/attention_options.h cubist/c.h python/src/kernels.cc python/cubist/_*.py tools/library_calls.cc)
if [ -n "$found" ]; then
  echo "$found" | sort
  exit 1
fi
