# SPDX-License-Identifier: Apache-2.0
"""The norms on an H100 or H200, forward, against float64."""

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
    generator = torch.Generator("cuda").manual_seed(7)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    return draw


def truth(op, total, weight=None, bias=None):
    wide = total.double()
    if op is tiercel.layer_norm:
        wide = wide - wide.mean(-1, keepdim=True)
    result = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
    if weight is not None:
        result = result * weight.double()
    return result if bias is None else result + bias.double()


def assert_right(op, result, total, weight=None, bias=None):
    """Rounded once to the dtype: half a unit in the last place. Besides, some units of float32: of
    the statistics' sums, and of the mean that is subtracted."""
    due = truth(op, total, weight, bias)
    unit = torch.finfo(result.dtype).eps / 2 if result.dtype != torch.float32 else 0.0
    scale = total.double().abs().amax(-1, keepdim=True)
    scale = scale * (total.double().var(-1, unbiased=False, keepdim=True) + EPS).rsqrt()
    largest = 1.0 if weight is None else weight.double().abs()
    error = (result.double() - due).abs()
    allowed = 1.02 * unit * due.abs() + 2.0**-20 * (due.abs() + largest + 2.0**-3 * scale * largest)
    # Below the smallest normal number of float16 its unit no longer shrinks.
    allowed += torch.finfo(result.dtype).smallest_normal * unit
    assert (error <= allowed).all(), (error / allowed).max().item()


def check(op, x, weight=None, bias=None, residual=None, **options):
    result = op(x, weight, bias, residual=residual, eps=EPS, **options)
    total = x
    if residual is not None:
        result, total = result
        assert torch.equal(total, x + residual)
    assert result.is_contiguous() and result.shape == x.shape
    assert_right(op, result, total, weight, bias)


# Rows that take each of the kernels (tests/norm/test_norm_plan.py), and their neighbours.
COLUMNS = [1, 7, 64, 65, 128, 200, 256, 511, 512, 768, 1000, 1024, 1032, 2048, 2560, 4095, 4096]
LONG = [5120, 7168, 8192, 8200, 16384, 16391, 20000, 32768, 65536, 65537, 100_000, 131_072]


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_short_rows(op, make, columns, dtype):
    for rows in (1, 3, 33):
        x, residual = make(rows, columns, dtype=dtype), make(rows, columns, dtype=dtype)
        weight, bias = make(columns, dtype=dtype), make(columns, dtype=dtype)
        check(op, x)
        check(op, x, weight)
        check(op, x, weight, bias)
        check(op, x, None, bias, residual)
        check(op, x, weight, None, residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", LONG)
def test_long_rows(op, make, columns, dtype):
    for rows in (1, 5):
        x, residual = make(rows, columns, dtype=dtype), make(rows, columns, dtype=dtype)
        weight, bias = make(columns, dtype=dtype), make(columns, dtype=dtype)
        check(op, x, weight)
        if columns != 65537:  # beyond the limit where rows are not on 16 bytes
            check(op, x, weight, bias, residual)


@pytest.mark.parametrize("columns", [96, 1024, 4096, 20000])
def test_many_rows(op, make, columns):
    x = make(3001, columns, dtype=torch.bfloat16)
    check(op, x, make(columns, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("columns", [504, 512, 1000, 1024, 2048, 4096, 8192])
def test_shapes_by_the_number_of_rows(op, make, columns, dtype):
    """Of each number of vectors a multiprocessor (tests/norm/test_norm_plan.py)."""
    weight, bias = make(columns, dtype=dtype), make(columns, dtype=dtype)
    for share in (100, 700, 900, 1200, 1800, 2500, 4000):
        rows = share * 132 * 8 // columns
        x, residual = make(rows, columns, dtype=dtype), make(rows, columns, dtype=dtype)
        check(op, x, weight)
        check(op, x, weight, bias)
        check(op, x, weight, None, residual)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("columns", [64, 1000, 1001, 4096, 16384])
def test_float32_parameters(op, make, columns, dtype):
    x = make(17, columns, dtype=dtype)
    check(op, x, make(columns), make(columns))
    check(op, x, make(columns), make(columns, dtype=dtype), make(17, columns, dtype=dtype))


@pytest.mark.parametrize("columns", [64, 1000, 4096])
def test_strides_and_offsets(op, make, columns):
    wide = torch.full((64, 2 * columns + 16), float("nan"), device="cuda", dtype=torch.bfloat16)
    weight, bias = make(columns + 1)[1:], make(columns + 1)[1:]  # not on 16 bytes
    for begin in (8, 1):
        wide[:, begin : begin + columns] = make(64, columns)
        check(op, wide[:, begin : begin + columns])
        check(op, wide[:, begin : begin + columns], weight.bfloat16(), bias.bfloat16())
    every_second = make(5, 2 * columns)[:, ::2]
    check(op, every_second, weight, bias, make(5, columns))
    transposed = make(columns, 9).t()
    check(op, transposed, weight)
    check(op, make(4, 3, columns).transpose(0, 1), weight)
    check(op, make(1, columns).expand(6, columns), weight)
    check(op, make(columns), weight)
    assert op(make(0, columns)).shape == (0, columns)
    assert op(make(3, 0, columns)).shape == (3, 0, columns)


def test_out_and_in_place(op, make):
    for columns in (512, 1001, 4096, 65536):
        x, residual = (make(9, columns, dtype=torch.bfloat16) for _ in range(2))
        weight = make(columns, dtype=torch.bfloat16)
        expected, total = op(x, weight, residual=residual)
        out = torch.full_like(x, float("nan"))
        assert op(x, weight, out=out) is out
        assert torch.equal(out, op(x, weight))
        op(x, weight, residual=residual, out=(x, residual))
        assert torch.equal(x, expected) and torch.equal(residual, total)


def test_a_mean_far_from_zero(make):
    """One read, and yet the variance does not cancel."""
    for columns in (256, 1000, 4096, 65536):
        x = make(50, columns) + 1000.0
        got = tiercel.layer_norm(x, eps=EPS).double()
        # The mean itself is rounded: 2**-24 of 1000, here 6e-5 of the standard deviation.
        torch.testing.assert_close(got, truth(tiercel.layer_norm, x), rtol=1e-5, atol=2e-4)


def test_special_values(op, make):
    for columns in (128, 1000, 4096, 65536):
        x = make(40, columns, dtype=torch.bfloat16)
        x[3, 5], x[10, 6], x[20] = float("nan"), float("inf"), 0.0
        result = op(x)
        assert result[3].isnan().all()
        assert not result[10].isfinite().all()
        assert (result[20] == 0).all()
        clean = torch.ones(40, dtype=torch.bool, device="cuda")
        clean[[3, 10]] = False
        assert result[clean].isfinite().all()


def test_more_than_2_to_31_elements(op, make):
    x = torch.empty(600_000, 4096, device="cuda", dtype=torch.bfloat16)
    x.normal_(generator=torch.Generator("cuda").manual_seed(1))
    result = op(x)
    for rows in (slice(0, 50), slice(524_270, 524_310), slice(599_950, 600_000)):
        assert_right(op, result[rows], x[rows])


@pytest.mark.parametrize("columns", [64, 1024, 4096, 16384, 131_072])
def test_first_call_inside_a_graph_capture(op, make, columns):
    x, weight = make(64, columns, dtype=torch.bfloat16), make(columns, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(x, weight, eps=EPS, out=out)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert_right(op, out, x, weight)


def test_dependent_launches_see_what_went_before(op, make):
    """Kernels that start early wait for their input: each call reads the last one's result."""
    for columns in (128, 4096, 65536):
        weight = make(columns)
        x = make(100, columns)
        expected = x
        for _ in range(20):
            x = op(x, weight)
        for _ in range(20):
            expected = op(expected, weight)
            torch.cuda.synchronize()
        assert torch.equal(x, expected)


def test_streams(op, make):
    x, weight = make(500, 2048), make(2048)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(10):
            x = x + 1
            result = op(x, weight, eps=EPS)
    stream.synchronize()
    assert_right(op, result, x, weight)


def test_deterministic(op, make):
    x, weight = make(300, 5000, dtype=torch.bfloat16), make(5000)
    first = op(x, weight)
    assert all(torch.equal(first, op(x, weight)) for _ in range(5))


def test_rows_too_long_run_on_ref(op, make):
    with pytest.warns(tiercel.FallbackWarning, match="up to 131072 columns, got 131080"):
        op(make(2, 131_080))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_short_rows_of_one_value_give_the_bias(make, columns, dtype):
    check_rows_of_one_value(make, columns, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", LONG)
def test_long_rows_of_one_value_give_the_bias(make, columns, dtype):
    check_rows_of_one_value(make, columns, dtype)


def check_rows_of_one_value(make, columns, dtype):
    """Exactly, however far from zero the value is, with a residual too."""
    values = torch.tensor([1.1, -59904.0, 2.0**-14, 3.0], device="cuda")
    for rows in (1, 4, 700 if columns < 10_000 else 40):
        x = values.repeat(rows)[:rows, None].to(dtype).repeat(1, columns)
        weight, bias = make(columns, dtype=dtype), make(columns, dtype=dtype)
        due = bias.expand_as(x)
        assert torch.equal(tiercel.layer_norm(x, weight, bias, eps=1e-6), due)
        if columns == 65537:  # beyond the limit with a residual where rows are not on 16 bytes
            continue
        half = x / 2
        result, _ = tiercel.layer_norm(half, weight.float(), bias, residual=half, eps=1e-6)
        assert torch.equal(result, due)


@pytest.mark.parametrize("ratio", [1e3, 1e4, 1e6])
@pytest.mark.parametrize("columns", [33, 128, 512, 768, 1000, 2048, 4096, 9000, 32768, 100_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mean_far_from_zero(make, dtype, columns, ratio):
    """Errors are a part of the normalised value or of 1, not of mean / deviation."""
    x = (make(9, columns) * (1000.0 / ratio) + 1000.0).to(dtype)
    weight, bias = make(columns, dtype=dtype), make(columns, dtype=dtype)
    wide = x.double() - x.double().mean(-1, keepdim=True)
    standard = wide * (wide.square().mean(-1, keepdim=True) + 1e-9).rsqrt()
    due = weight.double() * standard + bias.double()
    result = tiercel.layer_norm(x, weight, bias, eps=1e-9).double()
    unit = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0
    allowed = 1.02 * unit * due.abs() + 2.0**-17 * weight.double().abs() * (1 + standard.abs())
    allowed += 2.0**-22 * due.abs() + torch.finfo(dtype).smallest_normal * unit
    assert ((result - due).abs() <= allowed).all(), ((result - due).abs() / allowed).max()
