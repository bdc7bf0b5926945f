# SPDX-License-Identifier: Apache-2.0
"""qk_norm_rope_cache with PyTorch and without a GPU."""

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]


def make(tokens=5, heads=4, kv_heads=2, size=16, rotated=16, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    angles = torch.rand(20, rotated // 2, generator=generator) * 6
    return {
        "q": draw(tokens, heads, size),
        "k": draw(tokens, kv_heads, size),
        "v": draw(tokens, kv_heads, size),
        "q_out": draw(tokens, heads, size),
        "key_cache": draw(4, 4, kv_heads, size),
        "value_cache": draw(4, 4, kv_heads, size),
        "slots": torch.tensor([3, -1, 15, 0, 7])[:tokens],
        "positions": torch.randint(20, (tokens,), generator=generator),
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], dim=1),
        "q_weight": torch.rand(size, generator=generator) + 0.5,
        "k_weight": torch.rand(size, generator=generator) + 0.5,
    }


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [16, 8, 0])
@pytest.mark.parametrize("normed", [False, True])
def test_as_its_three_steps(normed, rotated, interleaved):
    """In float32 they round nothing between them."""
    given = make(rotated=rotated)
    if not normed:
        given |= {"q_weight": None, "k_weight": None}
    q, k = given["q"].float(), given["k"].float()
    if normed:
        q, k = (
            tiercel.rms_norm(x, given[name], eps=1e-5)
            for x, name in ((q, "q_weight"), (k, "k_weight"))
        )
    turned = tiercel.rotary_embedding(
        given["positions"], q, k, given["cos_sin_cache"], interleaved=interleaved
    )
    caches = given["key_cache"].clone(), given["value_cache"].clone()
    tiercel.kv_cache_write(turned[1].bfloat16(), given["v"], *caches, given["slots"])
    got = tiercel.qk_norm_rope_cache(**given, eps=1e-5, interleaved=interleaved)
    assert [got[0] is given["q_out"], got[1] is given["key_cache"]] == [True, True]
    for one, due in zip(got, (turned[0].bfloat16(), *caches), strict=True):
        torch.testing.assert_close(one, due, rtol=2**-7, atol=1e-6)


def test_in_place():
    given = make()
    due = tiercel.qk_norm_rope_cache(**{n: t.clone() for n, t in given.items()})
    got = tiercel.qk_norm_rope_cache(**given | {"q_out": given["q"]})
    assert got[0] is given["q"]
    for one, exact in zip(got, due, strict=True):
        assert torch.equal(one, exact)


@pytest.mark.parametrize("scaled", [False, True])
def test_float8(scaled):
    given, wide = make(), make()
    for name in ("q_out", "key_cache", "value_cache"):
        given[name] = given[name].to(torch.float8_e4m3fn)
        wide[name] = given[name].float()
    wide = {n: t.double() if t.is_floating_point() else t for n, t in wide.items()}
    scales = {
        "q_scale": torch.rand(4) + 0.5,
        "key_scale": torch.rand(1) + 0.5,
        "value_scale": torch.rand(2) + 0.5,
    }
    got = tiercel.qk_norm_rope_cache(**given, **scales if scaled else {})
    due = tiercel.ref.qk_norm_rope_cache(**wide)
    slots = given["slots"][given["slots"] >= 0]
    for one, exact, scale in zip(got, due, scales.values(), strict=True):
        if one.dim() == 4:
            one, exact = (t.float().flatten(0, 1)[slots].double() for t in (one, exact))
        one = one.double() * scale.double().view(-1, 1) if scaled else one.double()
        torch.testing.assert_close(one, exact, rtol=2**-4, atol=2**-9)


BAD = [
    ({"cos_sin_cache": torch.zeros(9, 18)}, "`cos_sin_cache` must have an even second"),
    ({"cos_sin_cache": torch.zeros(0, 8)}, "`cos_sin_cache` must have at least one row"),
    ({"q_scale": torch.ones(1)}, "`q_scale` must be None for a `q_out` that is not float8"),
    ({"key_scale": torch.ones(1)}, "`key_scale` must be None for a cache that is not float8"),
    (
        {"q_scale": torch.ones(3), "q_out": torch.zeros(5, 4, 16).to(torch.float8_e4m3fn)},
        "`q_scale` must have 1 element or H = 4, got 3",
    ),
]


@pytest.mark.parametrize(("changes", "text"), BAD)
def test_bad_arguments_are_named(changes, text):
    with pytest.raises(ValueError) as info:
        tiercel.qk_norm_rope_cache(**make() | changes)
    assert str(info.value).startswith(f"qk_norm_rope_cache: {text}")


def test_a_scale_per_head_of_keys():
    given = make()
    for name in ("key_cache", "value_cache"):
        given[name] = given[name].to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="`value_scale` must have 1 element or Hk = 2, got 4"):
        tiercel.qk_norm_rope_cache(**given, value_scale=torch.ones(4))


def test_there_is_no_derivative():
    given = make()
    with pytest.raises(RuntimeError, match="^qk_norm_rope_cache: there is no derivative"):
        tiercel.qk_norm_rope_cache(**given | {"k": given["k"].requires_grad_()})


def test_one_graph_in_place():
    given = make()
    due = tiercel.qk_norm_rope_cache(**{n: t.clone() for n, t in given.items()})

    def call(q, rest):
        return tiercel.qk_norm_rope_cache(q, q_out=q, **rest)

    rest = {n: t.clone() for n, t in given.items() if n not in ("q", "q_out")}
    got = torch.compile(call, backend="aot_eager", fullgraph=True)(given["q"].clone(), rest)
    for one, exact in zip(got, due, strict=True):
        assert torch.equal(one, exact)


# Qwen2-VL's and Qwen3-VL's, for heads of 16 elements.
SECTIONS = [((2, 3, 3), False), ((4, 2, 2), True)]


@pytest.mark.parametrize(("sections", "sections_interleaved"), SECTIONS)
def test_sections_as_transformers_has_them(sections, sections_interleaved):
    """Angles that are put together for each token beforehand, one row a token."""
    given = make()
    positions = torch.stack([given["positions"], given["positions"].flip(0), torch.arange(5)])
    by_axis = given["cos_sin_cache"][positions].unflatten(-1, (2, 8))
    if sections_interleaved:  # Qwen3VLTextRotaryEmbedding.apply_interleaved_mrope
        angles = by_axis[0].clone()
        for axis in (1, 2):
            places = slice(axis, sections[axis] * 3, 3)
            angles[..., places] = by_axis[axis][..., places]
    else:  # Qwen2VLRotaryEmbedding.apply_mrope
        parts = by_axis.split(sections, dim=-1)
        angles = torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)
    own = {n: t.clone() for n, t in given.items()}
    own |= {"positions": torch.arange(5), "cos_sin_cache": angles.flatten(1)}
    due = tiercel.qk_norm_rope_cache(**own)
    got = tiercel.qk_norm_rope_cache(
        **given | {"positions": positions},
        sections=sections,
        sections_interleaved=sections_interleaved,
    )
    for one, exact in zip(got, due, strict=True):
        assert torch.equal(one, exact)


BAD_SECTIONS = [
    ({"sections": (2, 3, 3)}, ValueError, r"`positions` must have shape [3, T] = [3, 5], got [5]"),
    ({"positions": 3}, ValueError, r"`positions` must have shape [T] = [5], got [3, 5]"),
    (
        {"positions": 3, "sections": (2, 3, 2)},
        ValueError,
        "`sections` must add up to R / 2 = 8, got [2, 3, 2]",
    ),
    (
        {"positions": 3, "sections": (-1, 6, 3)},
        ValueError,
        "`sections` must not be negative, got [-1, 6, 3]",
    ),
    (
        {"positions": 3, "sections": (2, 3, 3), "sections_interleaved": True},
        ValueError,
        "`sections` must be at most 3 and 2 for the second and third position, interleaved, "
        "got [2, 3, 3]",
    ),
    ({"sections_interleaved": True}, ValueError, "`sections_interleaved` needs `sections`"),
    (
        {"positions": 3, "sections": (4, 4)},
        ValueError,
        "`sections` must be None or three whole numbers, got (4, 4)",
    ),
]


@pytest.mark.parametrize(("changes", "error", "text"), BAD_SECTIONS)
def test_bad_sections_are_named(changes, error, text):
    given = make() | changes
    if isinstance(given["positions"], int):
        given["positions"] = torch.zeros(given["positions"], 5, dtype=torch.int32)
    with pytest.raises(error) as info:
        tiercel.qk_norm_rope_cache(**given)
    assert str(info.value) == f"qk_norm_rope_cache: {text}"


def test_sections_in_one_graph():
    given = make() | {"positions": torch.randint(20, (3, 5))}
    due = tiercel.qk_norm_rope_cache(**{n: t.clone() for n, t in given.items()}, sections=(2, 3, 3))

    def call(given):
        return tiercel.qk_norm_rope_cache(**given, sections=(2, 3, 3))

    got = torch.compile(call, backend="aot_eager", fullgraph=True)(given)
    for one, exact in zip(got, due, strict=True):
        assert torch.equal(one, exact)
