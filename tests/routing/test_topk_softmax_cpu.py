# SPDX-License-Identifier: Apache-2.0
"""topk_softmax with PyTorch and without a GPU: reference, public function, registration."""

import math

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

OPTIONS = [(first, renormalize) for first in (True, False) for renormalize in (True, False)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = math.inf, math.nan


def brute_force(row, k, softmax_first, renormalize):
    """One row of Python floats, by the definition."""
    # NaN first, then descending; sorted() keeps ties in index order.
    order = sorted(range(len(row)), key=lambda i: (0, 0) if math.isnan(row[i]) else (1, -row[i]))
    order = order[:k]
    if softmax_first:
        all_weights = softmax(row)
        weights = [all_weights[i] for i in order]
    else:
        weights = softmax([row[i] for i in order])
    if renormalize:
        total = sum(weights)
        weights = [w / total for w in weights]
    return weights, order


def softmax(values):
    top = max(values, key=lambda v: (math.isnan(v), v))
    if math.isnan(top) or math.isinf(top):
        return [NAN] * len(values)
    exps = [math.exp(v - top) for v in values]
    return [e / sum(exps) for e in exps]


def assert_matches(scores, k, softmax_first, renormalize, **kwargs):
    weights, indices = tiercel.topk_softmax(
        scores, k, softmax_first=softmax_first, renormalize=renormalize, **kwargs
    )
    expected = [brute_force(row, k, softmax_first, renormalize) for row in scores.double().tolist()]
    assert indices.tolist() == [order for _, order in expected]
    # float32 arithmetic: a few roundings of 2**-24 each.
    truth = torch.tensor([w for w, _ in expected], dtype=torch.float64).reshape(weights.shape)
    torch.testing.assert_close(weights.double(), truth, rtol=1e-5, atol=1e-7, equal_nan=True)
    assert weights.dtype == torch.float32 and weights.is_contiguous() and indices.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("softmax_first", "renormalize"), OPTIONS)
def test_random_scores(dtype, softmax_first, renormalize):
    generator = torch.Generator().manual_seed(1)
    for experts, k in [(1, 1), (2, 2), (7, 3), (8, 8), (64, 8), (127, 16), (512, 5), (600, 20)]:
        scores = torch.randn(5, experts, generator=generator).to(dtype)
        assert_matches(scores, k, softmax_first, renormalize)


@pytest.mark.parametrize(("softmax_first", "renormalize"), OPTIONS)
@pytest.mark.parametrize(
    "row",
    [
        [0.0, 0.0, 0.0, 0.0],
        [-0.0, 0.0, -0.0, 0.0],
        [0.0, -0.0, 1.0, -1.0],
        [1.0, 2.0, 2.0, 1.0],
        [-INF, 1.0, -INF, 0.0],
        [-INF, -INF, -INF, -INF],
        [INF, 1.0, 2.0, 3.0],
        [INF, -INF, INF, 0.0],
        [NAN, 1.0, 2.0, 3.0],
        [1.0, NAN, INF, NAN],
        [NAN, NAN, NAN, NAN],
        [-NAN, NAN, 5.0, -NAN],
        [1e4, -1e4, 0.0, 88.0],
    ],
)
def test_special_values(row, softmax_first, renormalize):
    for dtype in DTYPES:
        for k in (1, 2, 4):
            scores = torch.tensor([row, row[::-1]], dtype=dtype)
            assert_matches(scores, k, softmax_first, renormalize)


def test_ties_take_the_lowest_index():
    generator = torch.Generator().manual_seed(2)
    scores = torch.randint(-2, 3, (50, 96), generator=generator).bfloat16()
    assert_matches(scores, 16, True, False)


@pytest.mark.parametrize("rows", [0, 1])
def test_empty_and_single(rows):
    weights, indices = tiercel.topk_softmax(torch.randn(rows, 8), 3)
    assert weights.shape == indices.shape == (rows, 3)


def test_strided_scores():
    base = torch.randn(12, 20)
    for scores in (base.t(), base[:, ::2], base[::3, 1:], base[:1].expand(4, 20)):
        assert_matches(scores, 4, True, False)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_dtype(dtype):
    scores = torch.randn(3, 8)
    assert tiercel.topk_softmax(scores, 2, indices_dtype=dtype)[1].dtype == dtype
    assert tiercel.topk_softmax(scores, 2)[1].dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_out(dtype):
    scores = torch.randn(3, 8)
    out = torch.full((3, 2), 9.0), torch.full((3, 2), 9, dtype=dtype)
    versions = [t._version for t in out]
    result = tiercel.topk_softmax(scores, 2, out=out)
    assert result[0] is out[0] and result[1] is out[1]
    assert all(t._version > v for t, v in zip(out, versions, strict=True))
    expected = tiercel.topk_softmax(scores, 2, indices_dtype=dtype)
    assert torch.equal(out[0], expected[0]) and torch.equal(out[1], expected[1])


def bad(**changes):
    arguments = {"scores": torch.randn(4, 8), "k": 2} | changes
    return tiercel.topk_softmax(**arguments)


def out(weights=None, indices=None):
    return (
        torch.empty(4, 2) if weights is None else weights,
        torch.empty(4, 2, dtype=torch.int32) if indices is None else indices,
    )


BAD = [
    (
        {"k": 9},
        ValueError,
        "k must be between 1 and the number of experts, got k = 9 for 8 experts",
    ),
    (
        {"k": 0},
        ValueError,
        "k must be between 1 and the number of experts, got k = 0 for 8 experts",
    ),
    (
        {"k": -1},
        ValueError,
        "k must be between 1 and the number of experts, got k = -1 for 8 experts",
    ),
    (
        {"scores": torch.zeros(4, 0), "k": 1},
        ValueError,
        "k must be between 1 and the number of experts, got k = 1 for 0 experts",
    ),
]


@pytest.mark.parametrize(("changes", "error", "text"), BAD)
def test_bad_arguments_are_named(changes, error, text):
    with pytest.raises(error) as info:
        bad(**changes)
    assert str(info.value) == f"topk_softmax: {text}"


@pytest.mark.parametrize(("softmax_first", "renormalize"), OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_ref(dtype, softmax_first, renormalize):
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(6, 12, generator=generator).to(dtype).requires_grad_()
    pull = torch.randn(6, 4, generator=generator)
    options = {"softmax_first": softmax_first, "renormalize": renormalize}
    weights, indices = tiercel.topk_softmax(scores, 4, **options)
    assert weights.requires_grad and not indices.requires_grad
    (ours,) = torch.autograd.grad((weights * pull).sum(), scores)
    expected, _ = tiercel.ref.topk_softmax(scores, 4, **options)
    (theirs,) = torch.autograd.grad((expected * pull).sum(), scores)
    assert ours.dtype == dtype
    torch.testing.assert_close(
        ours, theirs, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6
    )


@pytest.mark.parametrize(("softmax_first", "renormalize"), OPTIONS)
def test_ref_passes_gradcheck(softmax_first, renormalize):
    scores = torch.randperm(40, generator=torch.Generator().manual_seed(4)).reshape(5, 8) / 10
    scores = scores.double().requires_grad_()

    def weights(s):
        return tiercel.ref.topk_softmax(s, 3, softmax_first=softmax_first, renormalize=renormalize)[
            0
        ]

    assert torch.autograd.gradcheck(weights, scores)


@pytest.mark.parametrize(("softmax_first", "renormalize"), OPTIONS)
def test_second_derivatives_are_those_of_ref(softmax_first, renormalize):
    options = {"softmax_first": softmax_first, "renormalize": renormalize}
    scores = torch.randn(3, 6, requires_grad=True)
    results = []
    for function in (tiercel.topk_softmax, tiercel.ref.topk_softmax):
        (first,) = torch.autograd.grad(
            function(scores, 2, **options)[0].square().sum(), scores, create_graph=True
        )
        results.append(torch.autograd.grad(first.square().sum(), scores)[0])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


def test_transforms():
    scores = torch.randn(2, 4, 8)
    batched = torch.vmap(lambda s: tiercel.topk_softmax(s, 2)[0])(scores)
    assert torch.equal(batched[1], tiercel.topk_softmax(scores[1], 2)[0])
    tangent = torch.randn(4, 8)
    _, out_tangent = torch.func.jvp(
        lambda s: tiercel.topk_softmax(s, 2)[0], (scores[0],), (tangent,)
    )
    jacobian = torch.func.jacrev(lambda s: tiercel.topk_softmax(s, 2)[0])(scores[0])
    expected = torch.einsum("tkab,ab->tk", jacobian, tangent)
    torch.testing.assert_close(out_tangent, expected)


def test_transforms_warn_when_ref_was_not_asked_for():
    with tiercel.use_backend("auto"), pytest.warns(tiercel.FallbackWarning, match="torch.func"):
        torch.vmap(lambda s: tiercel.topk_softmax(s, 2)[0])(torch.randn(2, 4, 8))


def test_the_compiled_module_refuses_fake_tensors():
    from torch._subclasses import FakeTensorMode

    from tiercel import _C

    with FakeTensorMode():
        scores = torch.empty(5, 16, device="cuda")
        weights, indices = tiercel.topk_softmax(scores, 4)
        for function in (_C.topk_softmax, _C.topk_softmax_plan):
            with pytest.raises(ValueError, match=r"`scores` must have memory, got a tensor with"):
                function(scores, weights, indices, True, False)


def test_compile_out():
    torch._dynamo.reset()

    def fill(scores, weights, indices):
        tiercel.topk_softmax(scores, 2, out=(weights, indices))
        return weights + 1

    scores = torch.randn(4, 8)
    compiled = torch.compile(fill, backend="aot_eager", fullgraph=True)
    ours, theirs = out(), out()
    assert torch.equal(compiled(scores, *ours), fill(scores, *theirs))
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_module():
    module = tiercel.nn.TopkSoftmax(2, softmax_first=False, indices_dtype=torch.int64)
    scores = torch.randn(3, 4, 8)
    weights, indices = module(scores)
    expected = tiercel.topk_softmax(
        scores.view(-1, 8), 2, softmax_first=False, indices_dtype=torch.int64
    )
    assert torch.equal(weights, expected[0].view(3, 4, 2))
    assert torch.equal(indices, expected[1].view(3, 4, 2))
    assert repr(module) == (
        "TopkSoftmax(k=2, softmax_first=False, renormalize=False, indices_dtype=torch.int64)"
    )


def test_module_with_odd_shapes():
    module = tiercel.nn.TopkSoftmax(2)
    assert [t.shape for t in module(torch.randn(8))] == [(2,), (2,)]
    assert [t.shape for t in module(torch.randn(3, 0, 8))] == [(3, 0, 2), (3, 0, 2)]
    with pytest.raises(ValueError, match="got k = 2 for 0 experts"):
        module(torch.randn(3, 4, 0))
    with pytest.raises(ValueError, match="`scores` must have 2 dimensions, got 0"):
        module(torch.tensor(1.0))


def test_negated_views():
    scores = torch.randn(4, 8, dtype=torch.complex64, generator=torch.Generator().manual_seed(5))
    view = scores.conj().imag
    assert view.is_neg()
    assert torch.equal(tiercel.topk_softmax(view, 2)[1], tiercel.topk_softmax(-scores.imag, 2)[1])
    weights, indices = out()
    tiercel.topk_softmax(view, 2, out=(weights, indices))
    assert torch.equal(weights, tiercel.topk_softmax(-scores.imag, 2)[0])
    with pytest.raises(ValueError, match="`weights` must hold its own values, got a negated view"):
        tiercel.topk_softmax(view, 2, out=(torch._neg_view(weights), indices))


def test_inference_mode_and_autocast():
    scores = torch.randn(4, 8, requires_grad=True)
    expected = tiercel.topk_softmax(scores.detach(), 2)[0]
    with torch.inference_mode():
        assert torch.equal(tiercel.topk_softmax(scores, 2)[0], expected)
        tiercel.topk_softmax(scores, 2, out=out())
    with torch.autocast("cpu", torch.bfloat16):
        assert tiercel.topk_softmax(scores, 2)[0].dtype == torch.float32
