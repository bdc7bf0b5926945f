# SPDX-License-Identifier: Apache-2.0
"""The kernels of fp8_linear_weight_grad that are compiled ahead of time."""

import cutlass
from declaration import Function, Launch, Pointer, Scalar, TensorMap
from linear_weight_cute import LinearWeight

# Columns of a tile, blocks of a cluster, stages.
_SHAPES = ((256, 2, 4), (128, 1, 6))

_STRIDES = ("x_step", "x_across", "w_step", "w_across")
_SCALARS = ("m", "n", "k", "group", *_STRIDES, "result")
_PROBLEMS = tuple(
    dict(zip((*_SCALARS, "blocks"), values, strict=True))
    for values in (
        (1000, 768, 512, 8, 4, 1, 1, 768, 0, 64),
        (129, 2056, 1040, 3, 1, 129, 9, 1, 1, 132),
        (8, 8, 128, 1, 1, 8, 1, 8, 2, 2),
    )
)


def _kernel(tile_n, cluster, stages):
    element = cutlass.Float8E4M3FN
    kernel = LinearWeight(f"linear_weight_fp8_128x{tile_n}", element, tile_n, cluster, stages)
    x, w = Pointer("x", element), Pointer("w", element)
    scales = [Pointer(name, cutlass.Float32, align=4) for name in ("x_scale", "w_scale")]
    out = Pointer("out", cutlass.Float32)
    scalars = [Scalar(name) for name in _SCALARS]
    launch = Launch(
        parameters=(
            TensorMap("x", ("m", "k"), (kernel.tile_m, kernel.tile_k)),
            TensorMap("w", ("n", "k"), (tile_n // cluster, kernel.tile_k)),
            *(*scales, out, *scalars),
        ),
        grid=("blocks", 1, 1),
        block=(kernel.threads, 1, 1),
        cluster=(cluster, 1, 1),
        smem=kernel.smem_bytes(),
        dependent=True,
    )
    attributes = tuple(map(str, (kernel.tile_m, tile_n, cluster)))
    arguments = (x, w, *scales, out, *scalars, Scalar("blocks"))
    return Function(kernel.name, kernel, arguments, (launch,), attributes, _PROBLEMS)


def functions():
    return [_kernel(*shape) for shape in _SHAPES]
