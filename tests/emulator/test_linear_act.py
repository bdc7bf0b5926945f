# SPDX-License-Identifier: Apache-2.0
"""linear_act's kernels (TMA, clusters with multicast, wgmma) on the emulator, against float64."""

import pytest
import torch
from support.activation_truth import value
from support.emulator import kernels, options
from support.float8 import dequantized
from torch.nn import functional

import tiercel

pytestmark = pytest.mark.torch

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def check(m, n, k, act="none", dtype=torch.bfloat16, bias=True, expected="", config=None):
    generator = torch.Generator().manual_seed(m + n + k)

    def rand(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    x, w = rand(m, k), rand(n, k, scale=k**-0.5)
    b = rand(n) if bias else None
    y = torch.full((m, n), torch.nan, dtype=dtype)
    arguments = (x, w, b, None, y, None, list(ACTIVATIONS).index(act))
    if config is not None:
        arguments += (config,)
    assert expected in kernels.linear_act_plan(*arguments)["kernel"]
    kernels.linear_act(*arguments)
    sums = x.double() @ w.double().T + (b.double() if bias else 0)
    truth = ACTIVATIONS[act](sums)
    # Half a unit of the result, and of sums and activation in float32.
    unit = torch.finfo(dtype).eps / 2
    error = (y.double() - truth).abs() - unit * truth.abs()
    assert error.max() <= 2e-5 * sums.abs().max()


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations(act, dtype):
    check(70, 136, 200, act, dtype)


@pytest.mark.parametrize("columns", [32, 48, 64])
def test_tiles_for_a_k_that_is_not_split(columns):
    """Those of the batch-invariant mode; more steps of K than the ring has stages."""
    with tiercel.batch_invariant():
        for m, n, k in ((5, 104, 1736), (columns, 136, 1160), (130, 264, 328), (64, 8, 8)):
            config = (64, columns, False, True, 1, 0)
            check(m, n, k, expected=f"_64x{columns}_whole_k", config=config)


def test_few_columns_are_split_for_any_number_of_rows():
    """A router's product has the same bits with one row and with many."""
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(n, 1032, generator=generator).bfloat16() for n in (300, 72))
    with tiercel.batch_invariant():
        results = []
        for rows in (1, 64, 300):
            y = torch.full((rows, 72), torch.nan, dtype=x.dtype)
            given = (x[:rows], w, None, None, y, None, 0)
            assert kernels.linear_act_plan(*given)["splits"] == 2
            kernels.linear_act(*given)
            results.append(y)
    assert torch.equal(results[0], results[2][:1]) and torch.equal(results[1], results[2][:64])


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 8, 8), "split_k"),
        ((3, 4096, 1032), "64x32_split_k"),
        ((17, 264, 4096), "split_k"),
        ((129, 1000, 520), "split_k"),
        ((1000, 1032, 72), "128"),
        ((1100, 2056, 64), "128"),
        ((300, 4104, 136), ""),
    ],
)
def test_shapes(shape, expected):
    check(*shape, expected=expected)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    "tile", [(64, 32), (64, 112), (128, 64), (128, 96), (128, 112)], ids=lambda t: f"{t[0]}x{t[1]}"
)
def test_every_tile_for_few_rows(tile, splits):
    name = f"{tile[0]}x{tile[1]}_split_k"
    for m in (3, 64, 129):
        check(m, 264, 328, "silu", expected=name, config=(*tile, False, True, splits, 0))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_order_of_warps(seed):
    with options(lazy=seed != 2, seed=seed):
        check(260, 520, 328, "gelu")
        check(20, 520, 2056, "silu")


def test_no_bias():
    check(33, 72, 264, bias=False)


def beside(m, n, k, dtype, parts=1):
    """x, weight, bias and a result to fill; sums of about 1."""
    generator = torch.Generator().manual_seed(m + n + k)

    def rand(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    x, w = rand(m, k), rand(parts * n, k, scale=k**-0.5)
    return x, w, rand(parts * n), torch.full((m, n), torch.nan, dtype=dtype), rand(m, n)


def assert_near(result, truth):
    """Half a unit of the result, and of float32 sums."""
    unit = torch.finfo(result.dtype).eps / 2
    error = (result.double() - truth).abs() - 1.02 * unit * truth.abs()
    assert error.max() <= 5e-5 * truth.abs().max()


@pytest.mark.parametrize("shape", [(5, 136, 200), (300, 264, 136)])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_residual_and_sums(shape, act):
    for dtype in (torch.bfloat16, torch.float16) if act == "gelu" else (torch.bfloat16,):
        x, w, b, y, residual = beside(*shape, dtype)
        sums = None if act == "none" else torch.full_like(y, torch.nan)
        index = list(ACTIVATIONS).index(act)
        kernels.linear_act(x, w, b, residual, y, sums, index)
        truth = x.double() @ w.double().T + b.double()
        assert_near(y, ACTIVATIONS[act](truth) + residual.double())
        if sums is not None:
            assert_near(sums, truth)
            kernels.linear_act(x, w, b, None, y, sums, index)
            assert_near(y, ACTIVATIONS[act](truth))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((1, 8, 8), "split_k"), ((70, 136, 520), "split_k"), ((1100, 1032, 72), "128")],
)
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_gated(shape, expected, act):
    dtype = torch.float16 if act == "gelu" else torch.bfloat16
    x, w, b, y, _ = beside(*shape, dtype, parts=2)
    arguments = (x, w, b, y, list(ACTIVATIONS).index(act))
    assert expected in kernels.gated_linear_plan(*arguments)["kernel"]
    kernels.gated_linear(*arguments)
    gate, up = (x.double() @ w.double().T + b.double()).chunk(2, dim=1)
    assert_near(y, ACTIVATIONS[act](gate) * up)


def test_gated_in_one_wave_of_two_blocks_a_multiprocessor():
    test_gated((5, 8456, 200), "64x96_split_k", "silu")


@pytest.mark.parametrize("shape", [(5, 136, 200), (71, 264, 136), (700, 72, 520)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_the_backward(shape, dtype):
    m, n, k = shape
    x, w, _, _, grad = beside(m, n, k, dtype)
    for other, of_weight, truth in (
        (w, False, grad.double() @ w.double()),
        (x, True, grad.double().T @ x.double()),
    ):
        out = torch.full(truth.shape, torch.nan, dtype=dtype)
        kernels.linear_act_grad(grad, other, out, of_weight)
        assert_near(out, truth)


@pytest.mark.parametrize("seed", [1, 2])
def test_any_order_of_warps_of_the_others(seed):
    with options(lazy=seed != 2, seed=seed):
        test_residual_and_sums((300, 264, 136), "silu")
        test_gated((1100, 1032, 72), "128", "silu")
        test_products_of_the_backward((700, 72, 520), torch.bfloat16)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((1, 8, 16), "split_k"), ((70, 136, 528), "split_k"), ((1100, 1032, 80), "_128x128")],
)
@pytest.mark.parametrize("act", ["none", "silu", "gelu", "gelu_tanh"])
def test_float8(shape, expected, act):
    m, n, k = shape
    generator = torch.Generator().manual_seed(m + n + k)
    x, w = (torch.randn(rows, k, generator=generator) for rows in (m, n))
    x, w = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    of_x, of_w = torch.rand(m, generator=generator), torch.rand(n, generator=generator)
    b = torch.randn(n, generator=generator).bfloat16()
    for x_scale, w_scale in ((of_x, of_w * k**-0.5), (of_x[:1], of_w[:1])):
        y = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
        arguments = (x, w, x_scale, w_scale, b, y, list(ACTIVATIONS).index(act))
        assert expected in kernels.fp8_linear_plan(*arguments)["kernel"]
        kernels.fp8_linear(*arguments)
        truth = (x.double() @ w.double().T) * x_scale.double()[:, None] * w_scale.double()
        assert_near(y, ACTIVATIONS[act](truth + b.double()))


def test_float8_in_turns():
    test_float8((2200, 2056, 144), "pingpong", "gelu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_activation_of_every_value(act, dtype):
    """As docs/kernels/linear_act.md promises: each sum is one value of the type."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).nan_to_num(0.0, 0.0, 0.0)
    x, y = x.view(8192, 8), torch.full((8192, 8), torch.nan, dtype=dtype)
    index = list(ACTIVATIONS).index(act)
    kernels.linear_act(x, torch.eye(8, dtype=dtype), None, None, y, None, index)
    truth = value(act, x)
    info = torch.finfo(dtype)
    allowed = info.eps / 2 * truth.abs().clamp_min(info.smallest_normal) + 2.6e-5 * truth.abs()
    allowed += (x < -5.5) * 7e-12 if act == "gelu" else (x < -9) * 1.6e-36
    error = (y.double() - truth).abs()
    assert (error <= allowed).all(), (error / allowed).max()


def test_float8_sums_that_cancel_with_an_adder_of_13_bits():
    """As smoke and the tests on a GPU take them: a part of the products' magnitudes is lost."""
    m, n, k = 128, 256, 1024
    generator = torch.Generator().manual_seed(5)
    x, w = (torch.randn(rows, k, generator=generator) for rows in (m, n))
    x, w = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    x_scale, w_scale = torch.ones(1), torch.full((1,), k**-0.5)
    y = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
    with options(short_fp8_adder=True):
        kernels.fp8_linear(x, w, x_scale, w_scale, None, y, list(ACTIVATIONS).index("none"))
    truth, sizes = (
        (a.double() @ b.double().T) * w_scale.double()
        for a, b in ((x, w), (x.float().abs(), w.float().abs()))
    )
    lost = ((y.double() - truth).abs() - 2**-8 * truth.abs()) / sizes
    assert 2**-15 < lost.max() <= 2**-12


def block_scaled(m, n, k):
    """x, weight, their scales and a bias, and x and weight in float64."""
    generator = torch.Generator().manual_seed(m + n + k)
    made, wide = [], []
    for rows, down in ((m, 1), (n, 128)):
        values = torch.randn(rows, k, generator=generator).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-rows // down), -(-k // 128), generator=generator) * k**-0.25
        made.append((values, scale))
        wide.append(dequantized(values, scale, down))
    (x, x_scale), (w, w_scale) = made
    return x, w, x_scale, w_scale, torch.randn(n, generator=generator).bfloat16(), *wide


BLOCK_TILES = [
    (64, 64, True),
    (64, 96, True),
    (128, 64, True),
    (128, 128, False),
    (128, 144, False),
    (128, 192, False),
    (128, 256, False),
]


@pytest.mark.parametrize("tile", BLOCK_TILES, ids=lambda t: f"{t[0]}x{t[1]}")
@pytest.mark.parametrize("act", ["none", "silu", "gelu", "gelu_tanh"])
def test_scales_of_blocks(tile, act):
    *shape, split_k = tile
    sizes = ((5, 264, 656, 3), (300, 136, 272, 1), (1, 136, 16, 1), (70, 200, 1024, 2))
    for m, n, k, splits in sizes:
        x, w, x_scale, w_scale, b, wide_x, wide_w = block_scaled(m, n, k)
        y = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
        config = (*shape, False, split_k, splits if split_k else 1, 0)
        arguments = (x, w, x_scale, w_scale, b, y, list(ACTIVATIONS).index(act), config)
        assert f"blocks_fp8_{shape[0]}x{shape[1]}" in kernels.fp8_linear_plan(*arguments)["kernel"]
        kernels.fp8_linear(*arguments)
        truth = wide_x @ wide_w.T
        assert_near(y, ACTIVATIONS[act](truth + b.double()))
        # Scales of x by columns, no bias.
        kernels.fp8_linear(x, w, x_scale.t().contiguous().t(), w_scale, None, y, 0, config)
        assert_near(y, truth)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_order_of_warps_with_scales_of_blocks(seed):
    with options(lazy=seed != 2, seed=seed):
        for tile in BLOCK_TILES:
            test_scales_of_blocks(tile, "silu")


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(("tile", "m", "n"), [((128, 144), 100, 1440), ((128, 256), 200, 1280)])
def test_tiles_shorter_than_the_ring(tile, m, n, steps):
    """One warpgroup may be a tile ahead of the other: five tiles a block, in any order of warps."""
    x, w, x_scale, w_scale, b, wide_x, wide_w = block_scaled(m, n, 128 * steps)
    for seed in range(1, 9):
        y = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
        with options(seed=seed, multiprocessors=2):
            kernels.fp8_linear(x, w, x_scale, w_scale, b, y, 0, (*tile, False, False, 1, 0))
        assert_near(y, wide_x @ wide_w.T + b.double())


@pytest.mark.parametrize("tile", BLOCK_TILES, ids=lambda t: f"{t[0]}x{t[1]}")
def test_zero_scales_and_nan(tile):
    *shape, split_k = tile
    x, w, x_scale, w_scale, b, _, _ = block_scaled(70, 264, 400)
    x_scale[0], w_scale[1], x_scale[3, 3] = 0, 0, torch.nan  # a row, columns, the last 16 of K
    y = torch.full((70, 264), 5.0, dtype=torch.bfloat16)
    kernels.fp8_linear(x, w, x_scale, w_scale, b, y, 0, (*shape, False, split_k, 1, 0))
    assert torch.equal(y[0], b) and torch.equal(y[69, 128:256], b[128:256])
    assert y[3].isnan().all() and y.isnan().sum() == 264
