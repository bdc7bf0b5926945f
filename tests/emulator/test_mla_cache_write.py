# SPDX-License-Identifier: Apache-2.0
"""mla_cache_write on the emulator, against its reference and float64."""

import pytest
import torch
from support.emulator import kernels
from support.mla import assert_turned, keys_of, turned_keys

from tiercel import ref

BF16, F16 = torch.bfloat16, torch.float16
UNTURNED = (None, None, False)


def rows(tokens, dtype, generator):
    latent = torch.randn(tokens, 512, generator=generator).to(dtype)
    latent[:, 128:256] *= torch.exp(torch.arange(tokens) - 9.0)[:, None]
    latent[0, 256:384] = 0.0
    return latent, torch.randn(tokens, 64, generator=generator).to(dtype)


LAYOUTS = [
    (BF16, BF16),
    (F16, F16),
    (BF16, torch.float8_e4m3fn),
    (F16, torch.float8_e4m3fn),
    (BF16, torch.uint8),
]


@pytest.mark.parametrize(("dtype", "cache_dtype"), LAYOUTS)
@pytest.mark.parametrize("slots_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("scaled", [False, True])
def test_cache_write(dtype, cache_dtype, slots_dtype, scaled):
    """The bytes of the reference, and no other byte."""
    generator = torch.Generator().manual_seed(3)
    latent, rotary = rows(21, dtype, generator)
    width = 656 if cache_dtype == torch.uint8 else 576
    bits = torch.randint(256, (5, 16, width * cache_dtype.itemsize), generator=generator)
    cache = bits.to(torch.uint8).view(cache_dtype)
    slots = torch.randperm(80, generator=generator)[:21].to(slots_dtype)
    slots[3], slots[4], slots[5] = -1, 80, torch.iinfo(slots_dtype).min
    scale = torch.tensor([0.37]) if scaled and cache_dtype == torch.float8_e4m3fn else None
    due = cache.clone()
    ref.mla_cache_write(latent, rotary, due, slots, kv_scale=scale)
    kernels.mla_cache_write(latent, rotary, cache, slots, scale, *UNTURNED)
    assert torch.equal(cache.view(torch.uint8), due.view(torch.uint8))


@pytest.mark.parametrize("cache_dtype", [BF16, torch.float8_e4m3fn, torch.uint8])
def test_cache_write_of_strides_and_special_values(cache_dtype):
    generator = torch.Generator().manual_seed(4)
    joined = torch.randn(9, 640, generator=generator).to(BF16)
    joined[0, 3], joined[1, 200], joined[2, 570], joined[3, 7] = torch.nan, 6e4, -1e30, 3e38
    width = 656 if cache_dtype == torch.uint8 else 576
    wide = torch.zeros(3, 8, 2 * width, dtype=cache_dtype)
    due = wide.clone()
    slots = torch.arange(9)
    parts = joined[:, :512], joined[:, 512:576]
    ref.mla_cache_write(*parts, due[..., :width], slots)
    kernels.mla_cache_write(*parts, wide[..., :width], slots, None, *UNTURNED)

    if cache_dtype != torch.uint8:  # a NaN has several bit patterns
        assert torch.equal(wide.float().isnan(), due.float().isnan())
        assert torch.equal(wide.float().nan_to_num(7.0), due.float().nan_to_num(7.0))
        return
    rest = slice(1, None)
    assert torch.equal(wide[:, rest], due[:, rest])
    assert wide[0, 0, 3].view(torch.float8_e4m3fn).float().isnan()


@pytest.mark.parametrize(("dtype", "cache_dtype"), LAYOUTS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("table_dtype", "positions_dtype"), [(torch.float32, torch.int64), (None, torch.int32)]
)
def test_rotated_keys(dtype, cache_dtype, interleaved, table_dtype, positions_dtype):
    """Latents have the bytes of the reference; so have all bytes of slots that no token has."""
    generator = torch.Generator().manual_seed(5)
    latent, rotary = rows(21, dtype, generator)
    table = torch.randn(40, 64, generator=generator).to(table_dtype or dtype)
    positions = torch.randint(-3, 43, (21,), generator=generator, dtype=positions_dtype)
    positions[0] = torch.iinfo(positions_dtype).max
    positions[1] = torch.iinfo(positions_dtype).min
    width = (656 if cache_dtype == torch.uint8 else 576) * cache_dtype.itemsize
    bits = torch.randint(256, (5, 16, width), generator=generator)
    cache = bits.to(torch.uint8).view(cache_dtype)
    slots = torch.randperm(80, generator=generator)[:21]
    slots[3], slots[4] = -1, 80
    scale = torch.tensor([0.37]) if cache_dtype == torch.float8_e4m3fn else None
    due = cache.clone()
    ref.mla_cache_write(latent, rotary, due, slots, kv_scale=scale)
    kernels.mla_cache_write(latent, rotary, cache, slots, scale, positions, table, interleaved)
    got, plain = (keys_of(x.view(80, -1)) for x in (cache, due))
    real = (slots >= 0) & (slots < 80)
    truth = turned_keys(rotary, positions, table, interleaved)
    assert_turned(got[slots[real]], truth[real], scale)
    for keys in (got, plain):
        keys.view(torch.uint8)[slots[real]] = 0
    assert torch.equal(cache.view(torch.uint8), due.view(torch.uint8))


@pytest.mark.parametrize("interleaved", [False, True])
def test_keys_are_rotated_where_they_are(interleaved):
    """The tokens are rows of the cache itself, and go back to their slots."""
    generator = torch.Generator().manual_seed(6)
    cache = torch.randn(2, 8, 576, generator=generator).to(BF16)
    table = torch.randn(30, 64, generator=generator)
    positions = torch.randint(30, (16,), generator=generator)
    flat, before = cache.view(16, 576), cache.clone().view(16, 576)
    given = (flat[:, :512], flat[:, 512:], cache, torch.arange(16), None)
    kernels.mla_cache_write(*given, positions, table, interleaved)
    assert torch.equal(flat[:, :512], before[:, :512])
    assert_turned(flat[:, 512:], turned_keys(before[:, 512:], positions, table, interleaved))
