#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds tonight's wheels (X.Y.Z.devYYYYMMDD), audits and tries them, and publishes them as the
# prerelease `tiercel-nightly` with gh (docs/releasing.md).
# usage: ci/nightly.sh [OPTION...]
#   --date YYYYMMDD     default: today, UTC
#   --dry-run           builds and tries, publishes nothing
#   --folder FOLDER     where the wheels go (default: out/nightly/VERSION)
#   --publish           publishes what a dry run left in --folder, and builds nothing
#   --without-gpu-run   does not wait for the GPU tests of this commit to pass
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
invoked_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ " $* " == *" --publish "* ]]; then
  # gh and Python alone: the job that may write runs nothing that was fetched.
  BUILD_WORKSPACE_DIRECTORY=$PWD BAZELW_INVOKED_FROM=$invoked_from \
    exec python3 tools/release/nightly.py "$@"
fi
source ci/run_tool.sh
run_tool //tools/release:nightly "$@"
