# SPDX-License-Identifier: Apache-2.0
"""The integers that the backward kernel takes."""

from typing import NamedTuple

from cutlass import Int32


class BackwardProblem(NamedTuple):
    """In the kernel's order of parameters."""

    batch: Int32
    seq_q: Int32
    seq_k: Int32
    heads: Int32
    kv_heads: Int32
    scale: Int32  # the bits of a float32, as slope and gain
    slope: Int32
    gain: Int32
    left: Int32
    right: Int32
    band: Int32  # heads whose tiles alternate
    descending: Int32  # tiles of late keys come first
