#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs every test that needs no GPU, then checks the build graph. The last line counts the results;
# the log is OUT/test_cpu.log.
# usage: [OUT=FOLDER] ci/test_cpu.sh [BAZEL_TEST_OPTION...]        (default folder: out)
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/cache.sh
out=${OUT:-out}
mkdir -p "$out"

failed_checks=0
passed_checks=0
tests=0
./bazelw test //... "$@" </dev/null 2>&1 | tee "$out/test_cpu.log" || tests=$?
if ci/graph.sh </dev/null; then passed_checks=1; else failed_checks=1; fi

# Bazel ends with a line for each test target: its label, "(cached)" or not, and the result.
count() {
  grep -cE "^(@[^ ]*)?//[^ ]+ +(\(cached\) )?($1)([ ,]|$)" "$out/test_cpu.log" || true
}
passed=$(($(count 'PASSED|FLAKY') + passed_checks))
failed=$(($(count 'FAILED|TIMEOUT|NO STATUS|INCOMPLETE|REMOTE FAILURE') + failed_checks))
# A broken build, or no test at all, is a failure without such a line.
if ((tests != 0 && failed == 0)); then failed=1; fi

echo "$passed passed, $failed failed"
((failed == 0))
