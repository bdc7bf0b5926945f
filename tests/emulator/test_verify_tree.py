# SPDX-License-Identifier: Apache-2.0
"""verify_draft of trees, by kernels that the emulator runs, against float64."""

import pytest
import torch
from support.emulator import kernels
from support.index_fuzz import CASES, Draw, embedded, margins_kept
from support.near import BF16, F32, FLOATS

from tiercel.ops.sampling import reference as ref
from tiercel.ops.sampling.spec import VERIFY_DRAFT

PARAMETERS = ("temperatures", "top_ks", "top_ps", "min_ps", "seeds", "offsets")
NUMBERS = {scalar.name: scalar.default for scalar in VERIFY_DRAFT.scalars}


def run(draft, logits, parents=None, probs=None, **given):
    sequences, positions = logits.shape[:2]
    tokens = torch.full((sequences, positions), -7, dtype=draft.dtype)
    accepted = torch.full((sequences,), -7, dtype=torch.int32)
    path = None if parents is None else torch.full_like(parents, -7)
    size = kernels.verify_draft_workspace(sequences * positions)
    workspace = torch.empty(size, dtype=torch.int64)
    results = [x if x is None else embedded(x) for x in (tokens, accepted, path)]
    tensors = (draft, logits, probs, *map(given.get, PARAMETERS), *results[:2], workspace)
    numbers = (given.get(name, n) for name, n in NUMBERS.items())
    kernels.verify_draft(*tensors, *numbers, parents, results[2])
    return tuple(results)


def check(draft, logits, parents, probs=None, **given):
    got = run(draft, logits, parents, probs, **given)
    due = ref.verify_tree(draft, logits, parents, probs, **given)
    for one, exact in zip(got, due, strict=True):
        assert torch.equal(one, exact)
    return got


def problem(sequences, nodes, columns, dtype=F32, seed=0, index=torch.int32):
    """Random trees with drafts near the target's, so that there are all kinds of paths."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(sequences, nodes + 1, columns, generator=generator)
    most = torch.arange(nodes) + 1
    parents = (torch.rand(sequences, nodes, generator=generator) * most / 2).int() - 1
    rows = (parents.long() + 1)[..., None].expand(-1, -1, columns)
    noise = 0.5 * torch.randn(sequences, nodes, columns, generator=generator)
    probs = torch.softmax(logits.gather(1, rows) + noise, -1)
    draft = torch.multinomial(probs.flatten(0, 1), 1, generator=generator)
    return draft.view(sequences, nodes).to(index), logits.to(dtype), parents, probs


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("nodes", "columns"), [(1, 7), (6, 100), (20, 1500), (64, 40)])
def test_against_the_reference(nodes, columns, dtype):
    draft, logits, parents, probs = problem(6, nodes, columns, dtype)
    for seed, given in enumerate(({"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.9})):
        check(draft, logits, parents, probs, seed=seed, offset=2**33, **given)
        check(draft.long(), logits, parents, None, seed=seed, **given)


def test_many_rejections():
    """Children that the target does not want, then one that it does."""
    draft, logits, parents, probs = problem(12, 8, 30, seed=3)
    parents[:] = -1
    probs = torch.full_like(probs, 1e-3)
    probs.scatter_(2, draft.long()[..., None], 0.97)
    seeds = torch.arange(12)
    _, accepted, path = check(draft, logits, parents, probs, seeds=seeds)
    assert (accepted == 0).any() and (path[:, 0] > 1).any()
    # Nothing is left of the target where the draft is the target.
    probs = torch.softmax(logits[:, :1].double(), -1).float().expand(-1, 8, -1).contiguous()
    check(draft, logits, parents, probs, seeds=seeds)


def test_a_chain_has_the_bits_of_a_chain():
    draft, logits, _, probs = problem(9, 5, 900, BF16, 4)
    parents = torch.arange(-1, 4, dtype=torch.int32).expand(9, -1).contiguous()
    for q in (probs, None):
        got = run(draft, logits, parents, q, seed=5, top_p=0.95)
        due = run(draft, logits, None, q, seed=5, top_p=0.95)
        assert torch.equal(got[0], due[0]) and torch.equal(got[1], due[1])


def test_sequences_do_not_depend_on_the_batch():
    draft, logits, parents, probs = problem(9, 12, 300, BF16, 5)
    seeds = torch.arange(9) + 3
    many = run(draft, logits, parents, probs, seeds=seeds)
    for i in (0, 4, 8):
        of = slice(i, i + 1)
        alone = run(draft[of], logits[of], parents[of], probs[of], seeds=seeds[of])
        for one, rows in zip(alone, many, strict=True):
            assert torch.equal(one[0], rows[i])


def test_special_rows():
    draft, logits, parents, probs = problem(4, 4, 40)
    parents[:] = torch.tensor([-1, -1, 0, 1])
    logits[0, 0, 3] = torch.nan
    logits[1, 1:] = -torch.inf
    logits[2, 0, 5] = torch.inf
    for q in (probs, None):
        tokens, accepted, path = check(draft, logits, parents, q)
        assert accepted[0] == 0 and (tokens[0] == -1).all() and (path[0] == -1).all()


def test_limits_and_no_nodes():
    draft, logits, parents, _ = problem(3, 65, 9)
    with pytest.raises(NotImplementedError, match="trees of up to 64 nodes are supported, got 65"):
        run(draft, logits, parents)
    tokens, accepted, _ = run(draft[:, :0].contiguous(), logits[:, :1], parents[:, :0].contiguous())
    assert accepted.tolist() == [0, 0, 0] and tokens.shape == (3, 1)


@pytest.mark.parametrize("case", range(CASES))
def test_any_numbers(case):
    """Parents and tokens that are none: the reference's result, and no access outside."""
    draw = Draw(case)
    sequences, nodes, columns = draw.of(1, 5), draw.of(1, 7, 20), draw.of(3, 40)
    wide = draw.of(False, True)
    draft, logits, parents, probs = problem(sequences, nodes, columns, draw.of(F32, BF16), case)
    draft = draw.strays(draft, columns, wide)
    parents = draw.strays(parents, nodes, wide=False)
    given = [embedded(x) for x in (draft, logits, parents)]
    q = draw.of(None, embedded(probs))
    with margins_kept():
        check(*given, q, seed=case)
