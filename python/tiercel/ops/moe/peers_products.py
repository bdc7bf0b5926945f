# SPDX-License-Identifier: Apache-2.0
"""The products inside experts' MLPs alone: what the rest of fused_moe costs beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiercel.ops.moe.cases import check_product
from tiercel.workbench.bench.launch import Launch, Unsupported
from tiercel.workbench.bench.ops import Error

_ROWS = 128  # DeepGEMM's groups begin at multiples of this


def _places(ids: Any, experts: int) -> tuple[Any, Any, Any]:
    """The routed rows in the order of their experts, where each of them comes to lie, and each
    place's expert: -1 where a group is padded, which lets the kernel skip what is only padding."""
    import torch

    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    owners = flat[order]
    counts = owners.bincount(minlength=experts)
    sizes = (counts + _ROWS - 1) // _ROWS * _ROWS
    before = (sizes - counts).cumsum(0) - (sizes - counts)  # rows of padding
    places = torch.arange(len(owners), device=ids.device) + before[owners]
    of_places = torch.full((int(sizes.sum()),), -1, dtype=torch.int32, device=ids.device)
    of_places[places] = owners.int()
    return order, places, of_places


def _wide(values: Any, scale: Any, rows: int) -> Any:
    """In float64; a scale is of so many rows and of 128 columns."""
    if scale is None:
        return values.double()
    factors = scale.double().repeat_interleave(rows, 0).repeat_interleave(128, 1)
    return values.double() * factors


def _product(
    a: Any, w: Any, w_scale: Any, places: Any, of_places: Any
) -> tuple[Callable[[], Any], Callable[[Any], Error]]:
    """DeepGEMM's product of rows that are brought to their places now; and its result's check."""
    import torch

    from tiercel.ops.quant.reference import fp8_quantize
    from tiercel.workbench.bench.peers import deepgemm

    module = deepgemm.module()
    rows, scale = a.new_zeros(len(of_places), a.shape[1]), None
    rows[places] = a
    out = a.new_empty(len(of_places), w.shape[1])
    arguments: tuple[Any, ...]
    if w_scale is None:
        arguments, multiply = (rows, w), module.m_grouped_bf16_gemm_nt_contiguous
    else:
        rows, scale = fp8_quantize(rows, "1x128")
        # Its kernels on Hopper read a column of scales after the other; given otherwise, they would
        # be transposed in each call.
        scale = scale.t().contiguous().t()
        arguments = ((rows, scale), (w, w_scale))
        multiply = module.m_grouped_fp8_gemm_nt_contiguous

    def run() -> Any:
        multiply(*arguments, out, of_places)
        return out

    def check(result: Any) -> Error:
        wide, expected = _wide(rows, scale, 1), []
        for expert in range(len(w)):
            of_w = None if scale is None else w_scale[expert]
            expected.append(wide[of_places == expert] @ _wide(w[expert], of_w, 128).T)
        return check_product(torch.cat(expected), result[places])

    return run, check


def _deepgemm(case: Any, inputs: dict[str, Any]) -> Launch:
    """Products of rows that are gathered, padded and quantised already; nothing runs between the
    two, and the second takes other rows, which are there before."""
    import torch

    if case.dtype != "bfloat16" or case["weights"] == "float8":
        raise Unsupported("it takes bfloat16, or float8 with scales of blocks")
    if case["T"] * case["k"] < _ROWS * case["E"]:
        raise Unsupported(f"most of groups that are padded to {_ROWS} rows would be padding")
    x, ids = inputs["x"], inputs["topk_ids"]
    order, places, of_places = _places(ids, case["E"])
    generator = torch.Generator(device=x.device).manual_seed(0)
    inner = torch.randn(len(order), case["I"], device=x.device, generator=generator).to(x.dtype)
    products = [
        _product(rows, inputs[name], inputs.get(f"{name}_scale"), places, of_places)
        for rows, name in ((x[order // case["k"]], "w_up"), (inner, "w_down"))
    ]

    def check(outputs: tuple[Any, ...]) -> Error:
        found = [check(out) for (_, check), out in zip(products, outputs, strict=True)]
        return Error(rms=max(e.rms for e in found), maximum=max(e.maximum for e in found))

    return Launch(
        lambda: tuple(run() for run, _ in products),
        exact=False,
        check=check,
        details={"part": "its two grouped products"},
    )


ADAPTERS = {"deepgemm": {"fused_moe": _deepgemm}}
