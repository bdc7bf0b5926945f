# SPDX-License-Identifier: Apache-2.0
"""Index tensors that hold anything, on an H100 or H200: results are ref's, and no byte beside a
tensor is written.

tests/emulator/test_index_fuzz*.py try many more, and see reads too.
"""

import pytest
import torch

import tiercel
from tiercel import ref

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

LAST = 2**31 - 1
WILD = (-1, -2, 2**29, -(2**29), LAST, -LAST - 1)
WIDE = (*WILD, 2**32 + 1, -(2**32), 2**62, -(2**63))


def strays(right, count, wide=False):
    """Every other number is none from 0 to `count` - 1."""
    numbers = right.flatten().tolist()
    others = (count, count + 1, *(WIDE if wide else WILD))
    numbers[::2] = [others[i % len(others)] for i in range(len(numbers[::2]))]
    dtype = torch.int64 if wide else torch.int32
    return torch.tensor(numbers, dtype=dtype, device="cuda").view(right.shape)


def between_others(tensor):
    """The tensor between somebody else's bytes, and a function that says whether they are kept."""
    size, margin = tensor.numel() * tensor.element_size(), 1 << 16
    buffer = torch.full((size + 2 * margin,), 0xA5, dtype=torch.uint8, device="cuda")
    inside = buffer[margin : margin + size].view(tensor.dtype).view(tensor.shape)
    inside.copy_(tensor)
    outside = [buffer[:margin], buffer[margin + size :]]
    return inside, lambda: all(bool((part == 0xA5).all()) for part in outside)


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.sanitize
@pytest.mark.parametrize("wide", [False, True])
def test_rotary_embedding_and_kv_cache_write(wide):
    q, k, cache = normal(64, 8, 128), normal(64, 2, 128), normal(40, 128, dtype=torch.float32)
    positions = strays(torch.arange(64) % 40, 40, wide)
    got = tiercel.rotary_embedding(positions, q, k, cache)
    for one, due in zip(got, ref.rotary_embedding(positions, q, k, cache), strict=True):
        torch.testing.assert_close(one, due)
    slots = strays(torch.randperm(80)[:64], 80, wide)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        made = [between_others(normal(5, 16, 2, 128).to(dtype)) for _ in range(2)]
        caches = [tensor for tensor, _ in made]
        due = [tensor.clone() for tensor in caches]
        ref.kv_cache_write(k, k, *due, slots)
        tiercel.kv_cache_write(k, k, *caches, slots)
        for one, exact in zip(caches, due, strict=True):
            assert torch.equal(one.view(torch.uint8), exact.view(torch.uint8))
        assert all(kept() for _, kept in made)


@pytest.mark.sanitize
@pytest.mark.parametrize("wide", [False, True])
def test_qk_norm_rope_cache(wide):
    q, k, angles = normal(64, 8, 128), normal(64, 2, 128), normal(40, 128, dtype=torch.float32)
    positions = strays(torch.arange(64) % 40, 40, wide)
    slots = strays(torch.randperm(80)[:64], 80, wide)
    made = [between_others(torch.zeros_like(q))]
    made += [between_others(normal(5, 16, 2, 128)) for _ in range(2)]
    written = [tensor for tensor, _ in made]
    due = [tensor.clone() for tensor in written]
    weight = torch.rand(128, device="cuda")
    rest = (slots, positions, angles, weight, weight)
    ref.qk_norm_rope_cache(q, k, k, *due, *rest)
    tiercel.qk_norm_rope_cache(q, k, k, *written, *rest)
    for one, exact in zip(written, due, strict=True):
        torch.testing.assert_close(one, exact)
    assert all(kept() for _, kept in made)


@pytest.mark.sanitize
@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize("tokens", [9, 300, 9000])
def test_moe_align_block_size(tokens, ignore):
    ids = strays(torch.randint(16, (tokens, 4)), 16, wide=True)
    expert_map = strays(torch.arange(16), 16)
    for wanted in (None, expert_map):
        args = (ids, 64, 16, wanted)
        due = ref.moe_align_block_size(*args, ignore_invalid_experts=ignore)
        got = tiercel.moe_align_block_size(*args, ignore_invalid_experts=ignore)
        assert all(torch.equal(a, b) for a, b in zip(got, due, strict=True))


@pytest.mark.sanitize
@pytest.mark.parametrize("wrong", [0, 1, 2])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("float8", [False, True])
def test_halves(float8, block, wrong):
    x, w = normal(200, 256), normal(4, 256, 256) / 16
    scales = {}
    if float8:
        x, scales["x_scale"] = tiercel.fp8_quantize(x, "row")
        w, scales["w_up_scale"] = w.to(torch.float8_e4m3fn), torch.ones(4, 1, device="cuda")
    ids = torch.rand(200, 4, device="cuda").topk(2).indices.int()
    routing = list(ref.moe_align_block_size(ids, block, 4))
    counts = (400, 4, routing[0].shape[0])
    for number in range(12 if wrong == 2 else 1):
        lists = list(routing)
        if wrong == 2:
            value = (*WILD, counts[2], counts[2] + block, 0, block, LAST - block, 1)[number]
            lists[2] = torch.tensor([value], dtype=torch.int32, device="cuda")
        else:
            lists[wrong] = strays(routing[wrong], counts[wrong])
        due = ref.moe_up(x, w, *lists, 2, block, **scales)
        got = tiercel.moe_up(x, w, *lists, 2, block, **scales)
        torch.testing.assert_close(got, due, rtol=2**-6, atol=2**-4)


@pytest.mark.sanitize
@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("tokens", [4, 40, 600])
def test_fused_moe(tokens, float8):
    x, up, down = normal(tokens, 256), normal(4, 256, 256) / 16, normal(4, 256, 128) / 16
    scales = {}
    if float8:
        up, down = up.to(torch.float8_e4m3fn), down.to(torch.float8_e4m3fn)
        one = torch.ones(4, 1, device="cuda")
        scales = {"w_up_scale": one, "w_down_scale": one}
    ids = strays(torch.randint(8, (tokens, 2)), 8, wide=True)
    expert_map = strays(torch.arange(8) % 4, 4)
    weights = torch.rand(tokens, 2, device="cuda")
    for wanted in (None, expert_map):
        due = ref.fused_moe(x, up, down, weights, ids, expert_map=wanted, **scales).float()
        got = tiercel.fused_moe(x, up, down, weights, ids, expert_map=wanted, **scales).float()
        error = (got - due).square().mean().sqrt()
        assert error <= 4e-2 * due.square().mean().sqrt() + 1e-6


@pytest.mark.sanitize
def test_grouped_gemm():
    x, w = normal(300, 64), normal(5, 72, 64)
    for numbers in ([-5, 10, 100, 100, 299, 301], [2**32, LAST, LAST, LAST, LAST, 2**62], [-9] * 6):
        for dtype in (torch.int64, torch.int32):
            kept = [min(n, LAST) if dtype == torch.int32 else n for n in numbers]
            offsets = torch.tensor(kept, dtype=dtype, device="cuda")
            got = tiercel.grouped_gemm(x, w, offsets)
            torch.testing.assert_close(got, ref.grouped_gemm(x, w, offsets), rtol=2**-6, atol=0.1)


@pytest.mark.parametrize("tokens", [2000, 8000])
def test_most_experts_are_elsewhere(tokens):
    """Blocks of 128, of which many have nothing to load: none may wait for ever."""
    up, down = normal(4, 1536, 512) / 22, normal(4, 512, 768) / 27
    for seed in range(20):
        torch.manual_seed(seed)
        expert_map = torch.full((64,), -1, dtype=torch.int32, device="cuda")
        expert_map[torch.randperm(64)[:4]] = torch.arange(4, dtype=torch.int32, device="cuda")
        ids = torch.rand(tokens, 64, device="cuda").topk(8).indices
        x, weights = normal(tokens, 512), torch.rand(tokens, 8, device="cuda")
        got = tiercel.fused_moe(x, up, down, weights, ids, expert_map=expert_map).float()
        torch.cuda.synchronize()
        due = ref.fused_moe(x, up, down, weights, ids, expert_map=expert_map).float()
        assert (got - due).square().mean().sqrt() <= 2**-7 * due.square().mean().sqrt()


def test_nothing_is_waited_for_and_nothing_warned_where_checks_are_off():
    """TIERCEL_CHECK is read once; a capture has no read of values."""
    positions, cache = torch.arange(8, device="cuda"), normal(8, 64, dtype=torch.float32)
    q, k = normal(8, 2, 64), normal(8, 1, 64)
    due = tiercel.rotary_embedding(positions, q, k, cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = tiercel.rotary_embedding(positions, q, k, cache)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, due, strict=True))
