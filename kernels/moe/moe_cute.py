# SPDX-License-Identifier: Apache-2.0
"""The kernels of moe_up and moe_down that are compiled ahead of time."""

import cutlass
from cutlass import Int32
from declaration import Function, Launch, Pointer, Scalar, TensorMap
from moe_arguments_cute import Arguments
from moe_grouped_cute import MoeGrouped
from moe_variant_cute import MoeVariant

_DTYPES = {
    "bf16": (cutlass.BFloat16, "kBFloat16"),
    "fp16": (cutlass.Float16, "kFloat16"),
    "fp8": (cutlass.Float8E4M3FN, "kFloat8E4M3"),
}
_DTYPES["fp8_blocks"] = _DTYPES["fp8"]  # a scale per 1x128 and 128x128 values
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
    """Rows and columns of a tile, stages of the ring, and x by boxes. tune/ops/moe.py lists them,
    too. Tiles of 64 rows: the warpgroups take turns, since storing such a tile takes as long as
    loading it. Tiles of 128: the warpgroups share one."""
    shapes = [(64, 128, 8)]
    if block_scaled(dtype):
        shapes.append((128, 256, 4))
        return [*shapes, (128, 256, 4, True)] if act is None else shapes
    if act is None or dtype != "fp8":  # for `up` of float8 wider ones were always faster
        shapes.append((64, 64, 12))
    shapes.append((128, 256, 4))
    if act is None and dtype != "fp8":  # `up` may store rows in the routing's order
        shapes.append((128, 256, 4, True))
    return shapes


_SCALARS = tuple(name for name, kind in Arguments.__annotations__.items() if kind is Int32)
# Pointers that are not int32 with 4-byte alignment.
_FLOATS = ("weights", "x_scale", "w_scale", "out_scale")

# Every scalar has a value of its own, so that two that changed places do not go unnoticed.
_PROBLEMS = tuple(
    {name: first + i for i, name in enumerate(_SCALARS)} | {"k": k, "blocks": blocks}
    for first, k, blocks in ((200, 336, 132), (30, 16, 2))
)


def _parameters(variant):
    """The kernel's parameters after its tensor maps."""
    for name, kind in Arguments.__annotations__.items():
        if kind is Int32:
            yield Scalar(name)
        elif name in ("x", "out"):
            yield Pointer(name, variant.dtype if name == "x" else variant.out_dtype)
        else:
            yield Pointer(name, cutlass.Float32 if name in _FLOATS else Int32, align=4)


def function(dtype, act, tile_m, tile_n, stages, by_boxes=False):
    element, enumerator = _DTYPES[dtype]
    pingpong = tile_m == 64
    half = "down" if act is None else f"up_{act}"
    name = f"moe_{half}_{dtype}_{tile_m}x{tile_n}"
    name += "_pingpong" * pingpong + "_boxes" * by_boxes
    v = MoeVariant(name, element, act, tile_m, tile_n, stages, block_scaled(dtype), by_boxes)
    w, parameters = Pointer("w", element), tuple(_parameters(v))
    launch = Launch(
        parameters=(
            TensorMap("w", ("experts", "w_rows", "k"), (1, v.half, v.tile_k)),
            *([TensorMap("x", ("x_rows", "k"), (tile_m, v.tile_k))] * by_boxes),
            *parameters,
        ),
        grid=("blocks", 1, 1),
        block=(v.threads, 1, 1),
        smem=v.smem_bytes(),
        dependent=True,
    )
    attributes = (
        f"DType::{enumerator}",
        str(block_scaled(dtype)).lower(),
        str(act is not None).lower(),
        f"MoeActivation::{_ACTIVATIONS[act]}",
        str(tile_m),
        str(tile_n),
        "1",  # blocks of a cluster
        str(by_boxes).lower(),
    )
    arguments = (w, *parameters, Scalar("blocks"))
    return Function(name, MoeGrouped(v), arguments, (launch,), attributes, _PROBLEMS)


def functions():
    return [
        function(dtype, act, *shape)
        for dtype in _DTYPES
        for act in _ACTIVATIONS
        for shape in _shapes(dtype, act)
    ]
