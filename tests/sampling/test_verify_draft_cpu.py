# SPDX-License-Identifier: Apache-2.0
"""verify_draft with PyTorch and without a GPU: reference, definitions, public function."""

import pytest
import torch
from support.draft import assert_lossless, assert_tree_lossless

import tiercel
from tiercel.core.dispatch import variants

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("given", [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.7}])
def test_the_distribution_is_the_targets(given, certain):
    assert_lossless(20_000, certain=certain, **given)


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("given", [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}])
def test_the_distribution_of_trees_is_the_targets(given, replacement):
    assert_tree_lossless(20_000, replacement=replacement, **given)
    assert_tree_lossless(20_000, certain=True, replacement=replacement, **given)


def test_trees():
    logits = torch.eye(6)[[1, 3, 2, 5, 4]].repeat(4, 1, 1)  # greedy tokens behind root and nodes
    draft = torch.tensor([[0, 1, 2, 3]] * 3 + [[1, 3, 3, 5]], dtype=torch.int32)
    parents = torch.tensor([[-1, -1, 1, 0], [-1, 0, 0, 1], [-1, -1, 3, 1], [-1, 0, 1, -2]])
    tokens, accepted, path = tiercel.verify_draft(
        draft, logits, parents=parents.int(), temperature=0.0
    )
    assert accepted.tolist() == [2, 0, 1, 2] and path.dtype == torch.int32
    assert tokens.tolist() == [
        [1, 2, 5, -1, -1],
        [1] + [-1] * 4,
        [1, 2] + [-1] * 3,
        [1, 3, 2, -1, -1],
    ]
    assert path.tolist() == [[1, 2, -1, -1], [-1] * 4, [1, -1, -1, -1], [0, 1, -1, -1]]
    out = torch.empty_like(tokens), torch.empty_like(accepted), torch.empty_like(path)
    options = {"parents": parents.int(), "temperature": 0.0, "out": out}
    assert tiercel.verify_draft(draft, logits, **options)[2] is out[2]
    assert torch.equal(out[0], tokens)


def test_a_chain_as_a_tree():
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(40, 4, 12, generator=generator)
    probs = torch.softmax(logits[:, :3] + torch.randn(40, 3, 12, generator=generator), -1)
    draft = torch.multinomial(probs.flatten(0, 1), 1, generator=generator).view(40, 3)
    parents = torch.arange(-1, 2, dtype=torch.int32).expand(40, -1).contiguous()
    for q in (probs, None):
        chain = tiercel.verify_draft(draft, logits, q, seed=3, top_p=0.9)
        tree = tiercel.verify_draft(draft, logits, q, seed=3, top_p=0.9, parents=parents)
        assert all(map(torch.equal, chain, tree))
        due = torch.where(torch.arange(3) < chain[1][:, None], torch.arange(3), -1)
        assert torch.equal(tree[2].long(), due)


def test_wrong_parents_are_named():
    """TIERCEL_CHECK=1."""
    (operator,) = (one for one in variants["verify_draft"] if one.name == "verify_tree")
    draft, logits = torch.zeros(2, 3, dtype=torch.int32), torch.randn(2, 4, 8)
    numbers = (*[None] * 7, 1.0, 0, 1.0, 0.0, 0, 0, None)
    right = torch.tensor([[-1, 0, 1], [-1, -1, 0]], dtype=torch.int32)
    operator.check_indices((draft, logits, right, *numbers))
    for place, value in (((0, 1), 1), ((1, 2), -2), ((1, 0), 0)):
        wrong = right.clone()
        wrong[place] = value
        with pytest.raises(ValueError) as error:
            operator.check_indices((draft, logits, wrong, *numbers))
        text = f"hold -1 or the number of an earlier node, got {value} at {list(place)}"
        assert str(error.value) == f"verify_draft: `parents` must {text}"


def test_greedy():
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, 0.0, 2.0], [5.0, 1.0, 0.0]]).repeat(3, 1, 1)
    draft = torch.tensor([[1, 2], [1, 0], [2, 2]])
    for probs in (None, torch.full((3, 2, 3), 1 / 3)):
        tokens, accepted = tiercel.verify_draft(draft, logits, probs, temperature=0.0)
        assert tokens.tolist() == [[1, 2, 0], [1, 2, -1], [1, -1, -1]]
        assert accepted.tolist() == [2, 1, 0]
        assert tokens.dtype == torch.int64 and accepted.dtype == torch.int32


def test_a_certain_draft_gives_what_sampling_gives():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(50, 4, 12, generator=generator)
    seeds = torch.arange(50)
    given = {"temperature": 0.8, "top_p": 0.9, "seed": seeds}
    steps = [tiercel.sample(logits[:, i], offset=7 + i, **given) for i in range(4)]
    due = torch.stack(steps, 1)
    tokens, accepted = tiercel.verify_draft(due[:, :3].contiguous(), logits, offset=7, **given)
    assert torch.equal(tokens, due) and (accepted == 3).all()
    draft = torch.randint(12, (50, 3), generator=generator, dtype=torch.int32)
    tokens, accepted = tiercel.verify_draft(draft, logits, offset=7, **given)
    used = torch.arange(4) <= accepted[:, None]
    assert torch.equal(tokens[used], due[used]) and (tokens[~used] == -1).all()


def test_a_draft_from_the_target_itself_is_accepted():
    logits = torch.randn(200, 3, 9)
    probs = torch.softmax(logits[:, :2].double(), -1)
    draft = torch.multinomial(probs.flatten(0, 1), 1).view(200, 2)
    _, accepted = tiercel.verify_draft(draft, logits, probs.float() * 0.999)
    assert (accepted == 2).all()


def test_numbers_and_tensors_are_the_same():
    logits, draft = torch.randn(6, 3, 20), torch.randint(20, (6, 2))
    given = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.01, "offset": 5}
    dtypes = {"top_k": torch.int32, "offset": torch.int64}
    tensors = {n: torch.full((6,), v, dtype=dtypes.get(n)) for n, v in given.items()}
    seeds = torch.arange(6)
    due = tiercel.verify_draft(draft, logits, seed=seeds, **given)
    got = tiercel.verify_draft(draft, logits, seed=seeds, **tensors)
    assert all(map(torch.equal, got, due))
    out = torch.empty_like(due[0]), torch.empty_like(due[1])
    assert tiercel.verify_draft(draft, logits, seed=seeds, out=out, **given)[0] is out[0]
    assert all(map(torch.equal, out, due))


def test_bad_arguments():
    draft, logits = torch.zeros(3, 2, dtype=torch.int32), torch.randn(3, 3, 8)
    with pytest.raises(ValueError, match=r"`logits` must have shape \[B, S \+ 1, V\]"):
        tiercel.verify_draft(draft, logits[:, :2])
    with pytest.raises(ValueError, match=r"`draft_probs` must have shape \[B, S, V\]"):
        tiercel.verify_draft(draft, logits, torch.zeros(3, 3, 8))
    with pytest.raises(TypeError, match="`draft_probs` must have dtype float32"):
        tiercel.verify_draft(draft, logits, torch.zeros(3, 2, 8).half())
    with pytest.raises(TypeError, match="`draft_tokens` must have dtype int32 or int64"):
        tiercel.verify_draft(draft.float(), logits)
    with pytest.raises(ValueError, match="`logits` must have at least 1 column, got 0"):
        tiercel.verify_draft(draft, logits[..., :0])
    with pytest.raises(ValueError, match=r"`parents` must have shape \[B, S\]"):
        tiercel.verify_draft(draft, logits, parents=draft[:, :1])
    with pytest.raises(TypeError, match="`parents` must have dtype int32"):
        tiercel.verify_draft(draft, logits, parents=draft.long())


def test_into_a_graph():
    def step(draft, logits, seeds):
        return tiercel.verify_draft(draft, logits, top_p=0.9, seed=seeds)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    arguments = (torch.randint(64, (5, 3)), torch.randn(5, 4, 64), torch.arange(5))
    assert all(map(torch.equal, compiled(*arguments), step(*arguments)))
