# SPDX-License-Identifier: Apache-2.0
"""verify_draft: chains of draft tokens, of a draft near the target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.workbench.bench.launch import Launch, WrongResult
from tiercel.workbench.bench.ops import Error, Inputs, OpBench

_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
OPTIONS = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
}


def _invalid(params: Mapping[str, Any]) -> str | None:
    if not all(isinstance(params[name], int) and params[name] > 0 for name in "BSV"):
        return "B, S and V must be positive whole numbers"
    if not (isinstance(params["branches"], int) and params["branches"] >= 0):
        return "`branches` must be a whole number"
    if params["filter"] not in OPTIONS:
        return f"`filter` must be one of {', '.join(OPTIONS)}"
    return None


def _make(case: Any, device: str, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    sequences, count, tokens = (case[name] for name in "BSV")
    shape = (sequences, count + 1, tokens)
    logits = 3 * torch.randn(shape, device=device, generator=generator)
    noise = torch.randn(sequences, count, tokens, device=device, generator=generator)
    of_parents = logits[:, :count]
    parents = None
    if case["branches"]:
        node = torch.arange(count, device=device)
        parents = torch.div(node, case["branches"], rounding_mode="floor") - 1
        of_parents = logits[:, parents + 1]
        parents = parents.int().expand(sequences, -1).contiguous()
    probs = torch.softmax(of_parents + 0.5 * noise, -1)
    draft = torch.multinomial(probs.flatten(0, 1), 1, generator=generator).view(sequences, count)
    return {
        "draft_tokens": draft.int(),
        "logits": logits.to(getattr(torch, case.dtype)),
        "draft_probs": None if case["certain"] else probs,
        "parents": parents,
    }


def _call(case: Any, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    *tensors, parents = inputs.values()
    return tuple(tensors), OPTIONS[case["filter"]] | {"parents": parents}


def _bytes(case: Any) -> int:
    """All logits, and a row of probabilities and of logits again where a token is replaced."""
    rows, row = case["B"] * (case["S"] + 1), case["V"] * _ELEMENT[case.dtype]
    again = 0 if case["certain"] else case["B"] * (row + 4 * case["V"])
    return int(rows * row + again)


def _reference(case: Any, inputs: Inputs) -> Any:
    """The tokens that the target may give at each position; greedy: the largest."""
    import torch

    from tiercel.ops.sampling.reference import kept_weights

    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    options |= OPTIONS[case["filter"]]
    allowed = []
    for part in inputs["logits"].float().flatten(0, 1).split(64):
        if case["filter"] == "greedy":
            allowed.append(part == part.amax(-1, keepdim=True))
            continue
        each = {n: part.new_full((len(part),), value) for n, value in options.items()}
        allowed.append(kept_weights(part, **each) > 0)
    return torch.cat(allowed).view(inputs["logits"].shape)


def _check(inputs: Inputs, expected: Any, outputs: Any, launch: Launch) -> Error:
    """Accepted tokens are the draft's, and all are tokens that the target may give. `slack` is the
    share that may err."""
    import torch

    tokens, accepted, *path = (x.long() for x in outputs)
    draft = inputs["draft_tokens"].long()
    if path:  # the draft along it, and the rows of the nodes and the root
        draft = draft.gather(1, path[0].clamp(min=0))
        row = torch.cat([torch.zeros_like(path[0][:, :1]), path[0] + 1], 1)
        expected = expected.gather(1, row[..., None].expand(-1, -1, expected.shape[2]))
    sequences, count = draft.shape
    if tokens.shape != (sequences, count + 1) or accepted.shape != (sequences,):
        raise WrongResult(f"shapes {tuple(tokens.shape)}, {tuple(accepted.shape)}")
    place = torch.arange(count + 1, device=tokens.device)
    taken = place[:count] < accepted[:, None]
    if not bool(((accepted >= 0) & (accepted <= count)).all()):
        raise WrongResult("that many were not drafted")
    if not torch.equal(tokens[:, :count][taken], draft[taken]):
        raise WrongResult("an accepted token is not the draft's")
    used = place <= accepted[:, None]
    given = tokens.clamp(0, expected.shape[2] - 1)
    possible = expected.gather(-1, given[..., None])[..., 0] & (tokens >= 0)
    differing = int((used & ~possible).sum())
    if differing > launch.slack * int(used.sum()):
        raise WrongResult(f"{differing} tokens cannot be drawn")
    return Error(rms=0.0, maximum=0.0, differing=differing)


BENCHES = [
    OpBench(
        family="sampling",
        op="verify_draft",
        params={
            "B": None,
            "S": None,
            "V": None,
            "filter": "plain",
            "certain": False,
            "branches": 0,
        },
        invalid=_invalid,
        make=_make,
        call=_call,
        out=lambda case, inputs: None,
        bytes_moved=_bytes,
        reference=_reference,
        check=_check,
    )
]
