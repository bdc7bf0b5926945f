# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts routing: sorting tokens by expert, and adding up experts' outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiercel.ops.routing.contract import CONTRACTS as _TOPK
from tiercel.plugins.contract import Case, Contract, ScalarSpec, TensorSpec


class _AlignContract(Contract):
    """A contract whose last outputs have sizes that follow from several arguments."""

    def sizes(self, values: Sequence[Any]) -> dict[str, int]:
        from tiercel.ops.routing.align import slots_for

        found = super().sizes(values)
        pad = values[self.names.index("pad_sorted_ids")]
        block = found["block_size"]
        experts = found.get("num_experts", found.get("E", 0))
        slots = slots_for(found["T"] * found["k"], experts, block, pad)
        return found | {"slots": slots, "blocks": -(-slots // block), "one": 1}


_ALIGNED = (
    TensorSpec("sorted_token_ids", ("slots",), ("int32",)),
    TensorSpec("expert_ids", ("blocks",), ("int32",)),
    TensorSpec("num_tokens_post_padded", ("one",), ("int32",)),
)


def _into(call: Any, outputs: Sequence[Any], values: Sequence[Any], numel: int) -> None:
    """Runs a backend and copies to outputs, of which the last three may be longer."""
    from tiercel.ops.routing.align import fill_outputs

    results = call(*values)
    for output, result in zip(outputs[:-3], results[:-3], strict=True):
        output.copy_(result)
    fill_outputs(tuple(outputs[-3:]), tuple(results[-3:]), numel)


# moe_align_block_size


def _align_case(rows: int, k: int, experts: int, block: int, dtype: str, **options: Any) -> Case:
    sizes = {"T": rows, "k": k, "num_experts": experts, "block_size": block}
    return Case(sizes, dtype, {}, options.get("values", "random"))


# `values`: random; mapped = every second expert is here; local = and others' tokens are left out;
# stray = some ids are of no expert; one = all tokens chose the same expert.
_ALIGN_CASES = (
    _align_case(1, 2, 8, 16, "int32"),
    _align_case(16, 8, 64, 16, "int32"),
    _align_case(33, 6, 60, 48, "int64"),
    _align_case(129, 8, 256, 128, "int32"),
    _align_case(2000, 8, 512, 64, "int32"),
    _align_case(100, 8, 64, 32, "int32", values="mapped"),
    _align_case(100, 8, 64, 32, "int32", values="local"),
    _align_case(50, 4, 32, 16, "int64", values="stray"),
    _align_case(300, 4, 16, 64, "int32", values="one"),
    _align_case(0, 8, 64, 16, "int32"),
)


def _every_second(experts: int, device: str) -> Any:
    import torch

    here = torch.full((experts,), -1, dtype=torch.int32)
    here[1::2] = torch.arange(len(here[1::2]), dtype=torch.int32)
    return here.to(device)


def _make_align(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    rows, k, experts, block = (case.sizes[n] for n in ("T", "k", "num_experts", "block_size"))
    # On the CPU and then moved: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, experts, generator=generator).topk(k).indices
    if case.values == "one":
        ids = torch.full_like(ids, experts - 1)
    elif case.values == "stray":
        ids = ids + torch.randint(-1, 2, ids.shape, generator=generator) * (experts // 2)
    mapped = case.values in ("mapped", "local")
    return {
        "topk_ids": ids.to(device=device, dtype=getattr(torch, case.dtype)),
        "block_size": block,
        "num_experts": experts,
        "expert_map": _every_second(experts, device) if mapped else None,
        "pad_sorted_ids": False,
        "ignore_invalid_experts": case.values == "local",
    }


def _align_into(call: Any, topk_ids: Any, *args: Any) -> None:
    outputs, (block_size, num_experts, expert_map, ignore) = args[:3], args[3:]
    values = (topk_ids, block_size, num_experts, expert_map, False, ignore)
    _into(call, outputs, values, topk_ids.numel())


MOE_ALIGN_BLOCK_SIZE = _AlignContract(
    family="routing",
    op="moe_align_block_size",
    arguments=(
        TensorSpec("topk_ids", ("T", "k"), ("int32", "int64")),
        ScalarSpec("block_size", "int"),
        ScalarSpec("num_experts", "int"),
        TensorSpec("expert_map", ("num_experts",), ("int32",), optional=True),
        ScalarSpec("pad_sorted_ids", "bool"),
        ScalarSpec("ignore_invalid_experts", "bool"),
    ),
    outputs=_ALIGNED,
    cases=_ALIGN_CASES,
    timing={
        "cpu": _align_case(512, 8, 64, 64, "int32"),
        "cuda": _align_case(8192, 8, 256, 128, "int32"),
    },
    make=_make_align,
    variants={
        "moe_align_block_size": lambda call, *values: call(*values),
        "moe_align_block_size_out": _align_into,
    },
)

# topk_softmax_align


def _fused_case(rows: int, experts: int, k: int, block: int, dtype: str, **options: Any) -> Case:
    sizes = {"T": rows, "E": experts, "k": k, "block_size": block}
    values = options.pop("values", "random")
    return Case(sizes, dtype, options, values)


_FUSED_CASES = (
    _fused_case(1, 64, 8, 16, "bfloat16"),
    _fused_case(17, 60, 4, 16, "float32", renormalize=True),
    _fused_case(128, 256, 8, 64, "bfloat16", softmax_first=False),
    _fused_case(128, 512, 16, 128, "float16"),
    _fused_case(300, 128, 8, 32, "bfloat16"),
    _fused_case(0, 64, 8, 16, "bfloat16"),
    _fused_case(20, 32, 8, 16, "float32", values="strided"),
)


def _make_fused(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(case.sizes["T"], case.sizes["E"], generator=generator)
    if case.values == "strided":
        scores = scores.t().contiguous().t()
    options = {"softmax_first": True, "renormalize": False} | dict(case.options)
    return {
        "scores": scores.to(device=device, dtype=getattr(torch, case.dtype)),
        "k": case.sizes["k"],
        "block_size": case.sizes["block_size"],
        "expert_map": None,
        **options,
        "indices_dtype": torch.int32,
        "pad_sorted_ids": False,
        "ignore_invalid_experts": False,
    }


def _fused_into(call: Any, scores: Any, *args: Any) -> None:
    outputs, (block_size, expert_map, softmax_first, renormalize, ignore) = args[:5], args[5:]
    weights, indices = outputs[:2]
    options = (softmax_first, renormalize, indices.dtype, False, ignore)
    values = (scores, weights.shape[1], block_size, expert_map, *options)
    _into(call, outputs, values, weights.numel())


TOPK_SOFTMAX_ALIGN = _AlignContract(
    family="routing",
    op="topk_softmax_align",
    arguments=(
        _TOPK[0].spec("scores"),
        ScalarSpec("k", "int"),
        ScalarSpec("block_size", "int"),
        TensorSpec("expert_map", ("E",), ("int32",), optional=True),
        ScalarSpec("softmax_first", "bool"),
        ScalarSpec("renormalize", "bool"),
        ScalarSpec("indices_dtype", "dtype"),
        ScalarSpec("pad_sorted_ids", "bool"),
        ScalarSpec("ignore_invalid_experts", "bool"),
    ),
    outputs=(*_TOPK[0].outputs, *_ALIGNED),
    cases=_FUSED_CASES,
    timing={
        "cpu": _fused_case(64, 64, 8, 16, "float32"),
        "cuda": _fused_case(128, 128, 8, 16, "bfloat16"),
    },
    make=_make_fused,
    variants={
        "topk_softmax_align": lambda call, *values: call(*values),
        "topk_softmax_align_out": _fused_into,
    },
)

# moe_sum


def _sum_case(rows: int, k: int, columns: int, dtype: str, values: str = "weights") -> Case:
    return Case({"T": rows, "k": k, "H": columns}, dtype, {}, values)


_SUM_CASES = (
    _sum_case(1, 8, 256, "bfloat16"),
    _sum_case(33, 6, 136, "float16"),
    _sum_case(20, 2, 64, "float32"),
    _sum_case(20, 3, 65, "bfloat16"),
    _sum_case(100, 8, 512, "bfloat16", "no weights"),
    _sum_case(0, 8, 64, "bfloat16"),
    _sum_case(17, 4, 96, "bfloat16", "strided"),
)


def _make_sum(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    rows, k, columns = (case.sizes[name] for name in "TkH")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, columns, generator=generator)
    x = x.to(device=device, dtype=getattr(torch, case.dtype))
    if case.values == "strided":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    weights = torch.rand(rows, k, generator=generator).to(device)
    return {"x": x, "weights": None if case.values == "no weights" else weights}


def _sum_into(call: Any, *args: Any) -> None:
    *values, out = args
    (result,) = call(values[0], values[1] if len(values) > 1 else None)
    out.copy_(result)


MOE_SUM = Contract(
    family="routing",
    op="moe_sum",
    arguments=(
        TensorSpec("x", ("T", "k", "H"), ("float32", "bfloat16", "float16"), strided=True),
        TensorSpec("weights", ("T", "k"), ("float32",), optional=True),
    ),
    # One rounding to bfloat16, 2**-9; sums that cancel have an absolute error.
    outputs=(TensorSpec("out", ("T", "H"), ("x",), rtol=4e-3, atol=1e-5),),
    cases=_SUM_CASES,
    timing={
        "cpu": _sum_case(64, 8, 512, "bfloat16"),
        "cuda": _sum_case(4096, 8, 4096, "bfloat16"),
    },
    make=_make_sum,
    variants={
        "moe_sum": lambda call, x, weights: call(x, weights)[0],
        "moe_sum_no_weights": lambda call, x: call(x, None)[0],
        "moe_sum_out": _sum_into,
        "moe_sum_no_weights_out": _sum_into,
    },
)

CONTRACTS = (MOE_ALIGN_BLOCK_SIZE, MOE_SUM, TOPK_SOFTMAX_ALIGN)
