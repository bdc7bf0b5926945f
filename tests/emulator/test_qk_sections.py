# SPDX-License-Identifier: Apache-2.0
"""qk_norm_rope_cache with sections, three positions for each token, on the emulator."""

import pytest
import torch
from support.emulator import sm90
from support.near import BF16, F16, F32, normal

from tiercel.core.dispatch import variants as families

FP8 = torch.float8_e4m3fn
SECTIONS = [
    (128, (16, 24, 24), False),  # Qwen2-VL
    (128, (24, 20, 20), True),  # Qwen3-VL
    (64, (8, 12, 12), False),  # parts of a head
    (64, (11, 11, 10), True),  # all pairs that the second and third position can have
    (32, (0, 3, 13), False),  # a boundary between the pairs of one lane
    (16, (8, 0, 0), True),
]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def make(tokens, rotated, dtype, kind=None, angles=F32, size=128, heads=(3, 2)):
    packed = normal(tokens, heads[0] + 2 * heads[1], size, dtype=dtype)
    turns = torch.rand(50, rotated // 2) * 6.3
    caches = [torch.zeros(3, 16, heads[1], size).to(kind or dtype) for _ in range(2)]
    return [
        *packed.split([heads[0], heads[1], heads[1]], dim=1),
        torch.zeros(tokens, heads[0], size).to(kind or dtype),
        *caches,
        torch.randperm(48)[:tokens],
        torch.randint(-5, 60, (3, tokens)),
        torch.cat([turns.cos(), turns.sin()], dim=1).to(angles),
    ]


def turned_by_hand(x, positions, angles, sections, interleaved_sections, pairs_adjacent):
    """Pair by pair, as the models' configurations describe the sections; x: [T, heads, D]."""
    out, half = x.clone(), angles.shape[1] // 2
    rows = positions.clamp(0, len(angles) - 1)
    for pair in range(half):
        if interleaved_sections:
            axis = pair % 3 if pair < 3 * sections[pair % 3] and pair % 3 else 0
        else:
            axis = 0 if pair < sections[0] else 1 if pair < sections[0] + sections[1] else 2
        cosine, sine = (angles[rows[axis]][:, None, i] for i in (pair, pair + half))
        a, b = (2 * pair, 2 * pair + 1) if pairs_adjacent else (pair, pair + half)
        out[..., a] = x[..., a] * cosine - x[..., b] * sine
        out[..., b] = x[..., b] * cosine + x[..., a] * sine
    return out


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("angles", [F32, None])
@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize("kind", [None, FP8])
@pytest.mark.parametrize(("rotated", "sections", "interleaved"), SECTIONS)
def test_sections(rotated, sections, interleaved, kind, adjacent, angles, dtype):
    given = make(5, rotated, dtype, kind, angles or dtype)
    options = (None, None, 1e-6, adjacent, None, None, None, list(sections), interleaved, None)
    sm90("qk_norm_rope_cache")(*given, *options)
    wide = [t.double() if t.is_floating_point() else t for t in given]
    slots, positions, table = given[6:]
    due = [
        turned_by_hand(x, positions, table.double(), sections, interleaved, adjacent)
        for x in wide[:2]
    ]
    half_unit = 2.0**-4 if kind else torch.finfo(dtype).eps / 2
    for got, exact in zip((given[3], given[4].flatten(0, 1)[slots]), due, strict=True):
        error = (got.double() - exact).abs()
        assert (error <= 1.02 * half_unit * exact.abs() + (2.0**-10 if kind else 2e-6)).all()
    assert torch.equal(given[5].flatten(0, 1)[slots].float(), given[2].to(given[5].dtype).float())


@pytest.mark.parametrize("tokens", [3, 48])
def test_equal_positions_are_one(tokens):
    """Bit for bit as without sections."""
    given = make(tokens, 128, BF16, heads=(130, 2))
    given[7][1:] = given[7][0]
    one = [t.clone() for t in given]
    one[7] = one[7][0].contiguous()
    weight = torch.rand(128) + 0.5
    rest = (weight, weight, 1e-6, False, None, None, None)
    sm90("qk_norm_rope_cache")(*given, *rest, [16, 24, 24], False, None)
    sm90("qk_norm_rope_cache")(*one, *rest, None, False, None)
    for got, due in zip(given[3:6], one[3:6], strict=True):
        assert torch.equal(got, due)


def test_the_reference():
    """In float64, against the pairs by hand."""
    run = families["qk_norm_rope_cache"][0].backends["ref"].run
    for rotated, sections, interleaved in SECTIONS:
        given = [t.double() if t.is_floating_point() else t for t in make(5, rotated, F32)]
        rest = (None, None, 1e-6, False, None, None, None, list(sections), interleaved, None)
        run(*given, *rest)
        due = turned_by_hand(given[0], given[7], given[8], sections, interleaved, False)
        torch.testing.assert_close(given[3], due)
