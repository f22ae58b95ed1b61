#!/bin/sh
# Builds a program by pkg-config against PREFIX, once with each library, and runs it.
#
#   pkg_config.sh PREFIX WORK SOURCE COMPILER
set -eu
prefix=$1 work=$2 source=$3 compiler=$4
mkdir -p "$work"
file=$(find "$prefix" -name cubist.pc)
libraries=$(dirname "$(dirname "$file")")
PKG_CONFIG_PATH=$(dirname "$file")
export PKG_CONFIG_PATH
# shellcheck disable=SC2046,SC2086
$compiler -std=c++20 -I"$(dirname "$source")" $(pkg-config --cflags cubist) "$source" -o "$work/shared" $(pkg-config --libs cubist)
LD_LIBRARY_PATH=$libraries "$work/shared"
# shellcheck disable=SC2046,SC2086
$compiler -std=c++20 -I"$(dirname "$source")" $(pkg-config --cflags cubist) "$source" -o "$work/static" \
  $(pkg-config --static --libs cubist | sed "s|-lcubist|$libraries/libcubist.a|")
"$work/static"
