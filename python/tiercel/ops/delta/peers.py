# SPDX-License-Identifier: Apache-2.0
"""gated_delta_rule in flash-linear-attention, FlashKDA and FlashQLA; a step of it in PyTorch."""

from __future__ import annotations

import importlib
from typing import Any

from tiercel.workbench.bench.compiled import compiled_for
from tiercel.workbench.bench.launch import Launch, Unsupported, in_place

_LEAST_GATE = -5.0  # the bound of Kimi's models, below every gate of the bench


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
    return _launch(inputs, compiled_for(case, _step))


def fla(case: Any) -> Any:
    if case["gate"] == "channel":
        return importlib.import_module("fla.ops.kda").chunk_kda
    return importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule


def flashqla(case: Any) -> Any:
    if case["gate"] == "channel":
        raise Unsupported("it takes a gate per head")
    return importlib.import_module("flash_qla").chunk_gated_delta_rule


def _prompt(find: Any) -> Any:
    """An adapter for a function that `find` returns; its first call compiles and tunes."""

    def adapter(case: Any, inputs: dict[str, Any]) -> Launch:
        function = find(case)

        def run() -> tuple[Any]:
            return (function(*inputs.values(), use_qk_l2norm_in_kernel=True)[0],)

        run()
        return Launch(run)

    return adapter


def _flashkda(case: Any, inputs: dict[str, Any]) -> Launch:
    """It makes gates and beta itself, from bfloat16: it gets what gives ours, rounded."""
    import torch

    from tiercel.ops.delta import cases

    if case["gate"] != "channel" or case["Hk"] != case["Hv"] or case["B"] != 1:
        raise Unsupported(
            "it takes a gate per channel, as many heads of keys as of values, one row"
        )
    q, k, v, g, beta = inputs.values()
    gate = (g.double() / _LEAST_GATE).logit().to(q.dtype)
    logits = beta.double().logit().to(q.dtype)
    heads, size = q.shape[2:]
    zeros = torch.zeros(heads, size, device=q.device)
    lengths = torch.tensor([0, q.shape[1]], device=q.device)
    state = torch.zeros(1, heads, size, size, device=q.device)
    last, out = torch.empty_like(state), torch.empty_like(v)
    namespace: Any = torch.ops._flashkda_C
    workspace = torch.empty(
        namespace.get_workspace_size(q.shape[1], heads, 1), dtype=torch.uint8, device=q.device
    )
    arguments = (q, k, v, gate, logits, size**-0.5, out, workspace, zeros[:, 0].contiguous(), zeros)

    def run() -> tuple[Any]:
        namespace.fwd(*arguments, _LEAST_GATE, state, last, lengths)
        return (out,)

    made = {
        "q": q,
        "k": k,
        "v": v,
        "g": _LEAST_GATE * gate.double().sigmoid(),
        "beta": logits.double().sigmoid(),
    }

    def check(outputs: tuple[Any, ...]) -> Any:
        return cases._check(made, cases._reference(case, made), outputs, Launch(run))

    return Launch(run, exact=False, check=check, details={"gates": "made inside"})


ADAPTERS = {
    "fla": {"gated_delta_rule": _prompt(fla)},
    "flashqla": {"gated_delta_rule": _prompt(flashqla)},
    "flashkda": {"gated_delta_rule": _flashkda},
    "torch": {"gated_delta_rule_decode": _eager},
    "torch.compile": {"gated_delta_rule_decode": _compiled},
}
