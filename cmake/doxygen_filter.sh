#!/bin/sh
# A header with its comments as Doxygen's, every line as it stands: formulas and tables are in columns. What follows a
# declaration on its line belongs to it.
awk '
  function quoted(text) {
    gsub(/&/, "\\&amp;", text); gsub(/</, "\\&lt;", text); gsub(/>/, "\\&gt;", text)
    gsub(/\\/, "\\&#92;", text); gsub(/@/, "\\&#64;", text)
    if (match(text, /^ *[-+*]/)) text = substr(text, 1, RLENGTH - 1) "&zwj;" substr(text, RLENGTH)
    return text
  }
  function close_block() { if (open) print "</pre> */"; open = 0 }
  /^ *\/\/ / || /^ *\/\/$/ {
    text = $0; sub(/^ *\/\/ ?/, "", text)
    if (text ~ /^namespace/) { print; next }
    if (trailing && $0 ~ /^        /) { print "///< " quoted(text); next }
    if (!open) { printf NR == 1 ? "/** \\file\n<pre>" : "/** <pre>"; open = 1 }
    print quoted(text)
    next
  }
  {
    close_block()
    trailing = 0
    if ((at = index($0, "  // ")) > 0 && $0 !~ /"[^"]*\/\/[^"]*"/ && $0 !~ /^} *\/\// && $0 !~ /^#/) {
      print substr($0, 1, at + 1) "///< " quoted(substr($0, at + 5))
      trailing = 1
    } else {
      print
    }
  }
  END { close_block() }' "$1"
