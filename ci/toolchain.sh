#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Keeps what a build fetched for itself, Bazel and the C++ compiler, as one file, for machines without
# mirrors and for the time when Debian has moved on (docs/airgap.md); attaches it to a release, with gh.
# usage: ci/toolchain.sh FOLDER                       writes toolchain.tar and its hash to the folder
#        ci/toolchain.sh --attach VERSION FOLDER      to the release of the tag vVERSION, made if missing
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
invoked_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
files=(toolchain.tar toolchain.tar.sha256)
folder=${!#}
[[ $folder == /* ]] || folder=$invoked_from/$folder

if [[ $1 != --attach ]]; then
  mkdir -p "$folder"
  # The mode that fetches it.
  TIERCEL_BAZEL_MODE=airgap ./bazelw --export-toolchain "$folder/${files[0]}"
  (cd "$folder" && sha256sum "${files[0]}" >"${files[1]}")
  exit
fi

# gh and coreutils alone: the job that may write runs nothing that was fetched.
(cd "$folder" && sha256sum --check --quiet "${files[1]}")
gh=${GH_PROGRAM:-gh}
tag=v$2
if ! "$gh" release view "$tag" --json tagName >/dev/null; then
  "$gh" release create "$tag" --title "Tiercel $2" \
    --notes "Wheels are on the package index. toolchain.tar builds them without mirrors: docs/airgap.md."
fi
"$gh" release upload "$tag" --clobber "${files[@]/#/$folder/}"
