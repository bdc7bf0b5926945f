# SPDX-License-Identifier: Apache-2.0
"""The kernels of grouped_gemm and its gradients that are compiled ahead of time."""

import cutlass
from declaration import Function, Launch, Pointer, Scalar, TensorMap
from grouped_gemm_cute import Arguments, GroupedGemm
from linear_layouts_cute import EPI

_DTYPES = {"bf16": (cutlass.BFloat16, "kBFloat16"), "fp16": (cutlass.Float16, "kFloat16")}
_KINDS = {"plain": "kPlain", "grad_x": "kGradX", "grad_weight": "kGradWeight"}

_SHAPE = (128, 256, 3)  # tile rows and columns, stages of the ring

_SCALARS = tuple(name for name, kind in Arguments.__annotations__.items() if kind is cutlass.Int32)
_PROBLEMS = tuple(
    dict(zip((*_SCALARS, "blocks"), values, strict=True))
    for values in ((5, 272, 336, 136, 1, 132), (1, 8, 16, 128, 2, 2))
)


def _maps(kernel):
    """The maps of a, b and the result. Operands whose K is strided have boxes of 64 by 64."""
    sizes = zip((kernel.tile_m, kernel.tile_n), kernel.majors, strict=True)
    a_box, b_box = ((size, 64) if major == "k" else (64, EPI) for size, major in sizes)
    a = TensorMap("a", ("m", "k"), a_box)
    if kernel.of_weight:
        out = TensorMap("out", ("groups", "k", "n"), (1, EPI, EPI))
        return a, TensorMap("b", ("m", "n"), b_box), out
    sizes = ("n", "k") if kernel.majors[1] == "k" else ("k", "n")
    out = TensorMap("out", ("m", "n"), (EPI, EPI))
    return a, TensorMap("b", ("groups", *sizes), (1, *b_box)), out


def _function(dtype, kind):
    element, enumerator = _DTYPES[dtype]
    name = "grouped_gemm" + f"_{kind}" * (kind != "plain")
    name += f"_{dtype}_{_SHAPE[0]}x{_SHAPE[1]}"
    kernel = GroupedGemm(name, element, kind, *_SHAPE)
    a, b = (Pointer(name, element) for name in ("a", "b"))
    pointers = {
        "offsets": Pointer("offsets", cutlass.Int32, align=4),
        "out": Pointer("out", element),
    }
    parameters = [pointers.get(name) or Scalar(name) for name in Arguments._fields]
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
    return Function(name, kernel, arguments, (launch,), attributes, _PROBLEMS)


def functions():
    return [_function(dtype, kind) for dtype in _DTYPES for kind in _KINDS]
