# SPDX-License-Identifier: Apache-2.0
"""sample's kernels, run by the emulator, against float64 with the same random numbers."""

import pytest
import torch
from support.emulator import kernels
from support.near import BF16, F16, F32, FLOATS

from tiercel.ops.sampling import reference as ref
from tiercel.ops.sampling.spec import SAMPLE

NUMBERS = {scalar.name: scalar.default for scalar in SAMPLE.scalars[:-1]}
PER_ROW = {"temperatures", "top_ks", "top_ps", "min_ps", "seeds", "offsets"}
PER_ROW |= {"repetition_penalties", "presence_penalties", "frequency_penalties"}
FILTERS = [
    {"temperature": 0.0},
    {"temperature": 1.5},
    {"min_p": 0.1},
    {"top_k": 1},
    {"top_k": 50},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"top_k": 300, "top_p": 0.7, "temperature": 0.8},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.02},
]


def arguments(logits, tokens, logprobs, given):
    tensors = [given.get(tensor.name) for tensor in SAMPLE.tensors[1:]]
    numbers = [given.get(name, number) for name, number in NUMBERS.items()]
    return (logits, *tensors, tokens, logprobs, None, None, *numbers)


def run(logits, dtype=torch.int32, with_logprobs=True, **given):
    tokens = torch.full((len(logits),), -7, dtype=dtype)
    logprobs = torch.full((len(logits),), 7.0) if with_logprobs else None
    kernels.sample(*arguments(logits, tokens, logprobs, given))
    return tokens, logprobs


def check(logits, **given):
    tokens, logprobs = run(logits, **given)
    due, due_logprobs = ref.sample(logits, return_logprobs=True, **given)
    assert torch.equal(tokens, due)
    torch.testing.assert_close(logprobs, due_logprobs, rtol=2e-6, atol=4e-6, equal_nan=True)
    alone, _ = run(logits, torch.int64, with_logprobs=False, **given)
    assert torch.equal(alone, due.long())
    return tokens


def problem(rows, columns, dtype=F32, seed=0, factor=3.0):
    generator = torch.Generator().manual_seed(seed)
    return (factor * torch.randn(rows, columns, generator=generator)).to(dtype)


def masked(rows, columns, share, seed=0):
    """A bit for each token, in words."""
    generator = torch.Generator().manual_seed(seed)
    words = (columns + 31) // 32
    bits = torch.rand(rows, words, 32, generator=generator) < share
    return (bits.long() << torch.arange(32)).sum(-1).to(torch.int32)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [1, 2, 7, 100, 1000, 1024, 1025, 5003, 32000])
def test_filters(columns, dtype):
    logits = problem(4, columns, dtype)
    for seed, given in enumerate(FILTERS):
        check(logits, seed=seed, **given)


def test_top_p_that_ends_among_the_largest():
    """The estimate by every 16th token may end before the threshold."""
    logits = problem(40, 3001, BF16, 9)
    for top_p in (0.8, 0.85, 0.9, 0.95):
        check(logits, top_p=top_p, seed=2)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("shift", "factor"), [(0, 3), (0, 0.1), (20, 3), (-20, 3), (9, 1)])
def test_top_p_of_16_bit_numbers(shift, factor, dtype):
    """The threshold among few and many numbers, above and below zero, which has two signs."""
    logits = (problem(4, 20_000, F32, 5, factor) + shift).to(dtype)
    logits[1:3, ::7], logits[1:3, ::5] = 0.0, -0.0
    logits[2] -= logits[2].max()
    logits[3, 100:19_000] = -float("inf")
    for top_p in (0.3, 0.9, 0.99):
        check(logits, top_p=top_p, seed=3)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "blocks"),
    [(1, 32_000, F32, 4), (1, 128_256, BF16, 8), (2, 262_144, BF16, 8), (1, 151_936, F32, 8)],
)
def test_clusters(rows, columns, dtype, blocks):
    logits = problem(rows, columns, dtype, 1)
    tokens = torch.empty(rows, dtype=torch.int32)
    plan = kernels.sample_plan(*arguments(logits, tokens, None, {}))
    assert plan["blocks_per_row"] == blocks
    for given in FILTERS:
        check(logits, seed=5, offset=2**40 + 7, **given)


@pytest.mark.parametrize(
    ("rows", "columns", "padding", "dtype", "blocks"),
    [(400, 11_003, 5, BF16, 1), (40, 128_256, 0, BF16, 8), (300, 8_000, 0, F32, 1)],
)
def test_rows_without_filters_are_streamed(rows, columns, padding, dtype, blocks):
    """Blocks stay for several rows; tokens and log-probabilities are those of a few rows alone."""
    inf, nan = float("inf"), float("nan")
    logits = problem(rows, columns + padding, dtype, 3)[:, :columns]
    for some in (logits[:5], logits[-5:]):  # greedy and not
        some[0, 17], some[1], some[2, 1:] = nan, -inf, -inf
        some[3, [4, 2000, columns - 1]] = inf
        some[4] = 1.0
    temperatures = torch.linspace(-0.2, 2.0, rows)
    seeds = torch.arange(rows)
    tokens = torch.empty(rows, dtype=torch.int32)
    plan = kernels.sample_plan(*arguments(logits, tokens, None, {}))
    assert plan["kernel"].startswith("sample_stream") and plan["blocks_per_row"] == blocks
    check(logits, temperatures=temperatures, seeds=seeds)
    tokens, logprobs = run(logits, temperatures=temperatures, seeds=seeds)
    for begin in range(0, rows, 10):
        part = slice(begin, begin + 10)
        given = {"temperatures": temperatures[part], "seeds": seeds[part]}
        few, few_logprobs = run(logits[part], **given)
        assert torch.equal(tokens[part], few)
        assert torch.equal(logprobs[part].view(torch.int32), few_logprobs.view(torch.int32))


@pytest.mark.parametrize(("rows", "columns", "padding"), [(106, 147_001, 7), (212, 147_456, 0)])
def test_long_rows_with_top_k_are_streamed(rows, columns, padding):
    """Rows of all kinds in one call: tokens and log-probabilities are those of a few rows alone."""
    inf, nan = float("inf"), float("nan")
    logits = problem(rows, columns + padding, BF16, 3)[:, :columns]
    logits[7, 17], logits[8], logits[9, 1:] = nan, -inf, -inf
    logits[10, [4, 2000, columns - 1]] = inf
    logits[11:15] = 1.0
    logits[15:20] /= 8
    logits[20, -3:] = 99.0
    each = {
        "temperatures": torch.tensor([1.0, 0.7, 1.5, 0.0, 1.0, 0.3, 1.0])[torch.arange(rows) % 7],
        "top_ps": torch.tensor([0.9, 1.0, 0.5])[torch.arange(rows) % 3],
        "min_ps": torch.tensor([0.0, 0.0, 0.0, 0.02])[torch.arange(rows) % 4],
        "seeds": torch.arange(rows),
    }
    tokens = torch.empty(rows, dtype=torch.int32)
    plan = kernels.sample_plan(*arguments(logits, tokens, None, {"top_k": 50} | each))
    assert plan["kernel"] == "sample_stream<BFloat16, filters=true>"
    tokens, logprobs = run(logits, top_k=50, **each)
    for part in (slice(0, 30), slice(rows - 10, rows)):
        given = {name: x[part] for name, x in each.items()}
        few, few_logprobs = run(logits[part], top_k=50, **given)
        assert torch.equal(few, ref.sample(logits[part], top_k=50, **given))
        assert torch.equal(tokens[part], few)
        assert torch.equal(logprobs[part].view(torch.int32), few_logprobs.view(torch.int32))


def test_flat_logits():
    """Nearly all tokens are kept, and thresholds lie among many."""
    logits = problem(3, 9000, F32, 2, 0.01)
    for given in ({"top_p": 0.9}, {"top_p": 0.5, "top_k": 5000}, {"top_k": 7}, {}):
        check(logits, **given)


@pytest.mark.parametrize("dtype", FLOATS)
def test_ties_are_kept(dtype):
    """The tokens equal to the last that is kept are kept; the greedy choice is the first."""
    logits = torch.zeros(64, 3000, dtype=dtype)
    logits[:, [5, 70, 2999]] = 3.0
    logits[:, 1000:1500] = 1.0
    logits[:, [1, 7]] = -0.0
    check(logits, temperature=0.0)
    assert set(check(logits, top_k=2, seed=1).tolist()) == {5, 70, 2999}
    assert set(check(logits, top_p=0.001, seed=1).tolist()) == {5, 70, 2999}
    kept = check(logits, top_k=4, temperature=9.0)
    assert all(token in (5, 70, 2999) or 1000 <= token < 1500 for token in kept.tolist())


def test_numbers_that_differ_little():
    """Thresholds between neighbouring numbers, finer than the fixed-point histograms."""
    base = torch.linspace(1, 2, 2000)
    logits = base.repeat(6, 1)
    for place in range(1, 6):
        logits[place, place * 300 :] += 2.0**-23
    logits[:, 1990:] = torch.tensor([2.0 - i * 2.0**-23 for i in range(10)])
    for count in (1, 2, 5, 9, 13):
        tokens = check(logits, top_k=count, temperature=50.0)
        assert (
            logits.gather(1, tokens[:, None].long()) >= logits.sort(-1).values[:, [-count]]
        ).all()
    check(1e-4 * logits, top_k=3)


def test_parameters_of_rows():
    """One call with every kind of row."""
    logits = problem(9, 4000, BF16, 3)
    check(
        logits,
        temperatures=torch.tensor(
            [0.0, 1.0, 0.3, 2.0, -1.0, float("nan"), 1e-20, 1e20, float("inf")]
        ),
        top_ks=torch.tensor([0, 3, -1, 5000, 7, 2, 2**31 - 1, -(2**31), 0], dtype=torch.int32),
        top_ps=torch.tensor([0.9, 1.0, 0.5, 0.0, 2.0, float("nan"), -1.0, 1.0, 1.0]),
        min_ps=torch.tensor([0.0, 0.1, 0.0, 0.0, 2.0, 0.1, -1.0, 0.0, 0.0]),
        seeds=torch.tensor([1, 2, 3, -4, 5, 6, 2**62, -(2**63), 9]),
        offsets=torch.arange(9) * 2**33,
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [40, 1000, 5003])
def test_penalties_and_mask(columns, dtype):
    logits = problem(5, columns, dtype, 4)
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(-1, 4, (5, columns), generator=generator, dtype=torch.int32)
    prompt, allowed = masked(5, columns, 0.3), masked(5, columns, 0.5, 1)
    penalties = {
        "repetition_penalties": torch.tensor([1.0, 1.3, 0.7, 2.0, 1.1]),
        "presence_penalties": torch.tensor([0.0, 0.5, -0.5, 1.5, 0.1]),
        "frequency_penalties": torch.tensor([0.2, 0.0, -0.3, 1.5, 0.7]),
    }
    for given in (
        {"allowed": allowed},
        {"counts": counts, **penalties},
        {"prompt": prompt, **penalties},
        {"counts": counts, "prompt": prompt, "allowed": allowed, **penalties},
        {"counts": counts, "repetition_penalty": 1.2, "presence_penalty": 0.3},
        {"counts": counts, "frequency_penalty": 0.05, "allowed": allowed},
        penalties,
    ):
        check(logits, temperature=0.0, **given)
        check(logits, **given)
        check(logits, top_k=9, top_p=0.8, **given)


def test_unaligned_and_strided_rows():
    for dtype in FLOATS:
        base = problem(1, 3 * 2007 + 5, dtype, 6)[0]
        for begin, columns in ((0, 2000), (1, 2000), (3, 2007), (5, 1999)):
            logits = base[begin : begin + 3 * 2007].view(3, 2007)[:, :columns]
            for given in ({"temperature": 0.0}, {}, {"top_k": 5}):
                check(logits, **given)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("given", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}])
def test_special_values(given, dtype):
    inf, nan = float("inf"), float("nan")
    logits = problem(7, 2500, dtype, 7)
    logits[0, 17] = nan
    logits[1] = -inf
    logits[2, :2400] = -inf
    logits[3, [4, 2000]] = inf
    logits[4, 1:] = -inf
    logits[5, 3], logits[5, 9] = nan, inf
    tokens = check(logits, **given)
    assert tokens[[0, 1, 5]].tolist() == [-1, -1, -1] and tokens[4] == 0
    assert tokens[2] >= 2400 and tokens[3] in (4, 2000)
    nothing = torch.zeros(7, 79, dtype=torch.int32)
    assert check(logits, allowed=nothing, **given).tolist() == [-1] * 7


def test_rows_do_not_depend_on_the_batch():
    """Other numbers of blocks share a row where there are more rows."""
    for dtype in (F32, BF16):
        logits = problem(1, 20_000, dtype, 8).repeat(200, 1)
        seeds, offsets = torch.full((200,), 11), torch.full((200,), 3)
        for given in ({}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.01}):
            alone = run(logits[:1], seeds=seeds[:1], offsets=offsets[:1], **given)
            many = run(logits, seeds=seeds, offsets=offsets, **given)
            for one, all_ in zip(alone, many, strict=True):
                assert (all_ == one).all()


def test_seed_of_all_rows():
    logits = torch.zeros(500, 1000)
    tokens = check(logits, seed=4)
    assert len(set(tokens.tolist())) > 300  # rows differ by their place
    assert not torch.equal(tokens, check(logits, seed=5))
    assert not torch.equal(tokens, check(logits, seed=4, offset=1))


def test_distribution():
    """Chi-square of draws with consecutive offsets, at a fixed seed."""
    draws, columns = 4000, 12
    row = torch.linspace(-2, 1, columns)
    logits = row.repeat(draws, 1)
    offsets, seeds = torch.arange(draws), torch.full((draws,), 77)
    for given, kept in (({}, 12), ({"top_k": 5}, 5), ({"top_p": 0.6}, 4), ({"min_p": 0.3}, 5)):
        tokens, _ = run(logits, seeds=seeds, offsets=offsets, **given)
        due = torch.softmax(
            row.double().masked_fill(torch.arange(columns) < columns - kept, -1e9), 0
        )
        counts = torch.bincount(tokens.long(), minlength=columns)
        assert not counts[: columns - kept].any()
        expected = due[columns - kept :] * draws
        statistic = ((counts[columns - kept :] - expected).square() / expected).sum()
        assert statistic < kept - 1 + 4 * (2 * (kept - 1)) ** 0.5


@pytest.mark.parametrize("order", [1, 2])
def test_any_order_of_warps(order):
    from support.emulator import options

    logits = problem(2, 40_000, BF16, 9)
    with options(seed=order):
        for given in ({"temperature": 0.0}, {}, {"top_k": 30, "top_p": 0.9}):
            check(logits, **given)
