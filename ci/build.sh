#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the wheels, one for each supported Python, and copies them to a folder, with build.json,
# which says of which commit they are.
# usage: ci/build.sh [FOLDER]        (default: dist)
set -euo pipefail

invoked_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1:-} in
  "") folder=$PWD/dist ;;
  /*) folder=$1 ;;
  *) folder=$invoked_from/$1 ;;
esac

source ci/cache.sh
./bazelw build //python:wheels
./bazelw run //python:dist -- "$folder"
python3 tools/release/record.py "$folder"
