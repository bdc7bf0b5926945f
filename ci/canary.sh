#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Air-gapped mode from nothing: sets Bazel up from the package mirrors as they are today, builds the
# wheels and runs the tests that look at them. It fails when Debian testing has moved out of range.
# usage: ci/canary.sh
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
TIERCEL_CACHE=$(mktemp -d "${XDG_CACHE_HOME:-$HOME/.cache}/tiercel-canary.XXXXXX")
export TIERCEL_CACHE TIERCEL_BAZEL_MODE=airgap
trap './bazelw shutdown; chmod -R u+w "$TIERCEL_CACHE"; rm -rf "$TIERCEL_CACHE"' EXIT
./bazelw build //python:wheels
./bazelw test //tests/build/... //tests/packaging/...
