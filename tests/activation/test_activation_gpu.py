# SPDX-License-Identifier: Apache-2.0
"""Activations on an H100 or H200, against float64: every kernel, ragged sizes, graphs."""

import pytest
import torch
from support import activation_truth as every
from torch.nn import functional

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

FUNCTIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FP8 = torch.float8_e4m3fn
FORMS = ["plain", "packed", "pair"]


def rand(*shape, dtype=torch.bfloat16, seed=0, grad=False):
    generator = torch.Generator("cuda").manual_seed(seed)
    drawn = 3 * torch.randn(*shape, device="cuda", generator=generator)
    return drawn.to(dtype).requires_grad_(grad)


def call(function, form, inputs, **options):
    """Ours, by a name of FUNCTIONS."""
    name, _, approximate = function.partition("_")
    if name == "gelu":
        options["approximate"] = approximate or "none"
    op = getattr(tiercel, name if form == "plain" else f"{name}_and_mul")
    return op(*inputs, **options)


def truth(function, form, inputs):
    wide = [t.detach().double().requires_grad_() for t in inputs]
    gate, up = wide[0].chunk(2, -1) if form == "packed" else (wide[0], wide[-1])
    result = FUNCTIONS[function](gate)
    return wide, result if form == "plain" else result * up


def make(form, *shape, **options):
    shapes = {"plain": [shape], "pair": [shape] * 2, "packed": [(*shape[:-1], 2 * shape[-1])]}
    return [rand(*s, seed=i, **options) for i, s in enumerate(shapes[form])]


def assert_right(result, expected, slack=2e-6):
    """Rounded once: half a unit in the last place of the dtype; and what float32 arithmetic and the
    short forms of the exponential lose, relative to the result and to the factors' size."""
    half_unit = torch.finfo(result.dtype).eps / 2
    error = (result.double() - expected).abs()
    allowed = (
        (1.02 * half_unit + slack) * expected.abs()
        + slack
        + torch.finfo(result.dtype).smallest_normal * (result.dtype == torch.float16)
    )
    worst = (error / allowed).max().item() if error.numel() else 0.0
    assert worst <= 1, worst


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(3, 8), (5, 77), (2, 3, 264), (1,), (129, 1000), (0, 16)])
def test_forward_and_backward(form, function, dtype, shape):
    inputs = make(form, *shape, dtype=dtype, grad=True)
    result = call(function, form, inputs)
    wide, expected = truth(function, form, inputs)
    assert result.shape == expected.shape and result.dtype == dtype and result.is_contiguous()
    assert_right(result, expected)
    grad = rand(*shape, dtype=dtype, seed=9)
    result.backward(grad)
    expected.backward(grad.double())
    for got, due in zip(inputs, wide, strict=True):
        assert_right(got.grad, due.grad, slack=3e-5)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("form", ["packed", "pair"])
@pytest.mark.parametrize("shape", [(3, 8), (5, 77), (129, 1000), (0, 16)])
def test_gradients_and_the_result_again(form, function, dtype, shape):
    inputs = make(form, *shape, dtype=dtype)
    grad = rand(*shape, dtype=dtype, seed=9)
    name, _, approximate = function.partition("_")
    options = (approximate or "none",) if name == "gelu" else ()
    given = (grad, *inputs, *[None] * (form == "packed"), *options, None)
    ops = torch.ops.tiercel
    *slopes, result = getattr(ops, f"{name}_and_mul_backward_and_result")(*given)
    assert all(map(torch.equal, slopes, getattr(ops, f"{name}_and_mul_backward")(*given)))
    assert torch.equal(result, call(function, form, inputs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_value(function, dtype):
    """Values, gated ones and slopes: a part of the exact one, in the tails too."""
    host = every.every_value(dtype)
    slack = every.SLACK[function, dtype == torch.float32]
    for x in (host, host[host.isnan() | (host.abs() < 1e18)]):
        exact, given = every.value(function, x), x.cuda().requires_grad_()
        result = call(function, "plain", [given])
        every.assert_right(result.cpu(), exact, every.allowed_of(dtype, exact, slack))
        factor = torch.full_like(given, 16.0)
        gated = call(function, "pair", [given.detach(), factor.detach()]).cpu()
        allowed = every.allowed_of(dtype, 16 * exact, slack, factor=16.0)
        every.assert_right(gated, 16 * exact, allowed)
    result.backward(torch.ones_like(result))
    exact = every.slope(function, x)
    allowed = every.allowed_of(dtype, exact, 4 * slack, smallest=8 * every.NORMAL)
    every.assert_right(given.grad.cpu(), exact, allowed + ((x > -4) & (x < 1)) * 2.0**-19)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_large(form, function, dtype):
    """More than one vector a thread, with an end that is no multiple of anything."""
    for shape in [(2049, 4104), (999, 9001)]:
        inputs = make(form, *shape, dtype=dtype)
        assert_right(call(function, form, inputs), truth(function, form, inputs)[1])


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("columns", [64, 77, 4096])
def test_float8(form, dtype, columns):
    for function in FUNCTIONS:
        inputs = make(form, 33, columns, dtype=dtype)
        scale = torch.tensor([0.013], device="cuda")
        result = call(function, form, inputs, scale=scale)
        assert result.dtype == FP8
        expected = (truth(function, form, inputs)[1] / scale.double()).clamp(-448, 448)
        # Half a unit of 3 mantissa bits, or of the smallest subnormal, 2**-9.
        error = (result.double() - expected).abs()
        assert (error <= expected.abs() * 2**-4 * 1.0001 + 2**-10 * 1.0001).all()
        assert result.double().abs().max() == 448  # some of them saturate
        out = torch.empty_like(result)
        assert call(function, form, inputs, scale=scale, out=out) is out
        assert torch.equal(out.view(torch.uint8), result.view(torch.uint8))


def test_float8_special_values():
    x = torch.tensor([float("nan"), float("inf"), 1e30, -1.0, 0.0], device="cuda")
    result = tiercel.relu(x, scale=torch.ones((), device="cuda")).float()
    assert result[0].isnan() and result[1:].tolist() == [448, 448, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_special_values_are_torchs(function, dtype):
    nan, inf = float("nan"), float("inf")
    x = torch.tensor(
        [nan, inf, -inf, 0.0, -0.0, 1e4, -1e4, 60.0, -60.0], device="cuda", dtype=dtype
    )
    got, due = call(function, "plain", [x]), FUNCTIONS[function](x)
    torch.testing.assert_close(
        got, due, equal_nan=True, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-6
    )


def test_strided_and_misaligned():
    base = rand(64, 3 * 520, dtype=torch.bfloat16)
    for x in (
        base[:, 520:1040],  # rows apart
        base[:, 1:521],  # not on 16 bytes
        base[::2, ::2],  # elements apart
        base[:, :520].t(),
        base.view(4, 16, -1)[:, 3, :520],
        base.view(8, 8, -1)[:, ::2, :520],  # rows at two distances
        base.flatten()[3:1003],
        base[:1].expand(5, -1),
    ):
        assert_right(tiercel.silu(x), functional.silu(x.double()))
        assert_right(tiercel.gelu_and_mul(x, x), functional.gelu(x.double()) * x.double())
        if x.shape[-1] % 2 == 0:
            gate, up = x.double().chunk(2, -1)
            assert_right(tiercel.silu_and_mul(x), functional.silu(gate) * up)
    x = base[:, :520].detach().requires_grad_()
    tiercel.silu_and_mul(x).sum().backward()  # a gradient of stride 0
    wide = x.detach().double().requires_grad_()
    gate, up = wide.chunk(2, -1)
    (functional.silu(gate) * up).sum().backward()
    assert_right(x.grad, wide.grad, slack=3e-5)


def test_out_and_poison():
    x = rand(1001, 2 * 776)
    out = torch.full((1001, 776), float("nan"), device="cuda", dtype=x.dtype)
    assert tiercel.silu_and_mul(x, out=out) is out
    assert_right(out, truth("silu", "packed", [x])[1])
    y = x.clone()
    assert torch.equal(tiercel.silu(y, out=y), tiercel.silu(x))


def test_more_than_2_to_31_elements():
    x = torch.empty(33_000, 2 * 65_600, device="cuda", dtype=torch.bfloat16)
    x[-70:] = rand(70, 2 * 65_600)
    result = tiercel.silu_and_mul(x)
    assert_right(result[-70:], truth("silu", "packed", [x[-70:]])[1])
    flat = tiercel.relu(x)
    assert torch.equal(flat[-70:], functional.relu(x[-70:]))


def test_second_derivative():
    x = rand(4, 16, dtype=torch.float32, grad=True)
    (first,) = torch.autograd.grad(tiercel.silu(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    wide = x.detach().double().requires_grad_()
    (first,) = torch.autograd.grad(functional.silu(wide).sum(), wide, create_graph=True)
    (due,) = torch.autograd.grad(first.sum(), wide)
    torch.testing.assert_close(second.double(), due, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 64, 4096])
def test_first_call_inside_a_graph_capture(rows):
    x = rand(rows, 2048)
    out = torch.empty(rows, 1024, device="cuda", dtype=x.dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tiercel.gelu_and_mul(x, out=out)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert_right(out, truth("gelu", "packed", [x])[1])


def test_dependent_launches_see_what_went_before():
    """Kernels that start early wait for their input: each call reads the last one's result."""
    for rows in (1, 300, 20_000):
        x = rand(rows, 1024, dtype=torch.float32)
        buffers = [x, torch.empty_like(x), torch.empty_like(x)]
        expected = x
        for i in range(12):
            tiercel.silu(buffers[i % 3], out=buffers[(i + 1) % 3])
            expected = functional.silu(expected)
        torch.testing.assert_close(buffers[12 % 3], expected, rtol=1e-4, atol=1e-6)


def test_streams():
    x = rand(4096, 8192)
    expected = tiercel.silu_and_mul(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000)
        result = tiercel.silu_and_mul(x)
    stream.synchronize()
    assert torch.equal(result, expected)


def test_compile():
    x = rand(64, 512, dtype=torch.float32, grad=True)
    function = torch.compile(lambda x: tiercel.silu_and_mul(x * 2).sum(), fullgraph=True)
    function(x).backward()
    got, x.grad = x.grad, None
    tiercel.silu_and_mul(x * 2).sum().backward()
    torch.testing.assert_close(got, x.grad)
