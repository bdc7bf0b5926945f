# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in flash-linear-attention; a step of it in PyTorch, eager and compiled."""

from __future__ import annotations

import importlib
from typing import Any

from tiercel.workbench.bench.launch import Launch, in_place

_last: dict[Any, Any] = {}  # one compilation for all inputs of a case


def _step(q: Any, k: Any, v: Any, g: Any, beta: Any, states: Any, indices: Any) -> Any:
    import torch

    heads = v.shape[2] // q.shape[2]
    q, k = (torch.nn.functional.normalize(t.float(), dim=-1)[:, 0] for t in (q, k))
    q, k = (t.repeat_interleave(heads, 1) for t in (q, k))
    decay = g[:, 0].exp()
    decay = decay[..., None, None] if decay.dim() == 2 else decay[..., None]
    state = states[indices].float() * decay
    found = (k[..., None] * state).sum(-2)
    change = (v[:, 0].float() - found) * beta[:, 0, :, None]
    state = state + k[..., None] * change[..., None, :]
    states[indices] = state.to(states.dtype)
    out = (q[..., None] * state).sum(-2) * q.shape[-1] ** -0.5
    return out.to(v.dtype)[:, None]


def _launch(inputs: dict[str, Any], function: Any) -> Launch:
    *given, states, indices, first = inputs.values()
    places = indices.long()
    from tiercel.ops.delta import cases

    def run() -> tuple[Any]:
        return (function(*given, states, places),)

    expected = cases._reference_decode(None, inputs)
    return in_place(
        run,
        reset=lambda: states.copy_(first),
        check=lambda outputs: cases._check(inputs, expected, outputs, Launch(run)),
    )


def _eager(case: Any, inputs: dict[str, Any]) -> Launch:
    return _launch(inputs, _step)


def _compiled(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    if case.key not in _last:
        torch._dynamo.reset()
        _last.clear()
        _last[case.key] = torch.compile(_step, dynamic=False, fullgraph=True)
    return _launch(inputs, _last[case.key])


def _fla(case: Any, inputs: dict[str, Any]) -> Launch:
    """Its first call compiles and tunes."""
    if case["gate"] == "channel":
        function = importlib.import_module("fla.ops.kda").chunk_kda
    else:
        function = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

    def run() -> tuple[Any]:
        return (function(*inputs.values(), use_qk_l2norm_in_kernel=True)[0],)

    run()
    return Launch(run)


ADAPTERS = {
    "fla": {"gated_delta_rule": _fla},
    "torch": {"gated_delta_rule_decode": _eager},
    "torch.compile": {"gated_delta_rule_decode": _compiled},
}
