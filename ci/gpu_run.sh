#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Waits until the workflow `gpu` has passed at a commit of main, and fails where it has not; with gh.
# usage: ci/gpu_run.sh [--minutes MOST] [COMMIT]        (default: 150, the commit that is checked out)
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec python3 tools/release/gpu_run.py "$@"
