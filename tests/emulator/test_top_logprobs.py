# SPDX-License-Identifier: Apache-2.0
"""sample's best tokens, from kernels that the emulator runs, against float64."""

import pytest
import torch
from support.emulator import options, sm90
from support.near import BF16, F32, FLOATS

from tiercel.ops.sampling import reference as ref
from tiercel.ops.sampling.spec import SAMPLE

INF, NAN = float("inf"), float("nan")


def values(logits, given, *more):
    """The operator's arguments by position."""
    index = given.get("indices_dtype", torch.int32)
    named = {argument.name: getattr(argument, "default", None) for argument in SAMPLE.arguments}
    return *(named | given | {"logits": logits, "indices_dtype": index}).values(), *more, None


def check(logits, k, **given):
    """All results; those that sample gives alone have its bits."""
    got = sm90("sample_with_top_logprobs")(*values(logits, given, k))
    due = ref.sample(logits, top_logprobs=k, **given)
    for one, exact in zip(got[::2], due[::2], strict=True):
        assert torch.equal(one, exact) and one.dtype == exact.dtype
    for one, exact in zip(got[1::2], due[1::2], strict=True):
        torch.testing.assert_close(one, exact, rtol=2e-6, atol=4e-6, equal_nan=True)
    tokens, logprobs = sm90("sample_with_logprobs")(*values(logits, given))
    assert torch.equal(tokens, got[0])
    assert torch.equal(logprobs.view(torch.int32), got[1].view(torch.int32))
    # The chosen token's log-probability is the same number in the list.
    found = got[2] == got[0][:, None]
    same = torch.where(found, got[3], 0.0).sum(-1)
    there = found.any(-1) & ~logprobs.isnan()
    assert torch.equal(same[there], logprobs[there])
    return got[2:]


def problem(rows, columns, dtype=F32, seed=0, factor=3.0):
    generator = torch.Generator().manual_seed(seed)
    return (factor * torch.randn(rows, columns, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [1, 7, 100, 1000, 1024, 1025, 5003, 20_000])
def test_sizes(columns, dtype):
    logits = problem(3, columns, dtype)
    for k, given in ((1, {"temperature": 0.0}), (5, {}), (20, {"top_k": 9}), (32, {"top_p": 0.9})):
        check(logits, k, **given)
    check(logits, 4, indices_dtype=torch.int64)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype"), [(1, 32_000, F32), (1, 128_256, BF16), (1, 151_936, F32)]
)
def test_clusters(rows, columns, dtype):
    check(problem(rows, columns, dtype, 1), 20, top_k=50)


@pytest.mark.parametrize("steps", [0.0, 1.0, 4.0])
def test_ties_take_the_lowest_index(steps):
    logits = problem(3, 9000, F32, 2, 1.0).mul(steps).round()
    for k in (1, 20, 32):
        tokens, _ = check(logits, k)
        if steps == 0:
            assert tokens.tolist() == [list(range(k))] * 3


def test_rows_in_order():
    """Each logit exceeds all before it, and the other way round."""
    up = torch.arange(5000, dtype=F32)
    zeros = torch.tensor([0.0, -0.0] * 2500)
    tokens, _ = check(torch.stack([up, -up, zeros]), 32)
    assert tokens[0].tolist() == list(range(4999, 4967, -1))
    assert tokens[1].tolist() == tokens[2].tolist() == list(range(32))


@pytest.mark.parametrize("dtype", FLOATS)
def test_penalties_and_mask(dtype):
    logits = problem(4, 3003, dtype, 4)
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(-1, 3, (4, 3003), generator=generator, dtype=torch.int32)
    words = torch.randint(-(2**31), 2**31, (2, 4, 94), generator=generator).int()
    penalties = {
        "repetition_penalties": torch.tensor([1.0, 1.3, 0.7, 2.0]),
        "presence_penalties": torch.tensor([0.0, 0.5, -0.5, 1.5]),
        "frequency_penalty": 0.3,
    }
    check(logits, 20, counts=counts, prompt=words[0], allowed=words[1], **penalties)
    check(logits, 20, allowed=words[1], top_k=3)
    check(logits, 20, prompt=words[0], **penalties)
    few = torch.zeros(4, 94, dtype=torch.int32)
    few[:, 3], few[1] = 0b10110, 0
    tokens, logprobs = check(logits, 5, allowed=few)
    assert (tokens[[0, 2, 3], 3:] == -1).all() and (logprobs[[0, 2, 3], 3:] == -INF).all()
    assert (tokens[1] == -1).all() and logprobs[1].isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values(dtype):
    logits = problem(5, 2500, dtype, 7)
    logits[0, 17] = NAN
    logits[1] = -INF
    logits[2, :2498] = -INF
    logits[3, [4, 2000]] = INF
    logits[4, 3], logits[4, 9] = -NAN, INF
    tokens, logprobs = check(logits, 4)
    assert (tokens[[0, 1, 4]] == -1).all() and logprobs[[0, 1, 3, 4]].isnan().all()
    assert sorted(tokens[2].tolist()) == [-1, -1, 2498, 2499]
    assert tokens[3, :2].tolist() == [4, 2000]


def test_unaligned_and_strided_rows():
    for dtype in FLOATS:
        base = problem(1, 3 * 2007 + 5, dtype, 6)[0]
        for begin, columns in ((1, 2000), (3, 2007)):
            check(base[begin : begin + 3 * 2007].view(3, 2007)[:, :columns], 7)


def test_rows_do_not_depend_on_the_batch():
    """Other numbers of blocks share a row where there are more rows."""
    logits = problem(1, 20_000, BF16, 8)
    one = check(logits, 20)
    many = sm90("sample_with_top_logprobs")(*values(logits.repeat(150, 1), {}, 20))[2:]
    for row, rows in zip(one, many, strict=True):
        assert (rows == row).all()


@pytest.mark.parametrize("order", [1, 2])
def test_any_order_of_warps(order):
    with options(seed=order):
        check(problem(1, 40_000, BF16, 9).mul(4).round(), 30)
