# SPDX-License-Identifier: Apache-2.0
"""Which tiles fused_moe's halves have kernels for; read without torch by the tuner too."""

from __future__ import annotations


def tiles(block: int, half: str, dtype: str) -> tuple[tuple[int, int], ...]:
    """(tile, cluster) of the kernels that there are: those of kernels/moe/moe_cute.py."""
    if block == 64:
        wide_only = half == "up" and dtype == "float8_e4m3fn"
        return ((128, 1),) if wide_only else ((128, 1), (64, 1))
    return ((256, 1),)
