# SPDX-License-Identifier: Apache-2.0
"""reduce on an H100 or H200, against float64: every kernel, every layout."""

import itertools
import math

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = ["sum", "mean", "amax"]
INF, NAN = math.inf, math.nan


@pytest.fixture
def draw():
    generator = torch.Generator("cuda").manual_seed(5)

    def make(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    return make


def truth(x, dim, op, keepdim=False):
    dims = list(range(x.dim())) if dim is None else [dim]
    return getattr(x.double(), op)(dims, keepdim=keepdim)


def assert_right(got, x, dim, op):
    """A maximum is exact. A sum is rounded once, half a unit in the last place, after float32 sums
    of n numbers of about 1: their partial sums are about the root of n."""
    expected = truth(x, dim, op)
    assert got.shape == expected.shape and got.is_contiguous()
    if op == "amax":
        assert torch.equal(got.double(), expected)
        return
    count = x.numel() / max(expected.numel(), 1)
    half_unit = torch.finfo(got.dtype).eps / 2
    lost = 2.0**-20 * count**0.5 * (1 / count if op == "mean" else 1)
    lost += torch.finfo(got.dtype).smallest_normal * half_unit  # a subnormal's rounding
    error = (got.double() - expected).abs()
    assert (error <= 1.02 * half_unit * expected.abs() + lost).all(), error.max().item()


def check(x, dim, op="sum", **options):
    assert_right(tiercel.reduce(x, dim, op, **options), x, dim, op)


EDGES = [1, 2, 3, 7, 8, 9, 16, 31, 33, 64, 100, 127, 129, 256, 500, 513]


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_small_sizes(draw, dtype, op):
    for rows, columns in itertools.product(EDGES[::2], EDGES):
        for x in (draw(rows, columns, dtype=dtype), draw(columns, rows, dtype=dtype)):
            check(x, 0, op)
            check(x, 1, op)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_large_sizes(draw, dtype, op):
    shapes = [(32768, 1024), (4096, 16384), (1, 1 << 22), (1 << 22, 1), (1 << 20, 3), (3, 1 << 20)]
    shapes += [(1 << 18, 64), (64, 1 << 18), (8, 131072), (16, 262144), (1, 524288), (700, 3000)]
    shapes += [(5003, 1001), (1001, 5003), (100_000, 100), (128, 65536), (8192, 2048), (50257, 768)]
    for shape in shapes:
        x = draw(*shape, dtype=dtype)
        for dim in (0, 1):
            check(x, dim, op)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_three_dimensions(draw, dtype, op):
    for shape in [(3, 5, 7), (64, 64, 64), (2, 1000, 40), (300, 2, 16), (4, 1, 33), (1, 4096, 128)]:
        x = draw(*shape, dtype=dtype)
        for dim in (0, 1, 2, -1, None):
            check(x, dim, op)


@pytest.mark.parametrize("dtype", DTYPES)
def test_everything(draw, dtype):
    for count in (1, 5, 1000, 65536, 524288, 1_000_003, 1 << 24):
        x = draw(count, dtype=dtype)
        for op in OPS:
            check(x, None, op)
            check(x, 0, op)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(draw, dtype):
    base = draw(40, 70, 160, dtype=dtype)
    views = {
        "rows of wider matrices": base[:, :, :64],
        "an odd column to start at": base[:, :, 3:131],
        "every second row": base[:, ::2],
        "every second column": base[:, :, ::2],
        "every third matrix": base[::3],
        "dimensions in another order": base.permute(1, 0, 2),
        "all dimensions turned": base.permute(2, 1, 0),
        "one row, expanded": base[:, :1].expand(40, 9, 160),
        "one matrix, expanded": base[:1].expand(4, 70, 160),
        "one column, expanded": base[:, :, :1].expand(40, 70, 30),
        "a matrix turned": base[0].t(),
        "one column": base[0, :, 5:6],
        "one row": base[0, 5:6],
        "a column": base[0, :, 5],
    }
    for name, x in views.items():
        for dim in range(x.dim()):
            for op in OPS:
                assert_right(tiercel.reduce(x, dim, op), x, dim, op)
        assert_right(tiercel.reduce(x), x, None, "sum"), name


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_alignment(draw, dtype):
    for offset in range(1, 9):
        flat = draw(20 * 2000 + 16, dtype=dtype)
        for shape in ((20, 2000), (2000, 20), (5, 8000), (1, 40000)):
            x = flat[offset : offset + 40000].view(shape)
            for dim in (0, 1):
                check(x, dim)
                check(x, dim, "amax")


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinities(draw, dtype):
    shapes = [(64, 100), (9, 3000), (1, 100_000), (3000, 9), (5, 20_000), (600, 512)]
    for shape, dim in itertools.product(shapes, (0, 1)):
        for special in (NAN, INF, -INF):
            x = draw(*shape, dtype=dtype)
            x[shape[0] // 2, shape[1] // 3] = special
            for op in OPS:
                got, expected = tiercel.reduce(x, dim, op), truth(x, dim, op)
                odd = ~expected.isfinite()
                assert torch.equal(got.isnan(), expected.isnan())
                assert torch.equal(got.isinf() & odd, expected.isinf())
    lowest = torch.full((7, 300), -INF, device="cuda", dtype=dtype)
    assert (tiercel.reduce(lowest, 1, "amax") == -INF).all()
    assert (tiercel.reduce(lowest, 0, "max") == -INF).all()


@pytest.mark.sanitize
def test_empty():
    x = torch.empty(5, 0, 3, device="cuda")
    assert torch.equal(tiercel.reduce(x, 1), torch.zeros(5, 3, device="cuda"))
    assert tiercel.reduce(x, 1, "mean").isnan().all()
    assert tiercel.reduce(x, 0).shape == (0, 3) and tiercel.reduce(x, 2, "amax").shape == (5, 0)
    assert tiercel.reduce(x).item() == 0 and tiercel.reduce(x, op="mean").isnan()
    with pytest.raises(ValueError, match="must not be empty in dimension 1 for a maximum"):
        tiercel.reduce(x, 1, "max")


def test_output_dtype_and_keepdim(draw):
    for shape, dim in itertools.product([(300, 700), (3, 100_000), (100_000, 8)], (0, 1, None)):
        x = draw(*shape)
        wide = tiercel.reduce(x, dim, dtype=torch.float32)
        assert wide.dtype == torch.float32
        assert_right(wide, x, dim, "sum")
        kept = tiercel.reduce(x, dim, "mean", keepdim=True)
        assert kept.shape == truth(x, dim, "mean", True).shape
        out = torch.empty(truth(x, dim, "sum").shape, device="cuda")
        assert tiercel.reduce(x, dim, out=out) is out
        assert torch.equal(out, wide)
        assert torch.equal(tiercel.reduce_sum(x, dim, dtype=torch.float32), wide)


def test_the_same_bits_every_time(draw):
    for shape in [(1, 1 << 24), (64, 1 << 18), (1 << 16, 512), (1 << 18, 64), (4096, 4096)]:
        x = draw(*shape, dtype=torch.float32)
        for dim in (0, 1):
            first = tiercel.reduce(x, dim)
            for _ in range(10):
                assert torch.equal(tiercel.reduce(x, dim), first)


def test_errors_are_at_most_torchs(draw):
    """Over five seeds: RMS at most 1.05 times, the largest at most 1.25 times."""
    shapes = [((4096, 4096), 1), ((4096, 4096), 0), ((1, 1 << 22), 1), ((1 << 18, 64), 0)]
    for dtype, (shape, dim) in itertools.product(DTYPES, shapes):
        errors = [[], []]
        for _ in range(5):
            x = draw(*shape, dtype=dtype)
            expected = truth(x, dim, "sum")
            for kept, got in zip(errors, (tiercel.reduce(x, dim), x.sum(dim)), strict=True):
                kept.append((got.double() - expected).abs().flatten())
        ours, theirs = (torch.cat(kept) for kept in errors)
        if ours.numel() >= 100:
            rms = (ours.square().mean() / theirs.square().mean()).sqrt().item()
            largest = (ours.max() / theirs.max()).item()
            assert rms <= 1.05 and largest <= 1.25, (dtype, shape, dim, rms, largest)


@pytest.mark.slow
def test_more_than_2_to_31_elements():
    flat = torch.empty((1 << 31) + (1 << 20), dtype=torch.bfloat16, device="cuda").normal_()
    for shape in [(1 << 11, (1 << 20) + 512), ((1 << 20) + 512, 1 << 11), (1, flat.numel())]:
        x = flat.view(shape)
        for dim in (0, 1):
            if shape[dim] == 1 and shape[0] == 1:
                continue
            got = tiercel.reduce(x, dim, dtype=torch.float32)
            expected = x.sum(dim, dtype=torch.float32)
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=0.5)


@pytest.mark.parametrize(("shape", "dim"), [((300, 136), 1), ((300, 136), 0), ((1, 1 << 20), 1)])
def test_graph_replay(draw, shape, dim):
    x = draw(*shape)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Back to back: the second must not start on the first one's output too early.
        once = tiercel.reduce(x, dim, keepdim=True)
        twice = tiercel.reduce(once, None, "amax")
    for _ in range(3):
        x.copy_(draw(*shape))
        graph.replay()
        torch.cuda.synchronize()
        assert_right(once.squeeze(dim), x, dim, "sum")
        assert torch.equal(twice, once.amax())


def test_streams_at_the_same_time(draw):
    """Each call has a workspace of its own."""
    inputs = [draw(1, 1 << 22) for _ in range(4)]
    expected = [tiercel.reduce(x, 1, dtype=torch.float32) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results = [[] for _ in inputs]
    for _ in range(20):
        for x, stream, kept in zip(inputs, streams, results, strict=True):
            with torch.cuda.stream(stream):
                kept.append(tiercel.reduce(x, 1, dtype=torch.float32))
    torch.cuda.synchronize()
    for kept, due in zip(results, expected, strict=True):
        assert all(torch.equal(got, due) for got in kept)


def test_never_synchronises(draw):
    x = draw(8, 1 << 18)
    tiercel.reduce(x, 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tiercel.reduce(x, 1)
        tiercel.reduce(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_very_first_call_may_be_in_a_capture(run_python):
    run_python(
        """
import torch, tiercel
x = torch.randn(300, 64, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    got = tiercel.reduce(x, 0, backend="sm90")
x.normal_()
graph.replay()
torch.cuda.synchronize()
torch.testing.assert_close(got, x.sum(0))
"""
    )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dim", [0, 1, None])
def test_gradients(draw, op, dim):
    x = draw(50, 64, dtype=torch.float32).requires_grad_()
    grads = [
        torch.autograd.grad(function(x).square().sum(), x)[0]
        for function in (
            lambda x: tiercel.reduce(x, dim, op),
            lambda x: getattr(x, op)(*([] if dim is None else [dim])),
        )
    ]
    torch.testing.assert_close(*grads)


def test_opcheck_and_explain(draw):
    x = draw(20, 64).requires_grad_()
    torch.library.opcheck(torch.ops.tiercel.reduce.default, (x, 1, "mean"))
    told = tiercel.explain(tiercel.reduce, draw(1, 1 << 24), 1)
    assert told.backend == "sm90" and told.configuration["workspace"] > 0


def test_more_than_two_dimensions_left_falls_back(draw):
    x = draw(8, 8, 8, 8)[:, ::2, ::2, ::2]
    with pytest.raises(NotImplementedError, match="must merge to at most two dimensions"):
        tiercel.reduce(x, 0, backend="sm90")
    with pytest.warns(tiercel.FallbackWarning, match="must merge to at most two dimensions"):
        check(x, 0)
