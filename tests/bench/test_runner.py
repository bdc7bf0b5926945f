# SPDX-License-Identifier: Apache-2.0
"""Correct first, then timed, in turn."""

import dataclasses
import subprocess
import sys

import pytest

from tiercel.workbench.bench.launch import Unsupported, WrongResult, in_place
from tiercel.workbench.bench.ops import Error
from tiercel.workbench.bench.runner import Settings, input_sets, run_case

SETTINGS = Settings(warmup=2, iterations=3, rounds=5)


def by_name(results, timing="graph"):
    return {r.impl.name: r for r in results if r.timing in (timing, "")}


def test_times_and_ratios(toy, toy_case, impl, fake_clock):
    clock = fake_clock({"tiercel": 2.0, "peer": 3.0})
    found = run_case(
        toy, toy_case, [impl("tiercel", ours=True), impl("peer")], clock, SETTINGS, "cpu"
    )
    rows = by_name(found)
    assert rows["tiercel"].summary.median == 2.0 and rows["tiercel"].ratio is None
    assert rows["peer"].ratio == 1.5
    assert [len(samples) for samples in rows["peer"].rounds] == [3] * 5
    # Warm-up before the samples of each round, the two taking turns at being first.
    assert (
        clock.sampled()[:8]
        == ["tiercel", "tiercel", "peer", "peer"] + ["peer"] * 2 + ["tiercel"] * 2
    )
    assert [entry[2] for entry in clock.log if entry[0] == "sample"][:2] == [2, 3]


def test_a_wrong_one_is_never_timed(toy, toy_case, impl, fake_clock):
    clock = fake_clock({"tiercel": 2.0, "fast and wrong": 0.1})
    impls = [impl("tiercel", ours=True), impl("fast and wrong", 2.5)]
    rows = by_name(run_case(toy, toy_case, impls, clock, SETTINGS, "cpu"))
    wrong = rows["fast and wrong"]
    assert (wrong.status, wrong.reason) == ("wrong", "2.0 off")
    assert wrong.rounds == [] and wrong.ratio is None
    assert "fast and wrong" not in {entry[1] for entry in clock.log}
    assert rows["tiercel"].status == "ok"


def test_a_part_is_checked_as_what_it_is(toy, toy_case, impl, fake_clock):
    """By its own check, once called and once from its graph, and wrong by that alone."""
    seen = []

    def halves(outputs):
        seen.append(outputs[0].tolist())
        if seen[-1] != [3.0, 6.0, 9.0, 12.0]:
            raise WrongResult("not three times")
        return Error(rms=0.0, maximum=0.0)

    clock = fake_clock({"tiercel": 2.0, "part": 1.0, "twice": 1.0})
    impls = [
        impl("tiercel", ours=True),
        impl("part", 3.0, check=halves, exact=False),
        impl("twice", 2.0, check=halves, exact=False),
    ]
    rows = by_name(run_case(toy, toy_case, impls, clock, SETTINGS, "cpu"))
    assert rows["part"].status == "ok" and rows["part"].ratio == 0.5
    assert len(seen) == 3  # the last of them the other's
    assert (rows["twice"].status, rows["twice"].reason) == ("wrong", "not three times")


def test_a_graph_that_does_nothing_is_wrong(toy, toy_case, impl, fake_clock):
    clock = fake_clock({"tiercel": 2.0})
    clock.dead_graphs.add("tiercel")
    rows = by_name(run_case(toy, toy_case, [impl("tiercel", ours=True)], clock, SETTINGS, "cpu"))
    assert rows["tiercel"].status == "wrong"
    assert clock.sampled() == []


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (Unsupported("odd sizes only"), "unsupported", "odd sizes only"),
        (RuntimeError("no kernel\nlong trace"), "error", "RuntimeError: no kernel"),
        (ValueError(), "error", "ValueError"),
    ],
)
def test_one_that_raises_does_not_stop_the_others(
    toy, toy_case, impl, fake_clock, error, status, reason
):
    clock = fake_clock({"tiercel": 2.0})
    impls = [impl("peer", error=error), impl("tiercel", ours=True)]
    found = run_case(toy, toy_case, impls, clock, SETTINGS, "cpu")
    assert [(r.impl.name, r.status) for r in found] == [("peer", status), ("tiercel", "ok")]
    assert found[0].reason == reason


def test_one_that_fails_while_timed_has_no_time(toy, toy_case, impl, fake_clock):
    clock = fake_clock({"tiercel": 2.0, "peer": [3.0] * 7 + [RuntimeError("lost")]})
    impls = [impl("tiercel", ours=True), impl("peer")]
    rows = by_name(run_case(toy, toy_case, impls, clock, SETTINGS, "cpu"))
    assert (rows["peer"].status, rows["peer"].reason) == ("error", "RuntimeError: lost")
    assert rows["tiercel"].status == "ok"


def test_without_ours_there_is_no_ratio(toy, toy_case, impl, fake_clock):
    clock = fake_clock({"peer": 3.0})
    impls = [impl("tiercel", 3.0, ours=True), impl("peer")]
    rows = by_name(run_case(toy, toy_case, impls, clock, SETTINGS, "cpu"))
    assert rows["tiercel"].status == "wrong" and rows["peer"].ratio is None


def test_inputs_go_round_past_the_cache_unless_hot(toy, toy_case, impl, fake_clock):
    cold = dataclasses.replace(toy, hot=False, bytes_moved=lambda case: 10_000_000)
    seeds = []
    cold = dataclasses.replace(
        cold, make=lambda case, device, seed: seeds.append(seed) or toy.make(case, device, seed)
    )
    clock = fake_clock({"tiercel": 2.0})
    found = run_case(cold, toy_case, [impl("tiercel", ours=True)], clock, SETTINGS, "cpu")
    assert seeds == list(range(12))  # 120 MB: twice the cache
    assert ("prepare", "tiercel", 12) in clock.log
    assert found[0].sets == 12
    assert input_sets(toy, toy_case) == 1
    for moved, sets in ((200 * 10**6, 2), (2 * 10**9, 1)):
        large = dataclasses.replace(cold, bytes_moved=lambda case, moved=moved: moved)
        assert input_sets(large, toy_case) == sets


@pytest.mark.parametrize(("ms", "samples", "warmup"), [(0.5, 20, 3), (10.0, 6, 2), (50.0, 3, 1)])
def test_a_slow_operator_is_sampled_less(toy, toy_case, impl, fake_clock, ms, samples, warmup):
    clock = fake_clock({"tiercel": ms})
    found = run_case(toy, toy_case, [impl("tiercel", ours=True)], clock, Settings(), "cpu")
    assert [len(r) for r in found[0].rounds] == [samples] * 5
    taken = [entry[2] for entry in clock.log if entry[0] == "sample"]
    assert taken == [1] + [warmup, samples] * 5


def test_host_time_beside_the_baseline(toy, toy_case, impl, fake_clock):
    def named(name):
        def call():
            return None

        call.host_name = name
        return call

    bench = dataclasses.replace(
        toy, host_baselines={"torch.double": lambda case, inputs: named("torch.double")}
    )
    case = dataclasses.replace(toy_case, host=True)
    clock = fake_clock({"tiercel": 2.0}, host={"ours": 0.004, "torch.double": 0.010})
    impls = [impl("tiercel", ours=True, host=named("ours")), impl("bad", 5.0)]
    found = run_case(bench, case, impls, clock, SETTINGS, "cpu")
    rows = by_name([r for r in found if r.timing == "host"], "host")
    assert set(rows) == {"tiercel", "torch.double"}
    assert rows["tiercel"].summary.median == 0.004
    assert rows["torch.double"].ratio == pytest.approx(2.5)


def test_a_gradient_may_be_the_first_operator_that_is_asked_for():
    code = (
        "from tiercel.workbench.bench import ours\n"
        "from tiercel.ops.norm.cases import BENCHES\n"
        "(bench,) = (b for b in BENCHES if b.op == 'rms_norm_backward')\n"
        "ours.impls(bench, ['ref'])\n"
        "import torch\n"
        "assert torch.ops.tiercel.rms_norm_backward\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.torch
def test_a_replay_of_calls_in_place():
    """Its results are those of the same calls, one by one; the first is the reference's."""
    import torch

    state, out = torch.zeros(1), torch.zeros(1)

    def run():
        out.copy_(state.add_(1))
        return (out,)

    def check(outputs):
        assert outputs[0] == 1
        return Error(0.0, 0.0)

    launch = in_place(run, state.zero_, check)
    launch.reset()
    for _ in range(7):
        launch.run()
    assert launch.check((out,)) == Error(0.0, 0.0)
    out.fill_(0.5)
    with pytest.raises(WrongResult, match="not those of the same calls"):
        launch.check((out,))
