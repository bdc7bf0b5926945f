# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy: how many rows of logits are there at a time, and their memory."""

import pytest
import torch

from tiercel.core.spec import Call
from tiercel.ops.loss import chunks

pytestmark = pytest.mark.torch


def divided(rows, hidden, classes, dtype=torch.bfloat16, accum=None, for_weight=True):
    with torch.device("meta"):
        call = Call(
            x=torch.empty(rows, hidden, dtype=dtype),
            weight=torch.empty(classes, hidden, dtype=dtype),
            accum_dtype=accum,
        )
    return chunks.divide(call, for_weight)


@pytest.mark.parametrize("accum", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [64, 1024, 2048, 4096, 8192])
@pytest.mark.parametrize("classes", [1, 1000, 32000, 50257, 128256, 151936, 262144])
def test_the_memory_of_chunks(classes, hidden, accum):
    for rows in (0, 1, 100, 2048, 4097, 8192, 16384, 100_003):
        found = divided(rows, hidden, classes, accum=accum)
        assert found.rows * found.count >= rows > found.rows * (found.count - 1) or rows == 0
        assert found.rows % 128 == 0 or found.rows == rows
        assert found.stride >= classes and found.stride * 2 % 128 == 0
        used, result = found.rows * found.stride * 2, classes * hidden * 2
        if found.wide:  # first the sums without a result, then both without logits
            used = max(used + result, 2 * result)
        asked = found.wide and accum is not None
        assert used <= (max(2 * result, 1 << 30) if asked else found.memory)
        most = min(result, max(result // 2, 2048 * found.stride * 2))
        assert found.memory == max(most, 512 << 20)
        if accum is not None and found.count > 1:
            assert found.wide == (accum == torch.float32)


def test_how_shapes_of_models_are_divided():
    assert divided(8192, 4096, 128256)[:2] == (2048, 4)
    assert divided(4096, 4096, 151936)[:2] == (2048, 2)
    assert divided(16384, 2048, 151936)[:2] == (2048, 8)
    assert divided(4096, 8192, 128256)[:2] == (4096, 1)
    small = divided(16384, 2048, 32000)
    assert small.wide and small.rows >= 1024
    assert divided(16384, 4096, 32000).wide and divided(16384, 1024, 128256).wide
    assert divided(8192, 4096, 128256).apart and not divided(4096, 8192, 128256).apart
    assert not divided(16384, 2048, 128256, torch.float32).wide
    assert not divided(16384, 2048, 32000, for_weight=False).wide
