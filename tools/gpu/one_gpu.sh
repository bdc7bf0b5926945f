#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a command with one GPU to itself: the first free one of TIERCEL_GPUS (a list with commas; or of
# CUDA_VISIBLE_DEVICES). Waits while all are taken. bazel test --run_under=//tools/gpu:one_gpu
set -euo pipefail

IFS=, read -ra gpus <<<"${TIERCEL_GPUS:-${CUDA_VISIBLE_DEVICES:-}}"
((${#gpus[@]})) || {
  echo "one_gpu: error: neither TIERCEL_GPUS nor CUDA_VISIBLE_DEVICES names a GPU" >&2
  exit 2
}
# The lock is held by an open file, so it goes with the command, however that ends.
locks=${TIERCEL_GPU_LOCKS:-/var/tmp/tiercel-gpus-$(id -u)}
mkdir -p "$locks"
while :; do
  for gpu in "${gpus[@]}"; do
    exec {lock}>"$locks/${gpu//\//_}"
    if flock --nonblock "$lock"; then
      export CUDA_VISIBLE_DEVICES=$gpu
      exec "$@"
    fi
    exec {lock}>&-
  done
  sleep 0.2
done
