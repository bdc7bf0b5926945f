# SPDX-License-Identifier: Apache-2.0
"""Sinks of attention and attention_varlen with PyTorch and without a GPU."""

import pytest
import torch

import tiercel
from tiercel.ops.attention import forward

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

OPTIONS = [{}, {"causal": True}, {"softcap": 2.0, "causal": True}, {"window": (3, 1)}]
SINKS = torch.tensor([-torch.inf, 0.0, 2.0, 30.0])
STARTS = [torch.tensor(x, dtype=torch.int32) for x in ((1, 5, 5, 9), (0, 6, 8, 12))]


def draw(seq_q=9, seq_k=12, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(3)

    def rand(rows, heads):
        shape = (2, rows, heads, 16)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return rand(seq_q, 4), rand(seq_k, 2), rand(seq_k, 2), rand(seq_q, 4)


def packed(dtype=torch.bfloat16):
    """The arguments of attention_varlen, with rows in no sequence, and a gradient."""
    q, k, v, grad = (x[0] for x in draw(dtype=dtype))
    return (q, k, v, *STARTS, 4, 6), grad


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("seq_q", "seq_k"), [(9, 12), (12, 5), (3, 0)])
def test_a_sink_is_a_key_of_that_score(seq_q, seq_k, options):
    q, k, v, _ = draw(seq_q, seq_k, torch.float64)
    sinks = SINKS.double()
    out, lse = tiercel.ref.attention(q, k, v, sinks=sinks, return_lse=True, **options)
    plain, sums = tiercel.ref.attention(q, k, v, return_lse=True, **options)
    torch.testing.assert_close(lse, torch.logaddexp(sums, sinks[:, None]))
    share = torch.sigmoid(sums - sinks[:, None]).nan_to_num()  # of neither a key nor a sink
    torch.testing.assert_close(out, plain * share.transpose(1, 2)[..., None])


@pytest.mark.parametrize("sink", [1e6, 1e30, 3e38])
def test_huge_sinks_leave_nothing(sink):
    q, k, v, grad = (x.requires_grad_() for x in draw())
    sinks = torch.full((4,), sink, requires_grad=True)
    out, lse = tiercel.attention(q, k, v, sinks=sinks, return_lse=True)
    assert (out == 0).all() and (lse == sinks[:, None]).all()
    out.backward(grad)
    assert all((x.grad == 0).all() for x in (q, k, v, sinks))


def test_as_paged_attention_has_them():
    q, k, v, *rest = packed()[0]
    table = torch.arange(12, dtype=torch.int32)[None].expand(3, -1)
    pages = torch.stack([table[i].roll(-start) for i, start in enumerate((0, 6, 8))])
    used = torch.tensor([6, 2, 4], dtype=torch.int32)
    options = {"sinks": SINKS, "causal": True, "window": (2, 0), "return_lse": True}
    due = tiercel.paged_attention(q, k[:, None], v[:, None], pages, used, STARTS[0], 4, **options)
    found = tiercel.attention_varlen(q, k, v, *rest, **options)
    for one, other in zip(found, due, strict=True):
        torch.testing.assert_close(one, other)


def derivatives(run, leaves, grad):
    """Gradients of out and lse together; an lse of minus infinity has none."""
    out, lse = run()
    finite = lse.masked_fill(lse.isinf(), 0.0)
    return torch.autograd.grad([out, finite], leaves, [grad, torch.ones_like(lse)])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(9, 12), (12, 5), (3, 0)])
def test_the_operator_is_the_derivative(seq_q, seq_k, with_lse, options):
    """On ref: in float32, of results in bfloat16."""
    q, k, v, grad = draw(seq_q, seq_k)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0], requires_grad=True)
    out, lse = tiercel.ref.attention(
        *(x.double() for x in (q, k, v)), sinks=sinks, return_lse=True, **options
    )
    grad_lse = torch.ones_like(lse) if with_lse else None
    grads = (grad.double(), grad_lse)
    outputs = [out, lse] if with_lse else [out]
    expected = torch.autograd.grad(outputs, [sinks], [g for g in grads if g is not None])
    given = (grad, out.detach().bfloat16(), lse.detach().float())
    given += (None if grad_lse is None else grad_lse.float(), sinks.detach())
    found = torch.ops.tiercel.attention_sinks_backward(*given, "ref")
    torch.testing.assert_close(found, expected[0], rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("varlen", [False, True])
def test_gradients(monkeypatch, varlen, options, kernels):
    """By torch, and, as if there were kernels, by the operators, which run the reference."""
    if kernels:
        monkeypatch.setattr(forward, "has_kernels", lambda *_: True)
    (q, k, v, *rest), grad = packed() if varlen else (draw()[:3], draw()[3])
    run = tiercel.attention_varlen if varlen else tiercel.attention
    reference = tiercel.ref.attention_varlen if varlen else tiercel.ref.attention
    halves = [x.requires_grad_() for x in (q, k, v, SINKS.clone())]
    doubles = [x.detach().double().requires_grad_() for x in halves]
    doubles[3].data[0] = -1e30  # of minus infinity there is no derivative
    found, expected = (
        derivatives(
            lambda of=of, leaves=leaves: of(
                *leaves[:3], *rest, sinks=leaves[3], return_lse=True, **options
            ),
            leaves,
            grad.to(leaves[0].dtype),
        )
        for of, leaves in ((run, halves), (reference, doubles))
    )
    if not kernels:
        found[3][0] = 0
    for one, truth in zip(found, expected, strict=True):
        assert one.isfinite().all()
        assert (one.double() - truth).norm() <= 2e-2 * truth.norm()


def test_only_the_sinks_gradient(monkeypatch):
    monkeypatch.setattr(forward, "has_kernels", lambda *_: True)
    q, k, v, grad = draw()
    sinks = torch.zeros(4, requires_grad=True)
    tiercel.attention(q, k, v, sinks=sinks).backward(grad)
    assert (sinks.grad != 0).all() and q.grad is None


def test_compile(monkeypatch):
    monkeypatch.setattr(forward, "has_kernels", lambda *_: True)
    q, k, v, grad = draw()

    def loss(sinks):
        return (tiercel.attention(q, k, v, causal=True, sinks=sinks) * grad).sum()

    sinks = [torch.zeros(4, requires_grad=True) for _ in range(2)]
    loss(sinks[0]).backward()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(sinks[1]).backward()
    torch.testing.assert_close(sinks[1].grad, sinks[0].grad)


@pytest.mark.parametrize("varlen", [False, True])
def test_the_logarithms_without_keys(varlen):
    """Without keys nothing is launched, and lse has the sinks all the same."""
    (q, k, v, of_q, of_k, *longest), _ = packed()
    if varlen:
        starts = (of_q, torch.zeros_like(of_k), longest[0], 0)
        due = tiercel.ref.attention_varlen(q, k, v, *starts, sinks=SINKS, return_lse=True)[1]
    else:
        starts, q = (), q[None]
        due = tiercel.ref.attention(q, k[None, :0], v[None, :0], sinks=SINKS, return_lse=True)[1]
    lse = torch.full_like(due, -torch.inf)
    forward._add_sinks(lse, SINKS, starts)
    assert torch.equal(lse, due)


def test_float8():
    q, k, v, _ = (x.to(torch.float8_e4m3fn) for x in draw())
    out, lse = tiercel.attention(q, k, v, sinks=SINKS, return_lse=True)
    due, sums = tiercel.ref.attention(
        q.double(), k.double(), v.double(), sinks=SINKS, return_lse=True
    )
    torch.testing.assert_close(out.double(), due, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="`sinks` must be None for the float8"):
        forward._refuse_sinks(SINKS)
