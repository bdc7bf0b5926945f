#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Audits wheels: platform, contents, licences, bill of materials, size, and what else a stranger
# cannot see (ci/README.md). Writes SHA256SUMS and the bill of materials into a folder that passes.
# usage: ci/audit.sh [--rebuild] [--version V] [FOLDER_OR_WHEEL ...]        (default: dist)
#   --rebuild   also builds the wheels of this checkout again, twice from nothing, and compares
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
rebuild=""
if [[ ${1:-} == --rebuild ]]; then
  rebuild=yes
  shift
fi
[[ $# -gt 0 ]] || set -- "$root/dist"
"$root/bazelw" run --noshow_progress --ui_event_filters=-info //tools/audit -- "$@"
if [[ -n $rebuild ]]; then
  for folder in "$@"; do
    if [[ -d $folder ]]; then "$root/ci/reproducible.sh" --compare "$folder"; fi
  done
fi
