# SPDX-License-Identifier: Apache-2.0
"""Sinks of attention and attention_varlen on the emulator, against float64."""

import pytest
import torch
from support.attention import compare, draw, limits
from support.emulator import kernels, sm90
from support.emulator import options as running

import tiercel
from tiercel.ops.attention.reference import sinks_backward

pytestmark = pytest.mark.torch

SINKS = [[-torch.inf, 0.5], [4.0, -3.0], [1e30, 3e38], [-3e38, 100.0]]
MASKS = [{}, {"causal": True}, {"window": (40, 5)}, {"softcap": 2.0, "causal": True}]


def attend(q, k, v, sinks, with_lse=True, **options):
    out = torch.full_like(q, torch.nan)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.nan) if with_lse else None
    rest = (*limits(options), q.shape[-1] ** -0.5, options.get("softcap", 0.0))
    kernels.attention(q, k, v, out, lse, *rest, sinks)
    return out, lse


def check(batch, seq_q, seq_k, d, sinks, dtype=torch.bfloat16, **options):
    q, k, v = draw(dtype, (batch, seq_q, 2, d), *[(batch, seq_k, 1, d)] * 2)
    sinks = torch.tensor(sinks)
    doubles = [x.double() for x in (q, k, v)]
    truth = tiercel.ref.attention(*doubles, sinks=sinks, return_lse=True, **options)
    out, lse = attend(q, k, v, sinks, **options)
    compare(out, lse, *truth)
    assert torch.equal(attend(q, k, v, sinks, with_lse=False, **options)[0], out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("options", MASKS)
def test_every_tile(d, dtype, options):
    check(1, 150, 210, d, [4.0, -3.0], dtype, **options)


@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("options", MASKS[:3])
def test_sinks(sinks, options):
    """Under the mask some queries see no key: their logarithm is the sink."""
    check(2, 150, 70, 64, sinks, **options)


def test_three_warpgroups():
    check(1, 1100, 130, 64, [1.0, -torch.inf], causal=True)


@pytest.mark.parametrize("options", MASKS)
def test_a_sink_of_minus_infinity_is_none(options):
    tensors = draw(torch.bfloat16, (1, 150, 2, 64), *[(1, 140, 1, 64)] * 2)
    found = attend(*tensors, torch.full((2,), -torch.inf), **options)
    due = attend(*tensors, None, **options)
    assert all(torch.equal(one, other) for one, other in zip(found, due, strict=True))


def test_nan_stays():
    tensors = draw(torch.bfloat16, (1, 70, 2, 64), *[(1, 140, 1, 64)] * 2)
    out, lse = attend(*tensors, torch.tensor([torch.nan, 0.0]))
    assert out[:, :, 0].isnan().all() and lse[:, 0].isnan().all()
    assert out[:, :, 1].isfinite().all() and lse[:, 1].isfinite().all()


LENGTHS = [
    ([5], [5]),
    ([300, 1, 0, 130, 129], [300, 1, 7, 130, 64]),
    ([64, 200, 3], [200, 64, 0]),
]


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("options", MASKS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_varlen(d, options, lengths):
    """Rows before the first sequence and after the last one have no sink."""
    queries, keys = lengths
    q, k, v = draw(torch.bfloat16, (sum(queries) + 5, 2, d), *[(sum(keys), 1, d)] * 2)
    starts = [torch.tensor(x).cumsum(0).int() for x in ([3, *queries], [0, *keys])]
    longest, sinks = (max(queries), max(keys)), torch.tensor([2.0, -1.0])
    out, lse = torch.full_like(q, torch.nan), torch.full((2, len(q)), torch.nan)
    rest = (*longest, *limits(options), d**-0.5, options.get("softcap", 0.0))
    kernels.attention_varlen(q, k, v, *starts, out, lse, *rest, sinks)
    truth = tiercel.ref.attention_varlen(
        *(x.double() for x in (q, k, v)), *starts, *longest, sinks=sinks, return_lse=True, **options
    )
    compare(out, lse, *truth)


def drawn(batch, rows, heads, d, dtype, sinks):
    """(grad, out, lse, grad_lse, sinks): rows without a key or a sink among them."""
    grad, out = draw(dtype, *[(batch, rows, heads, d)] * 2)
    lse, grad_lse = draw(torch.float32, *[(batch, heads, rows)] * 2)
    sinks = torch.tensor(sinks).repeat(heads)[:heads]
    lse = torch.logaddexp(lse, sinks[:, None])
    lse[:, :, ::7] = -torch.inf
    return grad, out, lse, grad_lse, sinks


def gradient(grad, out, lse, grad_lse, sinks):
    found = torch.full_like(sinks, torch.nan)
    given = (grad, out, lse, grad_lse, sinks, found)
    size = kernels.attention_sinks_backward_plan(*given, None)["workspace"]
    kernels.attention_sinks_backward(*given, torch.full((size,), torch.nan))
    return found


def assert_close(found, grad, out, lse, grad_lse, sinks):
    """The bound of the GPU tests: a part of the sum of the terms' magnitudes."""
    products = grad.double() * out.double()
    delta, most = (x.sum(-1).transpose(1, 2) for x in (products, products.abs()))
    if grad_lse is not None:
        delta, most = delta - grad_lse, most + grad_lse.abs()
    wide = (lse.double(), sinks.double())
    error = (found.double() - sinks_backward(delta, *wide)).abs()
    assert (error <= 4e-6 * sinks_backward(-most, *wide) + 1e-30).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [8, 40, 64, 96, 128, 200, 256])
def test_gradients(d, dtype):
    given = drawn(2, 70, 3, d, dtype, [1.0, -2.0, -torch.inf])
    assert_close(gradient(*given), *given)
    without = (*given[:3], None, given[4])
    assert_close(gradient(*without), *without)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 700, 2), (1, 5000, 1), (0, 4, 2), (2, 0, 9)])
@pytest.mark.parametrize("sinks", [[-torch.inf, 0.5], [4.0, -3.0], [1e30, 3e38], [-3e38, 100.0]])
def test_edges_of_gradients(sinks, sizes):
    given = drawn(*sizes, 64, torch.bfloat16, sinks)
    found = gradient(*given)
    assert_close(found, *given)
    with running(seed=3):
        assert torch.equal(found, gradient(*given))


def test_gradients_of_rows_that_hold_anything():
    """Rows in no sequence: nothing of them counts."""
    given = drawn(1, 70, 2, 64, torch.bfloat16, [0.5])
    due = gradient(*given)
    given[0][:, ::7], given[3][:, :, ::7] = torch.nan, torch.inf
    assert torch.equal(gradient(*given), due)


def test_strides():
    grad, out, *rest = drawn(2, 70, 4, 64, torch.bfloat16, [0.5, 1.0])
    due = gradient(grad, out, *rest)
    heads_first = grad.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.cat([out, out], dim=3)[..., :64]
    assert torch.equal(gradient(heads_first, wide, *rest), due)
    one = torch.ones(1, dtype=torch.bfloat16).expand(64).expand(2, 70, 4, 64)
    found = sm90("attention_sinks_backward")(one, out, *rest, None)
    assert torch.equal(found, gradient(torch.ones_like(grad), out, *rest))
