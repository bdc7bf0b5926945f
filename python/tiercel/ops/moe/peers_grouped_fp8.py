# SPDX-License-Identifier: Apache-2.0
"""Grouped products of float8 operands: DeepGEMM's, and PyTorch's with scales of rows."""

from __future__ import annotations

from typing import Any

from tiercel.ops.moe.cases import Wide, check_product
from tiercel.workbench.bench.launch import Launch, Unsupported
from tiercel.workbench.bench.ops import Error


def _deepgemm(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    from tiercel.workbench.bench.peers import deepgemm

    if not (case["aligned"] or case["capacity"]):
        raise Unsupported("its groups begin at multiples of 128 rows, or have memory of their own")
    x, w = inputs["x"], inputs["w"]
    # Its kernels on Hopper read a column of scales after the other.
    scale = inputs["x_scale"].mT.contiguous().mT
    out = torch.empty(*x.shape[:-1], w.shape[1], dtype=torch.bfloat16, device=x.device)
    operands = ((x, scale), (w, inputs["w_scale"]), out)
    module: Any = deepgemm.module()
    if case["capacity"]:
        rows = (inputs["counts"], inputs["expected_rows"])
        multiply = module.m_grouped_fp8_gemm_nt_masked
    else:
        groups = torch.arange(len(w), dtype=torch.int32, device=w.device)
        rows = (groups.repeat_interleave(inputs["offsets"].diff()),)
        multiply = module.m_grouped_fp8_gemm_nt_contiguous

    def run() -> tuple[Any, ...]:
        multiply(*operands, *rows)
        return (out,)

    return Launch(run)


def _torch(case: Any, inputs: dict[str, Any]) -> Launch:
    """Its product takes no block scales on Hopper: it gets the values with a scale of 1 per row."""
    import torch

    from tiercel.ops.moe import reference as ref

    grouped: Any = getattr(torch, "_scaled_grouped_mm", None)
    if grouped is None or case["capacity"]:
        raise Unsupported("its groups follow one another")
    x, w, offsets = inputs["x"], inputs["w"], inputs["offsets"]
    ones = torch.ones(max(x.shape[0], w.shape[0] * w.shape[1]), device=x.device)
    of_x, of_w = ones[: x.shape[0]], ones[: w.shape[0] * w.shape[1]].view(w.shape[:2])
    columns, ends = w.mT, offsets[1:]

    def run() -> tuple[Any, ...]:
        options = {"offs": ends, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        return (grouped(x, columns, of_x, of_w, **options),)

    def check(outputs: tuple[Any, ...]) -> Error:
        wide: Any = Wide(w)
        return check_product(ref.grouped_gemm(x.double(), wide, offsets), *outputs)

    return Launch(run, exact=False, check=check, details={"scales": "of rows"})


ADAPTERS = {
    "deepgemm": {"grouped_gemm_fp8": _deepgemm},
    "torch": {"grouped_gemm_fp8": _torch},
}
