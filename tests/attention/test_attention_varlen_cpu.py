# SPDX-License-Identifier: Apache-2.0
"""attention_varlen with PyTorch and without a GPU."""

import pytest
import torch

import tiercel
from tiercel.ops.attention import forward
from tiercel.ops.attention.reference import attention_varlen_backward

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]
NONE = torch.zeros(0, dtype=torch.int32)


def starts(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def arguments(queries=(5, 0, 9), keys=(5, 3, 12), heads=(4, 2), dtype=torch.bfloat16, grad=False):
    generator = torch.Generator().manual_seed(1)

    def make(rows, count):
        drawn = torch.randn(rows, count, 16, generator=generator)
        return drawn.to(dtype).requires_grad_(grad)

    tensors = [make(sum(queries), heads[0]), *(make(sum(keys), heads[1]) for _ in range(2))]
    return *tensors, starts(*queries), starts(*keys), max(queries), max(keys)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (3, 1)}, {"softcap": 2.0}])
def test_is_attention_of_each_sequence(options):
    q, k, v, of_q, of_k, *longest = arguments()
    result, lse = tiercel.attention_varlen(
        q, k, v, of_q, of_k, *longest, return_lse=True, **options
    )
    assert result.shape == q.shape and lse.shape == (4, 14)
    for i in range(3):
        queries, keys = (slice(x[i], x[i + 1]) for x in (of_q, of_k))
        due, sums = tiercel.attention(
            q[None, queries], k[None, keys], v[None, keys], return_lse=True, **options
        )
        assert torch.equal(result[queries], due[0]) and torch.equal(lse[:, queries], sums[0])


def test_values_of_another_head_dimension():
    q, k, v, *rest = arguments(grad=True)
    wide = torch.cat([v, 2 * v], -1).detach().requires_grad_()
    result, lse = tiercel.attention_varlen(q, k, wide, *rest, causal=True, return_lse=True)
    due, sums = tiercel.attention_varlen(q, k, v, *rest, causal=True, return_lse=True)
    assert torch.equal(lse, sums)
    torch.testing.assert_close(result, torch.cat([due, 2 * due], -1))
    found = torch.autograd.grad(result.sum(), (q, k, wide))
    expected = torch.autograd.grad(3 * due.sum(), (q, k, v))
    torch.testing.assert_close(found[2][..., :16] * 3, expected[2], rtol=2e-2, atol=2e-2)
    for one, truth in zip(found, expected, strict=False):
        if one.shape == truth.shape:
            torch.testing.assert_close(one, truth, rtol=3e-2, atol=3e-2)


def test_gradients():
    q, k, v, *rest = arguments(grad=True)
    tiercel.attention_varlen(q, k, v, *rest, causal=True).sum().backward()
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    tiercel.ref.attention_varlen(*doubles, *rest, causal=True).sum().backward()
    for tensor, double in zip((q, k, v), doubles, strict=True):
        error = (tensor.grad.double() - double.grad).norm() / double.grad.norm()
        assert error < 2e-2


def test_nothing():
    q, k, v, *_ = arguments()
    none = torch.zeros(1, dtype=torch.int32)
    assert tiercel.attention_varlen(q[:0], k[:0], v[:0], none, none, 0, 0).shape == (0, 4, 16)
    result, lse = tiercel.attention_varlen(
        q, k[:0], v[:0], starts(14), starts(0), 14, 0, return_lse=True
    )
    assert (result == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize(
    ("error", "text", "changes"),
    [
        (ValueError, "`max_seqlen_q` and `max_seqlen_k` must be at least 0", {5: -1}),
        (ValueError, "`cu_seqlens_q` must have at least one element", dict.fromkeys((3, 4), NONE)),
        (
            ValueError,
            "`k` must have a number of heads that divides that of `q`, 4, got 3",
            dict.fromkeys((1, 2), torch.zeros(20, 3, 16).bfloat16()),
        ),
    ],
)
def test_bad_arguments(error, text, changes):
    given = list(arguments())
    for place, value in changes.items():
        given[place] = value
    with pytest.raises(error, match=f"^attention_varlen: {text}"):
        tiercel.attention_varlen(*given)
    with pytest.raises(ValueError, match="^attention_varlen: `softcap` must be None or positive"):
        tiercel.attention_varlen(*arguments(), softcap=-1.0)


def backward_arguments(**options):
    given = arguments()
    out, lse = tiercel.ref.attention_varlen(*given, return_lse=True, **options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)
    return (grad, *given[:5], out, lse), torch.ones_like(lse)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 2.0}, {"window": (3, 1)}])
def test_the_backward_s_reference_is_the_derivative(options):
    tensors, grad_lse = backward_arguments(**options)
    grad, q, k, v, starts_q, starts_k, *_ = (
        x.double() if x.is_floating_point() else x for x in tensors
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = tiercel.ref.attention_varlen(
        *leaves, starts_q, starts_k, 9, 12, return_lse=True, **options
    )
    finite = lse.masked_fill(lse.isinf(), 0.0)
    expected = torch.autograd.grad([out, finite], leaves, [grad, grad_lse.double()])
    given = [x.detach() for x in (grad, q, k, v, starts_q, starts_k, out, lse)]
    found = attention_varlen_backward(*given, grad_lse=grad_lse.double(), **options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("return_lse", [False, True])
def test_gradients_through_the_operators(monkeypatch, return_lse):
    """As if there were kernels: the operators run the reference."""
    monkeypatch.setattr(forward, "has_kernels", lambda *_: True)
    q, k, v, *rest = arguments(grad=True)
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    for tensors, run, more in (
        ((q, k, v), tiercel.attention_varlen, {"backend": "ref"}),
        (doubles, tiercel.ref.attention_varlen, {}),
    ):
        out = run(*tensors, *rest, causal=True, return_lse=return_lse, **more)
        results = out if return_lse else (out,)
        sum(x.masked_fill(x.isinf(), 0.0).sum() for x in results).backward()
    for tensor, double in zip((q, k, v), doubles, strict=True):
        error = (tensor.grad.double() - double.grad).norm() / double.grad.norm()
        assert error < 0.01


def float8(*lengths):
    given = arguments(*lengths, dtype=torch.float32)
    return *(x.to(torch.float8_e4m3fn) for x in given[:3]), *given[3:]


def test_float8_is_attention_of_each_sequence():
    q, k, v, of_q, of_k, *longest = float8()
    scales = [torch.rand(shape) + 0.5 for shape in ((3, 2), (2,), (1, 1))]
    names = ("q_descale", "k_descale", "v_descale")
    given = dict(zip(names, scales, strict=True))
    result, lse = tiercel.attention_varlen(
        q, k, v, of_q, of_k, *longest, causal=True, return_lse=True, **given
    )
    assert result.dtype == torch.bfloat16 and lse.dtype == torch.float32
    for i in range(3):
        queries, keys = (slice(x[i], x[i + 1]) for x in (of_q, of_k))
        given["q_descale"] = scales[0][i : i + 1]
        due, sums = tiercel.attention(
            q[None, queries], k[None, keys], v[None, keys], causal=True, return_lse=True, **given
        )
        assert torch.equal(result[queries], due[0]) and torch.equal(lse[:, queries], sums[0])


@pytest.mark.parametrize(
    ("error", "text", "changes"),
    [
        (ValueError, r"`k_descale` must have shape \[B, Hk\] = \[3, 2\]", {"k_descale": 4}),
    ],
)
def test_float8_bad_arguments(error, text, changes):
    given = dict(zip("qkv", float8()[:3], strict=True))
    for name, value in changes.items():
        given[name] = torch.ones(value) if isinstance(value, int) else given[name].to(value)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    rest = dict(zip(names, float8()[3:], strict=True))
    with pytest.raises(error, match=f"^attention_varlen: {text}"):
        tiercel.attention_varlen(**given, **rest)


def test_factors_are_of_float8():
    with pytest.raises(ValueError, match="^attention_varlen: `v_descale` must be None unless"):
        tiercel.attention_varlen(*arguments(), v_descale=torch.ones(1))


def outside(make=arguments, **options):
    """Three rows before the first sequence, two after the last one; three keys each."""
    q, k, v, of_q, of_k, *longest = make((3, 5, 0, 9, 2), (3, 5, 3, 12, 3), **options)
    return (q, k, v, of_q[1:-1], of_k[1:-1], *longest), slice(3, 17), slice(3, 23)


@pytest.mark.parametrize("make", [arguments, float8])
def test_rows_in_no_sequence(make):
    (q, k, v, of_q, of_k, *longest), queries, keys = outside(make)
    out, lse = tiercel.attention_varlen(q, k, v, of_q, of_k, *longest, return_lse=True)
    inner = (q[queries], k[keys], v[keys], of_q - 3, of_k - 3)
    due, sums = tiercel.attention_varlen(*inner, *longest, return_lse=True)
    assert torch.equal(out[queries], due) and torch.equal(lse[:, queries], sums)
    rest = torch.ones(len(q), dtype=torch.bool)
    rest[queries] = False
    assert (out[rest] == 0).all() and (lse[:, rest] == -torch.inf).all()


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_gradients_of_rows_in_no_sequence(monkeypatch, kernels, return_lse):
    if kernels:  # as if there were any: the operators run the reference
        monkeypatch.setattr(forward, "has_kernels", lambda *_: True)
    (q, k, v, *rest), queries, keys = outside(grad=True)
    found = tiercel.attention_varlen(q, k, v, *rest, return_lse=return_lse)
    results = found if return_lse else (found,)
    sum(x.masked_fill(x.isinf(), 0.0).sum() for x in results).backward()
    for tensor, rows in ((q, queries), (k, keys), (v, keys)):
        inside = torch.zeros(len(tensor), dtype=torch.bool)
        inside[rows] = True
        assert (tensor.grad[~inside] == 0).all() and (tensor.grad[inside] != 0).any()


def test_no_sequence_at_all():
    q, k, v, of_q, of_k, *longest = arguments(grad=True)
    for starts_ in ((of_q[:1], of_k[:1]), (of_q * 0, of_k)):
        out = tiercel.attention_varlen(q, k, v, *starts_, *longest)
        assert (out == 0).all() and out.shape == q.shape
        out.sum().backward()
        assert all((x.grad == 0).all() for x in (q, k, v))


@pytest.mark.parametrize(
    ("given", "counts_as"),
    [
        ((-40, 5, 5, 14), (0, 5, 5, 14)),
        ((0, 5, 5, 2**31 - 1), (0, 5, 5, 14)),
        ((20, 30, 40, 50), (14, 14, 14, 14)),
        ((-(2**31), -1, 9, 9), (0, 0, 9, 9)),
        ((0, 9, 5, 14), (0, 9, 9, 14)),  # the third: its first rows are the first sequence's
    ],
)
def test_starts_are_cut_to_the_tensor(given, counts_as):
    q, k, v, _, of_k, *longest = arguments(keys=(5, 5, 5))
    given, counts_as = (torch.tensor(x, dtype=torch.int32) for x in (given, counts_as))
    out, lse = tiercel.attention_varlen(q, k, v, given, of_k, *longest, return_lse=True)
    same = (q, k, v, counts_as, of_k, *longest)
    due, sums = tiercel.attention_varlen(*same, return_lse=True)
    assert torch.equal(out, due) and torch.equal(lse, sums)


@pytest.mark.parametrize("longest", [(9, 12), (2**62, 2**62), (9, 1)])
def test_longest_may_be_any_number_that_is_more(longest):
    given = arguments()
    due = tiercel.attention_varlen(*given, causal=True)
    assert torch.equal(tiercel.attention_varlen(*given[:5], *longest, causal=True), due)


def test_starts_of_any_stride():
    q, k, v, of_q, of_k, *longest = arguments()
    apart = [torch.stack([x, -x], dim=1)[:, 0] for x in (of_q, of_k)]
    assert not any(x.is_contiguous() for x in apart)
    due = tiercel.attention_varlen(q, k, v, of_q, of_k, *longest)
    assert torch.equal(tiercel.attention_varlen(q, k, v, *apart, *longest), due)
