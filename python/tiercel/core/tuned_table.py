# SPDX-License-Identifier: Apache-2.0
"""Tuned configurations of an operator whose choice is made in Python; as kernels/sm90/tuned.h."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

Config = tuple[int, ...]


class Table:
    """Readers take no lock: what they read is replaced as a whole, and never changed."""

    def __init__(self) -> None:
        self._devices: dict[int, dict[tuple[Any, ...], list[tuple[int, Config]]]] = {}
        self._told = False

    def set(self, device: int, problems: Iterable[tuple[Any, ...]]) -> None:
        """Adds problems (dtype, *sizes, [(tokens, configuration)]) of a device, or replaces them;
        none at all says that the device was looked at."""
        found = dict(self._devices.get(device, {}))
        for *problem, configs in problems:
            found[tuple(problem)] = sorted(configs)
        self._devices[device] = found

    def find(
        self, device: int, problem: tuple[Any, ...], tokens: int, miss: Callable[[], None]
    ) -> Config | None:
        """The configuration of the nearest tuned token count, by ratio; None where the problem has
        none, or none within a factor of two beyond those tuned. `miss` is called once in a process,
        where a device that was looked at has no file for the problem."""
        problems = self._devices.get(device)
        if problems is None:
            return None
        configs = problems.get(problem)
        if configs is None and not self._told:
            self._told = True
            miss()
        if not configs or tokens > 2 * configs[-1][0] or 2 * tokens < configs[0][0]:
            return None
        return min(configs, key=lambda entry: abs(math.log(entry[0] / tokens)))[1]
