# SPDX-License-Identifier: Apache-2.0
"""topk_softmax's benchmark: what its check lets through, and the peers that run anywhere."""

import dataclasses
import sys

import pytest
import torch

import tiercel
from tiercel.workbench.bench import adapters, ops, ours, peers
from tiercel.workbench.bench.cases import Case
from tiercel.workbench.bench.launch import Launch, Unsupported, WrongResult

BENCH = ops.load()["topk_softmax"]


def case(weights="renorm", dtype="bfloat16", **sizes):
    params = {"T": 64, "E": 60, "k": 6} | sizes | {"weights": weights}
    return Case("routing", "topk_softmax", dtype, params)


def solved(problem=None):
    """The inputs, the reference, and a right answer that a test may spoil."""
    problem = problem or case()
    inputs = BENCH.make(problem, "cpu", 0)
    expected = BENCH.reference(problem, inputs)
    outputs = (expected["weights"].float().clone(), expected["indices"].int().clone())
    return inputs, expected, outputs


EXACT = Launch(run=tuple)
STRICT = Launch(run=tuple, strict=True)


@pytest.mark.parametrize("weights", ["all", "renorm", "after"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_torch_and_our_reference_agree_with_float64(weights, dtype):
    problem = case(weights, dtype)
    inputs = BENCH.make(problem, "cpu", 3)
    expected = BENCH.reference(problem, inputs)
    launches = [impl.prepare(problem, inputs) for impl in ours.impls(BENCH, ["ref"])]
    launches.append(adapters.load()["torch"]["topk_softmax"](problem, inputs))
    for launch in launches:
        error = BENCH.check(inputs, expected, launch.run(), launch)
        assert error.rms < 1e-6 and error.maximum < 1e-6 and error.differing == 0
    assert launches[0].strict


def test_ours_is_an_error_where_it_would_be_ref():
    problem = case()
    (impl,) = ours.impls(BENCH, ["sm90"])
    assert (impl.name, impl.ours) == ("tiercel", True)
    with pytest.raises(RuntimeError, match="'sm90' was asked for, but"):
        impl.prepare(problem, BENCH.make(problem, "cpu", 0))


def test_the_batch_invariant_mode_is_one_of_ours():
    seen = []

    def made(case, inputs, backend):
        seen.append((backend, tiercel.is_batch_invariant()))
        return Launch(lambda: (tiercel.is_batch_invariant(),), tiercel.is_batch_invariant)

    impls = ours.impls(dataclasses.replace(BENCH, ours=made), ["sm90", "invariant"])
    assert [impl.name for impl in impls] == ["tiercel", "tiercel:invariant"]
    plain, invariant = (impl.prepare(case(), {}) for impl in impls)
    assert seen == [("sm90", False), ("sm90", True)]
    assert (plain.run(), plain.host()) == ((False,), False)
    assert (invariant.run(), invariant.host()) == ((True,), True)


def test_the_same_seed_gives_the_same_scores_and_another_does_not():
    a, b, c = (BENCH.make(case(), "cpu", seed)["scores"] for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert a.dtype == torch.bfloat16


def test_bytes_moved():
    assert BENCH.bytes_moved(case(T=8192, E=128, k=8)) == 8192 * (128 * 2 + 8 * 8)
    assert BENCH.bytes_moved(case(T=2, E=128, k=8, dtype="float32")) == 2 * (128 * 4 + 8 * 8)


def spoil_index(weights, indices):
    indices[5, 0] = (indices[5].max() + 1) % 60 if indices[5].max() < 59 else indices[5].min() - 1


def spoil_order(weights, indices):
    indices[7] = indices[7].flip(0)


def spoil_repeat(weights, indices):
    indices[9, 1] = indices[9, 0]


def spoil_range(weights, indices):
    indices[0, 0] = 60


def spoil_weight(weights, indices):
    weights[3, 2] += 1e-4


def spoil_nan(weights, indices):
    weights[3, 2] = torch.nan


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (spoil_index, "selected"),
        (spoil_order, "off the one due"),
        (spoil_repeat, "selected twice"),
        (spoil_range, "out of range"),
        (spoil_weight, "a weight is 1.0e-04 off"),
        (spoil_nan, "not finite"),
    ],
)
def test_a_wrong_answer_is_caught(spoil, text):
    inputs, expected, outputs = solved(case(dtype="float32"))
    BENCH.check(inputs, expected, outputs, EXACT)
    spoil(*outputs)
    with pytest.raises(WrongResult, match=text):
        BENCH.check(inputs, expected, outputs, EXACT)


def test_another_shape_is_caught():
    inputs, expected, (weights, indices) = solved()
    with pytest.raises(WrongResult, match="shapes"):
        BENCH.check(inputs, expected, (weights[:, :5], indices[:, :5]), EXACT)


def test_ties_bind_us_but_not_others():
    problem = case(T=1, E=4, k=1)
    inputs = {"scores": torch.tensor([[1.0, 3.0, 3.0, 2.0]])}
    expected = BENCH.reference(problem, inputs)
    weights = expected["weights"].float()
    other = (weights, torch.tensor([[2]], dtype=torch.int32))
    assert BENCH.check(inputs, expected, other, EXACT).differing == 0
    with pytest.raises(WrongResult, match="1 of 1 rows have other indices"):
        BENCH.check(inputs, expected, other, STRICT)


def test_slack_admits_what_it_says_and_counts_it():
    problem = case(T=1, E=4, k=1, weights="all")
    inputs = {"scores": torch.tensor([[1.0, 3.0, 2.999, 2.0]])}
    expected = BENCH.reference(problem, inputs)
    other = (expected["weights"].float(), torch.tensor([[2]]))
    loose = dataclasses.replace(EXACT, slack=1e-3)
    assert BENCH.check(inputs, expected, other, loose).differing == 1
    with pytest.raises(WrongResult, match="off the one due"):
        BENCH.check(inputs, expected, other, dataclasses.replace(EXACT, slack=1e-4))


def test_quack_declines_what_it_cannot_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "quack", type(sys)("quack"))
    monkeypatch.setitem(sys.modules, "quack.topk", type(sys)("quack.topk"))
    prepare = adapters.load()["quack"]["topk_softmax"]
    inputs = BENCH.make(case(E=64, k=8), "cpu", 0)
    with pytest.raises(Unsupported, match="selected scores only"):
        prepare(case("all", E=64, k=8), inputs)
    for sizes in ({"E": 60, "k": 8}, {"E": 64, "k": 6}):
        with pytest.raises(Unsupported, match="powers of 2"):
            prepare(case(**sizes), inputs)
    assert prepare(case(E=64, k=8), inputs).exact
    inputs = BENCH.make(case(E=64, k=8, dtype="float32"), "cpu", 0)
    launch = prepare(case(E=64, k=8, dtype="float32"), inputs)
    assert not launch.exact and launch.slack == 2.0**-17


def test_a_slow_peer_comes_only_where_it_is_asked_for():
    every = list(peers.load().values())
    versions = {"torch": "2", "torch.compile": "2"}
    plain, listing = case(), dataclasses.replace(case(), peers=frozenset(["torch.compile"]))

    def names(problem, by_name):
        return {impl.name for impl in peers.impls(every, versions, problem, by_name)}

    assert names(plain, False) == {"torch"}
    assert names(listing, False) == names(plain, True) == {"torch", "torch.compile"}
