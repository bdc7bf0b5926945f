# SPDX-License-Identifier: Apache-2.0
"""Architectures that kernels can be built for, as rules_cuda spells them."""

ARCHS = {
    "sm_90a": "compute_90a:sm_90a",
}
