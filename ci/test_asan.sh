#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Our host code, launchers, bindings and emulator, under AddressSanitizer and UBSan: tests of kernels
# on the emulator and of the op layer, without a GPU. An error ends the test with its stack.
# usage: ci/test_asan.sh [BAZEL_TEST_OPTION_OR_TARGET...]        (default: the targets below)
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/cache.sh
targets=(//tests/emulator/... //tests/api/...)
for word in "$@"; do
  if [[ $word != -* ]]; then targets=(); fi
done
./bazelw test --config=asan --keep_going "$@" "${targets[@]}" </dev/null
