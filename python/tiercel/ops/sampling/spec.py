# SPDX-License-Identifier: Apache-2.0
"""The declarations of the sampler."""

from __future__ import annotations

from tiercel.core.spec import FLOATS, INDICES, Call, DType, Float, Int, Spec, Tensor


def _check(call: Call) -> None:
    if call.logits.shape[1] == 0:
        raise ValueError("sample: `logits` must have at least 1 column, got 0")


def _words(call: Call) -> int:
    """32-bit words for a bit of each token."""
    return (call.logits.shape[1] + 31) // 32  # type: ignore[no-any-return]


def _each(name: str, dtype: str = "float32") -> Tensor:
    return Tensor(name, "T", dtype, optional=True)


def _mask(name: str) -> Tensor:
    return Tensor(name, "T words", "int32", optional=True, shape_text="[T, ceil(V / 32)]")


SAMPLE = Spec(
    "sample",
    Tensor("logits", "T V", FLOATS, strided=True),
    _each("temperatures"),
    _each("top_ks", "int32"),
    _each("top_ps"),
    _each("min_ps"),
    _each("seeds", "int64"),
    _each("offsets", "int64"),
    _each("repetition_penalties"),
    _each("presence_penalties"),
    _each("frequency_penalties"),
    Tensor("counts", "T V", "int32", optional=True),
    _mask("prompt"),
    _mask("allowed"),
    Float("temperature", 1.0, at_least=0),
    Int("top_k", 0, at_least=0, varies=True),
    Float("top_p", 1.0, at_least=0),
    Float("min_p", 0.0, at_least=0),
    Int("seed", 0, varies=True),
    Int("offset", 0, varies=True),
    Float("repetition_penalty", 1.0, at_least=0),
    Float("presence_penalty", 0.0),
    Float("frequency_penalty", 0.0),
    DType("indices_dtype", "int32", choices=INDICES),
    results=[Tensor("tokens", "T", "indices_dtype")],
    dims={"words": _words},
    check=_check,
    limits="V up to 409600 (float32 or penalties) or 800000",
)

WITH_LOGPROBS = SAMPLE.changed(
    name="sample_with_logprobs",
    results=[*SAMPLE.results, Tensor("logprobs", "T", "float32", rtol=1e-5, atol=1e-5)],
    gradient_of="sample",
)
