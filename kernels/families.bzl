# SPDX-License-Identifier: Apache-2.0
"""The kernel families: kernels/<family>, benchmarks/suites/<family>.yaml."""

FAMILIES = [
    "activation",
    "attention",
    "gemv",
    "linear",
    "moe",
    "norm",
    "quant",
    "reduce",
    "rotary",
    "routing",
    "softmax",
    "transpose",
]
