# SPDX-License-Identifier: Apache-2.0
"""Judges the findings of all processes against the exceptions."""

import collections
import dataclasses
import re

from exceptions import TOOLS, Rule


@dataclasses.dataclass
class Job:
    """A process: a few tests of one file under one tool."""

    tool: str
    name: str
    tests: list[str]


@dataclasses.dataclass
class Outcome:
    job: Job
    seconds: float
    problem: str = ""
    foreign: int = 0
    findings: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    failed: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Verdict:
    """Errors, what was excepted, and exceptions that did not occur though their tests ran."""

    errors: list[str]
    excepted: list[str]
    stale: list[str]


def judge(outcomes: list[Outcome], rules: list[Rule]) -> Verdict:
    errors, excepted = [], []
    seen: collections.Counter = collections.Counter()
    total: collections.Counter = collections.Counter()
    where: dict[tuple, str] = {}
    for outcome in outcomes:
        for (kernel, message), count in outcome.findings.items():
            rule = next((r for r in rules if r.covers(outcome.job.tool, kernel, message)), None)
            if rule:
                seen[rule] += count
            else:
                key = (outcome.job.tool, kernel, message)
                total[key] += count
                where.setdefault(key, outcome.job.name)
    for (tool, kernel, message), count in total.most_common():
        of = f" in {kernel}" if kernel else ""
        first = f"{tool}/{where[tool, kernel, message]}.log"
        errors.append(f"{message}{of}: {count} times, first in {first}")
    for outcome in outcomes:
        tool = outcome.job.tool
        if outcome.problem:
            errors.append(f"{tool}/{outcome.job.name}: {outcome.problem}")
        for test in outcome.failed:
            ended = [
                r for r in seen if r.tool == tool and r.ends_kernel and re.search(r.test, test)
            ]
            if not ended:
                errors.append(f"{tool}/{outcome.job.name}: {test} failed")
    for rule, count in seen.items():
        excepted.append(f"{count} times {rule} ({rule.reason})")
    used = {outcome.job.tool for outcome in outcomes}
    excepted += [
        f"left out: {rule} ({rule.reason})"
        for rule in rules
        if rule.leave_out and rule.tool in used
    ]
    ran = {tool: [] for tool in TOOLS}
    for outcome in outcomes:
        if not outcome.problem:
            ran[outcome.job.tool] += outcome.job.tests
    stale = [
        str(rule)
        for rule in rules
        if rule not in seen
        and not rule.leave_out
        and any(re.search(rule.test, test) for test in ran[rule.tool])
    ]
    return Verdict(errors, excepted, stale)
