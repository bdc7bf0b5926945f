# SPDX-License-Identifier: Apache-2.0
"""The cold build of all kernels stays within 10 CPU-minutes, as far as can be told without one.

kernels/budget.json has what tools/cuda/kernel_times.py measured, for every family. What a family
has got since is estimated: in proportion to its kernels or their code, whichever grew more.
"""

import json
import os
import pathlib

BUDGET = json.loads(pathlib.Path(os.environ["BUDGET"]).read_text())
LISTED = json.loads(pathlib.Path(os.environ["KERNELS"]).read_text())
AGAIN = "measure again: tools/cuda/kernel_times.py FAMILY"
GROWTH = 1.5  # beyond it, an estimate is none
FEW = {"kernels": 8, "code_bytes": 1 << 17}  # less than this is nothing to measure again for


def counted(listed: dict) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for kernel in listed["kernels"]:
        family = found.setdefault(kernel["family"], dict.fromkeys(FEW, 0))
        family["kernels"] += 1
        family["code_bytes"] += kernel["bytes"]
    return found


def estimate(measured: dict, counts: dict[str, dict[str, int]]) -> dict[str, float]:
    """CPU seconds by family as it is now."""
    return {
        family: measured[family]["cpu_seconds"]
        * max(count / measured[family][what] for what, count in counts[family].items())
        for family in counts
        if family in measured
    }


def stale(measured: dict, counts: dict[str, dict[str, int]]) -> list[str]:
    """Families that were never measured, or have become far more since, or are gone."""
    found = [
        f"{family} was never measured"
        for family, own in counts.items()
        if family not in measured and any(count > FEW[what] for what, count in own.items())
    ]
    found += [f"{family} is gone" for family in measured if family not in counts]
    for family in sorted(counts.keys() & measured.keys()):
        for what, count in counts[family].items():
            before = measured[family][what]
            if count > GROWTH * before and count - before > FEW[what]:
                found.append(f"{family}: {what} {count}, measured with {before}")
    return found


def test_the_limit_is_ten_minutes() -> None:
    assert BUDGET["limit_cpu_seconds"] == 600


def test_all_kernels_are_within_the_limit() -> None:
    seconds = estimate(BUDGET["families"], counted(LISTED))
    dear = ", ".join(f"{n} {s:.0f}" for n, s in sorted(seconds.items(), key=lambda item: -item[1]))
    limit = BUDGET["limit_cpu_seconds"]
    assert 0 < sum(seconds.values()) <= limit, (
        f"about {sum(seconds.values()):.0f} CPU s ({dear}). {AGAIN}"
    )


def test_what_was_measured_is_what_there_is() -> None:
    assert stale(BUDGET["families"], counted(LISTED)) == [], AGAIN
    assert all(family["cpu_seconds"] > 0 for family in BUDGET["families"].values())


def test_every_kernel_is_listed_with_its_size() -> None:
    assert LISTED["kernels"]
    assert all(k["bytes"] > 0 and 0 < k["registers"] <= 255 for k in LISTED["kernels"])


MEASURED = {
    "a": {"kernels": 10, "code_bytes": 1 << 20, "cpu_seconds": 50.0},
    "b": {"kernels": 20, "code_bytes": 1 << 20, "cpu_seconds": 20.0},
}


def now(kernels: int, code_bytes: int = 1 << 20) -> dict[str, int]:
    return {"kernels": kernels, "code_bytes": code_bytes}


def test_an_estimate() -> None:
    counts = {"a": now(12), "b": now(10, 1 << 21), "new": now(2)}
    assert estimate(MEASURED, counts) == {"a": 60.0, "b": 40.0}


def test_what_is_stale() -> None:
    assert stale(MEASURED, {"a": now(18), "b": now(30), "new": now(1, 1000)}) == []
    assert stale(MEASURED, {"a": now(19), "b": now(5, 1 << 21), "new": now(1)}) == [
        "new was never measured",
        "a: kernels 19, measured with 10",
        "b: code_bytes 2097152, measured with 1048576",
    ]
    assert stale(MEASURED, {"a": now(10)}) == ["b is gone"]
