# SPDX-License-Identifier: Apache-2.0
"""fused_moe of few tokens in one cooperative launch on the emulator, against float64."""

import pytest
import torch
from support.emulator import kernels, options

from tiercel import ref

pytestmark = pytest.mark.torch

KINDS = ("rows", "experts", "blocks")


def float8(w, kind):
    """Its values as float8; a scale a row, an expert or 128x128 values."""
    if kind == "blocks":
        scale = torch.rand(w.shape[0], w.shape[1] // 128, w.shape[2] // 128) + 0.5
        return (w * 8).to(torch.float8_e4m3fn), scale
    scale = w.abs().amax((2,) if kind == "rows" else (1, 2), keepdim=True) / 448
    return (w / scale).to(torch.float8_e4m3fn), scale.flatten(1)


class Problem:
    def __init__(self, kind, tokens=3, experts=4, k=2, hidden=256, inner=128, index=torch.int32):
        torch.manual_seed(tokens * 100 + hidden)
        self.x = torch.randn(tokens, hidden).bfloat16()
        self.up = float8(torch.randn(experts, 2 * inner, hidden) * hidden**-0.5, kind)
        self.down = float8(torch.randn(experts, hidden, inner) * inner**-0.5, kind)
        self.weights = torch.rand(tokens, k)
        self.ids = torch.rand(tokens, experts).topk(k).indices.to(index)

    def run(self, activation=0, multiprocessors=6, **how):
        out = torch.full_like(self.x, torch.nan)
        (up, up_scale), (down, down_scale) = self.up, self.down
        given = (self.x, up, down, up_scale, down_scale, self.weights, self.ids, out)
        with options(multiprocessors=multiprocessors, **how):
            kernels.fused_moe_few_tokens(*given, activation)
        return out

    def check(self, activation="silu", out=None):
        out = self.run(ACTIVATIONS.index(activation)) if out is None else out
        experts = len(self.up[0])
        there = (self.ids >= 0) & (self.ids < experts)
        due = ref.fused_moe(
            self.x.double(),
            self.up[0],
            self.down[0],
            (self.weights * there).double(),
            self.ids.clamp(0, experts - 1),
            activation=activation,
            w_up_scale=self.up[1],
            w_down_scale=self.down[1],
        )
        error = (out.double() - due).square().mean(1).sqrt()
        # A value between the halves may be rounded to float8's neighbour.
        assert (error <= 4e-2 * due.square().mean(1).sqrt() + 1e-9).all()


ACTIVATIONS = ("silu", "gelu", "relu", "gelu_residual")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tokens", "experts", "k", "hidden", "inner"),
    [
        (1, 4, 1, 128, 128),
        (1, 8, 8, 256, 128),
        (1, 6, 5, 384, 256),
        (4, 8, 2, 384, 256),
        (3, 2, 1, 256, 640),
        (4, 8, 4, 512, 256),
        (3, 8, 7, 256, 128),  # rows between the halves as they come
        (4, 8, 6, 128, 640),
        (16, 4, 2, 128, 128),  # more than eight elements an expert
        (2, 16, 8, 256, 128),  # more experts than eight groups take at once
        (4, 4, 2, 2432, 128),  # x in several passes
    ],
)
def test_sizes(kind, tokens, experts, k, hidden, inner):
    Problem(kind, tokens, experts, k, hidden, inner).check()


@pytest.mark.parametrize("kind", ["rows", "blocks"])
def test_blocks_without_a_tile_of_the_result(kind):
    problem = Problem(kind, 2, 4, 2, 256, 128)
    problem.check(out=problem.run(multiprocessors=20))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    Problem("rows").check(activation)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_ids_that_are_no_experts(index):
    problem = Problem("rows", index=index)
    problem.ids[0, 0], problem.ids[1], problem.ids[2, 1] = -1, 4, 99
    problem.weights[0, 0] = torch.nan  # of nobody
    out = problem.run()
    assert not out[1].any()
    problem.weights[0, 0] = 0
    problem.check(out=out)


def test_nan_of_a_weight_stays_in_its_row():
    problem = Problem("rows")
    problem.weights[1, 0] = torch.nan
    out = problem.run()
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("tokens", [2, 9])
def test_nan_of_x_stays_in_its_token(tokens):
    """Also where a value says by its bits whether it is there."""
    problem = Problem("rows", tokens)
    problem.x[1, 5] = torch.nan
    out = problem.run()
    assert out[1].isnan().all() and out[0].isfinite().all() and out[2:].isfinite().all()


def test_launches_of_other_sizes_leave_nothing_behind():
    problems = [Problem("rows", 9), Problem("blocks", 3, 8, 7), Problem("rows", 2, inner=384)]
    due = [problem.run() for problem in problems]
    for n in (1, 2, 0, 0, 2, 1, 1, 0):
        assert torch.equal(problems[n].run(seed=n), due[n])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [3, 9])
@pytest.mark.parametrize("seed", range(1, 5))
def test_any_order_of_warps_and_copies(kind, tokens, seed):
    """Units go to whoever comes: the same sums in every order, launch after launch."""
    problem = Problem(kind, tokens)
    first = problem.run()
    assert torch.equal(problem.run(seed=seed), first)
    assert torch.equal(problem.run(lazy=False), first)
