# SPDX-License-Identifier: Apache-2.0
"""The declarations of gated_delta_rule, gated_delta_rule_decode and gated_rms_norm."""

from __future__ import annotations

from typing import Any

from tiercel.core.spec import HALVES, Bool, Call, Float, Numerics, Spec, Tensor


def _check_heads(op: str, call: Call) -> None:
    heads, key_heads = call.v.shape[2], call.q.shape[2]
    if heads and (key_heads == 0 or heads % key_heads):
        raise ValueError(
            f"{op}: `v` must have a number of heads that is a multiple of that of `q`, "
            f"{key_heads}, got {heads}"
        )
    due = [*call.v.shape[:3]]
    found = list(call.g.shape)
    if found not in (due, [*due, call.q.shape[3]]):
        raise ValueError(
            f"{op}: `g` must have shape [B, T, Hv] = {due} or [B, T, Hv, K] = "
            f"{[*due, call.q.shape[3]]}, got {found}"
        )


_INPUTS = (
    Tensor("q", "B T Hk K", HALVES, strided=True),
    Tensor("k", "B T Hk K", "q", strided=True),
    Tensor("v", "B T Hv V", "q", strided=True),
    Tensor("g", "*", "float32", strided=True),
    Tensor("beta", "B T Hv", ("float32", "q"), strided=True),
)
_OPTIONS = (Float("scale", None, optional=True), Bool("qk_l2norm", False))


def _check_decode(call: Call) -> None:
    op = "gated_delta_rule_decode"
    _check_heads(op, call)
    indices, (batch, tokens) = call.state_indices, call.q.shape[:2]
    if indices is not None and list(indices.shape) not in ([batch], [batch, 1], [batch, tokens]):
        raise ValueError(
            f"{op}: `state_indices` must have shape [B] = [{batch}] or [B, T] = "
            f"{[batch, tokens]}, got {list(indices.shape)}"
        )


GATED_DELTA_RULE_DECODE = Spec(
    "gated_delta_rule_decode",
    *_INPUTS,
    Tensor("states", "slots Hv K V", ("float32", "bfloat16"), strided=True, written=True),
    Tensor("out", "B T Hv V", "q", strided=True, written=True),
    Tensor("state_indices", "*", "int32", optional=True),
    Tensor("accepted", "B", "int32", optional=True),
    *_OPTIONS,
    check=_check_decode,
    limits="K 64 or 128, V a multiple of 32, 16-byte aligned heads",
    numerics=Numerics(
        4e-6, of="terms", sums="float32: over K, lanes in a fixed order; tokens in order"
    ),
)


def _sequences(call: Call) -> Any:
    """The number of sequences of a prompt."""
    if call.cu_seqlens is None:
        return call.q.shape[0]
    return call.cu_seqlens.shape[0] - 1 if call.cu_seqlens.dim() == 1 else None


def _check(call: Call) -> None:
    op = "gated_delta_rule"
    _check_heads(op, call)
    if call.cu_seqlens is None:
        return
    if call.cu_seqlens.shape[0] == 0:
        raise ValueError(f"{op}: `cu_seqlens` must have at least one element, got none")
    if call.q.shape[0] != 1:
        raise ValueError(
            f"{op}: `q` must have a batch of 1 with `cu_seqlens`, got {call.q.shape[0]}"
        )


# The state, what tokens write and results are rounded to bfloat16, 2**-9 each; values are about 1.
_OUT = Tensor("out", "B T Hv V", "q", strided=True, rtol=2e-2, atol=2e-2)
_STATE = Tensor("final_state", "N Hv K V", "float32", rtol=2e-2, atol=2e-2)

WITH_STATE = Spec(
    "gated_delta_rule_with_state",
    *_INPUTS,
    Tensor("initial_state", "N Hv K V", "float32", optional=True),
    Tensor("cu_seqlens", "N1", "int32", strided=True, optional=True, shape_text="[N + 1]"),
    *_OPTIONS,
    results=[_OUT, _STATE],
    dims={"N": _sequences},
    check=_check,
    gradient_of="gated_delta_rule",
)
GATED_DELTA_RULE = WITH_STATE.changed(
    name="gated_delta_rule",
    public="gated_delta_rule",
    gradient_of="",
    results=[_OUT],
    limits="K 64 or 128, V a multiple of 16, 16-byte aligned heads",
    numerics=Numerics(
        2**-6,
        of="terms",
        sums="float32: chunks of 64 tokens in order; operands of products, the state among them, "
        "rounded to the dtype of `q`; of few long sequences the states of segments first",
        batch_invariant=False,
        varies="whether a sequence is divided into segments, and how long they are",
    ),
)

GATED_DELTA_RULE_BACKWARD = Spec(
    "gated_delta_rule_backward",
    Tensor("grad", "B T Hv V", "q", strided=True),
    *_INPUTS,
    Tensor("grad_final", "N Hv K V", "float32", optional=True),
    *WITH_STATE.tensors[len(_INPUTS) :],
    *_OPTIONS,
    results=[
        Tensor("dq", "B T Hk K", "q"),
        Tensor("dk", "B T Hk K", "q"),
        Tensor("dv", "B T Hv V", "q"),
        Tensor("dg", "*", "float32", shape=lambda call: tuple(call.g.shape)),
        Tensor("dbeta", "B T Hv", "beta"),
        # Empty without initial states.
        Tensor(
            "grad_initial",
            "*",
            "float32",
            shape=lambda call: (
                (0,) if call.initial_state is None else tuple(call.initial_state.shape)
            ),
        ),
    ],
    dims={"N": _sequences},
    check=_check,
    gradient_of="gated_delta_rule",
)

GATED_RMS_NORM = Spec(
    "gated_rms_norm",
    Tensor("x", "... N", HALVES, strided=True),
    Tensor("gate", "... N", "x", strided=True),
    Tensor("weight", "N", ("x", "float32")),
    Float("eps", 1e-6, at_least=0),
    # Rounded once, by 2**-9 for bfloat16.
    results=[Tensor("out", "... N", "x", rtol=8e-3, atol=1e-5)],
    limits="N a multiple of 8 up to 1024",
    numerics=Numerics(4e-6, of="terms", sums="float32: a lane's elements, then lanes"),
)
