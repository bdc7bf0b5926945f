# SPDX-License-Identifier: Apache-2.0
"""topk_softmax with other scores, a bias, groups and shared experts, on an H100 or H200."""

import pytest
import torch
from support.truth import selected

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCORING = ["softmax", "sigmoid", "sqrtsoftplus"]
SHAPES = [
    (256, 8, 8, 4),
    (160, 6, 8, 3),
    (128, 8, 1, 1),
    (384, 8, 1, 1),
    (896, 16, 1, 1),
    (1024, 32, 32, 8),
    (60, 4, 4, 2),
    (96, 5, 3, 2),
]


def problem(rows, experts, dtype=torch.float32, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    scores = 3 * torch.randn(rows, experts, device="cuda", generator=generator)
    return scores.to(dtype), 0.3 * torch.randn(experts, device="cuda", generator=generator)


def check(scores, k, **given):
    weights, indices = tiercel.topk_softmax(scores, k, **given)
    due, order = tiercel.topk_softmax(scores, k, backend="ref", **given)
    assert torch.equal(indices, order)
    torch.testing.assert_close(weights, due, rtol=1e-5, atol=1e-7, equal_nan=True)
    return weights, indices


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize(("experts", "k", "n_group", "topk_group"), SHAPES)
def test_shapes(experts, k, n_group, topk_group, scoring, dtype):
    """The reference's choice, element for element, and right in float64."""
    for rows in (1, 5, 3000):
        scores, bias = problem(rows, experts, dtype, rows)
        for given in (None, bias):
            options = {"n_group": n_group, "topk_group": topk_group, "scoring": scoring}
            for renormalize in (False, True):
                options |= {"renormalize": renormalize, "scaling_factor": 2.5}
                weights, indices = check(scores, k, correction_bias=given, **options)
                selected(scores, weights, indices, bias=given, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scoring", SCORING)
def test_ties(scoring, dtype):
    scores, _ = problem(3000, 128, dtype)
    scores = scores.round()
    bias = torch.randint(0, 2, (128,), device="cuda").float()
    for given in (None, bias, torch.zeros_like(bias)):
        for groups in ((1, 1), (8, 3)):
            options = {"n_group": groups[0], "topk_group": groups[1], "scoring": scoring}
            check(scores, 16, correction_bias=given, **options)


@pytest.mark.sanitize
@pytest.mark.parametrize("scoring", SCORING)
def test_special_values(scoring):
    scores, bias = problem(300, 64)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, -100.0, 90.0])
    chosen = special[torch.randint(7, (300, 64))].cuda()
    scores = torch.where(torch.rand(300, 64, device="cuda") < 0.1, chosen, scores)
    scores[0] = -torch.inf
    for given in (None, bias):
        for groups in ((1, 1), (4, 2)):
            for renormalize in (False, True):
                options = {"n_group": groups[0], "topk_group": groups[1], "scoring": scoring}
                check(scores, 6, correction_bias=given, renormalize=renormalize, **options)


@pytest.mark.sanitize
def test_shared_experts_strides_and_indices():
    base, bias = problem(50, 700, torch.bfloat16)
    views = (base[:, :256], base[:, 3:259], base[::2, :512:2], base[:, :48].t())
    for scores in views:
        for index in (torch.int32, torch.int64):
            given = {"correction_bias": bias[1 : scores.shape[1] + 1], "indices_dtype": index}
            check(scores, 8, scoring="sigmoid", n_shared=2, renormalize=True, **given)


@pytest.mark.sanitize
@pytest.mark.parametrize(("experts", "k"), [(513, 3), (1024, 32), (64, 17)])
def test_topk_softmax_of_large_sizes(experts, k):
    for dtype in DTYPES:
        scores, _ = problem(300, experts, dtype)
        for first, renormalize in ((True, False), (True, True), (False, False)):
            check(scores, k, softmax_first=first, renormalize=renormalize)


@pytest.mark.sanitize
@pytest.mark.parametrize("tokens", [0, 1, 17, 128, 300])
@pytest.mark.parametrize(
    ("experts", "k", "n_group", "topk_group", "n_shared"),
    [(256, 8, 8, 4, 1), (60, 4, 1, 1, 2), (896, 16, 1, 1, 1), (512, 8, 1, 1, 1)],
)
def test_aligned(tokens, experts, k, n_group, topk_group, n_shared):
    scores, bias = problem(tokens, experts, torch.bfloat16)
    options = {"renormalize": True, "scoring": "sigmoid", "n_group": n_group}
    options |= {"topk_group": topk_group, "scaling_factor": 2.5, "n_shared": n_shared}
    options["correction_bias"] = bias
    weights, indices, *lists = tiercel.topk_softmax_align(scores, k, 64, **options)
    alone = tiercel.topk_softmax(scores, k, **options)
    assert torch.equal(weights, alone[0]) and torch.equal(indices, alone[1])
    due = tiercel.moe_align_block_size(indices, 64, experts + n_shared, backend="ref")
    for one, other in zip(lists, due, strict=True):
        assert torch.equal(one, other)


def test_rows_do_not_depend_on_the_batch():
    scores, bias = problem(4000, 256, torch.bfloat16)
    options = {"scoring": "sigmoid", "correction_bias": bias, "n_group": 8, "topk_group": 4}
    weights, indices = tiercel.topk_softmax(scores, 8, **options)
    for rows in (1, 3, 129, 1000):
        got = tiercel.topk_softmax(scores[:rows], 8, **options)
        assert torch.equal(got[0], weights[:rows]) and torch.equal(got[1], indices[:rows])


def test_gradients():
    scores, bias = problem(50, 64)
    options = {"scoring": "sigmoid", "correction_bias": bias, "renormalize": True}
    pull, found = torch.randn(50, 8, device="cuda"), []
    for backend in ("sm90", "ref"):
        x = scores.clone().requires_grad_()
        weights, _ = tiercel.topk_softmax(x, 8, backend=backend, **options)
        found.append(torch.autograd.grad((weights * pull).sum(), x)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_graph():
    scores, bias = problem(64, 256, torch.bfloat16)
    options = {"scoring": "sigmoid", "correction_bias": bias, "n_group": 8, "topk_group": 4}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = tiercel.topk_softmax_align(scores, 8, 64, **options)
    scores.copy_(problem(64, 256, torch.bfloat16, 1)[0])
    graph.replay()
    for one, other in zip(
        results, tiercel.topk_softmax_align(scores, 8, 64, **options), strict=True
    ):
        assert torch.equal(one, other)
