# SPDX-License-Identifier: Apache-2.0
"""topk_softmax's general kernel, run by the emulator, against the reference and float64."""

import math

import pytest
import torch
from support.emulator import kernels, sm90
from support.near import BF16, F32, FLOATS
from support.truth import selected

import tiercel
from tiercel import ref

INF, NAN = math.inf, math.nan
SCORING = ["softmax", "sigmoid", "sqrtsoftplus"]
# E, k, n_group, topk_group: DeepSeek-V3, -V2, Kimi-K2, -K3, and odd ones.
SHAPES = [
    (256, 8, 8, 4),
    (160, 6, 8, 3),
    (384, 8, 1, 1),
    (896, 16, 1, 1),
    (1024, 32, 32, 32),
    (60, 4, 4, 2),
    (96, 5, 3, 2),
    (7, 7, 1, 1),
    (20, 3, 20, 5),
]


def problem(rows, experts, dtype=F32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(rows, experts, generator=generator)
    return scores.to(dtype), 0.3 * torch.randn(experts, generator=generator)


def run(scores, k, n_shared=0, *, index=torch.int32, bias=None, **given):
    given = {"softmax_first": True, "renormalize": False, "scoring": "softmax"} | given
    given = {"n_group": 1, "topk_group": 1, "scaling_factor": 1.0} | given
    route = sm90("topk_route")
    return route(
        scores,
        k + n_shared,
        given["softmax_first"],
        given["renormalize"],
        index,
        bias,
        given["scoring"],
        given["n_group"],
        given["topk_group"],
        given["scaling_factor"],
        n_shared,
        None,
    )


def check(scores, k, n_shared=0, *, index=torch.int32, bias=None, **given):
    weights, indices = run(scores, k, n_shared, index=index, bias=bias, **given)
    due, order = ref.topk_softmax(
        scores, k, indices_dtype=index, n_shared=n_shared, correction_bias=bias, **given
    )
    assert torch.equal(indices, order)
    torch.testing.assert_close(weights, due, rtol=5e-6, atol=1e-7, equal_nan=True)
    return weights, indices


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize(("experts", "k", "n_group", "topk_group"), SHAPES)
def test_shapes(experts, k, n_group, topk_group, scoring, dtype):
    scores, bias = problem(5, experts, dtype)
    for given in (None, bias):
        for renormalize in (False, True):
            options = {"n_group": n_group, "topk_group": topk_group, "renormalize": renormalize}
            options |= {"scoring": scoring, "bias": given, "scaling_factor": 2.5}
            weights, indices = check(scores, k, **options)
            selected(scores, weights, indices, **options)


def test_shared_experts():
    scores, bias = problem(3, 256, BF16)
    for n_shared in (1, 3, 24):
        for index in (torch.int32, torch.int64):
            options = {"scoring": "sigmoid", "bias": bias, "scaling_factor": 2.5, "index": index}
            weights, indices = check(scores, 8, n_shared, renormalize=True, **options)
            assert indices[:, 8:].tolist() == [list(range(256, 256 + n_shared))] * 3
            assert (weights[:, 8:] == 1).all()


def test_softmax_after_the_choice():
    scores, bias = problem(4, 300, BF16)
    for given in (None, bias):
        check(scores, 20, softmax_first=False, bias=given)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scoring", SCORING)
def test_ties_take_the_lowest_index_and_group(scoring, dtype):
    generator = torch.Generator().manual_seed(1)
    scores = torch.randint(-2, 3, (9, 64), generator=generator).to(dtype)
    scores[0] = 0.0
    scores[1, ::2] = -0.0
    scores[1, 1::2] = 0.0
    bias = torch.randint(0, 2, (64,), generator=generator).float()
    for given in (None, bias, torch.zeros(64)):
        for groups in ((1, 1), (8, 3)):
            options = {"n_group": groups[0], "topk_group": groups[1], "scoring": scoring}
            _, indices = check(scores, 16, bias=given, **options)
            if given is not bias:
                assert indices[0].tolist() == list(range(16))


@pytest.mark.parametrize("experts", [256, 384, 700])
def test_scores_that_differ_in_their_last_bits(experts):
    """Keys lack these; a choice that could depend on them is repeated with all bits."""
    generator = torch.Generator().manual_seed(2)
    bits = torch.stack([torch.randperm(experts, generator=generator) for _ in range(6)]).int()
    near = (bits + 0x3F800000).view(F32)
    near[2:] = near[2:].where(bits[2:] > experts // 2, -near[2:])
    near[4, bits[4] >= experts - 8] = 2.0  # equal ones at the top
    near[5, bits[5] >= experts - 7] += 1.0  # alike below the seventh
    for k in (1, 7, 8, 20):
        check(near, k, scoring="sigmoid")
        check(torch.full_like(near, -100.0), k, scoring="sigmoid", bias=near[k % 6])


@pytest.mark.parametrize("scoring", SCORING)
def test_special_values(scoring):
    rows = [
        [NAN, 1.0, 2.0, 3.0],
        [1.0, NAN, INF, -NAN],
        [INF, -INF, INF, 0.0],
        [-INF, -INF, -INF, -INF],
        [-INF, 1.0, -INF, 0.0],
        [-100.0, -90.0, -200.0, -66.0],
        [88.0, 1e4, -1e4, 3e38],
    ]
    scores = torch.tensor([row + [-2.0] * 36 for row in rows])
    bias = 0.1 * torch.arange(40.0)
    for given in (None, bias):
        for groups in ((1, 1), (4, 2)):
            for renormalize in (False, True):
                options = {"n_group": groups[0], "topk_group": groups[1], "bias": given}
                check(scores, 4, scoring=scoring, renormalize=renormalize, **options)
    strange = torch.tensor([0.0, NAN, INF, -INF] * 10)
    check(torch.zeros(2, 40), 6, scoring=scoring, bias=strange)


def test_rows_of_zeros_get_no_weight():
    scores = torch.full((1, 8), -INF)
    weights, indices = check(scores, 3, scoring="sigmoid", renormalize=True)
    assert weights.tolist() == [[0, 0, 0]] and indices.tolist() == [[0, 1, 2]]


def test_strides_and_alignment():
    base, bias = problem(12, 700, BF16)
    for view in (
        base[:, :256],
        base[:, 3:259],
        base[:, 2:258],
        base[::2, :512:2],
        base[:, :12].t(),
    ):
        n_group = 4 if view.shape[1] % 4 == 0 else 1
        for offset in (0, 1):
            given = bias[offset : offset + view.shape[1]]
            check(view, 4, scoring="sigmoid", bias=given, n_group=n_group, topk_group=n_group)
            check(view, 3, scoring="sigmoid", bias=given, n_group=n_group, topk_group=1)


@pytest.mark.parametrize(("experts", "k"), [(513, 3), (1000, 17), (64, 32)])
def test_topk_softmax_itself(experts, k):
    scores, _ = problem(6, experts)
    weights, indices = torch.empty(6, k), torch.empty(6, k, dtype=torch.int32)
    for first, renormalize in ((True, False), (True, True), (False, False)):
        kernels.topk_softmax(scores, weights, indices, first, renormalize)
        due, order = ref.topk_softmax(scores, k, softmax_first=first, renormalize=renormalize)
        assert torch.equal(indices, order)
        torch.testing.assert_close(weights, due, rtol=5e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("tokens", "experts", "k", "n_group", "topk_group", "n_shared"),
    [(1, 256, 8, 8, 4, 1), (16, 60, 4, 1, 1, 2), (17, 896, 16, 1, 1, 1), (40, 384, 8, 1, 1, 0)],
)
def test_aligned(tokens, experts, k, n_group, topk_group, n_shared):
    scores, bias = problem(tokens, experts, BF16)
    generator = torch.Generator().manual_seed(2)
    expert_map = torch.randperm(experts + n_shared, generator=generator).int() - 5
    options = {"renormalize": True, "scoring": "sigmoid", "n_group": n_group}
    options |= {"topk_group": topk_group, "scaling_factor": 2.5, "n_shared": n_shared}
    softmax = (True, True, torch.int32)
    route = (bias, "sigmoid", n_group, topk_group, 2.5, n_shared)
    for given in (None, expert_map.clamp(min=-1)):
        for ignore in (False, True):
            arguments = (scores, k + n_shared, 16, given, *softmax, *route, False, ignore, None)
            weights, *rest = sm90("topk_route_align")(*arguments)
            due, *exact = ref.topk_softmax_align(
                scores, k, 16, given, correction_bias=bias, ignore_invalid_experts=ignore, **options
            )
            torch.testing.assert_close(weights, due, rtol=5e-6, atol=1e-7)
            for one, other in zip(rest, exact, strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize(("tokens", "k"), [(3, 20), (20, 4)])
def test_topk_softmax_align_itself(tokens, k):
    scores, _ = problem(tokens, 700)
    arguments = (scores, k, 16, None, True, True, torch.int32, False, False, None)
    weights, *rest = sm90("topk_softmax_align")(*arguments)
    due, *exact = ref.topk_softmax_align(scores, k, 16, renormalize=True)
    torch.testing.assert_close(weights, due, rtol=5e-6, atol=1e-7)
    for one, other in zip(rest, exact, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("ids", [(300, 4), (1500, 4), (3000, 4), (8000, 4)])
def test_moe_align_block_size_of_many_experts(ids):
    """One kernel for each number of ids per thread, and the pair."""
    generator = torch.Generator().manual_seed(3)
    topk_ids = torch.randint(-3, 1000, ids, generator=generator)
    got = sm90("moe_align_block_size")(topk_ids, 16, 990, None, False, False, None)
    due = ref.moe_align_block_size(topk_ids, 16, 990)
    for one, other in zip(got, due, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("experts", "k"), [(8, 2), (60, 6), (128, 8), (200, 7), (512, 5), (512, 12)]
)
def test_batch_invariant_weights(experts, k):
    """In the mode those of many rows, of few, and of topk_softmax_align have the same bits."""
    scores, _ = problem(1100, experts, BF16)

    def weights_of(rows, renormalize):
        weights, indices = torch.empty(len(rows), k), torch.empty(len(rows), k, dtype=torch.int32)
        kernels.topk_softmax(rows, weights, indices, True, renormalize)
        return weights

    for given in ({"renormalize": True}, {"renormalize": False}):
        with tiercel.batch_invariant():
            many, few = (weights_of(rows, **given) for rows in (scores, scores[:3]))
            arguments = (scores[:100], k, 16, None, True, given["renormalize"], torch.int32)
            aligned, *_ = sm90("topk_softmax_align")(*arguments, False, False, None)
        assert torch.equal(many[:3], few) and torch.equal(many[:100], aligned)
        torch.testing.assert_close(many, weights_of(scores, **given), rtol=5e-6, atol=1e-7)
