# SPDX-License-Identifier: Apache-2.0
"""verify_draft in PyTorch, as models' own code has it."""

from __future__ import annotations

from typing import Any

from tiercel.ops.sampling.cases_verify import OPTIONS
from tiercel.workbench.bench.launch import Launch, Unsupported

Inputs = dict[str, Any]


def _probabilities(logits: Any, options: dict[str, Any]) -> Any:
    import torch

    x = logits.float() / options.get("temperature", 1.0)
    if "top_k" in options:
        least = x.topk(options["top_k"], dim=-1).values[..., -1:]
        x = x.masked_fill(x < least, -torch.inf)
    p = x.softmax(-1)
    if "top_p" in options:
        ordered, order = p.sort(-1, descending=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= options["top_p"], 0.0)
        p = torch.zeros_like(p).scatter_(-1, order, ordered)
        p = p / p.sum(-1, keepdim=True)
    return p


def _torch(case: Any, inputs: Inputs) -> Launch:
    """Acceptance by random numbers, and torch.multinomial of what is left."""
    import torch

    draft, logits, probs, parents = inputs.values()
    if parents is not None:
        raise Unsupported("it is written for chains")
    sequences, count = draft.shape
    place = torch.arange(count + 1, device=draft.device)
    rows = torch.arange(sequences, device=draft.device)
    at = draft.long()[..., None]

    def run() -> tuple[Any, Any]:
        if case["filter"] == "greedy":
            largest = logits.argmax(-1)
            accepted = (largest[:, :count] == draft).int().cumprod(-1).sum(-1)
            new = largest[rows, accepted]
        else:
            p = _probabilities(logits, OPTIONS[case["filter"]])
            q = torch.zeros_like(p[:, :count]).scatter_(-1, at, 1.0) if probs is None else probs
            u = torch.rand(sequences, count, device=draft.device)
            taken = u * q.gather(-1, at)[..., 0] < p[:, :count].gather(-1, at)[..., 0]
            accepted = taken.int().cumprod(-1).sum(-1)
            rest = torch.cat([(p[:, :count] - q).clamp(min=0), p[:, count:]], 1)
            new = torch.multinomial(rest[rows, accepted], 1)[:, 0]
        padded = torch.nn.functional.pad(draft.long(), (0, 1))
        tokens = torch.where(place < accepted[:, None], padded, -1)
        return torch.where(place == accepted[:, None], new[:, None], tokens), accepted

    return Launch(run, slack=0.05)


ADAPTERS = {"torch": {"verify_draft": _torch}}
