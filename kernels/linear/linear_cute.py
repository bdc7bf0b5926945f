# SPDX-License-Identifier: Apache-2.0
"""The kernels of linear_act that are compiled ahead of time."""

import cutlass
from declaration import Function, Launch, Pointer, Scalar, TensorMap
from linear_act_cute import LinearAct
from linear_act_splitk_cute import LinearActSplitK
from linear_layouts_cute import EPI, MAJORS

_DTYPES = {"bf16": (cutlass.BFloat16, "kBFloat16"), "fp16": (cutlass.Float16, "kFloat16")}
_FP8 = {"fp8": (cutlass.Float8E4M3FN, "kFloat8E4M3")}
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
    "blocks": "kBlocks",
    "gated_blocks": "kGatedBlocks",
    "grad_x": "kGradX",
    "grad_weight": "kGradWeight",
}
_PREFIXES = {
    "plain": "linear_act",
    "extra": "linear_act_extra",
    "gated": "gated_linear",
    "blocks": "linear_act_blocks",
    "gated_blocks": "gated_linear_blocks",
    "grad_x": "linear_act_grad_x",
    "grad_weight": "linear_act_grad_weight",
}

# Tile rows and columns, turns instead of sharing, blocks a cluster, stages of the ring and of the
# epilogue. Shared memory is what decides about stages.
_LARGE = (
    (128, 256, False, 2, 4, 2),
    (128, 192, False, 2, 5, 1),
    (128, 128, True, 2, 6, 1),
)
_ALONE = (128, 128, False, 1, 6, 2)  # of some kinds: no cluster
# Tile rows and columns, stages.
_SMALL = (
    (64, 32, 8),
    (64, 112, 9),
    (128, 64, 8),
    (128, 96, 7),
    (128, 112, 7),
)
_NARROW = ((64, 64, 6), (128, 64, 8))
# For a K that is not split, in the batch-invariant mode: one block a multiprocessor.
_WHOLE = ((64, 32, 17), (64, 48, 15), (64, 64, 13))

# Of the other kinds, what measurements chose.
_EXTRA = (_LARGE[2],)
_GATES = ("silu", "gelu", "gelu_tanh")
# 12288 features in 256 tiles, of which each multiprocessor has two at once; for bfloat16.
_SILU = (64, 96, 5)
_GATED = (_LARGE[2], (128, 256, False, 1, 4, 2))
_GRADIENTS = {
    "grad_x": (_LARGE[0], _LARGE[2], _ALONE),
    "grad_weight": (_LARGE[0], _LARGE[2]),
}

_FP8_ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh")
_FP8_LARGE = (_LARGE[2], _ALONE)
_BLOCKS_LARGE = (
    _LARGE[0],
    (128, 192, False, 2, 4, 3),
    (128, 192, False, 1, 5, 1),
    (128, 144, False, 1, 6, 1),
    (128, 128, False, 1, 6, 1),
)

# 24576 columns in 256 tiles, of which each multiprocessor has two at once.
_BLOCKS_SMALL = (*_NARROW, (64, 96, 5))
_GATED_BLOCKS_LARGE = (_BLOCKS_LARGE[0], _BLOCKS_LARGE[-1])

_OF_BLOCKS = ("across", "activation")
_SCALARS = ("m", "n", "k", "group", "save", "x_step", "w_step", "rows", "splits", "blocks")
_SCALARS += _OF_BLOCKS
_PROBLEMS = tuple(
    dict(zip(_SCALARS, values, strict=True))
    for values in (
        (1000, 768, 512, 8, 1, 1, 1, 64, 2, 64, 1, 2),
        (129, 2056, 1040, 3, 1, 0, 1, 64, 4, 132, 5, 0),
        (8, 8, 16, 1, 1, 1, 0, 8, 1, 2, 7, 4),
    )
)
# Kinds without an activation in their names: those of blocks have all of them.
_WITHOUT = (*MAJORS, "blocks", "gated_blocks")


def _rows_of_w(kind):
    return "2 * n" if kind in ("gated", "gated_blocks") else "n"


def _operand(kernel, tensor, rows, box, blocks=1):
    """A block of the cluster loads its share of the rows, or of what is summed over."""
    if kernel.majors["xw".index(tensor)] == "k":
        return TensorMap(tensor, (rows, "k"), (box // blocks, kernel.tile_k))
    return TensorMap(tensor, ("k", rows), (kernel.tile_k // blocks, EPI))


def _beside(kernel, align):
    """Pointers of what there may be beside the operands."""
    names = ("bias", "residual")
    pointers = [Pointer(name, kernel.out_dtype, align=align) for name in names]
    scales = [Pointer(name, cutlass.Float32, align=4) for name in ("x_scale", "w_scale")]
    return (*pointers, *scales)


def _attributes(dtype, act, tile_m, tile_n, pingpong, cluster, stages, split_k, kind, whole=False):
    flags = [str(flag).lower() for flag in (pingpong, split_k, whole)]
    return (
        f"LinearKind::{_KINDS[kind]}",
        f"DType::{(_DTYPES | _FP8)[dtype][1]}",
        f"Activation::{_ENUMERATORS.get(act, 'kNone')}",
        str(tile_m),
        str(tile_n),
        flags[0],
        str(cluster),
        str(stages),
        *flags[1:],
    )


def _large(dtype, act, tile_m, tile_n, pingpong, cluster, stages, epi_stages, kind="plain"):
    element = (_DTYPES | _FP8)[dtype][0]
    name = f"{_PREFIXES[kind]}_{dtype}" + f"_{act}" * (kind not in _WITHOUT)
    name += f"_{tile_m}x{tile_n}" + "_pingpong" * pingpong
    name += "_alone" * (kind == "blocks" and tile_n == 192 and cluster == 1)
    kernel = LinearAct(
        *(name, element, act, tile_m, tile_n, pingpong, cluster, stages, epi_stages),
        kind,
    )
    x, w = Pointer("x", element), Pointer("w", element)
    y, sums = Pointer("y", kernel.out_dtype), Pointer("sums", kernel.out_dtype)
    beside = _beside(kernel, 2)
    names = ("m", "n", "k", "group", "save", "x_step", "w_step")
    scalars = [Scalar(name) for name in names + _OF_BLOCKS * kernel.blocks]
    piece = ((EPI, EPI), "128B") if kernel.piece == EPI else ((EPI, 16), "32B")
    launch = Launch(
        parameters=(
            _operand(kernel, "x", "m", tile_m),
            _operand(kernel, "w", _rows_of_w(kind), kernel.width, cluster),
            *(TensorMap(name, ("m", "n"), *piece) for name in ("y", "sums")),
            *(*beside, *scalars),
        ),
        grid=("blocks", 1, 1),
        block=(kernel.threads, 1, 1),
        cluster=(cluster, 1, 1),
        smem=kernel.smem_bytes(),
        dependent=True,
    )
    attributes = _attributes(dtype, act, tile_m, tile_n, pingpong, cluster, stages, False, kind)
    arguments = (x, w, *beside, y, sums, *scalars, Scalar("blocks"))
    # Rows that lie together begin on 16 bytes each.
    step = 8 if kernel.majors[0] == "mn" else 1
    problems = tuple({**p, "m": -(-p["m"] // step) * step} for p in _PROBLEMS)
    return Function(name, kernel, arguments, (launch,), attributes, problems)


def _small(dtype, act, tile_m, tile_n, stages, kind="plain", whole=False):
    element = (_DTYPES | _FP8)[dtype][0]
    name = f"{_PREFIXES[kind]}_{dtype}" + f"_{act}" * (kind not in _WITHOUT)
    name += f"_{tile_m}x{tile_n}" + ("_whole_k" if whole else "_split_k")
    kernel = LinearActSplitK(name, element, act, tile_m, tile_n, stages, kind)
    x, w = Pointer("x", element), Pointer("w", element)
    y, sums = (Pointer(name, kernel.out_dtype, align=8) for name in ("y", "sums"))
    beside = _beside(kernel, 8)
    names = ("m", "n", "k", "rows", "x_step", "w_step")
    scalars = [Scalar(name) for name in names]
    of_blocks = [Scalar(name) for name in _OF_BLOCKS * kernel.blocks]
    launch = Launch(
        parameters=(
            _operand(kernel, "x", "m", tile_m),
            _operand(kernel, "w", _rows_of_w(kind), kernel.width),
            *(*beside, y, sums, *scalars, *of_blocks),
        ),
        grid=("blocks", 1, 1),
        block=(kernel.threads, 1, 1),
        cluster=("splits", 1, 1),
        smem=kernel.smem_bytes(),
        dependent=True,
    )
    attributes = _attributes(dtype, act, tile_m, tile_n, False, 1, stages, True, kind, whole)
    launched = (Scalar("splits"), *of_blocks, Scalar("blocks"))
    arguments = (x, w, *beside, y, sums, *scalars, *launched)
    return Function(name, kernel, arguments, (launch,), attributes, _PROBLEMS)


def variant(dtype, act, tile_m, tile_n, pingpong, split_k, kind="plain"):
    """One that the precompiled set lacks; tiercel.jit compiles it on the user's machine."""
    for shape in _SMALL if split_k else (*_LARGE, _ALONE):
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
            if (dtype, act) == ("bf16", "none"):
                built += [_small(dtype, act, *shape, whole=True) for shape in _WHOLE]
            if act in _GATES:
                built += [_large(dtype, act, *shape, kind="gated") for shape in _GATED]
                wave = (_SILU,) if (dtype, act) == ("bf16", "silu") else ()
                built += [_small(dtype, act, *shape, kind="gated") for shape in (*_NARROW, *wave)]
        for kind in MAJORS:
            built += [_large(dtype, "none", *shape, kind=kind) for shape in _GRADIENTS[kind]]
        built += [_small(dtype, "none", *shape, kind="grad_x") for shape in _NARROW]
    for act in _FP8_ACTIVATIONS:
        built += [_large("fp8", act, *shape) for shape in _FP8_LARGE]
        built += [_small("fp8", act, *shape) for shape in _NARROW]
    built += [_large("fp8", "none", *shape, kind="blocks") for shape in _BLOCKS_LARGE]
    built += [_small("fp8", "none", *shape, kind="blocks") for shape in _BLOCKS_SMALL]
    built += [_large("fp8", "none", *shape, kind="gated_blocks") for shape in _GATED_BLOCKS_LARGE]
    built.append(_small("fp8", "none", *_NARROW[0], kind="gated_blocks"))
    return built
