#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Releases a version: builds, audits, tries it from the test index, publishes, tags (docs/releasing.md).
# usage: ci/release.sh VERSION [--dry-run] [--yes] [--wheels FOLDER] [--remote NAME]
#   --dry-run   all but the uploads and the tag; needs no account
#   --yes       does not ask before the upload to the index
#   --wheels    a folder that ci/build.sh filled from this commit, instead of building
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
exec "$root/bazelw" run --noshow_progress --ui_event_filters=-info //tools/release -- "$@"
