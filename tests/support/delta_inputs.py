# SPDX-License-Identifier: Apache-2.0
"""Inputs of the gated delta rule as flash-linear-attention and FlashQLA draw them in their tests.

Shapes, distributions and tolerances are those of these projects; heads are pairs of the keys' and
the values' number. All tensors are drawn on the CPU, so that a seed means the same everywhere.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional

# Errors relative to the norm of the expected tensor, in this order: results, final states,
# gradients of q, k, v, g, beta and the initial states.
NAMES = ("out", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial")
FLA_TOLERANCES = (0.005, 0.005, 0.008, 0.008, 0.008, 0.02, 0.02, 0.008)
FLASHQLA_TOLERANCES = (0.02,) * 8
ABSOLUTE = 1e-6  # an error that flash-linear-attention's tests accept of any tensor


@dataclasses.dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial: Tensor
    grad: Tensor
    grad_final: Tensor
    starts: Tensor | None = None
    scale: float | None = None
    l2norm: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta

    def to(self, device: str) -> Inputs:
        moved = {
            field.name: getattr(self, field.name).to(device)
            for field in dataclasses.fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        return dataclasses.replace(self, **moved)


def _unit(tensor: Tensor) -> Tensor:
    return functional.normalize(tensor.float(), dim=-1).to(tensor.dtype)


def _starts(ends: list[int] | None) -> Tensor | None:
    return None if ends is None else torch.tensor(ends, dtype=torch.int32)


def fla_uniform(
    batch: int,
    tokens: int,
    heads: tuple[int, int],
    size: int,
    scale: float,
    divisor: float,
    masked: float,
    l2norm: bool,
    dtype: torch.dtype,
    channels: bool = False,
    seed: int = 42,
) -> Inputs:
    """Queries, keys and values from 0 to 1, so that keys resemble each other: the cosine of two is
    0.75. Gates are log-sigmoids over `divisor`: from exp(-69) with 0.01 to 0.97 with 10; the part
    `masked` of them is 1, with masked = 1 all."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k = (uniform(batch, tokens, heads[0], size).to(dtype) for _ in range(2))
    v = uniform(batch, tokens, heads[1], size).to(dtype)
    shape = (*v.shape[:3], size) if channels else tuple(v.shape[:3])
    draw = normal if channels else uniform  # as the tests of KDA and of GDN do
    g = functional.logsigmoid(draw(*shape)) / divisor
    g = g * (uniform(*shape) > masked)
    beta = draw(*v.shape[:3]).sigmoid()
    states = (batch, heads[1], size, size)
    initial = normal(*states) if channels else torch.zeros(states)
    grad, grad_final = normal(*v.shape).to(dtype), normal(*states)
    if not l2norm:
        q, k = _unit(q), _unit(k)
    return Inputs(q, k, v, g, beta, initial, grad, grad_final, None, scale, l2norm)


def fla_packed(
    heads: tuple[int, int],
    size: int,
    masked: float,
    ends: list[int],
    dtype: torch.dtype,
    channels: bool = False,
    seed: int = 42,
) -> Inputs:
    """Packed sequences with normalised keys, queries of any length, gates as in fla_uniform()."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tokens, count = ends[-1], len(ends) - 1
    q, k = (normal(1, tokens, heads[0], size) for _ in range(2))
    v = normal(1, tokens, heads[1], size).to(dtype)
    shape = (*v.shape[:3], size) if channels else tuple(v.shape[:3])
    drawn = normal(*shape) if channels else torch.rand(shape, generator=generator)
    g = functional.logsigmoid(drawn) * (torch.rand(shape, generator=generator) > masked)
    beta = torch.rand(v.shape[:3], generator=generator).sigmoid()
    states = (count, heads[1], size, size)
    q = _unit(q) if channels else q
    grad, grad_final = normal(*v.shape).to(dtype), torch.rand(states, generator=generator)
    return Inputs(
        *(q.to(dtype), _unit(k).to(dtype), v, g, beta, normal(*states), grad, grad_final),
        starts=_starts(ends),
    )


def kda_bounded(
    batch: int,
    tokens: int,
    heads: tuple[int, int],
    size: int,
    scale: float,
    dtype: torch.dtype,
    seed: int = 42,
) -> Inputs:
    """Gates by channels from -5 to 0, as KDA's bounded gate makes them of wide inputs: most lie at
    one of the ends."""
    made = fla_uniform(batch, tokens, heads, size, scale, 1.0, 0.0, True, dtype, True, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    rates = torch.empty(heads[1], 1).uniform_(1.0, 16.0, generator=generator)
    raw = torch.randn(made.g.shape, generator=generator)
    raw = raw + torch.randn((heads[1], size), generator=generator)
    return dataclasses.replace(made, g=-5.0 * torch.sigmoid(rates * raw))


def flashqla(
    batch: int,
    tokens: int,
    heads: tuple[int, int],
    ends: list[int] | None = None,
    with_states: bool = True,
    size: int = 128,
    seed: int = 42,
) -> Inputs:
    """Gates as Mamba's, -A softplus(x): the first head has A = 0 and never decays, the last one 16
    and loses its state at each token. Tokens behind the last end are padding."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k = (_unit(normal(batch, tokens, heads[0], size)).bfloat16() for _ in range(2))
    v, grad = (normal(batch, tokens, heads[1], size).bfloat16() for _ in range(2))
    rates = torch.rand(heads[1], generator=generator) * 16.0
    rates[0], rates[-1] = 0.0, 16.0
    g = -rates * functional.softplus(0.5 * normal(*v.shape[:3]) + 1.0)
    states = (batch if ends is None else len(ends) - 1, heads[1], size, size)
    initial, grad_final = normal(*states), normal(*states) / 8
    if not with_states:
        initial, grad_final = torch.zeros(states), torch.zeros(states)
    beta = normal(*v.shape[:3]).sigmoid()
    return Inputs(q, k, v, g, beta, initial, grad, grad_final, _starts(ends))


def random_ends(count: int, most: int, seed: int = 42) -> list[int]:
    """The ends of `count` packed sequences, of 1 to most - 1 tokens each."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, most, (count,), generator=generator)
    return [0, *lengths.cumsum(0).tolist()]


def check(got: tuple[Tensor, ...], due: tuple[Tensor, ...], tolerances: tuple[float, ...]) -> None:
    """Results, final states and gradients, in the order of NAMES."""
    for name, a, b, most in zip(NAMES, got, due, tolerances, strict=True):
        assert a.shape == b.shape, name
        a, b = a.double(), b.double()
        assert torch.isfinite(a).all(), name
        size = float(b.norm())
        error = float((a - b).norm())
        near = bool(((a - b).abs() <= ABSOLUTE).all())
        assert near or error <= most * size, (name, error / size if size else error)
