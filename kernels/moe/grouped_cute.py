# SPDX-License-Identifier: Apache-2.0
"""The kernels of grouped_gemm and its gradients that are compiled ahead of time."""

import cutlass
from declaration import Function, Launch, Pointer, Scalar, TensorMap
from grouped_blocks_cute import BlocksArguments, GroupedBlocks
from grouped_gemm_cute import Arguments, GroupedGemm
from linear_layouts_cute import EPI

_DTYPES = {"bf16": (cutlass.BFloat16, "kBFloat16"), "fp16": (cutlass.Float16, "kFloat16")}
_KINDS = {"plain": "kPlain", "grad_x": "kGradX", "grad_weight": "kGradWeight"}

_SHAPE = (128, 256, 3)  # tile rows and columns, stages of the ring

# Tiles of float8: for many rows per group, and for few.
_BLOCKS_SHAPES = ((128, 256, 4), (64, 128, 8))


def _problems(arguments, *every):
    """Every scalar has a value of its own, so that two that changed places do not go unnoticed."""
    kinds = arguments.__annotations__.items()
    scalars = [name for name, kind in kinds if kind is cutlass.Int32]
    return tuple(dict(zip((*scalars, "blocks"), values, strict=True)) for values in every)


_PROBLEMS = _problems(Arguments, (5, 272, 336, 136, 1, 132), (1, 8, 16, 128, 2, 2))
_BLOCKS_PROBLEMS = _problems(
    BlocksArguments, (5, 275, 336, 144, 1, 55, 99, 7, 3, 132), (3, 8, 16, 128, 2, 0, 5, 1, 9, 4)
)


def _maps(kernel):
    """The maps of a, b and the result. Operands whose K is strided have boxes of 64 by 64."""
    sizes = zip((kernel.tile_m, kernel.tile_n), kernel.majors, strict=True)
    step = kernel.tile_k
    a_box, b_box = ((size, step) if major == "k" else (step, EPI) for size, major in sizes)
    a = TensorMap("a", ("m", "k"), a_box)
    if kernel.scaled:
        return a, TensorMap("b", ("groups", "n", "k"), (1, *b_box))
    if kernel.of_weight:
        out = TensorMap("out", ("groups", "k", "n"), (1, EPI, EPI))
        return a, TensorMap("b", ("m", "n"), b_box), out
    sizes = ("n", "k") if kernel.majors[1] == "k" else ("k", "n")
    out = TensorMap("out", ("m", "n"), (EPI, EPI))
    return a, TensorMap("b", ("groups", *sizes), (1, *b_box)), out


def _declared(kernel, enumerator, kind, problems):
    a, b = (Pointer(name, kernel.dtype) for name in ("a", "b"))
    pointers = {
        "offsets": Pointer("offsets", cutlass.Int32, align=4),
        "out": Pointer("out", kernel.out_dtype),
        **{name: Pointer(name, cutlass.Float32, align=4) for name in ("x_scale", "w_scale")},
    }
    parameters = [pointers.get(name) or Scalar(name) for name in kernel.arguments._fields]
    launch = Launch(
        parameters=(*_maps(kernel), *parameters),
        grid=("blocks", 1, 1),
        block=(kernel.threads, 1, 1),
        smem=kernel.smem_bytes(),
        dependent=True,
    )
    attributes = (
        f"DType::{enumerator}",
        f"GroupedKind::{_KINDS[kind]}",
        str(kernel.tile_m),
        str(kernel.tile_n),
    )
    arguments = (a, b, *parameters, Scalar("blocks"))
    return Function(kernel.name, kernel, arguments, (launch,), attributes, problems)


def _function(dtype, kind):
    element, enumerator = _DTYPES[dtype]
    name = "grouped_gemm" + f"_{kind}" * (kind != "plain")
    name += f"_{dtype}_{_SHAPE[0]}x{_SHAPE[1]}"
    return _declared(GroupedGemm(name, element, kind, *_SHAPE), enumerator, kind, _PROBLEMS)


def _blocks(tile_m, tile_n, stages):
    name = f"grouped_gemm_fp8_blocks_{tile_m}x{tile_n}"
    kernel = GroupedBlocks(name, cutlass.Float8E4M3FN, tile_m, tile_n, stages)
    return _declared(kernel, "kFloat8E4M3", "plain", _BLOCKS_PROBLEMS)


def functions():
    grouped = [_function(dtype, kind) for dtype in _DTYPES for kind in _KINDS]
    return [*grouped, *(_blocks(*shape) for shape in _BLOCKS_SHAPES)]
