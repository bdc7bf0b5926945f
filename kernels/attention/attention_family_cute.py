# SPDX-License-Identifier: Apache-2.0
"""The kernels of attention that are compiled ahead of time."""

import cutlass
from attention_cute import PIECE, ROWS, Attention
from declaration import Function, Launch, Pointer, Scalar, TensorMap

_DTYPES = {"bf16": (cutlass.BFloat16, "kBFloat16"), "fp16": (cutlass.Float16, "kFloat16")}

# Head dimension, warpgroups, keys a block, stages of k and v, and of q.
_TILES = (
    (128, 2, 128, 2, 2, 0),
    (64, 3, 128, 2, 2, 0),
)

_ONE = 0x3F800000
_PROBLEMS = (
    dict(batch=2, seq_q=1000, seq_k=777, heads=8, kv_heads=2, scale=_ONE, band=3, blocks=132),
    dict(batch=1, seq_q=64, seq_k=128, heads=1, kv_heads=1, scale=_ONE, band=1, blocks=1),
    dict(batch=3, seq_q=1, seq_k=1, heads=2, kv_heads=1, scale=_ONE, band=4, blocks=6),
)


def _function(dtype, d, warpgroups, tile_n, stages, q_stages, by_polynomial, causal):
    element = _DTYPES[dtype][0]
    name = f"attention_{dtype}_d{d}_{ROWS * warpgroups}x{tile_n}" + ("_causal" if causal else "")
    kernel = Attention(name, element, d, warpgroups, tile_n, causal, stages, q_stages, by_polynomial)
    q, k, v, o = (Pointer(name, element) for name in ("q", "k", "v", "o"))
    lse = Pointer("lse", cutlass.Float32, align=4)
    names = ("batch", "seq_q", "seq_k", "heads", "kv_heads", "scale", "band", "blocks")
    scalars = [Scalar(name) for name in names]
    q_shape, k_shape = ("batch", "heads", "seq_q", d), ("batch", "kv_heads", "seq_k", d)
    launch = Launch(
        parameters=(
            TensorMap("q", q_shape, (1, 1, kernel.tile_m, PIECE)),
            TensorMap("k", k_shape, (1, 1, tile_n, PIECE)),
            TensorMap("v", k_shape, (1, 1, tile_n, PIECE)),
            TensorMap("o", q_shape, (1, 1, ROWS, PIECE)),
            lse,
            *scalars[:-1],
        ),
        grid=("blocks", 1, 1),
        block=(kernel.threads, 1, 1),
        smem=kernel.smem_bytes(),
        dependent=True,
    )
    attributes = (
        f"DType::{_DTYPES[dtype][1]}",
        str(d),
        str(kernel.tile_m),
        str(tile_n),
        str(causal).lower(),
    )
    return Function(name, kernel, (q, k, v, o, lse, *scalars), (launch,), attributes, _PROBLEMS)


def functions():
    return [
        _function(dtype, *tile, causal)
        for dtype in _DTYPES
        for tile in _TILES
        for causal in (False, True)
    ]
