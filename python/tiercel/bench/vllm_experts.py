# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton kernel for experts' MLPs, out of its source file: the rest of vLLM is not imported.

The file is model_executor/layers/fused_moe/fused_moe.py, with its configs/ beside it, in the
installed vllm or in a folder that holds its libraries (peers/vllm.py).
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiercel.bench.launch import Unsupported
from tiercel.bench.peers import vllm

_FUNCTIONS = ("write_zeros_to_output", "fused_moe_kernel")


def _source() -> Path:
    for folder in vllm.folders():
        path = folder / "model_executor" / "layers" / "fused_moe" / "fused_moe.py"
        if path.is_file():
            return path
    raise Unsupported("model_executor/layers/fused_moe/fused_moe.py is not beside its libraries")


@functools.cache
def _kernel(path: Path) -> Any:
    """The kernel as a module of its own: Triton reads its functions' source."""
    text = path.read_text()
    found = {
        node.name: "\n".join(text.splitlines()[node.decorator_list[0].lineno - 1 : node.end_lineno])
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name in _FUNCTIONS
    }
    if len(found) != len(_FUNCTIONS):
        raise Unsupported(f"{path} has no {' or no '.join(_FUNCTIONS)}")
    lines = ["import triton", "import triton.language as tl", *(found[f] for f in _FUNCTIONS)]
    copy = Path(tempfile.mkdtemp()) / "vllm_fused_moe_kernel.py"
    copy.write_text("\n\n".join(lines) + "\n")
    spec: Any = importlib.util.spec_from_file_location(copy.stem, copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fused_moe_kernel


def configuration(
    folder: Path, tokens: int, experts: int, inner: int, device: str, float8: bool
) -> Any:
    """The one that vLLM would take: tuned for the nearest number of tokens, or by its rules."""
    name = f"E={experts},N={inner},device_name={device.replace(' ', '_')}"
    path = folder / "configs" / (name + (",dtype=fp8_w8a8.json" if float8 else ".json"))
    if path.is_file():
        tuned = {int(k): v for k, v in json.loads(path.read_text()).items() if k.isdigit()}
        return tuned[min(tuned, key=lambda known: abs(known - tokens))]
    rows = next((size for most, size in ((32, 16), (96, 32), (512, 64)) if tokens <= most), 128)
    return {
        "BLOCK_SIZE_M": rows,
        "BLOCK_SIZE_N": 64 if tokens <= 64 else 128,
        "BLOCK_SIZE_K": 128 if tokens <= 64 or float8 else 64,
        "GROUP_SIZE_M": 16 if tokens // experts > 128 else 1,
        "num_warps": 4 if tokens <= 128 else 8,
        "num_stages": 4 if tokens <= 32 else 3,
    }


def _quantized_like(a: Any) -> tuple[Any, Any]:
    import torch

    scale = torch.empty((a.shape[0], 1), dtype=torch.float32, device=a.device)
    return torch.empty(a.shape, dtype=torch.float8_e4m3fn, device=a.device), scale


def fused_experts(
    x: Any,
    w_up: Any,
    w_down: Any,
    weights: Any,
    ids: Any,
    activation: str,
    up_scale: Any = None,
    down_scale: Any = None,
) -> Callable[[], Any]:
    """Its sequence: sort by expert, product, activation, product, sum. Scales are of float8
    weights, a factor a channel; then rows are quantised before both products, with one a token."""
    import torch
    import triton
    import triton.language as tl

    path = _source()
    kernel = _kernel(path)
    align = vllm.operator("_moe_C", "moe_align_block_size")
    add, act = vllm.operator("_moe_C", "moe_sum"), vllm.operator("_C", f"{activation}_and_mul")
    tokens, hidden = x.shape
    (experts, _, inner), k = w_down.shape, ids.shape[1]
    float8, name = up_scale is not None, torch.cuda.get_device_name(x.device)
    config = dict(configuration(path.parent, tokens, experts, inner, name, float8))
    block, block_k = config["BLOCK_SIZE_M"], config.pop("BLOCK_SIZE_K")
    config.pop("SPLIT_K", None)
    elements = tokens * k
    first = x.new_empty((tokens, k, 2 * inner))
    middle = x.new_empty((elements, inner))
    last = x.new_empty((tokens, k, hidden))
    out = torch.empty_like(x)
    one_each = elements * 4 <= experts  # so few that each gets a block, without sorting
    slots = elements * block if one_each else elements + experts * (block - 1)
    if elements < experts:
        slots = min(slots, elements * block)
    sorted_ids = torch.empty(slots, dtype=torch.int32, device=x.device)
    owners = torch.empty(triton.cdiv(slots, block), dtype=torch.int32, device=x.device)
    padded = torch.empty(1, dtype=torch.int32, device=x.device)
    extra = [None] * (len(align.default._schema.arguments) - 6)
    more = [None] * (len(add.default._schema.arguments) - 2)
    compute = tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16

    swapped = float8 and block < 64 and config["BLOCK_SIZE_N"] >= 64
    quantized = {a.shape: _quantized_like(a) for a in (x, middle)} if float8 else {}

    def product(a: Any, w: Any, scale: Any, c: Any, per_token: int, weighted: bool) -> None:
        a_scale = None
        if float8:
            rows, a_scale = quantized[a.shape]
            vllm.operator("_C", "dynamic_per_token_scaled_fp8_quant")(rows, a, a_scale, None)
            a = rows
        limit = min(slots, a.shape[0] * per_token * block) if a.shape[0] < block else slots
        values = {
            "a_ptr": a,
            "b_ptr": w,
            "c_ptr": c,
            "b_bias_ptr": None,
            "a_scale_ptr": a_scale,
            "b_scale_ptr": scale,
            "topk_weights_ptr": weights,
            "sorted_token_ids_ptr": None if one_each else sorted_ids,
            "expert_ids_ptr": ids.view(-1) if one_each else owners,
            "num_tokens_post_padded_ptr": padded,
            "N": w.shape[1],
            "K": w.shape[2],
            "EM": limit,
            "num_valid_tokens": elements,
            "stride_am": a.stride(0),
            "stride_ak": a.stride(1),
            "stride_be": w.stride(0),
            "stride_bk": w.stride(2),
            "stride_bn": w.stride(1),
            "stride_cm": c.stride(1),
            "stride_cn": c.stride(2),
            "stride_asm": 1,
            "stride_bse": scale.stride(0) if float8 else 0,
            "stride_bsn": scale.stride(1) if float8 else 0,
            "use_fp8_w8a8": float8,
            "per_channel_quant": float8,
            "SWAP_AB": swapped,
            "naive_block_assignment": one_each,
            "BLOCK_SIZE_K": block_k,
            "SPLIT_K": 1,
            "MUL_ROUTED_WEIGHT": weighted,
            "top_k": per_token,
            "compute_type": compute,
            **config,
        }
        # What is left is of other quantized weights and of biases.
        given = {name: values.get(name, 0) for name in kernel.arg_names}
        launch = {name: config[name] for name in ("num_warps", "num_stages")}
        grid = (triton.cdiv(limit, block) * triton.cdiv(w.shape[1], config["BLOCK_SIZE_N"]),)
        kernel[grid](**given, **launch)

    def run() -> Any:
        if one_each:
            padded.fill_(slots)
        else:
            align(ids, experts, block, sorted_ids, owners, padded, *extra)
        product(x, w_up, up_scale, first, k, False)
        act(middle, first.view(elements, 2 * inner))
        product(middle, w_down, down_scale, last, 1, True)
        add(last, out, *more)
        return out

    return run
