#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the wheels twice from nothing, in two folders, and compares them.
# usage: ci/reproducible.sh [--compare FOLDER] [SCRATCH_FOLDER]        (not below /tmp; takes about 6 GB)
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
exec "$(dirname "${BASH_SOURCE[0]}")/../tools/wheel/check_reproducible.sh" "$@"
