# SPDX-License-Identifier: Apache-2.0
"""qk_norm_rope_cache on an H100 or H200, against float64."""

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

FP8 = torch.float8_e4m3fn


@pytest.fixture
def make():
    generator = torch.Generator("cuda").manual_seed(3)

    def draw(tokens, heads, kv_heads, size, rotated, dtype=torch.bfloat16, **more):
        def normal(*shape):
            return torch.randn(*shape, device="cuda", generator=generator)

        places, blocks = 16, tokens // 8 + 1
        packed = normal(tokens, heads + 2 * kv_heads, size).to(dtype)
        q, k, v = packed.split([heads, kv_heads, kv_heads], dim=1)
        slots = torch.randperm(blocks * places, device="cuda", generator=generator)[:tokens]
        angles = normal(500, rotated // 2) * 6.3
        shape = (blocks, places, kv_heads, size)
        if more.get("head_first"):  # [blocks, Hk, block size, D] in memory
            caches = [normal(blocks, kv_heads, places, size).transpose(1, 2) for _ in range(2)]
        else:
            caches = [normal(*shape) for _ in range(2)]
        kind, cache_kind = more.get("kind", dtype), more.get("cache_kind", dtype)
        return {
            "q": q,
            "k": k,
            "v": v,
            "q_out": normal(tokens, heads, size).to(kind),
            "key_cache": caches[0].to(cache_kind),
            "value_cache": caches[1].to(cache_kind),
            "slots": slots.masked_fill(slots % 7 == 0, -1),
            "positions": torch.randint(500, (tokens,), device="cuda", generator=generator),
            "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], dim=1),
            "q_weight": normal(size).abs() + 0.5,
            "k_weight": (normal(size).abs() + 0.5).to(dtype),
        }

    return draw


def exact(given, **options):
    """The reference's results in float64, where a scale is no more than a factor."""
    wide = {
        n: t.double() if t is not None and t.is_floating_point() else t for n, t in given.items()
    }
    scales = {n: options.pop(n) for n in ("q_scale", "key_scale", "value_scale") if n in options}
    due = tiercel.ref.qk_norm_rope_cache(**wide, **options)
    return [
        t if scale is None else t / scale.double().view(-1, 1)
        for t, scale in zip(
            due, [scales.get(n) for n in ("q_scale", "key_scale", "value_scale")], strict=True
        )
    ]


def assert_right(got, due, slots):
    """Half a unit in the last place, and float32's products: of the elements of a pair, which may
    be larger than what they turn to."""
    for one, wide in zip(got, due, strict=True):
        narrow = one.dtype == FP8
        half_unit = 2.0**-4 if narrow else torch.finfo(one.dtype).eps / 2
        one = one.double()
        if one.dim() == 4:
            one, wide = (t.flatten(0, 1)[slots[slots >= 0]] for t in (one, wide))
        wide = wide.clamp(-448, 448) if narrow else wide
        error = (one - wide).abs()
        largest = wide.abs().amax(-1, keepdim=True) if wide.numel() else wide
        allowed = 1.02 * half_unit * wide.abs() + (2.0**-10 if narrow else 2.0**-20 * largest)
        assert (error <= allowed).all(), error.max().item()


SIZES = [(128, 128), (64, 64), (64, 32), (80, 16), (256, 64), (512, 512), (96, 96), (16, 0)]


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_first", [False, True])
def test_sizes(make, dtype, interleaved, head_first):
    for tokens in (0, 1, 7, 200):
        for size, rotated in SIZES:
            for heads, kv_heads in [(32, 8), (1, 1), (3, 7)]:
                given = make(tokens, heads, kv_heads, size, rotated, dtype, head_first=head_first)
                if heads == 3:
                    given["q_weight"] = None
                due = exact(given, interleaved=interleaved)
                got = tiercel.qk_norm_rope_cache(**given, interleaved=interleaved)
                assert_right(got, due, given["slots"])


@pytest.mark.sanitize
@pytest.mark.parametrize("kind", [torch.bfloat16, FP8])
@pytest.mark.parametrize("cache_kind", [torch.bfloat16, FP8])
@pytest.mark.parametrize("tokens", [5, 3000])
def test_float8(make, tokens, cache_kind, kind):
    given = make(tokens, 32, 8, 128, 128, kind=kind, cache_kind=cache_kind)
    scales = {}
    if kind == FP8:
        scales["q_scale"] = torch.rand(32, device="cuda") + 0.5
    if cache_kind == FP8:
        scales |= {n: torch.rand(8, device="cuda") + 0.5 for n in ("key_scale", "value_scale")}
    for options in ({}, scales):
        due = exact(given, **options)
        got = tiercel.qk_norm_rope_cache(**given, **options)
        assert_right(got, due, given["slots"])


@pytest.mark.sanitize
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, FP8])
@pytest.mark.parametrize("tokens", [1, 7, 3000])
@pytest.mark.parametrize(
    ("rotated", "sections", "sections_interleaved"),
    [(128, (16, 24, 24), False), (128, (24, 20, 20), True), (64, (5, 13, 14), False)],
)
def test_sections(make, rotated, sections, sections_interleaved, tokens, kind, interleaved):
    given = make(tokens, 32, 8, 128, rotated, kind=kind, cache_kind=kind)
    given["positions"] = torch.randint(-9, 510, (3, tokens), device="cuda")
    options = {"sections": sections, "sections_interleaved": sections_interleaved}
    due = exact(given, interleaved=interleaved, **options)
    got = tiercel.qk_norm_rope_cache(**given, interleaved=interleaved, **options)
    assert_right(got, due, given["slots"])


def test_other_lines_stay(make):
    given = make(300, 32, 8, 128, 128)
    before = [given[name].clone() for name in ("key_cache", "value_cache")]
    got = tiercel.qk_norm_rope_cache(**given)
    slots = given["slots"]
    for one, old in zip(got[1:], before, strict=True):
        kept = torch.ones(one.shape[0] * one.shape[1], dtype=torch.bool, device="cuda")
        kept[slots[slots >= 0]] = False
        assert torch.equal(one.flatten(0, 1)[kept], old.flatten(0, 1)[kept])


@pytest.mark.parametrize("tokens", [3, 5000])
@pytest.mark.parametrize("interleaved", [False, True])
def test_in_place(make, tokens, interleaved):
    given = make(tokens, 32, 8, 128, 128)
    given |= {name: given[name].int() for name in ("slots", "positions")}
    due = exact(given, interleaved=interleaved)
    got = tiercel.qk_norm_rope_cache(**given | {"q_out": given["q"]}, interleaved=interleaved)
    assert_right(got, due, given["slots"].long())


def test_special_values(make):
    """A NaN or an infinity makes NaN of its head alone."""
    given = make(4, 4, 2, 128, 64)
    given["q"][1, 2, 5], given["k"][2, 0, 100] = torch.nan, torch.inf
    given["q"][3, 1] = 0
    got = tiercel.qk_norm_rope_cache(**given)
    due = tiercel.ref.qk_norm_rope_cache(**{n: t.clone() for n, t in given.items()})
    for one, right in zip(got, due, strict=True):
        assert torch.equal(one.isnan(), right.isnan())
    assert got[0][1, 2].isnan().all() and not got[0][3].isnan().any()
    assert not got[0][3, 1].any()


def test_graph_replay(make):
    given = make(64, 32, 8, 128, 128)
    q, packed = given["q"], given["q"]._base
    weight = torch.randn(128 * 8, packed[0].numel(), device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(64, 128 * 8, device="cuda", dtype=torch.bfloat16)
    torch.matmul(hidden, weight)  # cuBLAS's handle cannot be made during a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Behind a product: the heads must not be read too early.
        torch.matmul(hidden, weight, out=packed.view(64, -1))
        tiercel.qk_norm_rope_cache(**given)
    for _ in range(3):
        hidden.normal_()
        graph.replay()
        torch.cuda.synchronize()
        got = [given[name] for name in ("q_out", "key_cache", "value_cache")]
        assert_right([t.clone() for t in got], exact(given), given["slots"])
    assert q.data_ptr() == packed.data_ptr()
