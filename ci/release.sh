#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Releases a version: builds, audits, tries it from the test index, publishes, tags (docs/releasing.md).
# usage: ci/release.sh VERSION [OPTION...]
#   --dry-run           all but the uploads and the tag; needs no account
#   --yes               does not ask before the upload to the index
#   --wheels FOLDER     a folder that ci/build.sh --release filled from this commit, instead of building
#   --remote NAME       where the tag goes (default: origin)
#   --without-gpu-run   does not wait for the GPU tests of this commit to pass
#   --only install      installs --wheels from the test index, where another job uploaded them
#   --only tag          tags what another job uploaded to the index
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
invoked_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ " $* " == *" --only tag "* ]]; then
  # Git and Python alone: the job that may write runs nothing that was fetched.
  BUILD_WORKSPACE_DIRECTORY=$PWD BAZELW_INVOKED_FROM=$invoked_from \
    exec python3 tools/release/main.py "$@"
fi
source ci/run_tool.sh
run_tool //tools/release "$@"
