# SPDX-License-Identifier: Apache-2.0
"""fused_moe, moe_up and moe_down (wgmma; weights by TMA, rows gathered) on the emulator, against float64."""

import pytest
import torch
from support.emulator import kernels, options, sm90
from torch.nn import functional

from tiercel import ref

pytestmark = pytest.mark.torch

ACTIVATIONS = (
    lambda a, b: functional.silu(a) * b,
    lambda a, b: functional.gelu(a) * b,
    lambda a, b: functional.relu(a) * b,
    lambda a, b: functional.gelu(a) * (b + 1),
)
NAMES = ("silu", "gelu", "relu", "gelu_residual")


def data(tokens, experts, k, hidden, inner, dtype=torch.bfloat16, everywhere=None):
    generator = torch.Generator().manual_seed(11)

    def random(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    ids = torch.rand(tokens, everywhere or experts, generator=generator).topk(k).indices.int()
    return (
        random(tokens, hidden),
        random(experts, 2 * inner, hidden, scale=hidden**-0.5),
        random(experts, hidden, inner, scale=inner**-0.5),
        torch.rand(tokens, k, generator=generator),
        ids,
    )


def assert_rounded(got, due):
    """One rounding to the result's type, and what float32 sums and the activation lose."""
    unit = torch.finfo(got.dtype).eps / 2
    assert ((got.double() - due).abs() <= 1.02 * unit * due.abs() + 5e-5).all()


def check_halves(tokens, experts, k, hidden, inner, block, activation=0, dtype=torch.bfloat16):
    x, w_up, w_down, weights, ids = data(tokens, experts, k, hidden, inner, dtype)
    routing = ref.moe_align_block_size(ids, block, experts)
    middle = torch.full((ids.numel(), inner), torch.nan, dtype=dtype)
    out = torch.full((ids.numel(), hidden), torch.nan, dtype=dtype)
    kernels.moe_up(x, w_up, *routing, None, middle, block, activation, None, 0)
    kernels.moe_down(middle, w_down, *routing, weights.flatten(), out, block, 0, None, 0)
    for element, expert in enumerate(ids.flatten().tolist()):
        sums = w_up[expert].double() @ x[element // k].double()
        assert_rounded(middle[element], ACTIVATIONS[activation](*sums.chunk(2)))
        due = w_down[expert].double() @ middle[element].double()
        assert_rounded(out[element], due * weights.flatten()[element].double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [64, 128])
def test_halves(block, dtype):
    check_halves(150, 3, 2, 328, 360, block, dtype=dtype)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("activation", range(4))
def test_activations(activation, block):
    check_halves(5, 4, 2, 72, 136, block, activation)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("tokens", [1, 64, 65, 257])
def test_few_and_more_tokens(tokens, block):
    check_halves(tokens, 4, 3, 200, 264, block)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(("hidden", "inner"), [(8, 8), (64, 512), (1032, 24)])
def test_small_and_odd_sizes(hidden, inner, block):
    check_halves(7, 3, 2, hidden, inner, block)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_no_order_of_copies_and_warps_matters(lazy, seed):
    with options(lazy=lazy, seed=seed):
        check_halves(20, 3, 2, 392, 264, 64)
        check_halves(300, 3, 2, 200, 136, 128)


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 8, 2), (17, 6, 3), (130, 3, 2), (400, 5, 2)])
def test_whole(tokens, experts, k):
    values = data(tokens, experts, k, 200, 136)
    assert_whole(sm90("fused_moe")(*values, "gelu", None, None), values, "gelu")


def assert_whole(got, values, activation, expert_map=None):
    """Three roundings: between the halves, of each expert's output, of the sum."""
    wide = [v.double() for v in values[:4]]
    due = ref.fused_moe(*wide, values[4], activation=activation, expert_map=expert_map)
    scale = due.square().mean().sqrt()
    assert ((got.double() - due).abs() <= 2**-8 * (due.abs() + 6 * scale)).all()


@pytest.mark.parametrize("tokens", [9, 300])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_experts_elsewhere_and_ids_of_none(tokens, dtype):
    expert_map = torch.tensor([0, -1, 1, -1, 2, 3], dtype=torch.int32)
    *values, ids = data(tokens, 4, 2, 128, 136, everywhere=6)
    values = (*values, ids.to(dtype))
    values[4][0, 0], values[4][8, 1] = -1, 6
    if dtype == torch.int64:
        values[4][5, 1] = 2**32 + 1
    got = sm90("fused_moe")(*values, NAMES[3], expert_map, None)
    assert_whole(got, values, NAMES[3], expert_map)
