# SPDX-License-Identifier: Apache-2.0
"""Liger Kernel's names for Tiercel's ops: change the import, and keep constructors, calls and
checkpoints. Needs no liger-kernel; an option without a counterpart raises NotImplementedError."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import tiercel

__all__ = [
    "LigerCrossEntropyLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerRMSNorm",
    "LigerSwiGLUMLP",
]


def _refuse(name: str, **options: Any) -> None:
    """Raises for the first option that is set."""
    for option, value in options.items():
        if value:
            raise NotImplementedError(
                f"tiercel.integrations.liger.{name}: `{option}` = {value!r} is not supported"
            )


class LigerRMSNorm(nn.Module):
    """An RMS norm by :func:`tiercel.rms_norm`, with Liger's arguments.

    All arithmetic is float32 and the result is rounded once, with both casting modes. ``in_place``
    and ``row_mode``, options of Liger's kernels, have no effect.
    """

    weight: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        if init_fn not in ("ones", "zeros"):
            raise ValueError(f"LigerRMSNorm: `init_fn` must be 'ones' or 'zeros', got {init_fn!r}")
        if casting_mode not in ("llama", "gemma"):
            _refuse("LigerRMSNorm", casting_mode=casting_mode)
        self.elementwise_affine = elementwise_affine
        if elementwise_affine:
            self.weight = nn.Parameter(getattr(torch, init_fn)(hidden_size))
        else:
            self.register_parameter("weight", None)
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place, self.row_mode = in_place, row_mode

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        if weight is not None and self.offset:
            weight = weight.float() + self.offset
        elif weight is not None and weight.dtype != hidden_states.dtype:
            weight = weight.float()
        result: Tensor = tiercel.rms_norm(hidden_states, weight, eps=self.variance_epsilon)
        return result

    def extra_repr(self) -> str:
        shape = None if self.weight is None else tuple(self.weight.shape)
        return f"weight_shape={shape}, eps={self.variance_epsilon}, offset={self.offset}"


class LigerSwiGLUMLP(nn.Module):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))`` with :func:`tiercel.silu_and_mul`; takes the
    model's configuration, as Liger's."""

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__()
        if config.hidden_act not in ("silu", "swish"):
            raise ValueError(
                "LigerSwiGLUMLP: `config.hidden_act` must be 'silu' or 'swish', got "
                f"{config.hidden_act!r}"
            )
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = intermediate_size or config.intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(tiercel.silu_and_mul(self.gate_proj(x), self.up_proj(x)))
        return result


class _Loss(nn.Module):
    """The options of both losses."""

    def __init__(self, weight: Tensor | None, weight_name: str, **options: Any) -> None:
        super().__init__()
        name = type(self).__name__
        z_loss = options["lse_square_scale"]
        _refuse(name, **{n: v for n, v in options.items() if n.startswith(("return_", "use_"))})
        if weight is not None and z_loss and options["reduction"] == "mean":
            # Liger divides the z-loss by the number of rows, and the loss by the weights' sum.
            raise NotImplementedError(
                f"tiercel.integrations.liger.{name}: `lse_square_scale` with `{weight_name}` is "
                "not supported for a mean"
            )
        setattr(self, weight_name, weight)
        for option, value in options.items():
            setattr(self, option, value)

    def _options(self) -> dict[str, Any]:
        return {
            "ignore_index": self.ignore_index,
            "z_loss": self.lse_square_scale,
            "label_smoothing": self.label_smoothing,
            "reduction": self.reduction,
            "softcap": self.softcap,
        }


class LigerCrossEntropyLoss(_Loss):
    """:func:`tiercel.cross_entropy` with Liger's arguments. As in Liger, the gradient overwrites
    the logits unless they are a leaf."""

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__(
            weight,
            "weight",
            ignore_index=ignore_index,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            reduction=reduction,
            softcap=softcap,
            return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
        )

    def forward(self, _input: Tensor, target: Tensor) -> Tensor:
        inplace = torch.is_grad_enabled() and _input.requires_grad and not _input.is_leaf
        result: Tensor = tiercel.cross_entropy(
            _input, target, self.weight, inplace=inplace, **self._options()
        )
        return result


class LigerFusedLinearCrossEntropyLoss(_Loss):
    """:func:`tiercel.linear_cross_entropy` with Liger's arguments."""

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__(
            ce_weight,
            "ce_weight",
            ignore_index=ignore_index,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            reduction=reduction,
            softcap=softcap,
            return_z_loss=return_z_loss,
            accum_dtype=accum_dtype,
            use_token_scaling=use_token_scaling,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
        )

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        result: Tensor = tiercel.linear_cross_entropy(
            _input,
            lin_weight,
            target,
            bias,
            class_weight=self.ce_weight,
            accum_dtype=self.accum_dtype,
            **self._options(),
        )
        return result
