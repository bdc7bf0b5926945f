# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule on an H100 or H200, against the float64 recurrence."""

import pytest
import torch

import tiercel
from tiercel import ref

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]


def problem(
    batch, tokens, heads, sizes, dtype=torch.bfloat16, channels=False, unit=True, seed=0, gate=2.0
):
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    q, k = (random(batch, tokens, heads[0], sizes[0]) for _ in range(2))
    k = torch.nn.functional.normalize(k, dim=-1) if unit else k
    v = random(batch, tokens, heads[1], sizes[1])
    g = random(*v.shape[:3], *([sizes[0]] if channels else []))
    g = torch.nn.functional.logsigmoid(g + gate)
    return q.to(dtype), k.to(dtype), v.to(dtype), g, random(*v.shape[:3]).sigmoid()


def close(got, due, of_size):
    """Errors as parts of the results' size: each is a sum over many roundings."""
    got, due = got.double(), due.double()
    assert torch.isfinite(got).all()
    assert (got - due).norm() < of_size * due.norm()
    assert (got - due).abs().max() < 4 * of_size * due.abs().max()


def decode(inputs, states, indices=None, accepted=None, l2norm=True):
    due, due_pool = torch.empty_like(inputs[2]).double(), states.clone()
    rest = (indices, accepted, None, l2norm)
    ref.gated_delta_rule_decode(*(t.double() for t in inputs), due_pool, due, *rest)
    got = torch.empty_like(inputs[2])
    tiercel.gated_delta_rule_decode(
        *inputs, states, got, indices, accepted=accepted, qk_l2norm=l2norm
    )
    close(got, due, 2**-8)
    close(states, due_pool, 2**-9 if states.dtype == torch.bfloat16 else 1e-5)


@pytest.mark.sanitize
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(64, 32), (128, 128)])
def test_decode(sizes, dtype, state, channels):
    inputs = problem(3, 1, (1, 2), sizes, dtype, channels)
    states = torch.randn(5, 2, *sizes, device="cuda").to(state)
    decode(inputs, states, torch.tensor([4, -1, 2], device="cuda", dtype=torch.int32))
    inputs = problem(2, 3, (1, 2), sizes, dtype, channels, seed=1)
    slots = torch.tensor([[4, 1, 0], [3, 5, 2]], device="cuda", dtype=torch.int32)
    decode(inputs, states, slots, torch.tensor([1, 3], device="cuda", dtype=torch.int32), False)


@pytest.mark.sanitize
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_many_states_stream_through_shared_memory(state, channels):
    """Blocks go through several states each; the bits are those of blocks that have one, in any
    run."""
    inputs = problem(40, 1, (8, 32), (128, 128), channels=channels)
    first = torch.randn(50, 32, 128, 128, device="cuda").to(state)
    slots = torch.randperm(50, device="cuda")[:40].int()
    slots[7], slots[20], slots[39] = -1, 50, -(2**31)
    pools, outs = [], []
    for _ in range(3):
        pools.append(first.clone())
        outs.append(torch.empty_like(inputs[2]))
        tiercel.gated_delta_rule_decode(*inputs, pools[-1], outs[-1], slots, qk_l2norm=True)
        assert torch.equal(outs[-1], outs[0]) and torch.equal(pools[-1], pools[0])
    few, pool = [], first.clone()
    for begin in range(0, 40, 4):
        part = slice(begin, begin + 4)
        given = [t[part].contiguous() for t in inputs]
        few.append(torch.empty_like(given[2]))
        tiercel.gated_delta_rule_decode(*given, pool, few[-1], slots[part], qk_l2norm=True)
    assert torch.equal(torch.cat(few), outs[0]) and torch.equal(pool, pools[0])
    decode(inputs, first, slots)


@pytest.mark.parametrize("batch", [1, 7, 64, 200])
@pytest.mark.parametrize("heads", [(16, 32), (2, 8)])
def test_steps_of_models(heads, batch):
    states = torch.randn(batch + 5, heads[1], 128, 128, device="cuda")
    indices = torch.randperm(batch + 5, device="cuda")[:batch].int()
    for seed in range(3):
        decode(problem(batch, 1, heads, (128, 128), seed=seed), states, indices)


def prompt(inputs, initial=None, starts=None, l2norm=True):
    of_size = 2**-7 if inputs[0].dtype == torch.bfloat16 else 2**-9
    options = {"initial_state": initial, "cu_seqlens": starts, "qk_l2norm": l2norm}
    out, state = tiercel.gated_delta_rule(*inputs, output_final_state=True, **options)
    assert torch.equal(tiercel.gated_delta_rule(*inputs, **options), out)
    due, due_state = ref.gated_delta_rule(
        *(t.double() for t in inputs), initial, starts, None, l2norm, output_final_state=True
    )
    close(out, due, of_size)
    close(state, due_state, of_size)
    return out, state


@pytest.mark.sanitize
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 64, 150])
@pytest.mark.parametrize("sizes", [(64, 32), (128, 128)])
def test_prompts(sizes, tokens, dtype, channels):
    initial = torch.randn(2, 4, *sizes, device="cuda")
    prompt(problem(2, tokens, (2, 4), sizes, dtype, channels), initial)
    prompt(problem(2, tokens, (2, 4), sizes, dtype, channels, seed=1), l2norm=False)


@pytest.mark.sanitize
@pytest.mark.parametrize("channels", [False, True])
def test_packed(channels):
    starts = torch.tensor([3, 3, 70, 134, 135, 300], device="cuda", dtype=torch.int32)
    initial = torch.randn(5, 2, 64, 32, device="cuda")
    inputs = problem(1, 310, (1, 2), (64, 32), channels=channels)
    out, state = prompt(inputs, initial, starts)
    assert not out[:, :3].any() and not out[:, 300:].any()
    assert torch.equal(state[0], initial[0])


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(("batch", "heads"), [(1, (16, 32)), (1, (2, 8)), (8, (16, 32))])
def test_heads_of_models(batch, heads, channels):
    prompt(problem(batch, 1000, heads, (128, 128), channels=channels))


@pytest.mark.sanitize
@pytest.mark.parametrize("channels", [False, True])
def test_long_sequences_are_divided(channels):
    prompt(
        problem(1, 1600, (1, 1), (128, 128), channels=channels, gate=5.0),
        torch.randn(1, 1, 128, 128).cuda(),
    )
    starts = torch.tensor([3, 3, 1100, 1101, 2400], device="cuda", dtype=torch.int32)
    inputs = problem(1, 24 * 64 * 4 + 5, (1, 1), (128, 32), channels=channels, gate=5.0)
    prompt(inputs, torch.randn(4, 1, 128, 32).cuda(), starts)


@pytest.mark.parametrize("lengths", [None, (1000, 0, 3, 2500), (900,) * 3])
def test_chunks_beside_the_states(lengths):
    """The states' kernel runs while the first one prepares chunks: the same bits as one after the
    other, which is how five times as many heads run."""
    tokens = 8192 if lengths is None else sum(lengths)
    starts, heads = None, (8, 32)
    if lengths is not None:
        heads = (8, 8) if len(lengths) > 3 else (10, 10)
        starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    for seed in range(10):
        inputs = problem(1, tokens, heads, (128, 128), gate=4.0, seed=seed)
        more = [torch.cat([t] * 5, 2) for t in inputs]
        got, state = tiercel.gated_delta_rule(
            *inputs, cu_seqlens=starts, output_final_state=True, qk_l2norm=True
        )
        due, due_state = tiercel.gated_delta_rule(
            *more, cu_seqlens=starts, output_final_state=True, qk_l2norm=True
        )
        assert torch.equal(got, due[:, :, -heads[1] :])
        assert torch.equal(state, due_state[:, -heads[1] :])


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("heads", [(1, 2), (16, 32)])
def test_65536_tokens(heads, channels):
    """Errors do not grow with the length, for states that decay and such that hardly do."""
    sizes = (1, 65536 // heads[0], heads, (128, 32))
    inputs = (problem(*sizes, channels=channels, gate=gate) for gate in (2.0, 8.0))
    prompt([torch.cat(tensors) for tensors in zip(*inputs, strict=True)])


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("gate", [-300.0, -20.0, -3.0, 20.0])
def test_decay(gate, channels):
    more = {"channels": channels}
    prompt(
        problem(1, 500, (1, 2), (128, 128), gate=gate, **more), torch.randn(1, 2, 128, 128).cuda()
    )
    *rest, g, beta = problem(1, 500, (1, 2), (128, 128), **more)
    g[:, 40], g[:, 41:60] = -float("inf"), -50.0
    prompt((*rest, g, torch.ones_like(beta)), torch.randn(1, 2, 128, 128).cuda())


def test_prompts_in_parts_and_steps_are_the_whole():
    inputs = problem(2, 300, (2, 4), (128, 128))
    out, state = prompt(inputs)
    parts, carried = [], None
    for begin, end in ((0, 128), (128, 250), (250, 290)):
        part = [t[:, begin:end].contiguous() for t in inputs]
        made, carried = tiercel.gated_delta_rule(
            *part, initial_state=carried, output_final_state=True, qk_l2norm=True
        )
        parts.append(made)
    for token in range(290, 300):
        part = [t[:, token : token + 1].contiguous() for t in inputs]
        parts.append(torch.empty_like(part[2]))
        tiercel.gated_delta_rule_decode(*part, carried, parts[-1], qk_l2norm=True)
    close(torch.cat(parts, dim=1), out, 2**-6)
    close(carried, state, 2**-6)


def test_graph_in_the_first_call():
    inputs = problem(1, 200, (2, 4), (64, 64))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        out = tiercel.gated_delta_rule(*inputs, qk_l2norm=True)
    for seed in range(3):
        for tensor, other in zip(inputs, problem(1, 200, (2, 4), (64, 64), seed=seed), strict=True):
            tensor.copy_(other)
        graph.replay()
        assert torch.equal(out, tiercel.gated_delta_rule(*inputs, qk_l2norm=True))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [24, 128, 1024])
def test_gated_norm(size, dtype):
    generator = torch.Generator("cuda").manual_seed(size)
    for rows in (1, 77, 5000):
        x, gate = (
            torch.randn(rows, 2 * size, device="cuda", generator=generator).to(dtype)[:, :size]
            for _ in range(2)
        )
        weight = torch.randn(size, device="cuda", generator=generator)
        for given in (weight, weight.to(dtype)):
            got = tiercel.gated_rms_norm(x, gate, given)
            due = ref.gated_rms_norm(x.double(), gate.double(), given.double())
            step = 2**-8 if dtype == torch.bfloat16 else 2**-10
            torch.testing.assert_close(got.double(), due, rtol=step, atol=1e-5)
