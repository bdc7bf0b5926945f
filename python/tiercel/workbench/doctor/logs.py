# SPDX-License-Identifier: Apache-2.0
"""The usual failures of CUDA builds and runs, and what makes builds slow, by their logs."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TextIO

from tiercel import _terminal
from tiercel._terminal import plain, without_colours
from tiercel.workbench.doctor import RED
from tiercel.workbench.doctor.kinds import KINDS, WORDS, Kind

_PIECE = 4096  # what a pattern sees at once
_OVERLAP = 512  # so that what lies across two pieces is seen
_LINE = 1 << 20  # of a longer line, the rest is left


@dataclass(frozen=True)
class Finding:
    """The meaning of a line of a log: the first such line, and how many there were."""

    name: str
    level: str  # red: a failure, yellow: it only takes longer
    line: int
    seen: str
    means: str
    do: str
    count: int = 1


_KINDS = KINDS
_PATTERNS = [(kind, WORDS[kind.name], re.compile(kind.pattern)) for kind in _KINDS]


def lines_of(file: TextIO) -> Iterator[str]:
    """A file's lines, each cut where it is longer than any that tells something."""
    while line := file.readline(_LINE):
        rest = line
        while rest and not rest.endswith("\n"):
            rest = file.readline(_LINE)
        yield line


def diagnose(lines: Iterable[str]) -> list[Finding]:
    """Each kind once, by its first line; failures first."""
    found: dict[str, Finding] = {}
    for number, line in enumerate(lines, 1):
        for kind, match in _kinds_of(without_colours(line[:_LINE])):
            if kind.name in found:
                earlier = found[kind.name]
                found[kind.name] = replace(earlier, count=earlier.count + 1)
            else:
                seen = _shortened(match.string, match.start())
                facts = (kind.name, kind.level, number, seen, kind.means, kind.do)
                found[kind.name] = Finding(*facts)
    return sorted(found.values(), key=lambda f: (f.level != RED, f.line))


def _kinds_of(line: str) -> Iterator[tuple[Kind, "re.Match[str]"]]:
    """Each kind that a line is of, once."""
    seen: dict[str, tuple[Kind, re.Match[str]]] = {}
    for start in range(0, max(len(line), 1), _PIECE - _OVERLAP):
        piece = line[start : start + _PIECE]
        for kind, words, pattern in _PATTERNS:
            for word in words:
                if word in piece:
                    break
            else:
                continue
            if kind.name not in seen and (match := pattern.search(piece)) and kind.applies(match):
                seen[kind.name] = kind, match
        if start + _PIECE >= len(line):
            break
    told = any(not kind.rest and kind.level == RED for kind, _ in seen.values())
    for kind, match in seen.values():
        if not (kind.rest and told):
            told |= kind.rest
            yield kind, match


def _shortened(line: str, start: int, width: int = 160) -> str:
    text = line.rstrip()
    if len(text) > width:
        first = max(min(start - width // 4, len(text) - width), 0)
        text = f"{'...' if first else ''}{text[first : first + width].strip()}..."
    return plain(text.strip())


def as_text(found: list[Finding], name: str) -> str:
    if not found:
        shown = _terminal.line(name)
        return f"{shown}: none of the usual failures. What came first is most telling, not last."
    parts = []
    for finding in found:
        times = f", {finding.count} times" if finding.count > 1 else ""
        parts.append(
            f"{finding.level:<6}  {finding.name} (line {finding.line}{times})\n"
            f"        {finding.seen}\n"
            f"        means: {finding.means}\n"
            f"        do:    {finding.do}"
        )
    return "\n\n".join(parts)
