# SPDX-License-Identifier: Apache-2.0
"""Qwen3, dense and mixture of experts, on Tiercel's ops: eight calls per dense layer."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import tiercel


@dataclasses.dataclass(frozen=True)
class Config:
    """The fields of a checkpoint's config.json that are used here."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 40960
    tie_word_embeddings: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True

    @classmethod
    def read(cls, fields: dict[str, Any]) -> "Config":
        """Makes a configuration from the contents of config.json, of any version of transformers.

        Raises:
            ValueError: The model is not a Qwen3, or has what this engine lacks.
        """
        kind = fields.get("model_type")
        if kind not in ("qwen3", "qwen3_moe"):
            raise ValueError(f"`model_type` must be qwen3 or qwen3_moe, got {kind!r}")
        rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"only default rotary embeddings are supported, got {rope}")
        if fields.get("use_sliding_window") or fields.get("mlp_only_layers"):
            raise ValueError("sliding windows and `mlp_only_layers` are not supported")
        if fields.get("decoder_sparse_step", 1) != 1 or fields.get("attention_bias"):
            raise ValueError("`decoder_sparse_step` and `attention_bias` are not supported")
        names = {field.name for field in dataclasses.fields(cls)}
        known = {name: fields[name] for name in names & fields.keys()}
        experts = fields.get("num_local_experts", 0)  # transformers 5's name of it
        theta = rope.get("rope_theta", 1e6)
        return cls(**{"rope_theta": theta, "num_experts": experts, **known})


@dataclasses.dataclass
class Step:
    """The inputs of a step: B sequences, T new tokens. All but the last are on the GPU."""

    tokens: Tensor  # [T] int32 or int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: places in the cache, negative for none
    lengths: Tensor  # [B] int32: keys per sequence, new ones included
    page_table: Tensor  # [B, pages of a sequence] int32
    starts: Tensor | None = None  # [B + 1] int32: where sequences begin; None: a token of each
    last: Tensor | None = None  # [R] int64: the rows whose next token is wanted; None: all
    most_new: int = 1  # the most new tokens of a sequence, or more


@dataclasses.dataclass
class Layer:
    input_norm: Tensor
    qkv: Tensor  # queries', keys' and values' rows
    q_norm: Tensor
    k_norm: Tensor
    output: Tensor
    mlp_norm: Tensor
    up: Tensor  # gate's rows, then up's; of each expert, if there are experts
    down: Tensor
    router: Tensor | None


class Model:
    """Weights, and the computation of a step."""

    def __init__(self, config: Config, weights: dict[str, Tensor]) -> None:
        self.config = config
        take = weights.__getitem__
        self.embeddings = take("model.embed_tokens.weight")
        self.head = self.embeddings if config.tie_word_embeddings else take("lm_head.weight")
        self.norm = take("model.norm.weight")
        self.layers = [
            self._layer(f"model.layers.{i}.", weights) for i in range(config.num_hidden_layers)
        ]
        self.rotations = rotations(config).to(self.embeddings.device)

    def _layer(self, prefix: str, weights: dict[str, Tensor]) -> Layer:
        def take(name: str) -> Tensor:
            return weights[prefix + name]

        def joined(names: Iterable[str]) -> Tensor:
            return torch.cat([take(name) for name in names])

        mlp: tuple[Tensor, Tensor, Tensor | None]
        if not self.config.num_experts:
            mlp = (
                joined(f"mlp.{n}_proj.weight" for n in ("gate", "up")),
                take("mlp.down_proj.weight"),
                None,
            )
        elif prefix + "mlp.experts.gate_up_proj" in weights:  # as transformers 5 holds them
            mlp = (
                take("mlp.experts.gate_up_proj"),
                take("mlp.experts.down_proj"),
                take("mlp.gate.weight"),
            )
        else:  # as checkpoints hold them
            experts = [f"mlp.experts.{e}." for e in range(self.config.num_experts)]
            up = [joined(f"{e}{n}_proj.weight" for n in ("gate", "up")) for e in experts]
            down = [take(f"{e}down_proj.weight") for e in experts]
            mlp = torch.stack(up), torch.stack(down), take("mlp.gate.weight")
        return Layer(
            take("input_layernorm.weight"),
            joined(f"self_attn.{n}_proj.weight" for n in "qkv"),
            take("self_attn.q_norm.weight"),
            take("self_attn.k_norm.weight"),
            take("self_attn.o_proj.weight"),
            take("post_attention_layernorm.weight"),
            *mlp,
        )

    def __call__(self, step: Step, cache: Callable[[int], tuple[Tensor, Tensor]]) -> Tensor:
        """Logits ``[R, vocabulary]``; the new tokens' keys and values go to the cache."""
        config = self.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        stream = torch.nn.functional.embedding(step.tokens, self.embeddings)
        more: Tensor | None = None  # to add to the stream
        for index, layer in enumerate(self.layers):
            hidden, stream = self._normed(stream, more, layer.input_norm)
            qkv = tiercel.linear_act(hidden, layer.qkv, activation="none")
            qkv = qkv.view(-1, heads + 2 * kv_heads, config.head_dim)
            q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
            keys, values = cache(index)
            tiercel.qk_norm_rope_cache(
                *(q, k, v, q, keys, values, step.slots, step.positions, self.rotations),
                *(layer.q_norm, layer.k_norm),
                eps=config.rms_norm_eps,
            )
            attended = _attention(step, q, keys, values)
            stream = tiercel.linear_act(
                attended.flatten(1), layer.output, activation="none", residual=stream
            )
            hidden, stream = self._normed(stream, None, layer.mlp_norm)
            if layer.router is None:
                stream = tiercel.fused_mlp(hidden, layer.up, layer.down, residual=stream)
            else:
                more = self._experts(layer, layer.router, hidden)
        if step.last is not None:
            stream = stream[step.last]
            more = None if more is None else more[step.last]
        hidden, _ = self._normed(stream, more, self.norm)
        return tiercel.linear_act(hidden, self.head, activation="none")

    def _normed(self, stream: Tensor, more: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of the stream plus `more`, and their sum."""
        eps = self.config.rms_norm_eps
        if more is None:
            return tiercel.rms_norm(stream, weight, eps=eps), stream
        return tiercel.rms_norm(stream, weight, residual=more, eps=eps)

    def _experts(self, layer: Layer, router: Tensor, hidden: Tensor) -> Tensor:
        scores = tiercel.linear_act(hidden, router, activation="none")
        weights, experts = tiercel.topk_softmax(
            scores, self.config.num_experts_per_tok, renormalize=self.config.norm_topk_prob
        )
        return tiercel.fused_moe(hidden, layer.up, layer.down, weights, experts)


def _attention(step: Step, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of new tokens over all tokens of their sequences, all of which are in the cache."""
    if step.starts is None:
        # This kernel splits the keys of a sequence among several blocks.
        attended = tiercel.decode_attention(
            *(q[:, None], keys, values, step.page_table, step.lengths)
        )
        return attended[:, 0]
    return tiercel.paged_attention(
        *(q, keys, values, step.page_table, step.lengths, step.starts, step.most_new)
    )


def rotations(config: Config) -> Tensor:
    """``[positions, head_dim]``: cosines, then sines, of each position's angles."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angles = torch.arange(config.max_position_embeddings)[:, None] * config.rope_theta**-half
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


def random_weights(config: Config, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights of a trained model's size, for measurements."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        made = torch.empty(shape, device=device, dtype=dtype)
        return made.normal_(0, 0.02, generator=generator)

    hidden, size = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    ones = torch.ones(max(hidden, size), device=device, dtype=dtype)
    weights = {"model.embed_tokens.weight": random(config.vocab_size, hidden)}
    weights["model.norm.weight"] = ones[:hidden]
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = random(config.vocab_size, hidden)
    for i in range(config.num_hidden_layers):
        layer = {
            "input_layernorm.weight": ones[:hidden],
            "post_attention_layernorm.weight": ones[:hidden],
            "self_attn.q_norm.weight": ones[:size],
            "self_attn.k_norm.weight": ones[:size],
            "self_attn.q_proj.weight": random(heads * size, hidden),
            "self_attn.k_proj.weight": random(kv_heads * size, hidden),
            "self_attn.v_proj.weight": random(kv_heads * size, hidden),
            "self_attn.o_proj.weight": random(hidden, heads * size),
        }
        if experts := config.num_experts:
            inner = config.moe_intermediate_size
            layer["mlp.gate.weight"] = random(experts, hidden)
            layer["mlp.experts.gate_up_proj"] = random(experts, 2 * inner, hidden)
            layer["mlp.experts.down_proj"] = random(experts, hidden, inner)
        else:
            inner = config.intermediate_size
            layer["mlp.gate_proj.weight"] = random(inner, hidden)
            layer["mlp.up_proj.weight"] = random(inner, hidden)
            layer["mlp.down_proj.weight"] = random(hidden, inner)
        weights |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
    return weights
