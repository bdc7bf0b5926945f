# SPDX-License-Identifier: Apache-2.0
"""The integers that a forward kernel takes, and how its declarations name and check them."""

from typing import NamedTuple

from cutlass import Int32
from declaration import Scalar

from kernels.attention.common.packed import SIZES

MASKS = {"none": "kNone", "causal": "kCausal", "window": "kWindow"}


class Problem(NamedTuple):
    """AttentionScalars in problem.h, in a kernel's order of parameters."""

    batch: Int32
    seq_q: Int32  # lengths are the longest sequence's
    seq_k: Int32
    heads: Int32
    kv_heads: Int32
    scale: Int32  # the bits of a float32
    slope: Int32  # as `scale`
    left: Int32
    right: Int32
    band: Int32  # heads whose tiles alternate


SCALARS = Problem(*map(Scalar, Problem._fields))

_ONE = 0x3F800000
_REST = {"scale": _ONE, "slope": _ONE, "left": 5, "right": 0}
_REST |= {name: 9 + i for i, name in enumerate(SIZES)}  # each a different number

# The build runs the host function on these, and compares its launches with the declaration.
CHECKED = (
    dict(batch=2, seq_q=1000, seq_k=777, heads=8, kv_heads=2, **_REST, band=3, blocks=132),
    dict(batch=1, seq_q=64, seq_k=128, heads=1, kv_heads=1, **_REST, band=1, blocks=1),
    dict(batch=3, seq_q=1, seq_k=1, heads=2, kv_heads=1, **_REST, band=4, blocks=6),
)
