# SPDX-License-Identifier: Apache-2.0
"""reduce with PyTorch and without a GPU: reference, public functions, registration."""

import math

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = ["sum", "mean", "max", "amax"]


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def torchs(x, dim, op, keepdim=False):
    dims = list(range(x.dim())) if dim is None else [dim]
    return getattr(x, {"max": "amax"}.get(op, op))(dims, keepdim=keepdim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("keepdim", [False, True])
def test_against_float64(dtype, op, keepdim):
    for shape in [(7,), (5, 9), (3, 1, 4), (2, 3, 4, 5)]:
        x = draw(*shape, dtype=dtype)
        for dim in (None, *range(-len(shape), len(shape))):
            expected = torchs(x.double(), dim, op, keepdim)
            got = tiercel.reduce(x, dim, op, keepdim=keepdim)
            assert (got.shape, got.dtype) == (expected.shape, dtype) and got.is_contiguous()
            tolerance = 0 if "max" in op else torch.finfo(dtype).eps
            torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=1e-6)
            wide = tiercel.reduce(x, dim, op, keepdim=keepdim, dtype=torch.float32)
            assert wide.dtype == torch.float32
            torch.testing.assert_close(wide.double(), expected, rtol=1e-6, atol=1e-6)
            if op == "sum":
                assert torch.equal(tiercel.reduce_sum(x, dim, keepdim=keepdim), got)


def test_special_values():
    x = torch.tensor([[1.0, math.nan], [2.0, math.inf], [math.inf, -math.inf]])
    for op in OPS:
        expected = torchs(x, 1, op)
        torch.testing.assert_close(tiercel.reduce(x, 1, op), expected, equal_nan=True)


def test_over_nothing():
    x = torch.empty(3, 0, 2)
    assert torch.equal(tiercel.reduce(x, 1), torch.zeros(3, 2))
    assert tiercel.reduce(x, 1, "mean").isnan().all()
    assert tiercel.reduce(x, 2, "amax").shape == (3, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_out(dtype):
    x = draw(4, 6, dtype=dtype)
    for out in (torch.empty(6, dtype=dtype), torch.empty(6)):
        version = out._version
        assert tiercel.reduce(x, 0, "mean", out=out) is out and out._version > version
        assert torch.equal(out, tiercel.reduce(x, 0, "mean", dtype=out.dtype))
    kept = torch.empty(4, 1, dtype=dtype)
    tiercel.reduce_sum(x, 1, keepdim=True, out=kept)
    assert torch.equal(kept, tiercel.reduce_sum(x, 1, keepdim=True))


BAD = [
    ({"dim": 2}, ValueError, "`dim` must be from -2 to 1, got 2"),
    ({"dim": -3}, ValueError, "`dim` must be from -2 to 1, got -3"),
    (
        {"x": torch.zeros(4, 0), "op": "max", "dim": 1},
        ValueError,
        "`x` must not be empty in dimension 1 for a maximum, got shape [4, 0]",
    ),
    (
        {"x": torch.zeros(4, 0), "op": "amax", "dim": None},
        ValueError,
        "`x` must not be empty for a maximum, got shape [4, 0]",
    ),
]


@pytest.mark.parametrize(("changes", "error", "text"), BAD)
def test_bad_arguments_are_named(changes, error, text):
    with pytest.raises(error) as info:
        tiercel.reduce(**({"x": torch.zeros(4, 6), "dim": 0} | changes))
    assert str(info.value) == f"reduce: {text}"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dim", [None, 0, 1, -1])
@pytest.mark.parametrize("keepdim", [False, True])
def test_gradients(op, dim, keepdim):
    x = draw(3, 4, 5)
    x[0, 0, 0] = x[0, 0, 1] = 9.0  # equal maxima share theirs
    x.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: tiercel.ref.reduce(x, dim, op, keepdim=keepdim),
        torch.rand(3, 4, 5, dtype=torch.float64, requires_grad=True),
    )
    results = [tiercel.reduce(x, dim, op, keepdim=keepdim), torchs(x, dim, op, keepdim)]
    pull = draw(*results[0].shape)
    ours, theirs = (torch.autograd.grad((result * pull).sum(), x)[0] for result in results)
    torch.testing.assert_close(ours, theirs)
    wide = tiercel.reduce(x.bfloat16(), dim, op, keepdim=keepdim, dtype=torch.float32)
    assert torch.autograd.grad((wide * pull).sum(), x)[0].shape == x.shape
    with pytest.raises(RuntimeError, match="there is no derivative for `out=`"):
        tiercel.reduce(x, dim, op, keepdim=keepdim, out=torch.empty_like(results[0]))


def test_transforms():
    x = draw(4, 3, 5)
    got = torch.vmap(lambda x: tiercel.reduce(x, 0, "amax"))(x)
    assert torch.equal(got, x.amax(1))


def test_explain_takes_an_argument_named_op():
    told = tiercel.explain(tiercel.reduce, draw(4, 8), op="mean")
    assert (told.op, told.backend) == ("reduce", "ref")
