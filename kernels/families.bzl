# SPDX-License-Identifier: Apache-2.0
"""The kernel families: kernels/<family>, benchmarks/suites/<family>.yaml."""

FAMILIES = [
    "linear",
    "norm",
    "routing",
]
