# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule's kernels, run by the emulator, against the float64 recurrence."""

import pytest
import torch
from support.emulator import sm90
from support.index_fuzz import Draw, run
from support.near import BF16, F16, F32

from tiercel.ops.delta import reference as ref

# Operators whose index tensors this file fuzzes: see tests/api/test_index_checks.py.
FUZZED = ("gated_delta_rule", "gated_delta_rule_decode")


def problem(batch, tokens, heads, sizes, dtype=BF16, channels=False, unit=True, seed=0, gate=2.0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    q, k = (random(batch, tokens, heads[0], sizes[0]) for _ in range(2))
    k = torch.nn.functional.normalize(k, dim=-1) if unit else k
    v = random(batch, tokens, heads[1], sizes[1])
    g = random(*v.shape[:3], *([sizes[0]] if channels else []))
    g = torch.nn.functional.logsigmoid(g + gate)
    beta = random(*v.shape[:3]).sigmoid()
    return q.to(dtype), k.to(dtype), v.to(dtype), g, beta


def close(got, due, of_size):
    """Errors as parts of the results' own size, about: each is a sum over many roundings."""
    error = (got.double() - due.double()).norm() / due.double().norm().clamp(min=1e-9)
    assert error < of_size, float(error)
    worst = (got.double() - due.double()).abs().max() / due.double().abs().max().clamp(min=1e-9)
    assert worst < 4 * of_size, float(worst)


def decode(inputs, states, indices=None, accepted=None, scale=None, l2norm=True):
    out, pool = torch.full_like(inputs[2], 7.0), states.clone()
    rest = (indices, accepted, scale, l2norm)
    sm90("gated_delta_rule_decode")(*inputs, pool, out, *rest, None)
    due, due_pool = torch.empty_like(out).double(), states.clone()
    ref.gated_delta_rule_decode(*(t.double() for t in inputs), due_pool, due, *rest)
    if due.numel():
        close(out, due, 2**-8 if out.dtype == BF16 else 2**-10)
        close(pool, due_pool, 2**-9 if pool.dtype == BF16 else 1e-5)
    untouched = torch.ones(len(pool), dtype=torch.bool)
    used = torch.arange(len(out)) if indices is None else indices.flatten().long()
    untouched[used[(used >= 0) & (used < len(pool))]] = False
    assert torch.equal(pool[untouched], states[untouched])
    return out, pool


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("state", [F32, BF16])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("sizes", [(64, 32), (128, 64)])
def test_decode(sizes, dtype, state, channels):
    for tokens, l2norm in ((1, True), (3, False)):
        inputs = problem(3, tokens, (1, 2), sizes, dtype, channels)
        states = torch.randn(5, 2, *sizes, generator=torch.Generator().manual_seed(1)).to(state)
        indices = torch.tensor([4, -1, 2], dtype=torch.int32)
        decode(inputs, states, indices, l2norm=l2norm)
        decode(inputs, states, scale=0.5)


@pytest.mark.parametrize(("state", "channels", "beta"), [(F32, False, F32), (BF16, True, BF16)])
def test_many_states_stream_through_shared_memory(state, channels, beta):
    """Blocks go through several states of 128 x 128, more than fit at once; the results have the
    bits of blocks that have one each."""
    batch, slots = 12, 14
    inputs = problem(batch, 1, (1, 96), (128, 128), channels=channels)
    inputs = (*inputs[:4], inputs[4].to(beta))
    states = torch.randn(slots, 96, 128, 128, generator=torch.Generator().manual_seed(1)).to(state)
    indices = torch.tensor([13, -1, 3, 0, 5, 1, 99, 2, 12, 4, -(2**31), 11], dtype=torch.int32)
    out, pool = decode(inputs, states, indices)
    for first in (0, 5):  # fewer sequences than have such blocks
        part = slice(first, first + 2)
        few = [t[part].contiguous() for t in inputs]
        alone, alone_pool = decode(few, states, indices[part].contiguous())
        assert torch.equal(alone, out[part])
        for slot in indices[part].tolist():
            if 0 <= slot < slots:
                assert torch.equal(alone_pool[slot], pool[slot])


@pytest.mark.parametrize("channels", [False, True])
def test_speculative_tokens_with_states_to_roll_back_to(channels):
    inputs = problem(4, 3, (2, 4), (64, 32), channels=channels)
    states = torch.randn(14, 4, 64, 32)
    indices = torch.arange(12, dtype=torch.int32).flip(0).view(4, 3).contiguous()
    indices[1, 1], indices[2, 2], indices[3, 0] = -1, 99, -(2**31)
    decode(inputs, states, indices)
    decode(inputs, states, indices, torch.tensor([3, 1, 0, 9], dtype=torch.int32))
    # Two of three tokens kept: the next step begins with the second's state.
    indices = torch.arange(12, dtype=torch.int32).view(4, 3)
    _, pool = decode(inputs, states, indices)
    two = [t[:, :2].contiguous() for t in inputs]
    _, alone = decode(two, states, indices[:, 0].contiguous())
    torch.testing.assert_close(pool[indices[:, 1].long()], alone[indices[:, 0].long()])


def test_decode_of_nothing():
    states = torch.randn(3, 2, 64, 32)
    decode(problem(0, 1, (1, 2), (64, 32)), states)
    decode(problem(2, 0, (1, 2), (64, 32)), states)


def test_states_that_are_not_used_may_hold_anything():
    states = torch.full((4, 2, 64, 32), float("nan"))
    states[2] = 1.0
    indices = torch.tensor([2, -1], dtype=torch.int32)
    out, pool = torch.empty(2, 1, 2, 32, dtype=BF16), states.clone()
    inputs = problem(2, 1, (1, 2), (64, 32))
    sm90("gated_delta_rule_decode")(*inputs, pool, out, indices, None, None, True, None)
    assert not out.isnan().any() and pool.isnan().flatten(1).all(1).tolist() == [1, 1, 0, 1]


def prompt(inputs, initial=None, starts=None, scale=None, l2norm=True):
    of_size = 2**-7 if inputs[0].dtype == BF16 else 2**-9
    given = (initial, starts, scale, l2norm)
    out, state = sm90("gated_delta_rule_with_state")(*inputs, *given, None)
    alone = sm90("gated_delta_rule")(*inputs, *given, None)
    assert torch.equal(out, alone)
    due, due_state = ref.gated_delta_rule(
        *(t.double() for t in inputs), *given, output_final_state=True
    )
    if due.numel():
        close(out, due, of_size)
    if due_state.numel():
        close(state, due_state, of_size)
    return out, state


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 63, 64, 65, 200])
@pytest.mark.parametrize("sizes", [(64, 16), (128, 32)])
def test_prompts(sizes, tokens, channels):
    prompt(problem(1, tokens, (1, 2), sizes, channels=channels))
    initial = torch.randn(1, 2, *sizes, generator=torch.Generator().manual_seed(1))
    inputs = problem(1, tokens, (2, 2), sizes, channels=channels, seed=1)
    prompt(inputs, initial, scale=0.3, l2norm=False)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("sizes", [(64, 16), (128, 32)])
def test_float16_prompts(sizes, channels):
    initial = torch.randn(2, 2, *sizes, generator=torch.Generator().manual_seed(1))
    prompt(problem(2, 130, (1, 2), sizes, F16, channels), initial)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("size", [48, 64, 80, 128])
def test_slices_of_a_state(size, channels):
    """Slices have 64 columns, the last may have fewer; of many, two share a block."""
    prompt(problem(1, 70, (1, 2), (64, size), channels=channels))
    if size == 80:
        prompt(problem(4, 3, (17, 17), (64, size), channels=channels))


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("channels", [False, True])
def test_long_sequences_are_divided(channels, dtype):
    """With few heads; states that stay and such that are lost."""
    initial = torch.randn(1, 1, 128, 16, generator=torch.Generator().manual_seed(1))
    for gate in (6.0, 0.0):
        prompt(problem(1, 1537, (1, 1), (128, 16), dtype, channels, gate=gate), initial)


def test_segments_that_leave_nothing_of_a_state():
    """Some do in one head and not in the other; with a beta above 2 a state may grow; and keys
    whose lengths are not divided out have no bound."""
    q, k, v, g, beta = problem(1, 1537, (1, 2), (128, 16), gate=0.0)
    g[:, 512:1024, 0] = -1e-3
    beta[:, 1000, 1] = 2.5
    initial = torch.randn(1, 2, 128, 16, generator=torch.Generator().manual_seed(1))
    prompt((q, k, v, g, beta), initial)
    prompt((q, k, v, g, beta.clamp(max=1)), initial, l2norm=False)


def test_packed_sequences_are_divided():
    starts = torch.tensor([3, 3, 1100, 1101, 2400], dtype=torch.int32)
    initial = torch.randn(4, 1, 128, 16, generator=torch.Generator().manual_seed(1))
    inputs = problem(1, 24 * 64 * 4 + 5, (1, 1), (128, 16), gate=5.0)
    out, state = prompt(inputs, initial, starts)
    assert torch.equal(state[0], initial[0])
    assert not out[:, :3].any() and not out[:, 2400:].any()


@pytest.mark.parametrize(
    ("heads", "size", "lengths"),
    [((14, 28), 16, (1900,)), ((14, 14), 16, (0, 1100, 1, 400)), ((14, 28), 16, (500, 1000))]
    + [((17, 34), 80, (1500,))],  # two slices of a state in a block
)
def test_chunks_beside_the_states(heads, size, lengths):
    """More chunks and heads than fit at once, and half of the multiprocessors without a state."""
    count = len(lengths)
    generator = torch.Generator().manual_seed(1)
    initial = torch.randn(count, heads[1], 64, size, generator=generator)
    starts, total = None, lengths[0]
    if count > 1:
        starts = torch.tensor([3, *lengths]).cumsum(0).to(torch.int32)
        total = int(starts[-1]) + 400
    out, _ = prompt(problem(1, total, heads, (64, size), gate=5.0), initial, starts)
    if starts is not None:
        assert not out[:, :3].any() and not out[:, int(starts[-1]) :].any()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_beta(dtype):
    *rest, beta = problem(1, 100, (1, 2), (64, 16))
    prompt((*rest, beta.to(dtype)))
    # Unit keys and a beta of 1 replace what a key found.
    prompt((*rest, torch.ones_like(beta).to(dtype)))


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("gate", [-300.0, -20.0, -3.0, 20.0])
def test_decay(gate, channels):
    """From states that are lost at once to such that stay."""
    more = {"channels": channels}
    prompt(problem(1, 150, (1, 2), (64, 16), gate=gate, **more), torch.randn(1, 2, 64, 16))
    *rest, g, beta = problem(1, 150, (1, 2), (64, 16), **more)
    g[:, 40] = -float("inf")
    g[:, 41:60] = -50.0
    prompt((*rest, g, beta), torch.randn(1, 2, 64, 16))


@pytest.mark.parametrize("gate", [-20.0, -5.0, -4.0, -3.0, 20.0])
def test_decay_of_channels_near_what_two_factors_hold(gate):
    """In bfloat16 a decay is a product of two factors unless one of them could overflow: chunks of
    either kind beside each other, with sums of the gates on both sides of the limit."""
    initial = torch.randn(1, 2, 128, 16, generator=torch.Generator().manual_seed(1))
    q, k, v, g, beta = problem(1, 140, (1, 2), (128, 16), channels=True, gate=gate)
    g[:, 64:128, 0, 5] = -30.0
    prompt((q, k, v, g, beta), initial)
    # All of a channel's decay in one half chunk, and none in the next.
    g[:, :32] = -4.15
    g[:, 32:] = 0.0
    prompt((q, k, v, g, beta), initial)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("lengths", [(5, 0, 64, 130, 1), (0, 0), (200,), (64, 64, 64), (63, 1, 65)])
def test_packed(lengths, channels):
    starts = torch.tensor([3, *lengths]).cumsum(0).to(torch.int32)
    total, count = int(starts[-1]) + 70, len(lengths)
    initial = torch.randn(count, 2, 64, 16, generator=torch.Generator().manual_seed(1))
    out, state = prompt(problem(1, total, (1, 2), (64, 16), channels=channels), initial, starts)
    assert not out[:, :3].any() and not out[:, int(starts[-1]) :].any()
    for i, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(state[i], initial[i])


def test_no_tokens():
    initial = torch.randn(2, 2, 64, 16)
    _, state = prompt(problem(2, 0, (1, 2), (64, 16)), initial)
    assert torch.equal(state, initial)
    prompt(problem(0, 5, (1, 2), (64, 16)))
    prompt(problem(1, 70, (1, 2), (64, 16)), None, torch.tensor([0], dtype=torch.int32))


def test_strided_heads():
    """Queries, keys and values are parts of one projection."""
    whole = torch.randn(2, 80, 4 * 64 + 2 * 32, generator=torch.Generator().manual_seed(0)).to(BF16)
    q, k, v = whole.split([128, 128, 64], dim=-1)
    q, k = (t.unflatten(-1, (2, 64)) for t in (q, k))
    g, beta = problem(2, 80, (2, 2), (64, 32))[3:]
    prompt((q, k, v.unflatten(-1, (2, 32)), g, beta))


@pytest.mark.parametrize("case", range(8))
def test_any_contents_of_index_tensors(case):
    """Kernels stay inside of the tensors, whatever starts and slots hold."""
    draw = Draw(case)
    count, tokens = draw.of(1, 3), draw.of(1, 3)
    inputs = problem(count, tokens, (1, 2), (64, 32), seed=case)
    indices = draw.strays(torch.arange(count * tokens), 9, wide=False).int().view(count, tokens)
    accepted = draw.strays(torch.ones(count, dtype=torch.int64), tokens, wide=False).int()
    states, out = torch.randn(9, 2, 64, 32), torch.empty(count, tokens, 2, 32, dtype=BF16)
    given = (*inputs, states, out, indices, accepted, None, True, None)
    run("gated_delta_rule_decode", *given)
    rows = draw.of(1, 70, 150)
    right = torch.linspace(0, rows, count + 1).long()
    starts = draw.strays(right, rows + 1, wide=False).int()
    for channels in (False, True):
        inputs = problem(1, rows, (1, 2), (64, 16), channels=channels, seed=case)
        run("gated_delta_rule_with_state", *inputs, None, starts, None, True, None)


def gated_norm(x, gate, weight, eps=1e-6):
    got = sm90("gated_rms_norm")(x, gate, weight, eps, None)
    due = ref.gated_rms_norm(x.double(), gate.double(), weight.double(), eps)
    step = 2**-8 if x.dtype == BF16 else 2**-11
    torch.testing.assert_close(got.double(), due, rtol=step, atol=1e-5)
    assert got.dtype == x.dtype and got.shape == x.shape


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("size", [8, 24, 64, 128, 256, 264, 1024])
def test_gated_norm(size, dtype):
    generator = torch.Generator().manual_seed(size)
    x, gate = (torch.randn(33, size, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(size, generator=generator)
    gated_norm(x, gate, weight)
    gated_norm(x[:1], gate[:1], weight.to(dtype), eps=0.1)


def test_gated_norm_of_strided_rows():
    whole = torch.randn(3, 5, 4 * 64, generator=torch.Generator().manual_seed(0)).to(BF16)
    x, _, gate, _ = whole.split(64, dim=-1)
    gated_norm(x, gate, torch.ones(64))
    gated_norm(
        whole.unflatten(-1, (4, 64))[:, :, 1:3],
        whole.unflatten(-1, (4, 64))[:, :, :2],
        torch.ones(64),
    )


def test_gated_norm_of_special_values():
    """Gates beyond any exponent open or shut; rows of zeros stay zeros."""
    x = torch.ones(4, 64, dtype=BF16)
    x[3] = 0
    gate = torch.tensor([-3e38, -90.0, 90.0, 5.0]).to(BF16)[:, None].expand(4, 64).contiguous()
    got = sm90("gated_rms_norm")(x, gate, torch.ones(64), 1e-6, None)
    assert not got[0].any() and got[1].abs().max() < 1e-30 and not got[3].any()
    assert (got[2] == 90).all()
    x[1, 5] = float("nan")
    got = sm90("gated_rms_norm")(x, gate, torch.ones(64), 1e-6, None)
    assert got[1].isnan().all() and not got[0].isnan().any()
