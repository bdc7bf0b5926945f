# SPDX-License-Identifier: Apache-2.0
"""The forms of nvfp4_quantize and nvfp4_dequantize: with a global scale or not, new or ``out``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel._op import Backend, Op
from tiercel.core.checks import (
    check_contiguous,
    check_dtype,
    check_rank,
    check_same_device,
    check_shape,
)
from tiercel.core.platform import Reason
from tiercel.ops.quant import reference as ref
from tiercel.ops.quant.checks import (
    E2M1,
    E4M3,
    VALUES,
    check_narrow,
    check_values,
    reason_of,
)

_Q4, _DQ4 = "nvfp4_quantize", "nvfp4_dequantize"


def _check_global(op: str, scale: Tensor | None, like: Any) -> None:
    if scale is not None:
        check_narrow(op, "global_scale", scale, torch.float32, (1,), "[1]", like)


def _check_columns(op: str, name: str, shape: Any) -> None:
    if shape[1] % 16:
        raise ValueError(f"{op}: `{name}` must have a multiple of 16 columns, got {list(shape)}")


def _check_quantize(
    x: Tensor, global_scale: Tensor | None, q: Tensor | None = None, scale: Tensor | None = None
) -> None:
    check_values(_Q4, "x", x)
    _check_columns(_Q4, "x", x.shape)
    like = ("x", x)
    _check_global(_Q4, global_scale, like)
    rows, columns = x.shape
    if q is not None and scale is not None:
        check_narrow(_Q4, "q", q, E2M1, (rows, columns // 2), "[T, K / 2]", like)
        check_narrow(_Q4, "scale", scale, E4M3, (rows, columns // 16), "[T, K / 16]", like)


def _check_dequantize(
    q: Tensor, scale: Tensor, global_scale: Tensor | None, result: torch.dtype | Tensor
) -> None:
    check_rank(_DQ4, "q", q, 2)
    rows, bytes_of_row = q.shape
    like = ("q", q)
    check_narrow(_DQ4, "q", q, E2M1, q.shape, "[T, K / 2]", like)
    if bytes_of_row % 8:
        raise ValueError(f"{_DQ4}: `q` must have a multiple of 8 columns, got {list(q.shape)}")
    check_narrow(_DQ4, "scale", scale, E4M3, (rows, bytes_of_row // 8), "[T, K / 16]", like)
    _check_global(_DQ4, global_scale, like)
    if isinstance(result, Tensor):
        check_dtype(_DQ4, "out", result.dtype, VALUES)
        check_shape(_DQ4, "out", result, (rows, 2 * bytes_of_row), "[T, K]")
        check_same_device(_DQ4, "out", result, *like)
        check_contiguous(_DQ4, "out", result)
    else:
        check_dtype(_DQ4, "dtype", result, VALUES)


def _quantize_outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    q = torch.empty(rows, columns // 2, dtype=E2M1, device=x.device)
    return q, torch.empty(rows, columns // 16, dtype=E4M3, device=x.device)


def _dequantize_output(q: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(q.shape[0], q.shape[1] * 2, dtype=dtype, device=q.device)


def _quantize_sm90(x: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    q, scale = _quantize_outputs(x)
    _C.nvfp4_quantize(x, global_scale, q, scale)
    return q, scale


def _dequantize_sm90(
    q: Tensor, scale: Tensor, global_scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    out = _dequantize_output(q, dtype)
    _C.nvfp4_dequantize(q, scale, global_scale, out)
    return out


def _quantize_plan(x: Tensor, global_scale: Tensor | None) -> dict[str, Any]:
    return dict(_C.nvfp4_quantize_plan(x, global_scale, *_quantize_outputs(x)))


def _dequantize_plan(
    q: Tensor, scale: Tensor, global_scale: Tensor | None, dtype: torch.dtype
) -> dict[str, Any]:
    out = _dequantize_output(q, dtype)
    return dict(_C.nvfp4_dequantize_plan(q, scale, global_scale, out))


def _quantize_ref_out(x: Tensor, global_scale: Tensor | None, q: Tensor, scale: Tensor) -> None:
    results = ref.nvfp4_quantize(x, global_scale=global_scale)
    for out, result in zip((q, scale), results, strict=True):
        out.view(torch.uint8).copy_(result.view(torch.uint8))  # PyTorch 2.9 copies no e2m1


_NVFP4_CUDA = ("a thread a group of 16, rounding by float additions", "cuda")
_NVFP4_TORCH = ("amax, reciprocal, comparisons with the halfway points", "torch")
_DEQUANTIZE_CUDA = ("a thread half a group, decoding by shifts", "cuda")
_DEQUANTIZE_TORCH = ("a look-up and a product", "torch")


# As for linear_act, no tensor of a schema is optional: there is an operator with a global scale and
# one without. `split` takes an operator's arguments apart: (those before it, it or None, the rest).
def _splitter(with_global: bool, place: int) -> Any:
    def split(args: tuple[Any, ...]) -> tuple[Any, ...]:
        if with_global:
            return args[:-1]
        return (*args[:place], None, *args[place:-1])

    return split


def _quantize_operators(with_global: bool) -> tuple[Op, Op]:
    split = _splitter(with_global, 1)
    name = f"{_Q4}_scaled" if with_global else _Q4
    tensors = "Tensor x, Tensor global_scale" if with_global else "Tensor x"

    def why_not(*args: Any) -> Reason | None:
        x, global_scale = split(args)[:2]
        return reason_of(_quantize_plan, x[:2], global_scale)

    def reference(*args: Any) -> tuple[Tensor, Tensor]:
        x, global_scale = split(args)
        return ref.nvfp4_quantize(x, global_scale=global_scale)

    plain = Op(
        name,
        f"({tensors}, str? backend=None) -> (Tensor q, Tensor scale)",
        check=lambda *args: _check_quantize(*split(args)),
        fake=lambda *args: _quantize_outputs(args[0]),
        sm90=Backend(
            "sm90", lambda *args: _quantize_sm90(*split(args)), *_NVFP4_CUDA, why_not=why_not
        ),
        ref=Backend("ref", reference, *_NVFP4_TORCH),
        family=_Q4,
        describe=lambda *args: _quantize_plan(*split(args)),
        load=None if with_global else _C.nvfp4_quantize_load,
    )
    into = Op(
        f"{name}_out",
        f"({tensors}, Tensor(a!) q, Tensor(b!) scale, str? backend=None) -> ()",
        check=lambda *args: _check_quantize(*split(args)),
        fake=lambda *args: None,
        sm90=Backend(
            "sm90", lambda *args: _C.nvfp4_quantize(*split(args)), *_NVFP4_CUDA, why_not=why_not
        ),
        ref=Backend("ref", lambda *args: _quantize_ref_out(*split(args)), *_NVFP4_TORCH),
        family=_Q4,
    )
    return plain, into


def _dequantize_operators(with_global: bool) -> tuple[Op, Op]:
    split = _splitter(with_global, 2)
    name = f"{_DQ4}_scaled" if with_global else _DQ4
    tensors = "Tensor q, Tensor scale" + (", Tensor global_scale" if with_global else "")

    def why_not(*args: Any) -> Reason | None:
        q, scale, global_scale, result = split(args)
        dtype = result.dtype if isinstance(result, Tensor) else result
        return reason_of(_dequantize_plan, q[:2], scale[:2], global_scale, dtype)

    def reference(*args: Any) -> Tensor:
        q, scale, global_scale, dtype = split(args)
        return ref.nvfp4_dequantize(q, scale, global_scale=global_scale, dtype=dtype)

    def reference_out(*args: Any) -> None:
        q, scale, global_scale, out = split(args)
        out.copy_(ref.nvfp4_dequantize(q, scale, global_scale=global_scale, dtype=out.dtype))

    plain = Op(
        name,
        # 15 is bfloat16 in a schema. torch leaves out an argument that equals the default there.
        f"({tensors}, ScalarType dtype=15, str? backend=None) -> Tensor",
        check=lambda *args: _check_dequantize(*split(args)),
        fake=lambda *args: _dequantize_output(args[0], args[-2]),
        sm90=Backend(
            "sm90", lambda *args: _dequantize_sm90(*split(args)), *_DEQUANTIZE_CUDA, why_not=why_not
        ),
        ref=Backend("ref", reference, *_DEQUANTIZE_TORCH),
        defaults={"dtype": torch.bfloat16},
        family=_DQ4,
        describe=lambda *args: _dequantize_plan(*split(args)),
        load=None if with_global else _C.nvfp4_dequantize_load,
    )
    into = Op(
        f"{name}_out",
        f"({tensors}, Tensor(a!) out, str? backend=None) -> ()",
        check=lambda *args: _check_dequantize(*split(args)),
        fake=lambda *args: None,
        sm90=Backend(
            "sm90",
            lambda *args: _C.nvfp4_dequantize(*split(args)),
            *_DEQUANTIZE_CUDA,
            why_not=why_not,
        ),
        ref=Backend("ref", reference_out, *_DEQUANTIZE_TORCH),
        family=_DQ4,
    )
    return plain, into


QUANTIZE, QUANTIZE_OUT = _quantize_operators(False)
QUANTIZE_SCALED, QUANTIZE_SCALED_OUT = _quantize_operators(True)
DEQUANTIZE, DEQUANTIZE_OUT = _dequantize_operators(False)
DEQUANTIZE_SCALED, DEQUANTIZE_SCALED_OUT = _dequantize_operators(True)
