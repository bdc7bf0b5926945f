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
