# SPDX-License-Identifier: Apache-2.0
"""Smoke cases of sample, and the contract of its plug-ins."""

from __future__ import annotations

from typing import Any

from tiercel.ops.sampling.spec import SAMPLE, VERIFY_DRAFT
from tiercel.plugins.contract import Case, Contract

_OPTIONS = {scalar.name: scalar.default for scalar in SAMPLE.scalars}


def _case(rows: int, tokens: int, dtype: str, values: str = "random", **options: Any) -> Case:
    return Case({"T": rows, "V": tokens}, dtype, _OPTIONS | options, values)


_CASES = (
    _case(4, 16, "float32", temperature=0.0),
    _case(33, 128, "bfloat16", "rows"),
    _case(7, 1000, "float16", top_k=20, top_p=0.9, seed=3),
    _case(5, 4097, "float32", "penalties", min_p=0.05, presence_penalty=0.5),
    _case(6, 264, "bfloat16", "masked", temperature=0.7, indices_dtype="int64"),
    _case(2, 128256, "bfloat16", top_p=0.9, offset=7),
    _case(129, 1, "float32"),
    _case(0, 64, "bfloat16"),
    _case(40, 264, "bfloat16", "strided"),
    _case(4, 40, "float32", "special"),
)


def _words(rows: int, tokens: int, generator: Any) -> Any:
    """A mask with a bit for each token."""
    import torch

    shape = (rows, (tokens + 31) // 32)
    return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)


def _make(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    rows, tokens = case.sizes["T"], case.sizes["V"]
    # On the CPU and then moved: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    given: dict[str, Any] = {tensor.name: None for tensor in SAMPLE.tensors}
    logits = 3 * torch.randn(rows, tokens, generator=generator)

    def each(low: float, high: float) -> Any:
        return low + (high - low) * torch.rand(rows, generator=generator)

    if case.values == "rows":
        given |= {
            "temperatures": each(0.0, 2.0),
            "top_ks": torch.randint(50, (rows,), generator=generator).to(torch.int32),
            "top_ps": each(0.5, 1.1),
            "min_ps": each(-0.1, 0.1),
            "seeds": torch.randint(2**62, (rows,), generator=generator),
            "offsets": torch.arange(rows),
        }
    elif case.values == "penalties":
        given |= {
            "repetition_penalties": each(1.0, 1.5),
            "presence_penalties": each(0.0, 1.0),
            "frequency_penalties": each(0.0, 0.5),
            "counts": torch.randint(3, (rows, tokens), generator=generator).to(torch.int32),
            "prompt": _words(rows, tokens, generator),
        }
    elif case.values == "masked":
        given["allowed"] = _words(rows, tokens, generator)
    elif case.values == "special":
        logits[0, 3], logits[1:2], logits[2:3, 7] = torch.nan, -torch.inf, torch.inf
    logits = logits.to(device=device, dtype=getattr(torch, case.dtype))
    if case.values == "strided":
        logits = torch.cat([logits, -logits], dim=1)[:, :tokens]
    given = {name: None if value is None else value.to(device) for name, value in given.items()}
    options = dict(case.options)
    options["indices_dtype"] = getattr(torch, options["indices_dtype"])
    return given | {"logits": logits} | options


# verify_draft

_VERIFY_OPTIONS = {scalar.name: scalar.default for scalar in VERIFY_DRAFT.scalars}


def _verify_case(
    sequences: int, count: int, tokens: int, dtype: str, values: str = "random", **options: Any
) -> Case:
    sizes = {"B": sequences, "S": count, "P": count + 1, "V": tokens}
    index = options.pop("index", "int32")
    return Case(sizes, index, _VERIFY_OPTIONS | options, f"{dtype} {values}")


# The dtype is that of the tokens. `values`: the dtype of the logits, and certain = no probabilities
# of the draft.
_VERIFY_CASES = (
    _verify_case(3, 4, 100, "float32"),
    _verify_case(5, 3, 1000, "bfloat16", "certain", top_k=9, index="int64"),
    _verify_case(4, 2, 264, "float16", "rows"),
    _verify_case(2, 1, 128256, "bfloat16", top_p=0.9, seed=7),
    _verify_case(7, 5, 33, "float32", "certain", temperature=0.0),
    _verify_case(0, 3, 64, "bfloat16"),
    _verify_case(6, 2, 264, "bfloat16", "strided", min_p=0.05),
)


def _make_verify(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    sequences, count, tokens = (case.sizes[name] for name in "BSV")
    dtype, values = case.values.split()
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(sequences, count + 1, tokens, generator=generator)
    noise = torch.randn(sequences, count, tokens, generator=generator)
    probs = torch.softmax(logits[:, :count] + noise, -1)
    draft = torch.zeros(sequences, count, dtype=torch.int64)
    if draft.numel():
        flat = torch.multinomial(probs.flatten(0, 1), 1, generator=generator)
        draft = flat.view(sequences, count)
    given: dict[str, Any] = {tensor.name: None for tensor in VERIFY_DRAFT.tensors}
    if values == "rows":
        given |= {
            "temperatures": 2 * torch.rand(sequences, generator=generator),
            "top_ks": torch.arange(sequences, dtype=torch.int32) * 5,
            "top_ps": 0.5 + torch.rand(sequences, generator=generator),
            "min_ps": 0.1 * torch.rand(sequences, generator=generator),
            "seeds": torch.arange(sequences),
            "offsets": torch.arange(sequences) * 100,
        }
    given["draft_tokens"] = draft.to(getattr(torch, case.dtype))
    given["draft_probs"] = None if values == "certain" else probs
    given = {name: None if value is None else value.to(device) for name, value in given.items()}
    logits = logits.to(device=device, dtype=getattr(torch, dtype))
    if values == "strided":
        logits = torch.cat([logits, -logits], dim=-1)[..., :tokens]
    return given | {"logits": logits} | dict(case.options)


CONTRACTS = (
    Contract.of(
        "sampling",
        SAMPLE,
        cases=_CASES,
        timing={
            "cpu": _case(8, 4096, "bfloat16", top_k=50),
            "cuda": _case(256, 128256, "bfloat16", top_k=50, top_p=0.9),
        },
        make=_make,
        reference="sample",
    ),
    Contract.of(
        "sampling",
        VERIFY_DRAFT,
        cases=_VERIFY_CASES,
        timing={
            "cpu": _verify_case(4, 3, 1024, "float32"),
            "cuda": _verify_case(64, 4, 128256, "bfloat16", top_p=0.9),
        },
        make=_make_verify,
    ),
)

# Names in tiercel.plugins.types.
ALIASES = {
    "Tokens": "sample.tokens",
    "DraftTokens": "verify_draft.draft_tokens",
    "PositionLogits": "verify_draft.logits",
    "DraftProbabilities": "verify_draft.draft_probs",
    "VerifiedTokens": "verify_draft.tokens",
    "NumAccepted": "verify_draft.accepted",
}
