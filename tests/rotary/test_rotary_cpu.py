# SPDX-License-Identifier: Apache-2.0
"""rotary_embedding and kv_cache_write with PyTorch and without a GPU."""

import cmath

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]


def make(tokens=5, heads=3, kv_heads=2, size=8, rotated=8, dtype=torch.float32, rows=20):
    generator = torch.Generator().manual_seed(1)
    positions = torch.randint(rows, (tokens,), generator=generator)
    q = torch.randn(tokens, heads, size, generator=generator).to(dtype)
    k = torch.randn(tokens, kv_heads, size, generator=generator).to(dtype)
    angles = torch.rand(rows, rotated // 2, generator=generator) * 6
    return positions, q, k, torch.cat([angles.cos(), angles.sin()], dim=1), angles


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [8, 4, 2])
def test_pairs_are_complex_numbers_turned(interleaved, rotated):
    positions, q, k, cache, angles = make(rotated=rotated)
    results = tiercel.rotary_embedding(positions, q, k, cache, interleaved=interleaved)
    half = rotated // 2
    for x, got in zip((q, k), results, strict=True):
        assert torch.equal(got[..., rotated:], x[..., rotated:])
        for token, position in enumerate(positions.tolist()):
            for pair in range(half):
                a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
                turn = cmath.exp(1j * angles[position, pair].item())
                for head in range(x.shape[1]):
                    due = complex(*x[token, head, [a, b]].tolist()) * turn
                    assert abs(complex(*got[token, head, [a, b]].tolist()) - due) < 1e-5


@pytest.mark.parametrize("interleaved", [False, True])
def test_in_place_and_out(interleaved):
    positions, q, k, cache, _ = make(rotated=4, dtype=torch.bfloat16)
    due = tiercel.rotary_embedding(positions, q, k, cache, interleaved=interleaved)
    out = torch.empty_like(q), torch.empty_like(k)
    tiercel.rotary_embedding(positions, q, k, cache, interleaved=interleaved, out=out)
    got = tiercel.rotary_embedding(positions, q, k, cache, interleaved=interleaved, inplace=True)
    assert got[0] is q and got[1] is k
    for a, b, c in zip(due, out, got, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients(interleaved):
    positions, q, k, cache, _ = make(rotated=4)
    grads = []
    for function in (tiercel.rotary_embedding, tiercel.ref.rotary_embedding):
        inputs = q.clone().requires_grad_(), k.clone().requires_grad_()
        a, b = function(positions, *inputs, cache, interleaved=interleaved)
        grads.append(torch.autograd.grad((a**3).sum() + (b**2).sum(), inputs))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)
    wide = [t.double().requires_grad_() for t in (q, k)]
    assert torch.autograd.gradcheck(
        lambda q, k: tiercel.ref.rotary_embedding(
            positions, q, k, cache.double(), interleaved=interleaved
        ),
        wide,
    )


BAD = [
    ({"cos_sin_cache": torch.zeros(9, 10)}, ValueError, "`cos_sin_cache` must have an even second"),
    (
        {"cos_sin_cache": torch.zeros(0, 8)},
        ValueError,
        "`cos_sin_cache` must have at least one row",
    ),
    ({"inplace": True, "out": ()}, ValueError, "`inplace` and `out` exclude each other"),
]


@pytest.mark.parametrize(("changes", "error", "text"), BAD)
def test_bad_arguments_are_named(changes, error, text):
    names = ("positions", "q", "k", "cos_sin_cache")
    given = dict(zip(names, make()[:4], strict=True)) | changes
    with pytest.raises(error) as info:
        tiercel.rotary_embedding(**given)
    assert str(info.value).startswith(f"rotary_embedding: {text}")


def caches(dtype, blocks=4, places=4, heads=2, size=8):
    return [torch.zeros(blocks, places, heads, size).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("scales", [None, 1, 2])
def test_kv_cache_write(dtype, scales):
    if scales is not None and dtype == torch.bfloat16:
        return
    key = torch.randn(5, 2, 8).bfloat16() * 300
    key[0, 0, 0] = torch.nan
    value = torch.randn(5, 2, 8).bfloat16()
    slots = torch.tensor([3, -1, 15, 0, -7])
    scale = None if scales is None else torch.rand(scales) + 0.5
    written = caches(dtype)
    got = tiercel.kv_cache_write(key, value, *written, slots, key_scale=scale, value_scale=scale)
    assert got[0] is written[0] and got[1] is written[1]
    for cache, new in zip(written, (key, value), strict=True):
        lines = cache.flatten(0, 1).float()
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                due = new[token].float()
                if scale is not None:
                    due = due / scale.view(-1, 1)
                if dtype == torch.float8_e4m3fn:
                    due = due.clamp(-448, 448).to(dtype).float()
                torch.testing.assert_close(lines[slot], due, rtol=0, atol=0, equal_nan=True)
        rest = [line for line in range(16) if line not in slots.tolist()]
        assert not lines[rest].any()


def test_kv_cache_errors():
    key = torch.zeros(5, 2, 8).bfloat16()
    slots = torch.zeros(5, dtype=torch.int64)
    with pytest.raises(ValueError, match="`key_scale` must be None for a cache that is not float8"):
        tiercel.kv_cache_write(key, key, *caches(torch.bfloat16), slots, key_scale=torch.ones(1))
    with pytest.raises(ValueError, match="`value_scale` must have 1 element or H = 2, got 3"):
        tiercel.kv_cache_write(
            key, key, *caches(torch.float8_e4m3fn), slots, value_scale=torch.ones(3)
        )


def test_a_cache_without_rows():
    positions, q, k, _, _ = make()
    with pytest.raises(ValueError, match=r"`cos_sin_cache` must have at least one row, got .0, 8."):
        tiercel.rotary_embedding(positions, q, k, torch.zeros(0, 8))
    nobody = tiercel.rotary_embedding(positions[:0], q[:0], k[:0], torch.zeros(0, 8))
    assert nobody[0].shape == (0, 3, 8)
    still = tiercel.rotary_embedding(positions, q, k, torch.zeros(0, 0))
    assert torch.equal(still[0], q)
