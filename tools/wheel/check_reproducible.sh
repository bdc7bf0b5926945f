#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the wheels twice from nothing, in two folders with other surroundings, and compares them.
# usage: tools/wheel/check_reproducible.sh [--compare FOLDER] [SCRATCH_FOLDER]
#
# --compare FOLDER: the wheels there have to be the same, too.
# SCRATCH_FOLDER must not be below /tmp, which Bazel's sandbox hides; it takes about 6 GB. What was
# built is removed, unless the wheels differ.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
given=""
if [[ ${1:-} == --compare ]]; then
  given=$(cd "$2" && sha256sum -- tiercel-*.whl)
  shift 2
fi
scratch=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/tiercel-reproducible}
mkdir -p "$scratch"
scratch=$(mktemp -d "$scratch/run.XXXXXX")

one=$scratch/one
two=$scratch/somewhere/else/two
mkdir -p "$one" "$two"

# What git has or would add: changes that are not committed yet count.
git -C "$root" ls-files -z --cached --others --exclude-standard |
  tar --create --directory="$root" --null --files-from=- --ignore-failed-read |
  tee >(tar --extract --touch --directory="$two") |
  tar --extract --directory="$one"

build() {
  cd "$1"
  bazel="./bazelw --output_user_root=$2"
  trap '$bazel shutdown' EXIT
  $bazel build --noshow_progress //python:wheels
  $bazel run --noshow_progress //python:dist -- "$scratch/wheels/$3"
}

(build "$one" "$scratch/bazel" first)
(
  export TZ=Pacific/Auckland LC_ALL=C USER=somebody
  umask 027
  build "$two" "$scratch/an_output_folder" second
)

cd "$scratch/wheels"
(cd first && sha256sum -- *.whl) | tee first.sums
(cd second && sha256sum -- *.whl) >second.sums
if ! cmp -s first.sums second.sums; then
  echo "the wheels differ: see $scratch/wheels" >&2
  exit 1
fi
if [[ -n $given ]] && [[ $given != "$(cat first.sums)" ]]; then
  printf 'the wheels differ from those given, which are\n%s\nsee %s/wheels\n' "$given" "$scratch" >&2
  exit 1
fi
cd /
chmod -R u+w "$scratch"
rm -rf "$scratch"
echo "the same bytes from two folders"
