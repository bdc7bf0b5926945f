# SPDX-License-Identifier: Apache-2.0
"""Float8 values with a scale for each block."""

import torch


def dequantized(values, scale, down):
    """values * scale in float64; a scale is of `down` rows and 128 columns."""
    rows, columns = values.shape
    scale = scale.double().repeat_interleave(down, 0).repeat_interleave(128, 1)
    return values.double() * scale[:rows, :columns]


def blocks(w):
    """Experts' weights in float8, drawn scales of 128x128 values, and these for each value."""
    sizes = (w.shape[0], -(-w.shape[1] // 128), w.shape[2] // 128)
    scale = torch.rand(*sizes, generator=torch.Generator().manual_seed(4)) + 0.5
    wide = scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    return w.to(torch.float8_e4m3fn), scale, wide
