# SPDX-License-Identifier: Apache-2.0
"""Layers as the `kernels` package takes them: forwards for modules that exist, without a state.

A layer's forward runs as a method of the model's own module, whose weights it uses. Class members
say what a layer can do; `kernels` allows no others.
"""

from __future__ import annotations

from torch import Tensor, nn

import tiercel


class RMSNorm(nn.Module):
    """``x / rms(x) * weight``; epsilon is `variance_epsilon`, or `eps`."""

    can_torch_compile = True
    has_backward = True

    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        weight = self.weight
        if weight.dtype != hidden_states.dtype:
            weight = weight.float()
        return tiercel.rms_norm(hidden_states, weight, eps=eps)  # type: ignore[no-any-return]


class RMSNormZeroCentered(nn.Module):
    """``x / rms(x) * (1 + weight)``, the norm of Gemma."""

    can_torch_compile = True
    has_backward = True

    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        return tiercel.rms_norm(hidden_states, self.weight.float() + 1, eps=eps)  # type: ignore[no-any-return]


class SwiGLUMLP(nn.Module):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``"""

    can_torch_compile = True
    has_backward = True

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(tiercel.silu_and_mul(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


class GeGLUMLP(nn.Module):
    """``down_proj(gelu(gate_proj(x)) * up_proj(x))``, with the tanh form of GELU."""

    can_torch_compile = True
    has_backward = True

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        gated = tiercel.gelu_and_mul(self.gate_proj(x), self.up_proj(x), approximate="tanh")
        return self.down_proj(gated)  # type: ignore[no-any-return]
