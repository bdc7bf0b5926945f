# SPDX-License-Identifier: Apache-2.0
"""rotary_embedding and kv_cache_write on an H100 or H200."""

import itertools

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def make():
    generator = torch.Generator("cuda").manual_seed(3)

    def draw(tokens, heads, kv_heads, size, rotated, dtype=torch.bfloat16, cache=torch.float32):
        q, k = (
            torch.randn(tokens, count, size, device="cuda", generator=generator).to(dtype)
            for count in (heads, kv_heads)
        )
        positions = torch.randint(500, (tokens,), device="cuda", generator=generator)
        angles = torch.rand(500, rotated // 2, device="cuda", generator=generator) * 6.3
        angles = torch.cat([angles.cos(), angles.sin()], dim=1)
        return positions, q, k, angles.to(cache)

    return draw


def assert_right(results, positions, q, k, cache, interleaved):
    """float64, rounded once: half a unit in the last place, and float32's products."""
    due = tiercel.ref.rotary_embedding(
        positions, q.double(), k.double(), cache.double(), interleaved=interleaved
    )
    for got, expected in zip(results, due, strict=True):
        half_unit = torch.finfo(got.dtype).eps / 2
        error = (got.double() - expected).abs()
        assert (error <= 1.02 * half_unit * expected.abs() + 1e-6).all(), error.max().item()


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_sizes(make, dtype, interleaved, wide):
    sizes = [(128, 128), (64, 64), (64, 32), (80, 20), (256, 256), (96, 96), (10, 6), (2, 2)]
    for tokens, (size, rotated) in itertools.product([0, 1, 7, 200], sizes):
        for heads, kv_heads in [(32, 8), (1, 1), (5, 0), (3, 7)]:
            cache = torch.float32 if wide else dtype
            tensors = make(tokens, heads, kv_heads, size, rotated, dtype, cache)
            got = tiercel.rotary_embedding(*tensors, interleaved=interleaved)
            assert_right(got, *tensors, interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
def test_many_tokens_in_place_and_strided(make, interleaved):
    positions, q, k, cache = make(5000, 32, 8, 128, 128)
    assert_right(
        tiercel.rotary_embedding(positions.int(), q, k, cache, interleaved=interleaved),
        *(positions, q, k, cache, interleaved),
    )
    packed = torch.cat([q, k, k], dim=1)  # queries, keys and values of one product
    views = packed.split([32, 8, 8], dim=1)
    before = packed.clone()
    tiercel.rotary_embedding(
        positions, views[0], views[1], cache, interleaved=interleaved, inplace=True
    )
    assert_right(views[:2], positions, q, k, cache, interleaved)
    assert torch.equal(packed[:, 40:], before[:, 40:])
    out = torch.empty_like(q), torch.empty_like(k)
    tiercel.rotary_embedding(positions, q, k, cache, interleaved=interleaved, out=out)
    assert torch.equal(out[0], views[0]) and torch.equal(out[1], views[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(64, 32), (32, 16)])
@pytest.mark.parametrize("heads", [(32, 8), (35, 10)])
def test_few_vectors_that_turn(make, heads, size, dtype):
    """Of many tokens neighbours exchange what their pairs need."""
    tensors = make(7001, *heads, *size, dtype)
    got = tiercel.rotary_embedding(*tensors)
    assert (
        "exchanged" in tiercel.explain(tiercel.rotary_embedding, *tensors).configuration["kernel"]
    )
    assert_right(got, *tensors, False)


def test_gradients(make):
    positions, q, k, cache = make(50, 4, 2, 64, 32, torch.float32)
    grads = []
    for function in (tiercel.rotary_embedding, tiercel.ref.rotary_embedding):
        inputs = q.clone().requires_grad_(), k.clone().requires_grad_()
        a, b = function(positions, *inputs, cache)
        grads.append(torch.autograd.grad((a**2).sum() + (b**3).sum(), inputs))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_kv_cache_write(dtype, float8, slot_dtype):
    generator = torch.Generator("cuda").manual_seed(9)

    def rand(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    for tokens, heads, size, places in [
        (1, 8, 128, 16),
        (77, 2, 64, 1),
        (300, 3, 20, 16),
        (0, 8, 64, 4),
    ]:
        blocks = (tokens + places) // places + 3
        key, value = (rand(tokens, heads, size).mul(200).to(dtype) for _ in range(2))
        if tokens:
            key[0, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        slots = torch.randperm(blocks * places, device="cuda", generator=generator)[:tokens]
        slots = torch.where(torch.rand(tokens, device="cuda") < 0.2, -1, slots).to(slot_dtype)
        for count in (None, 1, heads):
            if count is not None and not float8:
                continue
            scale = None if count is None else rand(count).abs() + 0.5
            results = []
            for backend in ("sm90", "ref"):
                caches = torch.zeros(2, blocks, places, heads, size, device="cuda", dtype=dtype)
                if float8:
                    caches = caches.to(torch.float8_e4m3fn)
                tiercel.kv_cache_write(
                    *(key, value, *caches.unbind(), slots),
                    key_scale=scale,
                    value_scale=scale,
                    backend=backend,
                )
                results.append(caches.float())
            torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


def test_graph_replay(make):
    positions, q, k, cache = make(64, 32, 8, 128, 128)
    caches = torch.zeros(2, 8, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    slots = torch.arange(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Back to back: the write must not start on the keys too early.
        turned = tiercel.rotary_embedding(positions, q, k, cache)
        tiercel.kv_cache_write(turned[1], k, *caches.unbind(), slots)
    for _ in range(3):
        q.normal_()
        k.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert_right(turned, positions, q, k, cache, False)
        assert torch.equal(caches[0].flatten(0, 1)[:64], turned[1])
        assert torch.equal(caches[1].flatten(0, 1)[:64], k)
