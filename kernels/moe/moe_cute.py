# SPDX-License-Identifier: Apache-2.0
"""The kernels of moe_up and moe_down for many tokens that are compiled ahead of time."""

import cutlass
from declaration import Function, Launch, Pointer, Scalar, TensorMap
from moe_grouped_cute import TILE_K, MoeGrouped

_DTYPES = {"bf16": (cutlass.BFloat16, "kBFloat16"), "fp16": (cutlass.Float16, "kFloat16")}
_ACTIVATIONS = {
    None: "kSilu",
    "silu": "kSilu",
    "gelu": "kGelu",
    "relu": "kRelu",
    "gelu_residual": "kGeluResidual",
}
_SCALARS = "experts w_rows k second rows elements divide x_row id_words bound early".split()
_PROBLEMS = (
    {"experts": 5, "w_rows": 272, "k": 328, "second": 136, "rows": 136, "elements": 40}
    | {"divide": 2, "x_row": 328, "id_words": 1, "bound": 5, "early": 0, "blocks": 132},
    {"experts": 1, "w_rows": 8, "k": 8, "second": 128, "rows": 8, "elements": 1}
    | {"divide": 1, "x_row": 8, "id_words": 2, "bound": 1, "early": 1, "blocks": 1},
)


def function(dtype, act, tile_m, tile_n, pingpong, cluster, stages):
    element = _DTYPES[dtype][0]
    half = "down" if act is None else f"up_{act}"
    name = f"moe_{half}_{dtype}_{tile_m}x{tile_n}" + "_pingpong" * pingpong + "_multicast" * (cluster > 1)
    kernel = MoeGrouped(name, element, act, tile_m, tile_n, pingpong, cluster, stages)
    x, w, out = Pointer("x", element), Pointer("w", element), Pointer("out", element)
    routing = [Pointer(n, cutlass.Int32, align=4) for n in ("sorted_ids", "expert_ids", "used")]
    weights = Pointer("weights", cutlass.Float32, align=4)
    ids = Pointer("ids", cutlass.Int32, align=4)
    scalars = [Scalar(name) for name in _SCALARS]
    launch = Launch(
        parameters=(
            TensorMap("w", ("experts", "w_rows", "k"), (1, kernel.half, TILE_K)),
            *(x, *routing, weights, ids, out, *scalars),
        ),
        grid=("blocks", 1, 1),
        block=(kernel.threads, 1, 1),
        cluster=(cluster, 1, 1),
        smem=kernel.smem_bytes(),
        dependent=True,
    )
    attributes = (
        f"DType::{_DTYPES[dtype][1]}",
        str(act is not None).lower(),
        f"MoeActivation::{_ACTIVATIONS[act]}",
        str(tile_m),
        str(tile_n),
        str(cluster),
    )
    arguments = (x, w, *routing, weights, ids, out, *scalars, Scalar("blocks"))
    return Function(name, kernel, arguments, (launch,), attributes, _PROBLEMS)


# Tile rows, which are the routing's blocks, and columns, turns instead of sharing, blocks a cluster,
# stages of the ring.
_SHAPES = ((64, 128, False, 1, 8), (128, 256, False, 2, 4))


def functions():
    return [
        function(dtype, act, *shape)
        for dtype in _DTYPES
        for act in _ACTIVATIONS
        for shape in _SHAPES
    ]
