#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Analyses all targets with the defaults of newer Bazels, as far as Bazel 7 has them as options. It builds
# nothing.
# usage: ci/next_bazel.sh
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
options=(
  auto_exec_groups
  check_visibility_for_toolchains
  config_setting_private_default_visibility
  disable_native_repo_rules
  disable_starlark_host_transitions
  disallow_empty_glob
  disallow_struct_provider_syntax
  no_implicit_watch_label
  use_plus_in_repo_names
)
./bazelw build --nobuild "${options[@]/#/--incompatible_}" //...
