# SPDX-License-Identifier: Apache-2.0
"""topk_softmax with experts of a table, run by the emulator, against the reference and float64."""

import pytest
import torch
from support.emulator import sm90
from support.near import BF16, F32, FLOATS

from tiercel import ref

INF, NAN = float("inf"), float("nan")
SCORING = ["softmax", "sigmoid", "sqrtsoftplus"]


def problem(rows, experts, k, tokens=50, dtype=F32, wide=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = (3 * torch.randn(rows, experts, generator=generator)).to(dtype)
    table = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :k].int()
    ids = torch.randint(tokens, (rows,), generator=generator)
    return scores, ids if wide else ids.int(), table.contiguous()


def run(scores, ids, table, n_shared=0, *, index=torch.int32, aligned=(), **given):
    given = {"softmax_first": True, "renormalize": False, "scoring": "softmax"} | given
    softmax = (given["softmax_first"], given["renormalize"], index)
    rest = (given["scoring"], given.get("scaling_factor", 1.0), n_shared)
    first = (scores, ids, table, table.shape[1] + n_shared)
    if aligned:
        return sm90("hash_route_align")(*first, *aligned, *softmax, *rest, False, False, None)
    return sm90("hash_route")(*first, *softmax, *rest, None)


def check(scores, ids, table, n_shared=0, *, index=torch.int32, **given):
    weights, indices = run(scores, ids, table, n_shared, index=index, **given)
    k = table.shape[1]
    options = {"token_ids": ids, "expert_table": table, "n_shared": n_shared, **given}
    due, order = ref.topk_softmax(scores, k, indices_dtype=index, **options)
    assert torch.equal(indices, order) and indices.dtype == index
    torch.testing.assert_close(weights, due, rtol=5e-6, atol=1e-7, equal_nan=True)
    exact, _ = ref.topk_softmax(scores.double(), k, **options)
    torch.testing.assert_close(weights.double(), exact, rtol=5e-6, atol=1e-7, equal_nan=True)
    return weights, indices


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize(("experts", "k"), [(256, 6), (384, 8), (7, 7), (1024, 32), (33, 1)])
def test_shapes(experts, k, scoring, dtype):
    for rows, wide in ((1, False), (9, True)):
        scores, ids, table = problem(rows, experts, k, dtype=dtype, wide=wide)
        for renormalize in (False, True):
            options = {"scoring": scoring, "renormalize": renormalize, "scaling_factor": 1.5}
            _, indices = check(scores, ids, table, **options)
            assert torch.equal(indices, table[ids.long()])
    if scoring == "softmax":
        check(scores, ids, table, softmax_first=False)


@pytest.mark.parametrize("scoring", SCORING)
def test_the_bits_of_a_selection(scoring):
    """The experts that topk_softmax selects, as a table, get its weights."""
    scores, _, _ = problem(20, 256, 8, dtype=BF16)
    for renormalize in (False, True):
        softmax = (True, renormalize, torch.int32)
        route = (None, scoring, 1, 1, 1.5, 0)
        weights, indices = sm90("topk_route")(scores, 8, *softmax, *route, None)
        options = {"scoring": scoring, "renormalize": renormalize, "scaling_factor": 1.5}
        got, _ = run(scores, torch.arange(20), indices, **options)
        assert torch.equal(got.view(torch.int32), weights.view(torch.int32))


@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize("renormalize", [False, True])
def test_what_is_no_expert_has_no_weight(scoring, renormalize):
    scores, ids, table = problem(6, 16, 4, wide=True)
    ids[0], ids[1], ids[2] = -1, 50, 2**32
    table[ids[3], 1], table[ids[4]] = 16, torch.tensor([-1, 3, 3, -(2**31)], dtype=torch.int32)
    options = {"scoring": scoring, "renormalize": renormalize}
    weights, indices = check(scores, ids, table, 1, **options)
    assert (indices[:3, :4] == -1).all() and (weights[:3, :4] == 0).all()
    assert indices[3, 1] == -1 and weights[3, 1] == 0
    assert indices[4].tolist() == [-1, 3, 3, -1, 16] and (weights[:, 4] == 1).all()
    if renormalize:
        torch.testing.assert_close(weights[3:, :4].sum(-1), torch.ones(3))


def test_a_table_without_tokens():
    scores, ids, table = problem(3, 16, 4)
    weights, indices = check(scores, ids, table[:0], scoring="sqrtsoftplus", renormalize=True)
    assert (indices == -1).all() and (weights == 0).all()


@pytest.mark.parametrize("scoring", SCORING)
def test_special_values(scoring):
    scores, ids, table = problem(5, 16, 4)
    scores[0, 3], scores[1, int(table[ids[1], 2])] = NAN, NAN
    scores[2], scores[3, 5], scores[4, int(table[ids[4], 0])] = -INF, INF, -INF
    for renormalize in (False, True):
        check(scores, ids, table, scoring=scoring, renormalize=renormalize)


def test_strides_and_indices():
    base, ids, table = problem(12, 700, 6, dtype=BF16)
    for view in (base[:, 3:259], base[:6, :512:2], base[:, :12].t()):
        some = table % view.shape[1]
        check(view, ids[: len(view)], some, index=torch.int64, scoring="sigmoid")
        check(view, ids[: len(view)], some)


@pytest.mark.parametrize(
    ("tokens", "experts", "n_shared"), [(1, 256, 1), (17, 60, 0), (40, 384, 1)]
)
def test_aligned(tokens, experts, n_shared):
    scores, ids, table = problem(tokens, experts, 6, dtype=BF16)
    ids[0], table[ids[-1], 2] = -5, experts
    generator = torch.Generator().manual_seed(2)
    expert_map = torch.randperm(experts + n_shared, generator=generator).int() - 5
    options = {"renormalize": True, "scoring": "sqrtsoftplus", "scaling_factor": 1.5}
    for given in (None, expert_map.clamp(min=-1)):
        weights, *rest = run(scores, ids, table, n_shared, aligned=(16, given), **options)
        named = {"token_ids": ids, "expert_table": table, "n_shared": n_shared, **options}
        due, *exact = ref.topk_softmax_align(scores, 6, 16, given, **named)
        torch.testing.assert_close(weights, due, rtol=5e-6, atol=1e-7)
        for one, other in zip(rest, exact, strict=True):
            assert torch.equal(one, other)
