# SPDX-License-Identifier: Apache-2.0
"""The kernels of grouped_gemm and its gradients that are compiled ahead of time."""

import cutlass
from declaration import Function, Launch, Pointer, Scalar, TensorMap
from grouped_gemm_cute import GroupedGemm
from linear_layouts_cute import EPI

_DTYPES = {"bf16": (cutlass.BFloat16, "kBFloat16"), "fp16": (cutlass.Float16, "kFloat16")}
_KINDS = {"plain": "kPlain", "grad_x": "kGradX", "grad_weight": "kGradWeight"}

# Tile rows and columns, turns instead of sharing, stages of the ring: what measured faster on an
# H200. Turns hide a result's way out behind products, wide tiles read less of a.
_SHAPES = {
    "plain": (128, 256, False, 3),
    "grad_x": (128, 256, False, 3),
    "grad_weight": (128, 256, False, 3),
}

_SCALARS = ("groups", "m", "n", "k", "offset_words")
_PROBLEMS = tuple(
    dict(zip((*_SCALARS, "blocks"), values, strict=True))
    for values in ((5, 272, 336, 136, 1, 132), (1, 8, 16, 128, 2, 2))
)


def _maps(kernel):
    """Of a, b and the result; where the sum does not lie together, boxes have 64 of each."""
    sizes = zip((kernel.tile_m, kernel.tile_n), kernel.majors, strict=True)
    a_box, b_box = ((size, 64) if major == "k" else (64, EPI) for size, major in sizes)
    a = TensorMap("a", ("m", "k"), a_box)
    if kernel.of_weight:
        out = TensorMap("out", ("groups", "k", "n"), (1, EPI, EPI))
        return a, TensorMap("b", ("m", "n"), b_box), out
    sizes = ("n", "k") if kernel.majors[1] == "k" else ("k", "n")
    out = TensorMap("out", ("m", "n"), (EPI, EPI))
    return a, TensorMap("b", ("groups", *sizes), (1, *b_box)), out


def _function(dtype, kind, tile_m, tile_n, pingpong, stages):
    element, enumerator = _DTYPES[dtype]
    name = "grouped_gemm" + f"_{kind}" * (kind != "plain")
    name += f"_{dtype}_{tile_m}x{tile_n}" + "_pingpong" * pingpong
    kernel = GroupedGemm(name, element, kind, tile_m, tile_n, pingpong, stages)
    a, b, out = (Pointer(name, element) for name in ("a", "b", "out"))
    offsets = Pointer("offsets", cutlass.Int32, align=4)
    scalars = [Scalar(name) for name in _SCALARS]
    launch = Launch(
        parameters=(*_maps(kernel), offsets, out, *scalars),
        grid=("blocks", 1, 1),
        block=(kernel.threads, 1, 1),
        smem=kernel.smem_bytes(),
        dependent=True,
    )
    attributes = (
        f"DType::{enumerator}",
        f"GroupedKind::{_KINDS[kind]}",
        str(tile_m),
        str(tile_n),
        str(pingpong).lower(),
    )
    arguments = (a, b, offsets, out, *scalars, Scalar("blocks"))
    return Function(name, kernel, arguments, (launch,), attributes, _PROBLEMS)


def functions():
    return [_function(dtype, kind, *_SHAPES[kind]) for dtype in _DTYPES for kind in _KINDS]
