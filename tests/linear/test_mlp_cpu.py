# SPDX-License-Identifier: Apache-2.0
"""Residuals, gated layers, the MLP of both and the gradients' operators, on any machine."""

import pytest
import torch
from torch.nn import functional

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu_squared": lambda x: functional.relu(x).square(),
}
GATES = ["silu", "gelu", "gelu_tanh"]
M, N, K = 5, 24, 16


def make(*shape, seed=0, dtype=torch.bfloat16, grad=False):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) / 2).to(dtype).requires_grad_(grad)


def layer(parts=1, grad=False, **options):
    return (
        make(M, K, seed=1, grad=grad, **options),
        make(parts * N, K, seed=2, grad=grad, **options),
        make(parts * N, seed=3, grad=grad, **options),
    )


def close(result, truth, units=4):
    eps = torch.finfo(result.dtype).eps
    torch.testing.assert_close(result.double(), truth, rtol=units * eps, atol=units * eps)


def gate(act, both):
    a, b = both.chunk(2, dim=-1)
    return ACTIVATIONS[act](a) * b


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_residual(act, with_bias):
    x, weight, bias = layer()
    bias, residual = bias if with_bias else None, make(M, N, seed=4)
    truth = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    truth = ACTIVATIONS[act](truth) + residual.double()
    result = tiercel.linear_act(x, weight, bias, activation=act, residual=residual)
    close(result, truth)
    out = torch.empty(M, N, dtype=x.dtype)
    tiercel.linear_act(x, weight, bias, activation=act, residual=residual, out=out)
    assert torch.equal(out, result)


@pytest.mark.parametrize("act", GATES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gated(act, with_bias, dtype):
    x, weight, bias = layer(2, dtype=dtype)
    bias = bias if with_bias else None
    truth = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    result = tiercel.gated_linear(x, weight, bias, activation=act)
    close(result, gate(act, truth))
    out = torch.empty(M, N, dtype=dtype)
    assert tiercel.gated_linear(x, weight, bias, activation=act, out=out) is out
    assert torch.equal(out, result)
    cube = tiercel.gated_linear(x.view(1, M, 1, K), weight, bias, activation=act)
    assert cube.shape == (1, M, 1, N) and torch.equal(cube.view(M, N), result)


@pytest.mark.parametrize("gated", [True, False])
def test_mlp(gated):
    x, residual = make(M, K), make(M, N, seed=5)
    up, up_bias, down = layer(2 if gated else 1)[1:] + (make(N, N, seed=6),)
    down_bias = make(N, seed=7)
    arguments = (x, up, down, up_bias, down_bias)
    sums = functional.linear(x.double(), up.double(), up_bias.double())
    hidden = gate("silu", sums) if gated else functional.silu(sums)
    truth = functional.linear(hidden, down.double(), down_bias.double()) + residual.double()
    close(tiercel.fused_mlp(*arguments, gated=gated, residual=residual), truth)
    close(tiercel.ref.fused_mlp(*arguments, gated=gated, residual=residual), truth)


def gradients(function, tensors, grad):
    tensors = [t.detach().requires_grad_() for t in tensors]
    function(*tensors).backward(grad)
    return [t.grad for t in tensors]


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("with_residual", [True, False])
def test_gradients(act, with_residual):
    tensors = (*layer(), make(M, N, seed=4))[: 4 if with_residual else 3]
    grad = make(M, N, seed=5)

    def ours(x, weight, bias, residual=None):
        return tiercel.linear_act(x, weight, bias, activation=act, residual=residual)

    def truth(x, weight, bias, residual=None):
        return tiercel.ref.linear_act(x, weight, bias, activation=act, residual=residual)

    due = gradients(truth, [t.double() for t in tensors], grad.double())
    for found, wanted in zip(gradients(ours, tensors, grad), due, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("act", GATES)
def test_gradients_of_gated(act):
    tensors, grad = layer(2), make(M, N, seed=5)
    due = gradients(
        lambda *t: tiercel.ref.gated_linear(*t, activation=act),
        [t.double() for t in tensors],
        grad.double(),
    )
    # The public function, which keeps both halves, and the operator, which computes them again.
    for ours in (
        lambda *t: tiercel.gated_linear(*t, activation=act),
        lambda *t: torch.ops.tiercel.gated_linear(*t, activation=act),
    ):
        for found, wanted in zip(gradients(ours, tensors, grad), due, strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=0.03, atol=0.03)


def test_gradients_of_an_mlp_and_compiled():
    tensors = (make(M, K), layer(2)[1], make(K, N, seed=6))
    grad = make(M, K, seed=8)

    def ours(x, up, down):
        return tiercel.fused_mlp(x, up, down, residual=x)

    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    due = gradients(
        lambda x, up, down: tiercel.ref.fused_mlp(x, up, down, residual=x),
        [t.double() for t in tensors],
        grad.double(),
    )
    for function in (ours, compiled):
        for found, wanted in zip(gradients(function, tensors, grad), due, strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=0.03, atol=0.03)


def test_what_the_forward_keeps():
    """The sums where the slope is of them, the result for ReLU, else neither."""
    x, weight, bias = layer(grad=True)
    for act, kept in (("none", 0), ("relu", 1), ("silu", 1), ("gelu", 1), ("gelu_tanh", 1)):
        y = tiercel.linear_act(x, weight, bias, activation=act)
        saved = [t for t in y.grad_fn.saved_tensors if t is not None and t.shape == (M, N)]
        assert len(saved) == kept, act


def test_second_derivatives():
    x, weight, bias = (t.detach().requires_grad_() for t in layer())
    y = tiercel.linear_act(x, weight, bias, activation="silu")
    (first,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.float().square().sum(), weight)
    assert second.shape == weight.shape and second.isfinite().all() and second.abs().max() > 0


@pytest.mark.parametrize(
    ("error", "text", "changes"),
    [
        (
            ValueError,
            r"`weight` must have an even number of rows \[2N, K\]",
            {"weight": (7, K), "bias": (7,)},
        ),
    ],
)
def test_bad_gated_layers(error, text, changes):
    x, weight, bias = layer(2)
    given = {"x": x, "weight": weight, "bias": bias}
    with pytest.raises(error, match=f"^gated_linear: {text}"):
        tiercel.gated_linear(**given | {name: make(*shape) for name, shape in changes.items()})
