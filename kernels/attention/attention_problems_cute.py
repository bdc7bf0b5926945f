# SPDX-License-Identifier: Apache-2.0
"""What the declarations of attention's forward kernels share: masks, scalars, problems to check."""

MASKS = {"none": "kNone", "causal": "kCausal", "window": "kWindow"}

_ONE = 0x3F800000
REST = {"scale": _ONE, "slope": _ONE, "left": 5, "right": 0}
PROBLEMS = (
    dict(
        batch=2, seq_q=1000, seq_k=777, heads=8, kv_heads=2, **REST, band=3, total_q=9, blocks=132
    ),
    dict(batch=1, seq_q=64, seq_k=128, heads=1, kv_heads=1, **REST, band=1, total_q=9, blocks=1),
    dict(batch=3, seq_q=1, seq_k=1, heads=2, kv_heads=1, **REST, band=4, total_q=9, blocks=6),
)
