# SPDX-License-Identifier: Apache-2.0
"""softmax_online and log_softmax on an H100 or H200, against float64: kernels, masks, graphs."""

import warnings

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = {"softmax_online": torch.softmax, "log_softmax": torch.log_softmax}
INF, NAN = float("inf"), float("nan")


def rand(*shape, dtype=torch.float32, seed=0, factor=3.0, grad=False):
    generator = torch.Generator("cuda").manual_seed(seed)
    drawn = factor * torch.randn(*shape, device="cuda", generator=generator)
    return drawn.to(dtype).requires_grad_(grad)


def truth(op, x, scale=None, mask=None):
    scores = x.double()
    if scale is not None:
        scores = scores * scale
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -INF)
    elif mask is not None:
        scores = scores + mask.double()
    return OPS[op](scores, -1)


def assert_right(result, expected, slack=4e-6):
    """Rounded once: half a unit in the last place, and what float32 arithmetic loses: relative to
    a result of softmax, and to the scores' size for a logarithm."""
    assert result.dtype in DTYPES and result.shape == expected.shape
    half_unit = torch.finfo(result.dtype).eps / 2
    tiny = torch.finfo(result.dtype).smallest_normal if result.dtype == torch.float16 else 1e-37
    both = torch.isfinite(expected)
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result == -INF, expected == -INF)
    error = (result.double() - expected).abs()[both]
    allowed = (
        (1.02 * half_unit + slack) * expected.abs()[both] + slack * (expected <= 0).any() + tiny
    )
    worst = (error / allowed).max().item() if error.numel() else 0.0
    assert worst <= 1, worst


def assert_right_gradient(got, due, size):
    """`due` is the gradient of the rounded result, as torch's own: where one probability is near 1,
    the gradient of the exact one is another number."""
    eps = torch.finfo(got.dtype).eps
    tiny = torch.finfo(got.dtype).smallest_normal if got.dtype == torch.float16 else 1e-37
    error, allowed = (got.double() - due).abs(), 0.51 * eps * due.abs() + 2e-5 * size + tiny
    assert (error <= allowed).all(), (error / allowed).max().item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(1000, 10_240), (700, 20_011), (400, 32_000), (300, 50_257), (70, 131_072), (40, 180_001)],
)
def test_many_long_rows(shape, dtype):
    """More of them than blocks run at once; odd ones begin anywhere."""
    x = rand(*shape, dtype=dtype)
    x[1, 5], x[2, -1], x[3], x[4, 1:], x[5, : shape[1] // 2] = NAN, INF, -INF, -INF, -INF
    for op in OPS:
        result = getattr(tiercel, op)(x, scale=-0.5)
        assert_right(result, truth(op, x, scale=-0.5), slack=8e-6)
    aside = torch.empty(x.numel() + 8, device="cuda", dtype=dtype)
    for offset in (1, 8):  # not on lines
        y = aside[offset : offset + x.numel()].view(shape)
        y.copy_(x)
        out = torch.empty_like(aside)[offset : offset + x.numel()].view(shape)
        tiercel.softmax_online(y, scale=-0.5, out=out)
        assert_right(out, truth("softmax_online", x, scale=-0.5), slack=8e-6)


# One more and one less than what each kernel holds, multiples of a vector and not.
LENGTHS = [
    1,
    2,
    7,
    8,
    15,
    16,
    17,
    31,
    33,
    64,
    100,
    127,
    128,
    129,
    200,
    256,
    257,
    500,
    512,
    1000,
    1024,
]
LONG = [1025, 2047, 2048, 3000, 4096, 4097, 8192, 10_001, 16_384, 16_392, 32_000, 32_768, 32_775]
LONGER = [50_257, 65_536, 100_000, 131_072, 131_073, 151_936, 262_144]
TOO_LONG = [262_145, 300_000, 1_000_001]


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("columns", LENGTHS)
def test_short_rows(op, dtype, columns):
    for rows in (1, 5, 131):
        check(op, rows, columns, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("columns", LONG + LONGER + TOO_LONG)
def test_long_rows(op, dtype, columns):
    check(op, 3, columns, dtype)


def check(op, rows, columns, dtype):
    x = rand(rows, columns, dtype=dtype, grad=True)
    result = getattr(tiercel, op)(x)
    assert_right(result, truth(op, x.detach()))
    grad = rand(rows, columns, dtype=dtype, seed=1)
    result.backward(grad)
    # The gradient of the rounded result, as torch's own: from what the forward returned.
    y, g = result.detach().double(), grad.double()
    if op == "log_softmax":
        total = g.sum(-1, keepdim=True)
        assert_right_gradient(x.grad, g - y.exp() * total, (1 + total.abs()) * y.exp())
    else:
        assert_right_gradient(x.grad, y * (g - (g * y).sum(-1, keepdim=True)), y)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("columns", [16, 77, 264, 1000])
def test_masks(op, dtype, columns):
    check_masks(op, dtype, (2, 3, 5, columns))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("columns", [4096, 4099, 20_000, 66_000, 300_000])
def test_masks_of_long_rows(op, columns):
    check_masks(op, torch.bfloat16, (1, 2, 2, columns))


def check_masks(op, dtype, shape):
    keep = torch.rand(*shape, device="cuda") < 0.7
    keep[..., 0] = True
    added = rand(*shape, seed=3)
    for mask in (
        keep,
        keep[:1, :1],
        keep[:, :1],
        keep[:, :, :1],
        keep[0, :, :1],
        keep[0, 0, 0],
        keep[..., :1],
        added,
        added.to(dtype),
        added[:, :1, :1].to(dtype),
        added[0, 0],
        added.mT.contiguous().mT,
    ):
        x = rand(*shape, dtype=dtype, grad=True)
        result = getattr(tiercel, op)(x, scale=0.37, mask=mask)
        assert_right(result, truth(op, x.detach(), 0.37, mask))
        grad = rand(*shape, dtype=dtype, seed=4)
        if mask.dtype == torch.bool and op == "log_softmax":
            grad = grad * mask.expand(shape)  # else 0 * -inf
        result.backward(grad)
        if op == "softmax_online":
            y, g = result.detach().double(), grad.double()
            assert_right_gradient(x.grad, 0.37 * y * (g - (g * y).sum(-1, keepdim=True)), y)
        else:
            wide = x.detach().double().requires_grad_()
            truth(op, wide, 0.37, mask).backward(grad.double())
            torch.testing.assert_close(x.grad.double(), wide.grad, rtol=0.02, atol=0.05)


def test_gradient_of_a_mask():
    x, mask = rand(2, 3, 64, grad=True), rand(3, 1, seed=1, grad=True)
    tiercel.softmax_online(
        x, scale=0.5, mask=mask * torch.ones(64, device="cuda")
    ).square().sum().backward()
    wide, wide_mask = (t.detach().double().requires_grad_() for t in (x, mask))
    torch.softmax(
        wide * 0.5 + wide_mask * torch.ones(64, device="cuda"), -1
    ).square().sum().backward()
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(mask.grad.double(), wide_mask.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("columns", [8, 100, 1000, 5000, 70_000, 300_000])
def test_special_values_are_torchs(op, dtype, columns):
    x = rand(8, columns, dtype=dtype)
    x[0, columns // 2] = NAN
    x[1, columns // 3] = INF
    x[2] = -INF
    x[3, columns // 2 :] = -INF
    x[4] = 0
    x[5, 0], x[5, 1:] = 100, -100
    x[6, -1] = 30_000
    got = getattr(tiercel, op)(x)
    assert_right(got, truth(op, x))
    hidden = torch.ones(8, columns, dtype=torch.bool, device="cuda")
    hidden[6] = False  # nothing left
    got = getattr(tiercel, op)(x, mask=hidden)
    assert got[6].isnan().all()


def test_gradient_of_a_row_without_scores_is_zero():
    x = rand(3, 64, grad=True)
    keep = torch.ones(3, 64, dtype=torch.bool, device="cuda")
    keep[1] = False
    for op in OPS:
        x.grad = None
        getattr(tiercel, op)(x, mask=keep)[keep].sum().backward()
        assert (x.grad[1] == 0).all() and x.grad.isfinite().all()


@pytest.mark.parametrize("scale", [-1.5, 0.01, 40.0])
def test_scales(scale):
    for columns in (5, 77, 3000, 270_000):
        x = rand(3, columns, dtype=torch.bfloat16)
        for op in OPS:
            assert_right(getattr(tiercel, op)(x, scale=scale), truth(op, x, scale), slack=1e-4)


def test_strided_and_misaligned():
    base = rand(64, 3 * 1040, dtype=torch.bfloat16)
    for x in (
        base[:, 1040:2080],  # rows apart
        base[:, 1:1041],  # not on 16 bytes
        base[::2, ::2],  # elements apart
        base[:, :1040].t(),
        base.view(4, 16, -1)[:, 3, :1040],
        base.view(8, 8, -1)[:, ::2, :1040],  # rows at two distances
        base.flatten()[3:1003],
        base[:1].expand(5, -1),
    ):
        for op in OPS:
            assert_right(getattr(tiercel, op)(x), truth(op, x))
    for start in range(1, 8):  # every distance from 16 bytes, rows moving against each other
        x = base.flatten()[start : start + 50 * 1003].view(50, 1003)
        assert_right(tiercel.softmax_online(x), truth("softmax_online", x))
    x = base[:, :1040].detach().requires_grad_()
    tiercel.softmax_online(x).sum().backward()  # a gradient of stride 0
    assert x.grad.abs().max() < 1e-2


def test_neighbours_are_left_alone():
    for columns in (3, 77, 1003, 5001):
        whole = torch.full((40 * columns + 64,), 7.0, device="cuda", dtype=torch.bfloat16)
        x = rand(40, columns, dtype=torch.bfloat16)
        for start in range(9):
            whole.fill_(7)
            out = whole[start : start + 40 * columns].view(40, columns)
            tiercel.softmax_online(x, out=out)
            assert_right(out, truth("softmax_online", x))
            assert (whole[:start] == 7).all() and (whole[start + 40 * columns :] == 7).all()


def test_out_in_place():
    for columns in (64, 5000, 100_000, 300_000):
        x = rand(3, columns)
        expected = tiercel.softmax_online(x)
        assert tiercel.softmax_online(x, out=x) is x
        assert torch.equal(x, expected)


def test_more_than_2_to_31_elements():
    x = torch.empty(17_000, 131_072, device="cuda", dtype=torch.bfloat16)
    x[-3:] = rand(3, 131_072)
    assert_right(tiercel.softmax_online(x)[-3:], truth("softmax_online", x[-3:]))
    x = x.view(-1, 128)
    assert_right(tiercel.softmax_online(x)[-99:], truth("softmax_online", x[-99:]))


def test_other_dimensions_run_on_ref():
    x = rand(4, 5, 6)
    with pytest.raises(tiercel.FallbackWarning, match="along the last dimension, got dim 1 of 3"):
        tiercel.softmax_online(x, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(tiercel.softmax_online(x, 0), torch.softmax(x, 0))
    with pytest.raises(NotImplementedError, match="`sm90`|'sm90'|last dimension"):
        tiercel.softmax_online(x, 1, backend="sm90")


@pytest.mark.parametrize("columns", [64, 2048, 65_536, 300_000])
def test_first_call_inside_a_graph_capture(columns):
    x = rand(5, columns, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tiercel.softmax_online(x, out=out)
    for _ in range(3):
        out.fill_(NAN)
        graph.replay()
        assert_right(out, truth("softmax_online", x))


def test_dependent_launches_see_what_went_before():
    """Kernels that start early wait for their input: each call reads the last one's result."""
    for rows, columns in ((1, 64), (3000, 128), (200, 8192), (7, 100_000)):
        x = rand(rows, columns)
        buffers = [x, torch.empty_like(x), torch.empty_like(x)]
        expected = x.double()
        for i in range(9):
            tiercel.softmax_online(buffers[i % 3], scale=5.0, out=buffers[(i + 1) % 3])
            expected = torch.softmax(expected * 5, -1)
        torch.testing.assert_close(buffers[0].double(), expected, rtol=1e-3, atol=1e-7)


def test_second_derivative():
    x = rand(4, 16, grad=True)
    for op in OPS:
        (first,) = torch.autograd.grad(getattr(tiercel, op)(x)[:, 0].sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        wide = x.detach().double().requires_grad_()
        (first,) = torch.autograd.grad(OPS[op](wide, -1)[:, 0].sum(), wide, create_graph=True)
        (due,) = torch.autograd.grad(first.square().sum(), wide)
        torch.testing.assert_close(second.double(), due, rtol=1e-4, atol=1e-6)


def test_compile():
    x = rand(64, 512, grad=True)
    function = torch.compile(
        lambda x: tiercel.softmax_online(x * 2, scale=0.5).square().sum(), fullgraph=True
    )
    function(x).backward()
    got, x.grad = x.grad, None
    tiercel.softmax_online(x * 2, scale=0.5).square().sum().backward()
    torch.testing.assert_close(got, x.grad)
