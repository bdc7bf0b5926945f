# SPDX-License-Identifier: Apache-2.0
"""The kernels of moe_up and moe_down that are compiled ahead of time."""

import cutlass
from declaration import Function, Launch, Pointer, Scalar, TensorMap
from moe_grouped_cute import MoeGrouped

_DTYPES = {
    "bf16": (cutlass.BFloat16, "kBFloat16"),
    "fp16": (cutlass.Float16, "kFloat16"),
    "fp8": (cutlass.Float8E4M3FN, "kFloat8E4M3"),
}
_DTYPES["fp8_blocks"] = _DTYPES["fp8"]  # with scales of 1x128 and 128x128 values
_ACTIVATIONS = {
    None: "kSilu",
    "silu": "kSilu",
    "gelu": "kGelu",
    "relu": "kRelu",
    "gelu_residual": "kGeluResidual",
}


def block_scaled(dtype):
    return dtype == "fp8_blocks"


def _shapes(dtype, act):
    """Tile rows, which are the routing's blocks, and columns, turns instead of sharing, stages of
    the ring, rows of x by boxes. tune/ops/moe.py lists them too."""
    # Of 64 rows, the bytes of a tile take no longer than its way out: turns hide that.
    shapes = [(64, 128, True, 8)]
    if block_scaled(dtype):
        shapes.append((128, 256, False, 4))
        return [*shapes, (128, 256, False, 4, True)] if act is None else shapes
    if act is None or dtype != "fp8":  # for `up` of float8 wider ones were better everywhere
        shapes.append((64, 64, True, 12))
    shapes.append((128, 256, False, 4))
    if act is None and dtype != "fp8":  # `up` may store rows in the routing's order
        shapes.append((128, 256, False, 4, True))
    return shapes


_SCALARS = (
    *("experts", "w_rows", "k", "second", "rows", "elements", "divide", "x_pieces", "id_words"),
    *("bound", "early", "x_scale_step", "w_scale_expert", "w_scale_step", "x_rows", "to_slots"),
    "listed",
)
_PROBLEMS = tuple(
    dict(zip((*_SCALARS, "blocks"), values, strict=True))
    for values in (
        (5, 272, 336, 136, 136, 40, 2, 42, 1, 5, 0, 1, 272, 1, 40, 0, 3, 132),
        (1, 8, 16, 128, 8, 1, 1, 2, 2, 1, 1, 0, 1, 0, 8, 1, 2, 2),
    )
)


def function(dtype, act, tile_m, tile_n, pingpong, stages, by_boxes=False):
    element = _DTYPES[dtype][0]
    half = "down" if act is None else f"up_{act}"
    name = f"moe_{half}_{dtype}_{tile_m}x{tile_n}"
    name += "_pingpong" * pingpong + "_boxes" * by_boxes
    sizes = (tile_m, tile_n, pingpong, stages)
    kernel = MoeGrouped(name, element, act, *sizes, block_scaled(dtype), by_boxes)
    x, w, out = Pointer("x", element), Pointer("w", element), Pointer("out", kernel.out_dtype)
    routing = [
        Pointer(name, cutlass.Int32, align=4)
        for name in ("sorted_ids", "expert_ids", "used", "counter", "progress")
    ]
    weights = Pointer("weights", cutlass.Float32, align=4)
    ids = Pointer("ids", cutlass.Int32, align=4)
    scales = [
        Pointer(name, cutlass.Float32, align=4) for name in ("x_scale", "w_scale", "out_scale")
    ]
    scalars = [Scalar(name) for name in _SCALARS]
    rest = (*routing, weights, ids, *scales, out, *scalars)
    launch = Launch(
        parameters=(
            TensorMap("w", ("experts", "w_rows", "k"), (1, kernel.half, kernel.tile_k)),
            *([TensorMap("x", ("x_rows", "k"), (tile_m, kernel.tile_k))] * by_boxes),
            *(x, *rest),
        ),
        grid=("blocks", 1, 1),
        block=(kernel.threads, 1, 1),
        smem=kernel.smem_bytes(),
        dependent=True,
    )
    attributes = (
        f"DType::{_DTYPES[dtype][1]}",
        str(block_scaled(dtype)).lower(),
        str(act is not None).lower(),
        f"MoeActivation::{_ACTIVATIONS[act]}",
        str(tile_m),
        str(tile_n),
        "1",  # blocks of a cluster
        str(by_boxes).lower(),
    )
    arguments = (x, w, *rest, Scalar("blocks"))
    return Function(name, kernel, arguments, (launch,), attributes, _PROBLEMS)


def functions():
    return [
        function(dtype, act, *shape)
        for dtype in _DTYPES
        for act in _ACTIVATIONS
        for shape in _shapes(dtype, act)
    ]
