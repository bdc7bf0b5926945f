# SPDX-License-Identifier: Apache-2.0
"""TIERCEL_CHECK=1: the error for each index tensor of each operator, and when it is looked for."""

import ast
import os
import pathlib
import subprocess
import sys
import types
import warnings

import pytest
import torch

import tiercel
from tiercel import _C
from tiercel._explain import resolve_call
from tiercel.core import dispatch as _op
from tiercel.core import index_checks
from tiercel.plugins.contract import TensorSpec
from tiercel.plugins.contracts import CONTRACTS

pytestmark = pytest.mark.torch

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def rotary(**changes):
    named = {
        "positions": int32(0, 63, 5),
        "q": torch.randn(3, 2, 8),
        "k": torch.randn(3, 1, 8),
        "cos_sin_cache": torch.randn(64, 8),
    }
    return named | changes


def losses(**changes):
    return {"logits": torch.randn(3, 8), "target": torch.tensor([0, 7, -100])} | changes


def linear_losses(**changes):
    named = {"x": torch.randn(3, 4), "weight": torch.randn(8, 4)}
    return named | {"target": torch.tensor([0, 7, -100])} | changes


def linear_gradients(**changes):
    """With a gradient wanted, another operator makes the loss."""
    return linear_losses(x=torch.randn(3, 4, requires_grad=True), **changes)


def cache_write(**changes):
    caches = {name: torch.zeros(2, 4, 1, 8, dtype=BF16) for name in ("key_cache", "value_cache")}
    new = {name: torch.randn(3, 1, 8).bfloat16() for name in ("key", "value")}
    return new | caches | {"slots": torch.tensor([-1, 0, 7])} | changes


def align(**changes):
    named = {"topk_ids": torch.tensor([[0, 3], [1, -1]]), "block_size": 4, "num_experts": 4}
    return named | {"expert_map": int32(0, -1, 3, 1)} | changes


def topk_align(**changes):
    named = {"scores": torch.randn(2, 4), "k": 2, "block_size": 4}
    return named | {"expert_map": int32(0, -1, 3, 1)} | changes


def whole_moe(**changes):
    named = {
        "x": torch.randn(2, 16).bfloat16(),
        "w_up": torch.randn(3, 32, 16).bfloat16(),
        "w_down": torch.randn(3, 16, 16).bfloat16(),
        "topk_weights": torch.rand(2, 2),
        "topk_ids": torch.tensor([[0, 4], [1, -1]]),
        "expert_map": int32(0, 1, -1, -1, 2),
    }
    return named | changes


def whole_moe_fp8(**changes):
    named = whole_moe()
    for name in ("w_up", "w_down"):
        named[name] = named[name].to(FP8)
        named[f"{name}_scale"] = torch.ones(3, 1)
    return named | changes


def four_bit_moe(**changes):
    widths = {"w_up": 32, "w_up_scale": 2, "w_down": 16, "w_down_scale": 1}
    named = {n: torch.full((3, 64, w), 0x77, dtype=torch.uint8) for n, w in widths.items()}
    return whole_moe(x=torch.randn(2, 64).bfloat16(), **named, **changes)


def fused(**changes):
    named = {name: torch.randn(3, 2, 16).bfloat16() for name in ("q", "k", "v", "q_out")}
    named |= {n: torch.zeros(2, 4, 2, 16).bfloat16() for n in ("key_cache", "value_cache")}
    named |= {"slots": int32(0, 1, 2), "positions": int32(0, 1, 2)}
    return named | {"cos_sin_cache": torch.randn(64, 16)} | changes


def normed(**changes):
    return {n: fused()[n] for n in ("q", "k", "positions", "cos_sin_cache")} | changes


_LISTS = {
    "sorted_token_ids": int32(0, 1, 2, 3, 2, 4, 4, 4, 4),
    "expert_ids": int32(2, -1, -1),
    "num_tokens_post_padded": int32(8),
}


def up(**changes):
    named = {"x": torch.randn(2, 16).bfloat16(), "w_up": torch.randn(3, 32, 16).bfloat16()}
    return named | _LISTS | {"top_k": 2, "block_size": 4} | changes


def down(**changes):
    named = {"x": torch.randn(4, 16).bfloat16(), "w_down": torch.randn(3, 16, 16).bfloat16()}
    return named | {"topk_weights": torch.rand(4)} | _LISTS | {"block_size": 4} | changes


def up_fp8(**changes):
    named = up(x_scale=torch.ones(1, 1), w_up_scale=torch.ones(3, 1))
    return named | {name: named[name].to(FP8) for name in ("x", "w_up")} | changes


def groups(**changes):
    named = {"x": torch.randn(9, 8).bfloat16(), "w": torch.randn(2, 8, 8).bfloat16()}
    return named | {"offsets": torch.tensor([1, 4, 9])} | changes


def varlen(**changes):
    named = {"q": torch.randn(9, 2, 8).bfloat16(), "max_seqlen_q": 5, "max_seqlen_k": 6}
    named |= {name: torch.randn(8, 1, 8).bfloat16() for name in ("k", "v")}
    return named | {"cu_seqlens_q": int32(0, 4, 9), "cu_seqlens_k": int32(2, 2, 8)} | changes


def varlen_fp8(**changes):
    named = varlen(**changes)
    return named | {name: named[name].to(FP8) for name in ("q", "k", "v")}


def decode(**changes):
    named = {"q": torch.randn(2, 1, 2, 8).bfloat16(), "seqused_k": int32(5, 12)}
    named |= {name: torch.randn(6, 4, 1, 8).bfloat16() for name in ("k_cache", "v_cache")}
    # What keys do not need may be anything.
    named |= {"page_table": int32(5, 0, 99, 1, 2, 3).view(2, 3), "prefix": int32(0, 20)}
    return named | changes


def paged(**changes):
    named = decode()
    del named["prefix"]
    named["q"] = torch.randn(4, 2, 8).bfloat16()
    return named | {"cu_seqlens_q": int32(0, 1, 4), "max_seqlen_q": 3} | changes


def latents(**changes):
    named = {"q": torch.randn(2, 1, 2, 16).bfloat16(), "seqused_k": int32(5, 12), "scale": 1.0}
    named |= {"kv_cache": torch.randn(6, 4, 16).bfloat16(), "d_v": 8}
    return named | {"page_table": int32(5, 0, 99, 1, 2, 3).view(2, 3)} | changes


def latent_rows(**changes):
    named = {"latent": torch.randn(3, 8).bfloat16(), "rotary": torch.randn(3, 8).bfloat16()}
    named |= {"kv_cache": torch.zeros(2, 4, 16).bfloat16()}
    return named | {"slots": torch.tensor([0, -1, 7])} | changes


def rotated_rows(**changes):
    return latent_rows(cos_sin_cache=torch.randn(5, 8), positions=torch.arange(3)) | changes


def listed(**changes):
    named = {"q": torch.randn(2, 2, 16).bfloat16(), "scale": 1.0, "d_v": 8}
    named |= {"kv_cache": torch.randn(6, 4, 16).bfloat16()}
    return named | {"indices": int32(0, -1, 7, 23).view(2, 2)} | changes


def indexed(**changes):
    named = {"q": torch.randn(2, 2, 16).to(FP8), "k": torch.randn(8, 16).to(FP8)}
    named |= {"k_scale": torch.ones(8), "weights": torch.ones(2, 2)}
    return named | {"starts": int32(0, 8), "ends": int32(8, 0)} | changes


def scored(**changes):
    return {"logits": torch.randn(2, 8), "k": 3, "lengths": int32(0, 8)} | changes


# Operator, arguments, the index tensor and what it holds, the error.
def packed(**changes):
    named = {"x": torch.randn(5, 8), "weight": torch.randn(8, 4), "cu_seqlens": int32(0, 2, 5)}
    return named | changes


def updated(**changes):
    states = {"states": torch.zeros(4, 3, 8), "state_indices": int32(3, -1)}
    rows = {"x": torch.randn(1, 5, 8), "out": torch.zeros(1, 5, 8)}
    return packed() | states | rows | changes


def prompt(**changes):
    shape = (1, 5, 2)
    named = {name: torch.randn(*shape, 8).bfloat16() for name in "qkv"}
    named |= {"g": -torch.rand(shape), "beta": torch.rand(shape)}
    return named | {"cu_seqlens": int32(0, 2, 5)} | changes


def step(**changes):
    named = {name: torch.randn(3, 2, 2, 8).bfloat16() for name in "qkv"}
    named |= {"g": -torch.rand(3, 2, 2), "beta": torch.rand(3, 2, 2)}
    named |= {"states": torch.zeros(6, 2, 8, 8), "out": torch.zeros_like(named["v"])}
    named |= {"state_indices": int32(0, 1, 2, -1, 4, 5).view(3, 2)}
    return named | {"accepted": int32(0, 1, 2)} | changes


WRONG = [
    ("mla_decode", latents, "page_table", int32(5, 0, 99, 1, 6, 3).view(2, 3), "got 6 at [1, 1]"),
    ("mla_decode", latents, "seqused_k", int32(5, 13), "from 0 to 12, got 13 at [1]"),
    ("mla_cache_write", latent_rows, "slots", torch.tensor([0, -1, 8]), "got 8 at [2]"),
    ("mla_cache_write", rotated_rows, "positions", torch.tensor([0, 5, 4]), "got 5 at [1]"),
    (
        "mla_sparse_attention",
        listed,
        "indices",
        int32(0, -1, 7, 24).view(2, 2),
        "from 0 to 23, or -1 for none, got 24 at [1, 1]",
    ),
    ("indexer_logits", indexed, "starts", int32(0, -1), "from 0 to 8, got -1 at [1]"),
    ("indexer_logits", indexed, "ends", int32(9, 0), "from 0 to 8, got 9 at [0]"),
    ("top_k_indices", scored, "lengths", int32(0, 9), "from 0 to 8, got 9 at [1]"),
    ("causal_conv1d", packed, "cu_seqlens", int32(0, 2, 6), "from 0 to 5, got 6 at [2]"),
    ("causal_conv1d", packed, "cu_seqlens", int32(3, 2, 5), "that do not decrease, got 2 at [1]"),
    ("causal_conv1d_update", updated, "cu_seqlens", int32(0, 2, 6), "from 0 to 5, got 6 at [2]"),
    ("causal_conv1d_update", updated, "state_indices", int32(4, 0), "or -1 for none, got 4 at [0]"),
    ("gated_delta_rule", prompt, "cu_seqlens", int32(-1, 2, 5), "from 0 to 5, got -1 at [0]"),
    ("gated_delta_rule_decode", step, "accepted", int32(1, 3, 0), "from 0 to 2, got 3 at [1]"),
    (
        "gated_delta_rule_decode",
        step,
        "state_indices",
        int32(0, 1, 2, 3, 6, 5).view(3, 2),
        "from 0 to 5, or -1 for none, got 6 at [2, 0]",
    ),
    (
        "cross_entropy",
        losses,
        "target",
        torch.tensor([0, -100, 8]),
        "hold classes from 0 to 7, or -100 for none, got 8 at [2]",
    ),
    ("cross_entropy", losses, "target", int32(0, -1, 2), "got -1 at [1]"),
    ("linear_cross_entropy", linear_losses, "target", int32(0, -1, 8), "got -1 at [1]"),
    ("linear_cross_entropy", linear_gradients, "target", int32(0, 2, 8), "got 8 at [2]"),
    ("rotary_embedding", rotary, "positions", int32(0, 64, -1), "from 0 to 63, got 64 at [1]"),
    ("rotary_embedding", rotary, "positions", int32(3, 5, -1), "from 0 to 63, got -1 at [2]"),
    (
        "kv_cache_write",
        cache_write,
        "slots",
        torch.tensor([3, 2**40, 8]),
        f"from 0 to 7, or -1 for none, got {2**40} at [1]",
    ),
    ("kv_cache_write", cache_write, "slots", int32(-1, 7, -2), "got -2 at [2]"),
    ("qk_norm_rope_cache", fused, "slots", int32(-1, 8, 0), "from 0 to 7, or -1 for none, got 8"),
    ("qk_norm_rope_cache", fused, "positions", int32(64, 0, 1), "from 0 to 63, got 64 at [0]"),
    ("qk_norm_rope", normed, "positions", int32(0, 1, -1), "from 0 to 63, got -1 at [2]"),
    (
        "moe_align_block_size",
        align,
        "topk_ids",
        int32(0, 1, 4, 0).view(2, 2),
        "from 0 to 3, or -1 for none, got 4 at [1, 0]",
    ),
    ("moe_align_block_size", align, "expert_map", int32(0, 1, 2, 9), "got 9 at [3]"),
    ("topk_softmax_align", topk_align, "expert_map", int32(-2, 1, 2, 3), "got -2 at [0]"),
    (
        "fused_moe",
        whole_moe,
        "topk_ids",
        int32(0, 1, 2, 5).view(2, 2),
        "from 0 to 4, or -1 for none, got 5 at [1, 1]",
    ),
    ("fused_moe", whole_moe, "expert_map", int32(0, 1, 2, 3, -1), "from 0 to 2, or -1"),
    ("fused_moe", whole_moe_fp8, "expert_map", int32(0, 1, 2, 3, -1), "got 3 at [3]"),
    ("fused_moe", whole_moe_fp8, "topk_ids", torch.full((2, 2), -7), "got -7 at [0, 0]"),
    ("w4_moe", four_bit_moe, "topk_ids", torch.full((2, 2), -7), "got -7 at [0, 0]"),
    ("w4_moe", four_bit_moe, "expert_map", int32(0, 1, 2, 3, -1), "got 3 at [3]"),
    ("moe_up", up, "expert_ids", int32(3, 0, 0), "from 0 to 2, or -1 for none, got 3 at [0]"),
    ("moe_up", up, "sorted_token_ids", int32(0, 5, 2, 3, 4, 4, 4, 4, 4), "from 0 to 4, got 5"),
    ("moe_up", up_fp8, "expert_ids", int32(-2, 0, 0), "got -2 at [0]"),
    (
        "moe_up",
        up,
        "num_tokens_post_padded",
        int32(12),
        "hold a multiple of `block_size` = 4 from 0 to 8, got 12 at [0]",
    ),
    ("moe_down", down, "num_tokens_post_padded", int32(6), "got 6 at [0]"),
    ("moe_down", down, "expert_ids", int32(0, 2**30, 0), f"got {2**30} at [1]"),
    ("moe_down", down, "sorted_token_ids", int32(-1, *[4] * 8), "got -1 at [0]"),
    ("grouped_gemm", groups, "offsets", torch.tensor([0, 4, 10]), "from 0 to 9, got 10 at [2]"),
    ("grouped_gemm", groups, "offsets", int32(0, 5, 4), "do not decrease, got 4 at [2]"),
    ("attention_varlen", varlen, "cu_seqlens_q", int32(-40, 4, 9), "from 0 to 9, got -40 at [0]"),
    ("attention_varlen", varlen, "cu_seqlens_k", int32(0, 5, 9), "from 0 to 8, got 9 at [2]"),
    ("attention_varlen", varlen, "cu_seqlens_k", int32(6, 6, 2), "do not decrease, got 2 at [2]"),
    (
        "attention_varlen",
        varlen,
        "cu_seqlens_q",
        int32(0, 2, 8),
        "hold sequences of at most `max_seqlen_q` = 5 rows, got 6 at [1]",
    ),
    ("attention_varlen", varlen_fp8, "cu_seqlens_k", int32(0, 0, 7), "`max_seqlen_k` = 6 rows"),
    (
        "decode_attention",
        decode,
        "page_table",
        int32(5, 0, 99, 1, 6, 3).view(2, 3),
        "pages from 0 to 5 for the keys before `seqused_k`, got 6 at [1, 1]",
    ),
    ("decode_attention", decode, "seqused_k", int32(5, 13), "from 0 to 12, got 13 at [1]"),
    ("decode_attention", decode, "seqused_k", int32(-5, 8), "from 0 to 12, got -5 at [0]"),
    ("decode_attention", decode, "prefix", int32(0, -3), "at least 0, got -3 at [1]"),
    ("paged_attention", paged, "page_table", int32(5, 0, 9, 1, 6, 3).view(2, 3), "got 6 at [1, 1]"),
    ("paged_attention", paged, "seqused_k", int32(5, 13), "from 0 to 12, got 13 at [1]"),
    ("paged_attention", paged, "cu_seqlens_q", int32(0, 0, 4), "`max_seqlen_q` = 3 rows"),
    ("paged_attention", paged, "tree_mask", torch.tensor([1, 1, 6, 5]), "ones, got 6 at [2]"),
    ("paged_attention", paged, "prefix", int32(0, -3), "at least 0, got -3 at [1]"),
]


def operator_of(name, arguments):
    """The operator, of all with that name, that a call gets to, and its arguments."""
    operator, values, _ = resolve_call(_op.registry[name], **arguments)
    operator.check(*values)
    return operator, values


@pytest.mark.parametrize(("name", "make", "argument", "wrong", "text"), WRONG)
def test_errors(name, make, argument, wrong, text):
    operator, values = operator_of(name, make())
    operator.check_indices(values)  # what is right
    operator, values = operator_of(name, make(**{argument: wrong}))
    with pytest.raises(ValueError) as error:
        operator.check_indices(values)
    assert str(error.value).startswith(f"{name}: `{argument}` must hold ")
    assert text in str(error.value)


def test_keys_beyond_what_the_host_knows():
    operator, values = operator_of("decode_attention", decode(max_seqused_k=11))
    with pytest.raises(ValueError, match="from 0 to `max_seqused_k` = 11, got 12 at"):
        operator.check_indices(values)


# Whole numbers that are no places: each is right.
NO_PLACES = {("sample", name) for name in ("top_ks", "seeds", "offsets", "counts")}
NO_PLACES |= {("sample", "prompt"), ("sample", "allowed")}
# A draft that is no token of the vocabulary is not accepted.
NO_PLACES |= {("verify_draft", name) for name in ("draft_tokens", "top_ks", "seeds", "offsets")}


def index_arguments():
    """By the contracts: tensors of whole numbers that a backend gets as places."""
    for op, contract in CONTRACTS.items():
        for spec in contract.arguments:
            whole = isinstance(spec, TensorSpec) and set(spec.dtypes) <= {"int32", "int64"}
            if whole and (op, spec.name) not in NO_PLACES:
                yield op, spec.name


def test_each_index_tensor_has_a_rule_and_its_error_is_tested():
    asked = set(index_arguments())
    assert ("rotary_embedding", "positions") in asked and len(asked) > 15
    assert {(name, argument) for name, _, argument, _, _ in WRONG} == asked
    for name in {op for op, _ in asked}:
        for operator in _op.variants[name]:
            assert operator.indices is not None, operator.name


def test_gradients_have_rules():
    for name in ("grouped_gemm_backward", "attention_varlen_backward"):
        for operator in _op.variants[name]:
            assert operator.indices is not None, operator.name


def test_each_operator_with_index_tensors_is_fuzzed():
    """Files of tests/emulator name those that they fuzz in FUZZED."""
    fuzzed = set()
    folder = pathlib.Path(__file__).resolve().parents[1] / "emulator"
    for path in folder.glob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "FUZZED":
                fuzzed |= set(ast.literal_eval(node.value))
    assert fuzzed == {op for op, _ in index_arguments()}


def test_it_costs_nothing_where_it_is_off():
    assert not index_checks.ENABLED
    for family in _op.variants.values():
        for operator in family:
            assert type(operator.direct) is _C.EagerCall
            assert "_run" not in vars(operator)


def test_a_graph_that_is_captured_is_not_looked_at(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(index_checks, "_warned", False)
    tensor = types.SimpleNamespace(is_meta=False, is_cuda=True)
    with pytest.warns(UserWarning, match="TIERCEL_CHECK: .* not checked while a CUDA graph"):
        assert not index_checks.can_look(tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not index_checks.can_look(tensor)
        assert index_checks.can_look(torch.zeros(1))
        assert not index_checks.can_look(torch.zeros(1, device="meta"))


PROGRAM = """
import torch, tiercel
positions = torch.tensor([0, 9, 2])
q, k, cache = torch.randn(3, 2, 8), torch.randn(3, 1, 8), torch.randn(4, 8)

def call(**how):
    return tiercel.rotary_embedding(positions, q, k, cache, **how)

def compiled():
    torch.compile(call, backend="eager", fullgraph=True)()

def differentiated():
    wanted = q.clone().requires_grad_()
    tiercel.rotary_embedding(positions, wanted, k, cache)[0].sum().backward()

def operator():
    torch.ops.tiercel.rotary_embedding(positions, q, k, cache)

ways = [call, lambda: call(backend="ref"), lambda: call(inplace=True), compiled, differentiated,
        lambda: call(out=(q.clone(), k.clone())), operator]
for way in ways:
    try:
        way()
    except ValueError as error:
        print(error)
    else:
        print("no error")
positions.clamp_(max=3)
for way in ways:
    way()
"""


@pytest.mark.parametrize(("value", "checks"), [("1", True), ("0", False)])
def test_every_way_to_call(value, checks):
    environment = {**os.environ, "TIERCEL_CHECK": value}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    text = "rotary_embedding: `positions` must hold numbers from 0 to 3, got 9 at [1]"
    lines = done.stdout.strip().splitlines()
    assert lines == [text if checks else "no error"] * 7


def test_contents_that_are_no_places_on_ref():
    """What the kernels do with them: the nearest row; nothing."""
    rows = rotary(positions=int32(-5, 64, 2**31 - 1))
    nearest = rotary(**rows | {"positions": int32(0, 63, 63)})
    for got, due in zip(
        tiercel.rotary_embedding(**rows), tiercel.rotary_embedding(**nearest), strict=True
    ):
        assert torch.equal(got, due)
    written = cache_write(slots=torch.tensor([8, 2**63 - 1, -(2**63)]))
    tiercel.kv_cache_write(**written)
    assert not written["key_cache"].any() and not written["value_cache"].any()
    assert not tiercel.fused_moe(**whole_moe(expert_map=int32(3, 9, -5, 3, 3))).any()
    assert not tiercel.moe_up(**up(expert_ids=int32(3, -2, 0))).any()
    assert not tiercel.moe_up(**up(num_tokens_post_padded=int32(-64))).any()
    every = up(num_tokens_post_padded=int32(2**31 - 1))
    assert torch.equal(tiercel.moe_up(**every), tiercel.moe_up(**every | _LISTS))
    some = down(sorted_token_ids=int32(0, -1, -(2**31), 3, 2, 4, 99, 4, 4))
    assert tiercel.moe_down(**some)[[0, 3]].any() and not tiercel.moe_down(**some)[1].any()
    beyond = groups(offsets=torch.tensor([-5, 4, 2**40]))
    nearest = beyond | {"offsets": int32(0, 4, 9)}
    assert torch.equal(tiercel.grouped_gemm(**beyond), tiercel.grouped_gemm(**nearest))
