#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds tonight's wheels (X.Y.Z.devYYYYMMDD), audits and tries them, and publishes them as the
# prerelease `tiercel-nightly` with gh (docs/releasing.md).
# usage: ci/nightly.sh [--date YYYYMMDD] [--dry-run]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
exec "$root/bazelw" run --noshow_progress --ui_event_filters=-info //tools/release:nightly -- "$@"
