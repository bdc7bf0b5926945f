# SPDX-License-Identifier: Apache-2.0
"""causal_conv1d in PyTorch and in the library of that name."""

from __future__ import annotations

import importlib
from typing import Any

from tiercel.ops.conv.cases import convolved
from tiercel.workbench.bench.launch import Launch, in_place


def _torch(case: Any, inputs: dict[str, Any]) -> Launch:
    return Launch(lambda: (convolved(*inputs.values()),))


def _library(case: Any, inputs: dict[str, Any]) -> Launch:
    """Its kernels take [B, D, T]; neighbouring elements are channels, as in ours."""
    function = importlib.import_module("causal_conv1d").causal_conv1d_fn
    x, weight, bias = inputs.values()
    return Launch(lambda: (function(x.mT, weight, bias, activation="silu").mT,))


def _library_update(case: Any, inputs: dict[str, Any]) -> Launch:
    from tiercel.ops.conv import cases

    function = importlib.import_module("causal_conv1d").causal_conv1d_update
    x, states, weight, bias, indices, first = inputs.values()
    options = {"activation": "silu", "conv_state_indices": indices}
    expected = cases._reference_update(case, inputs)

    def run() -> tuple[Any]:
        return (function(x.mT, states.mT, weight, bias, **options).mT,)

    return in_place(
        run,
        reset=lambda: states.copy_(first),
        check=lambda outputs: cases._check(inputs, expected, outputs, Launch(run)),
    )


ADAPTERS = {
    "causal-conv1d": {"causal_conv1d": _library, "causal_conv1d_update": _library_update},
    "torch": {"causal_conv1d": _torch},
}
