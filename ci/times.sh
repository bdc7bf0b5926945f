#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Times what a developer waits for, in a fresh clone of the last commit with nothing cached: the two
# commands of the README, the wheels again, and the wheels after an edit of one kernel.
# usage: ci/times.sh FOLDER      FOLDER is new or empty, not below /tmp, and has 10 GB
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
[[ $# -eq 1 ]] || {
  echo "usage: ci/times.sh FOLDER" >&2
  exit 2
}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
[[ -z $(ls -A "$folder") ]] || {
  echo "times: error: $folder is not empty" >&2
  exit 2
}
git clone --quiet "$root" "$folder/tiercel"
cd "$folder/tiercel"

# Nothing of this user's caches; interpreters under pyenv are still found.
export PYENV_ROOT=${PYENV_ROOT:-$HOME/.pyenv} HOME=$folder/home
unset XDG_CACHE_HOME TIERCEL_CACHE
mkdir "$HOME"
trap './bazelw shutdown' EXIT

step() {
  local title=$1 start=$EPOCHREALTIME
  shift
  "$@" >>"$folder/log" 2>&1 || {
    echo "times: error: $title failed, see $folder/log" >&2
    exit 1
  }
  awk -v a="$start" -v b="$EPOCHREALTIME" -v t="$title" 'BEGIN { printf "%8.1f s  %s\n", b - a, t }'
}

step "build //python:wheels, nothing cached" ./bazelw build //python:wheels
step "test //..., after that" ./bazelw test //...
step "build //python:wheels, nothing changed" ./bazelw build //python:wheels
sed -i 's/kFewRows = 1024;/kFewRows = 1023;/' kernels/routing/topk_softmax.cu
git diff --quiet && {
  echo "times: error: the edit of topk_softmax.cu changed nothing" >&2
  exit 1
}
step "build //python:wheels, one line of one .cu changed" ./bazelw build //python:wheels
