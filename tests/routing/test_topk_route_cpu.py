# SPDX-License-Identifier: Apache-2.0
"""topk_softmax with other scores, a bias, groups and shared experts: definitions, on the CPU."""

import math

import pytest
import torch
from support.truth import selected

import tiercel
from tiercel.ops.routing.plain_route import activated, exp_of_negative

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

SCORING = ["softmax", "sigmoid", "sqrtsoftplus"]


def by_definition(row, bias, k, *, scoring, n_group, topk_group, renormalize, scaling_factor):
    """One row of Python floats, as DeepSeek's models have it."""
    if scoring == "softmax":
        largest = max(row)
        total = sum(math.exp(x - largest) for x in row)
        scores = [math.exp(x - largest) / total for x in row]
    elif scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in row]
    else:
        scores = [math.sqrt(math.log1p(math.exp(x))) for x in row]
    by = [s + b for s, b in zip(scores, bias or [0.0] * len(row), strict=True)]
    size = len(row) // n_group
    groups = [sorted(by[g * size : (g + 1) * size], reverse=True) for g in range(n_group)]
    of_groups = [sum(group[: 2 if bias else 1]) for group in groups]
    kept = sorted(range(n_group), key=lambda g: -of_groups[g])[:topk_group]
    order = sorted((e for e in range(len(row)) if e // size in kept), key=lambda e: (-by[e], e))
    weights = [scores[e] for e in order[:k]]
    if renormalize:
        weights = [w / sum(weights) for w in weights]
    return [scaling_factor * w for w in weights], order[:k]


@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (8, 3), (4, 4)])
def test_definition(n_group, topk_group, renormalize, scoring):
    generator = torch.Generator().manual_seed(0)
    scores = 2 * torch.randn(20, 32, generator=generator)
    bias = 0.2 * torch.randn(32, generator=generator)
    options = {"scoring": scoring, "renormalize": renormalize, "n_group": n_group}
    options |= {"topk_group": topk_group, "scaling_factor": 2.5}
    for given in (None, bias):
        weights, indices = tiercel.topk_softmax(scores, 5, correction_bias=given, **options)
        numbers = None if given is None else given.tolist()
        due = [by_definition(row, numbers, 5, **options) for row in scores.tolist()]
        assert indices.tolist() == [order for _, order in due]
        torch.testing.assert_close(weights, torch.tensor([w for w, _ in due]), rtol=1e-5, atol=1e-6)
        selected(scores, weights, indices, bias=given, **options)


def test_the_functions_of_float32_are_near():
    x = torch.linspace(-68.9, 0, 200_001)
    exact = x.double().exp()
    assert float(((exp_of_negative(x) - exact) / exact).abs().max()) < 2.5e-7
    x = torch.linspace(-60, 60, 200_001)
    exact = torch.sigmoid(x.double())
    assert float(((activated(x, "sigmoid") - exact) / exact).abs().max()) < 4e-7
    exact = x.double().exp().log1p().sqrt()
    assert float(((activated(x, "sqrtsoftplus") - exact) / exact).abs().max()) < 4e-7


def test_ties_take_the_lowest_index_and_group():
    scores = torch.zeros(2, 24)
    options = {"scoring": "sigmoid", "n_group": 6, "topk_group": 2}
    _, indices = tiercel.topk_softmax(scores, 5, correction_bias=torch.zeros(24), **options)
    assert indices.tolist() == [[0, 1, 2, 3, 4]] * 2
    bias = torch.zeros(24)
    bias[20] = 1.0
    _, indices = tiercel.topk_softmax(scores, 5, correction_bias=bias, **options)
    assert indices.tolist() == [[20, 0, 1, 2, 3]] * 2


def test_the_bias_is_for_the_choice_only():
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 9.0])
    weights, indices = tiercel.topk_softmax(scores, 2, scoring="sigmoid", correction_bias=bias)
    assert indices.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, torch.sigmoid(torch.tensor([[-1.0, 2.0]])))


def test_shared_experts():
    scores = torch.randn(3, 16)
    for index in (torch.int32, torch.int64):
        weights, indices = tiercel.topk_softmax(
            scores, 4, scaling_factor=3.0, n_shared=2, indices_dtype=index
        )
        alone, chosen = tiercel.topk_softmax(scores, 4, indices_dtype=index)
        assert indices.dtype == index and torch.equal(indices[:, :4], chosen)
        torch.testing.assert_close(weights[:, :4], 3 * alone)
        assert indices[:, 4:].tolist() == [[16, 17]] * 3 and (weights[:, 4:] == 1).all()


def test_aligned():
    scores, bias = torch.randn(9, 32), torch.rand(32)
    options = {"scoring": "sigmoid", "correction_bias": bias, "n_group": 4, "topk_group": 2}
    options |= {"n_shared": 1, "scaling_factor": 2.0, "renormalize": True}
    weights, indices, *lists = tiercel.topk_softmax_align(scores, 3, 16, **options)
    due = tiercel.topk_softmax(scores, 3, **options)
    assert torch.equal(weights, due[0]) and torch.equal(indices, due[1])
    for one, other in zip(lists, tiercel.moe_align_block_size(indices, 16, 33), strict=True):
        assert torch.equal(one, other)
    out = tuple(torch.empty_like(x) for x in (weights, indices, *lists))
    assert tiercel.topk_softmax_align(scores, 3, 16, out=out, **options)[0] is out[0]
    assert torch.equal(out[2], lists[0])


@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize("renormalize", [False, True])
def test_gradients(scoring, renormalize):
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(6, 12, generator=generator).double().requires_grad_()
    bias, pull = torch.randn(12, generator=generator), torch.randn(6, 5, generator=generator)
    options = {"scoring": scoring, "renormalize": renormalize, "correction_bias": bias}
    options |= {"scaling_factor": 2.5, "n_shared": 1, "n_group": 3, "topk_group": 2}
    due, _ = tiercel.ref.topk_softmax(scores, 4, **options)
    (theirs,) = torch.autograd.grad((due * pull).sum(), scores)
    single = scores.detach().float().requires_grad_()
    weights, indices = tiercel.topk_softmax(single, 4, **options)
    assert weights.requires_grad and not indices.requires_grad
    (ours,) = torch.autograd.grad((weights * pull).sum(), single)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-6)


def test_out_and_compile():
    scores, bias = torch.randn(4, 8), torch.rand(8)
    options = {"scoring": "sigmoid", "correction_bias": bias}
    weights, indices = tiercel.topk_softmax(scores, 2, **options)
    out = torch.empty(4, 2), torch.empty(4, 2, dtype=torch.int32)
    assert tiercel.topk_softmax(scores, 2, out=out, **options)[0] is out[0]
    assert torch.equal(out[0], weights) and torch.equal(out[1], indices)
    compiled = torch.compile(
        lambda s, b: tiercel.topk_softmax(s, 2, scoring="sigmoid", correction_bias=b),
        backend="aot_eager",
        fullgraph=True,
    )
    assert torch.equal(compiled(scores, bias)[1], indices)


def test_module():
    module = tiercel.nn.TopkSoftmax(2, scoring="sigmoid", n_shared=1)
    scores, bias = torch.randn(3, 4, 8), torch.rand(8)
    weights, indices = module(scores, bias)
    due = tiercel.topk_softmax(
        scores.view(-1, 8), 2, scoring="sigmoid", n_shared=1, correction_bias=bias
    )
    assert torch.equal(weights, due[0].view(3, 4, 3)) and indices.shape == (3, 4, 3)
    assert repr(module).endswith("scoring='sigmoid', n_shared=1)")


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"scoring": "tanh"}, ValueError, "`scoring` must be one of 'softmax', 'sigmoid', "),
        ({"scoring": "sigmoid", "softmax_first": False}, ValueError, "`softmax_first` must be"),
        ({"n_group": 3}, ValueError, "`n_group` must divide the number of experts, got 3 for 8"),
        ({"n_group": 0}, ValueError, "`n_group` must be at least 1, got 0"),
        ({"n_group": 2, "topk_group": 3}, ValueError, "`topk_group` must be between 1 and "),
        ({"n_group": 4, "topk_group": 1, "k": 3}, ValueError, "k must be at most the experts of"),
        ({"n_shared": -1}, ValueError, "`n_shared` must not be negative, got -1"),
        ({"n_shared": 1.5}, TypeError, "`n_shared` must be an int, got float"),
        ({"n_shared": 1, "k": "2"}, TypeError, "`k` must be an int, got str"),
        ({"n_shared": 1, "k": 9}, ValueError, "k must be between 1 and the number of experts"),
        ({"correction_bias": torch.zeros(7)}, ValueError, "`correction_bias` must have shape"),
        ({"correction_bias": torch.zeros(8).half()}, TypeError, "`correction_bias` must have d"),
    ],
)
def test_bad_arguments_are_named(changes, error, text):
    arguments = {"scores": torch.randn(4, 8), "k": 2} | changes
    with pytest.raises(error, match=f"topk_softmax: {text}"):
        tiercel.topk_softmax(**arguments)
    with pytest.raises(error, match=f"topk_softmax_align: {text}"):
        tiercel.topk_softmax_align(block_size=16, **arguments)
