# SPDX-License-Identifier: Apache-2.0
"""The cold build of all kernels stays within 8 CPU-minutes, as far as can be told without one.

kernels/budget.json has what tools/cuda/kernel_times.py measured, by family. What has been added
since is estimated: in proportion to a family's kernels, a new family's by the dearest other one's.
"""

import json
import os
import pathlib

import pytest

BUDGET = json.loads(pathlib.Path(os.environ["BUDGET"]).read_text())
LISTED = json.loads(pathlib.Path(os.environ["KERNELS"]).read_text())
AGAIN = "measure again: tools/cuda/kernel_times.py"
GROWTH = 1.5  # beyond it, an estimate is none


def counted(listed: dict) -> dict[str, int]:
    counts: dict[str, int] = {}
    for kernel in listed["kernels"]:
        counts[kernel["family"]] = counts.get(kernel["family"], 0) + 1
    return counts


def estimate(budget: dict, counts: dict[str, int]) -> dict[str, float]:
    """CPU seconds by family as it is now."""
    measured = budget["families"]
    each = {name: f["cpu_seconds"] / f["kernels"] for name, f in measured.items() if f["kernels"]}
    dearest = max(each.values(), default=0.0)
    return {name: count * each.get(name, dearest) for name, count in counts.items()}


def stale(budget: dict, counts: dict[str, int]) -> list[str]:
    """Families that were measured, and have become far more since."""
    return [
        f"{name}: {count} kernels, measured with {budget['families'][name]['kernels']}"
        for name, count in counts.items()
        if name in budget["families"]
        and count > max(GROWTH * budget["families"][name]["kernels"], 8)
    ]


def test_the_limit_is_eight_minutes() -> None:
    assert BUDGET["limit_cpu_seconds"] == 480


def test_all_kernels_are_within_the_limit() -> None:
    seconds = estimate(BUDGET, counted(LISTED))
    dear = ", ".join(f"{n} {s:.0f}" for n, s in sorted(seconds.items(), key=lambda item: -item[1]))
    limit = BUDGET["limit_cpu_seconds"]
    assert sum(seconds.values()) <= limit, (
        f"about {sum(seconds.values()):.0f} CPU s ({dear}). {AGAIN}"
    )


def test_what_was_measured_is_what_there_is() -> None:
    assert not stale(BUDGET, counted(LISTED)), AGAIN


def test_every_kernel_is_listed_with_its_size() -> None:
    assert LISTED["kernels"]
    assert all(k["bytes"] > 0 and 0 < k["registers"] <= 255 for k in LISTED["kernels"])


@pytest.fixture
def budget() -> dict:
    return {
        "families": {
            "a": {"kernels": 10, "cpu_seconds": 50.0},
            "b": {"kernels": 20, "cpu_seconds": 20.0},
        }
    }


def test_an_estimate(budget: dict) -> None:
    assert estimate(budget, {"a": 12, "b": 10, "new": 2}) == {"a": 60.0, "b": 10.0, "new": 10.0}
    assert estimate({"families": {}}, {"new": 2}) == {"new": 0.0}


def test_what_is_stale(budget: dict) -> None:
    assert stale(budget, {"a": 15, "b": 30, "new": 99}) == []
    assert stale(budget, {"a": 16, "b": 5}) == ["a: 16 kernels, measured with 10"]
