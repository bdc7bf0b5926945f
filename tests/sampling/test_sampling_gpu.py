# SPDX-License-Identifier: Apache-2.0
"""sample on an H100 or H200, against float64 with the same random numbers."""

import pytest
import torch

import tiercel
from tiercel import ref

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
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


def problem(rows, columns, dtype=torch.float32, seed=0, factor=3.0):
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = factor * torch.randn(rows, columns, device="cuda", generator=generator)
    return logits.to(dtype)


def check(logits, strays=0, **given):
    """Few rows may differ: where the random number or a threshold is within a rounding."""
    tokens, logprobs = tiercel.sample(logits, return_logprobs=True, **given)
    alone = tiercel.sample(logits, indices_dtype=torch.int64, **given)
    assert torch.equal(alone, tokens.long())
    due, due_logprobs = ref.sample(logits, return_logprobs=True, **given)
    same = tokens == due
    assert int((~same).sum()) <= strays, (tokens[~same], due[~same])
    torch.testing.assert_close(
        logprobs[same], due_logprobs[same], rtol=1e-5, atol=1e-5, equal_nan=True
    )
    return tokens


def masked(rows, columns, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (rows, (columns + 31) // 32)
    return torch.randint(-(2**31), 2**31, shape, device="cuda", generator=generator).int()


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 7, 1000, 1025, 5003])
def test_short_rows(columns, dtype):
    logits = problem(5, columns, dtype)
    for seed, given in enumerate(FILTERS):
        check(logits, seed=seed, **given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns"),
    [(1, 32_000), (64, 32_000), (1, 128_256), (33, 128_256), (70, 50_257), (300, 151_936)]
    + [(2, 262_144), (40, 262_144), (1, 400_000)],
)
def test_vocabularies(rows, columns, dtype):
    logits = problem(rows, columns, dtype)
    for seed, given in enumerate(FILTERS):
        check(logits, strays=rows // 100, seed=seed, **given)


@pytest.mark.parametrize(
    ("rows", "columns", "padding", "dtype"),
    [
        pytest.param(300, 14_003, 5, torch.bfloat16, marks=pytest.mark.sanitize),
        pytest.param(33, 128_256, 0, torch.bfloat16, marks=pytest.mark.sanitize),
        (1000, 50_257, 7, torch.bfloat16),
        (150, 128_256, 0, torch.float32),
    ],
)
def test_rows_without_filters_are_streamed(rows, columns, padding, dtype):
    """Blocks stay for several rows; tokens and log-probabilities are those of a few rows alone."""
    inf, nan = float("inf"), float("nan")
    logits = problem(rows, columns + padding, dtype, 3)[:, :columns]
    for some in (logits[:5], logits[-5:]):  # greedy and not
        some[0, 17], some[1], some[2, 1:] = nan, -inf, -inf
        some[3, [4, 2000, columns - 1]] = inf
        some[4] = 1.0
    temperature = torch.linspace(-0.2, 2.0, rows, device="cuda")
    seeds = torch.arange(rows, device="cuda")
    for _ in range(3):
        tokens, logprobs = tiercel.sample(
            logits, temperature=temperature, seed=seeds, return_logprobs=True
        )
        for begin in range(0, rows, 10):
            part = slice(begin, begin + 10)
            few, few_logprobs = tiercel.sample(
                logits[part], temperature=temperature[part], seed=seeds[part], return_logprobs=True
            )
            assert torch.equal(tokens[part], few)
            assert torch.equal(logprobs[part].view(torch.int32), few_logprobs.view(torch.int32))


@pytest.mark.parametrize(
    ("rows", "columns", "padding"),
    [
        pytest.param(106, 147_003, 5, marks=pytest.mark.sanitize),
        (256, 151_936, 0),
        (132, 262_144, 0),
        (250, 524_287, 1),
    ],
)
def test_long_rows_with_top_k_are_streamed(rows, columns, padding):
    """Rows of all kinds in one call: tokens and log-probabilities are those of a few rows alone."""
    inf, nan = float("inf"), float("nan")
    logits = problem(rows, columns + padding, torch.bfloat16, 3)[:, :columns]
    logits[7, 17], logits[8], logits[9, 1:] = nan, -inf, -inf
    logits[10, [4, 2000, columns - 1]] = inf
    logits[11:15] = 1.0
    logits[15:20] /= 8
    logits[20, -3:] = 99.0

    def each(*values):
        return torch.tensor(values, device="cuda").repeat(rows)[:rows]

    given = {
        "temperature": each(1.0, 0.7, 1.5, 0.0, 1.0, 0.3, 1.0),
        "top_p": each(0.9, 1.0, 0.5),
        "min_p": each(0.0, 0.0, 0.0, 0.02),
        "seed": torch.arange(rows, device="cuda"),
    }
    for top_k in (50, 3, 64):
        tokens, logprobs = tiercel.sample(logits, top_k=top_k, **given, return_logprobs=True)
        for begin in range(0, rows, 7):
            part = slice(begin, begin + 7)
            few, few_logprobs = tiercel.sample(
                logits[part],
                top_k=top_k,
                **{name: x[part] for name, x in given.items()},
                return_logprobs=True,
            )
            assert torch.equal(tokens[part], few)
            assert torch.equal(logprobs[part].view(torch.int32), few_logprobs.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shift", "factor"), [(0, 3.0), (0, 0.1), (20, 3.0), (-20, 3.0), (9, 1.0)])
def test_top_p_of_16_bit_numbers(shift, factor, dtype):
    """The threshold among few and many numbers, above and below zero, which has two signs."""
    logits = (problem(40, 128_256, torch.float32, 5, factor) + shift).to(dtype)
    logits[1:3, ::7], logits[1:3, ::5] = 0.0, -0.0
    logits[2] -= logits[2].max()
    logits[3, 100:128_000] = -float("inf")
    for top_p in (0.3, 0.9, 0.99):
        check(logits, strays=1, top_p=top_p, seed=3)


@pytest.mark.parametrize("columns", [3001, 32_000, 128_256])
@pytest.mark.parametrize("factor", [3.0, 5.0])
def test_top_p_that_ends_among_the_largest(factor, columns):
    """The estimate by every 16th token may end before the threshold."""
    logits = problem(500, columns, torch.bfloat16, 9, factor)
    for top_p in (0.8, 0.85, 0.9, 0.95):
        check(logits, strays=5, top_p=top_p, seed=2)


@pytest.mark.parametrize("factor", [0.0, 0.01, 1.0, 30.0])
def test_flat_and_steep_logits(factor):
    for dtype in (torch.float32, torch.bfloat16):
        logits = problem(40, 128_256, dtype, 1, factor)
        for seed, given in enumerate(FILTERS):
            check(logits, strays=1, seed=seed, **given)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1003, 40_000])
def test_penalties_and_mask(columns, dtype):
    logits = problem(6, columns, dtype, 2)
    counts = torch.randint(-1, 4, (6, columns), device="cuda", dtype=torch.int32)
    given = {
        "counts": counts,
        "prompt": masked(6, columns),
        "allowed": masked(6, columns, 1),
        "repetition_penalty": torch.rand(6, device="cuda") + 0.7,
        "presence_penalty": torch.rand(6, device="cuda"),
        "frequency_penalty": 0.3,
    }
    for filters in FILTERS:
        check(logits, **given, **filters)
        check(logits, allowed=given["allowed"], **filters)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}])
def test_special_values(given, dtype):
    inf, nan = float("inf"), float("nan")
    logits = problem(6, 70_000, dtype, 7)
    logits[0, 17] = nan
    logits[1] = -inf
    logits[2, :69_000] = -inf
    logits[3, [4, 2000]] = inf
    logits[4, 1:] = -inf
    logits[5, 3], logits[5, 9] = nan, inf
    tokens = check(logits, **given).tolist()
    assert [tokens[i] for i in (0, 1, 4, 5)] == [-1, -1, 0, -1]
    assert tokens[2] >= 69_000 and tokens[3] in (4, 2000)


def test_greedy_is_argmax():
    for dtype in DTYPES:
        logits = problem(128, 128_256, dtype, 3)
        tokens = tiercel.sample(logits, temperature=0.0, indices_dtype=torch.int64)
        largest = logits.amax(-1, keepdim=True)
        places = torch.arange(128_256, device="cuda")
        assert torch.equal(tokens, torch.where(logits == largest, places, 2**31).amin(-1))


@pytest.mark.parametrize("given", [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.01}])
def test_rows_do_not_depend_on_the_batch(given):
    """Whatever the number of rows, and so of blocks for each."""
    for columns, dtype in ((32_000, torch.float32), (128_256, torch.bfloat16)):
        logits = problem(1, columns, dtype, 4)
        seed, offset = torch.tensor([17], device="cuda"), torch.tensor([3], device="cuda")
        due = tiercel.sample(logits, seed=seed, offset=offset, return_logprobs=True, **given)
        for rows in (2, 5, 64, 300, 1000):
            many = problem(rows, columns, dtype, rows)
            many[rows // 2] = logits[0]
            seeds = torch.arange(rows, device="cuda")
            seeds[rows // 2] = 17
            offsets = offset.expand(rows).contiguous()
            got = tiercel.sample(many, seed=seeds, offset=offsets, return_logprobs=True, **given)
            assert got[0][rows // 2] == due[0][0] and got[1][rows // 2] == due[1][0]


DRAWS = 200_000


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "given",
    [{}, {"temperature": 0.6}, {"top_k": 40}, {"top_p": 0.7}, {"min_p": 0.05}]
    + [{"top_k": 60, "top_p": 0.8, "temperature": 1.3}],
)
def test_distribution(given, dtype):
    """Chi-square over the kept tokens, at a fixed seed: five standard deviations."""
    row = problem(1, 100, dtype, 5, 1.0)
    logits = row.expand(DRAWS, -1)
    seeds = torch.full((DRAWS,), 1234, device="cuda")
    offsets = torch.arange(DRAWS, device="cuda")
    tokens = tiercel.sample(logits.contiguous(), seed=seeds, offset=offsets, **given)
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | given
    each = {n: torch.tensor([v], device="cuda") for n, v in options.items()}
    from tiercel.ops.sampling.reference import kept_weights

    weights = kept_weights(row.float(), **each)[0]
    expected = DRAWS * weights / weights.sum()
    counts = torch.bincount(tokens.long(), minlength=100)
    kept = weights > 0
    assert not counts[~kept].any()
    freedom = int(kept.sum()) - 1
    statistic = float(((counts - expected)[kept].square() / expected[kept]).sum())
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_rows_of_one_seed_are_independent():
    """The joint distribution of neighbouring rows, chi-square."""
    logits = torch.zeros(200_000, 8, device="cuda")
    tokens = tiercel.sample(logits, seed=99).long()
    pairs = torch.bincount(tokens[::2] * 8 + tokens[1::2], minlength=64).double()
    expected = len(tokens) / 2 / 64
    statistic = float(((pairs - expected).square() / expected).sum())
    assert abs(statistic - 63) < 5 * 126**0.5


def test_rare_tokens():
    """Improbable tokens at the end are drawn as often as they should be."""
    row = torch.zeros(10_000, device="cuda")
    row[9_000:] = -7.0
    logits = row.repeat(20_000, 1)
    expected = 400_000 * float(torch.softmax(row.double(), 0)[9_000:].sum())
    drawn = sum(int((tiercel.sample(logits, seed=seed) >= 9_000).sum()) for seed in range(20))
    assert abs(drawn - expected) < 5 * expected**0.5


def test_strided_and_unaligned_logits():
    base = problem(64, 3001)
    for logits in (base[:, :1000], base[:, 1:2000], base[::2], base.t()[:64, :64]):
        for given in FILTERS[:6]:
            check(logits, **given)


def test_graph_on_another_stream_without_waiting():
    """Captured in the first call; parameters and offsets change between replays."""
    logits = problem(16, 32_000, torch.bfloat16)
    given = {
        "temperature": torch.ones(16, device="cuda"),
        "top_k": torch.full((16,), 50, device="cuda", dtype=torch.int32),
        "seed": torch.arange(16, device="cuda"),
        "offset": torch.zeros(16, device="cuda", dtype=torch.int64),
    }
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        tokens = tiercel.sample(logits, **given)
    found = []
    for _ in range(3):
        graph.replay()
        found.append(tokens.clone())
        torch.cuda.set_sync_debug_mode("error")
        try:
            due = tiercel.sample(logits, **given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(tokens, due)
        given["offset"] += 1
        given["temperature"] *= 0.9
    assert not torch.equal(found[0], found[1])


def test_reproducible():
    logits = problem(100, 151_936, torch.bfloat16)
    for given in FILTERS:
        first = tiercel.sample(logits, seed=1, **given)
        for _ in range(3):
            assert torch.equal(tiercel.sample(logits, seed=1, **given), first)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 1000, 5003, 40_000])
def test_top_logprobs(columns, dtype):
    """Exact tokens, and beside them the bits of the same call without them."""
    logits = problem(6, columns, dtype, 6)
    counts = torch.randint(-1, 4, (6, columns), device="cuda", dtype=torch.int32)
    changes = {"counts": counts, "prompt": masked(6, columns), "allowed": masked(6, columns, 1)}
    changes |= {"repetition_penalty": 1.3, "presence_penalty": 0.2}
    for k, given in ((1, {"temperature": 0.0}), (20, {"top_p": 0.9}), (32, changes)):
        tokens, logprobs, best, of_best = tiercel.sample(logits, top_logprobs=k, **given)
        alone = tiercel.sample(logits, return_logprobs=True, **given)
        for one, other in zip(alone, (tokens, logprobs), strict=True):
            assert torch.equal(one.view(torch.int32), other.view(torch.int32))
        _, _, due, of_due = ref.sample(logits, top_logprobs=k, **given)
        assert torch.equal(best, due)
        torch.testing.assert_close(of_best, of_due, rtol=1e-5, atol=1e-5, equal_nan=True)
        found = (best == tokens[:, None]) & (tokens >= 0)[:, None]
        assert torch.equal(of_best[found], logprobs[found.any(-1)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 128_256), (200, 128_256), (40, 262_144)])
def test_top_logprobs_of_vocabularies(rows, columns, dtype):
    logits = problem(rows, columns, dtype)
    logits[0] = logits[0].round()  # ties
    _, _, best, of_best = tiercel.sample(logits, top_logprobs=20)
    _, _, due, of_due = ref.sample(logits, top_logprobs=20)
    assert torch.equal(best, due)
    torch.testing.assert_close(of_best, of_due, rtol=1e-5, atol=1e-5)
    one = tiercel.sample(logits[-1:], top_logprobs=20)
    assert torch.equal(one[2][0], best[-1]) and torch.equal(one[3][0], of_best[-1])
