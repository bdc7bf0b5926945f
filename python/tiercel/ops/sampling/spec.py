# SPDX-License-Identifier: Apache-2.0
"""The declarations of the sampler."""

from __future__ import annotations

from dataclasses import replace

from tiercel.core.spec import FLOATS, INDICES, Call, DType, Float, Int, Numerics, Spec, Tensor


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
    numerics=Numerics(
        4e-6,
        of="argument",
        sums="float32 in segments of 1024 columns, or whole numbers; log- probabilities",
    ),
)


def _check_positions(call: Call) -> None:
    from tiercel.core.checks import check_shape

    sequences, count = call.draft_tokens.shape
    due = (sequences, count + 1, call.logits.shape[2])
    check_shape("verify_draft", "logits", call.logits, due, "[B, S + 1, V]")
    if call.logits.shape[2] == 0:
        raise ValueError("verify_draft: `logits` must have at least 1 column, got 0")


def _of_sequence(name: str) -> Tensor:
    return replace(SAMPLE.argument(name), dims="B")  # type: ignore[type-var, return-value]


VERIFY_DRAFT = Spec(
    "verify_draft",
    Tensor("draft_tokens", "B S", INDICES),
    Tensor("logits", "B P V", FLOATS, strided=True, shape_text="[B, S + 1, V]"),
    Tensor("draft_probs", "B S V", "float32", optional=True),
    *map(_of_sequence, ("temperatures", "top_ks", "top_ps", "min_ps", "seeds", "offsets")),
    *map(SAMPLE.argument, ("temperature", "top_k", "top_p", "min_p", "seed", "offset")),
    results=[
        Tensor("tokens", "B P", "draft_tokens", shape_text="[B, S + 1]"),
        Tensor("accepted", "B", "int32"),
    ],
    check=_check_positions,
    limits="V up to 409600 (float32) or 800000",
    numerics=Numerics(0),
)

# A tree instead of a chain.
VERIFY_TREE = VERIFY_DRAFT.changed(
    name="verify_tree",
    arguments=(
        *VERIFY_DRAFT.arguments[:2],
        Tensor("parents", "B S", "int32"),
        *VERIFY_DRAFT.arguments[2:],
    ),
    results=[*VERIFY_DRAFT.results, Tensor("path", "B S", "int32")],
    gradient_of="verify_draft",
)

WITH_LOGPROBS = SAMPLE.changed(
    name="sample_with_logprobs",
    results=[*SAMPLE.results, Tensor("logprobs", "T", "float32", rtol=1e-5, atol=1e-5)],
    gradient_of="sample",
)

# The tokens with the largest logits too; a row with fewer tokens has -1 and -inf behind them.
WITH_TOP_LOGPROBS = WITH_LOGPROBS.changed(
    name="sample_with_top_logprobs",
    arguments=(*SAMPLE.arguments, Int("top_logprobs", 1, at_least=1)),
    results=[
        *WITH_LOGPROBS.results,
        Tensor("best_tokens", "T top_logprobs", "indices_dtype"),
        Tensor("best_logprobs", "T top_logprobs", "float32", rtol=1e-5, atol=1e-5),
    ],
)
