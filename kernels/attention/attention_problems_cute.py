# SPDX-License-Identifier: Apache-2.0
"""What the declarations of attention's forward kernels share: masks, scalars, problems to check."""

from attention_packed_cute import SCALARS

MASKS = {"none": "kNone", "causal": "kCausal", "window": "kWindow"}

_ONE = 0x3F800000
REST = {"scale": _ONE, "slope": _ONE, "left": 5, "right": 0}
_REST = REST | {name: 9 + i for i, name in enumerate(SCALARS)}  # each another number
PROBLEMS = (
    dict(batch=2, seq_q=1000, seq_k=777, heads=8, kv_heads=2, **_REST, band=3, blocks=132),
    dict(batch=1, seq_q=64, seq_k=128, heads=1, kv_heads=1, **_REST, band=1, blocks=1),
    dict(batch=3, seq_q=1, seq_k=1, heads=2, kv_heads=1, **_REST, band=4, blocks=6),
)
