# SPDX-License-Identifier: Apache-2.0
"""The checks of //tools/lint: each is a test_... function of test_lint.py and a target."""

CHECKS = [
    "buildifier",
    "clang_format",
    "file_length",
    "licence_header",
    "pinned_versions",
    "ruff_check",
    "ruff_format",
]
