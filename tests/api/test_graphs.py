# SPDX-License-Identifier: Apache-2.0
"""One compiled or exported graph serves any number of tokens, and any length."""

import dataclasses

import pytest
import torch
from support import contract_calls as calls
from torch._dynamo.testing import CompileCounterWithBackend

import tiercel

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::tiercel.backends.FallbackWarning"),
]


def counted(run, **options):
    """The compiled function, and what counts its graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(run, backend=counter, fullgraph=True, **options), counter


# Up to 128 tokens have one row of scales, and torch compiles sizes of 1 for themselves.
MORE = {"fp8_quantize_transpose": 1}


# The first one, 1, which torch always compiles for itself, and all others.
@pytest.mark.parametrize("op", calls.OPS)
def test_three_graphs_for_all_numbers_of_tokens(op):
    function = calls.function(op)
    compiled, counter = counted(lambda **values: function(**values))
    for tokens in (5, 1, 2, 17, 64, 129, 4096 if "attention" not in op else 600):
        values = calls.arguments(op, tokens)
        calls.same(compiled(**calls.copied(values)), function(**calls.copied(values)))
    assert counter.frame_count <= 3 + MORE.get(op, 0)


LENGTHS = (33, *range(2, 40, 2))


def _leaves(length):
    generator = torch.Generator().manual_seed(length)
    made = [torch.randn(2 * length, 2, 16, generator=generator) for _ in range(3)]
    tensors = [tensor.bfloat16() for tensor in made]
    starts = torch.tensor([0, length, 2 * length], dtype=torch.int32)
    return [t.requires_grad_() for t in tensors], starts


@pytest.mark.parametrize("return_lse", [False, True])
def test_lengths_of_packed_sequences(return_lse):
    def run(tensors, starts, length):
        result = tiercel.attention_varlen(
            *tensors, starts, starts, length, length, causal=True, return_lse=return_lse
        )
        return [r.float().square().sum() for r in calls.tensors_of(result)]

    compiled, counter = counted(run, dynamic=True)
    for length in LENGTHS:
        leaves, starts = _leaves(length)
        grads = []
        for call in (run, compiled):
            loss = sum(call(leaves, starts, length))
            grads.append(torch.autograd.grad(loss, leaves))
        for eager, of_graph in zip(*grads, strict=True):  # by two formulas, rounded to bfloat16
            off = (of_graph.float() - eager.float()).abs().max()
            assert off <= 1e-2 * eager.float().abs().max()
    assert counter.frame_count <= 2


def test_lengths_of_packed_float8_sequences():
    def run(q, starts, length):
        return tiercel.attention_varlen(q, q, q, starts, starts, length, length)

    compiled, counter = counted(run, dynamic=True)
    for length in LENGTHS:
        leaves, starts = _leaves(length)
        q = leaves[0].detach().to(torch.float8_e4m3fn)
        calls.same(compiled(q, starts, length), run(q, starts, length))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("return_lse", [False, True])
def test_longest_of_a_cache(return_lse):
    def run(values, longest):
        return tiercel.decode_attention(**values, return_lse=return_lse, max_seqused_k=longest)

    values = calls.arguments("decode_attention", 3)
    names = ("q", "k_cache", "v_cache", "page_table", "seqused_k")
    values = {name: values[name] for name in names}
    compiled, counter = counted(run, dynamic=True)
    for longest in range(520, 540):
        calls.same(compiled(values, longest), run(values, longest))
    assert counter.frame_count <= 2


def _exported(op, case):
    """The exported program, and what takes the arguments that it has from others by name."""
    few, many = (calls.arguments(op, tokens, case=case) for tokens in (12, 260))
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    shapes = {}
    for name, value in few.items():
        if isinstance(value, torch.Tensor):
            sizes = enumerate(zip(value.shape, many[name].shape, strict=True))
            shapes[name] = {
                place: tokens if a == 12 else torch.export.Dim.AUTO
                for place, (a, b) in sizes
                if a != b
            }
        elif type(value) is int and value != many[name]:
            shapes[name] = torch.export.Dim.AUTO
    rest = {name: value for name, value in few.items() if name not in shapes}

    class Module(torch.nn.Module):
        def forward(self, *values):
            return calls.function(op)(**dict(zip(shapes, values, strict=True)), **rest)

    inputs = tuple(few[name] for name in shapes)
    dynamic = {"values": tuple(shapes.values())}
    program = torch.export.export(Module(), inputs, dynamic_shapes=dynamic)
    return program.module(), lambda values: [values[name] for name in shapes]


@pytest.mark.parametrize(
    ("op", "case"),
    [pytest.param(op, case, id=f"{op}-{case}") for op in calls.OPS for case in calls.cases(op)],
)
def test_export_of_1_to_4096_tokens(op, case):
    if case.sizes.get("V", 0) > 4096:  # vocabularies, which have no part in this
        case = dataclasses.replace(case, sizes={**case.sizes, "V": 4096})
    program, chosen = _exported(op, case)
    slow = "attention" in op or op in ("gated_delta_rule", "sample", "verify_draft")  # on a CPU
    for tokens in (1, 33, 70 if slow else 260):
        values = calls.arguments(op, tokens, case=case)
        expected = calls.function(op)(**calls.copied(values))
        calls.same(program(*chosen(calls.copied(values))), expected)


def test_export_of_one_choice_a_token():
    """As many blocks as there are ids, which is 1 for one token."""
    tokens = torch.export.Dim("tokens", min=1, max=4096)

    class Module(torch.nn.Module):
        def forward(self, ids):
            return tiercel.moe_align_block_size(ids, 16, 8)

    ids = torch.arange(12, dtype=torch.int32)[:, None] % 8
    program = torch.export.export(Module(), (ids,), dynamic_shapes=({0: tokens},))
    for count in (1, 12, 300):
        ids = torch.arange(count, dtype=torch.int32)[:, None] % 8
        calls.same(program.module()(ids), tiercel.moe_align_block_size(ids, 16, 8))
