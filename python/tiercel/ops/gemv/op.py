# SPDX-License-Identifier: Apache-2.0
"""Matrices of 4-bit floats times few vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel._launcher import Argument, Like, Output, launcher
from tiercel._op import Backend, Op
from tiercel.core import platform
from tiercel.core.checks import (
    check_contiguous,
    check_dtype,
    check_rank,
    check_same_device,
    check_shape,
)
from tiercel.core.eager import empty
from tiercel.core.platform import Reason
from tiercel.ops.gemv import reference as ref

__all__ = ["nvfp4_gemv", "nvfp4_linear"]

_E4M3, _E2M1 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2


def _reason(op: str, plan: Any, *args: Any) -> Reason | None:
    """Why the kernels do not take arguments that are right."""
    reason = platform.why_not(args[0].device)
    if reason is not None:
        return reason
    try:
        plan(*args)
    except NotImplementedError as error:
        return Reason(NotImplementedError, str(error).removeprefix(f"{op}: "))
    return None


# --------------------------------------------------------------------------------------- gemv

_GEMV = "nvfp4_gemv"


def _check_tensor(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], why: str
) -> None:
    check_rank(_GEMV, name, tensor, len(shape))
    check_dtype(_GEMV, name, tensor.dtype, (dtype,))
    check_shape(_GEMV, name, tensor, shape, why)


def _check_cpu(name: str, tensor: Tensor, a: Tensor) -> None:
    if tensor.device.type != "cpu" and not (tensor.is_meta and a.is_meta):
        raise ValueError(f"{_GEMV}: `{name}` must be a CPU tensor, got a tensor on {tensor.device}")


def _check_permuted(name: str, tensor: Tensor, rows: int, groups: int, batches: int) -> None:
    down, along = -(-rows // 128), -(-groups // 4)
    shape = (32, 4, down, 4, along, batches)
    why = "[32, 4, 1, 4, ceil(k / 64), l]"
    if name == "scale_a_permuted":
        why = why.replace("1", "ceil(m / 128)")
    _check_tensor(name, tensor, _E4M3, shape, why)
    strides = (16, 4, 512 * along, 1, 512, 512 * along * down)
    wrong = (n > 1 and a != b for n, a, b in zip(shape, tensor.stride(), strides, strict=True))
    if down * along * batches and any(wrong):
        raise ValueError(
            f"{_GEMV}: `{name}` must have the strides of the permuted layout, {list(strides)}, "
            f"got {list(tensor.stride())}"
        )


def _check_gemv(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    scale_a_permuted: Tensor,
    scale_b_permuted: Tensor,
    c: Tensor,
    backend: str | None = None,
) -> None:
    check_rank(_GEMV, "a", a, 3)
    rows, in_bytes, batches = a.shape
    _check_tensor("a", a, _E2M1, (rows, in_bytes, batches), "[m, k / 2, l]")
    _check_tensor("b", b, _E2M1, (1, in_bytes, batches), "[1, k / 2, l]")
    if in_bytes % 8:
        raise ValueError(
            f"{_GEMV}: `a` must have a multiple of 16 values along K, 8 bytes, "
            f"got {in_bytes} bytes (shape {list(a.shape)})"
        )
    groups = in_bytes // 8
    _check_tensor("c", c, torch.float16, (rows, 1, batches), "[m, 1, l]")
    _check_tensor("scale_a", scale_a, _E4M3, (rows, groups, batches), "[m, k / 16, l]")
    _check_cpu("scale_a", scale_a, a)
    _check_tensor("scale_b", scale_b, _E4M3, (1, groups, batches), "[1, k / 16, l]")
    _check_cpu("scale_b", scale_b, a)
    _check_permuted("scale_a_permuted", scale_a_permuted, rows, groups, batches)
    _check_permuted("scale_b_permuted", scale_b_permuted, 1, groups, batches)
    others = {
        "b": b,
        "scale_a_permuted": scale_a_permuted,
        "scale_b_permuted": scale_b_permuted,
        "c": c,
    }
    for name, tensor in others.items():
        check_same_device(_GEMV, name, tensor, "a", a)


def _gemv_ref(*args: Any) -> None:
    ref.nvfp4_gemv(*args[:7])


def _gemv_plan(*args: Any) -> dict[str, Any]:
    return dict(_C.nvfp4_gemv_plan(*args[:7]))


_NVFP4_GEMV = Op(
    _GEMV,
    "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor scale_a_permuted,"
    " Tensor scale_b_permuted, Tensor(a!) c, str? backend=None) -> ()",
    check=_check_gemv,
    fake=lambda *args: None,
    sm90=Backend(
        "sm90",
        lambda *args: _C.nvfp4_gemv(*args[:7]),
        "four rows a warp, exact integer products of a group",
        "cuda",
        why_not=lambda *args: _reason(_GEMV, _gemv_plan, *args),
    ),
    ref=Backend(
        "ref",
        _gemv_ref,
        "a look-up, the scales and torch.matmul in float32",
        "torch",
    ),
    describe=_gemv_plan,
    load=_C.nvfp4_gemv_load,
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

    The seven tensors are those of the block-scaled matrix products of newer GPUs, so that the same
    data goes to either: call it as ``tiercel.nvfp4_gemv(*data)``. **k counts values; two lie in one
    byte, so a tensor's shape shows k / 2**, as torch's dtype has it. The first of the two is in the
    byte's low half. A value is its e2m1 number times its group's e4m3 scale, of 16 along k.

    Within a group sums are exact; over groups they are float32, and the result is rounded once.

    There is no derivative. Works under torch.compile and in CUDA graphs; it never synchronises
    (ref copies the scales to the GPU, which does).

    Args:
        a: ``[m, k / 2, l]`` float4_e2m1fn_x2; k is a multiple of 16. The precompiled kernel takes k
            that is a multiple of 32, values that are neighbours along k, and rows and batches at
            multiples of 16 bytes; ref takes others.
        b: ``[1, k / 2, l]`` float4_e2m1fn_x2, on the device of ``a``, as are those below but for:
        scale_a: ``[m, k / 16, l]`` float8_e4m3fn, on the CPU. What ref multiplies by.
        scale_b: ``[1, k / 16, l]``, the same.
        scale_a_permuted: The same scales as ``scale_a``, on the GPU, as
            ``[32, 4, ceil(m / 128), 4, ceil(k / 64), l]`` with strides
            ``[16, 4, 512 ceil(k / 64), 1, 512, ...]``: atoms of 128 rows by 4 groups, in 512 bytes.
            What the kernel multiplies by. :func:`tiercel.ref.gemv.permute_scales` makes it.
        scale_b_permuted: The same of ``scale_b``, ``[32, 4, 1, 4, ceil(k / 64), l]``.
        c: ``[m, 1, l]`` float16, any strides: written, and returned.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``c``.

    Raises:
        TypeError: A dtype is not the one above, or an argument is no tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> c = tiercel.nvfp4_gemv(*data)
    """
    _NVFP4_GEMV(a, b, scale_a, scale_b, scale_a_permuted, scale_b_permuted, c, backend)
    return c


# ------------------------------------------------------------------------------------- linear

_LINEAR = "nvfp4_linear"


def _check_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    out: Tensor | None = None,
) -> None:
    check_rank(_LINEAR, "x", x, 2)
    check_rank(_LINEAR, "weight", weight, 2)
    check_dtype(_LINEAR, "x", x.dtype, (torch.bfloat16,))
    check_dtype(_LINEAR, "weight", weight.dtype, (_E2M1,))
    check_dtype(_LINEAR, "scale", scale.dtype, (_E4M3,))
    k, features = x.shape[1], weight.shape[0]
    if k % 16:
        raise ValueError(f"{_LINEAR}: `x` must have a multiple of 16 columns, got {list(x.shape)}")
    check_shape(_LINEAR, "weight", weight, (features, k // 2), "[N, K / 2]")
    check_shape(_LINEAR, "scale", scale, (features, k // 16), "[N, K / 16]")
    check_same_device(_LINEAR, "weight", weight, "x", x)
    check_same_device(_LINEAR, "scale", scale, "x", x)
    if global_scale is not None:
        check_dtype(_LINEAR, "global_scale", global_scale.dtype, (torch.float32,))
        check_shape(_LINEAR, "global_scale", global_scale, (1,), "[1]")
        check_same_device(_LINEAR, "global_scale", global_scale, "x", x)
    if out is not None:
        check_dtype(_LINEAR, "out", out.dtype, (torch.bfloat16,))
        check_shape(_LINEAR, "out", out, (x.shape[0], features), "[T, N]")
        check_same_device(_LINEAR, "out", out, "x", x)
        check_contiguous(_LINEAR, "out", out)


def _linear_output(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = empty(x, (x.shape[0], weight.shape[0]), x.dtype)
    return out


def _linear_sm90(x: Tensor, weight: Tensor, scale: Tensor, global_scale: Tensor | None) -> Tensor:
    out = _linear_output(x, weight)
    _C.nvfp4_linear(x, weight, scale, global_scale, out)
    return out


def _linear_plan(
    x: Tensor, weight: Tensor, scale: Tensor, global_scale: Tensor | None
) -> dict[str, Any]:
    out = _linear_output(x, weight)
    return dict(_C.nvfp4_linear_plan(x, weight, scale, global_scale, out))


# As for linear_act, no tensor of a schema is optional: there is an operator with a global scale and
# one without.
def _linear_operators(with_global: bool) -> tuple[Op, Op]:
    name = f"{_LINEAR}_scaled" if with_global else _LINEAR
    tensors = "Tensor x, Tensor weight, Tensor scale" + (
        ", Tensor global_scale" if with_global else ""
    )
    count = 4 if with_global else 3

    def split(args: tuple[Any, ...]) -> tuple[Any, ...]:
        tensors = args[:count] if with_global else (*args[:3], None)
        return (*tensors, *args[count:-1])

    def why_not(*args: Any) -> Reason | None:
        return _reason(_LINEAR, _linear_plan, *split(args)[:4])

    def reference(*args: Any) -> Tensor:
        x, weight, scale, global_scale = split(args)[:4]
        return ref.nvfp4_linear(x, weight, scale, global_scale=global_scale)

    def reference_out(*args: Any) -> None:
        split(args)[4].copy_(reference(*args))

    x, weight, scale, global_scale = split(tuple(map(Argument, range(count + 1))))
    run = launcher(
        _C.nvfp4_linear,
        (x, weight, scale, global_scale, Output(0)),
        count=count + 1,
        outputs=(Like(x, rank=2, dims=((x, 0), (weight, 0))),),
        otherwise=lambda *args: _linear_sm90(*split(args)),
    )
    cuda = ("tensor cores on weights decoded in registers, K split over a cluster", "cuda")
    plain = ("a look-up, the scales and torch.matmul in float32", "torch")
    new = Op(
        name,
        f"({tensors}, str? backend=None) -> Tensor",
        check=lambda *args: _check_linear(*split(args)),
        fake=lambda *args: _linear_output(*args[:2]),
        sm90=Backend("sm90", run, *cuda, why_not=why_not),
        ref=Backend("ref", reference, *plain),
        family=_LINEAR,
        describe=lambda *args: _linear_plan(*split(args)),
        load=None if with_global else _C.nvfp4_linear_load,
    )
    into = Op(
        f"{name}_out",
        f"({tensors}, Tensor(a!) out, str? backend=None) -> ()",
        check=lambda *args: _check_linear(*split(args)),
        fake=lambda *args: None,
        sm90=Backend("sm90", lambda *args: _C.nvfp4_linear(*split(args)), *cuda, why_not=why_not),
        ref=Backend("ref", reference_out, *plain),
        family=_LINEAR,
    )
    return new, into


_NVFP4_LINEAR, _NVFP4_LINEAR_OUT = _linear_operators(False)
_NVFP4_LINEAR_SCALED, _NVFP4_LINEAR_SCALED_OUT = _linear_operators(True)


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
    """A linear layer with NVFP4 weights for a few tokens: ``x @ dequantised(weight).T``.

    Weights times scales are exact, as are products with ``x`` (of a single token, within 2**31 of
    the largest magnitude of 256 neighbours; what is smaller still loses its last bits); sums are
    float32, and the result is rounded once.

    There is no derivative. Works under torch.compile and torch.export, and in CUDA graphs; it
    never synchronises.

    Args:
        x: ``[T, K]`` bfloat16. The precompiled kernels take T up to 16, K that is a multiple of 64
            and rows at any distance that is a multiple of 16 bytes; ref takes others.
        weight: ``[N, K / 2]`` float4_e2m1fn_x2, two values a byte, the first in its low half, as
            from :func:`tiercel.nvfp4_quantize`; on the device of ``x``.
        scale: ``[N, K / 16]`` float8_e4m3fn, one of 16 values.
        global_scale: ``[1]`` float32; None is 1.
        out: ``[T, N]`` bfloat16 to write to, contiguous.
        backend: ``"sm90"``, ``"ref"`` or None for what applies, see :mod:`tiercel.backends`.

    Returns:
        ``[T, N]`` bfloat16.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is no tensor.
        ValueError: A shape, stride or device does not fit, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this size.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> weight, scale = tiercel.nvfp4_quantize(layer.weight)
        >>> y = tiercel.nvfp4_linear(x, weight, scale)
    """
    tensors = (x, weight, scale) if global_scale is None else (x, weight, scale, global_scale)
    if out is None:
        operator = _NVFP4_LINEAR if global_scale is None else _NVFP4_LINEAR_SCALED
        result: Tensor = operator.pick()(*tensors, backend)
        return result
    operator = _NVFP4_LINEAR_OUT if global_scale is None else _NVFP4_LINEAR_SCALED_OUT
    operator(*tensors, out, backend)
    return out
