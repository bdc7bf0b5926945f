# SPDX-License-Identifier: Apache-2.0
"""mla_decode and mla_cache_write on an H100 or H200, against float64."""

import pytest
import torch
from support.mla import (
    SCALE,
    VALUES,
    assert_right,
    assert_turned,
    keys_of,
    make,
    narrowed,
    results,
    turned_keys,
)

import tiercel
from tiercel import _C, ref

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

BF16, F16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
RAGGED = [0, 1, 63, 64, 65, 1000, 31, 0, 4097, 128]


def check(inputs, scale=SCALE):
    out, lse = tiercel.mla_decode(*inputs, scale=scale, return_lse=True)
    assert_right(inputs, out, lse, scale)


def draw(*arguments, **options):
    return make(*arguments, device="cuda", **options)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("heads", [16, 128])
def test_small(dtype, heads):
    check(draw([1, 40, 0, 130], heads=heads, dtype=dtype))


@pytest.mark.sanitize
@pytest.mark.parametrize("page", [1, 16])
def test_small_pages(page):
    check(draw([70, 3, 128], 2, 8, page))


@pytest.mark.parametrize("page", [1, 2, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize(("dtype", "heads"), [(BF16, 16), (F16, 128)])
def test_ragged(page, dtype, heads):
    check(draw(RAGGED, heads=heads, page=page, dtype=dtype))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 513, 8192, 20000])
@pytest.mark.parametrize("heads", [16, 128])
def test_one_sequence(length, heads):
    check(draw([length], heads=heads))


@pytest.mark.parametrize("heads", [1, 20, 64, 65, 128])
@pytest.mark.parametrize("queries", [1, 2, 7, 8])
def test_heads_and_queries(heads, queries):
    check(draw([3, 500, 0, 77, 8, 1], queries, heads))


FLOAT8 = [(BF16, FP8), (F16, FP8), (BF16, torch.uint8)]


def check_float8(inputs, kind):
    """Packed rows are rounded to bfloat16 once more, behind their scales."""
    inputs, scale = narrowed(inputs, kind)
    out, lse = tiercel.mla_decode(*inputs, scale=SCALE, kv_scale=scale, return_lse=True)
    if kind == FP8:
        assert_right(inputs, out, lse, kv_scale=scale)
        return
    truth = ref.mla_decode(inputs[0].double(), *inputs[1:], scale=SCALE)
    error = (out.double() - truth).abs()
    assert not error.isnan().any() and error.max() <= 0.05


@pytest.mark.sanitize
@pytest.mark.parametrize(("dtype", "kind"), FLOAT8)
def test_small_float8(dtype, kind):
    check_float8(draw([1, 40, 0, 130], heads=16, dtype=dtype), kind)


@pytest.mark.parametrize(("page", "heads"), [(1, 16), (16, 128), (64, 16), (128, 128)])
@pytest.mark.parametrize(("dtype", "kind"), FLOAT8)
def test_float8(page, heads, dtype, kind):
    check_float8(draw(RAGGED, 2, heads, page, dtype), kind)


@pytest.mark.parametrize("batch", [1, 7, 64, 132, 133, 300])
def test_batches(batch):
    check(draw([(i * 37 + 5) % 900 for i in range(batch)], heads=16))


def test_more_rows_than_the_device_has_blocks_for():
    check(draw([300, 77], 80, 128))


def test_extreme_scores():
    check(draw([700, 65]), scale=3.0)
    inputs = draw([700], heads=4)
    inputs[0].fill_(64.0), inputs[1].fill_(100.0)
    check(inputs, 1.0)


def test_a_result_is_the_same_each_time():
    inputs = draw(RAGGED, heads=16)
    first = tiercel.mla_decode(*inputs, scale=SCALE, return_lse=True)
    for _ in range(5):
        again = tiercel.mla_decode(*inputs, scale=SCALE, return_lse=True)
        assert all(map(torch.equal, first, again))


def test_a_graph_reads_lengths_and_pages_again():
    inputs = draw([900, 80, 500], heads=16)
    lengths = inputs[3]
    tiercel.mla_decode(*inputs, scale=SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = tiercel.mla_decode(*inputs, scale=SCALE, return_lse=True)
    for new in ([900, 80, 500], [64, 0, 499], [1, 80, 333]):
        lengths.copy_(torch.tensor(new, dtype=torch.int32))
        graph.replay()
        assert_right(inputs, out, lse)


def test_the_whole_absorbed_layer():
    """Against the layer with keys and values of each head, in float64."""
    generator = torch.Generator("cuda").manual_seed(5)
    heads, size, keys = 8, 128, 300

    def random(*shape, by=1.0):
        return (torch.randn(shape, device="cuda", generator=generator) * by).to(BF16)

    up_k, up_v = random(heads, size, VALUES, by=0.05), random(heads, VALUES, size, by=0.05)
    nope, turned = random(1, 1, heads, size), random(1, 1, heads, 64)
    latent, rotary = random(keys, VALUES), random(keys, 64)
    cache = torch.zeros(5, 64, 576, dtype=BF16, device="cuda")
    tiercel.mla_cache_write(latent, rotary, cache, torch.arange(keys, device="cuda"))
    q = torch.cat([torch.einsum("bqhd,hdl->bqhl", nope, up_k), turned], -1)
    table = torch.arange(5, dtype=torch.int32, device="cuda")[None]
    lengths = torch.tensor([keys], dtype=torch.int32, device="cuda")
    absorbed = tiercel.mla_decode(q, cache, table, lengths, scale=SCALE)
    out = torch.einsum("bqhl,hld->bqhd", absorbed.double(), up_v.double())

    wide = latent.double()
    k = torch.einsum("kl,hdl->hkd", wide, up_k.double())
    v = torch.einsum("kl,hld->hkd", wide, up_v.double())
    scores = torch.einsum("bqhd,hkd->bhqk", nope.double(), k)
    scores += torch.einsum("bqhd,kd->bhqk", turned.double(), rotary.double())
    truth = torch.einsum("bhqk,hkd->bqhd", (scores * SCALE).softmax(-1), v)
    assert (out - truth).abs().max() <= 0.02 * truth.abs().max()


LAYOUTS = [(BF16, BF16), (F16, F16), (BF16, FP8), (F16, FP8), (BF16, torch.uint8)]


@pytest.mark.sanitize
@pytest.mark.parametrize(("dtype", "cache_dtype"), LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 7, 500])
def test_cache_write(dtype, cache_dtype, tokens):
    """The bytes of the reference, and no other byte."""
    generator = torch.Generator("cuda").manual_seed(3)
    latent = torch.randn(tokens, 512, device="cuda", generator=generator).to(dtype)
    rotary = torch.randn(tokens, 64, device="cuda", generator=generator).to(dtype)
    width = (656 if cache_dtype == torch.uint8 else 576) * cache_dtype.itemsize
    bits = torch.randint(256, (40, 16, width), device="cuda", generator=generator)
    cache = bits.to(torch.uint8).view(cache_dtype)
    slots = torch.randperm(640, device="cuda", generator=generator)[:tokens]
    slots[1:2], slots[2:3] = -1, 640
    scale = torch.tensor([0.37], device="cuda") if cache_dtype == FP8 else None
    due = cache.clone()
    ref.mla_cache_write(latent, rotary, due, slots, kv_scale=scale)
    assert tiercel.mla_cache_write(latent, rotary, cache, slots, kv_scale=scale) is cache
    assert torch.equal(cache.view(torch.uint8), due.view(torch.uint8))


@pytest.mark.sanitize
@pytest.mark.parametrize(("dtype", "cache_dtype"), LAYOUTS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 500])
def test_rotated_keys(dtype, cache_dtype, interleaved, tokens):
    generator = torch.Generator("cuda").manual_seed(5)
    latent = torch.randn(tokens, 512, device="cuda", generator=generator).to(dtype)
    rotary = torch.randn(tokens, 64, device="cuda", generator=generator).to(dtype)
    table = torch.randn(90, 64, device="cuda", generator=generator)
    positions = torch.randint(-5, 95, (tokens,), device="cuda", generator=generator)
    width = 656 if cache_dtype == torch.uint8 else 576
    cache, plain = (torch.zeros(40, 16, width, dtype=cache_dtype, device="cuda") for _ in range(2))
    slots = torch.randperm(640, device="cuda", generator=generator)[:tokens]
    scale = torch.tensor([0.37], device="cuda") if cache_dtype == FP8 else None
    ref.mla_cache_write(latent, rotary, plain, slots, kv_scale=scale)
    turned = {"positions": positions, "cos_sin_cache": table, "interleaved": interleaved}
    tiercel.mla_cache_write(latent, rotary, cache, slots, kv_scale=scale, **turned)
    cache, plain, slots = cache.cpu(), plain.cpu(), slots.cpu()  # where float8 can be indexed
    got, before = (keys_of(x.view(640, -1)) for x in (cache, plain))
    kept = [x.cpu() for x in (rotary, positions, table)]
    truth = turned_keys(*kept, interleaved)
    assert_turned(got[slots], truth, None if scale is None else scale.cpu())
    for keys in (got, before):
        keys.view(torch.uint8)[slots] = 0
    assert torch.equal(cache.view(torch.uint8), plain.view(torch.uint8))


def test_keys_are_rotated_where_they_are():
    cache = torch.randn(8, 16, 576, device="cuda").to(BF16)
    flat, before, table = cache.view(128, 576), cache.clone().view(128, 576), torch.randn(150, 64)
    slots = torch.arange(128, device="cuda")
    turned = {"positions": slots, "cos_sin_cache": table.cuda()}
    tiercel.mla_cache_write(*flat.split((512, 64), 1), cache, slots, **turned)
    assert torch.equal(flat[:, :512], before[:, :512])
    truth = turned_keys(before[:, 512:].cpu(), slots.cpu(), table, False)
    assert_turned(flat[:, 512:].cpu(), truth)


def test_a_given_workspace():
    inputs = draw(RAGGED, heads=16)
    out, lse = results(inputs[0])
    given = (*inputs, None, out, lse, SCALE, VALUES)
    needed = _C.mla_decode(*given, None)
    workspace = torch.full((needed,), torch.nan, device="cuda")
    assert _C.mla_decode(*given, workspace) == 0
    assert_right(inputs, out, lse)
