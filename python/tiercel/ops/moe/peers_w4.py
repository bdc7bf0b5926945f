# SPDX-License-Identifier: Apache-2.0
"""Experts with MXFP4 weights: vLLM's, which are Marlin's two products."""

from __future__ import annotations

import math
from typing import Any

from tiercel.ops.gemv.peers import E2M1_TYPE
from tiercel.workbench.bench.launch import Launch, Unsupported
from tiercel.workbench.bench.peers.vllm import operator

# Marlin's order of 64 scales, and of 32 biases, along the rows of a weight.
_SCALES = [i + 8 * j for i in range(8) for j in range(8)]
_BIASES = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]


def _padded(tensor: Any, *sizes: int) -> Any:
    """The tensor with zeros behind its dimensions after the first."""
    larger = tensor.new_zeros(tensor.shape[0], *sizes)
    larger[tuple(slice(size) for size in tensor.shape)] = tensor
    return larger


class _Half:
    """One of the two products, of weights [E, n, k / 2] in Marlin's order."""

    def __init__(self, weight: Any, scale: Any, bias: Any, n: int, k: int) -> None:
        import torch

        repack = operator("_C", "gptq_marlin_repack")
        self._gemm = operator("_moe_C", "moe_wna16_marlin_gemm")
        weight, scale = _padded(weight, n, k // 2), _padded(scale, n, k // 32)
        self._weight = torch.stack(
            [repack(w.view(torch.int32).t().contiguous(), k, n, 4, False) for w in weight]
        )
        turned = scale.transpose(1, 2).reshape(-1, 64)[:, _SCALES].reshape(-1, 4)[:, [0, 2, 1, 3]]
        self._scale = turned.reshape(len(scale), k // 32, n).view(torch.float8_e8m0fnu)
        self._bias = _padded(bias, n).view(-1, 32)[:, _BIASES].reshape(len(bias), n)
        self._workspace = torch.zeros(1024, dtype=torch.int32, device=weight.device)
        self._n, self._k = n, k

    def __call__(self, x: Any, out: Any, lists: Any, weights: Any, block: int, k: int) -> None:
        """Rows of x, k of out for each; the second product, with k of 1, applies the weights."""
        rows, experts, padded = lists
        values = {
            "a": x,
            "c_or_none": out,
            "b_q_weight": self._weight,
            "b_bias_or_none": self._bias,
            "b_scales": self._scale,
            "workspace": self._workspace,
            "sorted_token_ids": rows,
            "expert_ids": experts,
            "num_tokens_past_padded": padded,
            "topk_weights": weights,
            "moe_block_size": block,
            "top_k": k,
            "mul_topk_weights": k == 1,
            "b_type_id": E2M1_TYPE,
            "size_m": x.shape[0],
            "size_n": self._n,
            "size_k": self._k,
            "use_atomic_add": False,
            "use_fp32_reduce": True,
            "is_zp_float": False,
            "thread_k": -1,
            "thread_n": -1,
            "blocks_per_sm": -1,
        }
        names = [argument.name for argument in self._gemm.default._schema.arguments]
        self._gemm(*(values.get(name) for name in names))


def _vllm(case: Any, inputs: dict[str, Any]) -> Launch:
    """Its Marlin back end, which it takes for gpt-oss on this GPU: sizes are padded and blocks
    chosen as it does."""
    import torch

    if case["format"] != "mxfp4" or case.dtype != "bfloat16" or case["float8"]:
        raise Unsupported("this adapter is for MXFP4 and bfloat16")
    x, w_up, up_scale, w_down, down_scale, weights, ids, up_bias, down_bias = inputs.values()
    tokens, k, experts = case["T"], case["k"], case["E"]
    hidden, inner = -(-case["H"] // 256) * 256, -(-case["I"] // 128) * 128
    up = _Half(w_up, up_scale, up_bias, 2 * inner, hidden)
    down = _Half(w_down, down_scale, down_bias, hidden, inner)
    for block in (8, 16, 32, 48, 64):
        if tokens * k / experts / block < 0.9:
            break
    most = tokens * k + experts * (block - 1)
    if tokens * k < experts:
        most = min(tokens * k * block, most)
    options = {"dtype": torch.int32, "device": x.device}
    lists = tuple(torch.empty(n, **options) for n in (most, math.ceil(most / block), 1))
    align, act = operator("_moe_C", "moe_align_block_size"), operator("_C", "swigluoai_and_mul")
    extra = [None] * (len(align.default._schema.arguments) - 6)
    wide = _padded(x[None], tokens, hidden)[0]
    gates, middle = x.new_empty(tokens * k, 2 * inner), x.new_empty(tokens * k, inner)
    outputs, out = x.new_empty(tokens * k, hidden), x.new_empty(tokens, hidden)

    def run() -> tuple[Any, ...]:
        align(ids, experts, block, *lists, *extra)
        up(wide, gates, lists, weights, block, k)
        act(middle, gates, 1.702, 7.0)
        down(middle, outputs, lists, weights, block, 1)
        torch.sum(outputs.view(tokens, k, hidden), dim=1, out=out)
        return (out[:, : case["H"]],)

    return Launch(run)


def _torch(case: Any, inputs: dict[str, Any]) -> Launch:
    """torch's grouped product of what the weights stand for, in bfloat16."""
    import torch

    from tiercel.ops.gemv.reference import w4_values

    grouped: Any = getattr(torch, "_grouped_mm", None)
    if grouped is None or case.dtype != "bfloat16" or case["float8"]:
        raise Unsupported("torch's grouped product is for bfloat16")
    x, w_up, up_scale, w_down, down_scale, weights, ids, up_bias, down_bias = inputs.values()
    k, experts = case["k"], case["E"]

    def wide(weight: Any, scale: Any) -> Any:
        pairs = zip(weight, scale, strict=True)
        each = [w4_values(w, s, case["format"]).to(torch.bfloat16) for w, s in pairs]
        return torch.stack(each).transpose(1, 2)

    up, down = wide(w_up, up_scale), wide(w_down, down_scale)

    def run() -> tuple[Any, ...]:
        flat = ids.flatten().long()
        order = flat.argsort()
        of_rows, rows = flat[order], order // k
        counts = torch.zeros(experts, dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        ends = counts.cumsum(0, dtype=torch.int32)
        sums = grouped(x[rows], up, offs=ends) + up_bias[of_rows]
        a, b = sums[:, ::2].clamp(max=7.0), sums[:, 1::2].clamp(-7.0, 7.0)
        middle = a * torch.sigmoid(1.702 * a) * (b + 1)
        outer = (grouped(middle, down, offs=ends) + down_bias[of_rows]).float()
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        out.index_add_(0, rows, outer * weights.flatten()[order, None])
        return (out.to(x.dtype),)

    return Launch(run)


ADAPTERS = {"torch": {"w4_moe": _torch}, "vllm": {"w4_moe": _vllm}}
