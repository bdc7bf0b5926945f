#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Removes from the disk cache what Bazel has not used since this checkout was made: what it uses gets a
# new time.
# usage: ci/trim_cache.sh
#   TIERCEL_DISK_CACHE     the folder
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
find "${TIERCEL_DISK_CACHE:?}" -type f ! -newer "${BASH_SOURCE[0]}" -delete
