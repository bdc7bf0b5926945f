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

from tiercel.workbench.bench.launch import Unsupported
from tiercel.workbench.bench.peers import vllm

_FUNCTIONS = ("write_zeros_to_output", "fused_moe_kernel")
_BLOCK = 128  # values of a scale, in scales of blocks


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
    folder: Path, tokens: int, experts: int, inner: int, device: str, weights: str
) -> Any:
    """The one that vLLM would take: tuned for the nearest number of tokens, or by its rules."""
    kind = {
        "same": "",
        "float8": ",dtype=fp8_w8a8",
        "float8_blocks": f",dtype=fp8_w8a8,block_shape=[{_BLOCK},{_BLOCK}]",
    }[weights]
    family = "NVIDIA_H200" if "H200" in device.split() else device.replace(" ", "_")
    path = folder / "configs" / f"E={experts},N={inner},device_name={family}{kind}.json"
    if path.is_file():
        tuned = {int(k): v for k, v in json.loads(path.read_text()).items() if k.isdigit()}
        return tuned[min(tuned, key=lambda known: abs(known - tokens))]
    if weights == "float8_blocks":
        return {
            "BLOCK_SIZE_M": 16 if tokens <= 64 else 64,
            "BLOCK_SIZE_N": 64 if tokens <= 8 else _BLOCK,
            "BLOCK_SIZE_K": _BLOCK,
            "GROUP_SIZE_M": 1 if tokens <= 16 else 32,
            "num_warps": 4,
            "num_stages": 4 if tokens <= 4 else 3,
        }
    rows = next((size for most, size in ((32, 16), (96, 32), (512, 64)) if tokens <= most), 128)
    return {
        "BLOCK_SIZE_M": rows,
        "BLOCK_SIZE_N": 64 if tokens <= 64 else 128,
        "BLOCK_SIZE_K": 128 if tokens <= 64 or weights == "float8" else 64,
        "GROUP_SIZE_M": 16 if tokens // experts > 128 else 1,
        "num_warps": 4 if tokens <= 128 else 8,
        "num_stages": 4 if tokens <= 32 else 3,
    }


class _Quantizer:
    """Rows as float8, with a scale a token or of each 128 of its values, as its products take them
    with such scales of weights."""

    def __init__(self, like: Any, blocks: bool) -> None:
        import torch

        columns = like.shape[1] // _BLOCK if blocks else 1
        self.blocks = blocks
        self.rows = torch.empty(like.shape, dtype=torch.float8_e4m3fn, device=like.device)
        self.scale = torch.empty((like.shape[0], columns), dtype=torch.float32, device=like.device)
        name = "per_token_group_fp8_quant" if blocks else "dynamic_per_token_scaled_fp8_quant"
        self._quantize = vllm.operator("_C", name)
        # The smallest sum's size, limits of float8, and flags of other layouts of scales.
        flags = len(self._quantize.default._schema.arguments) - 7
        self._more = (_BLOCK, 1e-10, -448.0, 448.0, *[False] * flags) if blocks else (None,)

    def __call__(self, a: Any) -> Any:
        if self.blocks:
            self._quantize(a, self.rows, self.scale, *self._more)
        else:
            self._quantize(self.rows, a, self.scale, *self._more)
        return self.rows

    def values(self, of_weights: Any) -> dict[str, Any]:
        """The kernel's arguments about scales."""
        values = {
            "a_scale_ptr": self.scale,
            "b_scale_ptr": of_weights,
            "stride_asm": self.scale.stride(0),
            "stride_bse": of_weights.stride(0),
            "stride_bsn": of_weights.stride(1),
            "use_fp8_w8a8": True,
            "per_channel_quant": not self.blocks,
        }
        if self.blocks:
            values |= {
                "stride_ask": self.scale.stride(1),
                "stride_bsk": of_weights.stride(2),
                "group_n": _BLOCK,
                "group_k": _BLOCK,
            }
        return values


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
    weights, a factor a channel or one a block of 128x128; then rows are quantised before both
    products, with one a token or one of each 128 values."""
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
    blocks = float8 and up_scale.ndim == 3
    kind = "float8_blocks" if blocks else "float8" if float8 else "same"
    config = dict(configuration(path.parent, tokens, experts, inner, name, kind))
    block, block_k = config["BLOCK_SIZE_M"], config.pop("BLOCK_SIZE_K")
    if blocks:
        block_k = min(block_k, _BLOCK)
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
    of_x, of_middle = (_Quantizer(a, blocks) if float8 else None for a in (x, middle))

    def product(
        a: Any, w: Any, scale: Any, quantize: Any, c: Any, per_token: int, weighted: bool
    ) -> None:
        if quantize is not None:
            a = quantize(a)
        limit = min(slots, a.shape[0] * per_token * block) if a.shape[0] < block else slots
        values = {
            "a_ptr": a,
            "b_ptr": w,
            "c_ptr": c,
            "b_bias_ptr": None,
            "a_scale_ptr": None,
            "b_scale_ptr": None,
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
            "SWAP_AB": swapped,
            "naive_block_assignment": one_each,
            "BLOCK_SIZE_K": block_k,
            "SPLIT_K": 1,
            "MUL_ROUTED_WEIGHT": weighted,
            "top_k": per_token,
            "compute_type": compute,
            **(quantize.values(scale) if quantize is not None else {}),
            **config,
        }
        # The other arguments are for other quantized weights and for biases.
        given = {name: values.get(name, 0) for name in kernel.arg_names}
        launch = {name: config[name] for name in ("num_warps", "num_stages")}
        grid = (triton.cdiv(limit, block) * triton.cdiv(w.shape[1], config["BLOCK_SIZE_N"]),)
        kernel[grid](**given, **launch)

    def run() -> Any:
        if one_each:
            padded.fill_(slots)
        else:
            align(ids, experts, block, sorted_ids, owners, padded, *extra)
        product(x, w_up, up_scale, of_x, first, k, False)
        act(middle, first.view(elements, 2 * inner))
        product(middle, w_down, down_scale, of_middle, last, 1, True)
        add(last, out, *more)
        return out

    return run
