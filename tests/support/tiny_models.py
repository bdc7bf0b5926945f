# SPDX-License-Identifier: Apache-2.0
"""Tiny Hugging Face models with random weights."""

import torch
import transformers

transformers.logging.set_verbosity_error()

_SLIDING_EVERY_OTHER = ["sliding_attention", "full_attention"]
_ALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# All experts of a token: a rounding error cannot choose another one.
_EXPERTS = {"num_experts_per_tok": 4, "norm_topk_prob": True}
MODELS = {
    "Llama": {},
    "Qwen3": {},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 32, **_EXPERTS},
    "Mistral": {"sliding_window": 6},
    "Gemma2": {
        "sliding_window": 6,
        "query_pre_attn_scalar": 16,
        "layer_types": _SLIDING_EVERY_OTHER,
    },
    "Gemma3": {
        "sliding_window": 6,
        "query_pre_attn_scalar": 16,
        "layer_types": _SLIDING_EVERY_OTHER,
    },
    "GptOss": {
        "sliding_window": 6,
        "layer_types": _SLIDING_EVERY_OTHER,
        "num_local_experts": 4,
        **_EXPERTS,
    },
    "Phi3": {},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "head_dim": 8,  # of the rotation
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        **_EXPERTS,
    },
}


def config(name, **changes):
    suffix = "TextConfig" if name == "Gemma3" else "Config"
    return getattr(transformers, name + suffix)(**_ALL | MODELS[name] | changes)


def make(name, dtype=torch.bfloat16, attention="eager", device="cpu", **changes):
    """A model with random weights from a fixed seed, the weights of norms included."""
    torch.manual_seed(0)
    settings = config(name, attn_implementation=attention, **changes)
    model = getattr(transformers, f"{name}ForCausalLM")(settings).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += torch.randn(weight.shape, generator=generator) * 0.1
    if dtype != torch.bfloat16 and hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # grouped products are of 16 bits on a GPU
    return model.to(device, dtype)


def tokens(batch=2, length=20, device="cpu"):
    generator = torch.Generator().manual_seed(2)
    return torch.randint(3, _ALL["vocab_size"], (batch, length), generator=generator).to(device)


def distance(found, expected, where=...):
    found, expected = found.double()[where], expected.double()[where]
    return ((found - expected).norm() / expected.norm()).item()
