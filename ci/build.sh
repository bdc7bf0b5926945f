#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the wheels, one for each supported Python, and copies them to a folder, with build.json,
# which says of which commit they are.
# usage: ci/build.sh [--release] [FOLDER]        (default: dist)
#   --release   with committed settings only: no cache, no .bazelrc.user, no rc file of the user or the
#               machine, no compiler options of the environment
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
invoked_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
release=()
if [[ ${1:-} == --release ]]; then
  release=(--release)
  shift
fi
case ${1:-} in
  "") folder=$PWD/dist ;;
  /*) folder=$1 ;;
  *) folder=$invoked_from/$1 ;;
esac

settings=()
if [[ -n ${release[*]} ]]; then
  # What Bazel's own search for a compiler reads.
  unset TIERCEL_REMOTE_CACHE TIERCEL_DISK_CACHE CC CPATH CPLUS_INCLUDE_PATH "${!BAZEL_@}"
  export TIERCEL_BAZEL_MODE=${TIERCEL_BAZEL_MODE:-airgap} # registry mode has no lock file
  mkdir -p out
  grep -vE '^try-import %workspace%/\.bazelrc\.(ci|user)$' .bazelrc >out/release.bazelrc
  settings=(--nosystem_rc --nohome_rc --noworkspace_rc --bazelrc="$PWD/out/release.bazelrc")
else
  source ci/cache.sh
fi
./bazelw "${settings[@]}" build //python:wheels
./bazelw "${settings[@]}" run //python:dist -- "$folder"
python3 tools/release/record.py "${release[@]}" "$folder"
