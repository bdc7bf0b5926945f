# SPDX-License-Identifier: Apache-2.0
"""linear_act on an H100 or H200, against float64: every kernel, ragged sizes, graphs."""

import pytest
import torch
from torch.nn import functional

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def make():
    generator = torch.Generator("cuda").manual_seed(7)

    def draw(m, n, k, dtype=torch.bfloat16, with_bias=True):
        def rand(*shape):
            return torch.randn(*shape, device="cuda", generator=generator)

        weight = (rand(n, k) / k**0.5).to(dtype)
        return rand(m, k).to(dtype), weight, rand(n).to(dtype) if with_bias else None

    return draw


def assert_right(result, x, weight, bias, activation="gelu"):
    """The result is the float64 one, rounded once: half a unit in the last place, and what float32
    sums of k products and the activation's approximation (2**-15 of its slope) add."""
    truth = x.double() @ weight.double().T
    if bias is not None:
        truth += bias.double()
    truth = ACTIVATIONS[activation](truth)
    half_unit = torch.finfo(x.dtype).eps / 2
    error = (result.double() - truth).abs()
    allowed = 1.02 * half_unit * truth.abs() + 2**-22 * x.shape[-1] ** 0.5 + 2e-5
    assert (error <= allowed).all(), (error / allowed).max().item()


def check(tensors, activation="gelu", **options):
    assert_right(
        tiercel.linear_act(*tensors, activation=activation, **options), *tensors, activation
    )


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_activations(make, dtype, activation, with_bias):
    for m, n, k in [(1, 8, 8), (5, 264, 72), (129, 520, 136), (300, 1032, 1032)]:
        check(make(m, n, k, dtype, with_bias), activation)


# Sizes that take each of the kernels at least once (tests/linear/test_linear_act_plan.py).
@pytest.mark.parametrize("m", [1, 7, 16, 33, 64, 65, 96, 128, 192, 200, 512, 768, 1000, 1024, 2047])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (2056, 1032), (1024, 8192), (14336, 512)])
def test_sizes(make, m, n, k):
    check(make(m, n, k))


@pytest.mark.parametrize(("n", "k"), [(8, 8), (8, 4096), (4096, 8), (72, 200), (1000, 1000)])
@pytest.mark.parametrize("m", [1, 63, 129, 1025])
def test_ragged(make, m, n, k):
    check(make(m, n, k, torch.float16))


def test_rows_apart_and_leading_dimensions(make):
    x, weight, bias = make(64, 128, 256)
    wide = torch.full((64, 512), float("nan"), device="cuda", dtype=x.dtype)
    wide[:, 128:384] = x
    check((wide[:, 128:384], weight, bias))
    cube = x.view(4, 16, 256)
    flat = tiercel.linear_act(x, weight, bias)
    assert torch.equal(tiercel.linear_act(cube, weight, bias).view(64, 128), flat)
    assert tiercel.linear_act(x[:0], weight, bias).shape == (0, 128)


def test_special_values(make):
    x, weight, bias = make(130, 256, 64)
    x[3, 5], x[100, 6] = float("nan"), float("inf")
    for activation in ACTIVATIONS:
        result = tiercel.linear_act(x, weight, bias, activation=activation)
        assert result[3].isnan().all()
        clean = torch.ones(130, dtype=torch.bool, device="cuda")
        clean[[3, 100]] = False
        assert result[clean].isfinite().all()
        sums = functional.linear(x[100:101].float(), weight.float(), bias.float())
        positive = (sums == float("inf")).squeeze(0)
        assert (result[100][positive] == float("inf")).all(), activation


def test_out_and_poison(make):
    x, weight, bias = make(1001, 776, 520)
    out = torch.full((1001, 776), float("nan"), device="cuda", dtype=x.dtype)
    assert tiercel.linear_act(x, weight, bias, out=out) is out
    assert_right(out, x, weight, bias)


def test_more_than_2_to_31_elements(make):
    x, weight, bias = make(70_000, 32_768, 64)
    result = tiercel.linear_act(x, weight, bias)
    for rows in (slice(0, 200), slice(65_400, 65_700), slice(69_800, 70_000)):
        assert_right(result[rows], x[rows], weight, bias)


@pytest.mark.parametrize("m", [1, 64, 256, 2048])
def test_first_call_inside_a_graph_capture(make, m):
    tensors = make(m, 1024, 512)
    out = torch.empty(m, 1024, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tiercel.linear_act(*tensors, out=out)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert_right(out, *tensors)


def test_dependent_launches_see_what_went_before(make):
    """Kernels that start early wait for their input: each call reads the last one's result."""
    _, weight, bias = make(1, 512, 512)
    x = torch.randn(300, 512, device="cuda").bfloat16()
    expected = x
    for _ in range(20):
        x = tiercel.linear_act(x, weight, bias)
    for _ in range(20):
        expected = tiercel.linear_act(expected, weight, bias)
        torch.cuda.synchronize()
    assert torch.equal(x, expected)


def test_gradients(make):
    tensors = [t.requires_grad_() for t in make(64, 128, 256)]
    grad = torch.randn(64, 128, device="cuda").bfloat16()
    tiercel.linear_act(*tensors).backward(grad)
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    functional.gelu(functional.linear(*doubles)).backward(grad.double())
    for tensor, double in zip(tensors, doubles, strict=True):
        torch.testing.assert_close(tensor.grad.double(), double.grad, rtol=0.05, atol=0.1)


def test_unaligned_runs_on_ref(make):
    x, weight, bias = make(16, 64, 100)
    with pytest.warns(tiercel.FallbackWarning, match="multiple of 8"):
        tiercel.linear_act(x, weight, bias)
