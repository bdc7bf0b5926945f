#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs every GPU test on this machine's GPUs with Bazel: as many at a time as there are GPUs, each
# test on one of its own. CUDA_VISIBLE_DEVICES names the GPUs to use (default: all).
# usage: ci/test_gpus.sh [BAZEL_TEST_OPTION...]
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/cache.sh
if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
  gpus=$CUDA_VISIBLE_DEVICES
else
  gpus=$(nvidia-smi --query-gpu=uuid --format=csv,noheader | paste -sd, -) || gpus=""
fi
[[ -n $gpus ]] || {
  echo "test_gpus: error: no GPU: nvidia-smi lists none, CUDA_VISIBLE_DEVICES is empty" >&2
  exit 2
}
count=$(awk -F, '{ print NF }' <<<"$gpus")
echo "test_gpus: $count GPU(s): $gpus"
./bazelw test //... --config=gpu --local_test_jobs="$count" --test_env=TIERCEL_GPUS="$gpus" \
  --run_under=//tools/gpu:one_gpu "$@" </dev/null
