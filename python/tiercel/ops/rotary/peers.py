# SPDX-License-Identifier: Apache-2.0
"""Around attention: rotary position embedding, and new keys and values into a paged cache.

vLLM rotates in place only: called again and again on the same input it would not give the same
result, which is what is checked and timed here.
"""

from __future__ import annotations

import importlib
from typing import Any

from tiercel.ops.rotary.cases import rotated
from tiercel.workbench.bench.compiled import compiled_for
from tiercel.workbench.bench.launch import Launch, Unsupported
from tiercel.workbench.bench.peers.vllm import operator


def _rotary(case: Any, inputs: dict[str, Any]) -> Launch:
    values, interleaved = tuple(inputs.values()), case["style"] == "interleaved"
    return Launch(run=lambda: rotated(*values, interleaved))


def _rotary_compiled(case: Any, inputs: dict[str, Any]) -> Launch:
    compiled = compiled_for(case, rotated)
    values, interleaved = tuple(inputs.values()), case["style"] == "interleaved"
    return Launch(run=lambda: compiled(*values, interleaved))


def _rotary_flashinfer(case: Any, inputs: dict[str, Any]) -> Launch:
    """It has tokens and all heads as a matrix, and cosines and sines in float32."""
    rope: Any = importlib.import_module("flashinfer.rope")
    q, k = inputs["q"], inputs["k"]
    size, neox, wide = case["D"], case["style"] == "neox", inputs["cache"].float()

    def run() -> tuple[Any, Any]:
        rotated_q, rotated_k = rope.apply_rope_with_cos_sin_cache(
            inputs["positions"], q.flatten(1), k.flatten(1), size, wide, neox
        )
        return rotated_q.view(q.shape), rotated_k.view(k.shape)

    return Launch(run)


def written(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any) -> tuple[Any, Any]:
    """Lines by their number; no slot is skipped in these cases."""
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache.flatten(0, 1)[slots] = new.to(cache.dtype)
    return key_cache, value_cache


def _kv(case: Any, inputs: dict[str, Any]) -> Launch:
    values = tuple(inputs.values())
    return Launch(run=lambda: written(*values))


def _kv_compiled(case: Any, inputs: dict[str, Any]) -> Launch:
    compiled, values = compiled_for(case, written), tuple(inputs.values())
    return Launch(run=lambda: compiled(*values))


def _kv_vllm(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    function = operator("_C_cache_ops", "reshape_and_cache_flash")
    key, value, key_cache, value_cache, slots = inputs.values()
    one = torch.ones(1, device=key.device)
    kind = "auto" if case["cache"] == "same" else "fp8"
    stored = [c if kind == "auto" else c.view(torch.uint8) for c in (key_cache, value_cache)]

    def run() -> tuple[Any, Any]:
        function(key, value, *stored, slots, kind, one, one)
        return key_cache, value_cache

    return Launch(run)


def _kv_flashinfer(case: Any, inputs: dict[str, Any]) -> Launch:
    """The new lines are one sequence from its beginning on."""
    import torch

    if case["cache"] != "same":
        raise Unsupported("it converts no lines")
    page: Any = importlib.import_module("flashinfer.page")
    key, value, key_cache, value_cache, slots = inputs.values()
    tokens, block = case["T"], key_cache.shape[1]
    whole = {"dtype": torch.int32, "device": key.device}
    indices = (slots[::block] // block).int()
    arguments = (
        torch.zeros(tokens, **whole),
        torch.arange(tokens, **whole),
        (key_cache, value_cache),
        indices,
        torch.tensor([0, len(indices)], **whole),
        torch.tensor([(tokens - 1) % block + 1], **whole),
    )

    def run() -> tuple[Any, Any]:
        page.append_paged_kv_cache(key, value, *arguments)
        return key_cache, value_cache

    return Launch(run)


def fused(inputs: dict[str, Any], interleaved: bool) -> tuple[Any, Any, Any]:
    """Norms, rotation and writes, in torch's operations."""
    import torch

    normed = [
        torch.nn.functional.rms_norm(inputs[x], (inputs[x].shape[-1],), inputs[weight], 1e-6)
        for x, weight in (("q", "q_weight"), ("k", "k_weight"))
    ]
    q, k = rotated(inputs["positions"], *normed, inputs["cos_sin_cache"], interleaved)
    inputs["q_out"].copy_(q)
    written(k, inputs["v"], inputs["key_cache"], inputs["value_cache"], inputs["slots"])
    return inputs["q_out"], inputs["key_cache"], inputs["value_cache"]


def _fused(case: Any, inputs: dict[str, Any]) -> Launch:
    return Launch(run=lambda: fused(inputs, case["style"] == "interleaved"))


def _fused_compiled(case: Any, inputs: dict[str, Any]) -> Launch:
    compiled = compiled_for(case, fused)
    return Launch(run=lambda: compiled(inputs, case["style"] == "interleaved"))


def _fused_vllm(case: Any, inputs: dict[str, Any]) -> Launch:
    """Its operator reads q, k and v side by side, and writes the rotated keys a second time."""
    import torch

    if case["style"] != "neox":
        raise Unsupported("it rotates halves only")
    if case["cache"] != "same":
        raise Unsupported("it does not quantise the queries")
    function = operator("_C", "fused_qknorm_rope_cache")
    q, k, v = (inputs[name].flatten(1) for name in "qkv")
    q_out, key_cache, value_cache = (inputs[n] for n in ("q_out", "key_cache", "value_cache"))
    arguments = (
        q_out.view(q.shape),
        torch.empty_like(k),
        torch.empty_like(v),
        torch.cat([q, k, v], dim=1),
        inputs["q_weight"],
        inputs["k_weight"],
        *inputs["cos_sin_cache"].chunk(2, dim=-1),
        inputs["positions"],
        inputs["slots"],
        key_cache,
        value_cache,
        case["D"],
        case["H"],
        case["G"],
        case["R"] // 2,
        1e-6,
        0.0,
        "auto",
        None,
        None,
    )

    def run() -> tuple[Any, Any, Any]:
        function(*arguments)
        return q_out, key_cache, value_cache

    return Launch(run)


ADAPTERS = {
    "flashinfer": {"kv_cache_write": _kv_flashinfer, "rotary_embedding": _rotary_flashinfer},
    "torch": {
        "kv_cache_write": _kv,
        "qk_norm_rope_cache": _fused,
        "rotary_embedding": _rotary,
    },
    "torch.compile": {
        "kv_cache_write": _kv_compiled,
        "qk_norm_rope_cache": _fused_compiled,
        "rotary_embedding": _rotary_compiled,
    },
    "vllm": {"kv_cache_write": _kv_vllm, "qk_norm_rope_cache": _fused_vllm},
}
