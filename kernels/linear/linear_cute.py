# SPDX-License-Identifier: Apache-2.0
"""The kernels of linear_act that are compiled ahead of time."""

import cutlass
from declaration import Function, Launch, Pointer, Scalar, TensorMap
from linear_act_cute import EPI, MAJORS, TILE_K, LinearAct
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

_KINDS = {
    "plain": "kPlain",
    "extra": "kExtra",
    "gated": "kGated",
    "grad_x": "kGradX",
    "grad_weight": "kGradWeight",
}
_PREFIXES = {
    "plain": "linear_act",
    "extra": "linear_act_extra",
    "gated": "gated_linear",
    "grad_x": "linear_act_grad_x",
    "grad_weight": "linear_act_grad_weight",
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
    (128, 96, 7),
)

# Of the other kinds, what measurements chose.
_EXTRA = (_LARGE[2],)
_GATES = ("silu", "gelu", "gelu_tanh")
_GATED = (_LARGE[2], (128, 256, False, 1, 4, 2))
_GATED_SMALL = (_SMALL[1], _SMALL[3])
_GRADIENTS = (_LARGE[0], _LARGE[2])
_GRAD_X_SMALL = (_SMALL[1], _SMALL[3])

_PROBLEMS = (
    {"m": 1000, "n": 768, "k": 512, "group": 8, "save": 1, "rows": 64, "splits": 2, "blocks": 64},
    {"m": 129, "n": 2056, "k": 1032, "group": 3, "save": 1, "rows": 64, "splits": 4, "blocks": 132},
    {"m": 8, "n": 8, "k": 8, "group": 1, "save": 1, "rows": 8, "splits": 1, "blocks": 2},
)


def _rows_of_w(kind):
    return "2 * n" if kind == "gated" else "n"


def _operand(tensor, rows, major, box, blocks=1):
    """A block of the cluster loads its share of the rows, or of what is summed over."""
    if major == "k":
        return TensorMap(tensor, (rows, "k"), (box // blocks, TILE_K))
    return TensorMap(tensor, ("k", rows), (TILE_K // blocks, EPI))


def _attributes(dtype, act, tile_m, tile_n, pingpong, cluster, split_k, kind):
    flags = [str(flag).lower() for flag in (pingpong, split_k)]
    return (
        f"LinearKind::{_KINDS[kind]}",
        f"DType::{_DTYPES[dtype][1]}",
        f"Activation::{_ENUMERATORS.get(act, 'kNone')}",
        str(tile_m),
        str(tile_n),
        flags[0],
        str(cluster),
        flags[1],
    )


def _large(dtype, act, tile_m, tile_n, pingpong, cluster, stages, epi_stages, kind="plain"):
    element = _DTYPES[dtype][0]
    name = f"{_PREFIXES[kind]}_{dtype}" + f"_{act}" * (kind not in MAJORS)
    name += f"_{tile_m}x{tile_n}" + "_pingpong" * pingpong
    kernel = LinearAct(
        *(name, element, act, tile_m, tile_n, pingpong, cluster, stages, epi_stages),
        kind,
    )
    x, w, y, sums = (Pointer(name, element) for name in ("x", "w", "y", "sums"))
    bias, residual = Pointer("bias", element, align=2), Pointer("residual", element)
    names = ("m", "n", "k", "group", "save", "blocks")
    m, n, k, group, save, blocks = (Scalar(name) for name in names)

    x_major, w_major = kernel.majors
    launch = Launch(
        parameters=(
            _operand("x", "m", x_major, tile_m, kernel.x_blocks),
            _operand("w", _rows_of_w(kind), w_major, kernel.width, kernel.w_blocks),
            TensorMap("y", ("m", "n"), (EPI, EPI)),
            TensorMap("sums", ("m", "n"), (EPI, EPI)),
            *(bias, residual, m, n, k, group, save),
        ),
        grid=("blocks", 1, 1),
        block=(kernel.threads, 1, 1),
        cluster=(cluster, 1, 1),
        smem=kernel.smem_bytes(),
        dependent=True,
    )
    attributes = _attributes(dtype, act, tile_m, tile_n, pingpong, cluster, False, kind)
    arguments = (x, w, bias, residual, y, sums, m, n, k, group, save, blocks)
    # Rows that lie together begin on 16 bytes each.
    step = 8 if x_major == "mn" else 1
    problems = tuple({**p, "m": -(-p["m"] // step) * step} for p in _PROBLEMS)
    return Function(name, kernel, arguments, (launch,), attributes, problems)


def _small(dtype, act, tile_m, tile_n, stages, kind="plain"):
    element = _DTYPES[dtype][0]
    name = f"{_PREFIXES[kind]}_{dtype}" + f"_{act}" * (kind not in MAJORS)
    name += f"_{tile_m}x{tile_n}_split_k"
    kernel = LinearActSplitK(name, element, act, tile_m, tile_n, stages, kind)
    x, w, y = Pointer("x", element), Pointer("w", element), Pointer("y", element)
    bias, residual, sums = (
        Pointer(name, element, align=8) for name in ("bias", "residual", "sums")
    )
    names = ("m", "n", "k", "rows", "splits", "blocks")
    m, n, k, rows, splits, blocks = (Scalar(name) for name in names)
    launch = Launch(
        parameters=(
            TensorMap("x", ("m", "k"), (tile_m, TILE_K)),
            _operand("w", _rows_of_w(kind), kernel.majors[1], kernel.width),
            *(bias, residual, y, sums, m, n, k, rows),
        ),
        grid=("blocks", 1, 1),
        block=(kernel.threads, 1, 1),
        cluster=("splits", 1, 1),
        smem=kernel.smem_bytes(),
        dependent=True,
    )
    attributes = _attributes(dtype, act, tile_m, tile_n, False, 1, True, kind)
    arguments = (x, w, bias, residual, y, sums, m, n, k, rows, splits, blocks)
    return Function(name, kernel, arguments, (launch,), attributes, _PROBLEMS)


def variant(dtype, act, tile_m, tile_n, pingpong, split_k, kind="plain"):
    """One that the precompiled set lacks; tiercel.jit compiles it on the user's machine."""
    for shape in _SMALL if split_k else _LARGE:
        if shape[:2] == (tile_m, tile_n) and (split_k or shape[2] == pingpong):
            make, kind = (_small, "plain") if split_k else (_large, kind)
            return make(dtype, act, *shape, kind=kind)
    raise ValueError(f"no kernel has tiles of {tile_m}x{tile_n}")


def functions():
    built = []
    for dtype in _DTYPES:
        for act in _ENUMERATORS:
            built += [_large(dtype, act, *shape) for shape in _LARGE]
            built += [_small(dtype, act, *shape) for shape in _SMALL]
            built += [_large(dtype, act, *shape, kind="extra") for shape in _EXTRA]
            if act in _GATES:
                built += [_large(dtype, act, *shape, kind="gated") for shape in _GATED]
                built += [_small(dtype, act, *shape, kind="gated") for shape in _GATED_SMALL]
        for kind in MAJORS:
            built += [_large(dtype, "none", *shape, kind=kind) for shape in _GRADIENTS]
        built += [_small(dtype, "none", *shape, kind="grad_x") for shape in _GRAD_X_SMALL]
    return built
