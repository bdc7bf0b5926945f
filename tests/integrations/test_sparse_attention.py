# SPDX-License-Identifier: Apache-2.0
"""Models whose attention gets more than q, k, v and a mask: keys or blocks of keys that an indexer
selects, sinks and biases for each query. Tiercel's attention has none of these, so the model's own
must run, with all that it was given."""

import pytest
import torch
import transformers

import tiercel
from tiercel.integrations.transformers import apply

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::tiercel.backends.FallbackWarning"),
]

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "index_topk": 6,
    "index_n_heads": 4,
    "index_head_dim": 32,
}
_BLOCKS = {
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "index_topk_blocks": 2,
    "index_block_size": 4,
    "index_head_dim": 16,
}
_PER_QUERY = {
    "head_dim": 16,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
MODELS = {
    "DeepseekV32ForCausalLM": _LATENT,
    "GlmMoeDsaForCausalLM": _LATENT,
    "MiniMaxM3VLForCausalLM": _BLOCKS,
    "Inkling2ForCausalLM": _PER_QUERY,
}
LENGTH = 20


def tiny(name, more):
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    model_class = getattr(transformers, name)
    config_class = model_class.config_class
    known = {k: v for k, v in (_SIZES | more).items() if hasattr(config_class(), k)}
    torch.manual_seed(0)
    return model_class(config_class(**known)).eval()


def inputs():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 128, (2, LENGTH), generator=generator)
    padding = torch.ones_like(ids)
    padding[0, :6] = 0
    return ids, padding


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [False, True])
def test_apply_keeps_what_the_models_own_attention_computes(name, padded):
    model = tiny(name, MODELS[name])
    ids, padding = inputs()
    given = {"attention_mask": padding} if padded else {}
    real = padding.bool() if padded else torch.ones_like(padding, dtype=torch.bool)
    with torch.no_grad():
        right = model(ids, **given).logits[real]
        with tiercel.use_backend("ref"):
            report = apply(model)
            found = model(ids, **given).logits[real]
    assert "attention" in report.replaced
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_selected_keys_matter():
    """The comparison above can fail: with all keys selected the logits are others."""
    few = tiny("DeepseekV32ForCausalLM", _LATENT)
    all_keys = tiny("DeepseekV32ForCausalLM", _LATENT | {"index_topk": 64})
    all_keys.load_state_dict(few.state_dict())
    ids, _ = inputs()
    with torch.no_grad():
        assert (few(ids).logits - all_keys(ids).logits).abs().max() > 1e-2


def _qkv(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, 4, 12, 16, generator=generator).to(dtype) for _ in range(3)]


def test_indices_are_not_ignored_where_the_kernels_would_apply():
    q, k, v = _qkv()
    module = torch.nn.Module()
    indices = torch.stack([torch.randperm(12)[:5] for _ in range(24)]).view(2, 12, 5).int()
    attend = transformers.AttentionInterface()["tiercel"]
    out, _ = attend(module, q, k, v, None, scaling=0.25, is_causal=False, indices=indices)
    chosen = torch.zeros(2, 12, 12, dtype=torch.bool).scatter(-1, indices.long(), True)
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, chosen[:, None], scale=0.25)
    torch.testing.assert_close(out, right.transpose(1, 2))


def test_blocks_without_an_indexer_are_an_error():
    q, k, v = _qkv()
    attend = transformers.AttentionInterface()["tiercel"]
    with pytest.raises(NotImplementedError, match="Module passes `block_indices`"):
        attend(torch.nn.Module(), q, k, v, None, block_indices=torch.zeros(2, 1, 12, 1).long())
