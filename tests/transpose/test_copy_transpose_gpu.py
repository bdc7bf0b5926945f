# SPDX-License-Identifier: Apache-2.0
"""copy_transpose on an H100 or H200: every bit, every layout."""

import itertools

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]  # of 4, 2 and 1 bytes
OTHERS = [torch.float16, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
OTHERS += [torch.float8_e5m2]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@pytest.fixture
def draw():
    """Random bits, NaN and infinities among them."""
    generator = torch.Generator("cuda").manual_seed(5)

    def make(*shape, dtype=torch.bfloat16):
        count = dtype.itemsize
        if dtype == torch.bool:
            return torch.randint(0, 2, shape, device="cuda", generator=generator).bool()
        raw = torch.randint(0, 256, (*shape, count), device="cuda", generator=generator)
        return raw.to(torch.uint8).view(dtype).reshape(shape)

    return make


def bits(x):
    return x.view(BITS[x.element_size()])


def assert_right(got, x):
    assert got.dtype == x.dtype and got.is_contiguous()
    assert torch.equal(bits(got), bits(x).transpose(-2, -1))


EDGES = [1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 200, 257]


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [None, 32, 64, 128])
def test_sizes(draw, dtype, tile):
    for rows, columns in itertools.product(EDGES, EDGES[::3]):
        for shape in ((rows, columns), (columns, rows)):
            x = draw(*shape, dtype=dtype)
            assert_right(tiercel.copy_transpose(x, tile_size=tile), x)


@pytest.mark.parametrize("dtype", DTYPES + OTHERS)
def test_dtypes(draw, dtype):
    for shape in [(512, 1024), (333, 77), (3, 64, 96), (5, 21, 130)]:
        x = draw(*shape, dtype=dtype)
        assert_right(tiercel.copy_transpose(x), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large(draw, dtype):
    for shape in [(4096, 4096), (32768, 1024), (1000, 10000), (4099, 4101), (64, 1000, 72)]:
        x = draw(*shape, dtype=dtype)
        assert_right(tiercel.copy_transpose(x), x)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "shape", [(50, 196, 386), (340, 100, 102), (330, 101, 104), (66, 255, 208), (128, 30_008)]
)
def test_short_columns(draw, shape, dtype):
    """Tiles of whole columns, where matrices begin on 16 bytes; and where they do not."""
    x = draw(*shape, dtype=dtype)
    assert_right(tiercel.copy_transpose(x), x)
    wide = draw(*shape[:-1], shape[-1] + 3, dtype=dtype)[..., 1:-2]
    got = tiercel.copy_transpose(wide)
    assert torch.equal(bits(got), bits(wide).transpose(-2, -1))
    aside = draw(x.numel() + 8, dtype=dtype)
    out = aside[1 : 1 + x.numel()].view(*shape[:-2], shape[-1], shape[-2])
    tiercel.copy_transpose(x, out=out)
    assert_right(out, x)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [None, 64])
def test_strides(draw, dtype, tile):
    base = draw(6, 70, 160, dtype=dtype)
    views = {
        "rows of wider matrices": base[:, :, :64],
        "an odd column to start at": base[:, :, 3:131],
        "every second row": base[:, ::2],
        "every second column": base[:, :, ::2],
        "columns first": base[0].t(),
        "every third matrix": base[::3],
        "the matrices reversed in order of dimensions": base.permute(1, 0, 2),
        "all dimensions turned": base.permute(2, 1, 0),
        "one row, expanded": base[0, :1].expand(64, 160),
        "one matrix, expanded": base[:1].expand(4, 70, 160),
        "one column": base[0, :, 5:6],
    }
    for name, x in views.items():
        got = tiercel.copy_transpose(x, tile_size=tile)
        assert torch.equal(bits(got), bits(x).transpose(-2, -1).contiguous()), name


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_alignment(draw, dtype):
    for offset in range(1, 17):
        x = draw(64 * 80 + 32, dtype=dtype)[offset : offset + 64 * 80].view(64, 80)
        assert_right(tiercel.copy_transpose(x), x)
        buffer = torch.zeros(64 * 80 + 32, dtype=torch.uint8, device="cuda").to(dtype)
        out = buffer[offset : offset + 64 * 80].view(80, 64)
        tiercel.copy_transpose(x, out=out)
        assert_right(out, x)
        assert not bits(buffer)[:offset].any() and not bits(buffer)[offset + 64 * 80 :].any()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 3, 4), (3, 0, 4)])
def test_empty(draw, shape):
    got = tiercel.copy_transpose(torch.empty(shape, device="cuda"))
    assert got.shape == (*shape[:-2], shape[-1], shape[-2])


def test_many_matrices(draw):
    x = draw(70_000, 8, 16)  # more than a grid has in its second dimension
    assert_right(tiercel.copy_transpose(x), x)
    x = draw(66_000, 3, 5, dtype=torch.float32)
    assert_right(tiercel.copy_transpose(x), x)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(65536, 32800), (3, 40001, 20003)])
def test_more_than_2_to_31_elements(draw, shape):
    x = torch.empty(shape, dtype=torch.uint8, device="cuda").random_()
    got = tiercel.copy_transpose(x)
    assert torch.equal(got, x.transpose(-2, -1))


def test_graph_replay(draw):
    x = draw(300, 136)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Back to back: the second must not start on the first one's output too early.
        once = tiercel.copy_transpose(x)
        twice = tiercel.copy_transpose(once)
    for _ in range(3):
        x.copy_(draw(300, 136))
        graph.replay()
        torch.cuda.synchronize()
        assert_right(once, x)
        assert torch.equal(bits(twice), bits(x))


def test_runs_on_the_current_stream(draw):
    x, fresh = torch.zeros(512, 512, device="cuda"), torch.randn(512, 512, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # the default stream would read zeros meanwhile
        x.copy_(fresh)
        got = tiercel.copy_transpose(x)
    stream.synchronize()
    assert_right(got, fresh)


def test_never_synchronises(draw):
    x = draw(100, 64)
    tiercel.copy_transpose(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tiercel.copy_transpose(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_very_first_call_may_be_in_a_capture(run_python):
    run_python(
        """
import torch, tiercel
x = torch.randn(300, 64, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    got = tiercel.copy_transpose(x, backend="sm90")
x.normal_()
graph.replay()
torch.cuda.synchronize()
assert torch.equal(got, x.t())
"""
    )


def test_gradient_and_opcheck(draw):
    x = torch.randn(50, 64, device="cuda", requires_grad=True)
    pull = torch.randn(64, 50, device="cuda")
    (grad,) = torch.autograd.grad((tiercel.copy_transpose(x) * pull).sum(), x)
    assert torch.equal(grad, pull.t())
    torch.library.opcheck(torch.ops.tiercel.copy_transpose.default, (x,))


def test_explain(draw):
    told = tiercel.explain(tiercel.copy_transpose, draw(300, 128))
    assert told.backend == "sm90" and told.configuration["tile_rows"] in (32, 64, 128)
