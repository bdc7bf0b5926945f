# SPDX-License-Identifier: Apache-2.0
"""Grouped products: each group of rows times its own matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiercel import _C
from tiercel.core.index_checks import Index, between, part_bounds
from tiercel.core.op import Gradient, Native, Op
from tiercel.core.spec import Call
from tiercel.ops.moe import reference as ref
from tiercel.ops.moe import spec

__all__ = ["grouped_gemm"]


def _indices(call: Call) -> list[Index]:
    rows = getattr(call, "grad" if "grad" in call else "x").shape[0]
    return part_bounds("offsets", call.offsets, rows)


def _op(declared: spec.Spec, kind: int, reference: Callable[..., Tensor], **more: Any) -> Op:
    """`kind`: as in GroupedKind of grouped_gemm.h."""
    names = (*declared.names, *declared.result_names)

    def launch(native: Callable[..., Any], call: Call) -> Any:
        rows, *rest = (getattr(call, name) for name in names)
        return native(rows.contiguous() if kind else rows, *rest, kind)

    return Op(
        declared,
        sm90=Native(
            _C.grouped_gemm,
            _C.grouped_gemm_plan,
            (*names, kind),
            "TMA and wgmma; persistent blocks find their groups' tiles on the device",
            language="cute",
            load=None if kind else _C.grouped_gemm_load,
            contiguous=("grad",),
            launch=launch,
        ),
        reference=lambda call: reference(*(getattr(call, name) for name in declared.names)),
        method="a loop over groups",
        indices=_indices,
        out=False,
        **more,
    )


_BACKWARD_X = _op(spec.GROUPED_GEMM_BACKWARD_X, 1, ref.grouped_gemm_backward_x)
_BACKWARD_WEIGHT = _op(spec.GROUPED_GEMM_BACKWARD_WEIGHT, 2, ref.grouped_gemm_backward_weight)


def _save(ctx: Any, call: Call, results: Any) -> None:
    ctx.backend = call.backend
    ctx.save_for_backward(call.x, call.w, call.offsets)


def _gradients(ctx: Any, grad: Tensor | None) -> dict[str, Tensor | None]:
    if grad is None:
        return {}
    x, w, offsets = ctx.saved_tensors
    wanted = {name: t for name, t in (("x", x), ("w", w)) if ctx.wants[name]}
    if torch.is_grad_enabled():  # PyTorch's formulas can be differentiated again
        result = ref.grouped_gemm(x, w, offsets)
        found = torch.autograd.grad(result, list(wanted.values()), grad, create_graph=True)
        return dict(zip(wanted, found, strict=True))
    backend = ctx.backend if ctx.backend in ("sm90", "ref") else None
    return {
        name: _BACKWARD_X(grad, w, offsets, backend)
        if name == "x"
        else _BACKWARD_WEIGHT(grad, x, offsets, backend)
        for name in wanted
    }


def _float8(declared: spec.Spec, rows: str, indices: Callable[[Call], list[Index]]) -> Op:
    """`rows`: the argument that says which rows are a group's."""
    names = ("x", "w", rows, "x_scale", "w_scale", "out", "expected_rows")

    def launch(native: Callable[..., Any], call: Call) -> Any:
        call.x = call.x.contiguous()
        return native(*(getattr(call, name) for name in names))

    def reference(call: Call) -> Tensor:
        given = {"offsets": None, rows: getattr(call, rows)}
        return ref.grouped_gemm(call.x, call.w, x_scale=call.x_scale, w_scale=call.w_scale, **given)

    return Op(
        declared,
        sm90=Native(
            _C.grouped_gemm_fp8,
            _C.grouped_gemm_fp8_plan,
            names,
            "TMA and wgmma; each 128 of K is scaled into float32 sums",
            language="cute",
            contiguous=("x",) if rows == "counts" else (),
            launch=launch if rows == "counts" else None,
        ),
        reference=reference,
        method="a loop over groups",
        indices=indices,
        out=False,
    )


_FP8 = _float8(spec.GROUPED_GEMM_FP8, "offsets", _indices)
_MASKED = _float8(
    spec.GROUPED_GEMM_MASKED,
    "counts",
    lambda call: [between("counts", call.counts, 0, call.x.shape[1])],
)
_GROUPED_GEMM = _op(spec.GROUPED_GEMM, 0, ref.grouped_gemm, gradient=Gradient(_save, _gradients))


@_GROUPED_GEMM.export
def grouped_gemm(
    x: Tensor,
    w: Tensor,
    offsets: Tensor | None,
    *,
    counts: Tensor | None = None,
    x_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
    expected_rows: int = 0,
    backend: str | None = None,
) -> Tensor:
    """Multiplies each group of consecutive rows by its own matrix: ``x[m] @ w[e].T`` for ``m`` from
    ``offsets[e]`` to ``offsets[e + 1]``.

    With ``x_scale`` and ``w_scale``, ``x`` and ``w`` are float8_e4m3fn: the products of each 128 of
    K are scaled and added up in float32, and the result is bfloat16. Then each group may also have
    its own ``C`` rows of memory, of which the first ``counts[e]`` are used; the result's other rows
    are not written.

    Sums are float32. Differentiable in ``x`` and ``w``, but not with scales. Works under
    torch.compile and torch.export, and in CUDA graphs; it never synchronises: the sizes of groups
    are read on the device, in the backward too.

    Args:
        x: ``[M, K]`` bfloat16 or float16, or, with scales, float8_e4m3fn; with ``counts``
            ``[E, C, K]``. The precompiled kernels take N that is a multiple of 8 and K that is a
            multiple of 8 (float8: 16), row strides that are multiples of 16 bytes, and up to 512
            groups; ref takes others.
        w: ``[E, N, K]``, the dtype of ``x``.
        offsets: ``[E + 1]`` int32 or int64, contiguous, not decreasing: where groups begin, and
            where the last one ends; None with ``counts``. Groups may be empty. Offsets are clamped
            to 0 and M; where they decrease, a row in several groups gets the product of any of
            them, or zeros.
        counts: ``[E]`` int32 or int64, contiguous, only with scales: the number of rows of each
            group, clamped to 0 and C.
        x_scale: float32 ``[M, ceil(K / 128)]``, or ``[E, C, ceil(K / 128)]``, with any strides:
            factor of each 128 values of a row, as from ``fp8_quantize(x, "1x128")``. Powers of two
            (UE8M0) are given as float32, too.
        w_scale: float32 ``[E, ceil(N / 128), ceil(K / 128)]``, contiguous: one for each 128x128
            values.
        expected_rows: With scales, about how many rows a group with rows has, to select the tiles;
            results are right for any number. 0 means M / E, or C.
        backend: ``"sm90"``, ``"ref"`` or None (automatic), see :mod:`tiercel.backends`.

    Returns:
        ``[M, N]``, the dtype of ``x``, or bfloat16; zeros for rows outside of all groups. With
        ``counts`` ``[E, C, N]``, where rows beyond a count are not written.

    Raises:
        TypeError: A dtype is not one of the above, or an argument is not a tensor.
        ValueError: A shape, stride or device does not fit, ``offsets`` and ``counts`` are given
            both, ``expected_rows`` is given without scales, or there is no such backend.
        NotImplementedError: ``backend="sm90"`` was asked for and it does not take this layout.
        RuntimeError: ``backend="sm90"`` was asked for and the driver or GPU cannot run it.

    Example:
        >>> offsets = torch.tensor([0, 100, 100, 256], dtype=torch.int32, device="cuda")
        >>> y = tiercel.grouped_gemm(x, w, offsets)  # 3 groups, the second one empty
    """
    result: Tensor
    if counts is not None:
        if offsets is not None:
            raise ValueError("grouped_gemm: `offsets` must be None where `counts` is given")
        result = _MASKED.pick()(x, w, x_scale, w_scale, counts, expected_rows, backend)
    elif x_scale is not None or w_scale is not None:
        result = _FP8.pick()(x, w, x_scale, w_scale, offsets, expected_rows, backend)
    else:
        if expected_rows:
            raise ValueError(
                f"grouped_gemm: `expected_rows` must be 0 without scales, got {expected_rows}"
            )
        result = _GROUPED_GEMM.pick()(x, w, offsets, backend)
    return result
