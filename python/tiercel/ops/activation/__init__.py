# SPDX-License-Identifier: Apache-2.0
"""Activations, and the gated ones: silu_and_mul and its like."""
