# SPDX-License-Identifier: Apache-2.0
"""Medians, ratios, and how implementations take turns."""

import pytest

from tiercel.workbench.bench import stats, timing


def test_summary_is_over_all_samples():
    found = stats.summarize([[float(i) for i in range(1, 6)], [float(i) for i in range(6, 12)]])
    assert (found.median, found.p10, found.p90) == (6.0, 2.0, 10.0)
    assert stats.percentile([3.0], 0.9) == 3.0
    assert stats.percentile([1.0, 2.0], 0.25) == 1.25


def test_ratio_is_the_median_of_the_rounds_ratios():
    # The clock falls by half in round 3 for both: ratios see nothing of it. Ratios of the overall
    # medians or means would.
    ours = [[1.0], [1.0], [2.0], [2.0], [2.0]]
    peer = [[1.5], [1.5], [3.0], [3.0], [9.0]]
    assert stats.ratio(peer, ours) == 1.5
    with pytest.raises(ValueError, match="argument 2 is"):
        stats.ratio(peer[:3], ours)


def test_geometric_mean():
    assert stats.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert stats.geometric_mean([4.0, 1.0]) == pytest.approx(2.0)


def test_everyone_runs_once_a_round_and_the_first_one_changes():
    order = []
    samplers = {name: lambda name=name: order.append(name) or [1.0] for name in "abc"}
    taken, failed = stats.interleave(samplers, 4)
    assert "".join(order) == "abcbcacababc"
    assert {name: len(rounds) for name, rounds in taken.items()} == {"a": 4, "b": 4, "c": 4}
    assert failed == {}


def test_one_that_fails_half_way_does_not_stop_the_others():
    calls = []

    def breaks():
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("lost")
        return [1.0]

    taken, failed = stats.interleave({"a": lambda: [1.0], "b": breaks}, 5)
    assert list(taken) == ["a"] and len(taken["a"]) == 5
    assert str(failed["b"]) == "lost" and len(calls) == 2
    assert stats.interleave({}, 3) == ({}, {})


@pytest.mark.parametrize(
    ("ms", "sets", "launches"),
    [
        (0.002, 1, 250),  # half a millisecond of work
        (0.0001, 1, 400),  # not more
        (0.3, 1, 4),  # not fewer
        (1.5, 1, 2),  # but for what takes long
        (9.0, 1, 1),
        (1.0, 5, 5),  # whole turns through the inputs
        (0.002, 64, 256),
    ],
)
def test_launches_in_a_graph(ms, sets, launches):
    assert timing.launches_for(ms, sets) == launches


def test_host_time_is_per_call_and_leaves_garbage_collection_as_it_was():
    import gc

    class Clock(timing.CudaClock):
        def synchronize(self):
            pass

    now = iter([0.0, 0.8, 10.0, 11.2])
    calls = []
    gc_was = []
    clock = Clock(now=lambda: next(now))
    found = clock.host(lambda: (calls.append(1), gc_was.append(gc.isenabled())), 2)
    assert found == pytest.approx([2.0, 3.0])  # ms a call: 0.8 s and 1.2 s for 400 calls
    assert len(calls) == 800
    assert not any(gc_was) and gc.isenabled()
