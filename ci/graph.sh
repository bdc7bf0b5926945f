#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks that the wheels of all Pythons share one compile of each kernel, also when the command line
# names a Python.
# usage: ci/graph.sh
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The output of every kernel compile below the wheels, without the folder of its configuration.
kernel_objects() {
  ./bazelw aquery --ui_event_filters=-info,-warning --noshow_progress --output=text "$@" \
    'mnemonic("CudaCompile|CuteCompile", deps(//python:wheels))' |
    sed -nE 's|^ *Outputs: \[bazel-out/[^/]+/bin/([^],]+).*|\1|p' | sort
}

check() {
  local title=$1 objects twice
  shift
  objects=$(kernel_objects "$@")
  if [[ -z $objects ]]; then
    echo "graph: $title: no kernel is compiled for the wheels" >&2
    return 1
  fi
  twice=$(uniq -d <<<"$objects")
  if [[ -n $twice ]]; then
    echo "graph: $title: compiled more than once:" "$twice" >&2
    return 1
  fi
  echo "graph: $title: $(wc -l <<<"$objects") kernel compile(s), each once"
}

# The default goes last: Bazel then keeps the analysis that the next build wants.
check "Python 3.13" --@rules_python//python/config_settings:python_version=3.13
check "default Python"
