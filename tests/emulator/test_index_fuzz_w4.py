# SPDX-License-Identifier: Apache-2.0
"""Index fuzz of mixtures of experts with 4-bit weights: ids and maps."""

import pytest
import torch
from support.index_fuzz import CASES, Draw, reference, run

import tiercel

pytestmark = pytest.mark.torch

FUZZED = ("w4_moe",)


@pytest.mark.parametrize("case", range(CASES))
def test_w4_moe(case):
    draw = Draw(case)
    tokens, k, experts = draw.of(1, 9, 70, 200), draw.of(1, 2), draw.of(1, 3)
    expert_map, everywhere = None, experts
    if draw.of(False, True):
        everywhere = experts + 3
        expert_map = torch.randperm(everywhere, generator=draw.generator)
        expert_map = draw.strays(torch.where(expert_map < experts, expert_map, -1), experts, False)
    ids = torch.randint(everywhere, (tokens, k), generator=draw.generator)
    ids = draw.strays(ids, everywhere, wide=draw.of(False, True))

    def bits(*shape):
        return torch.randint(0, 256, shape, generator=draw.generator).to(torch.uint8)

    halves = []
    for rows, columns in ((128, 128), (128, 64)):
        halves += [bits(experts, rows, columns // 2), bits(experts, rows, columns // 32) % 4 + 121]
    x, weights = draw.normal(tokens, 128), draw.uniform(tokens, k)
    gate = (None, draw.normal(experts, 128), "silu", 1.0, 0.0, False, expert_map)
    x_scale = None
    if draw.of(False, True):
        x, x_scale = tiercel.ref.fp8_quantize(x)
    args = (x, *halves, weights, ids, "mxfp4", *gate, None, None, None, None, x_scale, None)
    due = reference("w4_moe")(*args).float()
    got, _ = run("w4_moe", *args)
    error = (got.float() - due).square().mean().sqrt()
    assert error <= 2**-7 * due.square().mean().sqrt() + 1e-6
