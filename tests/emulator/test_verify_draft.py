# SPDX-License-Identifier: Apache-2.0
"""verify_draft's kernels, run by the emulator, against float64 with the same random numbers."""

import pytest
import torch
from support.emulator import kernels
from support.near import BF16, F32, FLOATS

from tiercel.ops.sampling import reference as ref
from tiercel.ops.sampling.spec import VERIFY_DRAFT

PARAMETERS = ("temperatures", "top_ks", "top_ps", "min_ps", "seeds", "offsets")
NUMBERS = {scalar.name: scalar.default for scalar in VERIFY_DRAFT.scalars}
FILTERS = [
    {"temperature": 0.0},
    {"temperature": 1.5},
    {"min_p": 0.1},
    {"top_k": 5},
    {"top_p": 0.9},
    {"top_k": 300, "top_p": 0.7, "temperature": 0.8},
]


def run(draft, logits, probs=None, **given):
    sequences, positions = logits.shape[:2]
    tokens = torch.full((sequences, positions), -7, dtype=draft.dtype)
    accepted = torch.full((sequences,), -7, dtype=torch.int32)
    size = kernels.verify_draft_workspace(sequences * positions)
    workspace = torch.empty(size, dtype=torch.int64)
    tensors = (draft, logits, probs, *map(given.get, PARAMETERS), tokens, accepted, workspace)
    numbers = (given.get(name, n) for name, n in NUMBERS.items())
    kernels.verify_draft(*tensors, *numbers, None, None)
    return tokens, accepted


def check(draft, logits, probs=None, **given):
    tokens, accepted = run(draft, logits, probs, **given)
    due, number = ref.verify_draft(draft, logits, probs, **given)
    assert torch.equal(accepted, number)
    assert torch.equal(tokens, due)
    return tokens, accepted


def problem(sequences, count, columns, dtype=F32, seed=0, index=torch.int32, near=0.7):
    """A draft drawn from probabilities near the target's."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(sequences, count + 1, columns, generator=generator)
    other = logits[:, :count] + near * torch.randn(sequences, count, columns, generator=generator)
    probs = torch.softmax(other, -1)
    draft = torch.multinomial(probs.flatten(0, 1), 1, generator=generator)
    return draft.view(sequences, count).to(index), logits.to(dtype), probs


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [7, 1000, 3001])
def test_against_the_reference(columns, dtype):
    draft, logits, probs = problem(6, 3, columns, dtype)
    for seed, given in enumerate(FILTERS):
        check(draft, logits, probs, seed=seed, offset=2**33, **given)
        check(draft, logits, None, seed=seed, **given)


def test_parameters_of_sequences():
    draft, logits, probs = problem(5, 4, 500, BF16, 1, torch.int64)
    given = {
        "temperatures": torch.tensor([0.0, 0.5, 1.0, 2.0, 1.0]),
        "top_ks": torch.tensor([0, 0, 20, 3, 0], dtype=torch.int32),
        "top_ps": torch.tensor([1.0, 0.8, 1.0, 0.9, 1.0]),
        "min_ps": torch.tensor([0.0, 0.0, 0.02, 0.0, 0.0]),
        "seeds": torch.tensor([3, 3, 3, -5, 2**62]),
        "offsets": torch.tensor([0, 0, 7, 9, 2**40]),
    }
    for q in (probs, None):
        tokens, _ = check(draft, logits, q, **given)
        assert tokens.dtype == torch.int64


def test_a_certain_draft_gives_what_sampling_gives():
    """Position by position, with the same seeds and offsets."""
    _, logits, _ = problem(4, 5, 300, F32, 2)
    seeds = torch.arange(4) + 11
    given = {"temperature": 0.9, "top_p": 0.95}
    due = torch.stack(
        [ref.sample(logits[:, i], seeds=seeds, offset=100 + i, **given) for i in range(6)],
        1,
    )
    for wrong in range(6):
        draft = due[:, :5].clone()
        if wrong < 5:
            draft[1, wrong] = (due[1, wrong] + 1) % 300
        tokens, accepted = check(draft, logits, seeds=seeds, offset=100, **given)
        assert accepted.tolist() == [5, wrong, 5, 5]
        assert torch.equal(tokens[0], due[0])
        assert torch.equal(tokens[1, : wrong + 1], due[1, : wrong + 1])
        assert (tokens[1, wrong + 1 :] == -1).all()


def test_drafts_that_the_target_forbids():
    draft, logits, probs = problem(3, 2, 40)
    draft[0, 0], draft[1, 1] = -1, 40
    logits[2, 0, draft[2, 0]] = -torch.inf
    for q in (probs, None):
        _, accepted = check(draft, logits, q)
        assert accepted[0] == 0 and accepted[2] == 0 and accepted[1] <= 1


def test_special_rows():
    draft, logits, probs = problem(4, 2, 40)
    logits[0, 0, 3] = torch.nan
    logits[1, 1] = -torch.inf
    logits[2, 2, 5] = torch.inf
    for q in (probs, None):
        tokens, accepted = check(draft, logits, q)
        assert accepted[0] == 0 and tokens[0].tolist() == [-1, -1, -1]


def test_no_draft_and_no_sequence():
    draft, logits, _ = problem(3, 0, 40)
    tokens, accepted = check(draft, logits)
    assert accepted.tolist() == [0, 0, 0] and tokens.shape == (3, 1)
    tokens, accepted = run(draft[:0], logits[:0])
    assert tokens.shape == (0, 1)


def test_long_rows_in_clusters():
    draft, logits, probs = problem(1, 2, 50_000, BF16, 3)
    for given in FILTERS:
        check(draft, logits, probs, seed=4, **given)
