# SPDX-License-Identifier: Apache-2.0
"""Float8 values with a scale for each block."""


def dequantized(values, scale, down):
    """values * scale in float64; a scale is of `down` rows and 128 columns."""
    rows, columns = values.shape
    scale = scale.double().repeat_interleave(down, 0).repeat_interleave(128, 1)
    return values.double() * scale[:rows, :columns]
