# SPDX-License-Identifier: Apache-2.0
"""The kernels of linear_act that are compiled ahead of time."""

import cutlass
from declaration import Function, Launch, Pointer, Scalar, TensorMap
from linear_act_cute import EPI, TILE_K, LinearAct
from linear_act_splitk_cute import LinearActSplitK

_DTYPES = {"bf16": (cutlass.BFloat16, "kBFloat16"), "fp16": (cutlass.Float16, "kFloat16")}
# Of the precompiled ones; others are compiled where they are used (variant below).
_ENUMERATORS = {
    "none": "kNone",
    "relu": "kRelu",
    "silu": "kSilu",
    "gelu": "kGelu",
    "gelu_tanh": "kGeluTanh",
}

# Tile rows and columns, turns instead of sharing, blocks a cluster, stages of the ring and of the
# epilogue. Shared memory is what decides about stages.
_LARGE = (
    (128, 256, False, 2, 4, 2),
    (128, 192, False, 2, 5, 1),
    (128, 128, True, 2, 6, 1),
    (128, 128, False, 1, 6, 2),
)
# Tile rows and columns, stages.
_SMALL = (
    (64, 32, 8),
    (64, 64, 6),
    (64, 128, 4),
    (128, 64, 8),
)

_PROBLEMS = (
    {"m": 1000, "n": 768, "k": 512, "group": 8, "rows": 64, "splits": 2, "blocks": 64},
    {"m": 129, "n": 2056, "k": 1032, "group": 3, "rows": 64, "splits": 4, "blocks": 132},
    {"m": 8, "n": 8, "k": 8, "group": 1, "rows": 8, "splits": 1, "blocks": 2},
)


def _attributes(dtype, act, tile_m, tile_n, pingpong, cluster, split_k):
    flags = [str(flag).lower() for flag in (pingpong, split_k)]
    return (
        f"DType::{_DTYPES[dtype][1]}",
        f"Activation::{_ENUMERATORS.get(act, 'kNone')}",
        str(tile_m),
        str(tile_n),
        flags[0],
        str(cluster),
        flags[1],
    )


def _large(dtype, act, tile_m, tile_n, pingpong, cluster, stages, epi_stages):
    element = _DTYPES[dtype][0]
    name = f"linear_act_{dtype}_{act}_{tile_m}x{tile_n}" + ("_pingpong" if pingpong else "")
    kernel = LinearAct(name, element, act, tile_m, tile_n, pingpong, cluster, stages, epi_stages)
    x, w, y = Pointer("x", element), Pointer("w", element), Pointer("y", element)
    bias = Pointer("bias", element, align=2)
    m, n, k, group, blocks = (Scalar(name) for name in ("m", "n", "k", "group", "blocks"))
    launch = Launch(
        parameters=(
            TensorMap("x", ("m", "k"), (tile_m, TILE_K)),
            TensorMap("w", ("n", "k"), (tile_n // cluster, TILE_K)),
            TensorMap("y", ("m", "n"), (EPI, EPI)),
            *(bias, m, n, k, group),
        ),
        grid=("blocks", 1, 1),
        block=(kernel.threads, 1, 1),
        cluster=(cluster, 1, 1),
        smem=kernel.smem_bytes(),
        dependent=True,
    )
    attributes = _attributes(dtype, act, tile_m, tile_n, pingpong, cluster, False)
    arguments = (x, w, bias, y, m, n, k, group, blocks)
    return Function(name, kernel, arguments, (launch,), attributes, _PROBLEMS)


def _small(dtype, act, tile_m, tile_n, stages):
    element = _DTYPES[dtype][0]
    name = f"linear_act_{dtype}_{act}_{tile_m}x{tile_n}_split_k"
    kernel = LinearActSplitK(name, element, act, tile_m, tile_n, stages)
    x, w, y = Pointer("x", element), Pointer("w", element), Pointer("y", element)
    bias = Pointer("bias", element, align=8)
    names = ("m", "n", "k", "rows", "splits", "blocks")
    m, n, k, rows, splits, blocks = (Scalar(name) for name in names)
    launch = Launch(
        parameters=(
            TensorMap("x", ("m", "k"), (tile_m, TILE_K)),
            TensorMap("w", ("n", "k"), (tile_n, TILE_K)),
            *(bias, y, m, n, k, rows),
        ),
        grid=("blocks", 1, 1),
        block=(kernel.threads, 1, 1),
        cluster=("splits", 1, 1),
        smem=kernel.smem_bytes(),
        dependent=True,
    )
    attributes = _attributes(dtype, act, tile_m, tile_n, False, 1, True)
    arguments = (x, w, bias, y, m, n, k, rows, splits, blocks)
    return Function(name, kernel, arguments, (launch,), attributes, _PROBLEMS)


def variant(dtype, act, tile_m, tile_n, pingpong, split_k):
    """One that the precompiled set lacks; tiercel.jit compiles it on the user's machine."""
    for shape in _SMALL if split_k else _LARGE:
        if shape[:2] == (tile_m, tile_n) and (split_k or shape[2] == pingpong):
            return (_small if split_k else _large)(dtype, act, *shape)
    raise ValueError(f"no kernel has tiles of {tile_m}x{tile_n}")


def functions():
    built = []
    for dtype in _DTYPES:
        for act in _ENUMERATORS:
            built += [_large(dtype, act, *shape) for shape in _LARGE]
            built += [_small(dtype, act, *shape) for shape in _SMALL]
    return built
