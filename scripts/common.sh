# Shared by scripts/run and scripts/test: installs what is missing, configures and builds. Sourced by bash.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=(
  cmake ninja-build g++ libhwy-dev libtbb-dev             # the library
  libcli11-dev nlohmann-json3-dev libfmt-dev              # the command line
  libgtest-dev                                            # tests
  libbenchmark-dev libeigen3-dev libopenblas-dev libdnnl-dev  # benchmarks and what they compare with
)
readonly build_dir=build/release

# only "CHOICE.." ARGUMENT..: ends the script, before it does anything, over the first argument that is none of the choices.
only() {
  local argument
  for argument in "${@:2}"; do
    if [[ " $1 " != *" $argument "* ]]; then
      echo "${0##*/}: there is no '$argument'; it takes ${1:-no arguments}" >&2
      exit 2
    fi
  done
}

# Names those of our packages that are not installed.
missing_packages() {
  local package
  for package in "${packages[@]}"; do
    dpkg-query --show --showformat='${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed ||
      echo "$package"
  done
}

install_missing() {
  if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    return 0  # Not Debian: configuring says what it lacks.
  fi
  local missing
  mapfile -t missing < <(missing_packages)
  if ((${#missing[@]} == 0)); then
    return 0
  fi
  local as_root=()
  if ((EUID != 0)); then
    if ! command -v sudo >/dev/null; then
      echo "missing packages, and neither root nor sudo to install them: ${missing[*]}" >&2
      exit 1
    fi
    as_root=(sudo)
  fi
  echo "installing ${missing[*]}" >&2
  "${as_root[@]}" apt-get update -qq >&2
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
}

# build_release TARGET..: the messages of the compiler, and those of CMake only when it fails.
build_release() {
  install_missing
  local log
  if ! log=$(cmake --preset release ${CUBIST_CMAKE_OPTIONS:-} 2>&1); then
    echo "$log" >&2
    exit 1
  fi
  echo "building in $build_dir" >&2
  cmake --build "$build_dir" --target "$@" >&2
}
