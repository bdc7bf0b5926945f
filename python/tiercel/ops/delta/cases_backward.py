# SPDX-License-Identifier: Apache-2.0
"""The gradients of gated_delta_rule."""

from __future__ import annotations

from typing import Any

from tiercel.ops.delta.cases import BENCHES as FORWARD
from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

_FORWARD = next(bench for bench in FORWARD if bench.op == "gated_delta_rule")
_NAMES = ("q", "k", "v", "g", "beta")
_LOOKED_AT = 256  # the last tokens, of the last head of keys: what their gradients need is later


def _make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    inputs = _FORWARD.make(case, device, seed)
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    v = inputs["v"]
    grad = torch.randn(v.shape, device=device, generator=generator).to(v.dtype)
    return {**inputs, "grad": grad}


def _ours(case: Any, inputs: Inputs, backend: str) -> Launch:
    """The operator that the gradient calls; a user meets it only in ``backward()``."""
    import torch

    function = torch.ops.tiercel.gated_delta_rule_backward
    given = [inputs[name] for name in _NAMES]
    return Launch(
        lambda: function(inputs["grad"], *given, None, None, None, None, True, backend),
        details={"kernel": "gated_delta_rule_backward"},
    )


def _bytes(case: Any) -> int:
    """Read the inputs and the result's gradient; write their gradients."""
    return 2 * _FORWARD.bytes_moved(case)


def _flops(case: Any) -> int:
    """Two of three products for the states again, five for the gradients, the small ones twice."""
    assert _FORWARD.flops is not None
    return 2 * _FORWARD.flops(case) + case["B"] * case["T"] * case["Hv"] * 2 * 128 * 128


def _share(inputs: Inputs) -> int:
    return int(inputs["v"].shape[2] // inputs["q"].shape[2])


def _reference(case: Any, inputs: Inputs) -> Any:
    from tiercel.ops.delta.reference import gated_delta_rule, gated_delta_rule_backward

    share = _share(inputs)
    few = {
        name: t[-1:, :, -(1 if name in ("q", "k") else share) :].double()
        for name, t in inputs.items()
    }
    first = max(case["T"] - _LOOKED_AT, 0)
    _, state = gated_delta_rule(
        *(few[name][:, :first] for name in _NAMES), qk_l2norm=True, output_final_state=True
    )
    last = [few[name][:, first:] for name in ("grad", *_NAMES)]
    return gated_delta_rule_backward(*last, initial_state=state, qk_l2norm=True)


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """Errors as parts of the gradients' sizes."""
    worst = Error(rms=0.0, maximum=0.0)
    for name, result, truth in zip(_NAMES, outputs, expected, strict=False):
        if result.shape != inputs[name].shape or result.dtype != inputs[name].dtype:
            raise WrongResult(f"d{name}: shape {tuple(result.shape)}, {result.dtype}")
        heads = 1 if name in ("q", "k") else _share(inputs)
        part = result[-1:, -truth.shape[1] :, -heads:].double()
        rms = float((part - truth).norm() / truth.norm())
        if not rms <= 2**-6:
            raise WrongResult(f"d{name} is off by {rms:.2g} of its size")
        largest = float((part - truth).abs().max() / truth.abs().max())
        worst = Error(rms=max(worst.rms, rms), maximum=max(worst.maximum, largest))
    return worst


BENCHES = [
    OpBench(
        family="delta",
        op="gated_delta_rule_backward",
        params=_FORWARD.params,
        invalid=_FORWARD.invalid,
        make=_make,
        call=_FORWARD.call,
        out=lambda case, inputs: None,
        bytes_moved=_bytes,
        flops=_flops,
        reference=_reference,
        check=_check,
        ours=_ours,
    )
]
