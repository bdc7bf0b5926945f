#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Gives a script of this folder -h and --help: prints the comment at its head and ends it.
# usage: source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"       the script's first command

for tiercel_word in "$@"; do
  if [[ $tiercel_word == -h || $tiercel_word == --help ]]; then
    awk 'NR > 2 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "${BASH_SOURCE[1]:-$0}"
    exit 0
  fi
done
unset tiercel_word
