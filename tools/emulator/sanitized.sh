#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a command whose libraries were built with --config=asan: Python is not, so the sanitizers have
# to be there before it. bazel test --run_under=//tools/emulator:sanitized
set -euo pipefail

libraries=""
for path in "$TEST_SRCDIR"/*cxx_toolchain/*/*/lib/*/lib{asan.so.8,ubsan.so.1,stdc++.so.6}; do
  libraries+="${libraries:+ }$path" # libstdc++, so that exceptions are seen
done
# What they say goes to files first: pytest holds what a process that ends at once wrote to stderr.
logs=$(mktemp -d)
# Python keeps what it allocated until it ends: leaks say nothing here.
export ASAN_OPTIONS="detect_leaks=0:abort_on_error=1:log_path=$logs/report:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:log_path=$logs/report:${UBSAN_OPTIONS:-}"
status=0
LD_PRELOAD=$libraries "$@" || status=$?
find "$logs" -type f -exec cat {} + >&2
rm -rf "$logs"
exit "$status"
