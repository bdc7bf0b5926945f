# SPDX-License-Identifier: Apache-2.0
"""Gradients of the gated delta rule on an H100 or H200, against the float64 recurrence."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tiercel
from tiercel.ops.delta import reference as ref

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

NAMES = ("q", "k", "v", "g", "beta", "initial_state")
LEAST = torch.finfo(torch.float32).tiny


def problem(batch, tokens, heads, sizes, dtype=torch.bfloat16, seed=0, gate=2.0, channels=False):
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    q, k = (random(batch, tokens, heads[0], sizes[0]).to(dtype) for _ in range(2))
    v, grad = (random(batch, tokens, heads[1], sizes[1]).to(dtype) for _ in range(2))
    g = random(*v.shape[:3], *([sizes[0]] if channels else []))
    g = torch.nn.functional.logsigmoid(g + gate)
    return grad, (q, k, v, g, random(*v.shape[:3]).sigmoid())


def states(*shape, seed=9):
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def run(grad, inputs, initial=None, grad_final=None, starts=None, call=tiercel.gated_delta_rule):
    """The gradients of the public function."""
    leaves = [t.detach().requires_grad_() for t in (*inputs, initial) if t is not None]
    options = {"cu_seqlens": starts, "qk_l2norm": True}
    if initial is not None:
        options["initial_state"] = leaves[5]
    if grad_final is None:
        call(*leaves[:5], **options).backward(grad)
    else:
        out, state = call(*leaves[:5], output_final_state=True, **options)
        torch.autograd.backward([out, state], [grad, grad_final])
    return [leaf.grad for leaf in leaves]


def check(grad, inputs, initial=None, grad_final=None, starts=None):
    """Errors as parts of the gradients' sizes: each is a sum over many roundings. In those of gates
    products of whole states nearly cancel."""
    got = run(grad, inputs, initial, grad_final, starts)
    due = ref.gated_delta_rule_backward(
        grad.double(), *(t.double() for t in inputs), grad_final, initial, starts, None, True
    )
    of_size = 2**-7 if grad.dtype == torch.bfloat16 else 2**-9
    for name, a, b in zip(NAMES, got, due, strict=False):
        a, b = a.double(), b.double()
        assert torch.isfinite(a).all(), name
        due_error = of_size * (2.5 if name == "g" else 1.0)
        # with a gate of -300, gradients lie below the least float32
        assert (a - b).norm() <= due_error * b.norm() + LEAST, name
        assert (a - b).abs().max() <= 4 * due_error * b.abs().max() + LEAST, name
    return got


@pytest.mark.sanitize
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 64, 150])
@pytest.mark.parametrize("sizes", [(64, 32), (64, 128), (128, 32), (128, 128)])
def test_gradients(sizes, tokens, dtype, channels):
    more = {"channels": channels}
    initial, grad_final = states(2, 4, *sizes), states(2, 4, *sizes, seed=8)
    check(*problem(2, tokens, (2, 4), sizes, dtype, **more), initial, grad_final)
    if tokens > 1:  # of a token alone, gradients may be near zero
        check(*problem(2, tokens, (2, 4), sizes, dtype, seed=1, **more))


@pytest.mark.sanitize
@pytest.mark.parametrize("channels", [False, True])
def test_packed(channels):
    starts = torch.tensor([3, 3, 70, 134, 135, 300], device="cuda", dtype=torch.int32)
    grad, inputs = problem(1, 310, (1, 2), (128, 32), channels=channels)
    initial, grad_final = states(5, 2, 128, 32), states(5, 2, 128, 32, seed=8)
    got = check(grad, inputs, initial, grad_final, starts)
    for each in got[:5]:
        assert not each[:, :3].any() and not each[:, 300:].any()
    assert torch.equal(got[5][0], grad_final[0])


@pytest.mark.sanitize
@pytest.mark.parametrize("channels", [False, True])
def test_few_long_sequences(channels):
    """Segments run side by side, and give the same bits in every run."""
    grad, inputs = problem(1, 2300, (1, 2), (128, 128), gate=5.0, channels=channels)
    initial, grad_final = states(1, 2, 128, 128), states(1, 2, 128, 128, seed=8)
    first = check(grad, inputs, initial, grad_final)
    for each, other in zip(first, run(grad, inputs, initial, grad_final), strict=True):
        assert torch.equal(each, other)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("gate", "heads", "size"), [(6.0, (2, 8), 128), (1.0, (1, 3), 144)])
def test_segments_of_models(gate, heads, size, dtype, channels):
    check(*problem(1, 4100, heads, (128, size), dtype, gate=gate, channels=channels))


@pytest.mark.parametrize("channels", [False, True])
def test_segments_of_packed_sequences(channels):
    starts = torch.tensor([3, 3, 2600, 2601, 9000], device="cuda", dtype=torch.int32)
    grad, inputs = problem(1, 9100, (1, 2), (128, 64), gate=5.0, channels=channels)
    initial, grad_final = states(4, 2, 128, 64), states(4, 2, 128, 64, seed=8)
    got = check(grad, inputs, initial, grad_final, starts)
    for each in got[:5]:
        assert not each[:, :3].any() and not each[:, 9000:].any()
    assert torch.equal(got[5][0], grad_final[0])


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads"), [(1, (16, 32)), (1, (2, 8)), (8, (4, 8)), (1, (32, 32))]
)
def test_heads_of_models(batch, heads, channels):
    check(*problem(batch, 300, heads, (128, 128), channels=channels))


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("gate", [-300.0, -20.0, -3.0, 8.0])
def test_decay(gate, channels):
    """If a gate loses the state at once, only the last token has a gradient of the final states.
    That of its beta is a single product, near zero in some heads, so there are many heads."""
    more = states(1, 16, 128, 128), states(1, 16, 128, 128, seed=8)
    check(*problem(1, 500, (8, 16), (128, 128), gate=gate, channels=channels), *more)


@pytest.mark.parametrize("channels", [False, True])
def test_many_blocks_at_once_are_reproducible(channels):
    """Any order of blocks and warps gives the same bits; and what a short part of it is right."""
    grad, inputs = problem(4, 2100, (8, 16), (128, 128), channels=channels)
    first = run(grad, inputs)
    for _ in range(5):
        for each, other in zip(first, run(grad, inputs), strict=True):
            assert torch.equal(each, other)
    part = (slice(2, 3), slice(None), slice(6, 8))
    few = [t[part].contiguous() for t in (grad, *inputs[2:])]
    keys = [t[2:3, :, 3:4].contiguous() for t in inputs[:2]]
    with tiercel.batch_invariant():  # otherwise it would be divided into segments
        alone = check(few[0], (*keys, *few[1:]))
    for each, other in zip(alone[2:], first[2:], strict=True):
        assert torch.equal(each, other[part])
    for each, other in zip(alone[:2], first[:2], strict=True):
        assert torch.equal(each, other[2:3, :, 3:4])


def test_one_of_both_results():
    """A gradient of the final states alone, and results that are a sum."""
    grad, inputs = problem(2, 130, (1, 2), (128, 64))
    grad_final = states(2, 2, 128, 64)
    due = run(torch.zeros_like(grad), inputs, grad_final=grad_final)
    leaves = [t.detach().requires_grad_() for t in inputs]
    _, state = tiercel.gated_delta_rule(*leaves, output_final_state=True, qk_l2norm=True)
    state.backward(grad_final)
    for leaf, other in zip(leaves, due, strict=True):
        assert torch.equal(leaf.grad, other)
    due = run(torch.ones_like(grad), inputs)
    leaves = [t.detach().requires_grad_() for t in inputs]
    tiercel.gated_delta_rule(*leaves, qk_l2norm=True).sum().backward()
    for leaf, other in zip(leaves, due, strict=True):
        assert torch.equal(leaf.grad, other)


def test_compiled_and_checkpointed():
    grad, inputs = problem(1, 200, (2, 4), (128, 64))
    initial, grad_final = states(1, 4, 128, 64), states(1, 4, 128, 64, seed=8)
    due = run(grad, inputs, initial, grad_final)
    compiled = torch.compile(tiercel.gated_delta_rule, fullgraph=True)

    def again(*args, **options):
        return checkpoint(tiercel.gated_delta_rule, *args, use_reentrant=False, **options)

    for call in (compiled, again):
        got = run(grad, inputs, initial, grad_final, call=call)
        for each, other in zip(got, due, strict=True):
            assert torch.equal(each, other)


def test_graph():
    grad, inputs = problem(1, 200, (2, 4), (128, 64))
    run(grad, inputs)
    leaves = [t.clone().requires_grad_() for t in inputs]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        out = tiercel.gated_delta_rule(*leaves, qk_l2norm=True)
        found = torch.autograd.grad(out, leaves, grad)
    for seed in range(2):
        given, other = problem(1, 200, (2, 4), (128, 64), seed=seed)
        grad.copy_(given)
        with torch.no_grad():
            for leaf, tensor in zip(leaves, other, strict=True):
                leaf.copy_(tensor)
        graph.replay()
        for each, due in zip(found, run(given, other), strict=True):
            assert torch.equal(each, due)
