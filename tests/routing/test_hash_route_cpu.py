# SPDX-License-Identifier: Apache-2.0
"""topk_softmax with experts of a table: definitions, gradients and errors, on the CPU."""

import math

import pytest
import torch

import tiercel
from tiercel.core.dispatch import variants

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]

SCORING = ["softmax", "sigmoid", "sqrtsoftplus"]


def problem(rows=9, experts=16, k=4, tokens=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(rows, experts, generator=generator)
    table = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :k].int()
    ids = torch.randint(tokens, (rows,), generator=generator)
    return scores, {"token_ids": ids, "expert_table": table.contiguous()}


def by_definition(row, experts, scoring, renormalize, scaling_factor):
    """One row of Python floats, as DeepSeek-V4's Gate has it."""
    if scoring == "softmax":
        total = sum(math.exp(x) for x in row)
        scores = [math.exp(x) / total for x in row]
    elif scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in row]
    else:
        scores = [math.sqrt(math.log1p(math.exp(x))) for x in row]
    weights = [scores[e] for e in experts]
    if renormalize:
        weights = [w / sum(weights) for w in weights]
    return [scaling_factor * w for w in weights]


@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize("renormalize", [False, True])
def test_definition(renormalize, scoring):
    scores, table = problem()
    options = {"scoring": scoring, "renormalize": renormalize, "scaling_factor": 1.5}
    weights, indices = tiercel.topk_softmax(scores, 4, **options, **table)
    assert torch.equal(indices, table["expert_table"][table["token_ids"]])
    due = [
        by_definition(row, experts, **options)
        for row, experts in zip(scores.tolist(), indices.tolist(), strict=True)
    ]
    torch.testing.assert_close(weights, torch.tensor(due), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scoring", SCORING)
def test_what_is_no_expert_has_no_weight_and_no_gradient(scoring):
    scores, table = problem()
    ids, experts = table["token_ids"], table["expert_table"]
    ids[0], ids[1] = -1, 20
    experts[ids[2]] = torch.tensor([3, -1, 3, 16], dtype=torch.int32)
    for renormalize in (False, True):
        x = scores.clone().requires_grad_()
        options = {"scoring": scoring, "renormalize": renormalize, "n_shared": 1}
        weights, indices = tiercel.topk_softmax(x, 4, **options, **table)
        assert indices[:2].tolist() == [[-1] * 4 + [16]] * 2
        assert indices[2].tolist() == [3, -1, 3, -1, 16]
        assert weights[:2].tolist() == [[0.0] * 4 + [1.0]] * 2
        assert weights[2, 1] == weights[2, 3] == 0
        if renormalize:
            torch.testing.assert_close(weights[2, :4], torch.tensor([0.5, 0.0, 0.5, 0.0]))
        (grad,) = torch.autograd.grad((weights * torch.randn_like(weights)).sum(), x)
        assert (grad[:2] == 0).all() and not grad.isnan().any()


@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize("renormalize", [False, True])
def test_gradients(scoring, renormalize):
    """An expert that a token has twice gets both gradients."""
    scores, table = problem()
    table["expert_table"][:, 3] = table["expert_table"][:, 1]
    table["expert_table"][table["token_ids"][4], 0] = -1
    pull = torch.randn(9, 5, generator=torch.Generator().manual_seed(3))
    options = {"scoring": scoring, "renormalize": renormalize, "scaling_factor": 2.5}
    options |= {"n_shared": 1, **table}
    double = scores.double().requires_grad_()
    due, _ = tiercel.ref.topk_softmax(double, 4, **options)
    (theirs,) = torch.autograd.grad((due * pull).sum(), double)
    single = scores.clone().requires_grad_()
    weights, _ = tiercel.topk_softmax(single, 4, **options)
    (ours,) = torch.autograd.grad((weights * pull).sum(), single)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-6)


def test_aligned_out_and_compile():
    scores, table = problem()
    table["token_ids"][3] = 99
    options = {"scoring": "sqrtsoftplus", "renormalize": True, "n_shared": 1, **table}
    weights, indices, *lists = tiercel.topk_softmax_align(scores, 4, 16, **options)
    due = tiercel.topk_softmax(scores, 4, **options)
    assert torch.equal(weights, due[0]) and torch.equal(indices, due[1])
    for one, other in zip(lists, tiercel.moe_align_block_size(indices, 16, 17), strict=True):
        assert torch.equal(one, other)
    out = tuple(torch.empty_like(x) for x in (weights, indices, *lists))
    assert tiercel.topk_softmax_align(scores, 4, 16, out=out, **options)[0] is out[0]
    assert tiercel.topk_softmax(scores, 4, out=out[:2], **options)[1] is out[1]
    for one, other in zip(out, (weights, indices, *lists), strict=True):
        assert torch.equal(one, other)
    compiled = torch.compile(
        lambda s, ids, experts: tiercel.topk_softmax(s, 4, token_ids=ids, expert_table=experts),
        backend="aot_eager",
        fullgraph=True,
    )
    assert torch.equal(compiled(scores, *table.values())[1][0], due[1][0, :4])


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"token_ids": None}, ValueError, "`token_ids` must be given where `expert_table` is"),
        ({"expert_table": None}, ValueError, "`expert_table` must be given where `token_ids` is"),
        ({"correction_bias": torch.zeros(16)}, ValueError, "`correction_bias` must be None with"),
        ({"n_group": 2}, ValueError, "`n_group` and `topk_group` must be 1 with `expert_table`"),
        ({"k": 3}, ValueError, r"`expert_table` must have shape \[tokens, k\]"),
        ({"token_ids": torch.zeros(8).int()}, ValueError, r"`token_ids` must have shape \[T\]"),
        ({"token_ids": torch.zeros(9)}, TypeError, "`token_ids` must have dtype int32 or int64"),
        ({"scoring": "sigmoid", "softmax_first": False}, ValueError, "`softmax_first` must be"),
    ],
)
def test_bad_arguments_are_named(changes, error, text):
    scores, table = problem()
    arguments = {"scores": scores, "k": 4} | table | changes
    with pytest.raises(error, match=f"topk_softmax: {text}"):
        tiercel.topk_softmax(**arguments)
    with pytest.raises(error, match=f"topk_softmax_align: {text}"):
        tiercel.topk_softmax_align(block_size=16, **arguments)


def test_wrong_tokens_and_experts_are_named():
    """TIERCEL_CHECK=1."""
    scores, table = problem()
    ids, experts = table.values()
    softmax = (True, False, torch.int32)
    forms = (("topk_softmax", "", ()), ("topk_softmax_align", "_align", (16, None)))
    for name, form, rest in forms:
        (operator,) = (one for one in variants[name] if one.name == f"hash_route{form}")
        last = (False, False) if rest else ()

        def look(ids, experts, operator=operator, rest=rest, last=last):
            first = (scores, ids, experts, 4, *rest, *softmax)
            operator.check_indices((*first, "sigmoid", 1.0, 0, *last, None))

        look(ids, experts)
        wrong = ids.clone()
        wrong[5] = 20
        with pytest.raises(ValueError, match=r"`token_ids` must .* from 0 to 19, got 20 at \[5\]"):
            look(wrong, experts)
        wrong = experts.clone()
        wrong[7, 2] = -1
        with pytest.raises(ValueError, match=r"`expert_table` must .* 0 to 15, got -1 at \[7, 2\]"):
            look(ids, wrong)
