#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks that the wheels of all Pythons share one compile of each kernel, also when the command line
# names a Python, and that `//...` adds none.
# usage: ci/graph.sh
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The outputs of the compiles that a query finds, without the folder of their configuration.
compiled() {
  local query=$1
  shift
  ./bazelw aquery --ui_event_filters=-info,-warning --noshow_progress --output=text "$@" "$query" |
    sed -nE 's|^ *Outputs: \[bazel-out/[^/]+/bin/([^],]+).*|\1|p' | sort
}

check() {
  local title=$1 objects twice
  shift
  objects=$(compiled 'mnemonic("CudaCompile|CuteCompile", deps(//python:wheels))' "$@")
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
# Wheels and tests build a kernel's library for one Python; as a target of `//...` it would be compiled
# once more, for none. The rule for CuTe kernels sets the Python itself.
again=$(compiled 'mnemonic("CudaCompile", //... except attr(tags, manual, //...))')
if [[ -n $again ]]; then
  echo "graph: compiled again for //..., lacks the tag manual:" "$again" >&2
  exit 1
fi
