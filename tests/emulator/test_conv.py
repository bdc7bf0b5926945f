# SPDX-License-Identifier: Apache-2.0
"""causal_conv1d's kernels, run by the emulator, against float64."""

import pytest
import torch
from support.emulator import sm90
from support.index_fuzz import Draw, margins_kept
from support.near import BF16, F16, F32, FLOATS

from tiercel.ops.conv import reference as ref

# Operators whose index tensors this file fuzzes: see tests/api/test_index_checks.py.
FUZZED = ("causal_conv1d", "causal_conv1d_update")

NEAR = {F32: 1e-5, BF16: 2**-7, F16: 2**-10}


def normal(*shape, dtype=F32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def near(got, due, dtype):
    """Sums of about five products of numbers of about 1."""
    torch.testing.assert_close(got.double(), due.double(), rtol=NEAR[dtype], atol=NEAR[dtype])


def starts_of(*lengths, first=0):
    return torch.tensor([first, *lengths]).cumsum(0).to(torch.int32)


def wide(*tensors):
    return [t.double() if t is not None and t.is_floating_point() else t for t in tensors]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 7, 24), (2, 70, 64), (5, 2, 520)])
def test_dense(shape, activation, width, dtype):
    x, weight = normal(*shape, dtype=dtype), normal(shape[-1], width, dtype=dtype, seed=1)
    bias = normal(shape[-1], dtype=dtype, seed=2) if width != 3 else None
    got = sm90("causal_conv1d")(x, weight, bias, None, activation, None)
    near(got, ref.causal_conv1d(*wide(x, weight, bias), None, activation), dtype)


@pytest.mark.parametrize("lengths", [(5, 0, 1, 2, 60, 3), (0, 0, 40), (100,), (), (1,) * 30])
@pytest.mark.parametrize("first", [0, 3])
def test_packed(lengths, first):
    starts = starts_of(*lengths, first=first)
    x, weight = normal(int(starts[-1]) + 4, 40, dtype=BF16), normal(40, 4, dtype=BF16, seed=1)
    got = sm90("causal_conv1d")(x, weight, None, starts, "silu", None)
    near(got, ref.causal_conv1d(*wide(x, weight, None), starts, "silu"), BF16)
    assert not got[:first].any() and not got[int(starts[-1]) :].any()


def test_taps_do_not_see_beyond_their_width():
    """Inputs that a filter does not see may be anything."""
    x = normal(1, 30, 8, dtype=BF16)
    weight = normal(8, 2, dtype=BF16, seed=1)
    x[0, 5] = float("nan")
    got = sm90("causal_conv1d")(x, weight, None, None, None, None)
    assert got.isnan().any(-1).nonzero()[:, 1].tolist() == [5, 6]


def update(x, states, weight, bias, indices, flags, starts, activation):
    """Kernel and reference on copies, states bit for bit."""
    out, pool = torch.empty_like(x), states.clone()
    sm90("causal_conv1d_update")(
        *(x, pool, weight, out, bias, indices, flags, starts, activation, None)
    )
    due, due_pool = torch.empty_like(x).double(), states.double()
    ref.causal_conv1d_update(
        *wide(x), due_pool, *wide(weight), due, *wide(bias), indices, flags, starts, activation
    )
    near(out, due, x.dtype)
    assert torch.equal(pool.double(), due_pool)
    return out, pool


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("shape", [(6, 1, 40), (6, 2, 40), (6, 3, 40), (6, 50, 40)])
def test_update(shape, width, dtype):
    x, weight = normal(*shape, dtype=dtype), normal(40, width, dtype=dtype, seed=1)
    states = normal(9, width - 1, 40, dtype=dtype, seed=2)
    bias = normal(40, dtype=dtype, seed=3)
    indices = torch.tensor([3, -1, 0, 8, 9, 5], dtype=torch.int32)
    flags = torch.tensor([True, True, False, True, True, True])
    update(x, states, weight, bias, indices, flags, None, "silu")
    update(x, states, weight, None, None, None, None, None)
    wide_pool = normal(9, 2 * (width - 1), 40, dtype=dtype, seed=2)
    pool = wide_pool[:, : width - 1]  # slots at some distance
    due = pool.clone()
    out = torch.empty_like(x)
    sm90("causal_conv1d_update")(x, pool, weight, out, bias, indices, None, None, None, None)
    ref.causal_conv1d_update(x, due, weight, out, bias, indices, None, None, None)
    assert torch.equal(pool, due)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("lengths", [(5, 0, 1, 2, 60, 3), (1,) * 40, (31, 33, 1, 30, 2, 40)])
def test_update_of_packed_sequences(lengths, width):
    """Starts lie everywhere between the threads' rows."""
    starts, count = starts_of(*lengths, first=1), len(lengths)
    columns = 8 * 1400  # threads have several rows
    x = normal(1, int(starts[-1]) + 2, columns, dtype=BF16)
    weight, states = normal(columns, width, dtype=BF16, seed=1), normal(50, width - 1, columns)
    indices = torch.randperm(50, generator=torch.Generator().manual_seed(1))[:count].int()
    flags = torch.arange(count) % 3 != 0
    update(x, states.to(BF16), weight, None, indices, flags, starts, "silu")


def test_prompts_in_parts_are_the_whole():
    x, weight = normal(1, 90, 64, dtype=BF16), normal(64, 4, dtype=BF16, seed=1)
    due = sm90("causal_conv1d")(x, weight, None, None, "silu", None)
    states, parts = torch.full((1, 3, 64), float("nan"), dtype=BF16), []
    for i, part in enumerate(x.split([40, 1, 1, 2, 46], dim=1)):
        flags = torch.tensor([i > 0])
        part, out = part.contiguous(), torch.empty_like(part).contiguous()
        sm90("causal_conv1d_update")(
            *(part, states, weight, out, None, None, flags, None, "silu", None)
        )
        parts.append(out)
    assert torch.equal(torch.cat(parts, dim=1), due)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(
    ("shape", "lengths"),
    [((1, 1, 8), None), ((3, 7, 24), None), ((2, 70, 36), None), ((71, 20), (5, 0, 1, 2, 60))]
    + [((200, 12), (33, 100, 1, 50))],
)
@pytest.mark.parametrize("width", [2, 4])
def test_backward(shape, lengths, width, activation, dtype):
    columns = shape[-1]
    x, grad = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype, seed=5)
    weight, bias = (normal(columns, width, dtype=dtype, seed=1), normal(columns, dtype=dtype))
    starts = None if lengths is None else starts_of(*lengths, first=2)
    bias = bias if width == 4 else None
    dx, sums = sm90("causal_conv1d_backward")(grad, x, weight, bias, starts, activation, None)
    due, due_sums = ref.causal_conv1d_backward(*wide(grad, x, weight, bias), starts, activation)
    near(dx, due, dtype)
    rows = x.numel() // columns
    torch.testing.assert_close(
        sums.sum(0).double(), due_sums.sum(0).double(), rtol=1e-4, atol=1e-5 * rows
    )


@pytest.mark.parametrize("case", range(12))
def test_any_contents_of_index_tensors(case):
    """Kernels stay inside of the tensors, whatever starts and slots hold."""
    draw = Draw(case)
    count, rows, columns = draw.of(1, 4, 9), draw.of(1, 20, 60), draw.of(8, 80)
    right = starts_of(*[rows // count] * count)
    starts = draw.strays(right, rows + 1, wide=False).int()
    indices = draw.strays(torch.arange(count), 12, wide=False).int()
    x, weight = draw.normal(rows, columns), draw.normal(columns, 4)
    states, out = draw.normal(12, 3, columns), draw.normal(rows, columns)
    from support.index_fuzz import run

    run("causal_conv1d", x, weight, None, starts, None, None)
    given = (x[None], states, weight, out[None], None, indices, None, starts, None, None)
    run("causal_conv1d_update", *given)
    with margins_kept():
        sm90("causal_conv1d_backward")(x, x, weight, None, starts, "silu", None)
