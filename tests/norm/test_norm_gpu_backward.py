# SPDX-License-Identifier: Apache-2.0
"""The norms' gradients on an H100 or H200, against float64."""

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


@pytest.fixture(params=["rms_norm", "layer_norm"])
def op(request):
    return getattr(tiercel, request.param)


@pytest.fixture
def make():
    torch.manual_seed(8)  # of the results' gradients
    generator = torch.Generator("cuda").manual_seed(7)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    return draw


def assert_close(got, due, what, terms=0.0):
    """By the gradient's own size: rounded once, after sums in float32. `terms` are what those sums
    are of, or how large one of random signs is, where little is left of them."""
    unit = torch.finfo(got.dtype).eps / 2
    scale = due.square().mean().sqrt()
    error = (got.double() - due).abs()
    allowed = 1.1 * unit * due.abs() + 4e-6 * (due.abs() + scale + terms) + unit * 2**-6 * scale
    assert (error <= allowed).all(), (what, (error / allowed).max().item())


def check(op, x, weight=None, bias=None, residual=None):
    named = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    given = {n: t.detach().requires_grad_() for n, t in named.items() if t is not None}
    results = op(**given, eps=EPS)
    results = results if residual is not None else (results,)
    grads = [torch.randn(r.shape, device="cuda").to(r.dtype) for r in results]
    torch.autograd.backward(results, grads)

    total = (x if residual is None else results[1]).detach().double().requires_grad_()
    wide = {
        n: t.detach().double().requires_grad_() for n, t in given.items() if n in ("weight", "bias")
    }
    due = getattr(tiercel.ref, op.__name__)(total, **wide, eps=EPS)
    due.backward(grads[0].double())
    grad_total = total.grad if residual is None else total.grad + grads[1].double()
    centred = total.detach() - (total.detach().mean(-1, True) if op is tiercel.layer_norm else 0)
    rstd = (centred.square().mean(-1, True) + EPS).rsqrt()
    grad = grads[0].double()
    terms = rstd * grad.abs() * (1 if weight is None else weight.double().abs())
    assert_close(given["x"].grad, grad_total, "x", terms)
    columns = [(grad * centred * rstd).reshape(-1, x.shape[-1]), grad.reshape(-1, x.shape[-1])]
    sums = dict(zip(("weight", "bias"), (c.norm(dim=0) for c in columns), strict=True))
    alone = x.shape[-1] == 1  # its size says nothing of its terms'
    if residual is not None:
        assert torch.equal(given["residual"].grad, given["x"].grad)
    for name, tensor in wide.items():
        assert given[name].grad.dtype == given[name].dtype
        assert_close(given[name].grad, tensor.grad, name, sums[name] if alone else 0.0)


COLUMNS = [1, 7, 64, 65, 128, 200, 256, 512, 768, 1000, 1024, 1032, 2048, 2560, 4095, 4096, 5120]
LONG = [8192, 8200, 16384, 16391, 20000, 32768, 65536, 65537, 131_072]


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_short_rows(op, make, columns, dtype):
    for rows in (1, 33, 700):
        x, residual = make(rows, columns, dtype=dtype), make(rows, columns, dtype=dtype)
        weight, bias = make(columns, dtype=dtype), make(columns, dtype=dtype)
        check(op, x)
        check(op, x, weight)
        check(op, x, weight, bias, residual)
        check(op, x, None, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", LONG)
def test_long_rows(op, make, columns, dtype):
    for rows in (1, 150):
        x, residual = make(rows, columns, dtype=dtype), make(rows, columns, dtype=dtype)
        check(op, x, make(columns, dtype=dtype))
        if columns != 65537:  # beyond the forward's limit where rows are not on 16 bytes
            check(op, x, make(columns, dtype=dtype), make(columns, dtype=dtype), residual)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("columns", [64, 512, 1000, 1001, 4096])
def test_float32_parameters(op, make, columns, dtype):
    check(op, make(500, columns, dtype=dtype), make(columns), make(columns))


def test_many_rows(op, make):
    for columns in (64, 320, 1024):
        check(op, make(20_011, columns, dtype=torch.bfloat16), make(columns, dtype=torch.bfloat16))
        off_16_bytes = make(columns + 1, dtype=torch.float16)[1:]
        check(op, make(20_011, columns, dtype=torch.float16), off_16_bytes)


def test_strides(op, make):
    weight = make(1000)
    check(op, make(40, 1016)[:, 8:1008], weight)
    check(op, make(40, 1016)[:, 1:1001], weight)
    check(op, make(1000, 40).t(), weight)
    check(op, make(4, 3, 1000).transpose(0, 1), weight)
    x = make(30, 1000).requires_grad_()
    op(x, weight).sum().backward()  # a gradient without strides of its own
    assert x.grad.isfinite().all()


def test_no_rows(op, make):
    x, weight = make(0, 512).requires_grad_(), make(512).requires_grad_()
    op(x, weight).sum().backward()
    assert x.grad.shape == (0, 512) and (weight.grad == 0).all()


def test_only_the_gradients_that_are_asked_for(op, make):
    x, weight, bias = make(100, 512), make(512).requires_grad_(), make(512)
    op(x, weight, bias).sum().backward()
    assert weight.grad is not None and x.grad is None and bias.grad is None
    x, weight = make(100, 512).requires_grad_(), make(512)
    op(x, weight).sum().backward()
    assert x.grad is not None and weight.grad is None


def test_deterministic(op, make):
    x = make(3000, 1536, dtype=torch.bfloat16)
    weight = make(1536, dtype=torch.bfloat16).requires_grad_()
    grad = make(3000, 1536, dtype=torch.bfloat16)

    def gradient():
        return torch.autograd.grad(op(x, weight), weight, grad)[0]

    first = gradient()
    assert all(torch.equal(first, gradient()) for _ in range(5))


def test_inside_a_graph(op, make):
    x, weight = make(256, 1024).requires_grad_(), make(1024).requires_grad_()
    grad = make(256, 1024)
    expected = torch.autograd.grad(op(x, weight), (x, weight), grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = torch.autograd.grad(op(x, weight), (x, weight), grad)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def test_more_than_2_to_31_elements(op):
    x = torch.empty(530_000, 4096, device="cuda", dtype=torch.bfloat16)
    x.normal_(generator=torch.Generator("cuda").manual_seed(1))
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    function = getattr(torch.ops.tiercel, f"{op.__name__}_backward")
    grad_out = x.roll(1, 1)  # of x itself next to nothing would be left
    grad_x, grad_weight, _ = function(x, weight, grad_out, None, True, False, x.dtype, EPS)
    for rows in (slice(0, 64), slice(524_260, 524_324), slice(529_936, 530_000)):
        wide = x[rows].double().requires_grad_()
        due = getattr(tiercel.ref, op.__name__)(wide, eps=EPS)
        (grad,) = torch.autograd.grad(due, wide, grad_out[rows].double())
        assert_close(grad_x[rows], grad, "x")
    assert grad_weight.isfinite().all()


def test_training_step_under_compile(make):
    module = tiercel.nn.RMSNorm(512, device="cuda")
    x = make(64, 512).requires_grad_()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    compiled(x).square().sum().backward()
    grads = x.grad.clone(), module.weight.grad.clone()
    x.grad = module.weight.grad = None
    module(x).square().sum().backward()
    torch.testing.assert_close(grads[0], x.grad)
    torch.testing.assert_close(grads[1], module.weight.grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [33, 128, 300, 768, 1024, 1001, 4096, 9001, 17_000, 65_536])
def test_layer_norm_far_from_zero(make, columns, dtype):
    """Rows of one value: the weight's gradient is 0, exactly. Others: a part of the terms."""
    for rows in (3, 400):
        x = torch.full((rows, columns), -59904.0, device="cuda", dtype=dtype)
        weight = make(columns, dtype=dtype).requires_grad_()
        grad = (make(rows, columns) * 2.0**-6).to(dtype)
        tiercel.layer_norm(x.requires_grad_(), weight, eps=1e-6).backward(grad)
        assert not weight.grad.any() and x.grad.isfinite().all()

    x = (make(9, columns) * 1e-2 + 1000.0).to(dtype).requires_grad_()
    weight, grad = make(columns, dtype=dtype).requires_grad_(), make(9, columns).to(dtype)
    tiercel.layer_norm(x, weight, eps=1e-3).backward(grad)
    wide, of_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    tiercel.ref.layer_norm(wide, of_weight, eps=1e-3).backward(grad.double())
    centred = wide.detach() - wide.detach().mean(-1, keepdim=True)
    rstd = (centred.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    normal, weighted = (centred * rstd).abs(), (grad.double() * of_weight.detach()).abs()
    terms = weighted + weighted.mean(-1, True) + normal * (weighted * normal).mean(-1, True)
    assert_close(x.grad, wide.grad, "x", 2 * rstd * terms)
    assert_close(weight.grad, of_weight.grad, "weight", 2 * (grad.abs() * (1 + normal)).sum(0))
