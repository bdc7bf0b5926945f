#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fetches the supported Pythons (MODULE.bazel) that this machine lacks, with the locked uv, which has
# the hash of each. A build machine of CI runs it once.
# usage: ci/pythons.sh
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
say='import pathlib, sdist; print(*sdist.supported_pythons(pathlib.Path(".")))'
read -ra supported <<<"$(PYTHONPATH=tools/pep517 python3 -c "$say")"
missing=()
for version in "${supported[@]}"; do
  type -P "python$version" >/dev/null || missing+=("$version")
done
if [[ ${#missing[@]} -eq 0 ]]; then
  echo "pythons: ${supported[*]} are there"
  exit
fi
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes \
  --no-deps -r tools/python/locks/uv.lock
"$scratch/venv/bin/uv" python install "${missing[@]}"
