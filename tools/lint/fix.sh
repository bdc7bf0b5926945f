#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# bazel run //tools/lint:fix
exec python3 "$@"
