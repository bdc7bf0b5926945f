#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Copies the checkout to a folder, which is made anew: what git has or would add, so changes that are
# not committed yet, too.
# usage: ci/copy.sh FOLDER
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
rm -rf "$1"
mkdir -p "$1"
folder=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
git ls-files -z --cached --others --exclude-standard |
  tar --create --null --files-from=- --ignore-failed-read |
  tar --extract --no-same-owner --directory="$folder"
