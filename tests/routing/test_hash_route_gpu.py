# SPDX-License-Identifier: Apache-2.0
"""topk_softmax with experts of a table, on an H100 or H200."""

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCORING = ["softmax", "sigmoid", "sqrtsoftplus"]


def problem(rows, experts, k, dtype=torch.float32, tokens=129_280, seed=0):
    """A few tokens and experts out of range."""
    generator = torch.Generator("cuda").manual_seed(seed)
    options = {"device": "cuda", "generator": generator}
    scores = (3 * torch.randn(rows, experts, **options)).to(dtype)
    table = torch.randint(-1, experts + 1, (tokens, k), **options).int()
    ids = torch.randint(-2, tokens + 2, (rows,), **options)
    return scores, {"token_ids": ids, "expert_table": table}


def check(scores, k, **given):
    weights, indices = tiercel.topk_softmax(scores, k, **given)
    due, order = tiercel.topk_softmax(scores, k, backend="ref", **given)
    assert torch.equal(indices, order)
    torch.testing.assert_close(weights, due, rtol=1e-5, atol=1e-7, equal_nan=True)
    return weights, indices


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize(("experts", "k"), [(256, 6), (384, 8), (33, 1), (1024, 30)])
def test_shapes(experts, k, scoring, dtype):
    for rows in (1, 5, 3000):
        scores, table = problem(rows, experts, k, dtype, tokens=500, seed=rows)
        for renormalize in (False, True):
            options = {"scoring": scoring, "renormalize": renormalize, "scaling_factor": 1.5}
            check(scores, k, n_shared=1, **options, **table)
            table["token_ids"] = table["token_ids"].int()


def test_the_bits_of_a_selection():
    scores, _ = problem(3000, 256, 8, torch.bfloat16)
    for scoring in SCORING:
        options = {"scoring": scoring, "renormalize": True, "scaling_factor": 1.5}
        weights, indices = tiercel.topk_softmax(scores, 8, **options)
        table = {"token_ids": torch.arange(3000, device="cuda"), "expert_table": indices}
        got, same = tiercel.topk_softmax(scores, 8, **options, **table)
        assert torch.equal(got, weights) and torch.equal(same, indices)


@pytest.mark.sanitize
@pytest.mark.parametrize("tokens", [0, 1, 17, 128, 300])
def test_aligned(tokens):
    scores, table = problem(tokens, 256, 6, torch.bfloat16)
    options = {"renormalize": True, "scoring": "sqrtsoftplus", "n_shared": 1, **table}
    weights, indices, *lists = tiercel.topk_softmax_align(scores, 6, 64, **options)
    alone = tiercel.topk_softmax(scores, 6, **options)
    assert torch.equal(weights, alone[0]) and torch.equal(indices, alone[1])
    due = tiercel.moe_align_block_size(indices, 64, 257, backend="ref")
    for one, other in zip(lists, due, strict=True):
        assert torch.equal(one, other)


def test_rows_do_not_depend_on_the_batch():
    scores, table = problem(4000, 256, 6, torch.bfloat16)
    options = {"scoring": "sqrtsoftplus", "renormalize": True}
    weights, indices = tiercel.topk_softmax(scores, 6, **options, **table)
    for rows in (1, 3, 129, 1000):
        some = table | {"token_ids": table["token_ids"][:rows]}
        got = tiercel.topk_softmax(scores[:rows], 6, **options, **some)
        assert torch.equal(got[0], weights[:rows]) and torch.equal(got[1], indices[:rows])


def test_gradients_and_graph():
    scores, table = problem(64, 256, 6)
    options = {"scoring": "sqrtsoftplus", "renormalize": True, **table}
    pull, found = torch.randn(64, 6, device="cuda"), []
    for backend in ("sm90", "ref"):
        x = scores.clone().requires_grad_()
        weights, _ = tiercel.topk_softmax(x, 6, backend=backend, **options)
        found.append(torch.autograd.grad((weights * pull).sum(), x)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = tiercel.topk_softmax_align(scores, 6, 64, **options)
    table["token_ids"].random_(0, 129_280)
    graph.replay()
    due = tiercel.topk_softmax_align(scores, 6, 64, **options)
    assert all(map(torch.equal, results, due))
