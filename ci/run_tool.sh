#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Gives a script of this folder run_tool, which builds a program of tools/release and runs it. Secrets
# reach that program alone: Bazel's server stays for hours, and its repository rules start pip and apt.
# usage: source ci/run_tool.sh; run_tool LABEL [ARGUMENT...]       after invoked_from=$PWD and cd to the root

# As tools/release/shell.py has them.
secrets=(TWINE_USERNAME TWINE_PASSWORD TWINE_TEST_USERNAME TWINE_TEST_PASSWORD
  GH_TOKEN GITHUB_TOKEN ACTIONS_ID_TOKEN_REQUEST_TOKEN ACTIONS_RUNTIME_TOKEN)
# Registry mode has no lock file: Debian signs what air-gapped mode takes, and the rest is committed.
export TIERCEL_BAZEL_MODE=${TIERCEL_BAZEL_MODE:-airgap}

run_tool() {
  local label=$1 script
  shift
  script=$(mktemp)
  trap "rm -f '$script'" EXIT
  env "${secrets[@]/#/--unset=}" ./bazelw run --noshow_progress --ui_event_filters=-info \
    --script_path="$script" "$label"
  BAZELW_INVOKED_FROM=$invoked_from "$script" "$@"
}
