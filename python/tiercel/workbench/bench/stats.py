# SPDX-License-Identifier: Apache-2.0
"""Medians, spread and ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

# rounds -> samples
Rounds = list[list[float]]


@dataclass(frozen=True)
class Summary:
    median: float
    p10: float
    p90: float


def percentile(values: Sequence[float], fraction: float) -> float:
    """Linear between the two nearest ranks."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(rounds: Rounds) -> Summary:
    values = [value for samples in rounds for value in samples]
    return Summary(statistics.median(values), percentile(values, 0.1), percentile(values, 0.9))


def medians(rounds: Rounds) -> list[float]:
    return [statistics.median(samples) for samples in rounds]


def ratio(peer: Rounds, ours: Rounds) -> float:
    """Median over the rounds of peer/ours: above 1 when ours is faster."""
    pairs = zip(medians(peer), medians(ours), strict=True)
    return statistics.median(p / o for p, o in pairs)


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def interleave(
    samplers: Mapping[str, Callable[[], list[float]]], rounds: int
) -> tuple[dict[str, Rounds], dict[str, Exception]]:
    """Every sampler once a round, each round starting with another one.

    Clocks and temperature drift; what is compared has to drift together. A sampler that raises is
    left out from then on and reported.
    """
    taken: dict[str, Rounds] = {name: [] for name in samplers}
    failed: dict[str, Exception] = {}
    names = list(samplers)
    for number in range(rounds):
        start = number % len(names) if names else 0
        for name in names[start:] + names[:start]:
            if name in failed:
                continue
            try:
                taken[name].append(samplers[name]())
            except Exception as error:
                failed[name] = error
    return {name: taken[name] for name in names if name not in failed}, failed
