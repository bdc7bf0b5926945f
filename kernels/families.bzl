# SPDX-License-Identifier: Apache-2.0
"""The kernel families: kernels/<family>, benchmarks/suites/<family>.yaml."""

FAMILIES = [
    "gemv",
    "linear",
    "quant",
    "routing",
]
