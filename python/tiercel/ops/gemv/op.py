# SPDX-License-Identifier: Apache-2.0
"""Matrices of 4-bit floats times few vectors."""

from __future__ import annotations

from torch import Tensor

from tiercel import _C
from tiercel.core.op import Lookup, Native, Op
from tiercel.ops.gemv import reference as ref
from tiercel.ops.gemv.spec import ACTIVATIONS, FORMATS, NVFP4_GEMV, NVFP4_LINEAR, W4_LINEAR

__all__ = ["nvfp4_gemv", "nvfp4_linear", "w4_linear"]

_METHOD = "a look-up, the scales and torch.matmul in float32"

_NVFP4_GEMV = Op(
    NVFP4_GEMV,
    sm90=Native(
        _C.nvfp4_gemv,
        _C.nvfp4_gemv_plan,
        NVFP4_GEMV.names,
        "four rows a warp, exact integer products of a group",
        load=_C.nvfp4_gemv_load,
    ),
    reference=lambda call: ref.nvfp4_gemv(**call.__dict__),
    method=_METHOD,
)


@_NVFP4_GEMV.export
def nvfp4_gemv(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    scale_a_permuted: Tensor,
    scale_b_permuted: Tensor,
    c: Tensor,
    *,
    backend: str | None = None,
) -> Tensor:
    """Matrix times vector, both in NVFP4: ``c[m, 0, l]`` is the sum of ``a[m, k, l] * b[0, k, l]``.

    The seven tensors are those that block-scaled matrix products of newer GPUs take: call it as
    ``tiercel.nvfp4_gemv(*data)``. **k counts values; a byte holds two, so a tensor's shape has k /
    2**, as torch's dtype does. The first of the two is in the byte's low half. A value is its e2m1
    number times the e4m3 scale of its group of 16 along k.

    Within a group sums are exact; over groups they are float32, and the result is rounded once.

    There is no derivative. Works under torch.compile and in CUDA graphs; it never synchronises
    (ref copies the scales to the GPU, which does).

    Args:
        a: ``[m, k / 2, l]`` float4_e2m1fn_x2; k is a multiple of 16. The precompiled kernel takes k
            that is a multiple of 32, tensors contiguous along k, and row and batch strides that are
            multiples of 16 bytes; ref takes others.
        b: ``[1, k / 2, l]`` float4_e2m1fn_x2, on the device of ``a``, like all tensors below except
            the next two.
        scale_a: ``[m, k / 16, l]`` float8_e4m3fn, on the CPU; used by ref.
        scale_b: ``[1, k / 16, l]``, the same.
        scale_a_permuted: The same scales as ``scale_a``, on the GPU, as
            ``[32, 4, ceil(m / 128), 4, ceil(k / 64), l]`` with strides
            ``[16, 4, 512 ceil(k / 64), 1, 512, ...]``: atoms of 128 rows by 4 groups, in 512 bytes;
            used by the kernel. :func:`tiercel.ref.gemv.permute_scales` makes it.
        scale_b_permuted: The same for ``scale_b``, ``[32, 4, 1, 4, ceil(k / 64), l]``.
        c: ``[m, 1, l]`` float16, any strides: written, and returned.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``c``.

    Raises:
        TypeError: A dtype is not the one above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> c = tiercel.nvfp4_gemv(*data)
    """
    _NVFP4_GEMV(a, b, scale_a, scale_b, scale_a_permuted, scale_b_permuted, c, backend)
    return c


_NVFP4_LINEAR = Op(
    NVFP4_LINEAR,
    sm90=Native(
        _C.nvfp4_linear,
        _C.nvfp4_linear_plan,
        ("x", "weight", "scale", "global_scale", "out"),
        "tensor cores on weights decoded in registers, K split over a cluster",
        load=_C.nvfp4_linear_load,
    ),
    reference=lambda call: ref.nvfp4_linear(
        call.x, call.weight, call.scale, global_scale=call.global_scale
    ),
    method=_METHOD,
)


@_NVFP4_LINEAR.export
def nvfp4_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    global_scale: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """A linear layer with NVFP4 weights: ``x @ dequantised(weight).T``.

    :func:`tiercel.w4_linear` also takes other formats, a bias and an activation.

    Weights times scales are exact, as are products with ``x`` (for a single token, only those
    within a factor of 2**31 of the largest of 256 consecutive ones; smaller ones lose their last
    bits); sums are float32, and the result is rounded once.

    There is no derivative. Works under torch.compile and torch.export, and in CUDA graphs; it
    never synchronises.

    Args:
        x: ``[T, K]`` bfloat16. The precompiled kernels take K that is a multiple of 64 and row
            strides that are multiples of 16 bytes; ref takes others.
        weight: ``[N, K / 2]`` float4_e2m1fn_x2, two values per byte, the first in its low half, as
            from :func:`tiercel.nvfp4_quantize`; on the device of ``x``.
        scale: ``[N, K / 16]`` float8_e4m3fn, one per 16 values.
        global_scale: ``[1]`` float32; None is 1.
        out: ``[T, N]`` bfloat16 to write to, contiguous.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[T, N]`` bfloat16.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this size.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> weight, scale = tiercel.nvfp4_quantize(layer.weight)
        >>> y = tiercel.nvfp4_linear(x, weight, scale)
    """
    if out is None:
        return _NVFP4_LINEAR.pick()(x, weight, scale, global_scale, backend)  # type: ignore[no-any-return]
    return _NVFP4_LINEAR.into()(  # type: ignore[no-any-return]
        out, x, weight, scale, global_scale, backend
    )


_W4_LINEAR = Op(
    W4_LINEAR,
    sm90=Native(
        _C.w4_linear,
        _C.w4_linear_plan,
        (
            *("x", "weight", "scale", "zero_point", "global_scale", "bias", "x_scale", "out"),
            Lookup("format", {name: i for i, name in enumerate(FORMATS)}),
            Lookup("activation", {name: i for i, name in enumerate(ACTIVATIONS)}),
        ),
        "tensor cores on weights decoded in registers, K split over a cluster",
        load=_C.w4_linear_load,
    ),
    reference=lambda call: ref.w4_linear(
        call.x,
        call.weight,
        call.scale,
        format=call.format,
        zero_point=call.zero_point,
        global_scale=call.global_scale,
        bias=call.bias,
        activation=call.activation,
        x_scale=call.x_scale,
    ),
    method=_METHOD,
)


@_W4_LINEAR.export
def w4_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    format: str = "mxfp4",  # noqa: A002
    zero_point: Tensor | None = None,
    global_scale: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    x_scale: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """A linear layer with 4-bit weights: ``act(x @ dequantised(weight).T + bias)``.

    Weights have the layout of MXFP4 and NVFP4 checkpoints, two values per byte, the first in its
    low half; :func:`tiercel.ref.gemv.pack_w4` converts the layouts of other checkpoints. A weight's
    value is its 4-bit number times its group's scale, and times ``global_scale``:

    ========  =======================  ====================================================
    format    number                   scale
    ========  =======================  ====================================================
    mxfp4     e2m1                     ``[N, K / 32]`` uint8: 2 to the power of it less 127
    nvfp4     e2m1                     ``[N, K / 16]`` float8_e4m3fn
    int4      0 to 15 less zero point  ``[N, K / group]`` of x's dtype, groups of 32, 64, 128
    ========  =======================  ====================================================

    Values of mxfp4 (scales of 2**-62 to 2**65) and of nvfp4 are exact; those of int4 are rounded to
    the dtype of ``x``, except for a single token of bfloat16. Sums are float32, and the result is
    rounded once.

    With ``x_scale``, activations are float8 and products run at the tensor cores' float8 rate. The
    numbers of mxfp4 and int4 are exact in float8; nvfp4, with scales of 16 values, is not
    supported. Tensor cores accumulate float8 products with about 13 fraction bits: over a whole row
    with mxfp4, over a group with int4, whose scales then multiply float32 sums. Groups of mxfp4
    whose scale is more than a factor of 2**14 below the largest in the row lose bits too.

    There is no derivative. Works under torch.compile and torch.export, and in CUDA graphs; it
    never synchronises.

    Args:
        x: ``[T, K]`` bfloat16 or float16, or float8_e4m3fn with ``x_scale``, as
            :func:`tiercel.fp8_quantize` makes it. The precompiled kernels take K that is a multiple
            of 64 and row strides that are multiples of 16 bytes, but not MXFP4 with float16; ref
            takes others.
        weight: ``[N, K / 2]`` uint8 or float4_e2m1fn_x2, on the device of ``x``.
        scale: The scales of groups along K, see above.
        format: ``"mxfp4"``, ``"nvfp4"`` or ``"int4"``.
        zero_point: For int4: shaped like ``scale``, whole numbers from 0 to 15; None is 8.
        global_scale: ``[1]`` float32; None is 1.
        bias: ``[N]`` of the result's dtype, contiguous, or None.
        activation: ``"none"``, ``"relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` or
            ``"relu_squared"``.
        x_scale: Factor of a float8 ``x``: float32, contiguous, one element or one per row, in any
            shape. The scale of int4 is then bfloat16 or float16.
        out: ``[T, N]`` of the result's dtype to write to, contiguous.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[T, N]`` of x's dtype, or bfloat16 with ``x_scale``.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, or there is no such format, activation
            or backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this size.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> y = tiercel.w4_linear(x, blocks.flatten(-2), scales, bias=bias)  # gpt-oss's
        >>> x8, x_scale = tiercel.fp8_quantize(x, "row")
        >>> y = tiercel.w4_linear(x8, blocks.flatten(-2), scales, bias=bias, x_scale=x_scale)
    """
    arguments = (
        *(x, weight, scale, format, zero_point, global_scale, bias, activation, x_scale),
        backend,
    )
    if out is None:
        return _W4_LINEAR.pick()(*arguments)  # type: ignore[no-any-return]
    return _W4_LINEAR.into()(out, *arguments)  # type: ignore[no-any-return]
