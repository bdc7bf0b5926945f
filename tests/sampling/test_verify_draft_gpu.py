# SPDX-License-Identifier: Apache-2.0
"""verify_draft on an H100 or H200, against float64 with the same random numbers."""

import pytest
import torch
from support.draft import assert_lossless, assert_tree_lossless

import tiercel
from tiercel import ref

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FILTERS = [
    {"temperature": 0.0},
    {"temperature": 1.5},
    {"min_p": 0.1},
    {"top_k": 50},
    {"top_p": 0.9},
    {"top_k": 300, "top_p": 0.7, "temperature": 0.8},
]


def problem(sequences, count, columns, dtype=torch.float32, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(positions):
        return torch.randn(sequences, positions, columns, device="cuda", generator=generator)

    logits = 3 * normal(count + 1)
    probs = torch.softmax(logits[:, :count] + 0.7 * normal(count), -1)
    draft = torch.multinomial(probs.flatten(0, 1), 1, generator=generator)
    return draft.view(sequences, count), logits.to(dtype), probs


def check(draft, logits, probs=None, strays=0, **given):
    """Few sequences may differ: where a random number is within a rounding of a bound."""
    tokens, accepted = tiercel.verify_draft(draft, logits, probs, **given)
    due, number = ref.verify_draft(draft, logits, probs, **given)
    differ = (tokens != due).any(-1) | (accepted != number)
    assert int(differ.sum()) <= strays, (tokens[differ], due[differ])
    return tokens, accepted


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [7, 1000, 5003])
def test_against_the_reference(columns, dtype):
    draft, logits, probs = problem(9, 3, columns, dtype)
    for seed, given in enumerate(FILTERS):
        check(draft, logits, probs, seed=seed, **given)
        check(draft.int(), logits, None, seed=seed, **given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sequences", "columns"), [(1, 128_256), (40, 32_000), (64, 151_936)])
def test_vocabularies(sequences, columns, dtype):
    draft, logits, probs = problem(sequences, 4, columns, dtype)
    for seed, given in enumerate(FILTERS):
        check(draft, logits, probs, strays=1, seed=seed, **given)
        check(draft, logits, None, strays=1, seed=seed, **given)


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "given",
    [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.1}]
    + [{"top_k": 6, "top_p": 0.8, "temperature": 1.3}],
)
def test_the_distribution_is_the_targets(given, dtype, certain):
    assert_lossless(200_000, certain=certain, device="cuda", dtype=dtype, **given)


def test_a_certain_draft_gives_what_sampling_gives():
    _, logits, _ = problem(30, 4, 32_000, torch.bfloat16)
    given = {"temperature": 0.8, "top_p": 0.9, "seed": torch.arange(30, device="cuda")}
    steps = [tiercel.sample(logits[:, i], offset=7 + i, **given) for i in range(5)]
    due = torch.stack(steps, 1)
    tokens, accepted = tiercel.verify_draft(due[:, :4].contiguous(), logits, offset=7, **given)
    assert torch.equal(tokens, due) and (accepted == 4).all()


@pytest.mark.sanitize
def test_special_rows_strides_and_sizes():
    draft, logits, probs = problem(4, 2, 300)
    logits[0, 0, 3] = torch.nan
    logits[1, 1] = -torch.inf
    logits[2, 2, 5] = torch.inf
    draft[3, 0] = 300
    for q in (probs, None):
        tokens, accepted = check(draft, logits, q)
        assert accepted[0] == 0 and tokens[0].tolist() == [-1, -1, -1]
        wide = torch.cat([logits, logits], -1)
        check(draft, wide[..., :300], q)
    check(draft[:, :0].contiguous(), logits[:, :1])
    tokens, _ = tiercel.verify_draft(draft[:0], logits[:0])
    assert tokens.shape == (0, 3)


def test_graph():
    draft, logits, probs = problem(8, 3, 32_000, torch.bfloat16)
    offset = torch.zeros(8, device="cuda", dtype=torch.int64)
    given = {"seed": torch.arange(8, device="cuda"), "offset": offset, "top_p": 0.9}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = tiercel.verify_draft(draft, logits, probs, **given)
    for _ in range(3):
        graph.replay()
        due = tiercel.verify_draft(draft, logits, probs, **given)
        assert all(map(torch.equal, results, due))
        offset += 4


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("given", [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}])
def test_the_distribution_of_trees_is_the_targets(given, replacement):
    for dtype in DTYPES:
        options = {"replacement": replacement, "device": "cuda", "dtype": dtype}
        assert_tree_lossless(100_000, **options, **given)
        assert_tree_lossless(100_000, certain=True, **options, **given)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [7, 5003])
def test_trees_against_the_reference(columns, dtype):
    """Any parents, those that are none too; the same in any company."""
    for nodes in (1, 13, 64):
        draft, logits, probs = problem(9, nodes, columns, dtype, nodes)
        parents = (
            torch.rand(9, nodes, device="cuda") * torch.arange(1, nodes + 1).cuda()
        ).int() - 1
        parents[0] = torch.arange(nodes) - 1
        parents[1, nodes // 2 :] = torch.tensor(2**31 - 1)
        seeds = torch.arange(9, device="cuda")
        for given in FILTERS[:3]:
            for q in (probs, None):
                options = {"seeds": seeds, "parents": parents, **given}
                got = tiercel.verify_draft(draft, logits, q, **options)
                due = tiercel.verify_draft(draft, logits, q, backend="ref", **options)
                assert all(map(torch.equal, got, due))
                chain = tiercel.verify_draft(draft, logits, q, seeds=seeds, **given)
                assert torch.equal(chain[0][0], got[0][0])
                options |= {"seeds": seeds[4:5], "parents": parents[4:5]}
                alone = tiercel.verify_draft(
                    draft[4:5], logits[4:5], None if q is None else q[4:5], **options
                )
                for one, all_ in zip(alone, got, strict=True):
                    assert torch.equal(one[0], all_[4])


def test_graph_of_trees():
    draft, logits, probs = problem(8, 6, 32_000, torch.bfloat16)
    parents = torch.tensor([[-1, -1, 0, 0, 1, 2]] * 8, dtype=torch.int32, device="cuda")
    offset = torch.zeros(8, device="cuda", dtype=torch.int64)
    given = {"seed": torch.arange(8, device="cuda"), "offset": offset, "parents": parents}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = tiercel.verify_draft(draft, logits, probs, **given)
    for _ in range(3):
        graph.replay()
        due = tiercel.verify_draft(draft, logits, probs, **given)
        assert all(map(torch.equal, results, due))
        offset += 7
